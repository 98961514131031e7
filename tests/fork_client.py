"""Stand-in for a Python program that runs as a fork of `fork_server.py`, with packages imported.

    python -IS fork_client.py FOLDER OWNER STATE PATH KIND PROGRAM ARGUMENT...

The fork gets what the program would get: arguments, folder, environment, umask, every open file,
and the ignored signals. A signal to this process is passed to the fork. If this process dies, even
by SIGKILL, so do the fork and all it started, before the death of this one is visible; this process
ends as the fork ends. FOLDER has one server of each KIND, which the first client starts, and which
ends with the process OWNER; its PYTHONPATH is PATH. In an environment in which packages could be
imported differently, whose `kept()` is not STATE or which has a sitecustomize.py, the program gets
an interpreter of its own.

It starts in 15 milliseconds: it imports nothing but what an interpreter has built in.
"""

# pathlib and contextlib would take longer to import than all the rest.
# ruff: noqa: PTH109, PTH118, PTH120, PTH208, SIM105

import _signal
import _socket
import fcntl
import marshal
import os
import sys

# Variables that a module may read when it is imported, by the beginnings of their names.
IMPORTED_WITH = (
    "OMP_ GOMP_ KMP_ MKL_ OPENBLAS_ GOTO_ BLIS_ NUMEXPR_ NUMBA_ PYTHON LD_ GLIBC_ MALLOC_ "
    "TORCH PYTORCH_ KINETO_ MPL TQDM_ LC_ LANG"
).split()
# The server reads the first again for each fork; packages set the others when they are imported.
FREE = (
    b"PYTHONPATH",
    b"KMP_DUPLICATE_LIB_OK",
    b"KMP_INIT_AT_FORK",
    b"TORCHINDUCTOR_CACHE_DIR",
)
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


def kept(environment: dict) -> str:
    """Return a digest of the variables that a server and the programs it runs must share."""
    found = sorted(
        (name, value)
        for name, value in environment.items()
        if name.startswith(tuple(os.fsencode(prefix) for prefix in IMPORTED_WITH))
        and name not in FREE
    )
    digest = 0
    for byte in marshal.dumps(found, 2):
        digest = (digest * 1099511628211 + byte) % (1 << 64)
    return f"{digest:016x}"


def connect(folder: str, kind: str, owner: str, modules: str) -> _socket.socket:
    """Return a connection to a server, which is started if there is none."""
    path = f"{folder}/{kind}"
    for begun in (False, True):
        # The process that starts a server holds the lock until it listens, or has failed.
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return connected(path)
        except OSError:
            if not begun:
                begin(path, kind, owner, modules, lock)
        finally:
            os.close(lock)
    sys.exit(f"fork_client.py: no server, see {path}.log")


def connected(path: str) -> _socket.socket:
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.connect(path)
    return connection


def begin(path: str, kind: str, owner: str, modules: str, lock: int) -> None:
    """Start a server, in a session of its own so that signals to this process do not reach it."""
    if os.fork():
        return
    os.setsid()
    _signal.pthread_sigmask(_signal.SIG_SETMASK, [])
    # Bound to the server's lifetime: a log, and no open file of this process.
    log = os.open(f"{path}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(lock, 3) if lock != 3 else os.set_inheritable(3, True)
    for number, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(number, target)
    os.closerange(4, 1024)
    os.chdir("/")
    # Forks are measured, see covered.py, not the server.
    os.environ.pop("COVERAGE_PROCESS_START", None)
    server = os.path.join(os.path.dirname(__file__), "fork_server.py")
    words = [sys.executable, server, path, owner, kind]
    os.execve(sys.executable, words, dict(os.environ) | {"PYTHONPATH": modules})


def main() -> None:
    folder, owner, state, path, kind, program, *words = sys.argv[1:]
    if kept(os.environb) != state or has_start():
        # Counted: one that all programs had by mistake cost an hour.
        with open(f"{folder}/cold", "a") as file:
            file.write(f"{program}\n")
        os.execv(sys.executable, [sys.executable, program, *words])
    numbers = [n for n in map(int, os.listdir("/proc/self/fd")) if is_open(n)]
    ignored = [
        n for n in range(1, 32) if _signal.getsignal(n) == _signal.SIG_IGN and n not in (13, 25)
    ]
    forwarded = [getattr(_signal, name) for name in FORWARDED]
    # Held back until the recipient is known.
    _signal.pthread_sigmask(_signal.SIG_BLOCK, forwarded)
    umask = os.umask(0)
    os.umask(umask)
    connection = connect(folder, kind, owner, path)
    # Our end stays open until this process ends, by which the kernel notifies the fork.
    _ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
    request = (program, words, os.getcwd(), dict(os.environb), umask, ignored, numbers)
    message = marshal.dumps(request)
    passed = b"".join(n.to_bytes(4, sys.byteorder) for n in (theirs.fileno(), *numbers))
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, passed)]
    connection.sendmsg([len(message).to_bytes(8, "big")], rights)
    connection.sendall(message)
    theirs.close()
    child = received(connection)
    for number in forwarded:
        if number not in ignored:
            _signal.signal(number, lambda number, _: forward(child, number))
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, forwarded)
    status = received(connection)
    if status < 0:
        _signal.signal(-status, _signal.SIG_DFL) if -status != _signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


def has_start() -> bool:
    """Return whether an interpreter would begin with a file of its user's."""
    entries = os.environ.get("PYTHONPATH", "").split(":")
    return any(os.access(f"{entry}/sitecustomize.py", os.R_OK) for entry in entries if entry)


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def forward(child: int, number: int) -> None:
    try:
        os.kill(child, number)
    except ProcessLookupError:
        pass


def received(connection: _socket.socket) -> int:
    """Return a number that the server sends."""
    data = b""
    while len(data) < 8:
        more = connection.recv(8 - len(data))
        if not more:
            sys.stderr.write("fork_client.py: the server has died\n")
            os._exit(70)
        data += more
    return int.from_bytes(data, "big", signed=True)


if __name__ == "__main__":
    main()
