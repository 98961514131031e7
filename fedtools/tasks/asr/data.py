"""Utterances of one client as padded batches of similar length; data directories for models."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedtools.audio.log_mel import FRAMES
from fedtools.audio.perturb import SPEED_TABLE, speakers_of
from fedtools.client.options import UtteranceTraining
from fedtools.client.unit import Key, Source
from fedtools.core.errors import UserError, some
from fedtools.core.seeds import generator, seed64
from fedtools.core.untrusted import Seal
from fedtools.data.ark import FeatureReader
from fedtools.data.datadir import DataDir, read_table
from fedtools.data.text_units import UTT2LANG, text_unit_of
from fedtools.lm.tokens import Tokenizer
from fedtools.lm.whisper_tokens import WhisperTokens
from fedtools.models.acoustic.asr import input_kind_of, input_size_of, positions, trained_by
from fedtools.tasks.asr.archives import first_there
from fedtools.tasks.asr.fits import check_kind, check_length


def read_data(
    path: str | Path, config: Mapping[str, Any], *tables: str, may_lack: bool = False
) -> DataDir:
    """Read the features and the named tables of a data directory, and its clients if it has any.

    Args:
        config: of the model.
        may_lack: some archives may be missing.

    Raises:
        UserError: if one is missing or malformed, or the features do not fit a model's `config`.
    """
    clients = ("utt2client",) if (Path(path) / "utt2client").exists() else ()
    data = DataDir.read(path, "utt2spk", "feats.scp", *tables, *clients)
    if (speeds := data.path / SPEED_TABLE).exists():
        data.others[SPEED_TABLE] = read_table(speeds)
    if (languages := data.path / UTT2LANG).exists():
        data.others[UTT2LANG] = read_table(languages)
    wanted, kind = input_size_of(config), input_kind_of(config)
    for name in first_there(data) if may_lack else data.utterances[:1]:
        data.check_features([name])
        reader = FeatureReader(data.feats_scp)
        check_kind(reader, name, kind, data.path / "feats.scp")
        if (size := reader.shape(name)[1]) != wanted:
            problem = f"{size} values in a frame of {name!r}, the model's input_size is {wanted}"
            remedy = "extract other features, or begin with another model.input_size"
            raise UserError(problem, path=data.path / "feats.scp", remedy=remedy)
    return data


def joined(data: DataDir, more: DataDir) -> DataDir:
    """Return the utterances of two data directories; for those in both, the first one's entries."""
    tables = {
        name: {**getattr(data, name), **getattr(more, name), **getattr(data, name)}
        for name in ("feats_scp", "text", "utt2spk")
    }
    others = {
        name: {**more.others.get(name, {}), **data.others.get(name, {})}
        for name in {*data.others, *more.others}
    }
    return DataDir(data.path, **tables, utt2client=data.utt2client, others=others)


def check_words(path: Path) -> None:
    """Raise a `UserError` if a client has no word in its transcripts, as an error rate needs."""
    clients = ("utt2client",) if (path / "utt2client").exists() else ()
    data = DataDir.read(path, "text", *clients)
    counts: dict[str, int] = {}
    for name, text in data.text.items():
        owner = data.utt2client.get(name, "")
        counts[owner] = counts.get(owner, 0) + len(text.split())
    if silent := sorted(owner for owner, words in counts.items() if not words):
        who = f" of {some(silent)}" if clients else ""
        raise UserError(f"no word in the transcripts{who}, so no WER", path=path / "text")


class Batch(dict[str, torch.Tensor]):
    """Tensors by ESPnet's names; its loss is a mean over utterances."""

    @property
    def amount(self) -> int:
        """Return the number of utterances, which have equal weights in the mean loss."""
        return len(self["speech_lengths"])

    @property
    def frames(self) -> int:
        """Return the frames of the padded batch, or its positions for frozen layers' outputs."""
        found = self["hidden"] if "hidden" in self else self["speech"]
        return found.shape[0] * found.shape[1]

    @property
    def active(self) -> None:
        """Return None: the batch is not for a stack of models."""
        return None


@dataclass(frozen=True)
class Zeros:
    """Frames of zeros appended to utterances, which then count as the utterances' own.

    Attributes:
        after: frames of zeros appended to each utterance.
        shortest: the fewest frames that the model accepts; shorter utterances get more zeros.
        longest: the most frames that the model accepts; None for any number.
    """

    after: int = 0
    shortest: int = 1
    longest: int | None = None


class Utterances:
    """Features and tokens of some utterances of a data directory.

    `unit` is what error rates of their transcripts count. `hidden` returns the frozen layers'
    output for an utterance, by its index, if such outputs are kept.

    Args:
        data: a data directory with `feats_scp` and `text`.
        names: the utterances, usually those of one client.
        tokenizer: turns transcripts into token ids.
        batch_bins: the largest size of a batch, padding included, in frames x bins.
        zeros: appended to each.
        labelled: whether every utterance needs a transcript.
        seals: of arks that clients wrote, see `FeatureReader`.

    Attributes:
        keep: whether the features stay in memory once they are read.
    """

    def __init__(
        self,
        data: DataDir,
        names: Sequence[str],
        tokenizer: Tokenizer | WhisperTokens,
        batch_bins: int,
        zeros: Zeros = Zeros(),
        labelled: bool = True,
        seals: Mapping[str, Seal] | None = None,
    ):
        for table, file in ((data.feats_scp, "feats.scp"), (data.text, "text")):
            missing = [name for name in names if name not in table]
            if missing and (labelled or table is data.feats_scp):
                remedy = "extract its features" if table is data.feats_scp else "add its transcript"
                problem = f"no entry of utterance {missing[0]!r}"
                raise UserError(problem, path=data.path / file, remedy=remedy)
        self.tokenizer, self.labelled, self.path = tokenizer, labelled, data.path
        self.names = list(names)
        self.texts = [data.text.get(name, "") for name in self.names]
        self.tokens = [tokenizer.encode(text) for text in self.texts]
        languages = data.others.get(UTT2LANG, {})
        spoken = {name: languages[name] for name in self.names if name in languages}
        self.unit = text_unit_of(spoken, data.path / UTT2LANG)
        # Prompts, and seeds of samples, for a model with a decoder.
        self._prompts: list[list[int]] | None = None
        if isinstance(tokenizer, WhisperTokens):
            self._prompts = [tokenizer.prompt(spoken.get(name)) for name in self.names]
            self._seeds = [seed64(0, "sample", name) >> 1 for name in self.names]
        self._speaker = _numbered(speakers_of(data, self.names))
        owners = [data.utt2client.get(name, "") for name in self.names]
        self._client, self.clients = _numbered(owners), sorted(set(owners))
        self.speakers = max(self._speaker) + 1
        self._reader = FeatureReader({name: data.feats_scp[name] for name in names}, seals)
        # Features that clients sent have frames of another length than audio.
        self._sent = seals is not None
        # Frames of each utterance, appended zeros included.
        self.frames = frames_of(self._reader, names, zeros)
        for name, frames in zip(self.names, self.frames.tolist(), strict=True):
            check_length(name, frames, zeros.longest, data.path / "feats.scp")
        self._bins = self._reader.shape(self.names[0])[1]
        self._batch_bins = batch_bins
        self.keep = False
        self._features: list[torch.Tensor] | None = None
        self.hidden: Callable[[int], np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def batches(
        self, generator: np.random.Generator | None = None, among: Sequence[int] | None = None
    ) -> list[list[int]]:
        """Group indices of utterances of similar length into batches.

        Args:
            generator: shuffles the batches, and blurs the lengths by a few per cent so that batches
                differ between epochs; None keeps the order of length.
            among: the indices; by default those of all utterances.
        """
        chosen = np.arange(len(self)) if among is None else np.array(among, int)
        lengths = self.frames[chosen].astype(float)
        if generator is not None:
            lengths = lengths * generator.uniform(0.95, 1.05, len(lengths))
        batches: list[list[int]] = [[]]
        longest = 0
        for index in chosen[np.argsort(-lengths, kind="stable")].tolist():
            longest = max(longest, int(self.frames[index]))
            if batches[-1] and longest * (len(batches[-1]) + 1) * self._bins > self._batch_bins:
                batches.append([])
                longest = int(self.frames[index])
            batches[-1].append(index)
        if generator is not None:
            generator.shuffle(batches)
        return batches

    def load(self, indices: Sequence[int]) -> Batch:
        """Read and pad one batch: `speech` (B, T, D) zero-padded, `text` (B, L) padded with -1.

        `speakers` and `clients` (B,) number those of these utterances from 0. Kept outputs of
        frozen layers come as `hidden` in place of `speech`.
        """
        if self.hidden:
            features = [torch.from_numpy(self.hidden(index)) for index in indices]
        else:
            features = self._padded(indices)
        speech = torch.nn.utils.rnn.pad_sequence(features, batch_first=True)
        tokens = [torch.tensor(self.tokens[index], dtype=torch.long) for index in indices]
        batch = Batch(
            {"hidden" if self.hidden else "speech": speech},
            speech_lengths=torch.tensor([len(feature) for feature in features]),
            text=torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=-1),
            text_lengths=torch.tensor([len(token) for token in tokens]),
            speakers=torch.tensor([self._speaker[index] for index in indices]),
            clients=torch.tensor([self._client[index] for index in indices]),
        )
        if self._prompts:
            batch["prompt"] = torch.tensor([self._prompts[index] for index in indices])
            batch["seed"] = torch.tensor([self._seeds[index] for index in indices])
            if not self._sent:
                batch["seconds"] = torch.from_numpy(self.frames[list(indices)] / FRAMES)
        return batch

    def unfit(self, model: nn.Module) -> list[str]:
        """Return the utterances with fewer frames than the criterion needs for their transcript."""
        frames = self.frames if self._sent else positions(model, self.frames)
        criterion = trained_by(model)
        return [
            name
            for name, tokens, there in zip(self.names, self.tokens, frames.tolist(), strict=True)
            if there < criterion.fewest_frames(tokens)
        ]

    def stream(self, batches: Sequence[Sequence[int]], device: torch.device) -> Iterator[Batch]:
        """Yield the batches on `device`, reading ahead while one is processed."""
        if self.keep and device.type == "cpu":
            for indices in batches:
                yield self.load(indices)
            return
        ahead: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=4)
        stop = threading.Event()

        def read() -> None:
            try:
                for indices in batches:
                    if stop.is_set():
                        return
                    batch = self.load(indices)
                    if device.type == "cuda":
                        batch = Batch({key: value.pin_memory() for key, value in batch.items()})
                    ahead.put(batch)
                ahead.put(None)
            except BaseException as error:
                ahead.put(error)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            while (batch := ahead.get()) is not None:
                if isinstance(batch, BaseException):
                    raise batch
                yield Batch(
                    {key: value.to(device, non_blocking=True) for key, value in batch.items()}
                )
        finally:
            stop.set()
            while not ahead.empty():
                ahead.get_nowait()

    @property
    def bytes(self) -> int:
        """Return the size of the features in memory; 0 for outputs that are kept on disk."""
        if self.hidden:
            return 0
        return int(self.frames.sum()) * self._bins * 4

    def audio(self, index: int) -> np.ndarray:
        """Return an utterance's features, even if frozen layers' outputs are kept."""
        found: np.ndarray = self._padded([index])[0].numpy()
        return found

    def _padded(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Return features with the appended zeros."""
        return [
            torch.nn.functional.pad(matrix, (0, 0, 0, int(self.frames[index]) - len(matrix)))
            for index, matrix in zip(indices, self._read(indices), strict=True)
        ]

    def _read(self, indices: Sequence[int]) -> list[torch.Tensor]:
        if not self.keep:
            matrices = self._reader.read_many([self.names[index] for index in indices])
            return [torch.from_numpy(matrix) for matrix in matrices]
        if self._features is None:
            matrices = self._reader.read_many(self.names)
            self._features = [torch.from_numpy(matrix) for matrix in matrices]
        return [self._features[index] for index in indices]


def frames_of(reader: FeatureReader, names: Sequence[str], zeros: Zeros) -> np.ndarray:
    """Return the numbers of frames of utterances, appended zeros included."""
    recorded = np.array([reader.num_frames(name) for name in names])
    found: np.ndarray = np.maximum(recorded + zeros.after, zeros.shortest)
    return found


def _numbered(owners: Iterable[str]) -> list[int]:
    """Return each owner's number from 0, in the order of their names."""
    owners = list(owners)
    numbers = {owner: number for number, owner in enumerate(sorted(set(owners)))}
    return [numbers[owner] for owner in owners]


class UtteranceBatches:
    """The batches of some epochs over utterances, shuffled anew in each.

    Args:
        data: the utterances.
        epochs: the number of epochs.
        accum_grad: batches per step.
        device: where the batches go.
        key: (seed, ...) for all random numbers.
    """

    def __init__(
        self,
        data: Utterances,
        epochs: int,
        accum_grad: int,
        device: torch.device,
        key: Key,
    ):
        plan = [
            batch
            for epoch in range(epochs)
            for batch in data.batches(generator(key[0], "batches", *key[1:], epoch))
        ]
        starts = range(0, len(plan), accum_grad)
        self._groups = [plan[start : start + accum_grad] for start in starts]
        self.steps = [len(self._groups)]
        self._data, self._device = data, device

    def stream(self, first: int) -> Iterator[list[Batch]]:
        """Yield the batches of each step, from step `first` on."""
        groups = self._groups[first:]
        batches = self._data.stream([batch for group in groups for batch in group], self._device)
        for group in groups:
            yield [next(batches) for _ in group]


class UtteranceSource(Source):
    """The utterances of a unit in one round.

    Args:
        data: the utterances.
        key: (seed, round, name) for all random numbers; the name is the client's, or "server".
        training: the options.
        epochs: a client's epochs in a round.
        device: where the batches go.
        received: whether the data is features that clients have sent.
    """

    def __init__(
        self,
        data: Utterances,
        key: tuple[int, int, str],
        training: UtteranceTraining,
        epochs: int,
        device: torch.device,
        received: bool = False,
    ):
        self.data, self.received, self.sizes = data, received, [len(data)]
        self.facts = {"speakers": np.array([data.speakers]), "clients": np.array(data.clients)}
        self._key, self._training, self._epochs, self._device = key, training, epochs, device

    def batches(
        self, epochs: int | None, steps: int | Sequence[int] | None, purpose: str
    ) -> UtteranceBatches:
        """Return the batches of some epochs, by default those of a round."""
        if steps is not None:
            raise NotImplementedError("utterances are trained on for epochs, not steps")
        key: Key = self._key if purpose == "train" else (*self._key, purpose)
        accum_grad = self._training.accum_grad
        return UtteranceBatches(self.data, epochs or self._epochs, accum_grad, self._device, key)

    @property
    def secret(self) -> bytes:
        """Return the first utterance's features as bytes."""
        return self.data.audio(0).tobytes()

    def items(self, order: Sequence[int]) -> Iterator[tuple[list[int], Batch]]:
        """Yield single utterances: not one bit of what is sent may depend on a batch's shape."""
        plan = [[index] for index in order]
        return zip(plan, self.data.stream(plan, self._device), strict=True)
