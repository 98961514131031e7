"""No script depends on the locale: under Turkish, [a-z] has no i, and numbers have a comma."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from commands import sources
from conftest import ROOT, run

SCRIPTS = sorted(
    path
    for path in sources((".ci", "egs", "local", "tests", "utils"), "*")
    if path.read_bytes().startswith(b"#!/usr/bin/env bash")
)
# A script's output with it, in any locale.
PROBE = r"""
id=none
. "$1/utils/parse_options.sh"
shopt -s nocasematch
printf '%s %.2f %s %s\n' "$id" 1.5 "${id,,}" "${id^^}"
awk 'BEGIN { print 0.5 }'
printf '%s\n' i I "$(printf '\304\261')" a_b aB | sort | tr '\n' ' '
grep -cE '^[a-z]$' <<<i
"""


@pytest.fixture(scope="module")
def turkish(tmp_path_factory) -> dict[str, str]:
    """Return an environment in Turkish, whose locale is built in a folder of its own."""
    folder, sources = tmp_path_factory.mktemp("locales"), Path("/usr/share/i18n/locales/tr_TR")
    if not shutil.which("localedef") or not sources.exists():
        pytest.skip(f"NOT TESTED under tr_TR: no localedef or no {sources} (apt install locales)")
    made = ["localedef", "-i", "tr_TR", "-f", "UTF-8", folder / "tr_TR.UTF-8"]
    subprocess.run(made, check=True, capture_output=True)
    environment = {"LOCPATH": str(folder), "LC_ALL": "tr_TR.UTF-8"}
    # Otherwise no test below could fail.
    missing = run("bash", "-c", "[[ i =~ ^[a-z]$ ]]; printf '%d %.1f' $? 1,5", env=environment)
    assert missing.out == "1 1,5"
    return environment


def test_options_with_an_i_and_what_follows_them(turkish, tmp_path):
    probe = tmp_path / "probe.sh"
    probe.write_text(PROBE.replace('"$1', f'"{ROOT}'))
    said = run("bash", probe, "--id", "title", env=turkish).ok()
    assert said.out.splitlines() == ["title 1.50 title TITLE", "0.5", "I aB a_b i \u0131 1"]


@pytest.mark.parametrize("name", ["commonvoice/asr1", "ami/rescore1", "speechcommands/kws1",
                                  "tedlium3/attack1"])  # fmt: skip
def test_recipes_know_their_options(turkish, name):
    script = ROOT / "egs" / name / "run.sh"
    plain = run(script, "--help", env={"LC_ALL": "C"}).ok().out
    assert re.search("^  --nj=", plain, re.MULTILINE)
    assert run(script, "--help", env=turkish).ok().out == plain
    for option in re.findall(r"^  --(\w*i\w*)=", plain, re.MULTILINE):
        run(script, f"--{option}", env=turkish).fails(2, f"--{option} needs a value")


def test_every_script_sets_the_locale():
    assert len(SCRIPTS) > 10
    for path in SCRIPTS:
        sets = r'^(export LC_ALL=C|\. .*parse_options\.sh"?)$'
        assert re.search(sets, path.read_text(), re.MULTILINE), path
