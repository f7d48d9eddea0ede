from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

DRIVER = """
import time
from practicum.controller import ray_cluster
with ray_cluster():
    print("up", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_process_survives_the_driver(how: signal.Signals) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert driver.stdout is not None and driver.stdout.readline() == b"up\n"
    started = psutil.Process(driver.pid).children(recursive=True)
    assert started
    driver.send_signal(how)
    driver.wait(30)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(_alive(process) for process in started):
        time.sleep(0.2)
    assert [process for process in started if _alive(process)] == []


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_named() -> None:
    joining = "from practicum.controller import ray_cluster\nwith ray_cluster('127.0.0.1:1'): pass"
    run = subprocess.run([sys.executable, "-c", joining], capture_output=True, text=True, timeout=120)
    assert "ResourceError: could not join the Ray cluster at '127.0.0.1:1'" in run.stderr
