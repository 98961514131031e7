"""Reading of Whisper's tokenizer, and of the tokens that decoding suppresses, from a folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtools.core.errors import UserError
from fedtools.core.json_files import parse_object, read_object
from fedtools.core.text_files import read_text

END = "<|endoftext|>"
START = "<|startoftranscript|>"
TASKS = ("translate", "transcribe")
PREVIOUS = "<|startofprev|>"
NO_TIMESTAMPS = "<|notimestamps|>"
# Number of timestamps from 0 to 30 seconds in steps of 0.02, which follow all other tokens.
_TIMESTAMPS = 1501
# OpenAI's own rule: English-only models have GPT-2's vocabulary, which is one token shorter.
_MULTILINGUAL = 51_865
_LANGUAGE = re.compile(r"<\|[a-z]{2,3}\|>")
_DAMAGED = "the file is damaged, or not from Whisper"


@dataclass(frozen=True)
class Tokens:
    """A tokenizer: the text of its file, the ids of its special tokens, and its size."""

    text: str
    special: dict[str, int]
    vocabulary: int

    @property
    def multilingual(self) -> bool:
        """Return whether the language is selected by a token."""
        return self.vocabulary >= _MULTILINGUAL

    @property
    def languages(self) -> dict[str, int]:
        """Return the ids of language tokens such as <|en|>."""
        return {name: one for name, one in self.special.items() if _LANGUAGE.fullmatch(name)}


@dataclass(frozen=True)
class Suppressed:
    """Suppressed tokens: always, and at the start; and the attention heads that align with time."""

    always: list[int]
    first: list[int]
    heads: list[list[int]] | None


def read_tokenizer(folder: Path, vocabulary: int) -> Tokens:
    """Read the tokenizer.json of a folder, for a model with a vocabulary of the given size.

    Raises:
        UserError: if the file is missing or damaged, or belongs to a model of another vocabulary.
    """
    path = folder / "tokenizer.json"
    remedy = "give a folder that has it by --tokenizer"
    text = read_text(path, remedy=remedy)
    content = parse_object(text, path, _DAMAGED)
    model, added = content.get("model"), content.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict) or not isinstance(added, list):
        raise UserError("no model.vocab and added_tokens", path=path, remedy=_DAMAGED)
    special = {}
    for token in added:
        sound = isinstance(token, dict) and isinstance(token.get("content"), str)
        if not sound or type(token.get("id")) is not int:
            raise UserError("added_tokens have no content or id", path=path, remedy=_DAMAGED)
        if token.get("special"):
            special[token["content"]] = token["id"]
    for name in (END, START, *(f"<|{task}|>" for task in TASKS), PREVIOUS, NO_TIMESTAMPS):
        if name not in special:
            raise UserError(f"no token {name}", path=path, remedy=_DAMAGED)
    if any(type(one) is not int or not 0 <= one < vocabulary for one in vocab.values()):
        problem = f"a token's id is not below the model's vocabulary size {vocabulary}"
        raise UserError(problem, path=path, remedy=_DAMAGED)
    if (expected := special[NO_TIMESTAMPS] + 1 + _TIMESTAMPS) != vocabulary:
        problem = f"the tokenizer is for a model of {expected} tokens; this one has {vocabulary}"
        raise UserError(problem, path=path, remedy=remedy)
    ordered = dict(sorted(special.items(), key=lambda item: item[1]))
    return Tokens(text, ordered, vocabulary)


def read_suppressed(folder: Path, tokens: Tokens) -> tuple[Suppressed, list[str]]:
    """Read the tokens that decoding suppresses, and return them with notes for users.

    CTranslate2 has them in config.json, Hugging Face in generation_config.json.
    """
    path = folder / "generation_config.json"
    keys = ("suppress_tokens", "begin_suppress_tokens")
    if not path.exists():
        path, keys = folder / "config.json", ("suppress_ids", "suppress_ids_begin")
    content = read_object(path, _DAMAGED) if path.exists() else {}
    always, first = (_numbers(content, key, tokens.vocabulary, path) for key in keys)
    heads = content.get("alignment_heads")
    if heads is not None and not _are_heads(heads):
        raise UserError("alignment_heads are not pairs of numbers", path=path)
    notes = [] if always else [f"{folder} names no token to suppress: decoding may write any"]
    return Suppressed(always, first or [tokens.special[END]], heads), notes


def _numbers(content: dict[str, Any], key: str, vocabulary: int, path: Path) -> list[int]:
    found = content.get(key) or []
    if not isinstance(found, list) or any(
        type(one) is not int or not 0 <= one < vocabulary for one in found
    ):
        raise UserError(f"{key} are not tokens of the model", path=path)
    return found


def _are_heads(heads: object) -> bool:
    return isinstance(heads, list) and all(
        isinstance(pair, list) and [type(one) for one in pair] == [int, int] for pair in heads
    )
