"""Fine-tuning of the neural language model: clients train it, and rescore their N-best lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedtools.methods.base import MODEL, OPTIMIZER
from fedtools.tasks import TASKS
from fedtools.tasks.facts import check_assets
from fedtools.tasks.rescore import FACTS as RESCORE


def _files(data: Mapping[str, Path], assets: Mapping[str, Path], where: str | Path) -> list[Path]:
    check_assets(assets, (), where, ("weights",))
    return [assets[name] / "weights.yaml" for name in assets]


FACTS = TASKS.register("lm")(
    replace(
        RESCORE,
        opens="fedtools.tasks.lm.task:LmTask",
        parts=(MODEL, OPTIMIZER),
        files=_files,
    )
)
