"""Whisper's byte-level tokens, and the prompt with language and task."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedtools.files.errors import UserError
from fedtools.files.symbols import nfc
from fedtools.files.text_files import read_text

FILES = ("tokenizer.json", "generation_config.json")
_REMEDY = "give the folder of a Whisper model as --asset tokens=FOLDER"


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
        try:
            self.multilingual = bool(settings.get("is_multilingual"))
            self.start = int(settings["decoder_start_token_id"])
            self.end = int(settings["eos_token_id"])
            self._no_times = int(settings["no_timestamps_token_id"])
            self._languages: dict[str, int] = settings["lang_to_id"] if self.multilingual else {}
            self._task = int(settings["task_to_id"]["transcribe"]) if self.multilingual else 0
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            where = path / "generation_config.json"
            raise UserError(f"not of a Whisper model: {error}", path=where) from None
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
        try:
            pieces = Tokenizer.from_str(read_text(folder / FILES[0]))
        except Exception as error:
            problem = f"not the tokens of a model: {' '.join(str(error).split())[:200]}"
            raise UserError(problem, path=folder / FILES[0]) from None
        try:
            settings = json.loads(read_text(folder / FILES[1]))
        except ValueError as error:
            raise UserError(f"not JSON: {error}", path=folder / FILES[1]) from None
        return cls(pieces, settings, folder, language)

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, words: str) -> list[int]:
        """Convert words, separated by blanks, to token ids, none of them special."""
        # Whisper writes a blank before every word; what looks like a special token is spelled out.
        text = words.replace("<|", "< |")
        return list(self._pieces.encode(f" {text}", add_special_tokens=False).ids) if words else []

    def decode(self, ids: Iterable[int]) -> str:
        """Convert token ids to words, separated by single blanks, without special tokens."""
        known = [index for index in ids if index < len(self.tokens)]
        return nfc(" ".join(self._pieces.decode(known, skip_special_tokens=True).split()))

    def prompt(self, language: str | None) -> list[int]:
        """Return the decoder's prompt: the language and the task, without time stamps.

        Args:
            language: a code such as "de" or "zh-CN"; None for the default.

        Raises:
            UserError: if a multilingual model is given no language, or one that it does not know.
        """
        if not self.multilingual:
            return [self.start, self._no_times]
        code = (language or self.language or "").lower().partition("-")[0]
        place = self._languages.get(f"<|{code}|>")
        if place is None:
            problem = f"the model knows no language {code!r}" if code else "no language is given"
            remedy = "set model.language, or give the data an utt2lang"
            raise UserError(problem, path=self._path, remedy=remedy)
        return [self.start, place, self._task, self._no_times]
