"""The numbers of a step, from what its phases returned. Names under `time/` vary from run to run; all others do not."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from practicum.replay import ReplayStats
from practicum.train import CriticStats, UpdateStats
from practicum.types import Sample, Score, TrainingSample

PHASE_SHARE = "time/share/"  # what follows is the name of a phase


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step of the loop tells its caller."""

    number: int
    num_steps: int
    metrics: dict[str, float]

    @property
    def reward(self) -> float:
        return self.metrics["reward/mean"]

    @property
    def kl(self) -> float:
        """KL(rollout || trainer) per token: how far apart the two compute the same weights."""
        return self.metrics["rollout/kl"]

    @property
    def tokens_per_s(self) -> float:
        return self.metrics["time/tokens_per_s"]

    @property
    def accuracy(self) -> float | None:
        """Mean score on held-out prompts, in steps that validated."""
        return self.metrics.get("validation/accuracy")


class Stopwatch:
    """Seconds by phase."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.besides: dict[str, float] = {}
        """Figures of what went on beside the step, by their names as metrics."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def metrics(self, num_tokens: int) -> dict[str, float]:
        """Of a step that ends now: each phase and the rest, in seconds and as shares of the whole."""
        total = time.perf_counter() - self._start
        # What is left is the driver's own: everybody else waits for it. Phases that overlap may leave nothing.
        phases = {**self.seconds, "idle": max(0.0, total - sum(self.seconds.values()))}
        return {
            **{f"time/{name}_s": seconds for name, seconds in phases.items()},
            **{f"{PHASE_SHARE}{name}": seconds / total for name, seconds in phases.items()},
            "time/step_s": total,
            "time/tokens_per_s": num_tokens / total,
            **self.besides,
        }


def rollout_metrics(samples: Sequence[Sample], scores: Sequence[Score]) -> dict[str, float]:
    values = [score.value for score in scores if score.value is not None]
    lengths = [int(sample.loss_mask.sum()) for sample in samples]  # without what tools and users said
    parts: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.parts.items():
            parts.setdefault(f"reward/part/{name}", []).append(float(value))
    return {
        **{name: float(np.mean(found)) for name, found in parts.items()},
        "reward/mean": float(np.mean(values)),
        "reward/std": float(np.std(values)),
        "reward/failed_share": 1 - len(values) / len(scores),
        "rollout/answer_tokens": float(np.mean(lengths)),
        "rollout/cut_off_share": float(np.mean([sample.finish_reason == "length" for sample in samples])),
    }


def age_metrics(batch: Iterable[TrainingSample | None]) -> dict[str, float]:
    """Of the samples that are learnt from: by how many updates the weights of a sample's oldest token are older."""
    ages = [int(own.max()) for item in batch if item and len(own := item.ages[item.sample.loss_mask])]
    return {"age/mean": float(np.mean(ages)), "age/max": float(max(ages))} if ages else {}


def conversation_metrics(counts: Mapping[str, int]) -> dict[str, float]:
    """Of what tools and environments did between the model's turns."""
    calls = {name: num for name, num in counts.items() if name.startswith("calls_")}
    failed = sum(num for name, num in calls.items() if name != "calls_ok")
    return {
        "agent/turns": counts.get("turns", 0) / max(1, counts.get("conversations", 0)),
        "agent/calls": sum(calls.values()) / max(1, counts.get("conversations", 0)),
        "agent/failed_calls_share": failed / max(1, sum(calls.values())),
    }


def replay_metrics(stats: ReplayStats) -> dict[str, float]:
    """Of the routers: how often they would have chosen otherwise, and what replay changes."""
    num_known = max(1, stats.num_known)
    found = {
        f"replay/disagreement/layer_{n}": d / num_known for n, d in zip(stats.layers, stats.differing, strict=True)
    }
    found |= {
        "replay/disagreement": sum(stats.differing) / (num_known * max(1, len(stats.layers))),
        "replay/unknown_share": 1 - stats.num_known / max(1, stats.num_rows),
    }
    if stats.num_recorded:
        found["replay/bytes_per_token"] = stats.num_bytes / stats.num_recorded
    if stats.num_compared:
        found["replay/kl_with"] = stats.kl_with / stats.num_compared
        found["replay/kl_without"] = stats.kl_without / stats.num_compared
    return found


def update_metrics(stats: UpdateStats) -> dict[str, float]:
    num_tokens = max(1, stats.num_tokens)
    found = {} if stats.replay is None else replay_metrics(stats.replay)
    if stats.reference_kl is not None:
        found["actor/reference_kl"] = stats.reference_kl / num_tokens
    for age, figures in stats.ages.items():
        found |= {
            f"age/share_{age}": figures.num_tokens / num_tokens,
            f"age/kl_{age}": figures.kl / figures.num_tokens,
            f"age/mean_weight_{age}": figures.weights.mean_weight,
            f"age/max_weight_{age}": figures.weights.max_weight,
        }
    if stats.correction is not None:
        found |= {
            "correction/cut_share": stats.correction.cut_share,
            "correction/mean_weight": stats.correction.mean_weight,
            "correction/effective_share": stats.correction.effective_share,
            "correction/max_weight": stats.correction.max_weight,
        }
    return {
        **found,
        "rollout/kl": stats.rollout_kl / num_tokens,
        "rollout/largest_gap": stats.rollout_gap,
        "actor/loss": stats.loss / num_tokens,
        "actor/entropy": stats.entropy / num_tokens,
        "actor/clipped_share": stats.clipped / num_tokens,
        "actor/grad_norm": stats.grad_norm,
        "actor/lr": stats.lr,
    }


def critic_metrics(stats: CriticStats, explained_variance: float | None) -> dict[str, float]:
    """`explained_variance` is that of the values before the update; None where there was nothing to explain."""
    num_tokens = max(1, stats.num_tokens)
    return {
        **({} if explained_variance is None else {"critic/explained_variance": explained_variance}),
        "critic/loss": stats.loss / num_tokens,
        "critic/clipped_share": stats.clipped / num_tokens,
        "critic/grad_norm": stats.grad_norm,
        "critic/lr": stats.lr,
    }
