"""External input: invalid files, YAML and options are refused in one line, at once."""

from __future__ import annotations

import io
import os
import platform
import re
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import keywords
import numpy as np
import pytest
import simulated
import soundfile
from conftest import ROOT, run

from fedtools.audio.wave import AudioError, read_wave
from fedtools.core import text_files
from fedtools.core.atomic import atomic_write, machine, remove, scratch_dir, sha256, write_text
from fedtools.core.config import from_mapping, read_yaml
from fedtools.core.errors import Terminal, UserError
from fedtools.core.tables import format_markdown
from fedtools.core.text_files import TABLE, open_input, read_lines, stream_lines
from fedtools.data.ark import AUTOMATIC, FeatureReader, write_ark
from fedtools.data.clips import read_classes
from fedtools.data.datadir import DataDir, read_table
from fedtools.lm.tokens import Tokenizer, train_tokens
from fedtools.models.acoustic.asr import build_model

# --- files --------------------------------------------------------------------------------------


def strange(folder: Path, kind: str) -> Path:
    path = folder / "strange"
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "zeros":
        path.symlink_to("/dev/zero")
    elif kind == "dangling":
        path.symlink_to("none")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server, pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            server.bind(path.name)
    else:
        path.touch()
        os.truncate(path, TABLE + 1)
    return path


READERS = [
    read_lines,
    read_yaml,
    read_table,
    lambda path: FeatureReader({"a": f"{path}:0"}).read("a"),
    lambda path: read_wave(str(path)),
]


@pytest.mark.parametrize("kind", ["folder", "FIFO", "socket", "zeros", "dangling", "large"])
def test_strange_files_are_refused_without_waiting(tmp_path, kind):
    path = strange(tmp_path, kind)
    for read in READERS:
        with pytest.raises(UserError, match=str(path)):
            read(path)
    if kind != "large":
        with pytest.raises(UserError, match="cannot be read"):
            sha256(path)


def test_a_link_is_as_good_as_its_file_and_limits_are_exact(tmp_path):
    (tmp_path / "file").write_bytes(b"a\n")
    (tmp_path / "link").symlink_to("file")
    assert read_lines(tmp_path / "link") == ["a"]
    with open_input(tmp_path / "link", 2) as file:
        assert file.read() == b"a\n"
    with pytest.raises(UserError, match="2 bytes, more than 1"):
        open_input(tmp_path / "link", 1)
    # Python's own words, and those of 3.13.
    said = "embedded null byte|open: embedded null character in path"
    with pytest.raises(UserError, match=f"cannot be read: ({said})$"):
        open_input("a\0b")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a b\nc d\0\n", ":2: a NUL byte"),
        (b"a b\n\nc \xe9\n", ":3: not UTF-8"),
        (b"a b\nc d", ":2: the last line has no end"),
    ],
)
def test_what_is_no_text_is_named_with_its_line(tmp_path, content, said):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(UserError, match=f"t{said}"):
        read_lines(tmp_path / "t")


def test_temporary_files_of_killed_processes_go_with_the_next_of_any_name(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    host = machine()
    orphans = [f".feats.7.ark.{host}-{dead.pid}.x1_.tmp", f".scratch.{host}-{dead.pid}.y.tmp"]
    kept = [
        f".mine.{host}-{os.getpid()}.x.tmp",
        f".other.elsewhere{host}-{dead.pid}.x.tmp",
        ".none.tmp",
    ]
    for name in (orphans[0], *kept):
        (tmp_path / name).touch()
    (tmp_path / orphans[1] / "within").mkdir(parents=True)
    write_text(tmp_path / "text", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "text"])
    with scratch_dir(tmp_path) as scratch:
        assert scratch.parent == tmp_path and scratch.is_dir()
    assert not scratch.exists()


def test_a_file_of_another_machine_with_the_same_name_stays(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    # From another boot, or another container, whose process ids are not ours.
    live = tmp_path / f".model.{platform.node()}-0123456789ab-{dead.pid}.x.tmp"
    old = tmp_path / f".model.{platform.node()}-ba9876543210-{dead.pid}.x.tmp"
    for path in (live, old):
        path.touch()
    os.utime(old, (0, 0))
    write_text(tmp_path / "text", "")
    assert sorted(tmp_path.iterdir()) == [live, tmp_path / "text"]


def test_folders_within_folders_are_removed_however_deep(tmp_path):
    top = tmp_path / "update.2.tsv"
    for _ in range(12):
        # From the inside out: the whole path is longer than the system's limit.
        outer = tmp_path / "outer"
        deep = outer
        for _ in range(99):
            deep = deep / "d"
        deep.parent.mkdir(parents=True)
        if top.exists():
            top.rename(deep)
        outer.rename(top)
    remove(top)
    assert not list(tmp_path.iterdir())
    remove(top)


def test_a_folder_that_cannot_be_removed_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "update.2.tsv").mkdir()
    program = tmp_path / "rm"
    program.write_text("#!/bin/sh\necho 'rm: it is\nbusy' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(OSError, match=r"rm: it is busy.*update\.2\.tsv"):
        remove(tmp_path / "update.2.tsv")


def test_a_killed_command_leaves_nothing_after_the_next(tmp_path):
    code = (
        "import os, signal, sys; from fedtools.core.atomic import atomic_write\n"
        "with atomic_write(sys.argv[1]) as file:\n"
        "    file.write('half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run(sys.executable, "-c", code, tmp_path / "one", env={"PYTHONPATH": str(ROOT)})
    assert len(list(tmp_path.iterdir())) == 1
    write_text(tmp_path / "two", "")
    assert [path.name for path in tmp_path.iterdir()] == ["two"]


# --- YAML and options ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a [*a]\n", "aliases within aliases"),
        (
            "a0: &a0 [x, x]\n"
            + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)),
            "aliases within aliases",
        ),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("a: !!bool x\n", "not YAML"),
        ("a: !!timestamp x\n", "not YAML"),
        ("? [a]\n: b\n", "c.yaml:1: not YAML"),
        ("a: 1\nb: 2\na: 3\n", "c.yaml:3: not YAML: 'a' is duplicated"),
        ("a: b\0\n", "c.yaml:1: a NUL byte"),
        ('b: 1\na: "\\ud800"\n', "c.yaml:2: not YAML"),
        ("x: &x {b: 1}\n<<: *x\n", "c.yaml:2: not YAML: '<<' merges nothing here: write"),
        ("a:\n  <<: {b: 1}\n", "c.yaml:2: not YAML: '<<' merges nothing here: write"),
    ],
)
def test_yaml_that_is_a_trap(tmp_path, text, said):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError, match=said):
        read_yaml(tmp_path / "c.yaml")


def test_aliases_in_measure_are_read(tmp_path):
    (tmp_path / "c.yaml").write_text("a: &a {lr: 1}\nb: *a\n")
    assert read_yaml(tmp_path / "c.yaml") == {"a": {"lr": 1}, "b": {"lr": 1}}


@dataclass(frozen=True)
class Options:
    rate: float = 1.0
    more: dict = field(default_factory=dict)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x: 1\ntraining:\n  rate: [1]\n", r"c.yaml:3: training: option 'rate' is \[1\]"),
        ("training:\n  more: {}\n  rat: 1\n", "c.yaml:3: training: unknown option 'rat'"),
        ("training: [1]\n", r"c.yaml: training: \[1\] must be a mapping"),
        ("training: []\n", r"c.yaml: training: \[\] must be a mapping"),
        ("training:\n  rate: " + "9" * 400, "c.yaml:2: training: option 'rate' is 999"),
        (
            "training:\n  rate: .nan",
            "c.yaml:2: training: option 'rate' is nan: input should be a finite number",
        ),
        # With two such lines, it is ambiguous.
        ("a: {rate: x}\ntraining: {rate: x}\n", "c.yaml: training: option 'rate' is 'x'"),
    ],
)
def test_options_are_refused_with_their_line(tmp_path, text, said):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        from_mapping(Options, read_yaml(path)["training"], f"{path}: training")


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"encoder": ["a"]}, r"c.yaml:\d+: model: encoder: unknown option \['a'\]"),
        ({"encoder": None}, r"c.yaml:\d+: model: encoder: unknown option None"),
        ({"encoder_conf": 3}, r"c.yaml:\d+: model: encoder_conf is 3, not a mapping"),
        ({"specaug_conf": True}, r"c.yaml:\d+: model: specaug_conf is True"),
        ({"model_conf": [1]}, r"c.yaml:\d+: model: model_conf is \[1\]"),
        ({"model_conf": {"encoder": "x"}}, r"c.yaml:\d+: model: model_conf: unknown option"),
        ({"ctc_conf": {"odim": 3}}, r"c.yaml:\d+: model: ctc_conf: unknown option 'odim'"),
        ({"init": {}}, r"c.yaml:\d+: model: init: unknown"),
        ({"input_size": "80"}, r"c.yaml:\d+: model: option 'input_size' is '80'"),
        ({"encoder_conf": {"dropout_rate": "x"}}, r"c.yaml:\d+: model: encoder_conf: "),
        (
            {"specaug_conf": {"apply_time_warp": False, "time_mask_width_range": [4, 0]}},
            r"c.yaml:\d+: model: (specaug_conf|training fails with these options)",
        ),
    ],
)
def test_odd_options_of_a_model_are_one_line(tmp_path, section, said):
    path = simulated.config_file(tmp_path / "c.yaml", model=simulated.CONFIG["model"] | section)
    with pytest.raises(UserError, match=said):
        build_model(read_yaml(path)["model"], ["<blank>", "<unk>", "<sos/eos>"], f"{path}: model")


# --- data ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("compress", [False, True])
def test_features_that_are_no_numbers_are_named(tmp_path, value, compress):
    data = DataDir.read(simulated.data_dir(tmp_path / "data", ["au"], 3))
    matrices = {utt: FeatureReader(data.feats_scp).read(utt) for utt in data.utterances}
    worst = data.utterances[1]
    if not compress:
        matrices[worst][5, 2] = value
    kind = AUTOMATIC if compress else None
    data.feats_scp = write_ark(tmp_path / "x.ark", matrices.items(), compress=kind)
    if compress:
        # A compressed matrix has its range in its header: least value, and width.
        place = int(data.feats_scp[worst].rpartition(":")[2])
        with open(tmp_path / "x.ark", "r+b") as file:
            file.seek(place + 5)
            file.write(np.array([value], "<f4").tobytes())
    data.write()
    reader = FeatureReader(data.feats_scp)
    said = f"x.ark: the features of utterance '{worst}' are damaged: a value is NaN or infinite"
    with pytest.raises(UserError, match=said):
        reader.read_many(data.utterances)
    assert np.isfinite(reader.read(data.utterances[0])).all()
    script = ROOT / "utils" / "validate_data_dir.py"
    run(sys.executable, script, data.path, "--no-wav").fails(1, "feats.scp:2: ", said)
    run(sys.executable, script, data.path, "--no-wav", "--no-feats").ok()


def test_large_finite_features_pass(tmp_path):
    matrix = np.full((3, 2), np.finfo("f4").max)
    scp = write_ark(tmp_path / "x.ark", [("a", matrix)])
    np.testing.assert_array_equal(FeatureReader(scp).read("a"), matrix)


@pytest.mark.parametrize(
    ("table", "said"),
    [("utt2client", "client '../x'"), ("utt2spk", "speaker '../x'")],
)
def test_ids_that_leave_their_folder_go_nowhere(tmp_path, cli, table, said):
    one = simulated.data_dir(tmp_path / "one", ["au"], 2)
    two = simulated.data_dir(tmp_path / "two", ["en"], 2)
    lines = (two / table).read_text().splitlines()
    lines[1] = f"{lines[1].split()[0]} ../x"
    (two / table).write_text("".join(f"{line}\n" for line in lines))
    out = tmp_path / "out"
    place = f"two/{table}:2: {said} is not usable"
    cli("combine-data", out, one, two).fails(1, place)
    cli("subset-data", two, out, "--utterances", "1").fails(1, place)
    cli("partition", two, out, "--scheme", "iid", "--clients", "1").fails(1, place)
    assert not out.exists()


def test_an_empty_table_is_no_table(tmp_path, cli):
    data = simulated.data_dir(tmp_path / "data", ["au"], 2)
    (data / "utt2client").write_text("")
    cli("subset-data", data, tmp_path / "o", "--utterances", "1").fails(1, "utt2client: empty")


def test_audio_that_is_no_file_is_dropped_with_its_name(tmp_path):
    (tmp_path / "x.wav").symlink_to("/dev/zero")
    with pytest.raises(AudioError, match=r"x\.wav: cannot be read: not a regular file"):
        read_wave(str(tmp_path / "x.wav"))
    soundfile.write(tmp_path / "y.wav", np.zeros(160), 16000)
    assert len(read_wave(str(tmp_path / "y.wav"))[0]) == 160


def test_audio_that_a_disk_cannot_read_is_dropped_by_name(tmp_path, cli):
    """The first page of a process's memory is a regular file that cannot be read."""
    data = simulated.data_dir(tmp_path / "data", ["au"], 2)
    names = [line.split()[0] for line in (data / "utt2spk").read_text().splitlines()]
    soundfile.write(tmp_path / "y.wav", np.random.default_rng(0).normal(0, 0.1, 16000), 16000)
    places = [tmp_path / "y.wav", "/proc/self/mem"]
    lines = [f"{name} {place}\n" for name, place in zip(names, places, strict=True)]
    (data / "wav.scp").write_text("".join(lines))
    told = cli("extract-features", data, tmp_path / "ark", "--max-drop", "0.5").ok().err
    assert f"dropped {names[1]}: /proc/self/mem: cannot be read: Input/output error" in told
    # Nor is another file named where a whole command fails.
    (data / "wav.scp").unlink()
    (data / "wav.scp").symlink_to("/proc/self/mem")
    cli("extract-features", data, tmp_path / "ark").fails(
        1, "wav.scp: cannot be read: Input/output"
    )


def test_an_error_of_reading_names_the_file_that_is_read(tmp_path):
    """Not one that is written meanwhile. What is open for writing alone cannot be read."""
    descriptor = os.open(tmp_path / "x", os.O_WRONLY | os.O_CREAT)
    for read in (
        lambda file: file.read(10),
        lambda file: file.read(),
        lambda file: file.readline(),
    ):
        with pytest.raises(OSError) as told, atomic_write(tmp_path / "y"):
            read(io.BufferedReader(text_files._Named(os.dup(descriptor), "x")))
        assert told.value.filename == "x"


# --- what reaches a terminal, a page or a spreadsheet --------------------------------------------


@pytest.mark.parametrize(
    "mark", ["\x1b]0;pwn\x07", "\x1b[31m", "\x9b31m", "\u202e", "\r", "\udcff"]
)
def test_a_terminal_obeys_no_name_of_a_file(tmp_path, cli, mark):
    data = simulated.data_dir(tmp_path / "data", ["au"], 2)
    names = [line.split()[0] for line in (data / "utt2spk").read_text().splitlines()]
    place = f"{tmp_path}/{mark}x.wav"
    lines = "".join(f"{name} {place}\n" for name in names)
    (data / "wav.scp").write_bytes(lines.encode(errors="surrogateescape"))
    told = cli("extract-features", data, tmp_path / "ark")
    seen = (told.out + told.err).replace("\n", "").replace("\t", "")
    assert mark not in seen and not re.search("[\x00-\x1f\x7f-\x9f\u202e\ud800-\udfff]", seen)


def test_a_terminal_obeys_no_argument_and_no_place_of_features(tmp_path, cli):
    told = cli("privacy", tmp_path / "\x1b[31mx")
    assert told.code == 1 and "\x1b" not in told.err and "\\x1b[31mx" in told.err
    data = simulated.data_dir(tmp_path / "data", ["au"], 2)
    text = (data / "feats.scp").read_text()
    (data / "feats.scp").write_text(text.replace(".ark", ".\x1b]0;pwn\x07ark"))
    told = cli("subset-data", data, tmp_path / "o", "--utterances", "1")
    assert "\x1b" not in told.err + told.out


def test_a_progress_bar_may_begin_its_line_again():
    written = io.StringIO()
    Terminal(written).write("\r 3/7\n\x1b[2K\ttext")
    assert written.getvalue() == "\r 3/7\n\\x1b[2K\ttext"


@pytest.mark.parametrize("label", ["<img/src=x>", "=1+1", "+1", "-1", "@x", "a|b", "[x](y)", "a`b"])
def test_classes_are_words(tmp_path, label):
    with pytest.raises(UserError, match="is no word; begin with a letter"):
        keywords.pack(
            tmp_path / "clips", {"a": [1, 1, 1, 1]}, ("_silence_", "_unknown_", "b", label)
        )
    (tmp_path / "classes.txt").write_text(f"yes\n{label}\n")
    with pytest.raises(UserError, match=r"classes.txt:2: class .* is no word"):
        read_classes(tmp_path / "classes.txt")
    words = ["_silence_", "привет", "don't", "naïve", "वाह", "4th", "stop!"]
    (tmp_path / "classes.txt").write_text("".join(f"{word}\n" for word in words))
    assert read_classes(tmp_path / "classes.txt") == words


def test_cells_of_a_page_are_no_html():
    table = format_markdown(["a", "p"], [["<img src=x>", "< 0.01"], ["</td><!--", "1 <2"]])
    assert not re.search("<[a-zA-Z/!]", table) and "< 0.01" in table and "1 <2" in table


# --- models of language and tokens --------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("".join(f"u{n} the cat sat on a {w}\n" for n, w in enumerate(["mat", "hat"])))
    return path


def test_a_damaged_language_model_does_not_reach_kenlm(tmp_path, cli, text):
    out = tmp_path / "lm"
    cli("train-lm", text, out, "--order", "2").ok()
    data = simulated.data_dir(tmp_path / "data", ["au"], 2)
    cli("train-tokens", data / "text", tmp_path / "tokens", "--token-type", "char").ok()
    tokenizer = Tokenizer.load(tmp_path / "tokens")
    whole = (out / "2gram.bin").read_bytes()
    from fedtools.decode.beam import CtcBeamDecoder

    for damaged in (b"", whole[:100], whole[:-1], b"x" + whole[1:], whole[:-1] + b"\xff"):
        (out / "2gram.bin").write_bytes(damaged)
        with pytest.raises(UserError, match=r"2gram\.bin: not the file whose sum is in"):
            CtcBeamDecoder.load(tokenizer, out)


def test_a_damaged_bpe_model_is_named(tmp_path, text):
    train_tokens([text], tmp_path, "bpe", 20)
    whole = (tmp_path / "bpe.model").read_bytes()
    for damaged in (b"", whole[:50], b"\xff" * 100):
        (tmp_path / "bpe.model").write_bytes(damaged)
        with pytest.raises(UserError, match=r"bpe\.model"):
            Tokenizer.load(tmp_path)


# --- lists and scores ---------------------------------------------------------------------------


def test_blocks_do_not_show(tmp_path, monkeypatch):
    """Lines, and the first invalid line, are the same wherever blocks start."""
    path = tmp_path / "t"
    whole = "\ufeffa\n\n\u00e9\u2028 b\nccccc\n".encode()
    faults = {
        b"\0x\n": "a NUL byte",
        b"\xff\n": "not UTF-8",
        b"\xc3\n": "not UTF-8",
        "b\ufeff\n".encode(): "a byte order mark",
        b"cut off": "the last line has no end",
    }
    for size in (*range(1, 30), 1 << 20):
        monkeypatch.setattr(text_files, "_BLOCK", size)
        path.write_bytes(whole)
        assert read_lines(path) == ["a", "", "\u00e9\u2028 b", "ccccc"]
        with pytest.raises(UserError, match=":1: a byte order mark"):
            read_lines(path, may_be_marked=False)
        for fault, said in faults.items():
            # Later lines are worse, but the first invalid line is reported.
            path.write_bytes(whole + fault + (b"\xff\n" if fault[-1:] == b"\n" else b""))
            found = stream_lines(path)
            assert [next(found) for _ in range(4)][3] == "ccccc"
            with pytest.raises(UserError, match=f"t:5: {said}"):
                list(found)


def test_a_table_is_in_memory_once(tmp_path):
    """The peak rises by the file's size for each copy of its text in memory."""
    path = tmp_path / "t"
    with open(path, "w") as file:
        file.writelines(f"{number:06} {'x' * 1000}\n" for number in range(20000))
    script = (
        "import sys, tracemalloc\n"
        "from fedtools.core import tables\nfrom fedtools.data import datadir\n"
        "tracemalloc.start()\n"
        "table = datadir.read_table(sys.argv[1])\n"
        "now, peak = tracemalloc.get_traced_memory()\n"
        "print(peak - now)\n"
        "tracemalloc.reset_peak()\n"
        "datadir.write_table(sys.argv[2], table)\n"
        "print(tracemalloc.get_traced_memory()[1] - now)\n"
    )
    done = run(sys.executable, "-c", script, path, tmp_path / "again").ok()
    assert max(map(int, done.out.split())) < path.stat().st_size // 2
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_an_empty_list_is_no_transcript(tmp_path, cli):
    (tmp_path / "nbest.tsv").write_text("")
    data = simulated.data_dir(tmp_path / "data", ["au"], 2)
    cli("best-path", tmp_path).fails(1, "nbest.tsv: empty")
    cli("tune", tmp_path, data, tmp_path / "w.yaml").fails(1, "nbest.tsv: empty")
    assert not (tmp_path / "text").exists() and not (tmp_path / "w.yaml").exists()


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("lm_weight: 1\n", "option 'word_score' is missing"),
        ("lm_weight: x\nword_score: 1\n", "weights.yaml:1: option 'lm_weight' is 'x'"),
        ("lm_weight: .inf\nword_score: 1\n", "weights.yaml:1: option 'lm_weight' is inf"),
        ("beam: 1\n", "weights.yaml:1: unknown option 'beam'"),
    ],
)
def test_weights_of_something_else_are_refused(tmp_path, cli, weights, said):
    (tmp_path / "nbest.tsv").write_text("a\t1\t-1\t-1\tx\n")
    (tmp_path / "weights.yaml").write_text(weights)
    cli("best-path", tmp_path, "--weights", tmp_path / "weights.yaml").fails(1, said)
