"""Programs that run beside the driver: started, waited for, weighed, ended.

For servers that do not speak the protocol of contestant.py: somebody's router, a worker. Whoever opens a `Program` in a
`with` block finds it and all its children gone at the end; if the driver itself is killed, a reaper ends them.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from bench.harness import ROOT, BenchError, ContestantError, UsageError

PEERS = ROOT / "bench" / "peers"
TAIL_LINES = 30
PORTS = range(20000, 30000)
_LISTEN = "0A"  # as the kernel writes the state of a socket
# Ends whoever is named on its last line when its input closes: nobody else would, were the driver killed outright.
_REAPER = 'while read -r line; do pids=$line; done; [ -z "$pids" ] || kill -KILL $pids'


class Program:
    """A process and all below it. `env` is added to ours; what it writes goes to a log in `log_dir`."""

    def __init__(
        self, name: str, command: Sequence[str], log_dir: Path, env: Mapping[str, str] | None = None, end_s: float = 1.0
    ) -> None:
        self.name = name
        self._command = list(command)
        self._log = log_dir / f"{name}.log"
        self._env = {**os.environ, **(env or {})}
        self._end_s = end_s

    def __enter__(self) -> Self:
        self._reaper = subprocess.Popen(["sh", "-c", _REAPER], stdin=subprocess.PIPE, text=True, start_new_session=True)
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        self._tell_reaper("")
        self._reaper.communicate(timeout=5)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C reaches the driver alone, which then ends everyone in order
            )
        self._root = psutil.Process(self._process.pid)
        self._tell_reaper(str(self._process.pid))

    def stop(self) -> None:
        """End it politely if it listens, and whatever is left of its tree for good."""
        tree = self._tree()
        with suppress(psutil.NoSuchProcess):
            self._root.terminate()
        _, survivors = psutil.wait_procs(tree, timeout=self._end_s)
        for process in survivors:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(5)

    def kill(self) -> None:
        """As an out-of-memory killer would: no warning. For programs of one process."""
        self._process.kill()
        self._process.wait(5)

    def wait_until(self, ready: Callable[[], bool], deadline_s: float) -> None:
        """Wait until it is up. A `ContestantError` with the end of its log when it is late or has ended."""
        deadline = time.monotonic() + deadline_s
        while not ready():
            if self._process.poll() is not None:
                raise self.failure(f"has ended (exit code {self._process.returncode})")
            if time.monotonic() > deadline:
                raise self.failure(f"was not ready after {deadline_s:.0f} s")
            time.sleep(0.05)

    def cpu_s(self) -> float:
        """CPU seconds of the process and all below it so far. Children that ended count with their parents."""
        total = 0.0
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:4])  # user, system, and both again for ended children
        return total

    def rss(self) -> int:
        """Bytes of memory that the process and all below it hold."""
        total = 0
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def failure(self, what: str) -> ContestantError:
        tail = self._log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        said = "\n".join(["; the end of its log:", *tail]) if tail else "; it wrote nothing."
        return ContestantError(f"{self.name!r} {what}{said}")

    def _tree(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _tell_reaper(self, pids: str) -> None:
        assert self._reaper.stdin is not None
        self._reaper.stdin.write(pids + "\n")
        self._reaper.stdin.flush()


def unpacked(name: str, path: str) -> tuple[str, dict[str, str]]:
    """The program `path` that debian.sh has unpacked to bench/peers/venv-NAME, and the environment it needs to run."""
    folder = PEERS / f"venv-{name}"
    if not (folder / path).exists():
        raise UsageError(f"{name!r} is not installed: run `bash bench/peers/{name}.sh` first.")
    libraries = folder / "usr" / "lib" / f"{os.uname().machine}-linux-gnu"
    return str(folder / path), {"LD_LIBRARY_PATH": str(libraries)}


def is_listened_to(port: int) -> bool:
    """Whether a server waits at that port, found without troubling it."""
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return any(fields[1].endswith(f":{port:04X}") and fields[3] == _LISTEN for fields in lines)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on, and that were not given out before.

    Not from the range that outgoing connections take theirs from: a server that is killed and started again might find
    its port in use by one.
    """
    ports: list[int] = []
    for port in _unused:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise BenchError(f"no free ports are left between {PORTS.start} and {PORTS.stop}.")


_unused = iter(random.sample(PORTS, len(PORTS)))
