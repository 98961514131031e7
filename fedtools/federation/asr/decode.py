"""Decoding of a data directory with an experiment's models, each client with its own."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fedtools.core.atomic import sha256
from fedtools.core.config import from_mapping, read_yaml, write_yaml
from fedtools.core.errors import UserError, some
from fedtools.core.progress import Count
from fedtools.data.datadir import DataDir, byte_order
from fedtools.data.nbest import Hypothesis, write_nbest
from fedtools.data.symbols import words_of
from fedtools.decode.beam import BeamOptions, CtcBeamDecoder
from fedtools.decode.greedy import greedy
from fedtools.federation.evaluate import has_average, load_average
from fedtools.federation.federation import Federation
from fedtools.lm.ngram import NgramFolder
from fedtools.lm.private_words import read_phrases
from fedtools.lm.tokens import Tokenizer
from fedtools.lm.whisper_tokens import WhisperTokens
from fedtools.models.acoustic.asr import log_posteriors, outputs
from fedtools.models.pretrained.options import Generation, is_seq2seq
from fedtools.tasks.asr.data import Batch
from fedtools.tasks.asr.search import generate
from fedtools.tasks.facts import ALL
from fedtools.tasks.parts import CORPUS, DEVICE, MODELS, TOKENIZER, TRAINING


@dataclass(frozen=True)
class Search:
    """A beam search with the n-gram in the folder `lm`.

    Attributes:
        lm: the folder of the n-gram.
        options: the options of the search.
        phrases: client -> its own phrases, whose words `BeamOptions.bonus` favours.
    """

    lm: Path
    options: BeamOptions
    phrases: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        lm: str | Path,
        config: str | Path | None,
        phrases: str | Path | None = None,
        bonus: float = 0.0,
    ) -> Search:
        """Read the options from the section `decode` of a YAML file, if it has one.

        Args:
            lm: the folder of the n-gram.
            config: the YAML file; None for the defaults.
            phrases: a table of clients' own phrases, see `fedtools.lm.private_words`.
            bonus: the bonus of their words, instead of that in the file.
        """
        options = read_yaml(config).get("decode") if config else None
        where = f"{config}: decode" if config else "decode"
        if phrases:
            options = {**(options or {}), "bonus": bonus}
        found = from_mapping(BeamOptions, options, where)
        return cls(Path(lm), found, read_phrases(phrases) if phrases else {})

    def decoder(self, tokenizer: Tokenizer, client: str) -> CtcBeamDecoder:
        """Load the n-gram into a decoder with a client's own words."""
        words = {word for one in self.phrases.get(client, ()) for word in words_of(one)}
        return CtcBeamDecoder.load(tokenizer, self.lm, self.options, words)

    def origin(self, clients: Iterable[str]) -> dict[str, object]:
        """Return everything in the search that hypotheses of some clients depend on."""
        found = {"lm": sha256(NgramFolder.read(self.lm).binary), **asdict(self.options)}
        bonus = found.pop("bonus")
        own = {one: list(self.phrases[one]) for one in clients if one in self.phrases}
        return {**found, "bonus": bonus, "phrases": own} if own and bonus else found


def read_search(
    federation: Federation,
    lm: str | Path | None,
    config: str | Path | None,
    phrases: str | Path | None = None,
    bonus: float = 0.0,
) -> Search | Generation | None:
    """Read the search options for an experiment's models; None means greedy decoding.

    For a model with a decoder the section `decode` of the YAML file holds a `Generation`; without
    it, the search is greedy.
    """
    if is_seq2seq(federation.experiment.options.model):
        if lm:
            problem = "models with criterion seq2seq have their own language model"
            raise UserError(problem, path=federation.experiment.path, remedy="leave out --lm")
        options = read_yaml(config).get("decode") if config else None
        return from_mapping(Generation, options or {"beam": 1}, f"{config}: decode")
    return Search.read(lm, config, phrases, bonus) if lm else None


def decode(
    federation: Federation,
    data_path: str | Path,
    out: str | Path,
    search: Search | Generation | None,
    *,
    model: str = "average",
    job: int = 1,
    jobs: int = 1,
) -> Path:
    """Decode one job's share of a data directory to `OUT/nbest.<job>.tsv`.

    `nbest.<job>.yaml` records models, features and search; a file from the same ones is kept, and
    any other is replaced.

    Args:
        federation: the federation.
        data_path: the data directory.
        out: the folder of the output.
        search: options of the beam search with an n-gram, or of Whisper's decoder; None means
            greedy decoding of a model without a decoder.
        model: "average", "start", or "round:7" (the model after that round).
        job, jobs: which of how many contiguous parts of the utterances to decode.

    Returns:
        the file written.
    """
    data = federation.task.need(CORPUS).read_folder(data_path)
    count = len(data.utterances)
    share = data.utterances[count * (job - 1) // jobs : count * job // jobs]
    by_client: dict[str, list[str]] = {}
    for name in share:
        by_client.setdefault(data.utt2client.get(name, ALL), []).append(name)
    _report_unknown(federation, data, by_client, model)
    path = Path(out) / f"nbest.{job}.tsv"
    origin: dict[str, object] = {"job": f"{job} of {jobs}", "data": str(data_path)}
    origin["feats.scp"] = sha256(data.path / "feats.scp")
    origin["search"] = _origin(search, by_client)
    states = _States(federation, model)
    origin["models"] = {client: states.digest(client) for client in by_client}
    made_from = path.with_suffix(".yaml")
    if path.exists() and made_from.exists() and read_yaml(made_from) == origin:
        return path
    path.unlink(missing_ok=True)
    write_yaml(made_from, origin)
    read = _reader(federation, data, search)
    lists: dict[str, list[Hypothesis]] = {}
    bar = Count(f"decode {data.path.name}", len(share), "utterances")
    # Jobs run in parallel, so each uses one thread; more threads would wait for each other.
    with bar, federation.task.need(TRAINING).settings(threads=1):
        for client, names in by_client.items():
            states.load(client)
            for name, best in read(client, names):
                lists[name] = best
                bar.advance()
    write_nbest(path, ((name, lists[name]) for name in byte_order(lists)))
    return path


def _report_unknown(
    federation: Federation, data: DataDir, clients: Iterable[str], model: str
) -> None:
    """Report clients without a personal model: unknown ones, and those whose tensors are lost."""
    if not federation.method.federated:
        return
    where, asked = federation.experiment.path, [one for one in clients if one != ALL]
    own = [one for one in asked if federation.experiment.knows(one)]
    if model == "average":
        lost = [one for one in own if not has_average(federation, one)]
    else:
        number = 0 if model == "start" else _round(model)
        lost = [one for one in own if not federation.states.known(one, number)]
    reasons = {
        f"not a client of {where}": [one for one in asked if one not in own],
        f"personal parameters missing in {where}": lost,
    }
    for reason, named in reasons.items():
        if named:
            problem = f"{some(named)}: {reason}, decoded with the shared model"
            print(f"{data.path}: {problem}", file=sys.stderr)


class _States:
    """The states for decoding clients' utterances; a state of several clients is loaded once."""

    def __init__(self, federation: Federation, model: str):
        self._federation, self._average, self._number = federation, model == "average", 0
        if model not in ("average", "start"):
            self._number = _round(model)
            if not federation.experiment.round(self._number).is_done():
                problem = f"round {self._number} is not complete"
                raise UserError(problem, path=federation.experiment.path)
        self._loaded: str | None = ""
        self._digests: dict[str | None, str] = {}

    def load(self, client: str) -> None:
        """Load the state of a client into the model."""
        owner = self._owner(client)
        if owner == self._loaded:
            return
        if self._average:
            load_average(self._federation, client)
        else:
            self._federation.load_result(owner, self._number)
        self._loaded = owner

    def digest(self, client: str) -> str:
        """Compute the SHA-256 of the tensors of a client's state."""
        owner = self._owner(client)
        if owner not in self._digests:
            self.load(client)
            digest = hashlib.sha256()
            state = self._federation.task.need(MODELS).build().state_dict()
            for name, value in sorted(state.items()):
                digest.update(name.encode())
                digest.update(value.cpu().contiguous().numpy().data)
            self._digests[owner] = digest.hexdigest()
        return self._digests[owner]

    def _owner(self, client: str) -> str | None:
        """Return the client whose personal state is used, or None for the shared one."""
        if not self._federation.personal:
            return None
        if self._average:
            return client if has_average(self._federation, client) else None
        return self._federation.states.known(client, self._number)


def _round(model: str) -> int:
    return int(model.removeprefix("round:"))


# (client, utterances) -> each utterance with its hypotheses.
Reader = Callable[[str, Sequence[str]], Iterator[tuple[str, list[Hypothesis]]]]


def _reader(federation: Federation, data: DataDir, search: Search | Generation | None) -> Reader:
    """Return a function that decodes a client's utterances with the loaded model."""
    if is_seq2seq(federation.experiment.options.model):
        assert isinstance(search, Generation), "see read_search"
        return partial(_written, federation, data, search)
    assert not isinstance(search, Generation), "see read_search"
    tokens, decoders = federation.task.need(TOKENIZER), dict[str, CtcBeamDecoder]()

    def read(client: str, names: Sequence[str]) -> Iterator[tuple[str, list[Hypothesis]]]:
        for name, log_probs in _posteriors(federation, data, names):
            if not search:
                yield name, [_greedy(federation, log_probs)]
                continue
            own = client if search.phrases else ""
            if own not in decoders:
                decoders.clear()
                decoders[own] = search.decoder(tokens, own)
            yield name, decoders[own].decode(log_probs)

    return read


def _origin(search: Search | Generation | None, clients: Iterable[str]) -> object:
    if isinstance(search, Generation):
        return {**asdict(search), "temperatures": list(search.temperatures)}
    return search.origin(clients) if search else "greedy"


@torch.no_grad()
def _written(
    federation: Federation,
    data: DataDir,
    options: Generation,
    client: str,
    names: Sequence[str],
) -> Iterator[tuple[str, list[Hypothesis]]]:
    """Decode with Whisper's decoder, whose order stays: the best one is that of a list of one.

    A word sequence gets the total score of its tokenisations.
    """
    model, tokens = federation.task.need(MODELS).build().eval(), federation.task.need(TOKENIZER)
    assert isinstance(tokens, WhisperTokens)
    for name, batch in _singles(federation, data, names):
        scores: dict[str, float] = {}
        for ids, score in generate(model, tokens, outputs(model, batch), batch, options)[0]:
            words = tokens.decode(ids)
            scores[words] = float(np.logaddexp(scores.get(words, -np.inf), score))
        best = enumerate(scores.items(), 1)
        yield name, [Hypothesis(rank, score, 0.0, words) for rank, (words, score) in best]


def _singles(
    federation: Federation, data: DataDir, names: Sequence[str]
) -> Iterator[tuple[str, Batch]]:
    """Yield the utterances in batches of one.

    The order of sums depends on the shape of a batch, but not even the last bit of a score may
    depend on the other utterances of a job.
    """
    utterances = federation.task.need(CORPUS).gather(data, names, labelled=False)
    singles = [[index] for index in range(len(utterances))]
    stream = utterances.stream(singles, federation.task.need(DEVICE))
    return zip(utterances.names, stream, strict=True)


@torch.no_grad()
def _posteriors(
    federation: Federation, data: DataDir, names: Sequence[str]
) -> Iterator[tuple[str, np.ndarray]]:
    model = federation.task.need(MODELS).build().eval()
    for name, batch in _singles(federation, data, names):
        log_probs = log_posteriors(model, batch)[0][0].cpu().numpy()
        if np.isnan(log_probs).any():
            problem = f"the acoustic model's posteriors of {name!r} are NaN"
            remedy = "if validate_data_dir.py finds no problem in its features, training diverged"
            raise UserError(problem, path=data.path / "feats.scp", remedy=remedy)
        yield name, log_probs


def _greedy(federation: Federation, log_probs: np.ndarray) -> Hypothesis:
    tokens = greedy(log_probs[None], np.array([len(log_probs)]))[0]
    score = float(log_probs.max(axis=1).astype(np.float64).sum())
    return Hypothesis(
        rank=1, acoustic=score, lm=0.0, words=federation.task.need(TOKENIZER).decode(tokens)
    )
