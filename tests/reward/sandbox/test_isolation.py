from __future__ import annotations

import os
import subprocess
import sys

import pytest

from practicum.reward.sandbox import Sandbox, isolation_problem
from practicum.reward.sandbox import isolation as kernel


def test_a_failed_call_says_what_and_why() -> None:
    with pytest.raises(OSError, match="mount tmpfs on /no/such/folder: No such file"):
        kernel.mount("tmpfs", "/no/such/folder", "tmpfs", 0)


def test_reads_about_processes() -> None:
    proc = os.open("/proc", os.O_RDONLY)
    try:
        assert 1 << 20 < kernel.memory_of(f"{os.getpid()}/status", proc) < 1 << 40
        assert kernel.memory_of("999999999/status", proc) == 0
    finally:
        os.close(proc)
    assert kernel.parent_of(str(os.getpid())) == os.getppid()
    assert kernel.parent_of("999999999") == 0


@pytest.mark.skipif(isolation_problem() is not None, reason=f"no isolation here: {isolation_problem()}")
def test_a_box_shows_only_what_it_needs() -> None:
    outcome = Sandbox().run({}, ["-c", "import os; print(os.listdir('/'), os.listdir('/dev'), os.uname().nodename)"])
    shown = outcome.stdout.decode()
    for name in ("home", "var", "sys", "old"):
        assert f"'{name}'" not in shown
    assert "box" in shown and "'null'" in shown and "'shm'" in shown
    assert os.uname().nodename not in shown or os.uname().nodename == "box"


def test_a_yard_finds_and_kills_its_descendants() -> None:
    # In a process of its own: a folder takes its process's orphans.
    code = (
        "import os, time\n"
        "from practicum.reward.sandbox.isolation import TrustedFolder\n"
        "folder = TrustedFolder({'folder': '/nowhere'})\n"
        "r, w = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.write(w, b'x')\n"
        "        time.sleep(60)\n"
        "    os._exit(0)\n"
        "os.read(r, 1)\n"
        "folder.kill_all()\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]), os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert "-9" in done.stdout, done
