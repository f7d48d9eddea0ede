"""Answers written to be left out, to pass unearned, or to bring the grading down. All are zeros: `add(20, 22)` is 42,
and none of them can add."""

# ruff: noqa: E501 (tables)

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import psutil
import pytest

from practicum.reward.graders.code import Code
from practicum.reward.sandbox import Limits, isolation_problem
from practicum.types import Score
from tests.reward.builders import samples_of

pytestmark = pytest.mark.skipif(isolation_problem() is not None, reason=f"no isolation here: {isolation_problem()}")

LIMITS = Limits(wall_s=1, cpu_s=1, memory_mb=128, disk_mb=4, num_files=64, processes=16, open_files=32, output_kb=64)
APART = ["assert add(20, 22) == 42"]
TRUTHS: dict[str, Any] = {
    "apart": APART,
    "abs": ["assert abs(add(20, 22) - 42) < 1e-6"],
    "sorted": ["assert sorted([add(20, 22), 1]) == [1, 42]"],
    "callback": ["assert add(lambda x: 42 if x == 'key' else 0, 1) == 42"],
    "object": ["class Box:\n    value = 42\n    def get(self): return iter([42])\nassert add(Box(), 1) == [42]"],
    "raises": ["try:\n    add(20)\nexcept TypeError: ok = True\nelse: ok = False\nassert ok and add(20, 22) == 42"],
    "loop": ["n = 0\nfor x in add(20, 22):\n    n += x\nassert n == 42"],
    "function": ["def test_add(): assert add(20, 22) == 42"],
    "call": {"fn_name": "add", "inputs": [[20, 22]], "outputs": [42]},
    "near": {"fn_name": "add", "inputs": [[20, 22]], "outputs": [42.0]},
    "program": {"inputs": ["20 22\n"], "outputs": ["42\n"]},
    "together": APART,
}


class Hostile(NamedTuple):
    name: str
    code: str
    tests: str = "apart"


# Prelude of those that speak to the judge in their own words: its questions come on `peer.reader`.
WIRE = """
import sys, os, json
frame = sys._getframe()
while 'peer' not in frame.f_locals: frame = frame.f_back
peer = frame.f_locals['peer']
def say(data): peer.writer.write(data); peer.writer.flush()
def tell(*message): say(json.dumps(message).encode() + b'\\n')
def hear(): return peer.reader.readline()
"""
# As if it had been imported and had an `add`; what follows is the answer to the call.
LOADED = WIRE + "tell('ready', None); hear(); tell('value', ['dict', [['add', ['mine', [1, None]]]]]); hear()\n"
ALIKE = """
class Alike{base}:
    def __eq__(self, other): return True
    def __bool__(self): return True
    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __instancecheck__ = __eq__
    def __hash__(self): return 42
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __radd__ = __abs__ = lambda self, *a: self
"""
ADD = "def add(a, b=0): "
LEAVE = "import os, sys, signal, time, threading\n"

NAMES = [
    Hostile("a class of the name", "class add: pass"),
    Hostile("a class and an exit", "class add: pass\nraise SystemExit"),
    Hostile("a class and an endless loop", "class add: pass\nwhile True: pass"),
    Hostile("a class that is equal to all", "class add:\n    def __init__(self, *a): pass\n    def __eq__(self, o): return True"),
    Hostile("a class with an equal metaclass", "class M(type):\n    def __call__(c, *a): return c\n    def __eq__(c, o): return 1\nclass add(metaclass=M): pass"),
    Hostile("a coroutine function", "async def add(a, b): return 42 - 1"),
    Hostile("an async generator", "async def add(a, b): yield 1"),
    Hostile("a generator", "def add(a, b): yield 1"),
    Hostile("a shadowed sorted", "class sorted: pass\ndef add(a, b): return 0", "sorted"),
    Hostile("a shadowed sorted that lies", "def sorted(x): return [1, 42]\ndef add(a, b): return 0", "sorted"),
    Hostile("a shadowed abs", "class abs: pass\ndef add(a, b): return 0", "abs"),
    Hostile("an abs that lies", "def abs(x): return 0\ndef add(a, b): return 0", "abs"),
    Hostile("a shadowed TypeError", "class TypeError(BaseException): pass\ndef add(*a): raise TypeError", "raises"),
    Hostile("a shadowed AssertionError", "class AssertionError(Exception): pass\ndef add(a, b): raise AssertionError"),
    Hostile("a shadowed test", "def test_add(): pass\ndef add(a, b): return 0", "function"),
    Hostile("a shadowed class of the test", "class Box: pass\ndef add(a, b): return [0]", "object"),
    Hostile("nothing of the name", "x = 1"),
    Hostile("None of the name", "add = None"),
    Hostile("a number of the name", "add = 42"),
    Hostile("a module of the name", "import math as add"),
    Hostile("a type of the name", "add = complex"),
    Hostile("a property", "add = property(lambda self: 42)"),
    Hostile("names that are no names", "globals().update({'a b': 1, '': 2, '__asserted__': [1], '__builtins__': {}})"),
    Hostile("a name for every thing", "class Names(dict):\n    __missing__ = lambda s, k: 42\nadd = Names()"),
    Hostile("a deleted namespace", "globals().clear()"),
    Hostile("a Solution that is no class", "Solution = 42", "call"),
    Hostile("a class of the name, called", "class add(int):\n    def __new__(c, *a): return int.__new__(c, 7)", "call"),
    Hostile("a coroutine, called", "async def add(a, b): return 42", "call"),
    Hostile("a class, together", "class add:\n    def __init__(self, *a): raise SystemExit(0)", "together"),
]  # fmt: skip
LIES = [
    Hostile("equal to all", ALIKE.format(base="") + ADD + "return Alike()"),
    Hostile("a number equal to all", ALIKE.format(base="(int)") + ADD + "return Alike(7)"),
    Hostile("a float equal to all", ALIKE.format(base="(float)") + ADD + "return Alike(7)"),
    Hostile("a text equal to all", ALIKE.format(base="(str)") + ADD + "return Alike('7')"),
    Hostile("a list equal to all", ALIKE.format(base="(list)") + ADD + "return Alike()", "object"),
    Hostile("near to all", ALIKE.format(base="") + ADD + "return Alike()", "abs"),
    Hostile("a number near to all", ALIKE.format(base="(int)") + ADD + "return Alike(7)", "abs"),
    Hostile("in its place in a list", ALIKE.format(base="") + ADD + "return Alike()", "sorted"),
    Hostile("of many classes", ADD + "return type('int', (), {'__class__': int, '__eq__': lambda s, o: True})()"),
    Hostile("a loop that never comes to the assert", "def add(a, b): return []", "loop"),
    Hostile("a loop without an end", "import itertools\ndef add(a, b): return itertools.count()", "loop"),
    Hostile("a sum that adds itself up", ALIKE.format(base="") + ADD + "return [Alike()]", "loop"),
    Hostile("equal to all, called", ALIKE.format(base="(int)") + ADD + "return Alike(7)", "call"),
    Hostile("not a number", ADD + "return float('nan')", "near"),
    Hostile("infinite", ADD + "return float('inf')", "near"),
    Hostile("larger than any float", ADD + "return 10 ** 400", "near"),
    Hostile("more digits than can be read", ADD + "return 10 ** 6000", "call"),
    Hostile("a list of it and more", ADD + "return [42, 42]", "call"),
    Hostile("deeper than can be read", ADD + "x = []\n    for _ in range(900): x = [x]\n    return x".replace("x = []", "\n    x = []", 1), "call"),
    Hostile("a list that holds itself", ADD + "\n    x = []\n    x.append(x)\n    return x"),
    Hostile("a mapping with odd keys", ADD + "return {None: 42, (1,): 42, float('nan'): 1}"),
    Hostile("a text in place of the number", ADD + "return '42'", "call"),
    Hostile("true for all", ADD + "return True"),
]  # fmt: skip
EXITS = [
    Hostile(f"{name} {when}", LEAVE + (code if when == "at once" else f"{ADD}\n    {code}"), tests)
    for name, code in [
        ("leaves", "sys.exit(0)"),
        ("leaves hard", "os._exit(0)"),
        ("aborts", "os.abort()"),
        ("raises KeyboardInterrupt", "raise KeyboardInterrupt"),
        ("raises GeneratorExit", "raise GeneratorExit"),
        ("kills itself", "os.kill(os.getpid(), 9)"),
        ("stops itself", "os.kill(os.getpid(), 19)"),
    ]
    for when, tests in [("at once", "apart"), ("when called", "apart"), ("when called", "together")]
]
EXITS += [
    Hostile("kills the judge", LEAVE + ADD + "os.kill(os.getppid(), 9)"),
    Hostile("stops the judge", LEAVE + ADD + "os.kill(os.getppid(), 19)"),
    Hostile("kills all it can", LEAVE + "os.kill(-1, 9)"),
    Hostile("kills its group", LEAVE + "os.killpg(0, 9)"),
    Hostile("becomes another program", "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(42)'])"),
    Hostile("closes everything", "import os\nos.closerange(0, 100)\ndef add(a, b): return 0"),
    Hostile("forks and both go on", "import os\nos.fork()\ndef add(a, b): return 0"),
    Hostile("forks and both go on, together", "import os\nos.fork()\ndef add(a, b): return 0", "together"),
    Hostile("forks and both return", "import os\ndef add(a, b): return os.fork()", "call"),
    Hostile("leaves a daemon", LEAVE + "if not os.fork():\n    os.setsid()\n    time.sleep(99)\ndef add(a, b): return 0"),
    Hostile("raises an own base exception", "class E(BaseException):\n    def __str__(self): raise self\ndef add(a, b): raise E"),
    Hostile("raises without words", "class E(Exception):\n    def __str__(self): return 42\ndef add(a, b): raise E"),
    Hostile("raises with too many words", "def add(a, b): raise ValueError('x' * (1 << 25))"),
    Hostile("raises by name of nothing", "class Nothing(Exception): pass\nNothing.__name__ = ''\ndef add(a, b): raise Nothing"),
    Hostile("leaves while the process ends", "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return 0", "together"),
]  # fmt: skip
FORGERIES = [
    Hostile("prints the verdict", "print('[\"passed\"]')\nimport os\nos._exit(0)"),
    Hostile("writes the verdict everywhere", "import os\nfor n in range(64):\n    try: os.write(n, b'[\"passed\"]')\n    except OSError: pass\nos._exit(0)"),
    Hostile("writes the result everywhere", "import os\nfor n in range(64):\n    try: os.write(n, b'43')\n    except OSError: pass\nos._exit(0)", "call"),
    Hostile("writes two results", "import os\ndef add(a, b):\n    for n in range(3, 9):\n        try: os.write(n, b'42')\n        except OSError: pass\n    return 42", "call"),
    Hostile("patches json", "import json\njson.dumps = lambda *a, **k: '[\"passed\"]'\ndef add(a, b): return 0"),
    Hostile("patches write", "import os\nwrite = os.write\nos.write = lambda fd, data: write(fd, b'[\"passed\"]')\ndef add(a, b): return 0"),
    Hostile("looks for the proof", "import sys, os\nfor frame in sys._current_frames().values(): print(frame.f_locals)\ndef add(a, b): return 0", "together"),
    Hostile("patches built-ins", "import builtins\nbuiltins.__import__ = builtins.compile = builtins.exec = lambda *a, **k: None\ndef add(a, b): return 0"),
    Hostile("patches modules", "import sys\nsys.modules.clear()\ndef add(a, b): return 0"),
    Hostile("traces", "import sys\nsys.settrace(lambda *a: sys.exit(0))\nsys.setprofile(lambda *a: None)\ndef add(a, b): return 0"),
    Hostile("an audit hook", "import sys, os\nsys.addaudithook(lambda *a: os._exit(0))\ndef add(a, b): return 0"),
    Hostile("a harness of its own", "open('judge', 'wb').write(b'')\nopen('json.py', 'w').write('')\ndef add(a, b): return 0"),
    Hostile("removes its files", "import os\n[os.remove(name) for name in os.listdir('.')]\ndef add(a, b): return 0"),
    Hostile("closes its folder", "import os\nos.chmod('.', 0)\ndef add(a, b): return 0"),
    Hostile("reads the test", "import os\ndef add(a, b): return [open(n, 'rb').read() for n in os.listdir('.')]"),
    Hostile("reads the input again", "import sys\ndef add(a, b): return sys.stdin.read()"),
    Hostile("looks at the box", "import os\ndef add(a, b): return 42 + len(os.listdir('/proc/1'))"),
    Hostile("prints the inputs", "print(open(0).read())", "program"),
    Hostile("prints many guesses", "for n in range(100): print(n)", "program"),
    Hostile("prints it and fails", "print(42)\nraise SystemExit(1)", "program"),
    Hostile("prints it and crashes", "import os\nprint(42, flush=True)\nos.abort()", "program"),
    Hostile("prints it and hangs", "import time\nprint(42, flush=True)\ntime.sleep(99)", "program"),
    Hostile("prints without end", "while True: print(42)", "program"),
    Hostile("prints what is no text", "import os\nos.write(1, bytes(range(256)))", "program"),
    Hostile("asks the callback for more", "def add(g, n): return g({}).__class__.__base__.__subclasses__()", "callback"),
    Hostile("calls the callback with itself", "def add(g, n): return g(g)", "callback"),
    Hostile("looks into the callback", "def add(g, n): return g.__code__.co_consts[1]", "callback"),
    Hostile("hands the callback an object", ALIKE.format(base="") + "def add(g, n): return [g(Alike())]", "callback"),
    Hostile("changes the test's class", "def add(box, n):\n    type(box).__eq__ = lambda s, o: True\n    return box", "object"),
    Hostile("takes what cannot be handed over", "def add(box, n): return box.get", "object"),
    Hostile("takes an iterator apart", "def add(box, n): return box.get().__reduce__()", "object"),
]  # fmt: skip
TALK = [
    Hostile(f"tells the judge {name}", LOADED + code)
    for name, code in [
        ("nothing", "import time; time.sleep(99)"),
        ("half a line", "say(b'[\"value\"'); os._exit(0)"),
        ("an endless line", "while True: say(b'9' * 65536)"),
        ("no JSON", "say(b'passed\\n')"),
        ("an empty list", "say(b'[]\\n')"),
        ("a number", "say(b'42\\n')"),
        ("too deep a list", "say(b'[' * 60000 + b'\\n')"),
        ("too deep a value", "tell('value', eval('[\"list\", [' * 60 + ']]' * 60))"),
        ("no text", "say(b'\\xff\\xfe\\n')"),
        ("a kind it does not know", "tell('value', ['verdict', 'passed'])"),
        ("a value without parts", "tell('value', ['list'])"),
        ("a builtin that runs code", "tell('value', ['builtin', 'exec'])"),
        ("a module that is not there", "tell('value', ['module', 'nowhere'])"),
        ("a value that is none", "tell('value', ['value', ['collections', 'Counter', 5]])"),
        ("a handle within handles", "tell('value', [None, None]); tell('value', ['mine', [1, ['mine', [1, None]]]])"),
        ("what is not its own", "tell('value', ['yours', 99])"),
        ("that an exit was raised", "tell('raised', [['SystemExit'], 'passed'])"),
        ("that an interrupt was raised", "tell('raised', [['KeyboardInterrupt', 'BaseException'], ''])"),
        ("that what it cannot use was raised", "tell('raised', [['Unusable'], 'it hands a StringIO'])"),
        ("to hand over a kind of list", "tell('ask', ['list', ['operator', 'getitem', ['builtin', 'list'], ['builtin', 'int']]])"),
        ("to hand over an iterator", "tell('ask', ['list', ['operator', 'iter', ['value', ['builtins', 'range', ['list', [0, 1, 1]]]]]])"),
        ("to call code", "tell('ask', ['list', ['call', ['builtin', 'eval'], ['tuple', ['exit()']], ['dict', []]]])"),
        ("to make a type", "tell('ask', ['list', ['call', ['builtin', 'type'], ['tuple', [1]], ['dict', []]]])"),
        ("to count without end", "while True: tell('ask', ['list', ['operator', 'len', 'x']]); hear()"),
        ("to look at its frames", "tell('ask', ['list', ['get', ['builtin', 'type'], '__subclasses__']])"),
        ("two results", "tell('value', 1); tell('value', 42); tell('value', 42)"),
        ("that all is over", "peer.writer.close()"),
        ("other names", "tell('value', ['dict', [[1, 2], ['add', 42]]])"),
    ]
]  # fmt: skip
EXCESS = [
    Hostile("a fork bomb", "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"),
    Hostile("threads", "import threading, time\n" + ADD + "[threading.Thread(target=time.sleep, args=(9,)).start() for _ in range(99)]"),
    Hostile("memory", ADD + "return bytearray(1 << 32)"),
    Hostile("memory bit by bit", ADD + "\n    x = []\n    while True: x.append(bytearray(1 << 20))"),
    Hostile("disk", "open('x', 'wb').write(bytes(1 << 24))"),
    Hostile("files", "[open(str(n), 'w') for n in range(999)]"),
    Hostile("deep recursion", "import sys\nsys.setrecursionlimit(10**9)\ndef add(a, b): return add(b, a)"),
    Hostile("a large power", ADD + "return 7 ** 7 ** 9"),
    Hostile("a pattern without end", "import re\n" + ADD + "return re.match('(a+)+$', 'a' * 60 + '!')"),
    Hostile("a result without end", ADD + "return [0] * (1 << 22)"),
    Hostile("a result without end, called", ADD + "return [0] * (1 << 22)", "call"),
    Hostile("a generator without end", "def add(a, b):\n    while True: yield 1", "call"),
    Hostile("sleeps", "import time\n" + ADD + "time.sleep(99)"),
    Hostile("sleeps while it is compared", "import time\nclass N(int):\n    __eq__ = __hash__ = lambda *a: time.sleep(99)\n" + ADD + "return N(1)"),
    Hostile("sleeps as it goes", "import atexit, time\natexit.register(time.sleep, 99)\nprint(41)", "program"),
    Hostile("sleeps, together", "import time\n" + ADD + "time.sleep(99)", "together"),
    Hostile("raises its limits", "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (-1, -1))"),
    Hostile("errors without end", "import os\nwhile True: os.write(2, b'x' * 4096)", "program"),
    Hostile("ignores signals", "import signal\nfor n in range(1, 32):\n    if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\nwhile True: pass"),
]  # fmt: skip
SOURCES = [
    Hostile("no code", "I would rather not say."),
    Hostile("nothing", ""),
    Hostile("white space", " \t\n\x0c\n"),
    Hostile("a syntax error", "def add(a, b:"),
    Hostile("NUL", "def add(a, b): return 0\x00"),
    Hostile("surrogates", "def add(a, b): return '\ud800'"),
    Hostile("control characters", "".join(map(chr, range(32))) * 99),
    Hostile("a mark before it", "\ufeffdef add(a, b): return 0"),
    Hostile("another encoding", "# coding: utf-7\ndef add(a, b): return 0"),
    Hostile("an encoding that is none", "# coding: practicum\ndef add(a, b): return 0"),
    Hostile("parentheses", "(" * 100_000),
    Hostile("nested lists", "x = " + "[" * 5_000 + "]" * 5_000),
    Hostile("a long sum", "x = " + "+".join("1" * 20_000)),
    Hostile("nested blocks", "".join(" " * n + "if 1:\n" for n in range(200))),
    Hostile("long names", "x" * 1_000_000),
    Hostile("digits", "x = " + "9" * 1_000_000),
    Hostile("more than fits", "#" * (5 << 20)),
    Hostile("a block cut off", "```python\nclass add"),
    Hostile("blocks without end", "```python\n" * 20_000),
    Hostile("fences without end", "`" * 200_000),
    Hostile("an empty block", "```python\n```"),
    Hostile("unicode digits", "def add(a, b): return ４１".replace("４１", "\u0664\u0661")),  # noqa: RUF001
]
ALL = [*NAMES, *LIES, *EXITS, *FORGERIES, *TALK, *EXCESS, *SOURCES]


@pytest.fixture(scope="module")
def graded() -> dict[Hostile, Score]:
    """All at once: most of them wait."""

    def grade(hostile: Hostile) -> Score:
        together = {"tests": "together"} if hostile.tests == "together" else {}
        grader = Code(limits=LIMITS, total_s=1, tolerance=0.01 if hostile.tests == "near" else 0, **together)
        return grader.grade(samples_of(hostile.code, truth=TRUTHS[hostile.tests])[0])

    before = set(psutil.Process().children(recursive=True))
    with ThreadPoolExecutor(4) as pool:
        scores = dict(zip(ALL, pool.map(grade, ALL), strict=True))
    assert set(psutil.Process().children(recursive=True)) <= before
    return scores


def test_there_are_many() -> None:
    assert len(set(ALL)) == len(ALL) >= 120


@pytest.mark.parametrize("tests", TRUTHS)
def test_an_honest_answer_passes(tests: str) -> None:
    honest = {
        "program": "print(sum(map(int, input().split())))",
        "callback": "def add(g, n): return g('key')",
        "object": "def add(box, n): return list(box.get())",
        "loop": "def add(a, b): return [a, b]",
    }
    code = honest.get(tests, "def add(a, b): return a + b")
    grader = Code(tests="together" if tests == "together" else "apart")
    assert grader.grade(samples_of(code, truth=TRUTHS[tests])[0]).value == 1.0


@pytest.mark.parametrize("hostile", ALL, ids=lambda hostile: f"{hostile.name}, {hostile.tests}")
def test_it_is_a_zero(hostile: Hostile, graded: dict[Hostile, Score]) -> None:
    score = graded[hostile]
    assert (score.status, score.value) == ("ok", 0.0), score
