"""Reward functions that misbehave in every way we know: each costs its own sample, and is never taken for a grade."""

# ruff: noqa: E501 (tables)

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from practicum.reward.executors import Graded
from practicum.types import Score
from tests.reward.builders import graded_by_worker, samples_of

GOOD = "return 1.0"
FILE = """
import asyncio, ctypes, gc, math, os, random, resource, signal, socket, subprocess, sys, threading, time
from collections import UserDict
from practicum import Sample, Score

kept, home = [], {}

def grade(sample: Sample):
    scope = {"sample": sample, **globals()}
    exec("def f():\\n    " + sample.text.replace("\\n", "\\n    "), scope)
    return scope["f"]()

async def grade_async(sample: Sample):
    scope = {"sample": sample, **globals()}
    exec("async def f():\\n    " + sample.text.replace("\\n", "\\n    "), scope)
    return await scope["f"]()

def grade_list(samples: list[Sample]):
    scope = {"samples": samples, **globals()}
    exec("def f():\\n    " + samples[0].text.replace("\\n", "\\n    "), scope)
    return scope["f"]()
"""


class Bad(NamedTuple):
    name: str
    code: str
    expected: str | float
    """The status, several of them, or the value that is right all the same."""


VALUES = [
    Bad("nothing", "pass", "invalid"),
    Bad("text", "return 'good'", "invalid"),
    Bad("text that reads like a number", "return '1.0'", "invalid"),
    Bad("bytes", "return b'1'", "invalid"),
    Bad("a list", "return [1.0]", "invalid"),
    Bad("a tuple, as some frameworks want", "return 1.0, {}", "invalid"),
    Bad("not a number", "return float('nan')", "invalid"),
    Bad("infinite", "return float('inf')", "invalid"),
    Bad("minus infinite", "return -math.inf", "invalid"),
    Bad("infinite as float32", "return 1e39", "invalid"),
    Bad("minus infinite as float32", "return -3.5e38", "invalid"),
    Bad("larger than any float", "return 10 ** 400", "invalid"),
    Bad("a complex number", "return 1j", "invalid"),
    Bad("the largest float32", "return 3.4028234663852886e38", 3.4028234663852886e38),
    Bad("true", "return True", 1.0),
    Bad("an int", "return 7", 7.0),
    Bad("a mapping without a score", "return {'reward': 1.0}", "invalid"),
    Bad("a mapping with text as score", "return {'score': '1'}", "invalid"),
    Bad("a mapping with an infinite score", "return {'score': 1e300}", "invalid"),
    Bad("a mapping of an unknown status", "return {'status': 'good', 'score': 1}", "invalid"),
    Bad("a reason without end", "return {'status': 'invalid', 'reason': 'x' * (1 << 24)}", "invalid"),
    Bad("a mapping that fails", "class M(UserDict):\n    def get(self, *a): raise KeyError\nreturn M(score=1)", "invalid"),
    Bad("parts that are no numbers", "return {'score': 1.0, 'parts': {'a': 'b'}}", "invalid"),
    Bad("parts that are infinite", "return {'score': 1.0, 'parts': {'a': math.inf}}", "invalid"),
    Bad("parts that are no mapping", "return {'score': 1.0, 'parts': [1]}", "invalid"),
    Bad("a Score without a value", "return Score(None)", "invalid"),
    Bad("a Score that is infinite", "return Score(1e39)", "invalid"),
    Bad("a Score of its own kind", "class S(Score):\n    def __reduce__(self): return os._exit, (3,)\nreturn S(2.0)", 2.0),
    Bad("a failure of its own kind", "class S(Score):\n    def __reduce__(self): return os._exit, (3,)\nreturn S(None, status='invalid')", "invalid"),
    Bad("a number of its own kind", "class F(float):\n    def __reduce__(self): return os._exit, (3,)\nreturn F(2.0)", 2.0),
    Bad("a number that raises", "class F:\n    def __float__(self): raise KeyError\nreturn F()", "invalid"),
    Bad("a number that is text", "class F:\n    def __float__(self): return '1'\nreturn F()", "invalid"),
    Bad("a number that hangs", "class F:\n    def __float__(self): time.sleep(60)\nreturn F()", "timeout"),
    Bad("what cannot be shown", "class F:\n    def __repr__(self): raise KeyError\nreturn F()", "invalid"),
    Bad("what is shown without end", "class F:\n    def __repr__(self): return 'x' * (1 << 24)\nreturn F()", "invalid"),
    Bad("a generator", "yield 1.0", "invalid"),
    Bad("a function", "return grade", "invalid"),
    Bad("a lock", "return threading.Lock()", "invalid"),
    Bad("a coroutine", "async def g(): return 1.0\nc = g()\nc.close()\nreturn c", "invalid"),
    Bad("a list that holds itself", "x = []\nx.append(x)\nreturn x", "invalid"),
    Bad("the sample", "return sample", "invalid"),
    Bad("a class", "return float", "invalid"),
]  # fmt: skip
RAISES = [
    Bad("an error", "raise KeyError('x')", "invalid"),
    Bad("an exit", "sys.exit(0)", "invalid"),
    Bad("an interrupt", "raise KeyboardInterrupt", "invalid"),
    Bad("a base exception", "raise BaseException", "invalid"),
    Bad("GeneratorExit", "raise GeneratorExit", "invalid"),
    Bad("StopIteration", "raise StopIteration(1.0)", "invalid"),
    Bad("a broken connection", "raise BrokenPipeError", "invalid"),
    Bad("a time-out of its own", "raise TimeoutError", "invalid"),
    Bad("an error without words", "class E(Exception):\n    def __str__(self): raise KeyError\nraise E", "invalid"),
    Bad("an error with too many words", "raise ValueError('x' * (1 << 24))", "invalid"),
    Bad("a chain of errors", "e = None\nfor _ in range(9999):\n    n = ValueError()\n    n.__cause__ = e\n    e = n\nraise e", "invalid"),
    Bad("a deep recursion", "def g(): g()\ng()", "invalid"),
    Bad("a syntax error", "return eval('(')", "invalid"),
    Bad("an assertion", "assert False", "invalid"),
    Bad("a warning", "raise Warning", "invalid"),
    Bad("a surrogate", "raise ValueError('\\ud800')", "invalid"),
    Bad("an error of memory", "raise MemoryError", "invalid"),
]  # fmt: skip
ENDS = [
    Bad("leaves", "os._exit(0)", "invalid"),
    Bad("leaves with a code", "os._exit(3)", "invalid"),
    Bad("crashes", "ctypes.string_at(0)", "invalid"),
    Bad("aborts", "os.abort()", "invalid"),
    Bad("terminates itself", "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)", "invalid"),
    Bad("becomes another program", "os.execv('/bin/true', ['true'])", "invalid"),
    Bad("allocates without end", "x = []\nwhile True: x.append(bytearray(1 << 24))", "invalid"),
    Bad("hangs", "time.sleep(60)", "timeout"),
    Bad("computes without end", "while True: pass", "timeout"),
    Bad("will not be stopped", "while True:\n    try: time.sleep(60)\n    except BaseException: pass", "timeout"),
    Bad("stops itself", "os.kill(os.getpid(), signal.SIGSTOP)", "timeout"),
    Bad("waits for itself", "lock = threading.Lock()\nlock.acquire()\nlock.acquire()", "timeout"),
    Bad("waits for a thread", "t = threading.Thread(target=time.sleep, args=(60,))\nt.start()\nt.join()", "timeout"),
    Bad("waits for a process", "subprocess.run(['sleep', '60'])", "timeout"),
    Bad("waits for a pipe", "os.read(os.pipe()[0], 1)", "timeout"),
    Bad("holds the lock of the interpreter", "return sum(range(10 ** 12))", "timeout"),
    Bad("closes all it has", "os.closerange(3, 999)\ntime.sleep(60)", "invalid timeout"),
    Bad("writes to all it has", "for n in range(3, 64):\n    try: os.write(n, b'x' * 64)\n    except OSError: pass\ntime.sleep(60)", "invalid timeout"),
    Bad("answers for itself", "import struct, pickle\nd = pickle.dumps((1, True, 5.0, False))\nfor n in range(3, 64):\n    try: os.write(n, struct.pack('!Q', len(d)) + d)\n    except OSError: pass\ntime.sleep(60)", "invalid timeout"),
]  # fmt: skip
LEAVES = [
    Bad("a copy that comes back first", "if os.fork() == 0: return -1.0\ntime.sleep(0.01)\nreturn 1.0", 1.0),
    Bad("many copies", "return 1.0 if all([os.fork() for _ in range(4)]) else -1.0", 1.0),
    Bad("a copy made by the C library", "if ctypes.CDLL(None).fork() == 0: return -1.0\nreturn 1.0", 1.0),
    Bad("a copy that raises", "if os.fork() == 0: raise KeyError\nreturn 1.0", 1.0),
    Bad("a copy that stays", "if os.fork() == 0: time.sleep(60)\nreturn 1.0", 1.0),
    Bad("a daemon", "if os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n    time.sleep(60)\nreturn 1.0", 1.0),
    Bad("a program", "subprocess.Popen(['sleep', '60'])\nreturn 1.0", 1.0),
    Bad("a program in a session", "subprocess.Popen(['sleep', '60'], start_new_session=True)\nreturn 1.0", 1.0),
    Bad("threads", "[threading.Thread(target=time.sleep, args=(60,), daemon=True).start() for _ in range(5)]\nreturn 1.0", 1.0),
    Bad("open files", "kept.extend(os.open('/dev/null', 0) for _ in range(60))\nreturn 1.0", 1.0),
    Bad("memory", "kept.append(bytearray(48 << 20))\nreturn 1.0", 1.0),
    Bad("an alarm", "signal.setitimer(signal.ITIMER_REAL, 0.05)\nreturn 1.0", 1.0),
    Bad("another folder", "os.chdir('/proc')\nreturn 1.0", 1.0),
    Bad("low limits", "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\nreturn 1.0", 1.0),
    Bad("no processor time", "resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nreturn 1.0", 1.0),
    Bad("no garbage collector", "gc.disable()\nreturn 1.0", 1.0),
    Bad("output", "print('x' * (1 << 22))\nreturn 1.0", 1.0),
    Bad("errors", "os.write(2, b'\\0' * (1 << 20))\nreturn 1.0", 1.0),
    Bad("no output", "sys.stdout = sys.stderr = None\nreturn 1.0", 1.0),
    Bad("an output that raises", "class O:\n    def flush(self): raise SystemExit\nsys.stdout = O()\nraise KeyError", "invalid"),
    Bad("closed output", "os.close(1)\nos.close(2)\nreturn 1.0", 1.0),
    Bad("other random numbers", "random.seed(0)\nreturn 1.0", 1.0),
    Bad("an exit that hangs", "import atexit\natexit.register(time.sleep, 60)\nreturn 1.0", 1.0),
]  # fmt: skip
ASYNC = [
    Bad("an error, async", "raise KeyError", "invalid"),
    Bad("an exit, async", "sys.exit(0)", "invalid"),
    Bad("an interrupt, async", "raise KeyboardInterrupt", "invalid"),
    Bad("a cancellation", "raise asyncio.CancelledError", "invalid"),
    Bad("cancels itself", "asyncio.current_task().cancel()\nawait asyncio.sleep(60)", "invalid"),
    Bad("hangs, async", "await asyncio.sleep(60)", "timeout"),
    Bad("swallows its cancellation", "while True:\n    try: await asyncio.sleep(60)\n    except asyncio.CancelledError: pass", "timeout"),
    Bad("blocks the loop", "time.sleep(60)", "timeout"),
    Bad("leaves, async", "os._exit(3)", "invalid"),
    Bad("crashes, async", "ctypes.string_at(0)", "invalid"),
    Bad("a copy, async", "if os.fork() == 0: return -1.0\nreturn 1.0", 1.0),
    Bad("a copy that waits", "pid = os.fork()\nawait asyncio.sleep(0.01)\nreturn 1.0 if pid else -1.0", 1.0),
    Bad("infinite as float32, async", "return 1e39", "invalid"),
    Bad("nothing, async", "pass", "invalid"),
    Bad("a task that goes on", "kept.append(asyncio.ensure_future(asyncio.sleep(60)))\nreturn 1.0", 1.0),
    Bad("threads, async", "[threading.Thread(target=time.sleep, args=(60,), daemon=True).start() for _ in range(5)]\nreturn 1.0", 1.0),
]  # fmt: skip
LISTS = [
    Bad("too few", "return [1.0] * (len(samples) - 1)", "invalid"),
    Bad("too many", "return [1.0] * (len(samples) + 1)", "invalid"),
    Bad("none at all", "return []", "invalid"),
    Bad("no list", "return 1.0", "invalid"),
    Bad("nothing for all", "return None", "invalid"),
    Bad("a mapping by place", "return {n: 1.0 for n in range(len(samples))}", "invalid"),
    Bad("a set", "return {1.0}", "invalid"),
    Bad("text for all", "return '1' * len(samples)", "invalid"),
    Bad("a list without end", "import itertools\nreturn itertools.repeat(bytearray(1 << 16))", "invalid timeout"),
    Bad("one infinite", "return [1e39] * len(samples)", "invalid"),
    Bad("a generator for all", "return (1.0 for _ in samples)", 1.0),
    Bad("a copy of all", "if os.fork() == 0: return [-1.0] * len(samples)\nreturn [1.0] * len(samples)", 1.0),
]  # fmt: skip
ONE_BY_ONE = [*VALUES, *RAISES, *ENDS, *LEAVES]
ALL = [*ONE_BY_ONE, *ASYNC, *LISTS]


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Graded]:
    """Each between two functions that do as they should."""
    file: Path = tmp_path_factory.mktemp("functions") / "misbehaving.py"
    file.write_text(FILE)
    found: dict[str, Graded] = {}
    for name, table, good in (
        ("grade", ONE_BY_ONE, GOOD),
        ("grade_async", ASYNC, GOOD),
        ("grade_list", LISTS, "return [1.0] * len(samples)"),
    ):
        rows = [row for bad in table for row in (bad, Bad("good", good, 1.0))]
        samples = samples_of(*(row.code for row in rows))
        results = graded_by_worker({"function": f"{file}:{name}"}, samples, timeout_s=2.0, num_processes=4)
        for row, result in zip(rows, results, strict=True):
            if row.name == "good":
                assert result.score == Score(1.0), (name, result)
            else:
                found[row.name] = result
    return found


def test_there_are_many() -> None:
    assert len({bad.name for bad in ALL}) == len(ALL) >= 80


@pytest.mark.parametrize("bad", ALL, ids=lambda bad: bad.name)
def test_it_costs_its_own_sample_at_most(bad: Bad, graded: dict[str, Graded]) -> None:
    score = graded[bad.name].score
    if isinstance(bad.expected, float):
        assert score == Score(bad.expected)
    else:
        assert score.status in bad.expected.split() and score.value is None and score.reason, score
        assert len(score.reason) < 5000


def test_an_infinite_reward_names_function_and_sample(graded: dict[str, Graded]) -> None:
    assert (
        "grade: returned what is no score for an answer to prompt prompt-" in graded["infinite as float32"].score.reason
    )
