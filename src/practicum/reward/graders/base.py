"""What a grader is: its options, a look at the ground truth before the run, and the judgement itself.

A grader is a frozen set of options (fields with a sentence under each, as in the config) that judges one sample at a
time. By its base it says where it works:

    Rule             quick and sure to end: in the reward worker itself
    IsolatedGrader   may hang, crash or eat memory: in a process that can be killed
    RemoteGrader     (remote.py) asks somebody over HTTP: many at once in the reward worker's event loop

`grade` returns a `Score`. What cannot be graded because of its ground truth is `Score.failed("invalid", why)`, never a
zero. Whatever an answer does to fail is a zero, never `invalid`: no answer chooses to be left out of the step.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from practicum.config import Section
from practicum.types import Prompt, Sample, Score


class Grader(Section):
    version: ClassVar[str] = "1"
    """Another one whenever the same sample may get another score: cached scores of the old one no longer count."""

    def check(self, prompt: Prompt) -> None:
        """Raise a ValueError that says what is wrong if answers to this prompt cannot be graded.

        Called for every prompt before anything starts; the caller adds the file, the row and the data source.
        """

    def longest_s(self) -> float | None:
        """Return what a sample may take by the grader's own options; None if they set no bound."""
        return None

    def prepare(self) -> None:
        """Import and build what is needed, once, where samples are graded. Raises where it cannot work at all."""


class Rule(Grader):
    @abstractmethod
    def grade(self, sample: Sample) -> Score: ...


class IsolatedGrader(Grader):
    """A grader in a process that can be killed. Where it hangs, crashes or raises on an answer, but grades `reference`,
    the answer gets a zero."""

    def reference(self, prompt: Prompt) -> str:
        """Return the text of an answer that any usable ground truth can be compared with."""
        return ""

    @abstractmethod
    def grade(self, sample: Sample) -> Score: ...
