"""Attack IV: recover filterbanks from the features that clients sent.

A decoder learns from the server's own speech to undo the initial model's extractor, the only one
that the server knows, and is then applied to features from clients' own extractors. Zhu et al.
(Interspeech 2022), section 3.5, claim that personal extractors prevent the inversion attack.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedtools.attack.features.figures import Figure, Speakers
from fedtools.attack.features.sent import (
    Frames,
    Victim,
    Window,
    as_sent,
    bins_of,
    stream,
    unadapted,
    window,
)
from fedtools.attack.features.transcripts import word_error_rate
from fedtools.audio.perturb import speakers_of, unperturbed
from fedtools.core.atomic import sha256
from fedtools.core.errors import UserError
from fedtools.core.progress import Lines
from fedtools.core.seeds import generator, seed64
from fedtools.exchange.states import load_state, save_state, spec_of
from fedtools.federation.federation import Federation
from fedtools.models.acoustic.asr import input_kind_of, log_posteriors
from fedtools.models.pooling import inside
from fedtools.score.distortion import cepstra, mel_cepstral_distortion
from fedtools.tasks.asr.data import Utterances
from fedtools.tasks.identity import of_utterances
from fedtools.tasks.parts import CORPUS, DEVICE, MODELS

# Share of the server's speakers, or of its recordings if all are of one speaker.
_HELD_OUT = 0.1
_UNITS, _KERNEL = 128, 5
_LEARNING_RATE = 1e-3
_LEAST_DEVIATION = 1e-4

# Mean and deviation of each value of a frame, (D,).
Scales = tuple[Tensor, Tensor]


class Inverter(nn.Module):
    """Decoder from features to filterbanks: convolutions over time, one of which upsamples.

    Args:
        size: values of a frame of features.
        bins: values of a frame of filterbanks.
        where: alignment of their frames.
    """

    def __init__(self, size: int, bins: int, where: Window):
        super().__init__()
        self.window = where
        self.below = _convolution(size, _UNITS)
        self.raised = nn.ConvTranspose1d(_UNITS, _UNITS, where.step, where.step)
        self.above = nn.ModuleList([_convolution(_UNITS, _UNITS), _convolution(_UNITS, bins)])
        for name, width in (("features", size), ("filterbanks", bins)):
            self.register_buffer(f"{name}_mean", torch.zeros(width))
            self.register_buffer(f"{name}_deviation", torch.ones(width))

    def set_scales(self, features: Scales, filterbanks: Scales) -> None:
        """Set mean and deviation of the values of frames."""
        for name, scales in (("features", features), ("filterbanks", filterbanks)):
            for what, values in zip(("mean", "deviation"), scales, strict=True):
                getattr(self, f"{name}_{what}").copy_(values)

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Map features, (B, T, D), to normalised filterbanks, (B, T x step, bins)."""
        # The input after the end must not depend on other utterances of the batch.
        own = inside(features, lengths)[:, None]
        values = (features - self.features_mean) / self.features_deviation
        hidden = self.below(values.transpose(1, 2) * own).relu()
        hidden = self.raised(hidden)
        own = own.repeat_interleave(self.window.step, 2)
        for layer in self.above:
            hidden = layer(hidden.relu() * own)
        return hidden.transpose(1, 2)

    def filterbanks(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Return natural-log filterbanks of features, not normalised; see `forward`."""
        return self(features, lengths) * self.filterbanks_deviation + self.filterbanks_mean

    def targets(self, speech: Tensor, frames: Tensor, part: Frames) -> tuple[Tensor, Tensor]:
        """Return the target of `forward` for features, and its numbers of frames without padding.

        Args:
            speech: (B, frames, bins), filterbanks.
            frames: (B,) numbers of frames of filterbanks.
            part: the features.

        Returns:
            (B, T x step, bins) natural log, and (B,) numbers of frames.
        """
        offset, total = self.window.offset, part.features.shape[1] * self.window.step
        there = speech[:, offset : offset + total]
        there = nn.functional.pad(there, (0, 0, 0, total - there.shape[1]))
        real = torch.minimum(part.lengths.cpu() * self.window.step, frames.cpu() - offset)
        return there, real


def read_server_data(
    federation: Federation, path: Path, clients: Iterable[str], seed: int
) -> tuple[Utterances, Utterances, np.ndarray]:
    """Read the server's own speech: training and held-out utterances, and the latter's speakers.

    Raises:
        UserError: if it has fewer than two recordings, or one of a client; or if the model does not
            take filterbanks.
    """
    if kind := input_kind_of(federation.experiment.options.model):
        problem = f"attack IV recovers filterbanks, and the model takes {kind}"
        raise UserError(problem, path=federation.where, remedy="leave out --server-data")
    corpus, wanted = federation.task.need(CORPUS), set(clients)
    data, trained_on = corpus.read_folder(path), corpus.read("train")
    recorded, theirs = unperturbed(data), unperturbed(trained_on)
    own = {theirs[name] for name, owner in trained_on.utt2client.items() if owner in wanted}
    if shared := own.intersection(recorded.values()):
        problem = f"{len(shared)} utterances belong to clients, such as {min(shared)!r}"
        remedy = "give speech that no client has"
        raise UserError(problem, path=path, remedy=remedy)
    speaker = dict(zip(data.utterances, speakers_of(data, data.utterances), strict=True))
    # Held out as a whole, at all of its speeds: a speaker, or else a recording.
    owner = speaker if len(set(speaker.values())) > 1 else recorded
    items = sorted(set(owner.values()))
    if len(items) < 2:
        raise UserError("a single recording cannot be both trained on and held out", path=path)
    random = generator(seed, "inversion", "held out")
    chosen = set(random.permutation(items)[: max(1, round(_HELD_OUT * len(items)))].tolist())
    held = [name for name in data.utterances if owner[name] in chosen]
    rest = [name for name in data.utterances if owner[name] not in chosen]
    _, numbers = np.unique([speaker[name] for name in held], return_inverse=True)
    return (
        corpus.gather(data, rest, False),
        corpus.gather(data, held, False),
        numbers,
    )


def open_inverter(
    federation: Federation,
    audio: Utterances,
    server_data: Path,
    epochs: int,
    seed: int,
    folder: Path | None,
) -> Inverter:
    """Load a trained decoder from a directory, or train one and save it there.

    Experiments of one baseline and one extractor can share it.

    Args:
        audio: utterances of the server to train on.
        server_data: data directory of these utterances.
        folder: directory of decoders, named by a hash of everything they depend on; None: decoders
            are not saved.
    """
    if folder is None:
        return train_inverter(federation, audio, epochs, seed)
    cut, training = federation.task.need(MODELS).cut(), federation.task.need(CORPUS).training
    known = {
        "model": sha256(federation.experiment.path / "init.safetensors"),
        "options": federation.experiment.options.model,
        "batch_bins": training.batch_bins,
        "end_frames": training.end_frames,
        "blocks": cut.blocks,
        "data": of_utterances(server_data, labels=False),
        "utterances": audio.names,
        "epochs": epochs,
        "seed": seed,
    }
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    path = folder / f"{digest[:16]}.safetensors"
    if not path.exists():
        inverter = train_inverter(federation, audio, epochs, seed)
        save_state(path, inverter.state_dict())
        return inverter
    inverter = Inverter(cut.size, bins_of(federation), window(federation))
    state = load_state(path, spec_of(inverter.state_dict()))
    inverter.load_state_dict({name: torch.from_numpy(state[name]) for name in state})
    return inverter.to(federation.task.need(DEVICE)).eval()


def train_inverter(federation: Federation, audio: Utterances, epochs: int, seed: int) -> Inverter:
    """Train a decoder on the initial model's features of some utterances.

    Training minimises the mean squared error of filterbanks normalised to mean 0 and variance 1.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed64(seed, "inversion"))
        size = federation.task.need(MODELS).cut().size
        inverter = Inverter(size, bins_of(federation), window(federation))
    inverter.to(federation.task.need(DEVICE))
    features = ((part.features, part.lengths) for part in unadapted(federation, audio))
    speech = ((one["speech"], one["speech_lengths"]) for _, one in stream(federation, audio))
    inverter.set_scales(_moments(features), _moments(speech))
    optimizer = torch.optim.Adam(inverter.parameters(), lr=_LEARNING_RATE)
    progress = Lines("attack IV, the decoder", "epoch", epochs)
    for epoch in range(epochs):
        order = generator(seed, "inversion", epoch)
        for part in unadapted(federation, audio, order):
            speech, frames = part.batch["speech"], part.batch["speech_lengths"]
            wanted, real = inverter.targets(speech, frames, part)
            wanted = (wanted - inverter.filterbanks_mean) / inverter.filterbanks_deviation
            own = inside(wanted, real)
            with torch.enable_grad():
                wrong = (inverter(part.features, part.lengths) - wanted)[own]
                optimizer.zero_grad()
                loss = wrong.square().mean()
                loss.backward()
            optimizer.step()
        progress.done(epoch + 1, f"loss {loss.item():.3g}")
    return inverter.eval()


def invert(
    federation: Federation, inverter: Inverter, victim: Victim, speakers: Speakers
) -> Iterator[Figure]:
    """Yield figures of what a decoder recovers from a client: distortion, and word error rates.

    The decoder is applied to features as they were sent; and to rescaled features, whose values
    have the mean and the deviation that they have in the server's speech, which undoes a part of
    what clients' extractors do.
    """
    frames = ((part.features, part.lengths) for part in as_sent(federation, victim.sent))
    rescaled = copy.deepcopy(inverter)
    rescaled.set_scales(
        _moments(frames), (inverter.filterbanks_mean, inverter.filterbanks_deviation)
    )
    for attack, decoder in (("IV, recovered", inverter), ("IV, recovered, rescaled", rescaled)):
        found = recover(decoder, as_sent(federation, victim.sent), len(victim.audio))
        yield from distortions(attack, found, victim.audio, inverter.window, speakers)
        if victim.texts is not None:
            federation.task.load(federation.states.initial, 0)
            heard = _hear_again(federation, found, inverter.window)
            yield word_error_rate(federation, heard, victim, speakers, attack)
    if victim.texts is not None:
        heard = _hear(federation, victim.audio)
        yield word_error_rate(federation, heard, victim, speakers, "IV, true filterbanks")


@torch.no_grad()
def recover(inverter: Inverter, frames: Iterator[Frames], utterances: int) -> list[np.ndarray]:
    """Return recovered filterbanks of each utterance, (T x step, bins), natural log."""
    found: list[np.ndarray] = [np.empty(0)] * utterances
    for part in frames:
        filterbanks = inverter.filterbanks(part.features, part.lengths).cpu().numpy()
        for index, matrix, length in zip(
            part.indices, filterbanks, part.lengths.tolist(), strict=True
        ):
            found[index] = matrix[: length * inverter.window.step]
    return found


def distortions(
    attack: str,
    recovered: Sequence[np.ndarray],
    audio: Utterances,
    where: Window,
    speakers: Speakers,
) -> Iterator[Figure]:
    """Yield the mel-cepstral distortion in dB, also of cepstra less their utterance's mean.

    An extractor that normalises each utterance removes the mean, which no decoder can recover.
    Chance is the mean frame of all utterances, and, for centred cepstra, a constant.

    Args:
        recovered: filterbanks of each utterance, from frame `where.offset` on.
    """
    pairs = []
    for index, found in enumerate(recovered):
        true = audio.load([index])["speech"][0].numpy()[where.offset :]
        frames = min(len(true), len(found))
        pairs.append((cepstra(true[:frames]), cepstra(found[:frames])))
    mean = np.concatenate([true for true, _ in pairs]).mean(0)
    # Utterances x (found, mean frame, found without means, constant).
    sums = np.array([
        [
            mel_cepstral_distortion(true, other).sum()
            for true, other in (
                (true, found),
                (true, mean),
                (true - true.mean(0), found - found.mean(0)),
                (true - true.mean(0), np.zeros_like(mean)),
            )
        ]
        for true, found in pairs
    ])  # fmt: skip
    counts = np.array([len(true) for true, _ in pairs], np.float64)
    chance = sums.sum(0) / counts.sum()
    for at, measure in ((0, "MCD dB"), (2, "MCD dB, centred")):
        yield speakers.ratio(attack, measure, sums[:, at], counts, float(chance[at + 1]))


def held_out(
    federation: Federation, inverter: Inverter, audio: Utterances, speakers: Speakers
) -> Iterator[Figure]:
    """Yield the distortion on speech of the server that the decoder has not seen."""
    recovered = recover(inverter, unadapted(federation, audio), len(audio))
    yield from distortions("IV, held out", recovered, audio, inverter.window, speakers)


def _convolution(size: int, units: int) -> nn.Conv1d:
    return nn.Conv1d(size, units, _KERNEL, padding=_KERNEL // 2)


def _moments(parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of each value, (D,), of batches (B, T, D) with (B,) frames."""
    count, total, squares = 0, torch.zeros(()), torch.zeros(())
    for values, lengths in parts:
        known = values[inside(values, lengths)].double().cpu()
        count, total = count + len(known), total + known.sum(0)
        squares = squares + known.square().sum(0)
    mean = total / count
    deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
    return mean.float(), deviation.clamp(min=_LEAST_DEVIATION).float()


@torch.no_grad()
def _hear(federation: Federation, audio: Utterances) -> Iterator:
    """Yield log posteriors of filterbanks by the loaded model."""
    models = federation.task.need(MODELS)
    for indices, batch in stream(federation, audio):
        yield indices, *log_posteriors(models.build().eval(), batch)


@torch.no_grad()
def _hear_again(federation: Federation, recovered: Sequence[np.ndarray], where: Window) -> Iterator:
    """Yield log posteriors of recovered filterbanks, padded by the frames missing at both ends."""
    models, device = federation.task.need(MODELS), federation.task.need(DEVICE)
    after = max(0, where.width - where.step - where.offset)
    for index, matrix in enumerate(recovered):
        whole = np.pad(matrix, ((where.offset, after), (0, 0)), mode="edge")
        speech = torch.from_numpy(whole)[None].to(device)
        batch = {"speech": speech, "speech_lengths": torch.tensor([len(whole)])}
        yield [index], *log_posteriors(models.build().eval(), batch)
