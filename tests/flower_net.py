"""A federation over Flower on this machine, for tests.

It has a network with a loopback alone, a server and three sites, each in a mount namespace in which
the folders of the others are empty.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from commands import ROOT, Result

FLOWER = ROOT / ".venv-flower"
SITES = "abc"
PORT, LINK = 8800, 8801
PATIENCE = 240.0


def why_not() -> str:
    """Return why no such federation can be started here; empty if one can."""
    if not (FLOWER / ".done").exists():
        return "no .venv-flower here: utils/build_flower.sh makes it"
    if lacking := [one for one in ("unshare", "nsenter", "ip", "openssl") if not shutil.which(one)]:
        return f"no {', '.join(lacking)} here (Debian: apt-get install util-linux iproute2 openssl)"
    if os.geteuid() != 0:
        return "namespaces are made by root only"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "true"], capture_output=True, check=False
    )
    return "" if tried.returncode == 0 else "root may not make namespaces in this container"


class Net:
    """The network, and programs in it."""

    def __init__(self, root: Path):
        self.root = root
        command = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec sleep inf"]
        self.holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command], stdout=subprocess.PIPE, text=True
        )
        assert self.holder.stdout and self.holder.stdout.readline() == "up\n"
        self.inode = Path(f"/proc/{self.holder.pid}/ns/net").stat().st_ino
        # A site's nodes reach the server through this, which counts what passes.
        self.start("link", (), sys.executable, __file__, str(LINK), str(PORT), str(root / "passed"))

    def site(self, name: str) -> Path:
        return self.root / "sites" / name

    def hidden(self, who: str) -> list[Path]:
        """Return the folders that a site, or the server, does not see."""
        sites = [self.site(one) for one in SITES if one != who]
        others = [] if who == "server" else [self.root / "server"]
        return [self.root / "world", self.root / "clips", *sites, *others]

    def command(self, hidden: list[Path] | tuple[()], *words: str | Path) -> list[str]:
        script = 'while [ "$1" != -- ]; do mount -t tmpfs none "$1"; shift; done; shift; exec "$@"'
        inside = ["nsenter", f"--net=/proc/{self.holder.pid}/ns/net", "unshare", "--mount"]
        return [*inside, "sh", "-ec", script, "sh", *map(str, hidden), "--", *map(str, words)]

    def environment(self) -> dict[str, str]:
        own = {"FEDTOOLS": str(Path(sys.executable).with_name("fedtools")), "FLOWER_RESTART": "12"}
        return {**os.environ, **own}

    def start(self, log: str, hidden: list[Path] | tuple[()], *words: str | Path) -> None:
        """Start a program; it ends with the network."""
        with open(self.root / f"{log}.out", "ab") as output:
            subprocess.Popen(
                self.command(hidden, *words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environment(),
                start_new_session=True,
            )

    def run(self, who: str, *words: str | Path, seconds: float = PATIENCE) -> Result:
        """Run a command as the server or a site, to its end."""
        command = self.command(self.hidden(who), *words)
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self.environment(),
            timeout=seconds,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def flower(self, who: str, what: str, *words: str | Path) -> list[str | Path]:
        folder = self.root / "server" if who == "server" else self.site(who)
        return [ROOT / "utils/flower.sh", what, folder, *words]

    def find(self, word: str, variable: str = "") -> list[int]:
        """Return the programs in the network with a word in their command, and a variable."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (entry / "ns/net").stat().st_ino != self.inode:
                    continue
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                if (
                    word.encode() in command
                    and variable.encode() in (entry / "environ").read_bytes()
                ):
                    found.append(int(entry.name))
        return sorted(found)

    def kill(self, word: str, variable: str = "") -> None:
        """Kill by SIGKILL."""
        found = self.find(word, variable)
        assert found, f"there is no {word}"
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def passed(self) -> tuple[int, int]:
        """Return the bytes that sites have sent and received."""
        sent, received = (self.root / "passed").read_text().split()
        return int(sent), int(received)

    def end(self) -> None:
        """Kill all programs in the network, which are this one's alone."""
        print(f"programs of the network: {self.seconds():.0f} s of processor time")
        deadline = time.monotonic() + 60
        while found := [pid for pid in self.find("") if pid != self.holder.pid]:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < deadline, f"cannot kill {found}"
            time.sleep(0.05)
        self.holder.kill()
        self.holder.wait()

    def seconds(self) -> float:
        """Return the processor time of all programs, and of those that they waited for."""
        found = 0
        for pid in self.find(""):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                found += sum(map(int, words[11:15]))
        return found / os.sysconf("SC_CLK_TCK")

    def logs(self) -> str:
        """Return the ends of all logs."""
        found = [*self.root.glob("*.out"), *self.root.glob("server/*.log")]
        found += self.root.glob("sites/*/*.log")
        return "\n".join(f"{path}:\n{path.read_text()[-1500:]}" for path in found)


@contextlib.contextmanager
def network(root: Path) -> Iterator[Net]:
    """Start a network, yield it, and end it with all programs in it."""
    net = Net(root)
    try:
        yield net
    finally:
        net.end()


def link(port: int, to: int, record: Path) -> None:
    """Pass connections of a port to another one, and write how many bytes went either way."""
    import asyncio

    counts = [0, 0]

    async def pipe(source, target, way: int) -> None:
        with contextlib.suppress(OSError):
            while part := await source.read(1 << 16):
                counts[way] += len(part)
                record.with_suffix(".new").write_text(f"{counts[0]} {counts[1]}")
                record.with_suffix(".new").replace(record)
                target.write(part)
                await target.drain()
        target.close()

    async def serve(source, target) -> None:
        try:
            other, there = await asyncio.open_connection("127.0.0.1", to)
        except OSError:
            target.close()
            return
        await asyncio.gather(pipe(source, there, 0), pipe(other, target, 1))

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", port)
        async with server:
            await server.serve_forever()

    asyncio.run(main())


if __name__ == "__main__":
    link(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
