"""A regular expression the answer must match, and a comparison of what it captures."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal, Self

from pydantic import Field, model_validator

from practicum.reward.graders.base import IsolatedGrader, Rule
from practicum.reward.graders.choice import Choice
from practicum.reward.graders.exact import Exact
from practicum.reward.graders.math import Math
from practicum.reward.graders.numeric import Numeric
from practicum.types import Prompt, Sample, Score

_COMPARISONS: dict[str, Rule | IsolatedGrader] = {
    "exact": Exact(),
    "numeric": Numeric(),
    "choice": Choice(),
    "math": Math(),
}


class Regex(IsolatedGrader):
    """Without `compare`: 1 if the answer matches the pattern, else 0. This rewards a format and needs no ground truth.

    With `compare`: the captured text is graded as if it were the whole answer; 0 where the pattern does not match. What
    is captured is the group `answer`, (?P<answer>...), or else the first group. Logs as a part whether the `format`
    matched. A pattern can take for ever on an unlucky answer and Python cannot interrupt it, so each sample is graded
    in a process that can be killed.
    """

    pattern: str = Field(min_length=1)
    """Python's syntax. `.` matches line ends too; other flags stand in the pattern, such as (?i) to ignore case."""
    match: Literal["full", "search"] = "search"
    """full: the whole answer matches, white space around it apart. search: some part does; the last one is compared."""
    compare: Literal["exact", "numeric", "choice", "math"] | None = None
    """The grader that compares the captured text with the ground truth, with its default options. None rewards the
    match itself."""

    @model_validator(mode="after")
    def _usable(self) -> Self:
        try:
            compiled = re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern={self.pattern!r} is not a regular expression: {error}") from None
        if self.compare is not None and not compiled.groups:
            raise ValueError(
                f"compare={self.compare} needs a group in pattern={self.pattern!r} for the text to compare, "
                "such as (?P<answer>.*)"
            )
        return self

    def check(self, prompt: Prompt) -> None:
        if self.compare is not None:
            _COMPARISONS[self.compare].check(prompt)

    def prepare(self) -> None:
        if self.compare is not None:
            _COMPARISONS[self.compare].prepare()

    def grade(self, sample: Sample) -> Score:
        match = self._last_match(sample.text)
        if self.compare is None:
            return Score(float(match is not None))
        try:
            self.check(sample.prompt)
        except ValueError as error:
            return Score.failed("invalid", str(error))
        captured = _captured(match) if match else None
        if captured is None:
            return Score(0.0, {"format": 0.0})
        score = _COMPARISONS[self.compare].grade(replace(sample, text=captured))
        if score.status != "ok":
            return score
        return replace(score, parts={"format": 1.0}, answer=score.answer or captured.strip())

    def _last_match(self, text: str) -> re.Match[str] | None:
        compiled = re.compile(self.pattern, re.DOTALL)
        if self.match == "full":
            return compiled.fullmatch(text.strip())
        if self.compare is None:
            return compiled.search(text)
        last = None
        for last in compiled.finditer(text):  # noqa: B007
            pass
        return last


def _captured(match: re.Match[str]) -> str | None:
    """Return the captured text; None where the group is in a part of the pattern that was not needed."""
    text: str | None = match["answer"] if "answer" in match.re.groupindex else match[1]
    return text
