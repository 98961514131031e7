"""The utterances of an experiment's splits, of other folders, and of features from clients."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

from fedtools.audio.feature_kinds import kind_of
from fedtools.core.config import read_yaml
from fedtools.core.errors import UserError
from fedtools.core.untrusted import Seal
from fedtools.data.datadir import DataDir, invert
from fedtools.exchange.layer_cache import place_of
from fedtools.exchange.ledger import SERVER_ROW, read_round
from fedtools.exchange.messages import COUNTED
from fedtools.exchange.sent_features import open_sent, sent_names
from fedtools.lm.tokens import Tokenizer
from fedtools.lm.whisper_tokens import WhisperTokens
from fedtools.methods.base import ROOT, Method
from fedtools.models.acoustic.asr import trained_by
from fedtools.server.shares import taken_of
from fedtools.tasks.alike import check_kind_of
from fedtools.tasks.asr.data import Utterances, read_data
from fedtools.tasks.asr.layer_outputs import keep_hidden
from fedtools.tasks.asr.model import AsrModels
from fedtools.tasks.asr.server_labels import ServerLabels
from fedtools.tasks.asr.unfit import fit_names, zeros_of
from fedtools.tasks.base import Task
from fedtools.tasks.facts import ALL
from fedtools.tasks.identity import SUM
from fedtools.tasks.layer_outputs import options_of


class Corpus:
    """Utterances in batches for the models of a task.

    Args:
        task: gives the data directories.
        tokenizer: of transcripts.
        models: the models that the utterances must fit.

    Attributes:
        training: the options of the experiment.
    """

    def __init__(self, task: Task[Method], tokenizer: Tokenizer | WhisperTokens, models: AsrModels):
        self._task, self._models, self._experiment = task, models, task.experiment
        self.training, self._tokenizer = models.training, tokenizer
        model, where = self._experiment.options.model, f"{task.where}: model"
        self._cached = options_of(model, where)
        # The data directories read so far, by split and whether archives may be missing.
        self._data: dict[tuple[str, bool], DataDir] = {}
        self._utterances: OrderedDict[tuple[str, str], Utterances] = OrderedDict()
        self._received: Utterances | None = None

    def read(self, split: str, may_lack: bool = False) -> DataDir:
        """Return the data directory of a split, "train" without transcripts if none are needed.

        Args:
            may_lack: archives may be missing.
        """
        # See `Task.data_path`.
        asked = split, may_lack and (split, False) not in self._data
        if asked not in self._data:
            reads = split != "train" or self.training.reads_transcripts
            labels = ("text",) if reads else ()
            path = self._task.data_path(split, may_lack)
            self._data[asked] = self.read_folder(path, *labels, may_lack=may_lack)
        return self._data[asked]

    def read_folder(self, path: str | Path, *tables: str, may_lack: bool = False) -> DataDir:
        """Read any data directory whose features fit the models, see `read_data`."""
        data = read_data(path, self._experiment.options.model, *tables, may_lack=may_lack)
        kind = kind_of(data.feats_scp, data.path / "feats.scp")
        check_kind_of(kind, self._experiment, data.path)
        return data

    def utterances(self, split: str, client: str, may_lack: bool = False) -> Utterances:
        """Return the utterances of one client (or of `ALL`) in a split.

        The most recently used features stay in memory for later rounds, as far as `cache_mb`
        allows; outputs of frozen layers stay on disk, if the model's options say so.

        Args:
            may_lack: archives of other clients may be missing.
        """
        key = split, client
        if key not in self._utterances:
            data = self.read(split, may_lack)
            names = data.utterances if client == ALL else data.client_utterances(client)
            found = (
                self.gather_trained(data, names)
                if split in ("train", ROOT)
                else self.gather(data, names)
            )
            if self._cached:
                owner = None if client == ALL else client
                sums = self._sums[split]
                # In the capsule of a site that told of its data.
                known = sums["feats.scp"] if "feats.scp" in sums else sums[SUM]
                place = partial(place_of, data.path, owner, known)
                with self.training.settings():
                    title = owner or split
                    keep_hidden(found, place, self._cached, self._models, title)
            self._make_room(found)
            self._utterances[key] = found
        self._utterances.move_to_end(key)
        return self._utterances[key]

    @cached_property
    def _sums(self) -> Mapping[str, Mapping[str, str]]:
        """Return the sums of each split's data, with which those on disk have been compared."""
        found: Mapping[str, Mapping[str, str]] = read_yaml(self._experiment.path / "data.yaml")
        return found

    def gather(
        self, data: DataDir, names: Sequence[str], labelled: bool | None = None
    ) -> Utterances:
        """Return some utterances of a data directory, in batches for the model.

        Args:
            labelled: whether each needs a transcript; by default if the data has any.
        """
        zeros = zeros_of(self._models.build(), self.training)
        labelled = bool(data.text) if labelled is None else labelled
        bins = self.training.batch_bins
        return Utterances(data, names, self._tokenizer, bins, zeros, labelled)

    def gather_trained(self, data: DataDir, names: Sequence[str]) -> Utterances:
        """Return those of a client's utterances that it trains on.

        Raises:
            NoData: if there are none.
        """
        found = self.gather(data, names)
        if self.training.labels != "transcripts":
            return found
        kept = fit_names(found, self._models.build())
        return self.gather(data, kept) if len(kept) < len(found) else found

    def gather_sent(
        self,
        data: DataDir,
        names: Sequence[str],
        seals: Mapping[str, Seal],
        labelled: bool = False,
    ) -> Utterances:
        """Return features that clients sent, with batches as long as those of filterbanks.

        Args:
            labelled: whether `data.text` has the words of each.
        """
        bins = max(1, round(self.training.batch_bins * self._models.cut().share))
        return Utterances(data, names, self._tokenizer, bins, labelled=labelled, seals=seals)

    def _make_room(self, found: Utterances) -> None:
        limit = self.training.cache_mb << 20
        found.keep = found.bytes <= limit
        kept = sum(other.bytes for other in self._utterances.values() if other.keep)
        while found.keep and self._utterances and kept + found.bytes > limit:
            _, oldest = self._utterances.popitem(last=False)
            kept -= oldest.bytes if oldest.keep else 0

    def sent(self, number: int) -> Utterances:
        """Return the features that clients sent in a round, without those of refused messages."""
        experiment = self._experiment
        if self._received is None:
            data, seals = DataDir(experiment.round(number).path), dict[str, Seal]()
            sent = {
                row.client: open_sent(experiment, number, row.client)
                for row in read_round(experiment, number)
                if row.client != SERVER_ROW and row.status in COUNTED
            }
            for client, names in taken_of(sent, self._task.method.max_weight_ratio).items():
                data.feats_scp |= {name: sent[client].scp[name] for name in names}
                data.utt2client |= dict.fromkeys(names, client)
                seals |= sent[client].seals
            if not data.feats_scp:
                raise UserError("no client has sent any features", path=data.path)
            found = self._labelled(number, data, seals)
            found.keep = found.bytes <= self.training.cache_mb << 20
            self._received = found
        return self._received

    def _labelled(self, number: int, data: DataDir, seals: Mapping[str, Seal]) -> Utterances:
        """Return sent features with the labels that `server_labels` asks for, but no empty ones.

        Raises:
            UserError: if all labels are empty.
        """
        kind = self.training.server_labels
        if kind == "continuous":
            return self.gather_sent(data, list(data.feats_scp), seals)
        labels = ServerLabels(self._experiment, self._models, self._tokenizer)
        for client in invert(data.utt2client):
            names = data.client_utterances(client)
            if kind == "transcripts":
                data.text |= self._transcripts(client, names)
            else:
                data.text |= labels.of(number, client, self.gather_sent(data, names, seals))
        if not data.text:
            remedy = "set server_labels: continuous, or begin with a better model"
            problem = "all labels of clients' features are empty"
            raise UserError(problem, path=data.path, remedy=remedy)
        found = self.gather_sent(data, list(data.text), seals, labelled=True)
        model = self._models.build()
        kept = fit_names(found, model)
        if lost := len(found) - len(kept):
            effect = f"{lost} of {len(found)} labels have {trained_by(model).unfit[0]}: left out"
            print(f"round {number}, server: {effect}", file=sys.stderr)
            found = self.gather_sent(data, kept, seals, labelled=True)
        return found

    def _transcripts(self, client: str, names: Sequence[str]) -> dict[str, str]:
        """Return the transcripts of a client's features, which a real server never has."""
        own = self.utterances("train", client)
        sent = sent_names(own.audio(0).tobytes(), client, len(own))
        texts = dict(zip(sent, own.texts, strict=True))
        return {name: texts[name] for name in names if texts[name]}
