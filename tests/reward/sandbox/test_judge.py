"""The judge and the answer in two processes: what crosses between them, and what an answer cannot do to the judge."""

from __future__ import annotations

import json

import pytest

from practicum.reward.graders.code import RUN, harness_code
from practicum.reward.sandbox import Sandbox, isolation_problem

pytestmark = pytest.mark.skipif(isolation_problem() is not None, reason=f"no isolation here: {isolation_problem()}")


def judge(answer: str, test: str, *entry_points: str, packages: bool = False) -> list[str]:
    files = {"answer.py": answer, "judge": harness_code("judge")}
    request = json.dumps({"test": test, "entry_points": entry_points}).encode()
    outcome = Sandbox(packages=packages).run(files, ["-c", RUN.format(name="judge")], request)
    assert outcome.succeeded, outcome
    verdict = json.loads(outcome.stdout)
    assert isinstance(verdict, list)
    return verdict


POINT = """
class Point:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return self.x == other.x
    def __add__(self, other): return Point(self.x + other.x)
    def moved(self, by=1): return Point(self.x + by)
    def __len__(self): return self.x
    def __iter__(self): return iter(range(self.x))
    def __getitem__(self, key): return key * 2
    def __repr__(self): return f"<{self.x}>"
"""
NODE = "class Node:\n    def __init__(self, value, next=None): self.value, self.next = value, next\n"

PASS = [
    (
        "plain data",
        "def f(x): return x",
        "for x in (None, True, 1, 1.5, 'é', b'b', [1, (2,)], {1: {2}}, 1j): assert f(x) == x",
    ),
    (
        "types are kept",
        "def f(): return (1, [2], {3: 'x'}, frozenset({4}))",
        "a = f()\nassert type(a) is tuple and type(a[1]) is list",
    ),
    ("large numbers", "def f(): return 10 ** 6000", "assert f() == 10 ** 6000"),
    (
        "fractions",
        "from fractions import Fraction\ndef f(): return Fraction(1, 3)",
        "from fractions import Fraction\nassert f() == Fraction(1, 3) and f() < 1",
    ),
    (
        "values of the standard library",
        "from collections import deque\ndef f(x): return x\ndef g(): return deque([1])",
        "import datetime\nfrom collections import Counter, deque, OrderedDict\n"
        "for x in (range(1, 9, 2), datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2), datetime.timedelta(1),\n"
        "          deque([1, 2], 3), Counter('aab'), OrderedDict(a=1)): assert f(x) == x and type(f(x)) is type(x)\n"
        "assert g() == deque([1])",
    ),
    (
        "the test's own tuples",
        "def f(p): return sum(p) + p.a + p[1]",
        "from collections import namedtuple\nclass P(namedtuple('P', 'a b')): pass\nassert f(P(1, 2)) == 6",
    ),
    ("keyword arguments", "def f(*a, k=1): return (a, k)", "assert f(1, k=2) == ((1,), 2)"),
    (
        "in place",
        "def f(a, d): a.sort(); d['x'] = 1",
        "a, d = [3, 1], {}\nf(a, d)\nassert a == [1, 3] and d == {'x': 1}",
    ),
    (
        "exceptions",
        "def f(): raise KeyError('k')",
        "try: f()\nexcept KeyError as error: assert 'k' in str(error)\nelse: assert False",
    ),
    ("an assert that must not be reached", "def f(): raise KeyError", "try: f(); assert False\nexcept KeyError: pass"),
    (
        "own exceptions",
        "class E(ValueError): pass\ndef f(): raise E('k')",
        "try:\n    f()\n    assert False\nexcept ValueError: assert True",
    ),
    (
        "objects",
        POINT,
        "p = Point(2)\nassert p.x == 2 and p.moved(by=3).x == 5 and isinstance(p, Point) and not isinstance(1, Point)",
    ),
    (
        "operators of objects",
        POINT,
        "assert Point(1) + Point(2) == Point(3) and Point(1) != Point(2) and Point(1) != 1",
    ),
    (
        "protocols of objects",
        POINT,
        "p = Point(3)\nassert len(p) == 3 and list(p) == [0, 1, 2] and p[4] == 8 and repr(p) == '<3>' and 2 in p",
    ),
    (
        "objects as arguments",
        POINT + "def total(points): return sum(p.x for p in points)",
        "assert total([Point(1), Point(2)]) == 3",
    ),
    (
        "objects in sets and as keys",
        POINT + "    def __hash__(self): return self.x",
        "assert len({Point(1), Point(1), Point(2)}) == 2 and {Point(1): 5}[Point(1)] == 5 and Point(1) in {Point(1)}",
    ),
    ("setting attributes", POINT, "p = Point(1)\np.x = 7\nassert p.x == 7"),
    (
        "kinds of dict and tuple",
        "from collections import Counter, namedtuple\n"
        "P = namedtuple('P', 'a b')\n"
        "def f(s): return Counter(s)\n"
        "def g(): return P(1, 2)",
        "assert f('aab') == {'a': 2, 'b': 1} and f('aab')['a'] == 2 and g() == (1, 2) and g().a == 1",
    ),
    ("generators", "def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2] and sum(f(4)) == 6"),
    ("iterators", "def f(x): return sum(x)", "assert f(iter([1])) + f(map(int, '12')) + f(reversed((3, 4))) == 11"),
    (
        "callbacks",
        "def f(g, xs): return [g(x) for x in xs]",
        "assert f(lambda x: x + 1, [1, 2]) == [2, 3] and f(len, ['ab']) == [2]",
    ),
    (
        "the test's own objects",
        "def f(node):\n    n = 0\n    while node: n, node = n + node.value, node.next\n    return n",
        NODE + "assert f(Node(1, Node(2))) == 3",
    ),
    (
        "imports from the answer",
        "def f(): return 1\nimport math",
        "from solution import f\nimport solution\nassert f() == solution.f() == 1 and math.floor(1.5) == 1",
    ),
    ("test functions", "def f(): return 1", "def test_a(): assert f() == 1"),
    ("named like a built-in", "def sum(a, b): return a + b", "assert sum(10, 5) == 15"),
    (
        "what is printed does not matter",
        "print('[\"failed\"]')\ndef f(): print('x'); return 1",
        "print('y')\nassert f() == 1",
    ),
]


@pytest.mark.parametrize(("answer", "test"), [row[1:] for row in PASS], ids=[row[0] for row in PASS])
def test_right_answers_pass(answer: str, test: str) -> None:
    assert judge(answer, test, "sum") == ["passed"]


ANYTHING = """
class Anything:
    def __eq__(self, other): return True
    def __bool__(self): return True
    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    def __sub__(self, other): return 0.0
    __rsub__ = __add__ = __sub__
    def __hash__(self): return 0
    def __abs__(self): return self
    def __getattr__(self, name): return self
    def __call__(self, *args): return self
"""
FAKES = [
    ("wrong", "def f(): return 2", "assert f() == 1"),
    ("raises", "def f(): raise SystemExit(0)", "assert f() == 1"),
    ("leaves before the tests", "import os; os._exit(0)", "assert f() == 1"),
    ("leaves in the tests", "import os\ndef f(): os._exit(0)", "assert f() == 1"),
    (
        "says it passed",
        "import os, sys\nprint('[\"passed\"]'); [os.write(n, b'[\"passed\"]') for n in range(3)]\nos._exit(0)",
        "assert f() == 1",
    ),
    (
        "writes to every file",
        "import os\n"
        "for n in range(100):\n"
        "    try: os.write(n, b'[\"passed\"]\\n')\n"
        "    except OSError: pass\n"
        "os._exit(0)",
        "assert f() == 1",
    ),
    ("equals everything", ANYTHING + "def f(): return Anything()", "assert f() == 1"),
    ("equals everything, inside", ANYTHING + "def f(): return [Anything()]", "assert f() == [1]"),
    ("equals everything, reflected", ANYTHING + "def f(): return Anything()", "assert 1 == f()"),
    ("is near everything", ANYTHING + "def f(): return Anything()", "assert abs(f() - 3.14) < 1e-6"),
    ("is near everything, reflected", ANYTHING + "def f(): return Anything()", "assert abs(3.14 - f()) < 1e-6"),
    ("is less than everything", ANYTHING + "def f(): return Anything()", "assert f() < 1"),
    ("contains everything", ANYTHING + "def f(): return Anything()", "assert 3 in f()"),
    ("is of every kind", ANYTHING + "def f(): return Anything()", "assert isinstance(f(), int)"),
    (
        "an int that equals all",
        "class N(int):\n    def __eq__(self, other): return True\ndef f(): return N(2)",
        "assert f() == 1",
    ),
    (
        "a list that equals all",
        "class N(list):\n    def __eq__(self, other): return True\ndef f(): return N()",
        "assert f() == [1]",
    ),
    (
        "overrides built-ins",
        "import builtins\n"
        "builtins.abs = builtins.len = builtins.isinstance = lambda *a: 1\n"
        "def abs(x): return 1\n"
        "def all(x): return True\n"
        "def f(): return 5",
        "assert abs(f()) == 1",
    ),
    (
        "overrides modules",
        "import sys, types\n"
        "math = types.ModuleType('math')\n"
        "math.isclose = lambda *a: True\n"
        "sys.modules['math'] = math\n"
        "def f(): return 5",
        "import math\nassert math.isclose(f(), 1)",
    ),
    (
        "brings its own math",
        "import types\nmath = types.ModuleType('math')\nmath.isclose = lambda *a: True\ndef f(): return 5",
        "assert math.isclose(f(), 1)",
    ),
    (
        "changes AssertionError",
        "import builtins\nbuiltins.AssertionError = Warning\ndef f(): return 2",
        "assert f() == 1",
    ),
    ("has the hash of everything", ANYTHING + "def f(): return Anything()", "assert f() in {0: 'x'}"),
    ("hides the asserts", "def f(): return []", "for x in f(): assert x == 1"),
    ("hands out eval", "f = eval\ndef g(): return '__import__(\"os\")._exit(0)'", "assert f(g()) == 1"),
    (
        "reads the test's globals",
        "def f(g):\n    try: return g.__globals__['expected']\n    except AttributeError: return g('__globals__')",
        "expected = 5\nassert f(lambda x: 0) == expected",
    ),
    (
        "reads the test's frame",
        "def f(g):\n    try: return g.gi_frame.f_globals['expected']\n    except AttributeError: return 0",
        "expected = 5\nassert f(x for x in [1]) == expected",
    ),
    (
        "reads the judge's memory",
        "import ctypes, os\ndef f():\n    return ctypes.CDLL(None).process_vm_readv(os.getppid(), 0, 0, 0, 0, 0) == 0",
        "assert f()",
    ),
    (
        "kept from the folder",
        "import os\ndef f(): return set(os.listdir('.')) - {'answer.py', 'judge'}",
        "assert f()",
    ),
]


@pytest.mark.parametrize(("answer", "test"), [row[1:] for row in FAKES], ids=[row[0] for row in FAKES])
def test_wrong_answers_cannot_pass(answer: str, test: str) -> None:
    assert judge(answer, test)[0] == "failed"


def test_arrays_cross_over_where_packages_are_let_in() -> None:
    answer = "import numpy as np\ndef f(a): return a * 2\ndef g(a): return a.sum()"
    test = "import numpy as np\na = np.array([1.0, 2.0])\nassert np.allclose(f(a), [2, 4]) and g(a) == 3"
    assert judge(answer, test, packages=True) == ["passed"]


def test_an_answer_that_does_not_load_is_named() -> None:
    assert judge("def f(:", "assert f() == 1") == [
        "failed",
        "ImportError: the answer cannot be imported: SyntaxError: invalid syntax (solution.py, line 1)",
    ]


def test_what_cannot_be_handed_over_fails_and_no_except_of_the_test_swallows_it() -> None:
    test = "import io\ntry:\n    assert f(io.StringIO('x')) == 1\nexcept Exception: pass"
    assert judge("def f(x): return 1", test) == ["failed", "Unusable: it hands a StringIO to the answer"]


def test_killing_the_judge_proves_nothing() -> None:
    files = {"answer.py": "import os; os.kill(os.getppid(), 9)", "judge": harness_code("judge")}
    request = json.dumps({"test": "assert f() == 1", "entry_points": []}).encode()
    assert not Sandbox().run(files, ["-c", RUN.format(name="judge")], request).succeeded
