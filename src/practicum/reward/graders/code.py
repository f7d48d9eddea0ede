"""Code: runs the answer's program against tests, in a sandbox.

The ground truth of a prompt is one of

    ["assert add(1, 2) == 3", ...]                         tests, each run by itself; or one block of test code
    {"tests": ..., "entry_points": ["sum"]}                the same, for functions named like one of Python's own
    {"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}     a program that reads standard input
    {"inputs": [[1, 2], ...], "outputs": [3, ...], "fn_name": "add"}   a function, or a method of `Solution`

as lists and dicts or as the JSON text of them. In a block of test code, functions called `test_...` are run.

Code that does not compile, crashes, hangs or meets a limit has failed that test: that is the answer's own doing. A
sandbox that cannot be started is `infra_error`, a ground truth that cannot be used is `invalid`. Whether it can be used
is decided from the ground truth alone, before the run and again here, so that no answer chooses to be left out.

An answer cannot fake success. Expected outputs of programs and functions never enter the sandbox; they are compared
outside. Tests of asserts run in another process than the answer, which sees neither the tests nor the verdict, so
exiting early, printing "passed", patching built-ins or returning objects that equal everything do not help. The price:
only plain data and handles cross over. An object of the answer's own class can be called, iterated, indexed and asked
for attributes, and compared with another of its objects; compared, ordered, added or searched (`in`) against plain data
it counts as different, unless it is a kind of list, dict, number or string. A test that subclasses or catches the
answer's classes, or does what else cannot cross over, is refused (code_tests.py). Not defended: a test that itself asks
the answer for the verdict (`assert is_correct(3)`), answers that tell the tests by the arguments they get, and bugs of
the interpreter.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import math
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from practicum.errors import RewardError
from practicum.reward.graders.base import IsolatedGrader
from practicum.reward.graders.code_tests import problem_of
from practicum.reward.sandbox import Limits, Outcome, Sandbox
from practicum.reward.sandbox import box as sandbox_box
from practicum.types import Prompt, Sample, Score

FENCE = re.compile(r"^[ \t]*```([^\n`]*)\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
RUN = "import marshal; exec(marshal.load(open({name!r}, 'rb')), globals()); main()"


@dataclass(frozen=True, slots=True)
class Tests:
    """How to run the tests of a prompt: one run for each input, and what its outcome says."""

    stdins: list[bytes]
    harness: str | None  # None: the answer is a program of its own
    passed: Callable[[int, Outcome], bool]


class Code(IsolatedGrader):
    """The share of tests that the answer's program passes, each run in a sandbox.

    The ground truth is a list of asserts, a block of test code, or inputs with expected outputs. Logs as parts how many
    tests `passed` and their `total`.
    """

    score: Literal["share", "all"] = "share"
    """share: the part of the tests that pass. all: 1 if every test passes, else 0; stops at the first that fails."""
    tests: Literal["apart", "together"] = "apart"
    """apart: asserts run in another process than the answer, which cannot fake success; a test that subclasses or
    catches classes of the answer, awaits its coroutines, or else handles what cannot cross over is refused. together:
    in one process, as test code is usually run; an answer that sets out to can fake success."""
    take: Literal["last_block", "text"] = "last_block"
    """last_block: the last ``` block of the answer that says it is Python, or else the last one, or else all of it.
    text: always all of it."""
    tolerance: float = Field(default=0.0, ge=0)
    """Numbers in outputs and results may differ from the expected ones by this, relative or absolute."""
    total_s: float = Field(default=5.0, gt=0)
    """Seconds for all tests of an answer; those not begun by then have failed."""
    limits: Limits = Limits()
    """Limits of each test."""
    packages: bool = False
    """Lets answers import the packages installed here (NumPy and so on), read-only."""
    trusted: bool = False
    """Runs answers WITHOUT isolation where the machine offers none. Only for code you would run yourself."""

    def check(self, prompt: Prompt) -> None:
        read_tests(prompt.answer, self.tolerance, self.tests, self.packages)

    def longest_s(self) -> float:
        return self.total_s + self.limits.wall_s

    def prepare(self) -> None:
        _ = self.sandbox

    @cached_property
    def sandbox(self) -> Sandbox:
        return Sandbox(self.limits, packages=self.packages, trusted=self.trusted)

    def grade(self, sample: Sample) -> Score:
        try:
            tests = read_tests(sample.prompt.answer, self.tolerance, self.tests, self.packages)
        except ValueError as error:
            return Score.failed("invalid", f"prompt {sample.prompt.id}: {error}")
        source = sample.text if self.take == "text" else last_block(sample.text)
        try:
            passed = sum(self.results(source, tests))
        except RewardError as error:
            return Score.failed("infra_error", str(error))
        total = len(tests.stdins)
        value = passed / total if self.score == "share" else float(passed == total)
        return Score(value, parts={"passed": float(passed), "total": float(total)})

    def results(self, source: str, tests: Tests) -> Iterator[bool]:
        """Yield whether each test passed, up to the first that did not where that settles the score."""
        program = source.encode(errors="replace")
        if len(program) > self.limits.disk_mb << 19:  # it would not fit beside the harness
            return
        files: dict[str, str | bytes] = {"answer.py": program}
        argv = ["answer.py"]
        if tests.harness is not None:
            files[tests.harness] = harness_code(tests.harness)
            argv = ["-c", RUN.format(name=tests.harness)]
        deadline = time.monotonic() + self.total_s
        with contextlib.closing(self.sandbox.run_each(files, argv, tests.stdins)) as outcomes:
            for index, outcome in enumerate(outcomes):
                passed = tests.passed(index, outcome)
                yield passed
                if (self.score == "all" and not passed) or time.monotonic() >= deadline:
                    return


@cache
def harness_code(name: str) -> bytes:
    path = Path(sandbox_box.__file__).with_name(f"{name}.py")
    return marshal.dumps(compile(path.read_text(), path.name, "exec"))


def last_block(text: str) -> str:
    """Return the last fenced block, of those that say they are Python if any do; one left open reaches to the end."""
    blocks: list[tuple[str, str]] = FENCE.findall(text)
    marked = [code for language, code in blocks if language.strip().lower() in ("python", "py", "python3")]
    return marked[-1] if marked else blocks[-1][1] if blocks else text


def read_tests(
    truth: Any, tolerance: float, tests: Literal["apart", "together"] = "apart", packages: bool = False
) -> Tests:
    """Read the tests. Raises ValueError, in words for the author of the data, for a ground truth of no known form."""
    if isinstance(truth, str) and truth.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(json.JSONDecodeError):
            truth = json.loads(truth)
    if isinstance(truth, dict) and "inputs" in truth:
        return read_cases(truth, tolerance)
    entry_points: Any = []
    if isinstance(truth, dict) and "tests" in truth:
        truth, entry_points = truth["tests"], truth.get("entry_points", [])
        if not isinstance(entry_points, list) or not all(isinstance(name, str) for name in entry_points):
            raise ValueError("entry_points must be a list of names")
    blocks = [truth] if isinstance(truth, str) else truth
    if not isinstance(blocks, list) or not blocks or not all(isinstance(block, str) for block in blocks):
        raise ValueError(
            "the ground truth of a code prompt must be test code, a list of asserts, or a dict with inputs and outputs"
            f" (and fn_name), not {describe(truth)}"
        )
    for index, block in enumerate(blocks):
        problem = problem_of(block, tests == "apart", frozenset(entry_points), packages)
        if problem is not None:
            raise ValueError(f"test {index} {problem}")
    if tests == "together":
        proof = secrets.token_hex()
        stdins = [json.dumps({"test": block, "proof": proof}).encode() for block in blocks]
        return Tests(stdins, "together", lambda index, outcome: outcome.stdout == proof.encode())
    requests = [{"test": block, "entry_points": entry_points} for block in blocks]
    return Tests([json.dumps(request).encode() for request in requests], "judge", judged)


def describe(truth: Any) -> str:
    if isinstance(truth, dict):
        return f"a dict with {', '.join(map(str, truth)) or 'nothing'}"
    return "an empty list" if truth == [] else "nothing" if truth is None else f"{type(truth).__name__} {truth!r:.80}"


def judged(index: int, outcome: Outcome) -> bool:
    return outcome.succeeded and outcome.stdout == b'["passed"]'


def read_cases(truth: dict[str, Any], tolerance: float) -> Tests:
    inputs, outputs, name = truth["inputs"], truth.get("outputs"), truth.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise ValueError("inputs and outputs must be lists of the same length, with at least one test")
    if name is None:
        stdins = [as_text("inputs", index, item).encode() for index, item in enumerate(inputs)]
        expected = [as_text("outputs", index, item) for index, item in enumerate(outputs)]
        return Tests(stdins, None, lambda index, outcome: printed(outcome, expected[index], tolerance))
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"fn_name must be the name of a function, not {name!r}")
    calls = [{"fn_name": name, "arguments": as_arguments(index, item)} for index, item in enumerate(inputs)]
    results = [from_json(item) for item in outputs]
    stdins = [json.dumps(call).encode() for call in calls]
    return Tests(stdins, "caller", lambda index, outcome: returned(outcome, results[index], tolerance))


def as_text(key: str, index: int, item: Any) -> str:
    if isinstance(item, list) and all(isinstance(line, str) for line in item):
        return "\n".join(item)
    if not isinstance(item, str):
        raise ValueError(f"{key}[{index}] must be text or a list of lines (for a function's arguments, give fn_name)")
    return item


def as_arguments(index: int, item: Any) -> list[Any]:
    """Read a list of arguments, or text with the JSON of one argument on each line."""
    if isinstance(item, list):
        return item
    try:
        return [json.loads(line) for line in item.splitlines() if line.strip()]
    except (AttributeError, ValueError):
        raise ValueError(f"inputs[{index}] must be a list of arguments, or text with JSON on each line") from None


def from_json(item: Any) -> Any:
    if isinstance(item, str):
        with contextlib.suppress(ValueError):
            return json.loads(item)
    return item


def printed(outcome: Outcome, expected: str, tolerance: float) -> bool:
    """Compare outputs. White space at the end of lines and of the output does not count."""
    if not outcome.succeeded:
        return False
    lines, wanted = (
        [line.rstrip() for line in text.rstrip().splitlines()]
        for text in (outcome.stdout.decode(errors="replace"), expected)
    )
    if lines == wanted:
        return True
    if tolerance == 0 or len(lines) != len(wanted):
        return False
    return all(words_near(line.split(), other.split(), tolerance) for line, other in zip(lines, wanted, strict=True))


def words_near(words: list[str], wanted: list[str], tolerance: float) -> bool:
    return len(words) == len(wanted) and all(word_near(*pair, tolerance) for pair in zip(words, wanted, strict=True))


def word_near(word: str, wanted: str, tolerance: float) -> bool:
    try:
        return word == wanted or same(float(word), float(wanted), tolerance)
    except ValueError:
        return False


def returned(outcome: Outcome, expected: Any, tolerance: float) -> bool:
    """Compare results. Data sets of this form wrap some results in a list of one; both are taken."""
    if not outcome.succeeded:
        return False
    try:
        result = json.loads(outcome.stdout)
    except (ValueError, RecursionError):
        return False
    wrapped = isinstance(expected, list) and len(expected) == 1 and same(result, expected[0], tolerance)
    return wrapped or same(result, expected, tolerance)


def same(result: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(result, list) and isinstance(expected, list):
        return len(result) == len(expected) and all(
            same(*pair, tolerance) for pair in zip(result, expected, strict=True)
        )
    if isinstance(result, dict) and isinstance(expected, dict):
        return result.keys() == expected.keys() and all(same(result[key], expected[key], tolerance) for key in result)
    if isinstance(result, float | int) and isinstance(expected, float | int):
        try:
            near = tolerance > 0 and math.isclose(result, expected, rel_tol=tolerance, abs_tol=tolerance)
        except OverflowError:  # a whole number that is larger than any float
            near = False
        return result == expected or near
    return bool(result == expected)
