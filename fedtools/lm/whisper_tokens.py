"""Whisper's byte-level tokens, and the prompt with language and task."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedtools.core.errors import UserError
from fedtools.core.json_files import read_object
from fedtools.data.languages import main_code
from fedtools.data.symbols import nfc

FILES = ("tokenizer.json", "generation_config.json")
# How Whisper writes a time.
_TIME = r"<\|\d+\.\d\d\|>"
# Codes of Whisper's own, for a language's main code.
_OWN = {"fil": "tl", "jv": "jw", "nb": "no"}
_REMEDY = "give the folder of a Whisper model as --asset tokens=FOLDER"


def _fixed(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a tokenizer.json without what makes tokens random, or cuts or pads texts.

    Raises:
        UserError: if it is not byte-level BPE, which is what every Whisper has.
    """
    parts = {
        name: one.get("type") if isinstance(one := content.get(name), dict) else one
        for name in ("model", "pre_tokenizer", "decoder", "normalizer")
    }
    # Files of the oldest versions do not name the type of their model.
    if parts["model"] not in ("BPE", None) or not isinstance(content.get("model"), dict):
        raise UserError(f"a model of type {parts['model']!r:.40}, not BPE", path=path)
    for name in ("pre_tokenizer", "decoder"):
        if parts[name] != "ByteLevel":
            raise UserError(f"{name}: {parts[name]!r:.40}, not ByteLevel", path=path)
    if parts["normalizer"] is not None:
        raise UserError(f"normalizer: {parts['normalizer']!r:.40}; Whisper has none", path=path)
    model = {**content["model"], "dropout": None}
    return {**content, "model": model, "truncation": None, "padding": None, "post_processor": None}


class WhisperTokens:
    """Words to token ids and back, as `fedtools.lm.tokens.Tokenizer` does it.

    Args:
        pieces: a `Tokenizer` of the library tokenizers.
        settings: the content of generation_config.json.
        path: the folder of both, for messages.
        language: of speech without a given language, such as "de"; None for no default.
    """

    token_type = "whisper"
    # Every text can be spelled.
    unknown = -1

    def __init__(self, pieces: Any, settings: Any, path: Path, language: str | None):
        self._pieces, self._path, self.language = pieces, path, language
        # By id, so that equal tokens keep their own ids; time stamps are not in the vocabulary.
        size = pieces.get_vocab_size()
        self.tokens: Sequence[str] = [pieces.id_to_token(index) or "" for index in range(size)]
        self.multilingual = bool(settings.get("is_multilingual"))
        self.start = self._mark("decoder_start_token_id", settings)
        self.end = self._mark("eos_token_id", settings)
        self._no_times = self._mark("no_timestamps_token_id", settings)
        # A fine-tuned model may have further tokens after them.
        self._times = {
            index for index, token in enumerate(self.tokens) if re.fullmatch(_TIME, token)
        }
        # In every Whisper, as in transformers.
        self.no_speech = max(0, self._no_times - 1)
        self._languages: dict[str, int] = {}
        self._task = 0
        if self.multilingual:
            codes, tasks = settings.get("lang_to_id"), settings.get("task_to_id")
            for name, one in (("lang_to_id", codes), ("task_to_id", tasks)):
                if not isinstance(one, dict):
                    raise UserError(f"{name}: no table of tokens", path=path / FILES[1])
            self._languages = {code: self._mark(code, codes) for code in codes}
            self._task = self._mark("transcribe", tasks)
        if language is not None:
            self.prompt(language)

    @classmethod
    def load(cls, folder: str | Path, language: str | None = None) -> WhisperTokens:
        """Read the tokens in a folder.

        Raises:
            UserError: if they are missing or damaged, or do not know the language.
        """
        from tokenizers import Tokenizer

        folder = Path(folder)
        for name in FILES:
            if not (folder / name).is_file():
                raise UserError("missing", path=folder / name, remedy=_REMEDY)
        where = folder / FILES[0]
        try:
            pieces = Tokenizer.from_str(json.dumps(_fixed(read_object(where), where)))
        except Exception as error:
            problem = f"not the tokens of a model: {' '.join(str(error).split())[:200]}"
            raise UserError(problem, path=where) from None
        return cls(pieces, read_object(folder / FILES[1]), folder, language)

    def _mark(self, name: str, settings: dict[str, Any]) -> int:
        """Return the token of a name; of several, such as ends, the first."""
        found = settings.get(name)
        first = found[0] if isinstance(found, list) and found else found
        if type(first) is not int or not 0 <= first < len(self.tokens):
            problem = f"{name!r} is {str(found)[:40]}, none of the {len(self.tokens)} tokens"
            remedy = "put the original model's there, if it is outdated"
            raise UserError(problem, path=self._path / FILES[1], remedy=remedy)
        return first

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        """Return whether texts are the same tokens, and prompts and ends too."""
        if not isinstance(other, WhisperTokens):
            return NotImplemented
        mine, theirs = (
            (one.tokens, one.start, one.end, one._no_times, one._task, one._languages)
            for one in (self, other)
        )
        return mine == theirs

    __hash__ = None  # type: ignore[assignment]

    def encode(self, words: str) -> list[int]:
        """Convert words, separated by blanks, to token ids, none of them special."""
        # Whisper writes a blank before every word; what looks like a special token is spelled out.
        text = words.replace("<|", "< |")
        return list(self._pieces.encode(f" {text}", add_special_tokens=False).ids) if words else []

    def decode(self, ids: Iterable[int]) -> str:
        """Convert token ids to words, separated by single blanks, without special tokens.

        Time stamps, which a decoder may write although its prompt asks for none, are no words.
        """
        known = [one for one in ids if one < len(self.tokens) and one not in self._times]
        return nfc(" ".join(self._pieces.decode(known, skip_special_tokens=True).split()))

    def prompt(self, language: str | None) -> list[int]:
        """Return the decoder's prompt: the language and the task, without time stamps.

        Args:
            language: a code such as "de", "deu" or "zh-CN"; None for the default.

        Raises:
            UserError: if a multilingual model is given no language, or if a model does not know
                the language.
        """
        code = (language or self.language or "").lower().partition("-")[0]
        main = main_code(code)
        if not self.multilingual:
            if main not in ("", "en"):
                problem = f"the model knows English alone, no language {code!r}"
                raise UserError(problem, path=self._path, remedy="take a multilingual model")
            return [self.start, self._no_times]
        names = (f"<|{name}|>" for name in (code, main, _OWN.get(main, "")))
        place = next((self._languages[name] for name in names if name in self._languages), None)
        if place is None:
            problem = f"the model knows no language {code!r}" if code else "no language is given"
            remedy = "set model.language, or give the data an utt2lang"
            raise UserError(problem, path=self._path, remedy=remedy)
        return [self.start, place, self._task, self._no_times]
