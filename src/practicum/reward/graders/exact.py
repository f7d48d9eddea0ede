"""Exact match: the answer, stripped of white space, is the ground truth."""

from __future__ import annotations

import string
import unicodedata

from practicum.reward.graders.base import Rule
from practicum.reward.graders.extract import answer_text, ground_truths
from practicum.types import Prompt, Sample, Score


class Exact(Rule):
    """1 if the answer is the ground truth, white space around both apart, else 0.

    The ground truth is a string, a number or a list of accepted ones. A number is compared as text: 17 accepts "17"
    but not "17.00"; the numeric grader reads numbers. Thinking before </think> is not part of the answer.
    """

    ignore_case: bool = False
    """Whether "Paris" and "paris" are the same."""
    ignore_punctuation: bool = False
    """Whether punctuation is left out of both, and any run of white space is one space."""

    def check(self, prompt: Prompt) -> None:
        self._accepted(prompt)

    def grade(self, sample: Sample) -> Score:
        try:
            accepted = self._accepted(sample.prompt)
        except ValueError as error:
            return Score.failed("invalid", str(error))
        answer = self._plain(answer_text(sample))
        differs = self.ignore_case or self.ignore_punctuation
        return Score(float(answer in accepted), answer=answer if differs else None)  # else it is the text itself

    def _accepted(self, prompt: Prompt) -> set[str]:
        accepted = set()
        for truth in ground_truths(prompt, "exact"):
            plain = self._plain(str(truth))
            if not plain:
                raise ValueError(f"nothing is left of the ground truth {truth!r} without its punctuation")
            accepted.add(plain)
            # Files often hold whole numbers as floats; nobody writes them so.
            if isinstance(truth, float) and truth.is_integer():
                accepted.add(self._plain(str(int(truth))))
        return accepted

    def _plain(self, text: str) -> str:
        if self.ignore_case:
            text = text.casefold()
        if self.ignore_punctuation:
            text = " ".join("".join(char for char in text if not _is_punctuation(char)).split())
        return text.strip()


def _is_punctuation(char: str) -> bool:
    return char in string.punctuation or unicodedata.category(char).startswith("P")
