"""Beam search with an n-gram of tokens: ours against ESPnet's, on the same posteriors.

    python tests/bench/bench_decode.py [--utterances 20]

Synthetic CTC posteriors (peaky, about 200 frames, 200 tokens) of sentences that a random grammar
makes; the n-gram is estimated on other sentences of the grammar. Both decoders get the same n-gram
file, the same weights and the same beam, ESPnet's default of 20; a beam of 100 is what our N-best
lists of 20 need. Prints CPU seconds for each utterance, the ratio to ours of beam 20, and how often
the best hypotheses agree.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

from fedtools.core.atomic import write_text
from fedtools.core.tables import format_table
from fedtools.decode.beam import LN10, BeamOptions, CtcBeamDecoder
from fedtools.lm.ngram import NgramFolder, train_ngram
from fedtools.lm.tokens import Tokenizer, train_tokens

TOKENS, FRAMES = 200, 200
LM_WEIGHT = 0.5


def sentences(number: int, seed: int) -> list[str]:
    """Return sentences of a random grammar of 2000 words, each with five likely successors."""
    language, rng = np.random.default_rng(0), np.random.default_rng(seed)
    syllables = [
        "".join(pair)
        for pair in zip(
            language.choice(list("bdfgklmnprst"), 60),
            language.choice(list("aeiou"), 60),
            strict=True,
        )
    ]
    words = ["".join(language.choice(syllables, language.integers(1, 5))) for _ in range(2000)]
    follow = language.integers(0, len(words), (len(words), 5))
    made = []
    for _ in range(number):
        word, line = int(rng.integers(len(words))), []
        for _ in range(14):
            line.append(words[word])
            usual = rng.random() < 0.8
            word = int(follow[word, rng.integers(5)] if usual else rng.integers(len(words)))
        made.append(" ".join(line))
    return made


def posteriors(ids: list[int], rng: np.random.Generator) -> np.ndarray:
    """Make CTC-like log-posteriors, (frames, tokens): one or two frames a token, which
    is now and then confused with another one, and sure blanks between."""
    lengths = rng.integers(1, 3, len(ids))
    blanks = rng.multinomial(max(0, FRAMES - lengths.sum() - len(ids)), [1 / len(ids)] * len(ids))
    frames = []
    for token, length, pause in zip(ids, lengths, blanks + 1, strict=True):
        rival, sure = int(rng.integers(2, TOKENS - 1)), rng.normal(2.0, 2.0)
        for frame in range(length + pause):
            logits = rng.normal(-8.0, 1.5, TOKENS)
            logits[0] = 4.0
            if frame < length:
                logits[0], logits[token], logits[rival] = rng.normal(0, 1), 4.0, 4.0 - sure
            frames.append(logits)
    logits = np.array(frames)
    return (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)


def time_ours(tokenizer: Tokenizer, folder: Path, utterances: list[np.ndarray], beam: int):
    """Return the seconds for each utterance, and the best words."""
    options = BeamOptions(beam_size=beam, lm_weight=LM_WEIGHT, nbest=min(20, beam))
    decoder = CtcBeamDecoder.load(tokenizer, folder, options)
    start = time.process_time()
    best = [decoder.decode(log_probs)[0].words for log_probs in utterances]
    return (time.process_time() - start) / len(utterances), best


def time_espnet(
    tokenizer: Tokenizer, ngram: NgramFolder, utterances: list[np.ndarray], batch: bool
):
    """Do the same with ESPnet's CTC prefix scorer and n-gram scorer."""
    import torch
    from espnet.nets.batch_beam_search import BatchBeamSearch
    from espnet.nets.beam_search import BeamSearch
    from espnet.nets.scorers.ctc import CTCPrefixScorer
    from espnet.nets.scorers.ngram import NgramFullScorer

    class Posteriors(torch.nn.Module):
        """A CTC layer over an encoder whose output is already log-posteriors."""

        def log_softmax(self, encoded):
            return encoded

    end = len(tokenizer) - 1
    # ESPnet represents the end of a sentence by <eos>.
    token_list = [*tokenizer.tokens[:-1], "<eos>"]
    search = (BatchBeamSearch if batch else BeamSearch)(
        beam_size=20,
        weights={"ctc": 1.0, "ngram": LM_WEIGHT * LN10},
        scorers={
            "ctc": CTCPrefixScorer(Posteriors(), end),
            "ngram": NgramFullScorer(str(ngram.binary), token_list),
        },
        sos=end,
        eos=end,
        vocab_size=len(tokenizer),
        token_list=token_list,
        pre_beam_score_key=None,  # ESPnet's own setting for pure CTC
    )
    start, best = time.process_time(), []
    with torch.inference_mode():
        for log_probs in utterances:
            found = search(torch.from_numpy(log_probs))[0]
            best.append(tokenizer.decode(int(token) for token in found.yseq))
    return (time.process_time() - start) / len(utterances), best


def main() -> None:
    """Run it and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--utterances", type=int, default=20)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    import logging

    import torch

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        lines = sentences(3000, seed=1)
        write_text(folder / "text", "".join(f"u{i:05d} {w}\n" for i, w in enumerate(lines)))
        tokenizer = train_tokens([folder / "text"], folder / "tokens", "bpe", TOKENS)
        tokens = train_ngram([folder / "text"], folder / "token_lm", 4, tokenizer)
        train_ngram([folder / "text"], folder / "word_lm", 4)
        spoken = sentences(arguments.utterances, seed=2)
        rng = np.random.default_rng(3)
        utterances = [posteriors(tokenizer.encode(words), rng) for words in spoken]
        runs = {
            "fedtools, tokens, beam 20": time_ours(tokenizer, folder / "token_lm", utterances, 20),
            "fedtools, tokens, beam 100": time_ours(
                tokenizer, folder / "token_lm", utterances, 100
            ),
            "fedtools, words, beam 100": time_ours(tokenizer, folder / "word_lm", utterances, 100),
            "ESPnet BatchBeamSearch, beam 20": time_espnet(tokenizer, tokens, utterances, True),
            "ESPnet BeamSearch, beam 20": time_espnet(tokenizer, tokens, utterances, False),
        }
    seconds, ours = runs["fedtools, tokens, beam 20"]
    frames = [len(log_probs) for log_probs in utterances]
    print(f"{len(utterances)} utterances, {np.mean(frames):.0f} frames, {len(tokenizer)} tokens")
    rows = []
    for name, (spent, best) in runs.items():
        correct = sum(a == b for a, b in zip(best, spoken, strict=False))
        same = sum(a == b for a, b in zip(best, ours, strict=False))
        n = len(best)
        ratio = f"{spent / seconds:.1f}"
        rows.append((name, n, f"{spent:.3f}", ratio, f"{same}/{n}", f"{correct}/{n}"))
    header = ("decoder", "utterances", "CPU s/utterance", "ratio", "same 1-best", "correct")
    print(format_table(header, rows), end="")


if __name__ == "__main__":
    sys.exit(main())
