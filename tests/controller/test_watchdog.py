from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

DRIVER = """
import os, psutil, subprocess, sys, time
from practicum.controller.watchdog import watch_over_children
sleep = "import time; time.sleep(60)"
mine = subprocess.Popen([sys.executable, "-c", sleep])
print(mine.pid, flush=True)
parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{{sleep}}']); {{sleep}}"
with watch_over_children() as all_started:
    child = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True)
    while not psutil.Process(child.pid).children():
        time.sleep(0.01)
    print(child.pid, flush=True)
    time.sleep(0.5)  # the watchdog looks ten times a second
    {before_ending}
    {ending}
"""


@pytest.mark.parametrize("before_ending", ["pass", "all_started()"])
@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), 9)", "os._exit(1)", "raise ValueError", "pass"])
def test_what_the_driver_leaves_behind_is_ended(ending: str, before_ending: str) -> None:
    code = DRIVER.format(ending=ending, before_ending=before_ending)
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert driver.stdout is not None
    from_before = psutil.Process(int(driver.stdout.readline()))
    child = psutil.Process(int(driver.stdout.readline()))
    left_behind = [child, *child.children()]
    assert len(left_behind) == 2
    driver.wait(10)
    assert not psutil.wait_procs(left_behind, timeout=60)[1]
    assert from_before.is_running()  # none of our business
    from_before.kill()
