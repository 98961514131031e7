"""What may leave a federation with user-level privacy: published file by file."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedtools.core.atomic import check_new, new_folder, write_text
from fedtools.core.config import write_yaml
from fedtools.core.errors import UserError
from fedtools.data.symbols import BPE_MODEL, TOKEN_TYPE, TOKENS
from fedtools.exchange.experiment import write_sums
from fedtools.exchange.states import save_state
from fedtools.federation.federation import Federation
from fedtools.federation.user_privacy import UserProtection
from fedtools.federation.user_spending import CLIENT
from fedtools.privacy.statement import statement
from fedtools.privacy.user_ledger import ledger_rows
from fedtools.privacy.user_plan import FILE

# Labels or tokens, which are part of a model.
_SYMBOLS = ("classes.txt", "clip_samples", TOKENS, BPE_MODEL, TOKEN_TYPE)
# Options that are paths, or hold one, and those that describe the clients' data.
_PATHS = {"": ("data", "start"), "model": ("path",), "method_conf": ("noise_key",)}


def publish(path: Path, out: Path) -> list[Path]:
    """Write what may leave an experiment, and return the paths written.

    Raises:
        UserError: if the experiment has no user-level privacy, or a part of it is not known; or if
            `out` exists.
    """
    federation = Federation(path)
    protection = federation.protection
    if not isinstance(protection, UserProtection):
        remedy = "publish experiments of --method dpfedavg"
        raise UserError("no user-level privacy", path=federation.where, remedy=remedy)
    check_new(out)
    _check(federation, protection)
    experiment, last = federation.experiment, federation.experiment.result_round()
    releases = protection.releases
    # Not a speaker: whether all clients have data is nobody's to know.
    released = releases.released()
    rows = ledger_rows(releases.plan, released, CLIENT)
    with new_folder(out) as folder:
        for number in range(1, last + 2):
            sent = experiment.round(number)
            sent.start_sum()
            shutil.copyfile(sent.global_state, folder / f"round_{number:04d}.safetensors")
        save_state(folder / "model.safetensors", federation.states.result(None, last))
        for name in (FILE, *_SYMBOLS):
            if (path / name).exists():
                shutil.copyfile(path / name, folder / name)
        write_yaml(folder / "config.yaml", without_paths(vars(experiment.options)))
        write_text(folder / "README.md", statement(releases.plan, rows[-1], len(released)))
        names = sorted(one.name for one in folder.iterdir())
        write_sums(folder / "sha256sums", {name: folder / name for name in names})
    return [out / name for name in (*names, "sha256sums")]


def without_paths(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an experiment without paths, and without sums of its data."""
    found = {name: value for name, value in options.items() if name not in _PATHS[""]}
    for section, names in _PATHS.items():
        if section in found:
            found[section] = {k: v for k, v in found[section].items() if k not in names}
    return found


def _check(federation: Federation, protection: UserProtection) -> None:
    """Raise a `UserError` if what an experiment has released is not private."""
    releases, path = protection.releases, federation.experiment.path
    releases.record.check()
    if releases.plan.epsilon is None:
        remedy = "begin an experiment with method_conf.epsilon"
        raise UserError("no noise was added", path=path / FILE, remedy=remedy)
    if releases.plan.simulated_users > 1:
        problem = f"its noise was divided by {releases.plan.simulated_users:g}, as a simulation"
        remedy = "begin an experiment without simulated_users"
        raise UserError(problem, path=path / FILE, remedy=remedy)
    if releases.record.fixed:
        problem = "its noise has a fixed nonce, and so is not secret"
        raise UserError(problem, path=path, remedy="begin an experiment without FEDTOOLS_NONCE")
    if not federation.experiment.last_round():
        remedy = f"run fedtools rounds {path}"
        raise UserError("no round is complete", path=path, remedy=remedy)
