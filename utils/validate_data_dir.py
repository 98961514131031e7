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
from fedtools.core.errors import UserError
from fedtools.data.validate import validate_data_dir


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Check a data directory: sorted, unique, consistent, and cleanly spaced.",
        epilog="The --no-... options allow a file to be absent; if it exists, it is checked. Audio "
        "files must exist and not be empty, and segments must lie within them; otherwise audio is "
        "not opened: extract-features reports audio that is damaged, truncated, without samples or "
        "with more than two channels. Commands accept some text that is refused here: score "
        "accepts transcripts without words, and whitespace other than spaces as a part of words.",
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
