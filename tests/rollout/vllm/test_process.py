from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from practicum.rollout.vllm.process import ChildServer

# Starts a process of its own, cuts it loose, tells both pids and ignores requests to end.
SERVER = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(os.getpid(), below.pid, flush=True)
time.sleep(600)
"""


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def reported_pids(log: Path) -> list[int]:
    assert wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
    return [int(word) for word in log.read_text().split()]


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_stopping_ends_all_that_was_started(tmp_path: Path) -> None:
    server = ChildServer([sys.executable, "-c", SERVER], log=tmp_path / "log")
    pids = reported_pids(tmp_path / "log")
    assert server.exit_code is None
    server.stop()
    assert all(map(is_gone, pids))
    server.stop()


def test_it_ends_with_this_process_however_that_ends(tmp_path: Path) -> None:
    parent = (
        "import pathlib, sys, time; from practicum.rollout.vllm.process import ChildServer;"
        f"server = ChildServer([sys.executable, '-c', {SERVER!r}], log=pathlib.Path({str(tmp_path / 'log')!r}));"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", parent]) as process:
        pids = reported_pids(tmp_path / "log")
        os.kill(process.pid, signal.SIGKILL)
    assert wait_for(lambda: all(map(is_gone, pids)))


def test_its_end_is_noticed_with_its_last_output(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('out of luck'); sys.exit(3)"]
    server = ChildServer(command, log=tmp_path / "log")
    assert wait_for(lambda: server.exit_code is not None)
    assert server.exit_code == 3 and server.last_output.endswith("\nout of luck")
    server.stop()
    again = ChildServer([sys.executable, "-c", "print('once more')"], log=tmp_path / "log")
    assert wait_for(lambda: again.exit_code is not None)
    assert "out of luck" in (tmp_path / "log").read_text() and again.last_output.endswith("once more")
    again.stop()
    missing = ChildServer(["/not/there"], log=tmp_path / "other")
    assert wait_for(lambda: missing.exit_code is not None)
    assert missing.exit_code == 127 and "/not/there cannot be started" in missing.last_output
    missing.stop()
