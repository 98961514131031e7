#!/usr/bin/env python3
"""Draw sentences of meetings to mix with another text at a given percentage of words.

    mix.py OTHER.txt PERCENT OUT.txt MEETINGS.txt... [--kaldi TEXT] [--seed N]

OUT.txt has only the meetings' part of the mix: sentences drawn at random, until they make up
PERCENT of the words of OTHER.txt and OUT.txt together.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedtools.core.atomic import write_text
from fedtools.core.errors import UserError, exit_with_message
from fedtools.core.seeds import generator
from fedtools.lm.ngram import read_sentences


def draw(sentences: list[list[str]], others: int, percent: float, seed: int) -> list[list[str]]:
    """Draw sentences that make up `percent` of a mix's words with `others` words of other text.

    Returns:
        The sentences in their original order.

    Raises:
        UserError: if the sentences have too few words.
    """
    wanted = others * percent / (100 - percent)
    kept, words = [], 0
    for index in generator(seed, "mix").permutation(len(sentences)):
        if words >= wanted:
            break
        kept.append(int(index))
        words += len(sentences[index])
    if words < wanted:
        problem = f"the meetings have {words} words, but {percent:g} % takes {wanted:.0f}"
        raise UserError(problem, remedy="give a smaller percentage")
    return [sentences[index] for index in sorted(kept)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("other", type=Path, metavar="OTHER.txt")
    parser.add_argument("percent", type=float, metavar="PERCENT")
    parser.add_argument("out", type=Path, metavar="OUT.txt")
    parser.add_argument("plain", type=Path, nargs="*", metavar="MEETINGS.txt")
    parser.add_argument("--kaldi", type=Path, action="append", default=[], metavar="TEXT")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not 0 < options.percent < 100:
        parser.error("PERCENT must be between 0 and 100")
    if not (options.plain or options.kaldi):
        parser.error("give a text of meetings: MEETINGS.txt or --kaldi TEXT")
    with exit_with_message("mix.py"):
        others = sum(map(len, read_sentences([], [options.other])))
        found = draw(list(read_sentences(options.kaldi, options.plain)), others, options.percent,
                     options.seed)  # fmt: skip
        write_text(options.out, "".join(f"{' '.join(words)}\n" for words in found))
        print(f"{options.out}: {len(found):,} sentences, {sum(map(len, found)):,} words")


if __name__ == "__main__":
    main()
