"""What several graders look for: the ground truth of a prompt, and the place where an answer states its result."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from decimal import Decimal
from numbers import Real
from typing import Any

from practicum.types import Prompt, Sample

TRUTH_MARKER = "####"  # before the result in worked solutions, as in GSM8K


def is_number(value: Any) -> bool:
    """Return whether it is a finite number; True and False are none."""
    return isinstance(value, Real | Decimal) and not isinstance(value, bool) and math.isfinite(value)


def ground_truths(prompt: Prompt, grader: str) -> tuple[Any, ...]:
    """Return the accepted strings and numbers: the ground truth itself, or the members of a list of them.

    Raises a ValueError that says what is wrong with it.
    """
    truth = prompt.answer
    accepted = tuple(truth) if isinstance(truth, list | tuple) else (truth,)
    if accepted in ((), (None,), ("",)):
        raise ValueError("the ground truth is missing")
    for one in accepted:
        if not (is_number(one) or (isinstance(one, str) and one.strip())):
            raise ValueError(f"{grader} needs a string, a number or a list of them as ground truth, found {one!r}")
    return accepted


def answer_text(sample: Sample) -> str:
    """Return what a sample says after its thinking: the text behind the last </think>, or all of it."""
    return sample.text.rpartition("</think>")[2]


def boxed(text: str) -> Iterator[str]:
    r"""Yield what stands in each closed \boxed{...} of a text, from the last to the first."""
    end = len(text)
    while (start := text.rfind(r"\boxed{", 0, end)) >= 0:
        opened = text.index("{", start)
        depth = 0
        for brace in re.finditer(r"[{}]", text[opened:end]):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                yield text[opened + 1 : opened + brace.start()]
                break
        end = start


def last_boxed(text: str) -> str | None:
    return next(boxed(text), None)
