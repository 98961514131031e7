"""Whisper models in the formats of CTranslate2 and of OpenAI, converted to Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

from fedtools.core.atomic import check_new
from fedtools.core.errors import UserError
from fedtools.models.pretrained.whisper_import.ctranslate2 import read_ctranslate2
from fedtools.models.pretrained.whisper_import.folder import write_folder
from fedtools.models.pretrained.whisper_import.openai import read_openai
from fedtools.models.pretrained.whisper_import.tokens import read_suppressed, read_tokenizer


def import_whisper(source: Path, out: Path, tokenizer: Path | None = None) -> list[str]:
    """Convert a Whisper model to a folder that `transformers` loads.

    Nothing in the source is executed or unpickled. Tensors keep their precision; 8-bit tensors get
    the precision of the model's other tensors.

    Args:
        source: a CTranslate2 folder, or OpenAI's .pt file.
        out: folder to create; it appears only when it is complete.
        tokenizer: a CTranslate2 or Hugging Face folder with the same vocabulary, whose tokenizer is
            used; a .pt file has no tokenizer.

    Returns:
        notes on the result, a sentence each.

    Raises:
        UserError: if the source is damaged, is not Whisper, or does not fit its tokenizer, or `out`
            exists already.
    """
    check_new(out)
    if source.is_dir():
        if not (source / "model.bin").exists():
            problem = "no model.bin: not a CTranslate2 folder"
            remedy = "a Hugging Face folder needs no import"
            if files := sorted(source.glob("*.pt")):
                remedy = f"name the file in it, {files[0]}"
            raise UserError(problem, path=source, remedy=remedy)
        read, tokenizer = read_ctranslate2, tokenizer or source
        source = source / "model.bin"
    elif tokenizer is None:
        problem = "an OpenAI checkpoint has no tokenizer"
        raise UserError(problem, path=source, remedy="give a folder that has it by --tokenizer")
    else:
        read = read_openai
    whisper = read(source)
    tokens = read_tokenizer(tokenizer, whisper.sizes.vocabulary)
    suppressed, notes = read_suppressed(tokenizer, tokens)
    write_folder(out, whisper, tokens, suppressed)
    return [*whisper.notes, *notes]
