"""The work all sides of the `reward` benchmark do: made-up answers with the scores they deserve, and how to time them.

    take_steps(pack) ──▶ per step and case:  new samples in the side's own form   not timed
                                             graded a few times                   median seconds, CPU seconds of all
                                             each score compared with the one that the answer deserves

Samples are the same for all sides that ask with the same seed, and new in every step: SymPy remembers much of what it
was asked, and the same answers would cost less and less. All sides import this in environments of their own; it needs
psutil.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import psutil

from bench.contestant import Line, step
from bench.controller_work import RAY_SETTINGS
from bench.reward_functions import ASYNC, MATH, MATH_IN_THREAD, MISDEEDS, RAISE, RULE, SYNC

NUM_WORKERS = 2
CONCURRENCY = 256
NUM_PROCESSES = 32
SECONDS, CPU, LOST = "seconds", "cpu_s", "lost"

# For all sides alike. What a worker started ends with it, as when our controller starts Ray.
SETTINGS = {
    **RAY_SETTINGS,
    "RAY_process_group_cleanup_enabled": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


# What is graded

ANSWERS_PER_PROMPT = 8
SHARE_RIGHT = 0.5
_SENTENCES = (
    "First we write down what is given and what is asked.", "Substituting this into the second equation, we get",
    "Let $n$ be the number of ways to do that, so $n \\ge 1$.",
    "Both sides are positive, so squaring them changes nothing.",
    "This simplifies since the terms in the middle cancel.", "Wait, let me check that step again.",
    "By symmetry the other case is the same.", "Note that $a^2 - b^2 = (a - b)(a + b)$ holds for all of them.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Item:
    """An answer. Those to the same prompt have the same number."""

    prompt: int
    text: str
    truth: str
    value: float | None  # None: cannot be graded


def rule_items(num: int, seed: int = 0) -> list[Item]:
    """Return short answers, half of them right."""
    chance = random.Random(seed)
    items = []
    for i in range(num):
        truth = " ".join(str(chance.randrange(1000)) for _ in range(16))
        is_right = chance.random() < SHARE_RIGHT
        items.append(Item(i // ANSWERS_PER_PROMPT, truth if is_right else f"{truth} or so", truth, float(is_right)))
    return items


def hostile_items(num: int, kinds: Iterable[str] = tuple(MISDEEDS), seed: int = 0) -> list[Item]:
    """Return short answers, one in a hundred of each of these kinds among them; the first is fine."""
    each = num // 100
    bad = [Item(0, kind, "?", None) for kind in kinds for _ in range(each)]
    items = rule_items(num - len(bad), seed) + bad
    rest = items[1:]
    random.Random(seed).shuffle(rest)
    return [items[0], *rest]


def math_items(num: int, seed: int = 0) -> list[Item]:
    """Return worked solutions of 300 to 2,000 characters that end in a box; eight to a problem."""
    chance = random.Random(seed)
    items = []
    for i in range(num):
        if i % ANSWERS_PER_PROMPT == 0:
            truth, right, wrong = _PROBLEMS[i // ANSWERS_PER_PROMPT % len(_PROBLEMS)](chance)
        is_right = chance.random() < SHARE_RIGHT
        work = " ".join(chance.choices(_SENTENCES, k=chance.randint(6, 40)))
        text = rf"{work} The answer is $\boxed{{{right if is_right else wrong}}}$."
        items.append(Item(i // ANSWERS_PER_PROMPT, text, truth, float(is_right)))
    return items


Problem = tuple[str, str, str]  # the ground truth, the same written in another way, and a wrong answer


def _integer(chance: random.Random) -> Problem:
    number = chance.randint(1000, 99_999)
    return str(number), f"{number:,}".replace(",", "{,}"), str(number + 1)


def _fraction(chance: random.Random) -> Problem:
    above, below, factor = chance.randint(2, 99), chance.randint(2, 99), chance.randint(2, 9)
    truth, right = rf"\frac{{{above}}}{{{below}}}", rf"\frac{{{factor * above}}}{{{factor * below}}}"
    return truth, right, rf"\frac{{{above + 1}}}{{{below}}}"


def _decimal(chance: random.Random) -> Problem:
    quarters = 4 * chance.randint(1, 50) + 1
    return rf"\frac{{{quarters}}}{{4}}", str(quarters / 4), str(quarters / 4 + 1)


def _root(chance: random.Random) -> Problem:
    a, b, c = chance.randint(2, 30), chance.randint(2, 30), chance.choice((2, 3, 5, 7, 11))
    return rf"{a} + {b}\sqrt{{{c}}}", rf"{b}\sqrt{{{c}}} + {a}", rf"{a} - {b}\sqrt{{{c}}}"


def _polynomial(chance: random.Random) -> Problem:
    a, b = chance.randint(1, 20), chance.randint(1, 20)
    return f"(x+{a})(x+{b})", f"x^2+{a + b}x+{a * b}", f"x^2+{a + b}x+{a * b + 1}"


def _pair(chance: random.Random) -> Problem:
    a, b = chance.randint(1, 50), chance.randint(1, 50)
    return rf"({a}, \frac{{{b}}}{{2}})", f"({a}, {b / 2})", rf"({a}, \frac{{{b + 1}}}{{2}})"


# As in the usual datasets, most answers are numbers; the others take math-verify ten times as long.
_PROBLEMS: tuple[Callable[[random.Random], Problem], ...] = (
    *(_integer, _fraction, _integer, _root, _integer, _decimal, _integer, _polynomial),
    *(_integer, _fraction, _integer, _root, _integer, _decimal, _fraction, _pair),
)


# How it is timed

MAKERS: Mapping[str, Callable[[int, int], list[Item]]] = {
    RULE: rule_items, MATH: math_items, MATH_IN_THREAD: math_items, ASYNC: rule_items, SYNC: rule_items,
    RAISE: lambda num, seed: hostile_items(num, ["raise"], seed),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """How much of one case a step does."""

    num_samples: int
    num_calls: int = 1


@dataclass(frozen=True, slots=True)
class Job:
    """What a side is given to do. `tokenizer` is a folder; `manager` is for sides that have several."""

    tokenizer: str
    loads: Mapping[str, Load]
    manager: str = ""

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Job:
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "loads": {case: Load(**load) for case, load in fields["loads"].items()}})


class Batch(Protocol):
    """Samples of one case in a side's own form."""

    def grade(self) -> Any:
        """Grade them. This is timed."""

    def values(self, graded: Any) -> Sequence[float | None]:
        """Return the scores in the order of the samples, from what `grade` returned; None for a stated failure."""


def take_steps(line: Line, job: Job, packages: Iterable[str], pack: Callable[[str, list[Item]], Batch]) -> None:
    """Be a contestant, once its workers are up."""
    seed = -1

    def take_step(_: str) -> dict[str, Any]:
        nonlocal seed
        seed += 1
        began, parts = time.perf_counter(), {}
        for case, load in job.loads.items():
            items = MAKERS[case](load.num_samples, seed)
            batch = pack(case, items)
            measured = {LOST: num_lost(items, batch)} if case == RAISE else timed(items, batch, load.num_calls)
            parts.update({part_of(case, what): value for what, value in measured.items()})
        return step(time.perf_counter() - began, 1, **parts)

    line.serve(packages, take_step)


def part_of(case: str, what: str) -> str:
    return f"{case}: {what}"


def timed(items: Sequence[Item], batch: Batch, num_calls: int) -> dict[str, float]:
    """Return median seconds and mean CPU seconds of a call. A score that an answer does not deserve is an error."""
    seconds = []
    graded = None
    cpu_before = cpu_s()
    for _ in range(num_calls):
        began = time.perf_counter()
        graded = batch.grade()
        seconds.append(time.perf_counter() - began)
    used_s = cpu_s() - cpu_before
    wrong = [item for item, value in zip(items, batch.values(graded), strict=True) if value != item.value]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(items)} scores are wrong; the first is that of {wrong[0]}")
    return {SECONDS: statistics.median(seconds), CPU: used_s / num_calls}


def num_lost(items: Sequence[Item], batch: Batch) -> int:
    """Count samples that end with neither the score they deserve nor a stated failure: all, if grading raises."""
    try:
        values = batch.values(batch.grade())
    except Exception as error:
        print(f"grading a batch with answers that raise failed: {type(error).__name__}")
        return len(items)
    return sum(value != item.value for item, value in zip(items, values, strict=True))


def cpu_s() -> float:
    """Return those of this process and all below it, Ray's included; children that ended count with parents."""
    total = 0.0
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total
