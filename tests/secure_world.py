"""Federations of keyword spotting with secure sums: in one folder, and over sites."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import private_world
from commands import Result, inside
from private_world import CLIENTS

PLAIN = "method_conf={noise: 0.0, clip: 0.05, local_steps: 2}"
SECURE = "method_conf={noise: 0.0, clip: 0.05, local_steps: 2, sums: secure}"
STEPS = ("keys", "shares", "masked", "survivors", "unmask")
SITES = {client: ("east", "west", "north")[at % 3] for at, client in enumerate(CLIENTS)}


def make_world(root: Path) -> Path:
    """Make clips, a configuration, keys of clients and sites, and two rounds of plain sums."""
    private_world.make_world(root)
    made = inside("client-keys", root / "keys", "--clients", root / "clients").ok()
    (root / "client_keys.tsv").write_text(made.out)
    rows = "".join(f"{client}\t{site}\n" for client, site in SITES.items())
    (root / "sites.tsv").write_text(f"client\tsite\n{rows}")
    names = ("server", *sorted({*SITES.values()}))
    keys = {name: inside("site-key", root / f"{name}.key").ok().out.strip() for name in names}
    rows = "".join(f"{name}\t{key}\n" for name, key in keys.items())
    (root / "roster.tsv").write_text(f"site\tkey\n{rows}")
    private_world.begin(root, root / "plain", PLAIN)
    inside("rounds", root / "plain", "--to", "2").ok()
    return root


def init(root: Path, path: Path, setting: str = SECURE, *more: str | Path) -> Result:
    """Return the result of beginning an experiment with secure sums in one folder."""
    return inside(
        *("init", path, "--config", root / "config.yaml", "--method", "dpfedavg"),
        *("--data", f"train={root / 'train'}", "--data", f"test={root / 'test'}"),
        *("--clients", root / "clients", "--set", setting),
        *(more or ("--client-keys", root / "client_keys.tsv")),
    )


def begin(root: Path, path: Path, setting: str = SECURE, *more: str | Path) -> Path:
    """Begin an experiment with secure sums and keys of its own, and return its path."""
    init(root, path, setting, *more).ok()
    return path


def keys_for(root: Path, path: Path) -> Path:
    """Copy the clients' keys, so that promises are of one test alone."""
    folder = path.with_name(f"{path.name}.keys")
    folder.mkdir(mode=0o700)
    for key in (root / "keys").glob("*.key"):
        shutil.copy(key, folder / key.name)
    return folder


def train(path: Path, keys: Path, jobs: Sequence[int] = (1, 2, 3), number: int = 1) -> None:
    """Do the step that is due, for some jobs."""
    for job in jobs:
        inside("train-local", path, "--round", number, "--job", job, "--keys", keys).ok()


def aggregate(path: Path, number: int = 1, *more: str) -> Result:
    """Let the server do its step."""
    return inside("aggregate", path, "--round", number, *more)


def until(path: Path, keys: Path, step: str, change: Callable[[str], None] = str) -> None:
    """Let all clients do the steps before one, and the server reply to them.

    Args:
        change: is called with each step between the clients' part and the server's.
    """
    for one in STEPS[: STEPS.index(step)]:
        train(path, keys)
        change(one)
        aggregate(path).ok()


def state(path: Path, number: int = 2) -> bytes:
    """Return the bytes of the state that a round starts from."""
    return (path / f"round_{number:04d}" / "global.safetensors").read_bytes()


def kept_of(keys: Path) -> dict[Path, dict]:
    """Return what clients keep of open attempts."""
    return {path: json.loads(path.read_text()) for path in keys.glob("secrets.*")}
