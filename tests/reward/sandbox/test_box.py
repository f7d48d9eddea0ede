from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from practicum.errors import RewardError
from practicum.reward.sandbox import Limits, Outcome, Sandbox, box, isolation_problem

isolated = pytest.mark.skipif(isolation_problem() is not None, reason=f"no isolation here: {isolation_problem()}")
both = pytest.mark.parametrize("trusted", [pytest.param(False, marks=isolated), True], ids=["box", "trusted"])
ROOT = Path(__file__).parents[3]


@both
def test_runs_a_program_with_its_files_and_input(trusted: bool) -> None:
    code = (
        "import sys\nprint(open('data/x.txt').read(), input(), sys.argv[1])\nsys.stderr.write('oops\\n')\nsys.exit(3)"
    )
    outcome = Sandbox(trusted=trusted).run(
        {"main.py": code, "data/x.txt": b"\xc3\xa9"}, ["main.py", "z"], "ü\n".encode()
    )
    assert (outcome.kind, outcome.code) == ("exited", 3)
    assert (outcome.stdout.decode(), outcome.stderr) == ("é ü z\n", b"oops\n")
    assert 0 < outcome.seconds < 10
    assert not outcome.succeeded and outcome.summary == "exit code 3: oops"


@both
def test_the_environment_is_not_the_callers(trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRACTICUM_SECRET", "x")
    outcome = Sandbox(trusted=trusted).run({}, ["-c", "import os; print('PRACTICUM_SECRET' in os.environ)"])
    assert outcome.stdout == b"False\n"


@both
def test_each_input_is_a_fresh_run(trusted: bool) -> None:
    code = "import os; print(input(), os.listdir('.')); open('left', 'w').close()"
    outcomes = Sandbox(trusted=trusted).run_each({"a.py": code}, ["a.py"], [b"1", b"2", b"3"])
    assert [outcome.stdout for outcome in outcomes] == [b"1 ['a.py']\n", b"2 ['a.py']\n", b"3 ['a.py']\n"]


@both
def test_large_input_and_output_pass(trusted: bool) -> None:
    data = os.urandom(3 << 20)
    sandbox = Sandbox(Limits(output_kb=4096), trusted=trusted)
    code = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"
    assert sandbox.run({}, ["-c", code], data).stdout == data


@both
def test_input_nobody_reads_does_not_block(trusted: bool) -> None:
    assert Sandbox(trusted=trusted).run({}, ["-c", "print(1)"], bytes(1 << 20)).stdout == b"1\n"


@both
def test_time_and_output_are_limited(trusted: bool) -> None:
    sandbox = Sandbox(Limits(wall_s=0.5, output_kb=1), trusted=trusted)
    slow = sandbox.run({}, ["-c", "print('before', flush=True); import time; time.sleep(60)"])
    assert (slow.kind, slow.code, slow.stdout) == ("timeout", None, b"before\n") and slow.seconds < 5
    assert slow.summary == "stopped by the time limit"
    loud = sandbox.run({}, ["-c", "print('x' * 5000)"])
    assert loud.kind == "output" and loud.stdout == b"x" * 1024


@both
def test_a_program_ended_by_a_signal_names_it(trusted: bool) -> None:
    outcome = Sandbox(trusted=trusted).run({}, ["-c", "import os; os.abort()"])
    assert (outcome.kind, outcome.code) == ("signalled", signal.SIGABRT)


@both
def test_orphans_in_their_own_session_are_killed(trusted: bool, tmp_path: Path) -> None:
    mark = f"orphan-{os.getpid()}-{trusted}"
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\n    time.sleep(60)\n"
    outcome = Sandbox(trusted=trusted).run({}, ["-c", code, mark])
    assert outcome.succeeded and processes_with(mark) == []


@both
def test_works_for_a_caller_that_ignores_its_children(trusted: bool) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        outcome = Sandbox(Limits(wall_s=5), trusted=trusted).run({}, ["-c", "raise SystemExit(3)"])
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert (outcome.kind, outcome.code) == ("exited", 3)


@isolated
def test_leaving_early_ends_the_box() -> None:
    mark = f"early-{os.getpid()}"
    code = "import sys, time\nif input() == '2': time.sleep(60)\n"
    outcomes = Sandbox(Limits(wall_s=60)).run_each({}, ["-c", code, mark], [b"1", b"2"])
    assert next(outcomes).succeeded
    began = time.monotonic()
    outcomes.close()
    assert time.monotonic() - began < 30 and processes_with(mark) == []


@isolated
def test_packages_can_be_let_in() -> None:
    code = "import numpy; print(numpy.arange(4).sum()); open(numpy.__file__, 'a')"
    outcome = Sandbox(packages=True).run({}, ["-c", code])
    assert outcome.stdout == b"6\n" and outcome.code == 1, outcome
    assert b"ModuleNotFoundError" in Sandbox().run({}, ["-c", "import numpy"]).stderr


@isolated
def test_standard_library_and_child_processes_work() -> None:
    code = (
        "import asyncio, bz2, ctypes, decimal, hashlib, json, lzma, multiprocessing, re, sqlite3, ssl\n"
        "import subprocess, sys, tempfile, threading, zlib\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.Pool(2) as pool: print(pool.map(abs, [-1, -2]))\n"
        "    print(subprocess.run([sys.executable, '-c', 'print(3)'], capture_output=True).stdout)\n"
        "    print(asyncio.run(asyncio.sleep(0, 4)))\n"
        "    tempfile.TemporaryFile().write(b'x')\n"
    )
    outcome = Sandbox().run({"main.py": code}, ["main.py"])
    assert outcome.stdout == b"[1, 2]\nb'3\\n'\n4\n", outcome


@isolated
def test_fifty_boxes_at_once() -> None:
    sandbox = Sandbox(Limits(wall_s=60, processes=8))
    gate = threading.Barrier(50)
    code = "import os\nx = input()\npids = [os.fork() or os._exit(0) for _ in range(4)]\nprint(x, os.getpid())"

    def run(number: int) -> Outcome:
        gate.wait(60)
        return sandbox.run({}, ["-c", code], str(number).encode())

    before = set(psutil.Process().children(recursive=True))
    with ThreadPoolExecutor(50) as pool:
        outcomes = list(pool.map(run, range(50)))
    assert [outcome.stdout.decode() for outcome in outcomes] == [f"{number} 2\n" for number in range(50)], outcomes
    assert set(psutil.Process().children(recursive=True)) <= before


@both
def test_killing_the_starter_leaves_nothing(trusted: bool, tmp_path: Path) -> None:
    mark = f"orphaned-{os.getpid()}-{trusted}"
    program = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\ntime.sleep(60)"
    starter = (
        "import sys\nfrom practicum.reward.sandbox import Limits, Sandbox\n"
        f"sandbox = Sandbox(Limits(wall_s=60), trusted={trusted})\n"
        "print('ready', flush=True)\n"
        f"sandbox.run({{}}, ['-c', {program!r}, {mark!r}])\n"
    )
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        wait_until(lambda: len(processes_with(mark)) == 3, "the program to start")
        process.kill()
    wait_until(lambda: processes_with(mark) == [], "the box to end")


@isolated
@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user; the other tests ran as one already")
def test_ordinary_users_are_as_safe() -> None:
    # Not in `tmp_path`: whichever pytest starts next closes the way there to everybody but its own user.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        command = [sys.executable, "-m", "tests.reward.sandbox.as_user", f"--basetemp={folder}/pytest"]
        command += ["-rs", "--no-header", "tests/reward/sandbox/test_attacks.py"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-4000:] + done.stderr


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", ""])
def test_files_stay_in_the_working_folder(name: str) -> None:
    with pytest.raises(ValueError, match="no file name inside"):
        Sandbox(trusted=True).run({name: ""}, ["-c", ""])


def test_without_isolation_it_refuses_and_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box, "isolation_problem", lambda: "new namespaces: Operation not permitted")
    with pytest.raises(RewardError, match=r"(?s)isolated.*Operation not permitted.*user namespaces.*trusted: true"):
        Sandbox()
    assert Sandbox(trusted=True).run({}, ["-c", "print(1)"]).stdout == b"1\n"


def test_a_box_that_cannot_be_built_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = Sandbox(trusted=True)
    monkeypatch.setattr(box.layout, "interpreter", lambda: "/bin/false")
    with pytest.raises(RewardError, match="launcher ended before its program"):
        sandbox.run({}, ["-c", ""])


def processes_with(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and mark in (process.info["cmdline"] or []):
            found.append(process)
    return found


def wait_until(condition: object, what: str, timeout_s: float = 30.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.02)
