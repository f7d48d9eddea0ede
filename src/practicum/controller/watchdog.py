"""Ends a Ray that its driver left behind. Runs as a script in a process of its own, so that `kill -9` cannot skip it.

Some of Ray's helper processes outlive a killed driver by a minute, since they first try to report to what is gone. The
driver holds the other end of this process's standard input: when that closes, however the driver ended, whatever is
left of the processes given by `pid:start time` is killed, with their children.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


@contextmanager
def watch_over_children() -> Iterator[None]:
    """Whatever processes this one has started by now end at the latest with it."""
    started = psutil.Process().children(recursive=True)
    marks = []
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            marks.append(f"{process.pid}:{process.create_time()}")
    watchdog = subprocess.Popen(
        [sys.executable, __file__, *marks],
        stdin=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C at the terminal is for the driver, not for the watchdog
    )
    try:
        yield
    finally:
        assert watchdog.stdin is not None
        watchdog.stdin.close()
        watchdog.wait(timeout=30)


def _same_process(mark: str) -> psutil.Process | None:
    pid, _, start = mark.partition(":")
    try:
        process = psutil.Process(int(pid))
        return process if str(process.create_time()) == start else None
    except psutil.NoSuchProcess:
        return None


def main() -> None:
    sys.stdin.read()
    for process in filter(None, map(_same_process, sys.argv[1:])):
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


if __name__ == "__main__":
    main()
