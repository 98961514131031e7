"""Transcripts to score, and NIST's scorer, shared by several test files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

SCTK = Path(shutil.which("sclite") or "/usr/lib/sctk/bin/sclite").parent
# Why a test with that oracle is skipped; the end of a run says so.
SCLITE = "sclite is not installed (Debian's package sctk)"
needs_sclite = pytest.mark.skipif(not (SCTK / "sclite").exists(), reason=SCLITE)


def write_data(
    folder: Path, rows: list[tuple[str, str, str, str, str]], clients: bool = True
) -> tuple[Path, Path]:
    """Write (utterance, speaker, client, reference, hypothesis) rows; return data, hypotheses."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = sorted(rows)
    tables = {"text": 3, "utt2spk": 1, "hyp": 4} | ({"utt2client": 2} if clients else {})
    for name, column in tables.items():
        lines = (f"{row[0]} {row[column]}".rstrip(" ") + "\n" for row in rows)
        (folder / name).write_text("".join(lines), encoding="utf-8")
    return folder, folder / "hyp"
