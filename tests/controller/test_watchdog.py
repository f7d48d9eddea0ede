from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

DRIVER = """
import os, subprocess, sys
from practicum.controller.watchdog import watch_over_children
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
with watch_over_children():
    print(child.pid, flush=True)
    {ending}
"""


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), 9)", "os._exit(1)", "raise ValueError", "pass"])
def test_what_the_driver_leaves_behind_is_ended(ending: str) -> None:
    code = DRIVER.format(ending=ending)
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert driver.stdout is not None
    child = psutil.Process(int(driver.stdout.readline()))
    driver.wait(10)
    assert not psutil.wait_procs([child], timeout=10)[1]
