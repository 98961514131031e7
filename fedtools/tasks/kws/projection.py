"""Projections of a pretrained encoder's outputs: fitted on public data, checked by an experiment.

OUT/projection.safetensors   mean (D,) and map (R, D), see `fedtools.models.keywords.projection`
OUT/projection.yaml          the fields of `Fitted`
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedtools.audio.front_end import front_end
from fedtools.core.atomic import sha256
from fedtools.core.config import Positive, from_mapping, read_yaml, write_yaml
from fedtools.core.errors import UserError, some
from fedtools.data.clips import RATE, Clips, read_length
from fedtools.exchange.states import save_state
from fedtools.methods.base import Method
from fedtools.models.adapt.adaptation import NETWORK
from fedtools.models.keywords import build_network, inputs_of
from fedtools.models.keywords.base import Network
from fedtools.models.keywords.projection import fit, read_projection
from fedtools.models.pretrained.folder import Folder
from fedtools.models.pretrained.options import (
    ASSET,
    FITTED,
    PROJECTION,
    Pretrained,
    is_pretrained,
)
from fedtools.models.stacked import held_once
from fedtools.tasks.base import NewExperiment
from fedtools.tasks.identity import combined, of_clips
from fedtools.tasks.kws.clips import ClipFeatures, check_clips
from fedtools.tasks.kws.layer_outputs import AboveFrozen, open_outputs
from fedtools.tasks.site_facts import SiteFacts

# More people are not listed.
_MOST_NAMES = 10_000
_FEW = "give more clips, or a smaller --dimension"
_AGAIN = "run fedtools fit-projection again"


@dataclass(frozen=True)
class Fitted:
    """What a projection was fitted on, and for which model.

    Attributes:
        version: of these files.
        data: folder of the clips, as it was given.
        sha256sums: its fingerprint, as in an experiment's data.yaml.
        clips, people: their numbers; a client of packed clips is a person.
        names: the people, in C order; None if there are more than 10,000.
        clip_samples: the number of samples in a clip.
        model: the sum of the pretrained model, see `Folder.sum`.
        window: of the model in seconds, see `Pretrained`.
        dimension: the number of values that vectors are projected to.
        sha256: sum of the file with the tensors.
    """

    version: Literal[1]
    data: str
    sha256sums: str
    clips: Positive
    people: Positive
    names: list[str] | None
    clip_samples: Positive
    model: str
    window: Positive
    dimension: Positive
    sha256: str


def fit_projection(
    data: Path,
    out: Path,
    pretrained: Path,
    dimension: int,
    window: int | None = None,
    device: str = "cpu",
) -> tuple[Fitted, int, float]:
    """Fit mean and whitening of an encoder's mean outputs over time, and write both files.

    The outputs are those that experiments with `cache_frozen` and `adapt: {kind: head}` cache
    beside the clips; they are computed only if they are missing.

    Args:
        data: folder of packed clips.
        out: folder of the files.
        pretrained: folder of the pretrained model.
        dimension: the number of values to project to.
        window: see `Pretrained`.
        device: where the outputs are computed.

    Returns:
        what was fitted, the number of values of an output, and the share of their variance that
        the projection keeps, 0 to 1.

    Raises:
        UserError: if there are too few clips or values, the values vary in too few dimensions, or
            the model does not take such clips.
    """
    clips, folder = Clips.read(data), Folder.open(pretrained)
    _check_dimension(dimension, clips, folder)
    config: dict[str, object] = {"network": NETWORK, "path": str(pretrained), "sum": folder.sum}
    config |= {"adapt": {"kind": "head"}, "cache_frozen": True}
    config |= {"window": window} if window else {}
    options = from_mapping(Pretrained, config, str(pretrained))
    outputs = _outputs(clips, config, torch.device(device))
    try:
        found = fit(outputs, dimension)
    except FloatingPointError as error:
        problem = f"{error} of {pretrained}"
        raise UserError(problem, path=data, remedy="take another model") from None
    except ValueError as error:
        raise UserError(str(error), path=data, remedy=_FEW) from None
    out.mkdir(parents=True, exist_ok=True)
    tensors = {"mean": found.mean.astype("f4"), "map": found.map.astype("f4")}
    save_state(out / PROJECTION, tensors)
    fitted = Fitted(
        version=1,
        data=str(data),
        **of_clips(data, False),
        clips=len(clips.labels),
        people=len(clips.clients),
        names=listed(clips.clients),
        clip_samples=clips.samples,
        model=folder.sum,
        window=options.seconds(folder.kind, str(pretrained)),
        dimension=dimension,
        sha256=sha256(out / PROJECTION),
    )
    # Written last: until then, the sum in an older file tells that the two do not belong together.
    write_yaml(out / FITTED, asdict(fitted))
    return fitted, folder.size, found.share


def listed(people: list[str]) -> list[str] | None:
    """Return the names of `Fitted`: those of public data's people may be stored as they are."""
    return people if len(people) <= _MOST_NAMES else None


def _check_dimension(dimension: int, clips: Clips, folder: Folder) -> None:
    """Raise a `UserError` if outputs have fewer values, or clips cannot vary in as many ways."""
    if dimension > folder.size:
        problem = f"its outputs have {folder.size} values, --dimension is {dimension}"
        raise UserError(problem, path=folder.path, remedy="give a smaller --dimension")
    if (count := len(clips.labels)) <= dimension:
        problem = f"{count} clips, at least {dimension + 1} are needed for --dimension {dimension}"
        raise UserError(problem, path=clips.path, remedy=_FEW)


def _outputs(clips: Clips, config: Mapping[str, object], device: torch.device) -> np.ndarray:
    """Return the encoder's mean outputs of all clips, (clips, values), memory-mapped.

    Args:
        config: the section `model` of an experiment that caches them.
    """
    where, classes = str(config["path"]), len(clips.classes)
    network = build_network(config, classes, where)
    check_clips(network, config, clips.samples, clips.path)

    @cache
    def whole() -> Network:
        return build_network(config, classes, where, whole=True).to(device)

    front = AboveFrozen(front_end(*inputs_of(config)), whole)
    outputs = open_outputs(config, where, network, device)
    features = ClipFeatures(clips, front, device, outputs, clips.path.name)
    found: np.ndarray = features.cached(slice(0, len(clips.labels)))[:, 0].numpy()
    return found


def find_projection(new: NewExperiment[Method]) -> Path | None:
    """Return the file of a new experiment's projection, checked; None if its model has none.

    People of the experiment who are also among those that it was fitted on are named on stderr.

    Raises:
        UserError: if model and assets do not agree, or the projection is damaged, was made for
            another model, or was fitted on clients' or test data of the experiment.
    """
    model, where = new.options.model, f"{new.where}: model"
    options = from_mapping(Pretrained, model, where) if is_pretrained(model) else None
    chosen = options is not None and options.normalise == "projection"
    folder = new.assets.get(ASSET)
    if folder is None and not chosen:
        return None
    if options is None or not chosen:
        problem = f"asset {ASSET} needs model.normalise: projection, for network hf"
        raise UserError(problem, path=new.where, remedy=f"set it, or leave out --asset {ASSET}")
    if folder is None:
        remedy = f"give --asset {ASSET}=FOLDER, made by fedtools fit-projection"
        raise UserError("normalise: projection without a projection", path=where, remedy=remedy)
    path, tensors = folder / FITTED, folder / PROJECTION
    if not path.is_file():
        raise UserError("no projection here", path=folder, remedy="run fedtools fit-projection")
    fitted = from_mapping(Fitted, read_yaml(path), path)
    pretrained = Folder.open(options.path)
    # Where sites tell of their clips, no folder has them.
    samples = new.known.samples if new.known else read_length(new.data["train"])
    _check_fits(fitted, path, options, pretrained, samples, where)
    _check_tensors(fitted, tensors, pretrained.size)
    # A server alone protects nobody: it may fit a projection on what it trains on.
    used = {split: at for split, at in new.data.items() if new.method.federated or split != "train"}
    _check_people(fitted, path, used)
    if "train" not in new.data and new.known:
        _check_sites(fitted, path, new.known)
    return tensors


def _check_tensors(fitted: Fitted, path: Path, size: int) -> None:
    """Raise a `UserError` unless the file of a projection's tensors is the one described."""
    rows = len(read_projection(path, size)["map"])
    if rows != fitted.dimension:
        problem = f"{rows} dimensions, but {fitted.dimension} in {FITTED}"
        raise UserError(problem, path=path, remedy=_AGAIN)
    if sha256(path) != fitted.sha256:
        raise UserError(f"not the file that {FITTED} describes", path=path, remedy=_AGAIN)


def _check_fits(
    fitted: Fitted,
    path: Path,
    options: Pretrained,
    pretrained: Folder,
    samples: int,
    where: str,
) -> None:
    """Raise a `UserError` unless a projection is of an experiment's model, for clips like its own.

    Args:
        path: the file of `fitted`.
        options, where: of the model, and their source.
        samples: the number of samples in a clip of the experiment.
    """
    if fitted.model != pretrained.sum:
        remedy = f"fit one with --pretrained {options.path}"
        problem = f"a projection of another model than {options.path}"
        raise UserError(problem, path=path, remedy=remedy)
    window = options.seconds(pretrained.kind, where)
    if fitted.window != window:
        problem = f"fitted with a window of {fitted.window} s, the experiment has {window} s"
        raise UserError(problem, path=path, remedy=f"fit it with --window {window}")
    if fitted.clip_samples != samples:
        there, own = fitted.clip_samples / RATE, samples / RATE
        problem = f"fitted on clips of {there:g} s, those of the experiment have {own:g} s"
        remedy = f"fit it on clips packed with --clip-seconds {own:g}"
        raise UserError(problem, path=path, remedy=remedy)


def _check_people(fitted: Fitted, path: Path, data: Mapping[str, Path]) -> None:
    """Raise a `UserError` if a projection was fitted on data of an experiment; name shared people.

    Args:
        path: the file of `fitted`.
        data: the experiment's folders by split.
    """
    for split, folder in data.items():
        if of_clips(folder, False)["sha256sums"] == fitted.sha256sums:
            problem = f"fitted on the experiment's own {split} data, {folder}"
            raise UserError(problem, path=path, remedy="fit it on clips of other people")
    if fitted.names is None:
        said = f"its {fitted.people} people are not listed, and not compared with the clients"
        print(f"warning: {path}: {said}", file=sys.stderr)
        return
    for split, folder in data.items():
        if shared := sorted(set(fitted.names) & set(Clips.read(folder).clients)):
            said = f"{len(shared)} of its people are also in the {split} data: {some(shared)}"
            print(f"warning: {path}: {said}", file=sys.stderr)


def _check_sites(fitted: Fitted, path: Path, known: SiteFacts) -> None:
    """Do what `_check_people` does, for data that sites told of."""
    if combined({"sha256sums": fitted.sha256sums}) in known.sums:
        problem = "fitted on the training data of a site"
        raise UserError(problem, path=path, remedy="fit it on clips of other people")
    if shared := sorted(set(fitted.names or ()) & set(known.clients.clients)):
        said = f"{len(shared)} of its people are also in the train data: {some(shared)}"
        print(f"warning: {path}: {said}", file=sys.stderr)


def check_start(start: Path, before: Mapping[str, Tensor], network: Network) -> None:
    """Raise a `UserError` if a model to start from was trained with another projection.

    Args:
        start: its file, whose state the network has loaded.
        before: what `held_once` returned before that, copied.
        network: the network of the new experiment.
    """
    if any(not torch.equal(value, before[name]) for name, value in held_once(network).items()):
        remedy = "give its projection as the asset, or another model"
        raise UserError("a model with another projection", path=start, remedy=remedy)
