from __future__ import annotations

import dataclasses
import json
import pickle
import time
from typing import Any

import pytest

from practicum.errors import RewardError
from practicum.reward.graders.code import Code, last_block
from practicum.reward.sandbox import Limits, isolation_problem
from practicum.types import Prompt, Sample, Score
from tests.samples import make_sample

isolated = pytest.mark.skipif(isolation_problem() is not None, reason=f"no isolation here: {isolation_problem()}")

ASSERTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add('a', 'b') == 'ab'"]
RIGHT = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
SUMS: dict[str, Any] = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
CALLS: dict[str, Any] = {"inputs": [[1, 2], "3\n4"], "outputs": [3, [7]], "fn_name": "add"}


def sample_of(text: str, truth: Any) -> Sample:
    sample = make_sample(text=text)
    return dataclasses.replace(sample, prompt=dataclasses.replace(sample.prompt, answer=truth))


def grade(text: str, truth: Any, **options: Any) -> Score:
    return Code(**options).grade(sample_of(text, truth))


@isolated
@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [
        (RIGHT, ASSERTS, 1.0),
        (RIGHT, json.dumps(ASSERTS), 1.0),
        (RIGHT, "\n".join(ASSERTS), 1.0),
        (RIGHT, {"tests": ASSERTS}, 1.0),
        ("def sum(a, b): return a + b", {"tests": ["assert sum(1, 2) == 3"], "entry_points": ["sum"]}, 1.0),
        ("def add(a, b): return 3", ASSERTS, 1 / 3),
        ("def add(a, b):\n    while a: pass\n    return a + b", ASSERTS, 1 / 3),
        ("no code at all", ASSERTS, 0.0),
        ("a, b = map(int, input().split())\nprint(a + b, '')", SUMS, 1.0),
        ("print(3)", SUMS, 0.5),
        ("import os\nos.kill(os.getpid(), 11)", SUMS, 0.0),
        ("x = [0] * 10**9\nprint(3)", SUMS, 0.0),
        (RIGHT, CALLS, 1.0),
        ("class Solution:\n    def add(self, a, b): return a + b", CALLS, 1.0),
        ("def add(a, b): return 7", CALLS, 0.5),
    ],
)
def test_the_score_is_the_share_of_tests_that_pass(text: str, truth: Any, value: float) -> None:
    score = grade(text, truth, limits={"wall_s": 2, "cpu_s": 1})
    assert score.status == "ok" and score.value == pytest.approx(value), score
    assert score.parts["passed"] == pytest.approx(value * score.parts["total"])


@isolated
def test_all_or_nothing_stops_at_the_first_failure() -> None:
    began = time.monotonic()
    slow = {"inputs": ["1"] * 50, "outputs": ["1"] * 50}
    score = grade("import time\ntime.sleep(60)", slow, score="all", limits={"wall_s": 2})
    assert score.value == 0.0 and time.monotonic() - began < 30
    assert grade(RIGHT, ASSERTS, score="all").value == 1.0
    assert grade("def add(a, b): return 3", ASSERTS, score="all").value == 0.0


@isolated
def test_all_tests_together_have_a_time_limit() -> None:
    began = time.monotonic()
    slow = {"inputs": ["1"] * 50, "outputs": ["1"] * 50}
    score = grade("import time\ntime.sleep(60)", slow, limits={"wall_s": 2}, total_s=1)
    assert score.value == 0.0 and score.parts["total"] == 50 and time.monotonic() - began < 30


@isolated
def test_numbers_may_be_near() -> None:
    truth = {"inputs": [""], "outputs": ["x 0.333333"]}
    assert grade("print('x', 1 / 3)", truth).value == 0.0
    assert grade("print('x', 1 / 3)", truth, tolerance=1e-5).value == 1.0
    assert grade("print('y', 1 / 3)", truth, tolerance=1e-5).value == 0.0
    call = {"inputs": [[]], "outputs": [[0.1, {"k": 0.2}]], "fn_name": "f"}
    assert grade("def f(): return [0.1000001, {'k': 0.2}]", call).value == 0.0
    assert grade("def f(): return [0.1000001, {'k': 0.2}]", call, tolerance=1e-5).value == 1.0


@isolated
def test_packages_can_be_let_in() -> None:
    text = "import numpy\nprint(numpy.arange(4).sum())"
    truth = {"inputs": [""], "outputs": ["6"]}
    assert grade(text, truth).value == 0.0
    assert grade(text, truth, packages=True).value == 1.0


FAKES = [
    "import os; print('3'); os._exit(0)",
    "import os\nfor root, _, names in os.walk('/box'):\n    for name in names: print(open(f'{root}/{name}').read())",
    "import sys\nfor module in list(sys.modules.values()): print(getattr(module, 'expected', ''))",
    "class A(str):\n    def __eq__(self, other): return True\nprint(A('7'))",
]


@isolated
@pytest.mark.parametrize("text", FAKES)
def test_expected_outputs_are_not_there_to_be_found(text: str) -> None:
    value = grade(text, {"inputs": ["", ""], "outputs": ["expected-one", "expected-two"]}).value
    assert value == 0.0


@isolated
@pytest.mark.parametrize(
    "text",
    [
        "import os; os.write(1, b'3'); os._exit(1)",
        "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
        "import json\njson.dumps = lambda *a, **k: '3 or 7'\ndef add(a, b): return 0",
        "import sys\ndef add(a, b): return sys._getframe(1).f_locals.get('expected', 0)",
    ],
)
def test_results_of_functions_are_compared_outside(text: str) -> None:
    assert grade(text, {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}).value == 0.0


def test_a_block_that_says_it_is_python_is_taken_before_one_that_shows_output() -> None:
    assert last_block("```python\ncode\n```\nOutput:\n```\n3\n```") == "code\n"


def test_last_block() -> None:
    assert last_block("x\n```\na = 1\n```\ny\n```\nb = 2\n```\nz") == "b = 2\n"
    assert last_block("```py\ncut off = 1") == "cut off = 1"
    assert last_block("no block") == "no block"


@isolated
def test_the_whole_text_can_be_taken() -> None:
    text = "x = '''\n```python\nprint(1)\n```\n'''\nprint(2)"
    assert grade(text, {"inputs": [""], "outputs": ["1"]}).value == 1.0
    assert grade(text, {"inputs": [""], "outputs": ["2"]}, take="text").value == 1.0


BAD = [
    (None, "not nothing"),
    (5, "not int 5"),
    ([], "not an empty list"),
    ({}, "a dict with nothing"),
    ({"answer": 1}, "a dict with answer"),
    (["assert f("], "test 0 is no Python"),
    ("126", "test 0 asserts and calls nothing, so that any answer would pass: '126'"),
    (["assert f()", "# none"], "test 1 asserts and calls nothing"),
    ({"tests": ["assert f()"], "entry_points": "f"}, "entry_points must be a list"),
    ({"inputs": ["1"]}, "inputs and outputs must be lists of the same length"),
    ({"inputs": ["1"], "outputs": []}, "inputs and outputs must be lists of the same length"),
    ({"inputs": [], "outputs": []}, "at least one test"),
    ({"inputs": [[1, 2]], "outputs": ["3"]}, r"inputs\[0\] must be text"),
    ({"inputs": ["1"], "outputs": [3]}, r"outputs\[0\] must be text"),
    ({"inputs": ["x y"], "outputs": [3], "fn_name": "f"}, r"inputs\[0\] must be a list of arguments"),
    ({"inputs": [[1]], "outputs": [3], "fn_name": "a b"}, "fn_name must be the name"),
]


@pytest.mark.parametrize(("truth", "why"), BAD, ids=str)
def test_a_ground_truth_that_cannot_be_used_is_refused(truth: Any, why: str) -> None:
    prompt = Prompt("p", text="?", answer=truth)
    with pytest.raises(ValueError, match=why):
        Code().check(prompt)
    score = grade(RIGHT, truth)
    assert score.status == "invalid" and score.value is None and "prompt-0" in score.reason


UNUSABLE = [
    ("import io\nassert f(io.StringIO('x')) == 1", "hands a StringIO to the answer"),
    ("from threading import Thread\nt = Thread()\nassert f([t]) == 1", "hands a Thread to the answer"),
    ("assert f(object())", "hands a object to the answer"),
    ("class R(P): pass\nassert R().f() == 1", "subclasses P"),
    ("from solution import P\nclass R(P): pass\nassert R().f() == 1", "subclasses P"),
    ("try:\n    f()\n    assert 0\nexcept (KeyError, Mine):\n    pass", "catches Mine"),
    ("import unittest\nunittest.TestCase().assertRaises(Mine, f)", "catches Mine"),
    ("import asyncio\nassert asyncio.run(f(1)) == 2", "runs f in an event loop"),
    ("async def g(): assert await f(1) == 2\nimport asyncio\nasyncio.run(g())", "awaits"),
    ("with C() as x: assert x == 3", "enters C"),
    ("match f():\n    case P(x=1): pass\n    case _: assert 0", "matches P"),
    ("assert issubclass(P, Q)", "asks for the bases of P"),
    ("x = f()\nassert type(x) is P", "compares a type with P"),
    ("assert f.__name__ == 'f'", "asks for f.__name__"),
    ("import inspect\nassert len(inspect.signature(f).parameters) == 1", "inspects f"),
]


@pytest.mark.parametrize(("test", "why"), UNUSABLE, ids=[why for _, why in UNUSABLE])
def test_a_test_that_cannot_be_run_apart_is_refused_whatever_the_answer(test: str, why: str) -> None:
    prompt = Prompt("p", text="?", answer=[test])
    with pytest.raises(ValueError, match=f"test 0 {why}, which cannot.*tests: together"):
        Code().check(prompt)
    Code(tests="together").check(prompt)
    for text in (RIGHT, "", "class f: pass"):
        score = grade(text, [test])
        assert score.status == "invalid" and why in score.reason


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("import pytest\nassert f() == 1", "imports pytest, which is not there"),
        ("from main import f\nassert f() == 1", "imports main, which is not there"),
        ("def test_f(tmp_path): assert f() == 1", r"has test_f\(tmp_path\), which is called without arguments"),
        ("def check(candidate): assert candidate() == 1", "asserts only in functions or classes that nothing calls"),
        ("class TestF:\n    def test_f(self): assert f() == 1", "asserts only in functions or classes"),
    ],
)
def test_a_test_that_no_answer_or_any_answer_passes_is_refused(test: str, why: str) -> None:
    for tests in ("apart", "together"):
        with pytest.raises(ValueError, match=f"test 0 {why}"):
            Code(tests=tests).check(Prompt("p", text="?", answer=[test]))


@pytest.mark.parametrize(
    "test",
    [
        "def check(candidate):\n    assert candidate(1) == 1\ncheck(f)",
        "from solution import f\ndef test_f(n=1): assert f(n) == 1",
        "try:\n    import pytest\nexcept ImportError: pass\nassert f() == 1",
        "from fractions import Fraction\nfrom collections import deque\nassert f(Fraction(1, 2), deque([1]), range(3))",
        "class Node:\n    pass\nassert f(Node(), lambda x: x) == 1",
        "try:\n    f()\nexcept ValueError: pass\nelse: assert 0",
        "assert P(1) == P(1) and isinstance(P(1), P) and sorted([P(2), P(1)])",
        "with open('x', 'w') as file: assert f() == 1",
        "assert type(f(1)) is list and type(f(2)) == type(f(3)) and f(4).__class__",
    ],
)
def test_usual_tests_are_usable(test: str) -> None:
    Code().check(Prompt("p", text="?", answer=[test]))


def test_packages_of_the_tests_are_there_where_they_are_let_in() -> None:
    prompt = Prompt("p", text="?", answer=["import numpy as np\nassert np.sum(f()) == 1"])
    Code(packages=True).check(prompt)
    with pytest.raises(ValueError, match="imports numpy, which is not there in the sandbox \\(see the option packages"):
        Code().check(prompt)


@isolated
@pytest.mark.parametrize(
    "text",
    [
        "class add: pass",
        "class add: pass\nraise SystemExit",
        "class add: pass\nwhile True: pass",
        "async def add(a, b): return 3",
        "class sorted: pass\ndef add(a, b): return 4",
        "class add(int): pass\n" + "(" * 3000,
        "x" * (17 << 20),
    ],
    ids=lambda text: text[:40],
)
def test_a_wrong_answer_cannot_choose_to_be_left_out(text: str) -> None:
    score = grade(text, ["assert add(1, 2) == 3"], limits={"wall_s": 1, "cpu_s": 1})
    assert score == Score(0.0, {"passed": 0.0, "total": 1.0})


@isolated
def test_what_an_answer_makes_a_test_hand_over_is_its_own_doing() -> None:
    text = "def f(g): return g({}, 1)"  # a dict's items cannot cross, and no test means to pass them
    score = grade(text, ["assert f(lambda x, y: getattr(x, 'items', lambda: 3)()) == 3"])
    assert score.value == 0.0


@isolated
def test_numbers_too_large_for_a_comparison_are_wrong() -> None:
    truth = {"inputs": [[]], "outputs": [1.5], "fn_name": "f"}
    assert grade("def f(): return 10**400", truth, tolerance=0.1).value == 0.0


def test_without_isolation_it_says_so_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("practicum.reward.sandbox.box.isolation_problem", lambda: "no namespaces")
    with pytest.raises(RewardError, match="no namespaces"):
        Code().prepare()
    assert grade(RIGHT, ASSERTS).status == "infra_error"
    assert grade(RIGHT, CALLS, trusted=True).value == 1.0


def test_it_can_travel_to_a_worker_after_use() -> None:
    grader = Code(trusted=True, limits=Limits(wall_s=5))
    grader.prepare()
    again = pickle.loads(pickle.dumps(grader))
    assert again.limits.wall_s == 5 and again.grade(sample_of(RIGHT, CALLS)).value == 1.0


def test_good_ground_truths_are_accepted() -> None:
    for truth in (ASSERTS, "assert True", SUMS, CALLS, json.dumps(SUMS), {"inputs": [["1", "2"]], "outputs": ["3"]}):
        Code().check(Prompt("p", text="?", answer=truth))


@isolated
@pytest.mark.parametrize(
    ("text", "test"),
    [
        (
            "class Mine(Exception): pass\ndef f(): raise Mine('x')",
            "try:\n    f()\n    assert 0\nexcept Mine:\n    pass",
        ),
        ("class P:\n    def f(self): return 1", "class R(P): pass\nassert R().f() == 1"),
        ("async def f(x): return x + 1", "import asyncio\nassert asyncio.run(f(1)) == 2"),
        (
            "class C:\n    def __enter__(self): return 3\n    def __exit__(self, *e): pass",
            "with C() as x:\n    pass\nassert x == 3",
        ),
    ],
)
def test_what_cannot_cross_over_can_be_run_together(text: str, test: str) -> None:
    assert grade(text, [test], tests="together").value == 1.0
    broken = text.replace("return", "raise ValueError or").replace("Mine('x')", "KeyError")
    assert grade(broken, [test], tests="together").value == 0.0


@isolated
def test_a_wrong_object_that_is_only_asked_for_something_is_a_zero() -> None:
    wrong = "class Solution:\n    def add(self, a, b): return a - b"
    assert grade(wrong, ["assert Solution().add(1, 2) == 3", "s = Solution()\nassert s.add(1, 1) == 2"]).value == 0.0


@isolated
@pytest.mark.parametrize(
    "text",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "print('passed')\nraise SystemExit",
        "import os\nos.write(1, b'passed')\nos._exit(0)",
    ],
)
def test_together_too_leaving_early_proves_nothing(text: str) -> None:
    assert grade(text, ["assert add(1, 2) == 3"], tests="together").value == 0.0


@isolated
def test_an_answer_cannot_say_what_pythons_own_names_mean_to_a_test() -> None:
    text = """
import sys
def zero(*a): return 0
frame = sys._getframe(1)
while frame and 'peer' not in frame.f_locals:
    frame = frame.f_back
peer = frame.f_locals['peer']
act = type(peer).act
def patched(self, what, *rest):
    if what == 'names':
        return {'area': zero, '__builtins__': {'abs': zero}, 'abs': zero}
    return act(self, what, *rest)
type(peer).act = patched
def area(r): return 0
"""
    assert grade(text, ["assert abs(area(2) - 12.566) < 1e-2"]).value == 0.0
