"""What is graded in the `reward` benchmark: made-up answers with their ground truths and the scores they deserve.

The same for everyone who asks with the same seed. Standard library only: peers import it in environments of their own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bench.reward_functions import MISDEEDS

ANSWERS_PER_PROMPT = 8
SHARE_RIGHT = 0.5
_SENTENCES = (
    "First we write down what is given and what is asked.",
    "Substituting this into the second equation, we get",
    "Let $n$ be the number of ways to do that, so $n \\ge 1$.",
    "Both sides are positive, so squaring them changes nothing.",
    "This simplifies since the terms in the middle cancel.",
    "Wait, let me check that step again.",
    "By symmetry the other case is the same.",
    "Note that $a^2 - b^2 = (a - b)(a + b)$ holds for all of them.",
)


@dataclass(frozen=True, slots=True)
class Item:
    """An answer. Those to the same prompt have the same number."""

    prompt: int
    text: str
    truth: str
    value: float | None  # None: cannot be graded


def rule_items(num: int, seed: int = 0) -> list[Item]:
    """Short answers, half of them right."""
    chance = random.Random(seed)
    items = []
    for i in range(num):
        truth = " ".join(str(chance.randrange(1000)) for _ in range(16))
        is_right = chance.random() < SHARE_RIGHT
        items.append(Item(i // ANSWERS_PER_PROMPT, truth if is_right else f"{truth} or so", truth, float(is_right)))
    return items


def hostile_items(num: int, kinds: Iterable[str] = tuple(MISDEEDS), seed: int = 0) -> list[Item]:
    """Short answers, and one in a hundred of each of these kinds among them; the first is fine."""
    each = num // 100
    bad = [Item(0, kind, "?", None) for kind in kinds for _ in range(each)]
    items = rule_items(num - len(bad), seed) + bad
    rest = items[1:]
    random.Random(seed).shuffle(rest)
    return [items[0], *rest]


def math_items(num: int, seed: int = 0) -> list[Item]:
    """Worked solutions of 300 to 2,000 characters that end in a box; eight to a problem."""
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
