"""Decoding of a data directory by the models of an experiment, each client's by its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from fedtools.client.data import Utterances
from fedtools.decode.beam import BeamOptions, CtcBeamDecoder
from fedtools.decode.greedy import greedy
from fedtools.federation.evaluate import load_average
from fedtools.federation.federation import ALL, Federation, read_data
from fedtools.files.config import from_mapping, read_yaml
from fedtools.files.datadir import DataDir, byte_order
from fedtools.files.errors import UserError
from fedtools.files.nbest import Hypothesis, write_nbest
from fedtools.lm.tokens import Tokenizer
from fedtools.models.asr import log_posteriors, shortest_input

# Turns the log posteriors of an utterance, (frames, tokens), into its N-best list.
Decoder = Callable[[np.ndarray], list[Hypothesis]]


def decode(
    federation: Federation,
    data_path: str | Path,
    out: str | Path,
    decoder: Decoder | None,
    *,
    model: str = "average",
    job: int = 1,
    jobs: int = 1,
) -> Path:
    """Decode one job's share of a data directory to `OUT/nbest.<job>.tsv`.

    Args:
        decoder: makes an N-best list of log posteriors; None is greedy decoding.
        model: "average", "start", or "round:7" (the model after that round).
        job, jobs: which of how many contiguous parts of the utterances.

    Returns:
        the file written; one that is there already is kept.
    """
    path = Path(out) / f"nbest.{job}.tsv"
    if path.exists():
        return path
    # Jobs are what runs at the same time here; threads of several would wait for each other.
    torch.set_num_threads(1)
    data = read_data(data_path, "utt2spk", "feats.scp")
    count = len(data.utterances)
    share = data.utterances[count * (job - 1) // jobs : count * job // jobs]
    by_client: dict[str, list[str]] = {}
    for name in share:
        by_client.setdefault(data.utt2client.get(name, ALL), []).append(name)
    lists: dict[str, list[Hypothesis]] = {}
    bar = tqdm(total=len(share), desc=f"decode {data.path.name}", unit="utt", disable=None)
    with bar:
        for client, names in by_client.items():
            _load(federation, client, model)
            for name, log_probs in _posteriors(federation, data, names):
                lists[name] = decoder(log_probs) if decoder else [_greedy(federation, log_probs)]
                bar.update()
    write_nbest(path, ((name, lists[name]) for name in byte_order(lists)))
    return path


def _load(federation: Federation, client: str, model: str) -> None:
    known = client in federation.experiment.clients
    if model == "average":
        load_average(federation, client)
    elif model == "start":
        federation.load_result(None, 0)
    else:
        number = int(model.removeprefix("round:"))
        if not federation.experiment.is_done(number):
            raise UserError(f"round {number} is not complete", path=federation.experiment.path)
        federation.load_result(client if known else None, number)


@torch.no_grad()
def _posteriors(
    federation: Federation, data: DataDir, names: Sequence[str]
) -> Iterator[tuple[str, np.ndarray]]:
    model = federation.model.eval()
    shortest = shortest_input(model)
    utterances = Utterances(data, names, federation.tokenizer, 1, shortest, labelled=False)
    # One at a time: at its end an utterance sees the padding of a batch, and a hypothesis must not
    # depend on which others share its job.
    singles = [[index] for index in range(len(utterances))]
    stream = utterances.stream(singles, federation.device)
    for name, batch in zip(utterances.names, stream, strict=True):
        yield name, log_posteriors(model, batch)[0][0].cpu().numpy()


def _greedy(federation: Federation, log_probs: np.ndarray) -> Hypothesis:
    tokens = greedy(log_probs[None], np.array([len(log_probs)]))[0]
    score = float(log_probs.max(axis=1).astype(np.float64).sum())
    return Hypothesis(rank=1, acoustic=score, lm=0.0, words=federation.tokenizer.decode(tokens))


def beam_decoder(tokenizer: Tokenizer, lm: str | Path, config: str | Path | None) -> Decoder:
    """A beam search with an n-gram; `config` may have a section `decode` of `BeamOptions`."""
    options = read_yaml(config).get("decode") if config else None
    where = f"{config}: decode" if config else "decode"
    return CtcBeamDecoder.load(tokenizer, lm, from_mapping(BeamOptions, options, where)).decode
