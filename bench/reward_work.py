"""The work all sides of the `reward` benchmark do: made-up answers with the scores they deserve, and how to time them.

    take_steps(pack) ──▶ per step and case:  new samples in the side's own form   not timed
                                             graded a few times                   `SIDE: CASE: METRIC`
                                             each score compared with the one that the answer deserves

Samples are new in every step: SymPy remembers much of what it was asked, and the same answers would cost less and less.
All sides import this in environments of their own.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.contestant import Line, step
from bench.controller_work import NUM_WORKERS, RAY_SETTINGS, cpu_s_by_pid
from bench.reward_functions import ASYNC, AT_A_TIME, MATH, MISDEEDS, RAISE, RULE, SLEEP_S, SYNC

CALL_MS, RATE, CPU_MS, IDEAL = "ms per call", "samples/s", "CPU ms per sample", "s / ideal s"
SHARE = "share of two cores used"
LOST = "samples with neither their score nor a stated failure"

# For all sides alike. What a worker started ends with it, as when our controller starts Ray.
SETTINGS = RAY_SETTINGS | {"RAY_process_group_cleanup_enabled": "1"}
SETTINGS |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


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
    """An answer."""

    prompt: int  # its number
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
            truth, right, wrong = _problem(_KINDS[i // ANSWERS_PER_PROMPT % len(_KINDS)], chance)
        is_right = chance.random() < SHARE_RIGHT
        work = " ".join(chance.choices(_SENTENCES, k=chance.randint(6, 40)))
        text = rf"{work} The answer is $\boxed{{{right if is_right else wrong}}}$."
        items.append(Item(i // ANSWERS_PER_PROMPT, text, truth, float(is_right)))
    return items


# As in the usual datasets, most answers are numbers; the others take math-verify ten times as long.
_KINDS = (
    *("integer", "fraction", "integer", "root", "integer", "decimal", "integer", "polynomial"),
    *("integer", "fraction", "integer", "root", "integer", "decimal", "fraction", "pair"),
)


def _problem(kind: str, chance: random.Random) -> tuple[str, str, str]:
    """Return the ground truth, the same written in another way, and a wrong answer."""
    number, a, b, c = chance.randint(1000, 99_999), chance.randint(2, 50), chance.randint(2, 50), chance.randint(2, 9)
    fraction = r"\frac{%d}{%d}"
    if kind == "integer":
        return str(number), f"{number:,}".replace(",", "{,}"), str(number + 1)
    if kind == "fraction":
        return fraction % (a, b), fraction % (c * a, c * b), fraction % (a + 1, b)
    if kind == "decimal":
        return fraction % (4 * a + 1, 4), str(a + 0.25), str(a + 1.25)
    if kind == "root":
        root = rf"{b}\sqrt{{{chance.choice((2, 3, 5, 7, 11))}}}"
        return f"{a} + {root}", f"{root} + {a}", f"{a} - {root}"
    if kind == "polynomial":
        return f"(x+{a})(x+{b})", f"x^2+{a + b}x+{a * b}", f"x^2+{a + b}x+{a * b + 1}"
    assert kind == "pair"
    return f"({a}, {fraction % (b, 2)})", f"({a}, {b / 2})", f"({a}, {fraction % (b + 1, 2)})"


# How it is timed

MAKERS: Mapping[str, Callable[[int, int], list[Item]]] = {
    RULE: rule_items, MATH: math_items, ASYNC: rule_items, SYNC: rule_items,
    RAISE: lambda num, seed: hostile_items(num, ["raise"], seed),
}  # fmt: skip
Loads = Mapping[str, Sequence[int]]  # how many samples of each case a step grades, and how often


# Samples in a side's own form: a call that grades them, which is timed, and one that reads the scores from what that
# returned, in the order of the samples, None for a stated failure.
Batch = tuple[Callable[[], Any], Callable[[Any], Sequence[float | None]]]


def take_steps(
    line: Line, loads: Loads, packages: Iterable[str], side: str, pack: Callable[[str, list[Item]], Batch]
) -> None:
    """Be a contestant that grades samples of each case, once its workers are up."""

    def measure(seed: int) -> dict[str, float]:
        found = {}
        for case, (num_samples, num_calls) in loads.items():
            items = MAKERS[case](num_samples, seed)
            batch = pack(case, items)
            numbers = {LOST: num_lost(items, batch)} if case == RAISE else timed(case, items, batch, num_calls)
            found.update({f"{side}: {case}: {metric}": value for metric, value in numbers.items()})
        return found

    serve(line, packages, measure)


def serve(line: Line, packages: Iterable[str], measure: Callable[[int], dict[str, float]]) -> None:
    """Be a contestant whose steps return numbers. Each step gets a seed of its own."""
    seeds = itertools.count()

    def take_step(_: str) -> dict[str, Any]:
        began = time.perf_counter()
        found = measure(next(seeds))
        return step(time.perf_counter() - began, 1, **found)

    line.serve(packages, take_step)


def timed(case: str, items: Sequence[Item], batch: Batch, num_calls: int) -> dict[str, float]:
    """Return what calls cost, by the median seconds and the mean CPU seconds. A wrong score is an error."""
    grade, read = batch
    times = []
    cpu_before = sum(cpu_s_by_pid().values())
    for _ in range(num_calls):
        began = time.perf_counter()
        graded = grade()
        times.append(time.perf_counter() - began)
    used_s = (sum(cpu_s_by_pid().values()) - cpu_before) / num_calls
    seconds, num = statistics.median(times), len(items)
    wrong = [item for item, value in zip(items, read(graded), strict=True) if value != item.value]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {num} scores are wrong; the first is that of {wrong[0]}")
    numbers = {CALL_MS: 1e3 * seconds, RATE: num / seconds, CPU_MS: 1e3 * used_s / num}
    numbers[SHARE] = used_s / (NUM_WORKERS * seconds)
    if case in AT_A_TIME:  # a call cannot be divided, so in the least time the last ones take as long as the others
        numbers[IDEAL] = seconds / (SLEEP_S * -(-num // AT_A_TIME[case]))
    return numbers


def num_lost(items: Sequence[Item], batch: Batch) -> int:
    """Count samples that end with neither the score they deserve nor a stated failure: all, if grading raises."""
    grade, read = batch
    try:
        values = read(grade())
    except Exception as error:
        print(f"grading a batch with answers that raise failed: {type(error).__name__}")
        return len(items)
    return sum(value != item.value for item, value in zip(items, values, strict=True))
