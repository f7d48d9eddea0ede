"""Mathematical equivalence by math-verify: 1/2, 0.5 and a LaTeX fraction are the same answer."""

from __future__ import annotations

import logging
from decimal import Decimal
from functools import lru_cache
from typing import Any

from practicum.reward.graders.base import IsolatedGrader
from practicum.reward.graders.extract import TRUTH_MARKER, answer_text, boxed, ground_truths
from practicum.types import Prompt, Sample, Score

_MOST_BOXES = 16  # more of them are a loop, not solutions


class Math(IsolatedGrader):
    r"""1 if math-verify finds the answer equivalent to the ground truth, else 0.

    The ground truth is LaTeX (with or without $ or \boxed{} around it), a plain number, a worked solution with its
    result in \boxed{} or after ####, or a list of accepted ones. Of several boxes in an answer the last counts, or all
    of them as one set of solutions. An answer without any mathematics in it is wrong; a ground truth that math-verify
    cannot read makes the sample invalid. Thinking before </think> is not part of the answer. Logs as a part whether an
    answer was `found`. SymPy, underneath, can run or grow without end, so each sample is graded in a process that can
    be killed.
    """

    def check(self, prompt: Prompt) -> None:
        # Only its type: reading it takes milliseconds, and SymPy may hang where nobody could stop it.
        _truth_texts(prompt)

    def prepare(self) -> None:
        import math_verify  # type: ignore[import-untyped]  # noqa: F401 (slow: before the first sample, not with it)

        # It warns that without its own alarm signals somebody else must stop it. Somebody does.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def reference(self, prompt: Prompt) -> str:
        truth = _truth_texts(prompt)[0].rpartition(TRUTH_MARKER)[2].strip()
        return truth if r"\boxed" in truth else rf"\boxed{{{truth}}}"

    def grade(self, sample: Sample) -> Score:
        try:
            truths = [expression for text in _truth_texts(sample.prompt) for expression in _parse_truth(text)]
        except ValueError as error:
            return Score.failed("invalid", str(error))
        answer = _parse_answer(answer_text(sample))
        if not answer:
            return Score(0.0, {"found": 0.0})
        # Of each reading math-verify returns its text too; SymPy's own way to write it may take for ever.
        stated = next(("".join(reading.split()) for reading in answer if isinstance(reading, str)), None)
        return Score(float(_is_equivalent(truths, answer)), {"found": 1.0}, answer=stated)


def _is_equivalent(truths: list[Any], answer: list[Any]) -> bool:
    """Compare as math-verify does: what SymPy cannot compare is different. Running out of memory is no judgement."""
    from math_verify import verify

    try:
        # The ground truth comes first: verify treats the two differently.
        return bool(verify(truths, answer, timeout_seconds=None, raise_on_error=True))
    except Exception as error:
        if verify(truths, answer, timeout_seconds=None):  # others of several readings may still be compared
            return True
        if isinstance(error, MemoryError | RecursionError):
            raise
        return False


def _parse_answer(text: str) -> list[Any]:
    from math_verify import parse

    boxes = list(dict.fromkeys(boxed(text)))
    if len(boxes) < 2:
        return list(parse(text, parsing_timeout=None))
    # math-verify reads several boxes as one set. That is right for a list of solutions, but an answer that corrects
    # itself means the last: either reading may be the truth.
    readings = (boxes[:1], boxes[:_MOST_BOXES])
    texts = [" and ".join(rf"\boxed{{{box}}}" for box in reading) for reading in readings]
    return [expression for text in texts for expression in parse(text, parsing_timeout=None)]


def _truth_texts(prompt: Prompt) -> list[str]:
    return [truth if isinstance(truth, str) else _digits(truth) for truth in ground_truths(prompt, "math")]


def _digits(number: Any) -> str:
    """Write all digits: in LaTeX, 1e-07 would be a product with Euler's number."""
    return f"{Decimal(str(number)):f}"


@lru_cache(maxsize=256)  # the answers to one prompt come close together
def _parse_truth(text: str) -> tuple[Any, ...]:
    from math_verify import parse

    text = text.rpartition(TRUTH_MARKER)[2].strip()
    # Bare LaTeX must be marked as mathematics: of 2\sqrt{3} math-verify would else read the 2.
    is_marked = r"\boxed" in text or text.count("$") > 1 or r"\(" in text or r"\[" in text
    parsed = parse(text if is_marked else rf"\boxed{{{text}}}", parsing_timeout=None)
    if all(isinstance(expression, str) for expression in parsed):
        raise ValueError(f"math-verify cannot read the ground truth {text[:80]!r}")
    return tuple(parsed)
