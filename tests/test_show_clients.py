"""The clients of a round: norms, losses and shares, computed apart from the files."""

from __future__ import annotations

import re

import keywords
import numpy as np
import pytest
from conftest import inside
from safetensors.numpy import load_file


@pytest.fixture(scope="module")
def exp(tmp_path_factory):
    root = tmp_path_factory.mktemp("show")
    keywords.pack(root / "train", {"c0": [3, 2, 1, 4], "c1": [1, 2, 3, 40], "c2": [1, 1, 1, 1]})
    keywords.config_file(root / "c.yaml", rounds=2, clients_per_round=3, keep_updates=True)
    words = "init", root / "exp", "--config", root / "c.yaml", "--method", "fedavg"
    more = "--set", "method_conf.weighting=utterances", "--set", "method_conf.max_weight_ratio=4"
    said = inside(*words, *more, "--data", f"train={root / 'train'}").ok().out
    values = sum(value.size for value in load_file(root / "exp/init.safetensors").values())
    # Everything but BatchNorm's statistics and the like is sent as float32, by 3 clients.
    sent = load_file(root / "exp/round_0001/global.safetensors")
    size = sum(value.nbytes for value in sent.values())
    assert f"3 clients, 3 in round 1; a model of {values:,} values" in said
    shown = re.search(r"; ([\d.]+) kB to each client, ([\d.]+) kB in a round, and as much", said)
    assert float(shown[1]) == pytest.approx(size / 1e3, abs=0.01)
    assert float(shown[2]) == pytest.approx(3 * size / 1e3, abs=0.01)
    assert inside(*words, *more, "--data", f"train={root / 'train'}").ok().out == ""
    inside("rounds", root / "exp", "--nj", "1").ok()
    return root / "exp"


def norm(new, old):
    names = [name for name in new if "running_" not in name and new[name].dtype.kind == "f"]
    return np.sqrt(sum(np.square(new[n].astype("f8") - old[n]).sum() for n in names))


def test_norm_loss_and_share_of_each_client_and_the_server(exp):
    said = inside("show", exp, "--clients", "--round", "1").ok().out
    shown = [line.strip() for line in said.splitlines() if "---" not in line]
    header, *lines = (re.split(r"  +", line) for line in shown)
    assert header == ["client", "utterances", "steps", "loss", "norm", "share", "status"]
    found = {line[0]: line for line in lines}
    assert list(found) == ["c0", "c1", "c2", "server"]
    old, new = (load_file(exp / f"round_000{at}/global.safetensors") for at in (1, 2))
    sent = load_file(exp / "round_0001/update.1.safetensors")
    table = (exp / "round_0001/update.1.tsv").read_text().splitlines()
    names, *rows = (line.split("\t") for line in table)
    place, order = names.index("loss"), [row[0] for row in rows]
    # 10, 46 and 4 clips; the second's weight is at most four times the median's.
    weights = np.array([10, 40, 4]) / 54
    losses = [float(rows[order.index(client)][place]) for client in ("c0", "c1", "c2")]
    for row, client in enumerate(("c0", "c1", "c2")):
        own = {name: value[order.index(client)] for name, value in sent.items()}
        assert float(found[client][4]) == pytest.approx(norm(own, old), rel=1e-3)
        assert float(found[client][3]) == pytest.approx(losses[row], rel=1e-3)
        assert found[client][5] == f"{100 * weights[row]:.1f} %"
    server = found["server"]
    assert float(server[4]) == pytest.approx(norm(new, old), rel=1e-3)
    assert float(server[3]) == pytest.approx(weights @ losses, rel=1e-3)
    assert server[5] == "100.0 %"


def test_what_is_not_there_is_one_line(exp, tmp_path):
    inside("show", exp, "--clients", "--round", "3").fails(1, "round 3 is not complete")
    inside("show", exp, "--round", "1").fails(2, "needs --clients")
    assert "server" in inside("show", exp, "--clients").ok().out
    for path in exp.glob("round_0002/update.*"):
        path.unlink()
    inside("show", exp, "--clients").fails(1, "no messages of clients", "keep_updates: true")
