"""Rescoring with word counts: clients rescore their utterances, and exchange counts of words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedtools.methods.base import COUNTS
from fedtools.tasks import TASKS
from fedtools.tasks.facts import Facts, check_assets, sizes_of_utterances
from fedtools.tasks.identity import of_rescored


def _files(data: Mapping[str, Path], assets: Mapping[str, Path], where: str | Path) -> list[Path]:
    check_assets(assets, (), where)
    return []


FACTS = TASKS.register("rescore")(
    Facts(
        opens="fedtools.tasks.rescore.task:RescoreTask",
        parts=(COUNTS,),
        columns=("utterances", "words", "errors", "wer"),
        rate="wer",
        sign=1,
        identity=of_rescored,
        files=_files,
        sizes=sizes_of_utterances,
        by_client=True,
        reads_labels=lambda training: False,
    )
)
