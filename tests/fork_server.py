"""Run Python programs in forks of this process, which has imported other packages, and no threads.

`fork_client.py` requests them, and passes on its caller's arguments, environment and files.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import logging
import marshal
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Iterable
from pathlib import Path

from covered import measure_fork
from fork_code import keep_code

# Kills its process, and group, when the file descriptor it is set for becomes readable: fcntl.h.
F_SETSIG = 10
# Makes a huge page of small ones: madvise(2), MADV_COLLAPSE.
COLLAPSE = 25
# What is slow to import and not ours, by kind of server. A fork imports all modules of fedtools
# itself, so that one which imports too little fails as it would for a user.
LIGHT = (
    "annotated_types",
    "argparse",
    "concurrent.futures.thread",
    "coverage",
    "espeakng_loader",
    "kaldiio",
    "multiprocessing.connection",
    "multiprocessing.spawn",
    "numpy.random",
    "numpy.typing",
    "pkgutil",
    "pydantic.fields",
    "pydantic.json_schema",
    "pydantic.plugin._loader",
    "pydantic.type_adapter",
    "pydantic.types",
    "safetensors.numpy",
    "shlex",
    "soundfile",
    "statistics",
    "tabulate",
    "threadpoolctl",
    "tqdm",
    "typer._adapters",
    "typer.core",
    "uuid",
    "yaml",
)
HEAVY = (
    "PIL.BmpImagePlugin",
    "PIL.GifImagePlugin",
    "PIL.Image",
    "PIL.JpegImagePlugin",
    "PIL.PpmImagePlugin",
    "espnet2.asr.encoder.conformer_encoder",
    "espnet2.asr.encoder.transformer_encoder",
    "espnet2.asr.espnet_model",
    "espnet2.layers.utterance_mvn",
    "espnet2.lm.transformer_lm",
    "espnet2.torch_utils.initialize",
    "flashlight.lib.text.decoder.kenlm",
    "flashlight.lib.text.dictionary",
    "kaldi_native_fbank",
    "kenlm",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "matplotlib.pyplot",
    "matplotlib.style.core",
    "num2words",
    "safetensors.torch",
    "scipy.optimize",
    "scipy.signal",
    "scipy.stats",
    "sentencepiece",
    "sklearn.cluster",
    "sklearn.linear_model",
    "sklearn.manifold",
    "sklearn.metrics",
    "soxr",
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.summary.writer.record_writer",
    "tokenizers",
    "torch._dynamo",
    "torch.func",
    "torch.profiler._cupti_monitor",
    "transformers",
)
KINDS = {"light": LIGHT, "torch": (*LIGHT, *HEAVY)}


def preload(names: Iterable[str]) -> None:
    """Import modules once, for all forks; start no thread."""
    for name in names:
        importlib.import_module(name)
    # Its plugins are looked for once, in the metadata of all packages.
    importlib.import_module("pydantic.plugin._loader").get_plugins()
    keep_code("torch" in sys.modules)
    # What packages undo at the exit of a process that is about to end.
    for finalizer in tuple(weakref.finalize._registry):
        finalizer.atexit = False
    # A collection in a child would write to, and so copy, every page of these objects.
    gc.collect()
    gc.freeze()
    join_pages()


def join_pages() -> None:
    """Have the kernel join small pages, where it can: a fork copies the table of all of them."""
    advise, size = ctypes.CDLL(None).madvise, 1 << 21
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, mode, *_ = line.split()
        first, end = (int(number, 16) for number in place.split("-"))
        for at in range(-(-first // size) * size, end - size + 1, size) if mode == "rw-p" else ():
            advise(ctypes.c_void_p(at), ctypes.c_size_t(size), COLLAPSE)


def serve(listener: socket.socket, owner: int) -> None:
    """Run requested programs until a process ends."""
    ended = os.pidfd_open(owner)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, ended, woken], [], [])
        if ended in ready:
            return
        if woken in ready:
            os.read(woken, 1024)
        tell_ended(waiting)
        if listener in ready:
            connection, _ = listener.accept()
            if request := receive(connection):
                child = os.fork()
                if not child:
                    signal.set_wakeup_fd(-1)
                    for one in (listener, connection, *waiting.values()):
                        one.close()
                    for number in (ended, woken, wake):
                        os.close(number)
                    become(*request)
                for number in request[1]:
                    os.close(number)
                waiting[child] = connection
                send(connection, child)


def tell_ended(waiting: dict[int, socket.socket]) -> None:
    """Send the clients of ended forks their exit status."""
    while waiting:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        with waiting.pop(child) as connection:
            send(connection, os.waitstatus_to_exitcode(status))


def send(connection: socket.socket, number: int) -> None:
    # A killed client reads nothing.
    with contextlib.suppress(OSError):
        connection.sendall(number.to_bytes(8, "big", signed=True))


def receive(connection: socket.socket) -> tuple[tuple, list[int]] | None:
    """Return a client's request and its open files, the first of which signals its end."""
    head, files, _, _ = socket.recv_fds(connection, 8, 253)
    size, data = int.from_bytes(head, "big"), b""
    while head and len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    if head and len(data) == size:
        return marshal.loads(data), files
    for number in files:
        os.close(number)
    connection.close()
    return None


def become(request: tuple, files: list[int]) -> None:
    """Run a program in this process, to its end."""
    code = 70
    try:
        program, words, folder, environment, umask, ignored, numbers = request
        take_files(files[1:], numbers, end_with(files[0], max(numbers, default=2) + 1))
        set_signals(ignored)
        os.umask(umask)
        os.chdir(folder)
        set_environment(environment)
        measure_fork()
        code = run(program, words)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def end_with(life: int, least: int) -> int:
    """Have the kernel kill this process and its children at the end of a client.

    Args:
        life: a socket whose other end the client holds.
        least: the lowest number to which the descriptor may be moved.

    Returns:
        its new number.
    """
    os.setpgid(0, 0)
    moved = fcntl.fcntl(life, fcntl.F_DUPFD_CLOEXEC, max(least, 512))
    os.close(life)
    fcntl.fcntl(moved, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(moved, F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(moved, fcntl.F_SETFL, fcntl.fcntl(moved, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([moved], [], [], 0)[0]:
        os._exit(70)
    return moved


def take_files(files: list[int], numbers: list[int], above: int) -> None:
    """Give files the descriptor numbers that they have in the client."""
    safe = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, above + 1) for one in files]
    for one in files:
        os.close(one)
    for number in range(3):
        with contextlib.suppress(OSError):
            os.close(number)
    for one, number in zip(safe, numbers, strict=True):
        os.dup2(one, number)
        os.close(one)


def set_environment(environment: dict[bytes, bytes]) -> None:
    """Replace the environment, and what this process has read from it."""
    ours, theirs = (
        [str(Path(one).absolute()) for one in os.fsdecode(found).split(os.pathsep) if one]
        for found in (os.environb.get(b"PYTHONPATH", b""), environment.get(b"PYTHONPATH", b""))
    )
    sys.path[1:] = dict.fromkeys([*theirs, *(one for one in sys.path[1:] if one not in ours)])
    os.environb.clear()
    os.environb.update(environment)
    time.tzset()
    tempfile.tempdir = None


def set_signals(ignored: list[int]) -> None:
    """Handle signals like a freshly started Python."""
    for number in (signal.SIGCHLD, *ignored):
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run(program: str, words: list[str]) -> int:
    """Run a script, or what follows `-c` or `-m`, as the interpreter would; return its status."""
    import numpy

    # `random` reseeds itself.
    numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    set_streams()
    code = 1
    try:
        execute(program, words)
        code = 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code if stream.closed else 120
    return code & 0xFF


def set_streams() -> None:
    """Open the standard streams as the interpreter does at its start."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old, buffering = getattr(sys, f"__{name}__"), -1
        if isinstance(old.buffer, io.FileIO):
            buffering = 0
        try:
            binary = os.fdopen(number, ("rb", "wb")[number > 0], buffering, closefd=False)
            new = io.TextIOWrapper(
                binary,
                old.encoding,
                old.errors,
                "\n" if number else None,
                old.line_buffering or os.isatty(number),
                old.write_through,
            )
        except OSError:
            # It is closed.
            new = None
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def execute(program: str, words: list[str]) -> None:
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    if program == "-m":
        sys.modules["__main__"], sys.argv, sys.path[0] = main, ["-m", *words[1:]], str(Path.cwd())
        runpy._run_module_as_main(words[0])
        return
    if program == "-c":
        source, sys.argv, sys.path[0] = words[0], ["-c", *words[1:]], ""
    else:
        source, sys.argv = Path(program).read_bytes(), [program, *words]
        sys.path[0] = str(Path(program).resolve().parent)
        main.__file__ = str(Path(program).absolute())
    sys.modules["__main__"] = main
    exec(compile(source, program, "exec"), vars(main))


def start(path: str, owner: int, kind: str) -> None:
    """Import third-party modules, listen, and release the lock, which is descriptor 3."""
    # This file's folder is not on any program's path.
    sys.path[0] = ""
    preload(KINDS[kind])
    # Of what runs at the exit of a fork, packages' part would touch much memory for nothing.
    atexit._clear()
    for function in (logging.shutdown, multiprocessing.util._exit_function):
        atexit.register(function)
    atexit.register(weakref.finalize._exitfunc)
    # Folders that were not there; of those that were, a finder notices changes.
    for entry in [one for one, finder in sys.path_importer_cache.items() if finder is None]:
        del sys.path_importer_cache[entry]
    # What multiprocessing starts: the program beside the socket, which requests a fork.
    spawned = Path(path).with_name("bin") / "python3"
    importlib.import_module("multiprocessing.spawn").set_executable(str(spawned))
    ours = [name for name in sys.modules if name.partition(".")[0] == "fedtools"]
    assert not ours, f"imported before a fork: {ours}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        # Left over from a dead server.
        Path(path).unlink(missing_ok=True)
        listener.bind(path)
        listener.listen(128)
        Path(f"{path}.pid").write_text(str(os.getpid()))
        os.close(3)
        # So that a server's first fork is like all others: the linear algebra library ends its
        # threads before a fork.
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        threads = list(Path("/proc/self/task").iterdir())
        assert len(threads) == 1, f"{len(threads)} threads: forks could hang"
        serve(listener, owner)


if __name__ == "__main__":
    start(sys.argv[1], int(sys.argv[2]), sys.argv[3])
