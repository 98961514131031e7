"""References and hypotheses, matched by utterance id, aligned, and grouped by client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fedtools.core.errors import UserError
from fedtools.data import trn
from fedtools.data.datadir import DataDir, invert, read_table
from fedtools.data.text_units import UTT2LANG, WORD, TextUnit, read_text_unit
from fedtools.score.align import Counts, align
from fedtools.score.bootstrap import ALL, AVERAGE, error_rates, resample
from fedtools.score.text_rule import TextRule, plain

# The rate's name -> the function that cuts a transcript into the tokens that are counted.
Cuts = dict[str, Callable[[str], list[str]]]


def cuts_of(unit: TextUnit) -> Cuts:
    """Return the rates of a language, the main one first; a unit other than words has one rate."""
    if unit is WORD:
        return {"wer": trn.words, "cer": trn.characters}
    return {unit.rate: unit.cut}


@dataclass(frozen=True)
class References:
    """The references of a data directory: all tables have the same utterances, in C order.

    Without `utt2client` in the data directory, `clients` has the one group `all`. `unit` is what
    its error rates count. `rule` has been applied to `text`, and will be to hypotheses; `languages`
    are those of the utterances, if there is utt2lang.
    """

    path: Path
    text: dict[str, str]
    utt2spk: dict[str, str]
    clients: dict[str, list[str]]
    unit: TextUnit
    rule: TextRule = "none"
    languages: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, data_dir: str | Path, rule: TextRule = "none") -> References:
        """Read `text`, `utt2spk` and, if they exist, `utt2client` and `utt2lang`.

        Raises:
            UserError: if a table is missing or has other utterances, or a client has the name of a
                total, or has no word.
        """
        path = Path(data_dir)
        tables = ["text", "utt2spk"]
        if grouped := (path / "utt2client").exists():
            tables.append("utt2client")
        data = DataDir.read(path, *tables)
        match_utterances(data.text, path / "text", data.utt2spk, path / "utt2spk")
        clients = {ALL: list(data.text)}
        if grouped:
            match_utterances(data.text, path / "text", data.utt2client, path / "utt2client")
            clients = invert(data.utt2client)
            for client in clients:
                if client in (ALL, AVERAGE):
                    problem = f"a client is named {client!r}, like the total in the table"
                    raise UserError(problem, path=path / "utt2client", remedy="rename it")
        languages = read_table(path / UTT2LANG) if (path / UTT2LANG).exists() else {}
        ruled = cls(path, {}, data.utt2spk, clients, read_text_unit(path), rule, languages)
        text = ruled.apply(data.text)
        for client, utts in clients.items():
            if not any(trn.words(text[utt]) for utt in utts):
                problem = f"client {client!r} has no word, so no error rate"
                raise UserError(problem, path=path / "text")
        return replace(ruled, text=text)

    def apply(self, text: Mapping[str, str]) -> dict[str, str]:
        """Apply the rule to texts of these utterances; those of unknown language are English."""
        return {
            utt: plain(words, self.rule, self.languages.get(utt, "en"))
            for utt, words in text.items()
        }

    def by_speaker(self, columns: Sequence[Mapping[str, int]]) -> dict[str, np.ndarray]:
        """Sum numbers per utterance over speakers: client -> (speakers in C order, columns)."""
        sums = {}
        for client, utts in self.clients.items():
            speakers = invert({utt: self.utt2spk[utt] for utt in utts}).values()
            sums[client] = np.array(
                [[sum(column[utt] for utt in utts) for column in columns] for utts in speakers]
            )
        return sums


def read_hypotheses(path: str | Path, references: References) -> dict[str, str]:
    """Read a Kaldi `text` of hypotheses, in which an id alone is an empty hypothesis.

    Raises:
        UserError: if its utterances are not exactly those of the references.
    """
    hypotheses = read_table(path, values="optional")
    match_utterances(references.text, references.path / "text", hypotheses, path)
    return references.apply(hypotheses)


def match_utterances(
    expected: dict[str, str], expected_path: Path, found: dict[str, str], path: str | Path
) -> None:
    """Raise a `UserError` that names the first utterance of one table that the other lacks."""
    for one, other, fault in ((expected, found, "missing"), (found, expected, "too many")):
        if different := [utt for utt in one if utt not in other]:
            problem = f"{len(different)} utterances {fault}, the first {different[0]!r}"
            remedy = f"it must have exactly those of {expected_path}"
            raise UserError(problem, path=path, remedy=remedy)


Tokens = dict[str, tuple[list[str], list[str]]]


def tokenise(references: References, hypotheses: Mapping[str, str], rate: str) -> Tokens:
    """Cut texts into the tokens of a rate ("wer" or "cer"): utterance -> reference, hypothesis."""
    cut = cuts_of(references.unit)[rate]
    return {utt: (cut(text), cut(hypotheses[utt])) for utt, text in references.text.items()}


def align_all(tokens: Tokens) -> dict[str, str]:
    """Align every utterance: utterance -> operations (see `align.align`)."""
    return {utt: align(reference, hypothesis) for utt, (reference, hypothesis) in tokens.items()}


def estimate(
    references: References, counts: Sequence[Mapping[str, Counts]], resamples: int, seed: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Compute error rates over the same utterances, and their bootstrap.

    Args:
        references: the utterances, by client.
        counts: for each of the rates, utterance -> counts.
        resamples: draws of the bootstrap.
        seed: random seed of the bootstrap.

    Returns:
        client -> (rates,) percent, and client -> (resamples, rates) percent; both end with
        `average` and `all` (see `bootstrap`).
    """
    errors = references.by_speaker(
        [{utt: c.errors for utt, c in system.items()} for system in counts]
    )
    tokens = references.by_speaker(
        [{utt: c.tokens for utt, c in system.items()} for system in counts]
    )
    return error_rates(errors, tokens), resample(errors, tokens, resamples, seed)
