#!/usr/bin/env python3
"""Whisper's decoding: windows of several lengths, and faster-whisper's on the same model.

    bench_whisper.py FOLDER DATA [--utterances 80] [--windows 1 10 30] [--beams 1 5]
        [--searches once again fallbacks] [--ct2 FOLDER]

FOLDER is a Hugging Face folder of an English model, DATA a Kaldi data directory with recordings and
transcripts, of which --utterances are taken, evenly spread. Prints word error rates by the
text rule "spoken", insertions, CPU seconds an utterance, from samples to text, and how many texts
repeat themselves: searched for once; again, if they repeat themselves, which is the default; and
with Whisper's own fallbacks after that. faster-whisper is not installed with this project; --ct2 is
the same model in CTranslate2's format, which it takes without fallbacks, timestamps or a detector
of speech, in float32. All in one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtools.audio.log_mel import FRAMES, LogMel
from fedtools.audio.wave import read_wave
from fedtools.core.tables import format_table
from fedtools.data.datadir import read_table
from fedtools.decode.repetition import repeats
from fedtools.lm.whisper_tokens import WhisperTokens
from fedtools.models.pretrained.options import Generation
from fedtools.models.pretrained.whisper import Whisper
from fedtools.score.align import count_errors
from fedtools.score.text_rule import plain
from fedtools.tasks.asr.data import Batch
from fedtools.tasks.asr.search import generate

# Samples from -1 to 1 at 16 kHz -> words.
Decoder = Callable[[np.ndarray], str]


SEARCHES: dict[str, dict[str, Any]] = {
    "once": {"no_repeat_ngram_size": 0},
    "again": {},
    "fallbacks": {"temperatures": (0.2, 0.4, 0.6, 0.8, 1.0), "no_speech_threshold": 0.6},
}


def ours(folder: Path, window: int, beam: int, search: str) -> Decoder:
    config = {"network": "hf", "path": str(folder), "criterion": "seq2seq", "window": window}
    model = Whisper({**config, "adapt": {"kind": "none"}}, "bench", None).eval()
    tokens, front = WhisperTokens.load(folder), LogMel()
    options, prompt = Generation(beam=beam, **SEARCHES[search]), torch.tensor([tokens.prompt("en")])

    @torch.no_grad()
    def decode(samples: np.ndarray) -> str:
        mel = front(torch.from_numpy(samples)[None] * 32768)
        encoded = model.encode(mel, torch.tensor([mel.shape[1]]))
        batch = Batch(prompt=prompt, seed=torch.tensor([len(samples)]))
        batch["seconds"] = torch.tensor([mel.shape[1] / FRAMES])
        [[(found, _)]] = generate(model, tokens, encoded, batch, options)
        return tokens.decode(found)

    return decode


def theirs(folder: Path, beam: int) -> Decoder:
    from faster_whisper import WhisperModel

    model = WhisperModel(str(folder), device="cpu", compute_type="float32", cpu_threads=1)
    plainly = {"temperature": 0.0, "without_timestamps": True, "vad_filter": False}
    no_fallback = ("no_speech_threshold", "log_prob_threshold", "compression_ratio_threshold")
    options = plainly | dict.fromkeys(no_fallback) | {"condition_on_previous_text": False}

    def decode(samples: np.ndarray) -> str:
        segments, _ = model.transcribe(samples, beam_size=beam, **options)
        return " ".join(segment.text for segment in segments)

    return decode


def measure(
    decode: Decoder, waves: dict[str, np.ndarray], texts: dict[str, str]
) -> tuple[str, ...]:
    """Return WER %, insertions, CPU seconds per utterance, and texts that repeat themselves."""
    errors = words = insertions = 0
    decode(next(iter(waves.values())))
    begin = time.process_time()
    found = {name: decode(samples) for name, samples in waves.items()}
    seconds = (time.process_time() - begin) / len(waves)
    for name, text in found.items():
        reference = plain(texts[name], "spoken").split()
        counts = count_errors(reference, plain(text, "spoken").split())
        errors += counts.substitutions + counts.deletions + counts.insertions
        words, insertions = words + len(reference), insertions + counts.insertions
    lost = sum(map(repeats, found.values()))
    return f"{100 * errors / words:.1f}", str(insertions), f"{seconds:.2f}", str(lost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--utterances", type=int, default=80)
    parser.add_argument("--windows", type=int, nargs="*", default=[1, 10, 30])
    parser.add_argument("--beams", type=int, nargs="*", default=[1, 5])
    parser.add_argument("--searches", choices=SEARCHES, nargs="*", default=[*SEARCHES])
    parser.add_argument("--ct2", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    places, texts = read_table(options.data / "wav.scp"), read_table(options.data / "text")
    names = list(texts)[:: max(1, len(texts) // options.utterances)]
    waves = {name: np.asarray(read_wave(places[name]).samples, np.float32) for name in names}
    rows: list[tuple[str, ...]] = []
    for beam in options.beams:
        for window in options.windows:
            for search in options.searches:
                found = measure(ours(options.folder, window, beam, search), waves, texts)
                rows.append((f"window {window} s, {search}", str(beam), *found))
                print("\t".join(rows[-1]), flush=True)
        if options.ct2:
            found = measure(theirs(options.ct2, beam), waves, texts)
            rows.append(("faster-whisper", str(beam), *found))
            print("\t".join(rows[-1]), flush=True)
    header = ("decoder", "beam", "WER %", "insertions", "CPU s", "repeat themselves")
    print(f"\n{len(names)} utterances\n" + format_table(header, rows))


if __name__ == "__main__":
    main()
