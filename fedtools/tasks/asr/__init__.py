"""Speech recognition: CTC or LF-MMI models over utterances, one client after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedtools.core.config import from_mapping
from fedtools.data import symbols
from fedtools.lm.whisper_tokens import FILES as WHISPER_FILES
from fedtools.methods.base import FEATURES, MODEL, OPTIMIZER, ROOT_DATA
from fedtools.models.pretrained.folder import with_sum
from fedtools.models.pretrained.options import Generation, is_seq2seq
from fedtools.tasks import TASKS
from fedtools.tasks.asr.facts import of_site
from fedtools.tasks.facts import Facts, check_assets, sizes_of_utterances
from fedtools.tasks.identity import of_utterances

# LM weight and word score of the search that labels clients' features; those in an experiment's
# weights.yaml are for its own hypotheses.
SERVER_WEIGHTS = "server_weights.yaml"


def _files(data: Mapping[str, Path], assets: Mapping[str, Path], where: str | Path) -> list[Path]:
    check_assets(assets, ("tokens",), where, ("denominator", "base", "lm", "weights"))
    files = [assets["tokens"] / name for name in (*symbols.FILES, *WHISPER_FILES)]
    files = [file for file in files if file.exists()]
    # A missing file is reported when it is read.
    files += [
        assets[name] / f"{name}.safetensors" for name in ("denominator", "base") if name in assets
    ]
    if "lm" in assets:
        from fedtools.lm.ngram import NgramFolder

        ngram = NgramFolder.read(assets["lm"])
        files += [ngram.path / "lm.yaml", ngram.binary, ngram.vocabulary]
    return files + ([assets["weights"] / SERVER_WEIGHTS] if "weights" in assets else [])


def _with_search(
    model: Mapping[str, Any], training: Mapping[str, Any], where: str | Path
) -> Mapping[str, Any]:
    """Return the section `training` with all options of the search of a model with a decoder."""
    if not is_seq2seq(model):
        return training
    search = from_mapping(Generation, training.get("search"), f"{where}: training.search")
    listed = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(search).items()
    }
    return {**training, "search": listed}


FACTS = TASKS.register("asr")(
    Facts(
        opens="fedtools.tasks.asr.task:AsrTask",
        parts=(MODEL, OPTIMIZER, FEATURES, ROOT_DATA),
        columns=("utterances", "loss", "words", "errors", "wer"),
        rate="wer",
        sign=1,
        counted="words",
        identity=of_utterances,
        files=_files,
        sizes=sizes_of_utterances,
        fixed_model=with_sum,
        fixed_training=_with_search,
        by_client=True,
        of_site=of_site,
        reads_labels=lambda training: (
            "transcripts" in (training.get("labels", "transcripts"), training.get("server_labels"))
        ),
    )
)
