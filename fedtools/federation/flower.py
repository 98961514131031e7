"""A federation over Flower: the app that Flower runs at the server and at the sites."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from fedtools.core.atomic import check_new, new_folder, write_text
from fedtools.core.errors import UserError
from fedtools.exchange.experiment import Experiment

# The app's own files, which import nothing of fedtools.
TEMPLATE = Path(__file__).parent / "flower_app"
PACKAGE = "fedtools_flower"


def write_app(path: Path, out: Path) -> None:
    """Write the Flower App of an experiment's rounds.

    It holds the experiment's label and its number of rounds, and no path.

    Raises:
        UserError: if the experiment has no sites, or `out` exists.
    """
    experiment = Experiment(path)
    if not experiment.sites:
        raise UserError("has no sites", path=path, remedy="begin an experiment with --sites")
    check_new(out)
    project = (TEMPLATE / "pyproject.toml").read_text("utf-8")
    project = project.replace("@experiment@", experiment.label)
    rounds = f"rounds = {experiment.options.rounds}"
    project = re.sub(r"^rounds = .*$", rounds, project, count=1, flags=re.M)
    with new_folder(out) as folder:
        (folder / PACKAGE).mkdir()
        for source in TEMPLATE.glob("*.py"):
            shutil.copyfile(source, folder / PACKAGE / source.name)
        write_text(folder / "pyproject.toml", project)
