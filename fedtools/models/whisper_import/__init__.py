"""Whisper models in the formats of CTranslate2 and of OpenAI, converted to Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

from fedtools.files.atomic import check_new
from fedtools.files.errors import UserError
from fedtools.models.whisper_import.ctranslate2 import read_ctranslate2
from fedtools.models.whisper_import.folder import write_folder
from fedtools.models.whisper_import.openai import read_openai
from fedtools.models.whisper_import.tokens import read_suppressed, read_tokenizer


def import_whisper(source: Path, out: Path, tokenizer: Path | None = None) -> list[str]:
    """Convert a Whisper model to a folder that `transformers` loads.

    Nothing of the source is executed or unpickled, and its tensors keep their precision; tensors of
    8 bits get that of the tensors beside them.

    Args:
        source: a CTranslate2 folder, or OpenAI's .pt file.
        out: the folder to be made; it appears when it is whole.
        tokenizer: a folder of the same vocabulary, of CTranslate2 or Hugging Face, whose tokenizer
            is taken; a .pt file has none of its own.

    Returns:
        what is to be known of the result, a sentence for each.

    Raises:
        UserError: if the source is damaged, is not Whisper, or does not fit its tokenizer, or there
            is something at `out` already.
    """
    check_new(out)
    if source.is_dir():
        if not (source / "model.bin").exists():
            problem = "no model.bin: not a CTranslate2 folder"
            remedy = "a folder of Hugging Face's needs no import"
            raise UserError(problem, path=source, remedy=remedy)
        read, tokenizer = read_ctranslate2, tokenizer or source
        source = source / "model.bin"
    elif tokenizer is None:
        problem = "a checkpoint of OpenAI's holds no tokenizer"
        raise UserError(problem, path=source, remedy="name a folder that has it in --tokenizer")
    else:
        read = read_openai
    whisper = read(source)
    tokens = read_tokenizer(tokenizer, whisper.sizes.vocabulary)
    suppressed, said = read_suppressed(tokenizer, tokens)
    write_folder(out, whisper, tokens, suppressed)
    return [*whisper.said, *said]
