"""Single utterances of an experiment, for attacks that infer their owner or content."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fedtools.audio.perturb import speakers_of, unperturbed
from fedtools.data.datadir import DataDir
from fedtools.lm.tokens import Tokenizer
from fedtools.lm.whisper_tokens import WhisperTokens
from fedtools.models.acoustic.asr import losses, outputs, trained_by
from fedtools.models.acoustic.plain_ctc import ctc_losses
from fedtools.models.criteria import Ctc
from fedtools.score.align import count_errors
from fedtools.tasks.asr.corpus import Corpus
from fedtools.tasks.asr.data import Batch, UtteranceSource
from fedtools.tasks.asr.model import AsrModels
from fedtools.tasks.asr.unfit import fit_names
from fedtools.tasks.base import Items


class Single:
    """Utterances of a data directory, accessed by name.

    Args:
        data: the data directory, with transcripts even if training reads none.
        owners: utterance -> its client; "" if no client trains on it.
        corpus, models, tokenizer: of the task under attack.
        epochs: a client's epochs in a round.
    """

    def __init__(
        self,
        data: DataDir,
        owners: dict[str, str],
        corpus: Corpus,
        models: AsrModels,
        tokenizer: Tokenizer | WhisperTokens,
        epochs: int,
    ):
        self._data, self._owners, self._epochs = data, owners, epochs
        self._corpus, self._models, self._tokenizer = corpus, models, tokenizer
        audio = corpus.gather(data, data.utterances)
        model = models.build()
        kept = fit_names(audio, model)
        if lost := len(audio) - len(kept):
            left_out = f"{lost} utterances with {trained_by(model).unfit[0]}: left out"
            print(f"{data.path}: {left_out}", file=sys.stderr)
            audio = corpus.gather(data, kept)
        self._audio = audio
        self._places = {name: index for index, name in enumerate(self._audio.names)}

    def items(self) -> Items:
        """Return the utterances as `Items`."""
        audio, names = self._audio, self._audio.names
        return Items(
            {name: self._owners[name] for name in names},
            dict(zip(names, speakers_of(self._data, names), strict=True)),
            unperturbed(self._data),
            dict(zip(names, audio.frames.tolist(), strict=True)),
            self.losses,
            lambda name: audio.audio(self._places[name]),
            self.source,
            lambda name: list(audio.tokens[self._places[name]]),
            self.loss_at,
            self.errors,
        )

    def losses(self, model: nn.Module, names: Sequence[str]) -> Tensor:
        """See `Items`; the criterion, whose sums go from frame to frame, gets whole batches."""
        places = [self._places[name] for name in names]
        found: dict[int, Tensor] = {}
        for chosen in self._audio.batches(among=places):
            batch = self._load(chosen)
            # An encoder's output may depend on the padding of its input.
            encoded = [outputs(model, one) for one in _singly(batch)]
            values = nn.utils.rnn.pad_sequence([one[0] for one, _ in encoded], batch_first=True)
            lengths = torch.cat([length for _, length in encoded])
            found |= zip(chosen, losses(model, values, lengths, batch), strict=True)
        return torch.stack([found[place] for place in places])

    def loss_at(
        self,
        model: nn.Module,
        names: Sequence[str],
        inputs: Sequence[Tensor],
        labels: Sequence[list[int]],
    ) -> Tensor:
        """See `Items`."""
        batch = self._with(names, inputs)
        rows = [torch.tensor(one, dtype=torch.long, device=self._models.device) for one in labels]
        batch["text"] = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        batch["text_lengths"] = torch.tensor([len(one) for one in labels])
        values, lengths = outputs(model, batch)
        if isinstance(model.criterion, Ctc):
            return ctc_losses(values, lengths, labels).mean()
        return losses(model, values, lengths, batch).mean()

    @torch.no_grad()
    def errors(self, model: nn.Module, name: str, speech: Tensor) -> tuple[int, int]:
        """See `Items`; the search is greedy."""
        batch, unit = self._with([name], [speech]), self._audio.unit
        (tokens,) = self._models.transcribe(model, outputs(model, batch), batch)
        reference = unit.cut(self._audio.texts[self._places[name]])
        hypothesis = unit.cut(self._tokenizer.decode(tokens))
        return count_errors(reference, hypothesis).errors, len(reference)

    def source(self, names: Sequence[str], client: str, number: int, seed: int) -> UtteranceSource:
        """See `Items`."""
        training, key = self._corpus.training, (seed, number, client)
        own = self._corpus.gather(self._data, names, training.labels == "transcripts")
        return UtteranceSource(own, key, training, self._epochs, self._models.device)

    def _load(self, places: Sequence[int]) -> Batch:
        loaded = self._audio.load(places)
        return Batch({key: value.to(self._models.device) for key, value in loaded.items()})

    def _with(self, names: Sequence[str], inputs: Sequence[Tensor]) -> Batch:
        """Return a batch with other inputs in place of the utterances' own."""
        batch = self._load([self._places[name] for name in names])
        batch["speech"] = nn.utils.rnn.pad_sequence(list(inputs), batch_first=True)
        batch["speech_lengths"] = torch.tensor([len(one) for one in inputs])
        return batch


def _singly(batch: Batch) -> Iterator[Batch]:
    """Yield each utterance of a batch without padding of its input."""
    kind = "hidden" if "hidden" in batch else "speech"
    for row, length in enumerate(batch["speech_lengths"].tolist()):
        one = Batch({key: value[row : row + 1] for key, value in batch.items()})
        one[kind] = one[kind][:, :length]
        yield one
