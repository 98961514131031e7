"""Training of a neural language model on background text, by cross-entropy.

An epoch goes through every sentence once, in batches of sentences of about the same length. The
random numbers of an epoch depend on the seed and its number alone, and its end state is saved: a
killed run that is started again ends with the same model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedtools.core.atomic import sha256
from fedtools.core.config import Natural, Positive, fix, from_mapping, read_yaml
from fedtools.core.errors import UserError
from fedtools.core.locks import lock
from fedtools.core.progress import Count
from fedtools.core.seeds import generator, seed64
from fedtools.core.tables import write_tsv
from fedtools.data.symbols import warn_of_unknown
from fedtools.exchange.states import load_state, save_state
from fedtools.lm.ngram import read_sentences
from fedtools.lm.nnlm import CONFIG, MODEL, network_options
from fedtools.lm.nnlm_network import build_nnlm, losses, pad
from fedtools.lm.vocabulary import (
    UNKNOWN_ID,
    WORDS,
    Vocabulary,
    make_vocabulary,
    write_unigram,
)
from fedtools.models.training import (
    DTYPES,
    Training,
    check_optimizer,
    load_model,
    load_optimizer,
    make_optimizer,
    optimizer_state,
)

STATE, PERPLEXITY = "state.safetensors", "perplexity.tsv"
_COLUMNS = ("epoch", "train", "valid")


@dataclass(frozen=True)
class NnlmTraining(Training):
    """The section `nnlm` of a recipe's configuration.

    Attributes:
        lm_conf: the network, fields of `fedtools.lm.nnlm_network.NnlmOptions` (ESPnet's names).
        vocab_size: the most lines of words.txt, `</s>` and `<unk>` included; None for any number.
        min_count: words that are rarer in the training text are `<unk>`.
        epochs: passes over the training text.
        batch_words: the most words of a padded batch, ends of sentences included; a longer sentence
            is a batch of its own.
        sampled: the number of rarer words that are drawn for each batch, and stand for all of them
            in the sum that normalises probabilities; 0 sums over all words. Validation and scoring
            always sum over all words.
        frequent: the number of most frequent words that are in every sum, with `sampled`.
    """

    optim_conf: dict = field(default_factory=lambda: {"lr": 1e-3})
    grad_clip: float = 5.0
    lm_conf: dict = field(default_factory=dict)
    vocab_size: Positive | None = None
    min_count: Positive = 1
    epochs: Positive = 10
    batch_words: Positive = 2000
    sampled: Natural = 0
    frequent: Positive = 1000
    save_interval_steps: Natural = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.save_interval_steps:
            raise ValueError("save_interval_steps: the state is saved only after each epoch")
        if self.vocab_size is not None and self.vocab_size < 3:
            raise ValueError(f"vocab_size is {self.vocab_size}: no room for a word")


@dataclass(frozen=True)
class Texts:
    """Texts to train a model on: Kaldi texts, texts without utterance ids, and validation texts."""

    texts: Sequence[Path] = ()
    plain: Sequence[Path] = ()
    valid: Sequence[Path] = ()

    def origin(self) -> dict[str, list[str]]:
        """Return the sums of the texts, for comparison."""
        return {name: [sha256(path) for path in paths] for name, paths in asdict(self).items()}

    def counted(self, training: NnlmTraining) -> _Words:
        """Read the texts, and make a vocabulary.

        Raises:
            UserError: if a text is empty or damaged.
        """
        sentences = list(read_sentences(self.texts, self.plain))
        held_out = list(read_sentences(self.valid))
        for found, paths in ((sentences, [*self.texts, *self.plain]), (held_out, self.valid)):
            if not found:
                raise UserError("no words in the text", path=paths[0])
        made = make_vocabulary(sentences, training.vocab_size, training.min_count)
        return _Words(sentences, held_out, *made)


@dataclass(frozen=True)
class _Words:
    """Texts with their vocabulary and counts; see `make_vocabulary`."""

    sentences: list[list[str]]
    held_out: list[list[str]]
    vocabulary: Vocabulary
    counts: np.ndarray
    unknown: int


def read_options(config: str | Path | None, section: str) -> NnlmTraining:
    """Read the training options from a section of a YAML file; without a file, use the defaults."""
    where = f"{config}: {section}" if config else section
    content = read_yaml(config) if config else {}
    if config and section not in content:
        raise UserError(f"no section {section!r}", path=config)
    training = from_mapping(NnlmTraining, content.get(section), where)
    network_options(training.lm_conf, where)
    check_optimizer(training, where)
    return training


def train_nnlm(
    texts: Texts, out: Path, training: NnlmTraining, seed: int = 0, device: str = "cpu"
) -> list[tuple[float, float]]:
    """Train a model and write it to a folder, see `fedtools.lm.nnlm`.

    Args:
        texts: the training and validation texts.
        training: the options.
        out: the folder.
        seed: random seed.
        device: where it is trained.

    Returns:
        the perplexities of every epoch: on training text with dropout, and on validation text.

    Raises:
        UserError: if a text is empty or damaged, the folder was begun with other options or other
            text, or the training diverges.
    """
    out.mkdir(parents=True, exist_ok=True)
    options = network_options(training.lm_conf, "lm_conf")
    with lock(out, "train"):
        origin = {"seed": seed, **texts.origin()}
        content = {**_config_of(training), "lm_conf": asdict(options), **origin}
        _freeze(out, content)
        words = texts.counted(training)
        vocabulary = words.vocabulary
        vocabulary.write(out)
        write_unigram(out, vocabulary, words.counts, words.unknown)
        spoken = [word for sentence in words.held_out for word in sentence]
        unknown = sum(vocabulary.ids.get(word, UNKNOWN_ID) == UNKNOWN_ID for word in spoken)
        warn_of_unknown(unknown, len(spoken), texts.valid[0], out / WORDS)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed64(seed, "nnlm"))
            model = build_nnlm(options, len(vocabulary))
        run = _Run(model.to(device), vocabulary, training, seed, out)
        with training.settings():
            return run.train(
                *(_encode(vocabulary, part) for part in (words.sentences, words.held_out))
            )


def _config_of(training: NnlmTraining) -> dict[str, Any]:
    """Return the options as config.yaml has them, those of sampling only if it is used."""
    content = asdict(training)
    if not training.sampled:
        del content["sampled"], content["frequent"]
    return content


def _freeze(out: Path, content: dict[str, Any]) -> None:
    """Write a training's options, or raise a `UserError` if it has an epoch with other ones."""
    path, begun = out / CONFIG, any((out / name).exists() for name in (STATE, MODEL))
    # Left by a training that failed in its first epoch, perhaps because of its options.
    if not begun and path.exists() and read_yaml(path).keys() == content.keys():
        path.unlink()
    fix(path, content, "other options or other text")


def perplexity(model: nn.Module, sentences: Sequence[list[int]], batch_words: int) -> float:
    """Return exp of the mean -ln p over all words and ends; unknown words count as `<unk>`."""
    model.eval()
    total = 0.0
    with torch.inference_mode():
        for batch in _batches(list(map(len, sentences)), batch_words):
            total += float(_losses(model, [sentences[i] for i in batch]).double().sum())
    return _exp(total / sum(map(len, sentences)))


class _Run:
    """A training run."""

    def __init__(
        self, model: nn.Module, vocabulary: Vocabulary, training: NnlmTraining, seed: int, out: Path
    ):
        self.model, self.training, self.seed, self.out = model, training, seed, out
        self.vocabulary = vocabulary
        self.optimizer = make_optimizer(model, training)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.steps = 0
        self.history: list[tuple[float, float]] = []
        self.best: dict[str, torch.Tensor] = {}

    def train(self, sentences: list[list[int]], valid: list[list[int]]) -> list:
        """Train the remaining epochs, and write the best one's model at the end."""
        if (self.out / MODEL).exists():
            return self._finished()
        self._resume()
        epochs, total = self.training.epochs, sum(map(len, sentences))
        resumed = len(self.history)
        with Count("train-nnlm", epochs * total, "words", resumed * total) as progress:
            for epoch in range(resumed + 1, epochs + 1):
                progress.title = f"train-nnlm, epoch {epoch}/{epochs}"
                train = self._epoch(epoch, sentences, progress)
                held_out = perplexity(self.model, valid, self.training.batch_words)
                if not math.isfinite(train + held_out):
                    # With these options it would diverge again if it went on from this state.
                    (self.out / STATE).unlink(missing_ok=True)
                    remedy = "begin anew with a smaller learning rate"
                    problem = f"epoch {epoch}: the training diverged"
                    raise UserError(problem, path=self.out, remedy=remedy)
                self._keep(train, held_out)
                figures = f"perplexity {train:.2f}, valid {held_out:.2f}"
                progress.say(f"epoch {epoch}/{epochs}: {figures}, {progress.left()} left")
        save_state(self.out / MODEL, self.best)
        (self.out / STATE).unlink()
        return self.history

    def _epoch(self, epoch: int, sentences: list[list[int]], progress: Count) -> float:
        """Train one epoch, and return the perplexity of words when they were trained on."""
        training = self.training
        random = generator(self.seed, "nnlm", epoch)
        torch.manual_seed(seed64(self.seed, "nnlm", epoch, "dropout"))
        self.model.train()
        order = random.permutation(len(sentences))
        cut = _batches([len(sentences[i]) for i in order], training.batch_words)
        total = 0.0
        for number in random.permutation(len(cut)):
            batch = [sentences[order[i]] for i in cut[number]]
            self.steps += 1
            for group, base in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = training.learning_rate(base, self.steps)
            self.optimizer.zero_grad(set_to_none=True)
            sample = self._sample(random)
            loss = _losses(self.model, batch, DTYPES[training.train_dtype], sample)
            loss.mean().backward()
            if training.grad_clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), training.grad_clip)
            self.optimizer.step()
            total += float(loss.detach().double().sum())
            progress.advance(len(loss))
        return _exp(total / sum(map(len, sentences)))

    def _sample(self, random: np.random.Generator) -> torch.Tensor | None:
        """Draw rare words for a batch: the first rare id, then those drawn; None for all words."""
        first, number = min(self.training.frequent, len(self.vocabulary)), self.training.sampled
        rare = len(self.vocabulary) - first
        if not number or rare <= number:
            return None
        drawn = first + random.choice(rare, number, replace=False)
        return torch.tensor([first, *drawn.tolist()])

    def _keep(self, train: float, valid: float) -> None:
        """Write the state after an epoch, and the perplexities of all epochs so far."""
        if valid < min((before for _, before in self.history), default=math.inf):
            self.best = {
                name: value.detach().cpu().clone() for name, value in self.model.named_parameters()
            }
        self.history.append((train, valid))
        state: dict[str, Any] = {f"best.{name}": value for name, value in self.best.items()}
        state |= {f"model.{name}": value for name, value in self.model.named_parameters()}
        moments = optimizer_state(self.model, self.optimizer)
        state |= {f"optimizer.{name}": value for name, value in moments.items()}
        state["steps"] = np.array(self.steps)
        state["history"] = np.array(self.history)
        save_state(self.out / STATE, state)
        self._write_history()

    def _write_history(self) -> None:
        rows = (
            dict(zip(_COLUMNS, (number, f"{train:.4f}", f"{valid:.4f}"), strict=True))
            for number, (train, valid) in enumerate(self.history, 1)
        )
        write_tsv(self.out / PERPLEXITY, _COLUMNS, rows)

    def _resume(self) -> None:
        if not (self.out / STATE).exists():
            return
        parts: dict[str, dict[str, Any]] = {}
        for name, value in load_state(self.out / STATE).items():
            kind, _, rest = name.partition(".")
            parts.setdefault(kind, {})[rest] = value
        load_model(self.model.state_dict(), parts["model"])
        load_optimizer(self.model, self.optimizer, parts["optimizer"])
        self.best = {name: torch.as_tensor(value) for name, value in parts["best"].items()}
        self.steps = int(parts["steps"][""])
        self.history = [tuple(row) for row in parts["history"][""].tolist()]
        self._write_history()

    def _finished(self) -> list[tuple[float, float]]:
        from fedtools.core.tables import read_tsv

        # A kill after the model was written leaves the state behind.
        (self.out / STATE).unlink(missing_ok=True)
        rows = read_tsv(self.out / PERPLEXITY, _COLUMNS, ("train", "valid"), ("nan", "inf"))
        return [(float(row["train"]), float(row["valid"])) for row in rows]


def _losses(
    model: nn.Module,
    batch: list[list[int]],
    dtype: torch.dtype = torch.float32,
    sample: torch.Tensor | None = None,
) -> torch.Tensor:
    weight = model.decoder.weight
    inputs, targets = (part.to(weight.device) for part in pad(batch, len(weight) - 1))
    lower = torch.autocast(weight.device.type, dtype) if dtype != torch.float32 else nullcontext()
    with lower:
        return losses(model, inputs, targets, None if sample is None else sample.to(weight.device))


def _batches(lengths: Sequence[int], words: int) -> list[list[int]]:
    """Cut sentences into batches of about the same length, keeping the order of equal lengths."""
    found: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        # The last one is the longest.
        if found and (len(found[-1]) + 1) * lengths[index] <= words:
            found[-1].append(index)
        else:
            found.append([index])
    return found


def _encode(vocabulary: Vocabulary, sentences: Sequence[list[str]]) -> list[list[int]]:
    return [vocabulary.encode(" ".join(words)) for words in sentences]


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
