#!/usr/bin/env python3
"""Check a data directory as Kaldi's validate_data_dir.sh does, and more strictly.

Exit status 0 and one line on stdout if all is well; 1 and one line on stderr that names the file
and the line if not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fedtools.audio.wave import recording_seconds
from fedtools.files.errors import UserError
from fedtools.files.validate import validate_data_dir


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Check a data directory: sorted, unique, consistent, and cleanly spaced.",
        epilog="The --no-... options let a file be absent; where it is there, it is checked. Audio "
        "files are there and not empty, and segments lie within them; else no audio is opened: "
        "extract-features tells which is damaged, cut off, of no samples or of more than two "
        "channels. Some of what is refused in text, commands let pass: score takes transcripts of "
        "no words, and any whitespace but a space as part of a word.",
    )
    parser.add_argument("data_dir", metavar="DATA_DIR")
    parser.add_argument("--no-feats", action="store_true", help="feats.scp may be absent; not read")
    parser.add_argument("--no-text", action="store_true", help="text may be absent")
    parser.add_argument("--no-wav", action="store_true", help="wav.scp may be absent")
    options = parser.parse_args()
    try:
        summary = validate_data_dir(
            options.data_dir,
            feats=not options.no_feats,
            text=not options.no_text,
            wav=not options.no_wav,
            recording_seconds=recording_seconds,
        )
    except UserError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return 1
    print(f"{options.data_dir}: {summary}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
