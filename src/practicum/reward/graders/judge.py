"""A generative judge: a model that reads question and answer, thinks in words and ends with a number.

An answer of the judge without a number, or with one off the scale, is a vote that does not count; when too few votes
count, the sample is `invalid`. It is never a zero.

A pattern of the user's may never end on some text, so it searches in a process that can be killed: `ask`, `find` and
`decide` are apart for this, and `JudgeExecutor` calls them. The pattern below needs time linear in the text.
"""

from __future__ import annotations

import hashlib
import math
import re
import statistics
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from practicum.control_tokens import without_control_tokens
from practicum.reward.graders.remote import RemoteGrader, question_text
from practicum.types import Prompt, Sample, Score

if TYPE_CHECKING:
    from practicum.reward.client import RewardClient

_FIELDS = {"question", "answer", "truth"}
_TEMPLATE = """\
Judge an answer to a question. Look for mistakes in it first, then give it a score from 0 (useless) to 10 (perfect).

Question:
{question}

Answer:
{answer}

End with a line of the form "Score: N"."""
# No two repeats in it can share a run of spaces or stars, or a failure would try all ways to divide the run.
_PATTERN = r"(?i)score\s*[:=]\s*(?:\*+\s*)?(-?\d+(?:\.\d+)?)"


class Judge(RemoteGrader):
    """Where on its scale a model that is asked in words puts the answer, from 0 to 1.

    Logs as parts, of several votes, how many counted (`votes`) and how far apart they are (`spread`).
    """

    model_kind: ClassVar[str | None] = "generative"

    template: str = _TEMPLATE
    """What the judge is asked; {question}, {answer} and {truth} (the ground truth) stand for their texts."""
    system: str | None = None
    """A system message before it."""
    pattern: str = _PATTERN
    """A regular expression whose first group is the score; its last match in the judge's answer counts. An answer in
    which it takes longer than reward.timeout_s is a vote that does not count."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Lowest and highest score; the value is where on it the score lies, from 0 to 1. Others do not count."""
    votes: int = Field(default=1, ge=1)
    """How often the judge is asked about each answer."""
    combine: Literal["mean", "median", "majority"] = "mean"
    """How votes become one value. majority: the most frequent; of several, their mean."""
    min_votes: int = Field(default=1, ge=1)
    """Votes that must count; with fewer the sample is invalid."""
    temperature: float = Field(default=0.0, ge=0)
    """Of the judge's words. Several votes need more than 0, or they are all the same."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest answer of the judge."""
    model: str = "default"
    """The model's name, for servers that hold several."""

    @field_validator("template")
    @classmethod
    def _known_fields(cls, template: str) -> str:
        used = set(re.findall(r"\{(\w+)\}", template))
        if not used <= _FIELDS or "answer" not in used:
            raise ValueError(f"must contain {{answer}}, and may contain {{question}} and {{truth}}, not {sorted(used)}")
        return template

    @field_validator("pattern")
    @classmethod
    def _has_a_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"is not a regular expression: {error}") from None
        if groups < 1:
            raise ValueError("needs a group, in parentheses, around the score")
        return pattern

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.scale[0] < self.scale[1]:
            raise ValueError(f"scale={self.scale}: the lowest score comes first")
        if self.min_votes > self.votes:
            raise ValueError(f"min_votes={self.min_votes} of votes={self.votes} cannot be had")
        if self.votes > 1 and self.temperature == 0:
            raise ValueError(f"votes={self.votes} at temperature 0 would all be the same: raise the temperature")
        return self

    def check(self, prompt: Prompt) -> None:
        if "{truth}" in self.template and prompt.answer is None:
            raise ValueError("the judge's template uses {truth}, but the ground truth is missing")

    @property
    def reads_in_process(self) -> bool:
        """Tell whether `find` must run where it can be killed."""
        return self.pattern != _PATTERN

    async def grade(self, sample: Sample, client: RewardClient) -> Score:
        said = await self.ask(sample, client)
        return said if isinstance(said, Score) else self.decide(said, [self.find(text) for text in said])

    async def ask(self, sample: Sample, client: RewardClient) -> list[str] | Score:
        """Return what the judge says, once per vote; a failed score where it cannot be had."""
        texts = {"question": question_text(sample), "answer": sample.text, "truth": str(sample.prompt.answer)}
        if self.urls:  # others than our replicas may read control tokens in a message as such
            texts = {name: without_control_tokens(text)[0] for name, text in texts.items()}
        # In one pass: an answer that contains {truth} is not filled in once more.
        asked = re.sub(r"\{(\w+)\}", lambda found: texts[found[1]], self.template)
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*system, {"role": "user", "content": asked}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "n": self.votes,
            # The same judgement of the same answer whenever and wherever it is asked for, where the server heeds it.
            "seed": int.from_bytes(hashlib.sha256(asked.encode(errors="surrogatepass")).digest()[:4], "big") >> 1,
        }
        reply = await client.post(self.target, self.path or "/v1/chat/completions", body, self.headers())
        try:
            said = [str(choice["message"]["content"]) for choice in reply["choices"]]
        except (KeyError, TypeError):
            return Score.failed("invalid", f"the judge's server answered without choices: {str(reply)[:200]}")
        if len(said) < self.votes:
            reason = f"the judge's server gave {len(said)} of {self.votes} votes: it seems not to heed `n`"
            return Score.failed("invalid", reason)
        return said

    def find(self, text: str) -> str | None:
        """Return what the pattern's group holds at its last match; None without one."""
        last = None
        for last in self._regex.finditer(text):  # noqa: B007
            pass
        found: str | None = None if last is None else last[1]
        return found

    def decide(self, said: Sequence[str], found: Sequence[str | None], trouble: str = "") -> Score:
        """Make a score of what the judge said, once per vote, and what was found in it.

        `trouble` says why something could not be searched.
        """
        votes = [vote for text in found if (vote := self._vote(text)) is not None]
        if len(votes) < self.min_votes:
            shown = said[0][-200:] if said else ""
            return Score.failed(
                "invalid",
                f"{len(votes)} of {len(said)} answers of the judge hold a score from {self.scale[0]:g} to "
                f"{self.scale[1]:g}, {self.min_votes} are needed. {trouble}One ends with: {shown!r}",
            )
        parts = {"votes": float(len(votes)), "spread": max(votes) - min(votes)} if self.votes > 1 else {}
        return Score(self._combined(votes), parts=parts)

    def _vote(self, found: str | None) -> float | None:
        try:
            score = float(found or "")
        except ValueError:
            return None
        low, high = self.scale
        return (score - low) / (high - low) if math.isfinite(score) and low <= score <= high else None

    def _combined(self, votes: list[float]) -> float:
        if self.combine == "mean":
            return statistics.fmean(votes)
        if self.combine == "median":
            return statistics.median(votes)
        return statistics.fmean(statistics.multimode(votes))

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern)
