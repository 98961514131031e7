"""The shell utilities and job runners, called as recipes call them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import alive, sources, wait_until
from conftest import ROOT, Result, run, start
from hypothesis import given, settings
from hypothesis import strategies as st

RUN = ROOT / "utils/run.py"
SLURM = ROOT / "utils/slurm.py"


def script(path: Path, text: str) -> Path:
    """Write an executable bash script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}")
    path.chmod(0o755)
    return path


# ------------------------------------------------------------------------- parse_options.sh
@pytest.fixture
def options(tmp_path):
    """Write a script with some defaults, which prints them and its remaining arguments."""
    path = script(
        tmp_path / "a folder" / "options.sh",
        f"""set -euo pipefail
cd "$(dirname "$0")"
ROOT=/nowhere
stage=1
foo_bar=            # with a comment
                    # that goes on
                    #
flag=true
export exported=a
    indented=no
    # of what is no option
help_message="Usage: options.sh
  stage=1 is the first"
. {shlex.quote(str(ROOT / "utils/parse_options.sh"))}
later=1
printf '%s\\n' "$stage" "$foo_bar" "$flag" "$exported" "$indented" "$later" "$#" "$@"
""",
    )

    def call(*arguments: str, **kwargs) -> Result:
        return run(path, *arguments, **kwargs)

    return call


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ((), ["1", "", "true", "a", "no", "1", "0"]),
        (("--stage", "3"), ["3", "", "true", "a", "no", "1", "0"]),
        (("--stage=3", "--exported", "b"), ["3", "", "true", "b", "no", "1", "0"]),
        (("--foo-bar", "x=y", "--flag=false"), ["1", "x=y", "false", "a", "no", "1", "0"]),
        (("--foo_bar", "", "x", "--stage"), ["1", "", "true", "a", "no", "1", "2", "x", "--stage"]),
        (("--foo_bar", "--baz 3"), ["1", "--baz 3", "true", "a", "no", "1", "0"]),
        (("--foo-bar=--stage",), ["1", "--stage", "true", "a", "no", "1", "0"]),
        (("--stage", "-1", "--", "--x"), ["-1", "", "true", "a", "no", "1", "1", "--x"]),
    ],
)
def test_options_are_set(options, arguments, printed):
    assert options(*arguments).ok().out.split("\n")[:-1] == printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nope", "1"), "unknown option --nope; options: --stage --foo_bar --flag --exported"),
        (("--PATH", "/x"), "unknown option --PATH"),
        (("--ROOT=/x",), "unknown option --ROOT"),
        (("--HOME", "/x"), "unknown option --HOME"),
        (("--BASH_ENV", "/x"), "unknown option --BASH_ENV"),
        (("--indented", "yes"), "unknown option --indented"),
        (("--later", "2"), "unknown option --later"),
        (("--help_message", "2"), "unknown option --help_message"),
        (("--outer", "2"), "unknown option --outer"),
        (("--stage[0]", "2"), "unknown option --stage[0]"),
        (("--stage;id", "2"), "unknown option --stage;id"),
        (("-x",), "unknown option -x"),
        (("--stage",), "--stage needs a value"),
        (("--foo-bar", "--flag", "false"), "--foo-bar needs a value, not the option --flag"),
        (("--flag", "yes"), "--flag must be true or false, not 'yes'"),
        (("--stage", "two"), "--stage must be a whole number, not 'two'"),
    ],
)
def test_options_are_refused(options, arguments, said):
    failed = options(*arguments, env={"outer": "from the environment"}).fails(2, said)
    assert failed.err.count("\n") == 1
    assert not failed.out


def test_help_is_printed(options):
    assert options("--stage", "2", "--help").ok().out.splitlines() == [
        "Usage: options.sh",
        "  stage=1 is the first",
        "Options and their defaults:",
        "  --stage=1",
        "  --foo_bar=            # with a comment",
        "                        # that goes on",
        "                        #",
        "  --flag=true",
        "  --exported=a",
    ]


PARSING = sorted(
    str(path.relative_to(ROOT))
    for path in sources(("egs", "local", "utils"), "*.sh")
    if re.search(r"^\. .*/parse_options\.sh", path.read_text(), flags=re.M)
)


@pytest.mark.parametrize("name", PARSING)
def test_help_of_every_script_lists_its_options(name, tmp_path):
    """From any folder, also with blanks in its name, options are listed in the script's order."""
    above, _, _ = (ROOT / name).read_text().partition("/parse_options.sh")
    lines = re.findall(r"^[a-z]\w*=.*\n(?: +#.*\n)*", above, flags=re.M)
    lines = "".join(line for line in lines if not line.startswith("help_message=")).splitlines()
    indented = [(" " * 4 if line.startswith(" ") else "  --") + line for line in lines]
    (tmp_path / "a folder").symlink_to(ROOT)
    path = tmp_path / "a folder" / name
    calls = [(path.parent, f"./{path.name}"), (tmp_path, f"a folder/{name}"), ("/", path)]
    # This one gets its folder from its call.
    if name == "local/commonvoice/an4.sh":
        calls = [(tmp_path / "a folder/egs/commonvoice/asr1", "local/an4.sh")]
    for folder, called in calls:
        shown = run(called, "--help", cwd=folder).ok()
        usage, _, options = shown.out.partition("\nOptions and their defaults:\n")
        assert usage.startswith(f"Usage: {called} ")
        assert options.splitlines() == indented
        assert not shown.err


def test_every_script_that_has_options_is_tested():
    assert {"utils/attack_updates.sh", "local/tedlium3/keywords.sh"} < set(PARSING)
    recipes = {str(path.relative_to(ROOT)) for path in (ROOT / "egs").glob("*/*/run.sh")}
    assert len(recipes) == 4 and recipes < set(PARSING)


def test_options_of_a_script_called_by_a_relative_path(options, tmp_path):
    path = Path("a folder/options.sh")
    assert run(path, "--stage", "7", cwd=tmp_path).ok().out.startswith("7\n")


STAGES = """set -euo pipefail
cd "$(dirname "$0")"
stage=1
stop_stage=7
keywords=
seed=0
. {root}/utils/parse_options.sh
begins() {{ [ "$stage" -le "$1" ] && [ "$stop_stage" -ge "$1" ]; }}
fail() {{ echo "$0: ${{*:2}}" >&2; exit "$1"; }}
{function}
check_kept exp "--keywords $keywords" 1 keywords
echo "$stage $stop_stage$given_options"
"""


@pytest.fixture
def staged(tmp_path):
    """Write a script with stages, which says what it was given."""
    text = (ROOT / "utils/recipe.sh").read_text()
    function = re.search(r"^check_kept\(\).*?^}$", text, re.MULTILINE | re.DOTALL)[0]
    return script(
        tmp_path / "run.sh", STAGES.format(root=shlex.quote(str(ROOT)), function=function)
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--stage", "8"), "--stage 8: the last stage is 7"),
        (("--stage", "8", "--stop_stage", "9"), "--stage 8: the last stage is 7"),
        (("--stage", "5", "--stop_stage", "3"), "--stage 5 is after --stop_stage 3"),
    ],
)
def test_a_run_of_no_stage_is_wrong_usage(staged, arguments, said):
    run(staged, *arguments).fails(2, said)


@pytest.mark.parametrize("arguments", [(), ("--stage", "7"), ("--stage", "-1"), ("--stage=2",)])
def test_runs_of_some_stage_say_what_they_were_given(staged, arguments):
    given = " stage " if arguments else " "
    assert run(staged, *arguments).ok().out.endswith(f" 7{given}\n")
    # Options alone are checked.
    run(staged, "--stop_stage", "0").ok()


def test_options_of_data_are_those_that_the_data_were_made_with(staged):
    """A later stage with other ones would show tables of data that were never made."""
    (staged.parent / "exp").mkdir()
    (staged.parent / "exp/data_options").write_text("--keywords yes,no\n")
    later = ("--stage", "3")
    run(staged, *later).ok()
    run(staged, *later, "--keywords", "yes,no", "--seed", "1").ok()
    run(staged, "--keywords", "up,down").ok()
    said = "--keywords: stage 1 made the data with --keywords yes,no, not with --keywords up,down"
    run(staged, *later, "--keywords", "up,down").fails(1, said, "with another --tag")


@settings(max_examples=40, deadline=None)
@given(value=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_any_value_arrives_as_it_is(tmp_path_factory, value):
    parse = shlex.quote(str(ROOT / "utils/parse_options.sh"))
    path = tmp_path_factory.getbasetemp() / "any_value.sh"
    if not path.exists():
        script(path, f'foo=\n. {parse}\nprintf %s "$foo"\n')
    done = subprocess.run([path, f"--foo={value}"], capture_output=True, check=True)
    assert done.stdout == value.encode()


# ----------------------------------------------------------------------------------- run.py
def test_jobs_run_with_kaldis_logs(tmp_path):
    run(RUN, "JOB=2:4", "log/x.JOB.log", "echo", "job JOB", "of  JOB", cwd=tmp_path).ok()
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == [
        "x.2.log",
        "x.3.log",
        "x.4.log",
    ]
    head, started, empty, said, accounting, ended = (
        (tmp_path / "log/x.3.log").read_text().splitlines()
    )
    assert head == '# echo "job 3" "of  3"'
    assert re.fullmatch(r"# Started at \w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}", started)
    assert empty == "#"
    assert said == "job 3 of  3"
    assert re.fullmatch(r"# Accounting: time=\d+ threads=1", accounting)
    assert re.fullmatch(r"# Ended \(code 0\) at .+, elapsed time \d+ seconds", ended)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["printf", "%s:", "a b", "c"], "a b:c:"),
        (["printf", "%s:", 'say "a  b"', "it's"], 'say "a  b":it\'s:'),
        (["printf", "%s:", "both ' and \" here"], "both ' and \" here:"),
        (["printf", "%s:", "", "x"], ":x:"),
        (["printf", "%s", "abc", "|", "tr", "a-c", "A-C"], "ABC"),
        (["x=5;", "printf", "%s", "$x"], "5"),
        (["printf", "%s:", "a b $x"], "a b :"),  # in double quotes, as in run.pl
        (["printf", "%s:", "ä  ö"], "ä  ö:"),
    ],
)
def test_commands_are_quoted_as_kaldi_does(tmp_path, arguments, said):
    run(RUN, "x.log", *arguments, cwd=tmp_path).ok()
    assert (tmp_path / "x.log").read_text().split("\n#\n")[1].split("\n# Accounting")[0] == said


@settings(max_examples=8, deadline=None)
@given(words=st.lists(st.text(st.sampled_from("ab \"'"), max_size=6), min_size=2, max_size=8))
def test_blanks_and_quotes_arrive(tmp_path_factory, words):
    # A balanced pair in a word without blanks is for the shell, as with run.pl; the rest is passed
    # on.
    words = [word for word in words if " " in word or word.count('"') + word.count("'") <= 1]
    folder = tmp_path_factory.getbasetemp()
    run(RUN, "quotes.log", "printf", "'%s\\n'", *words, "end", cwd=folder).ok()
    lines = (folder / "quotes.log").read_text().split("\n#\n")[1].split("\n# Accounting")[0]
    assert lines.split("\n") == [*words, "end"]


def test_a_failure_shows_its_log(tmp_path):
    command = ("echo", "before;", "[", "JOB", "-ne", "2", "]", "||", "exit", "3")
    failed = run(RUN, "JOB=1:3", "log/x.JOB.log", *command, cwd=tmp_path)
    assert failed.code == 1
    assert "1 of 3 jobs failed" in failed.err
    assert "the end of log/x.2.log" in failed.err
    assert "before" in failed.err
    assert "log/x.1.log" not in failed.err
    assert "# Ended (code 3) at" in (tmp_path / "log/x.2.log").read_text()
    assert "# Ended (code 0) at" in (tmp_path / "log/x.3.log").read_text()


def test_bad_input_is_told_in_a_line_of_the_programs_own(tmp_path):
    fedtools = str(Path(sys.executable).with_name("fedtools"))
    alone = run(fedtools, "config", "none.yaml", "x", cwd=tmp_path)
    said = alone.err.removesuffix("\n")
    assert said.startswith("fedtools: none.yaml: ") and "\n" not in said
    failed = run(RUN, "log/x.log", fedtools, "config", "none.yaml", "x", cwd=tmp_path)
    assert (failed.code, failed.err) == (1, f"{said} (log: log/x.log)\n")
    # Even if line.sh names the line after it.
    (tmp_path / "list").write_text("none.yaml\tx\nnone.yaml\ty\n")
    words = [RUN.with_name("line.sh"), "list", "JOB", fedtools, "config"]
    failed = run(RUN, "JOB=1:2", "log/x.JOB.log", *words, cwd=tmp_path)
    told = [f"{said} (log: log/x.{job}.log)" for job in (1, 2)]
    assert failed.err.splitlines() == ["run.py: 2 of 2 jobs failed", *told]


def test_progress_is_shown_once_and_named_where_jobs_are_several(tmp_path):
    """A log's last line is repeated while its job runs, here every tenth of a second."""
    (tmp_path / "often.py").write_text(
        f"import sys; sys.path.insert(0, {str(RUN.parent)!r}); sys.argv[0] = 'run.py'\n"
        "import run; run.PROGRESS_SECONDS = 0.1; run.main()\n"
    )
    script(tmp_path / "work.sh", "for i in 1 2; do echo round $i; sleep 0.7; done\n")
    for jobs, name in ((["log/x.1.log"], ""), (["JOB=1:2", "log/x.JOB.log"], "x.1.log: ")):
        done = run(sys.executable, "often.py", *jobs, "./work.sh", cwd=tmp_path).ok()
        lines = [line for line in done.err.splitlines() if "x.2" not in line]
        assert lines == [f"{name}round 1", f"{name}round 2"]


@pytest.mark.parametrize("program", [RUN, SLURM])
def test_a_log_that_cannot_be_written_is_told(tmp_path, program):
    (tmp_path / "log").write_text("no folder")
    run(program, "log/x/y.log", "true", cwd=tmp_path).fails(1, "log/x", "Not a directory")


def test_a_log_that_is_lost_ends_no_other_job(tmp_path):
    command = ("sleep", "0.JOB;", "[", "JOB", "=", "1", "]", "&&", "rm", "x.JOB.log;", "true")
    done = run(RUN, "--max-jobs-run", "2", "JOB=1:2", "x.JOB.log", *command, cwd=tmp_path).ok()
    assert "x.1.log: No such file" in done.err
    assert "# Ended (code 0) at" in (tmp_path / "x.2.log").read_text()


def test_options_of_queue_pl_are_taken(tmp_path):
    options = "--mem 4G --config none -V -q all.q -pe smp 3 --max-jobs-run 2 -l arch=*64".split()
    run(RUN, *options, "N=1:2", "--time", "1:00:00", "x.N.log", "true", cwd=tmp_path).ok()
    assert "threads=3" in (tmp_path / "x.2.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x.log"], "usage:"),
        (["--mem"], "--mem needs a value"),
        (["JOB=1:2", "x.log", "true"], "JOB=1:2, but one log: x.log"),
        (["JOB=0:2", "x.JOB.log", "true"], "job numbers must begin at 1"),
        (["JOB=3:2", "x.JOB.log", "true"], "job numbers must begin at 1"),
        (["JOB=1:2", "N=1:2", "x.JOB.log", "true"], "two job ranges"),
        (["--max-jobs-run", "many", "x.log", "true"], "--max-jobs-run must be a whole number"),
    ],
)
def test_wrong_usage(tmp_path, arguments, said):
    run(RUN, *arguments, cwd=tmp_path).fails(2, said)
    assert not list(tmp_path.iterdir())


def test_no_more_jobs_than_allowed_run_at_a_time(tmp_path):
    # A job counts its concurrent jobs by the files they hold.
    line = "touch run.$1; sleep 0.5; ls run.* | wc -l > seen.$1; rm run.$1\n"
    job = script(tmp_path / "job.sh", line)
    run(RUN, "-tc", "2", "JOB=1:5", "x.JOB.log", job, "JOB", cwd=tmp_path).ok()
    seen = [int(path.read_text()) for path in tmp_path.glob("seen.*")]
    assert len(seen) == 5
    assert max(seen) == 2


def test_every_gpu_job_has_gpus_of_its_own(tmp_path):
    gpu = "gpu.$CUDA_VISIBLE_DEVICES"
    job = script(tmp_path / "job.sh", f"mkdir {gpu} && sleep 0.2 && rmdir {gpu}\n")
    visible = {"CUDA_VISIBLE_DEVICES": "3,5"}
    run(RUN, "--gpu", "1", "JOB=1:4", "x.JOB.log", job, cwd=tmp_path, env=visible).ok()
    run(RUN, "--gpu", "3", "x.log", "true", env=visible).fails(2, "has 2")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_ends_the_jobs(tmp_path, number):
    # The job's own child, too: it writes its number and sleeps.
    job = script(tmp_path / "job.sh", "sleep 100 & echo $! > pid.$1; wait\n")
    command = [RUN, "JOB=1:2", "-tc", "2", "x.JOB.log", job, "JOB"]
    process = start(*command, cwd=tmp_path)
    files = [tmp_path / "pid.1", tmp_path / "pid.2"]
    wait_until(lambda: all(file.exists() and file.read_text().strip() for file in files))
    process.send_signal(number)
    code = process.wait(timeout=60)
    assert code == (-9 if number == signal.SIGKILL else 128 + number)
    for file in files:
        wait_until(lambda file=file: not alive(int(file.read_text())))
    if number != signal.SIGKILL:
        assert "# Ended (code 137)" in (tmp_path / "x.1.log").read_text()


RANKED = """
echo "$RANK $LOCAL_RANK of $WORLD_SIZE" "$$"
until [[ $(wc -l <x.log) -ge 5 ]]; do :; done
"""


def test_ranks_share_a_job(tmp_path):
    # Each waits until both have written into the log, which shows that they run concurrently.
    job = script(tmp_path / "job.sh", RANKED)
    run(RUN, "--ntasks", "2", "--num-threads", "64", "x.log", job, cwd=tmp_path).ok()
    head, *_, one, two, accounting, ended = (tmp_path / "x.log").read_text().splitlines()
    assert head == f"# {job}"
    assert sorted(line.rsplit(" ", 1)[0] for line in (one, two)) == ["0 0 of 2", "1 1 of 2"]
    assert re.fullmatch(r"# Accounting: time=\d+ threads=64", accounting)
    assert ended.startswith("# Ended (code 0) at")


def test_a_rank_that_fails_ends_the_others(tmp_path):
    line = "if [[ $RANK = 1 ]]; then until [[ -s pid ]]; do :; done; echo enough; exit 3; fi\n"
    job = script(tmp_path / "job.sh", f"{line}sleep 100 & echo $$ $! >pid; wait\n")
    failed = run(RUN, "--ntasks", "2", "JOB=7", "x.JOB.log", job, cwd=tmp_path)
    assert failed.code == 1
    assert "1 of 1 jobs failed" in failed.err
    assert "    enough\n" in failed.err
    assert "# Ended (code 3) at" in (tmp_path / "x.7.log").read_text()
    for pid in (tmp_path / "pid").read_text().split():
        wait_until(lambda pid=pid: not alive(int(pid)))


@pytest.mark.parametrize("program", [RUN, SLURM])
def test_ranks_are_for_one_job(tmp_path, program):
    jobs = ["JOB=1:2", "x.JOB.log", "true"]
    run(program, "--ntasks", "2", *jobs, cwd=tmp_path).fails(2, "one job, not for JOB=1:2")
    run(program, "--ntasks", "0", *jobs, cwd=tmp_path).fails(2, "--ntasks must be at least 1")
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------- slurm.py
# The real Slurm is in test_slurm.py, for machines that have it. Here:
# What Slurm's sbatch does with an array job and --wait, on this machine and one after the other.
SBATCH = r"""
set -u
printf '%s\n' "$@" >> "$SBATCH_SAW"
for argument in "$@"; do case $argument in --array=*) array=${argument#--array=} ;; esac; done
script=${!#}
echo 4711
array=${array%\%*}
worst=0
for ((i = ${array%-*}; i <= ${array#*-}; i++)); do
    [[ $i != "${SBATCH_LOSES:-}" ]] || continue
    SLURM_ARRAY_TASK_ID=$i bash "$script" < /dev/null || worst=$?
done
exit "$worst"
"""


@pytest.fixture
def slurm(tmp_path):
    """Make a working directory with a blank in its name, and an sbatch on PATH."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    script(tmp_path / "bin" / "sbatch", SBATCH)
    saw = tmp_path / "saw"
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SBATCH_SAW": str(saw)}

    def call(*arguments: str, **more: str) -> Result:
        saw.write_text("")
        result = run(SLURM, *arguments, cwd=folder, env=env | more)
        result.saw = saw.read_text().split("\n")[:-1]
        return result

    call.folder = folder
    return call


def test_slurm_runs_the_same_jobs(slurm):
    (slurm.folder / "path.sh").write_text("export FROM_PATH='path.sh was here'\n")
    command = ["echo", "job JOB", 'say "JOB  it\'s"', "$FROM_PATH", "|", "cat"]
    done = slurm("JOB=1:3", "log/x.JOB.log", *command).ok()
    run(RUN, "JOB=1:3", "local/x.JOB.log", *command, cwd=slurm.folder).ok()
    here, there = (slurm.folder / "local/x.2.log"), (slurm.folder / "log/x.2.log")
    assert there.read_text().split("\n")[0] == here.read_text().split("\n")[0]
    assert 'job 2 say "2  it\'s" path.sh was here\n# Accounting' in there.read_text()
    assert "--array=1-3" in done.saw
    assert {"--wait", "--parsable"} <= set(done.saw)


def test_slurm_translates_options_by_the_config(slurm):
    (slurm.folder / "my.conf").write_text(
        "command sbatch -A 'my account'\n# a comment\n\noption mem=* --mem-per-cpu $0\n"
        "option num_threads=* --cpus-per-task $0\noption gpu=0 -p cpu\n"
        "option gpu=* -p gpu --gres=gpu:$0\ndefault gpu=0\n"
    )
    options = ["--config", "my.conf", "--mem", "4G"]
    saw = slurm(*options, "x.log", "true").ok().saw
    assert saw[:2] == ["-A", "my account"]
    assert saw[-6:-2] == ["-p", "cpu", "--mem-per-cpu", "4G"]
    more = ["--gpu", "2", "--num-threads", "3", "-tc", "5", "JOB=2:4"]
    saw = slurm(*options, *more, "x.JOB.log", "true").ok().saw
    expected = "-p gpu --gres=gpu:2 --mem-per-cpu 4G --cpus-per-task 3 --array=2-4%5".split()
    assert saw[-len(expected) - 1 : -1] == expected
    assert "threads=3" in (slurm.folder / "x.4.log").read_text()


def test_slurm_takes_the_config_of_the_repository(slurm):
    config = str(ROOT / "conf/slurm.conf")
    saw = slurm("--config", config, "--gpu", "1", "--mem", "8G", "x.log", "true").ok().saw
    assert {"--gres=gpu:1", "--mem", "8G"} <= set(saw)


def test_slurm_shows_failures(slurm):
    failed = slurm("JOB=1:3", "log/x.JOB.log", "[", "JOB", "-ne", "2", "]")
    assert failed.code == 1
    assert "1 of 3 jobs failed" in failed.err
    assert "the end of log/x.2.log" in failed.err


def test_slurm_wrong_usage(slurm):
    slurm("--qos", "high", "x.log", "true").fails(2, "--qos high: no such option")
    slurm("--config", "none.conf", "x.log", "true").fails(2, "none.conf: No such file")
    (slurm.folder / "bad.conf").write_text("command sbatch\nopt mem=* --mem $0\n")
    slurm("--config", "bad.conf", "x.log", "true").fails(2, "bad.conf:2: neither command")
    failed = slurm("x.log", "true", PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    if not shutil.which("sbatch"):
        failed.fails(2, "cannot run sbatch")


def test_an_array_larger_than_the_clusters_is_told(slurm):
    """Slurm's own message, Invalid job array specification, names neither limit nor remedy."""
    folder = slurm.folder.parent / "bin"
    script(folder / "sbatch", "echo 'Invalid job array specification' >&2; exit 1\n")
    script(folder / "scontrol", "echo 'MaxArraySize            = 1001'\n")
    failed = slurm("JOB=1:1001", "log/x.JOB.log", "true")
    assert failed.code == 1
    said = "the cluster's arrays end at job 1000 (MaxArraySize), and this one at 1001: lower --nj"
    assert said in failed.err
    assert "MaxArraySize" not in slurm("JOB=1:1000", "log/y.JOB.log", "true").err


def impatient(slurm, *arguments: str, **more: str) -> Result:
    """Return `slurm.py` with shorter waits."""
    line = "import sys; sys.path.insert(0, sys.argv[1]); import slurm;"
    line += " slurm.PATIENCE = slurm.CANCEL_PATIENCE = 0.1;"
    line += " sys.argv = ['slurm.py', *sys.argv[2:]]; slurm.main()"
    path = f"{slurm.folder.parent}/bin:{os.environ['PATH']}"
    return run(
        *(sys.executable, "-c", line, ROOT / "utils", *arguments),
        cwd=slurm.folder,
        env={"PATH": path, "SBATCH_SAW": f"{slurm.folder.parent}/saw", **more},
    )


def test_slurm_notices_a_job_that_vanished(slurm):
    failed = impatient(slurm, "JOB=1:2", "x.JOB.log", "true", SBATCH_LOSES="2")
    assert failed.code == 1
    assert "no trace of done.x.JOB.2" in failed.err
    assert "the job never started" in failed.err


@pytest.mark.parametrize(
    ("squeue", "said"),
    [
        ("echo '7_1 is RUNNING'", "7_1 is RUNNING"),
        (
            "echo 'slurm_load_jobs error: no contact' >&2; exit 1",
            "slurm_load_jobs error: no contact",
        ),
        ("exit 3", "squeue failed (3)"),
    ],
)
def test_slurm_submits_nothing_beside_an_earlier_array(slurm, squeue, said):
    programs = slurm.folder.parent / "bin"
    script(programs / "squeue", f"{squeue}\n")
    script(programs / "scancel", f"echo $* >{slurm.folder.parent}/cancelled\n")
    memory = slurm.folder / "q/x.JOB.id"
    memory.parent.mkdir()
    memory.write_text("7;north\n")
    failed = impatient(slurm, "JOB=1:2", "x.JOB.log", "true")
    assert failed.code == 1
    told = f"q/x.JOB.id: array 7 of an earlier run does not end: {said}"
    assert told in failed.err.splitlines()[-1]
    assert (slurm.folder.parent / "cancelled").read_text() == "--clusters north 7\n"
    assert not (slurm.folder.parent / "saw").exists()
    assert memory.read_text() == "7;north\n"


# ---------------------------------------------------------------------------------- path.sh
@pytest.fixture
def checkout(tmp_path):
    """Make a checkout with blanks in its path, whose setup.sh only reports that it was called."""
    root = tmp_path / "a check out"
    recipe = root / "egs/commonvoice/asr1"
    recipe.mkdir(parents=True)
    shutil.copy(ROOT / "egs/commonvoice/asr1/path.sh", recipe)
    (root / "utils").mkdir()
    shutil.copy(ROOT / "utils/environment.sh", root / "utils")
    script(
        root / "utils/setup.sh",
        'cd "$(dirname "$0")/.."; echo "set-up" >> calls; mkdir -p .venv/bin; [[ ! -e broken ]]\n',
    )
    return root


def environment(folder: Path, *programs: str) -> dict[str, str]:
    """Return an environment with this Python as python3 and the named programs on PATH."""
    script(folder / "python3", f'exec {shlex.quote(sys.executable)} "$@"\n')
    for program in programs:
        script(folder / program, f"echo {program} of the active environment\n")
    return {"PATH": f"{folder}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}


SOURCE_PATH = """set -euo pipefail
. "$1"
echo "$ROOT|$LC_ALL|${PATH%%:*}"
"""


def test_path_uses_the_active_environment(checkout, tmp_path):
    env = environment(tmp_path / "bin", "fedtools")
    path = checkout / "egs/commonvoice/asr1/path.sh"
    done = run("bash", "-c", SOURCE_PATH, "x", path, env=env, cwd=tmp_path).ok()
    assert done.out == f"{checkout}|C|{tmp_path}/bin\n"
    assert not done.err
    assert not (checkout / "calls").exists()
    # The same from within, by a relative path, and without the strict options.
    done = run("bash", "-c", '. ./path.sh; echo "$ROOT $-"', env=env, cwd=path.parent).ok()
    assert done.out.startswith(f"{checkout} ")
    assert "e" not in done.out.split()[-1]


# An environment that lacks packages: this Python without, or with only one of, its packages.
WITHOUT = f'exec {shlex.quote(sys.executable)} -I -S "$@"\n'
WITH_FEDTOOLS = f"""exec {shlex.quote(sys.executable)} -I -S -c '
import sys
sys.path.append("{ROOT}")
exec(sys.stdin.read())'
"""


@pytest.mark.parametrize(
    ("lacking", "python", "said"),
    [
        ("fedtools", None, "but not the program fedtools, using"),
        ("", WITH_FEDTOOLS, "but not the package torch, the package espnet2, the package kaldiio,"),
        ("", WITHOUT, None),
        ("", "exit 127\n", None),
    ],
)
def test_path_sets_up_otherwise(checkout, tmp_path, lacking, python, said):
    env = environment(tmp_path / "bin", *{"fedtools"} - {lacking})
    if python:
        script(tmp_path / "bin/python3", python)
    path = checkout / "egs/commonvoice/asr1/path.sh"
    twice = SOURCE_PATH.replace('. "$1"\n', '. "$1"\n. "$1"\n')
    done = run("bash", "-c", twice, "x", path, env=env, cwd=checkout).ok()
    assert done.out.split("\n")[0] == f"{checkout}|C|{checkout}/.venv/bin"
    assert (checkout / "calls").read_text() == "set-up\nset-up\n"
    if said:
        assert said in done.err
    else:
        assert not done.err


def test_path_fails_when_the_set_up_does(checkout, tmp_path):
    (checkout / "broken").touch()
    env = environment(tmp_path / "bin") | {"PYTHONPATH": str(tmp_path)}
    path = checkout / "egs/commonvoice/asr1/path.sh"
    assert run("bash", "-c", SOURCE_PATH, "x", path, env=env).code == 1


def test_setup_refuses_what_it_cannot_use(tmp_path):
    setup = ROOT / "utils/setup.sh"
    run(setup, "--nope").fails(2, "unknown argument '--nope'")
    run(setup, "--venv").fails(2, "--venv needs a directory")
    assert "FEDTOOLS_PYTHON" in run(setup, "--help").ok().out
    old = script(tmp_path / "python", f'exec {shlex.quote(sys.executable)} -c "import none"\n')
    env = {"FEDTOOLS_PYTHON": str(old)}
    run(setup, "--venv", tmp_path / "venv", env=env).fails(1, "is not Python 3.10 to 3.13")


# ------------------------------------------------------------------------------- all of them
def test_every_shell_file_is_strict():
    found = sources(("egs", "local", "tests", "utils"), "*.sh")
    names = sorted({str(path.resolve().relative_to(ROOT)) for path in found} | {".ci/run"})
    assert {"utils/setup.sh", "utils/parse_options.sh", "tests/run.sh"} <= set(names)
    for name in names:
        text = (ROOT / name).read_text()
        assert not re.search(r"^\s*eval\b", text, re.MULTILINE), name
        if text.startswith("#!"):
            assert text.startswith("#!/usr/bin/env bash\n"), name
            assert os.access(ROOT / name, os.X_OK), name
            assert "\nset -euo pipefail\n" in text, name


def test_the_reports_command_names_no_folder_of_this_machine(tmp_path):
    """The folders of a corpus and of a pretrained model may have a blank in their names."""
    script = """
        cd "$0" && set -euo pipefail
        words=(run.sh --pretrained "/my models/tiny.en" --nj 2)
        printf -v command_line '%q ' "${words[@]}"
        ngpu=0 train_cmd= pretrained=${words[2]}
        . utils/recipe.sh
        TEDLIUM="/my corpora/TEDLIUM_release-3"
        name_corpora TEDLIUM
        echo "${command_line}"
    """
    recipe = ROOT / "egs" / "tedlium3" / "attack1"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = run("bash", "-c", script, recipe, env=environment).ok()
    expected = "TEDLIUM=.../TEDLIUM_release-3 run.sh --pretrained .../tiny.en --nj 2"
    assert done.out.strip() == expected


# ------------------------------------------------------------------------- installing extras
def test_pretrained_packages_are_installed_from_a_recipe_as_well(tmp_path):
    """A recipe calls the script by its symbolic link, below which there is no setup.py."""
    log = tmp_path / "log"
    script(
        tmp_path / "bin/python3",
        f"""case "$1 $2" in
    "-c "*) exit 1 ;;                                   # nothing is installed
    "-m pip") echo "$@" >>{shlex.quote(str(log))} ;;
    *) exec {shlex.quote(sys.executable)} "$@" ;;
esac
""",
    )
    paths = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    recipe = ROOT / "egs/commonvoice/asr1"
    done = run(recipe / "utils/pretrained.sh", cwd=recipe, env={**os.environ, "PATH": paths})
    assert done.code == 1 and "cannot be imported after its installation" in done.err
    assert "transformers" in log.read_text()
