"""--ngpu reaches every command that can use a GPU; without one it is refused in one line."""

from __future__ import annotations

import re
import shlex

import pytest
import torch
import typer
from conftest import ROOT, run

from fedtools.cli import attack, decode, federation, language_models, rescore, score
from fedtools.cli.app import app

# Importing a group of commands registers it.
GROUPS = [attack, decode, federation, language_models, rescore, score]

SCRIPTS = [*ROOT.glob("egs/*/*/run.sh"), *ROOT.glob("local/*/*.sh"), *ROOT.glob("utils/*.sh")]


def with_ngpu(command, name: str = "") -> set[str]:
    """Return the commands, "decode" or "attack a2", that have an option --ngpu."""
    if hasattr(command, "commands"):
        parts = command.commands.items()
        return {found for part, one in parts for found in with_ngpu(one, f"{name} {part}".strip())}
    return {name} if any("--ngpu" in option.opts for option in command.params) else set()


def test_every_script_passes_it_on():
    commands = with_ngpu(typer.main.get_command(app))
    assert {"decode", "rounds", "attack a2", "train-nnlm"} <= commands
    called = set()
    for script in SCRIPTS:
        text = re.sub(r"\\\n\s*", "", script.read_text())
        for line in text.splitlines():
            for name in re.findall(r"\bfedtools ((?:attack )?[a-z0-9-]+)(?= )", line):
                if name in commands and not line.startswith("#"):
                    passed = '--ngpu "${ngpu}"' in line or line.endswith(' "$@"')
                    assert passed, f"{script}: {line}"
                    called.add(name)
    assert {"decode", "cross", "rescore", "rescore-best", "detection", "attack a2"} <= called


@pytest.fixture
def recipe(tmp_path):
    """Return a script that sources a recipe's files, and decodes; commands are only printed."""
    (tmp_path / "path.sh").write_text("")
    (tmp_path / "db.sh").write_text("")
    (tmp_path / "cmd.sh").write_text(
        'train_cmd="echo on train" decode_cmd="echo on decode" cuda_cmd="echo on cuda"\n'
    )
    script = tmp_path / "run.sh"
    (tmp_path / "utils").symlink_to(ROOT / "utils")
    (tmp_path / "exp" / "log").mkdir(parents=True)
    (tmp_path / "exp" / "log" / "train.init.log").touch()
    utils = shlex.quote(str(ROOT / "utils"))
    script.write_text(
        f"""set -euo pipefail
cd {shlex.quote(str(tmp_path))}
nj=2
ngpu=0
config=mini.yaml data=data exp=exp
. {utils}/parse_options.sh
. {utils}/recipe.sh
. {utils}/asr_steps.sh
experiment exp/one - 0 base fedavg train valid | utils/waves.py list
train_waves list train 1 0 fedtools init EXP --config "${{config}}" OPTIONS '&&' \
    fedtools rounds EXP --nj NJ --ngpu "${{ngpu}}" '&&' fedtools average EXP --ngpu "${{ngpu}}"
told=false
tabbed exp/one test --model start |
    decode_all decode fedtools decode --lm exp/lm --config "${{config}}" --ngpu "${{ngpu}}"
"""
    )
    return script


@pytest.mark.parametrize(
    ("ngpu", "train", "decode"), [("0", "train", "decode"), ("1", "cuda", "cuda")]
)
def test_recipes_decode_on_the_gpu(recipe, ngpu, train, decode):
    out = run("bash", recipe, "--ngpu", ngpu).ok().out.splitlines()
    lines = [line for line in out if not line.startswith("    ")]
    # An experiment is begun, trained and decoded, and its lists are merged.
    assert [line.split()[1] for line in lines] == ["train", train, decode, "train"]
    assert all(f"--ngpu {ngpu}" in line for line in lines[1:3])
    init = "--seed 0 --section base --method fedavg --data train=data/train --data valid=data/valid"
    # Of a stage, here two of them, the first command is printed.
    assert [line for line in out if line not in lines] == [
        f"    fedtools init exp/one --config mini.yaml {init} --asset tokens=exp/tokens",
        f"    fedtools decode --lm exp/lm --config mini.yaml --ngpu {ngpu} --nj 2 "
        "exp/one data/test exp/one/decode_test --job 1 --model start",
    ]
    assert lines[0] == (
        "on train exp/log/train.init.log utils/begin.py --nj 2 list 1 1 "
        "fedtools init EXP --config mini.yaml OPTIONS"
    )
    assert lines[1] == (
        f"on {train} --max-jobs-run 2 JOB=1:1 exp/log/train.JOB.log "
        f"utils/line.sh list JOB fedtools rounds EXP --nj 2 --ngpu {ngpu} && "
        f"utils/line.sh list JOB fedtools average EXP --ngpu {ngpu}"
    )
    assert "fedtools merge-nbest" in lines[3]
    assert lines[2] == (
        f"on {decode} --max-jobs-run 2 JOB=1:2 exp/log/decode.JOB.log utils/line.sh "
        f"exp/log/decode.list JOB fedtools decode --lm exp/lm --config mini.yaml --ngpu {ngpu} "
        "--nj 2"
    )
    assert (recipe.parent / "exp/log/decode.list").read_text().splitlines() == [
        f"exp/one\tdata/test\texp/one/decode_test\t--job\t{part}\t--model\tstart" for part in (1, 2)
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "command", [("decode", "EXP", "DATA", "OUT"), ("rescore-best", "EXP", "OUT")]
)
def test_refused_without_a_gpu(cli, tmp_path, command):
    names = [str(tmp_path / name) if name.isupper() else name for name in command]
    result = cli(*names, "--ngpu", "1")
    result.fails(1, "--ngpu 1, but torch sees no GPU")
    assert result.err.count("\n") == 1
