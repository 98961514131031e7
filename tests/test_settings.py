"""torch's process-wide settings are an experiment's while it works, and are then restored."""

from __future__ import annotations

import pytest
import simulated
import torch
from conftest import inside

from fedtools.federation.federation import Federation
from fedtools.federation.steps import aggregate, sample, train_local
from fedtools.models.training import torch_settings

THREADS = (1, 2)


@pytest.fixture(scope="module")
def begin(tmp_path_factory):
    """Make an experiment with a number of threads; all have the same initial model."""
    root = tmp_path_factory.mktemp("settings")
    simulated.data_dir(root / "train", ["au"], 6)
    text = root / "train" / "text"
    inside("train-tokens", text, root / "tokens", "--token-type", "char").ok()
    simulated.config_file(root / "config.yaml")

    def made(name: str, threads: int):
        inside(
            "init", root / name, "--config", root / "config.yaml", "--method", "fedavg",
            "--data", f"train={root / 'train'}", "--asset", f"tokens={root / 'tokens'}",
            "--set", f"training.num_threads={threads}",
        ).ok()  # fmt: skip
        return root / name

    return made


def set_now() -> tuple:
    """Return torch's process-wide settings."""
    backends = torch.backends.cudnn, torch.backends.cuda.matmul
    tf32 = [backend.allow_tf32 for backend in backends]
    return torch.get_num_threads(), torch.backends.cudnn.deterministic, *tf32


def test_two_experiments_of_one_process_end_as_each_alone(begin):
    """One or two threads add in another order, so that the last bit shows whose were used."""
    alone = []
    for threads in THREADS:
        path = begin(f"alone{threads}", threads)
        inside("rounds", path, "--to", "1").ok()
        alone.append((path / "round_0002" / "global.safetensors").read_bytes())
    assert alone[0] != alone[1]
    before = set_now()
    opened = [Federation(begin(f"beside{threads}", threads)) for threads in THREADS]
    assert [federation.task.training.num_threads for federation in opened] == list(THREADS)
    assert set_now() == before
    for federation, expected in zip(opened, alone, strict=True):
        sample(federation.experiment, federation.method, 1, 1)
        train_local(federation, 1, 1)
        aggregate(federation, 1)
        assert federation.experiment.round(2).global_state.read_bytes() == expected
        assert set_now() == before


def test_settings_end_with_the_work_however_it_ends():
    before = set_now()
    with pytest.raises(RuntimeError), torch_settings(3, tf32=True):
        assert set_now() == (3, True, True, True)
        with torch_settings(1):
            assert set_now() == (1, True, False, False)
        assert set_now() == (3, True, True, True)
        raise RuntimeError
    assert set_now() == before


def test_no_command_leaves_them_behind(begin, tmp_path):
    """This covers training, evaluation, averages and decoding, one after the other."""
    path, before = begin("commands", 2), set_now()
    data = path.parent / "train"
    for command in (
        ("rounds", path, "--to", "1"),
        ("evaluate", path, "--split", "train"),
        ("decode", path, data, tmp_path / "decoded", "--model", "round:1"),
    ):
        inside(*command).ok()
        assert set_now() == before
