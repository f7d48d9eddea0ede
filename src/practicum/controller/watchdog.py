"""Ends a Ray that its driver left behind. Runs as a script in a process of its own, so that `kill -9` cannot skip it.

Some of Ray's helper processes outlive a killed driver by a minute, since they first try to report to what is gone. The
driver holds the other end of this process's standard input. Until the driver says that all is started, the watchdog
keeps looking which processes descend from it; when the input closes, however the driver ended, it kills them.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

_LOOK_EVERY_S = 0.1


@contextmanager
def watch_over_children() -> Iterator[Callable[[], None]]:
    """See to it that processes started in the block, and their children, end at the latest with this one.

    Call the given function once all are started: that ends the search for them, not the watch. Processes from before
    are left alone.
    """
    before = [str(child.pid) for child in psutil.Process().children(recursive=True)]
    watchdog = subprocess.Popen(
        [sys.executable, __file__, str(os.getpid()), *before],
        stdin=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C at the terminal is for the driver, not for the watchdog
    )
    assert watchdog.stdin is not None

    def all_started() -> None:
        assert watchdog.stdin is not None
        watchdog.stdin.write(b"all started\n")
        watchdog.stdin.flush()

    try:
        yield all_started
    finally:
        watchdog.stdin.close()
        watchdog.wait(timeout=30)


def _descendants(pid: int, spared: set[int]) -> set[psutil.Process]:
    """Return all processes below one, without the spared ones and those below them."""
    found: set[psutil.Process] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            if child.pid not in spared:
                found |= {child, *_descendants(child.pid, spared)}
    return found


def main() -> None:
    driver, *left_alone = map(int, sys.argv[1:])
    spared = {os.getpid(), *left_alone}
    seen: set[psutil.Process] = set()  # psutil compares start times too, so a reused pid is another process
    while not select.select([sys.stdin], [], [], _LOOK_EVERY_S)[0]:
        seen |= _descendants(driver, spared)
    if sys.stdin.readline():
        seen |= _descendants(driver, spared)
        sys.stdin.read()
    for process in list(seen):
        seen |= _descendants(process.pid, spared)
    for process in seen:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    main()
