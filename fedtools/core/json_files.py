"""JSON files that others wrote, such as those of pretrained models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedtools.core.errors import UserError
from fedtools.core.text_files import SMALL_FILE, read_text


def read_object(
    path: str | Path, remedy: str | None = None, limit: int = SMALL_FILE
) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Args:
        remedy: how to mend a file that does not.
        limit: the largest size of the file in bytes.

    Raises:
        UserError: if the file is missing, too large, or no JSON object of Unicode text.
    """
    return parse_object(read_text(path, limit, remedy), path, remedy)


def parse_object(text: str, path: str | Path, remedy: str | None = None) -> dict[str, Any]:
    """Parse the text of a file; arguments and errors as in `read_object`."""
    try:
        read = json.loads(text)
        # Half of a surrogate pair is valid JSON, but nothing that can be written or printed.
        if "\\u" in text:
            json.dumps(read, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"not JSON: {reason}", path=path, remedy=remedy) from None
    if not isinstance(read, dict):
        raise UserError("not a JSON object", path=path, remedy=remedy)
    return read
