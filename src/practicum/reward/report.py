"""How far grading is, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from practicum.reward.executors import Graded
from practicum.types import SCORE_STATUSES


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
    """The times of a round, and how many samples could not be graded."""

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
    first_reason: str
    """Why the first of them could not; empty where there is none."""
    num_retried: int
    num_restarts: int
    num_cache_hits: int

    @classmethod
    def of(cls, graded: Sequence[Graded], seconds: float, num_retried: int, num_restarts: int) -> GradingReport:
        counts = Counter(one.score.status for one in graded)
        reasons = (one.score.reason for one in graded if one.score.status != "ok")
        return cls(
            num_samples=len(graded),
            seconds=seconds,
            waited_s=sum(one.waited_s for one in graded) / max(1, len(graded)),
            longest_wait_s=max((one.waited_s for one in graded), default=0.0),
            ran_s=sum(one.ran_s for one in graded) / max(1, len(graded)),
            failures={status: counts[status] for status in SCORE_STATUSES if status != "ok" and counts[status]},
            first_reason=next(reasons, ""),
            num_retried=num_retried,
            num_restarts=num_restarts,
            num_cache_hits=sum(one.cache_hits for one in graded),
        )

    def __str__(self) -> str:
        """Say how many samples could not be graded, and why the first could not."""
        num, kinds = sum(self.failures.values()), ", ".join(f"{n} {status}" for status, n in self.failures.items())
        return f"{num} of {self.num_samples} samples could not be graded ({kinds}). The first: {self.first_reason}"

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
