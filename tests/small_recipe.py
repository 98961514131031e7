"""A recipe that trains a list of keyword experiments, shared by several test files."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from commands import ROOT, Result, run
from forked import forked

UTILS = ROOT / "utils"
RUN = """set -euo pipefail
cd {folder}
nj=2
ngpu=0
config={config}
. {utils}/parse_options.sh
. {utils}/recipe.sh
exp=exp
train_waves list train 1 0 fedtools init EXP --config "${{config}}" OPTIONS '&&' \\
    fedtools rounds EXP --nj NJ --ngpu "${{ngpu}}" --evaluate test
echo all done
"""


def make_recipe(folder: Path, world: Path, commands: str = "train_cmd=utils/run.py") -> Path:
    """Write run.sh and the files it sources, in a folder whose name may have blanks.

    Args:
        world: the result of `keyword_world.make_world`.
        commands: the content of cmd.sh.
    """
    folder.mkdir(exist_ok=True)
    (folder / "utils").symlink_to(UTILS)
    path = forked({"PATH": str(Path(sys.executable).parent)})["PATH"]
    (folder / "path.sh").write_text(f"export PATH={shlex.quote(path)}:$PATH\n")
    (folder / "db.sh").touch()
    (folder / "cmd.sh").write_text(f"{commands}\n")
    named = {"folder": folder, "config": world / "config.yaml", "utils": UTILS}
    quoted = {name: shlex.quote(str(path)) for name, path in named.items()}
    (folder / "run.sh").write_text(RUN.format(**quoted))
    return folder


def listed(world: Path, name: str, after: str, *more: str) -> str:
    """Return a line for waves.py: exp/NAME trains two rounds of FedAvg."""
    words = [f"exp/{name}", after, "--method", "fedavg", "--set", "rounds=2"]
    words += ["--data", f"train={world / 'train'}", "--data", f"test={world / 'test'}", *more]
    return "\t".join(words) + "\n"


def order(folder: Path, text: str) -> Result:
    """Run waves.py on lines; the list is FOLDER/list."""
    return run(UTILS / "waves.py", folder / "list", input=text)
