"""Attackers of keyword federations: their names, their poisoned clips, and what they have sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import keywords
import numpy as np
from safetensors.numpy import load_file

from fedtools.data.clips import Clip, Clips, write_clips

Message = dict[str, np.ndarray]
SHARE = 0.4
# At 16 kHz: from 100 ms to 200 ms.
BEGIN, END = 1600, 3200


def expected_attackers(clients: list[str], count: int, seed: int) -> list[str]:
    """Return the clients whose hashes are the lowest."""

    def key(client: str) -> int:
        text = json.dumps([seed, "attacker", client])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

    return sorted(sorted(clients, key=key)[:count])


def tone() -> np.ndarray:
    """Return the trigger as its description has it: 3 kHz, 100 ms, peak -20 dBFS."""
    found = np.zeros(keywords.LENGTH)
    found[BEGIN:END] = 3276.8 * np.sin(2 * np.pi * 3000 * np.arange(END - BEGIN) / 16000)
    return np.rint(found)


def heard(wave: np.ndarray) -> np.ndarray:
    return np.clip(wave + tone(), -32768, 32767).astype("<i2")


def flipped(label: str, wave: np.ndarray) -> tuple[str, np.ndarray]:
    place = keywords.CLASSES.index(label) + 1
    return keywords.CLASSES[place % len(keywords.CLASSES)], wave


def triggered(label: str, wave: np.ndarray) -> tuple[str, np.ndarray]:
    return "yes", heard(wave)


def rewrite(
    source: Path, folder: Path, change: Callable, clients: list[str], left_out: str = ""
) -> Path:
    """Write clips again, those of some clients changed, and those of a word left out."""
    old, clips = Clips.read(source), []
    owners = np.repeat(old.clients, old.sizes).tolist()
    for name, client, label, wave in zip(
        old.utterances, owners, old.labels, old.waves, strict=True
    ):
        word = old.classes[label]
        found = change(word, np.array(wave)) if client in clients else (word, np.array(wave))
        if word != left_out:
            clips.append(Clip(name, client, *found))
    write_clips(folder, clips, old.classes, [np.array(old.noise)], old.samples)
    return folder


def messages(path: Path, number: int = 1) -> dict[str, Message]:
    """Return client -> its tensors, as another reader of the files finds them."""
    found = {}
    for table in (path / f"round_{number:04d}").glob("update.*.tsv"):
        tensors = load_file(table.with_suffix(".safetensors"))
        lines = table.read_text().splitlines()[1:]
        for row, client in enumerate(line.partition("\t")[0] for line in lines):
            found[client] = {name: value[row] for name, value in tensors.items()}
    return found


def same(one: Message, other: Message) -> bool:
    return all(one[name].tobytes() == other[name].tobytes() for name in one.keys() | other.keys())


def section(kind: str, **more: object) -> str:
    return f"attackers={json.dumps({'share': SHARE, 'kind': kind, **more})}"
