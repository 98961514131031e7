"""Keyword spotting: small networks over clips, many clients at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedtools.data.clips import LENGTH, Clips
from fedtools.methods.base import LABELS, MODEL, ROOT_DATA
from fedtools.models.pretrained.folder import with_sum
from fedtools.models.pretrained.options import ASSET, FITTED, PROJECTION
from fedtools.tasks import TASKS
from fedtools.tasks.facts import Facts, check_assets
from fedtools.tasks.identity import of_clips
from fedtools.tasks.kws.facts import of_site


def _files(data: Mapping[str, Path], assets: Mapping[str, Path], where: str | Path) -> list[Path]:
    check_assets(assets, (), where, (ASSET,))
    files = []
    # Sites tell of classes and length: see `fedtools.tasks.site_facts`.
    if "train" in data:
        length = data["train"] / LENGTH
        files = [data["train"] / "classes.txt", *([length] if length.exists() else [])]
    return files + [assets[name] / file for name in assets for file in (PROJECTION, FITTED)]


def _sizes(folder: Path) -> dict[str, int]:
    clips = Clips.read(folder)
    return dict(zip(clips.clients, clips.sizes.tolist(), strict=True))


FACTS = TASKS.register("kws")(
    Facts(
        opens="fedtools.tasks.kws.task:KwsTask",
        parts=(MODEL, LABELS, ROOT_DATA),
        columns=("clips", "loss", "errors", "accuracy"),
        rate="accuracy",
        sign=-1,
        counted="clips",
        identity=of_clips,
        files=_files,
        sizes=_sizes,
        fixed_model=with_sum,
        by_client=False,
        of_site=of_site,
    )
)
