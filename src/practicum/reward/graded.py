"""What comes out of a round of grading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from practicum.reward.desks import Graded
from practicum.types import SCORE_STATUSES, Sample, Score


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a round is."""

    num_done: int
    num_samples: int
    num_failed: int
    seconds: float
    """Since the result was asked for."""

    def __str__(self) -> str:
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        return f"graded {self.num_done:,} of {self.num_samples:,} samples{failed}, waiting for {self.seconds:.0f} s"


@dataclass(frozen=True, slots=True)
class GradingReport:
    num_samples: int
    seconds: float
    """From the first sample to the last score."""
    waited_s: float
    """Mean time a sample waited for a process or for the limits."""
    longest_wait_s: float
    ran_s: float
    """Mean time its grading took."""
    failures: Mapping[str, int]
    """Samples by status, for those that could not be graded."""
    num_retried: int
    num_restarts: int
    num_cache_hits: int

    @classmethod
    def of(cls, graded: Sequence[Graded], seconds: float, num_retried: int, num_restarts: int) -> GradingReport:
        counts = Counter(one.score.status for one in graded)
        return cls(
            num_samples=len(graded),
            seconds=seconds,
            waited_s=sum(one.waited_s for one in graded) / max(1, len(graded)),
            longest_wait_s=max((one.waited_s for one in graded), default=0.0),
            ran_s=sum(one.ran_s for one in graded) / max(1, len(graded)),
            failures={status: counts[status] for status in SCORE_STATUSES if status != "ok" and counts[status]},
            num_retried=num_retried,
            num_restarts=num_restarts,
            num_cache_hits=sum(one.cache_hits for one in graded),
        )

    def metrics(self) -> dict[str, float]:
        return {
            "time/graded_per_s": self.num_samples / max(self.seconds, 1e-9),
            "time/grading_wait_s": self.waited_s,
            "time/grading_longest_wait_s": self.longest_wait_s,
            "time/grading_each_s": self.ran_s,
            **{f"reward/failed/{status}": float(count) for status, count in self.failures.items()},
            # Not the same in a run that was killed and resumed, so they stand beside the times.
            **({"time/graded_again": float(self.num_retried)} if self.num_retried else {}),
            **({"time/reward_worker_restarts": float(self.num_restarts)} if self.num_restarts else {}),
            **({"time/reward_cache_hits": float(self.num_cache_hits)} if self.num_cache_hits else {}),
        }


@dataclass(frozen=True, slots=True)
class GradedBatch:
    """Scores in the order of the samples."""

    scores: list[Score]
    kept: list[bool]
    """Whether a sample is learnt from: it has a value, and its group was not dropped."""
    token_rewards: list[NDArray[np.float32] | None]
    """[answer] each: the value at the last token that the model wrote, 0 elsewhere. None where there is no value."""
    report: GradingReport

    @classmethod
    def of(
        cls,
        samples: Sequence[Sample],
        graded: Sequence[Graded],
        report: GradingReport,
        groups: Sequence[int] | None,
        on_failure: Literal["mask", "drop_group"],
    ) -> GradedBatch:
        """`groups` says which samples answer the same prompt; None goes by the prompts themselves."""
        scores = [one.score for one in graded]
        members = [sample.prompt.id for sample in samples] if groups is None else list(groups)
        spoilt = {member for member, score in zip(members, scores, strict=True) if score.value is None}
        if on_failure == "drop_group":
            kept = [member not in spoilt for member in members]
        else:
            kept = [score.value is not None for score in scores]
        rewards = [_token_rewards(sample, score) for sample, score in zip(samples, scores, strict=True)]
        return cls(scores, kept, rewards, report)

    def in_places(self, places: Sequence[int]) -> GradedBatch:
        """The same in another order: the first sample comes to the first of `places`, and so on."""
        at = np.argsort(places).tolist()
        rewards = [self.token_rewards[i] for i in at]
        return GradedBatch([self.scores[i] for i in at], [self.kept[i] for i in at], rewards, self.report)


def _token_rewards(sample: Sample, score: Score) -> NDArray[np.float32] | None:
    if score.value is None:
        return None
    rewards = np.zeros(len(sample.token_ids), np.float32)
    last = -1
    if not sample.loss_mask[-1]:
        written = np.flatnonzero(sample.loss_mask)
        last = int(written[-1]) if len(written) else -1
    rewards[last] = score.value
    return rewards
