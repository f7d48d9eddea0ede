"""A child process that never outlives this one, with all that it has started itself.

Between the two stands a supervisor: this file, run as a script. It holds the other end of a pipe to us and, when that
closes, however we ended, kills everything below it. Linux hands it what was cut loose down there.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.2
_STOP_S = 30.0
_GRACE_S = 3.0


class ChildServer:
    """A server that is started at once; what it prints is appended to the file `log`."""

    def __init__(self, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._log = log
        with log.open("ab") as output:
            self._start = output.tell()  # of what may explain a failure
            self._supervisor = subprocess.Popen(
                [sys.executable, __file__, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(os.environ if environment is None else environment),
                start_new_session=True,  # a Ctrl-C at the terminal is for us
            )

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._supervisor.poll()

    def mark_ready(self) -> None:
        """Note that the start went well: what was printed so far explains no later failure."""
        self._start = self._log.stat().st_size

    @property
    def last_output(self) -> str:
        """The first error that it printed, and the end of what it printed."""
        from practicum.processes.log import excerpt  # not for the supervisor

        return excerpt(self._log, self._start)

    def stop(self) -> None:
        assert self._supervisor.stdin is not None
        with suppress(BrokenPipeError):
            self._supervisor.stdin.close()
        try:
            self._supervisor.wait(_GRACE_S + _STOP_S + _POLL_S)  # as long as its work may take
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait(_STOP_S)


def _end_all(gently: bool) -> None:
    """End all processes below this one."""
    below = psutil.Process().children(recursive=True)
    if gently:  # it may have shared memory and sockets to clear away
        for process in below:
            with suppress(psutil.Error):
                process.terminate()
        psutil.wait_procs(below, timeout=_GRACE_S)
    deadline = time.monotonic() + _STOP_S
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=_POLL_S)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    code: int | None = None
    try:
        try:
            server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
        except OSError as error:
            print(f"{sys.argv[1]} cannot be started: {error}", flush=True)
            return 127
        while (code := server.poll()) is None:
            if select.select([sys.stdin], [], [], _POLL_S)[0]:
                break
    finally:
        _end_all(gently=code is None)
    return 1 if code is None else code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
