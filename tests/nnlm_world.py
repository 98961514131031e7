"""Small neural language models, shared by several test files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
import yaml
from hypothesis import strategies as st

from fedtools.lm.nnlm_network import NnlmOptions, build_nnlm

SMALL = {"embed_unit": 12, "att_unit": 16, "head": 2, "unit": 24, "layer": 2}
OPTIONS = {
    "lm_conf": {**SMALL, "dropout_rate": 0.1},
    "epochs": 4,
    "batch_words": 120,
    "min_count": 2,
    "optim_conf": {"lr": 0.01},
    "scheduler": "warmuplr",
    "scheduler_conf": {"warmup_steps": 20},
}
WORDS = [f"w{number}" for number in range(12)]


def sentences(number: int, seed: int) -> list[str]:
    """Return sentences of a grammar in which every word has two successors."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(number):
        word, line = int(rng.integers(len(WORDS))), []
        for _ in range(rng.integers(1, 8)):
            line.append(WORDS[word])
            word = (5 * word + int(rng.integers(2))) % len(WORDS)
        found.append(" ".join(line))
    return found


def write_texts(folder: Path) -> None:
    train, valid = sentences(120, 0), sentences(30, 1)
    train[3] += " rare"
    (folder / "text").write_text("".join(f"u{i:03d} {w}\n" for i, w in enumerate(train[:90])))
    (folder / "plain").write_text("".join(f"{words}\n" for words in train[90:]))
    (folder / "valid").write_text("".join(f"v{i:03d} {w}\n" for i, w in enumerate(valid)))
    (folder / "nnlm.yaml").write_text(
        yaml.safe_dump({"nnlm": OPTIONS, "other": {**OPTIONS, "epochs": 3}})
    )


def command(folder: Path, out: Path, *more: str | Path) -> list[str | Path]:
    words = ["train-nnlm", folder / "text", out, "--plain", folder / "plain"]
    return [*words, "--valid", folder / "valid", "--config", folder / "nnlm.yaml", *more]


def network(pos_enc: str | None = None, words: int = 9) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_nnlm(NnlmOptions(pos_enc=pos_enc, **SMALL), words).eval()


@torch.no_grad()
def alone(model: torch.nn.Module, ids: list[int]) -> list[float]:
    """Compute ln p of each word by ESPnet's forward pass, with a softmax over the words alone."""
    words = model.decoder.weight.shape[0] - 1
    logits = model(torch.tensor([[words, *ids[:-1]]]), None)[0][0].double()
    found = []
    for row, word in zip(logits, ids, strict=True):
        total = sum(math.exp(row[other]) for other in range(words))
        found.append(float(row[word]) - math.log(total))
    return found


ids = st.lists(st.integers(1, 8), max_size=6).map(lambda words: [*words, 0])
