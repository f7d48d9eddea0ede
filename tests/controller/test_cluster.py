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


def start_driver() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_process_survives_the_driver(how: signal.Signals) -> None:
    driver = start_driver()
    assert driver.stdout is not None and driver.stdout.readline() == b"up\n"
    started = psutil.Process(driver.pid).children(recursive=True)
    assert started
    driver.send_signal(how)
    driver.wait(30)
    assert not psutil.wait_procs(started, timeout=20)[1]


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.2, 1.5])
def test_nor_a_driver_killed_while_ray_starts(delay_s: float) -> None:
    driver = start_driver()
    deadline = time.monotonic() + 30
    while len(psutil.Process(driver.pid).children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)  # the watchdog, then the first of Ray's processes
    time.sleep(delay_s)
    started = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    driver.wait(30)
    assert not psutil.wait_procs(started, timeout=20)[1]


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_named() -> None:
    joining = "from practicum.controller import ray_cluster\nwith ray_cluster('127.0.0.1:1'): pass"
    run = subprocess.run([sys.executable, "-c", joining], capture_output=True, text=True, timeout=120)
    assert "ResourceError: could not join the Ray cluster at '127.0.0.1:1'" in run.stderr
