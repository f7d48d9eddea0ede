"""The metrics of a step. Names under `time/` vary from run to run; all others do not."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from practicum.control_tokens import without_control_tokens
from practicum.replay import ReplayStats
from practicum.train import CriticStats, UpdateStats
from practicum.types import Sample, Trajectory

PHASE_SHARE = "time/share/"  # what follows is the name of a phase


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of a step."""

    number: int
    num_steps: int
    metrics: dict[str, float]

    @property
    def reward(self) -> float:
        return self.metrics["reward/mean"]

    @property
    def kl(self) -> float:
        """KL(rollout || trainer) per token."""
        return self.metrics["rollout/kl"]

    @property
    def tokens_per_s(self) -> float:
        return self.metrics["time/tokens_per_s"]

    @property
    def accuracy(self) -> float | None:
        """The mean score on held-out prompts, in steps that validated."""
        return self.metrics.get("validation/accuracy")


class Stopwatch:
    """Seconds by phase."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.besides: dict[str, float] = {}
        """Metrics of what went on beside the step, by name."""

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
        """Return the phases of a step that ends now, and the rest, in seconds and as shares of the whole."""
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


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the rewards and lengths of a step's answers."""
    scores = [one.score for one in trajectories if one.score is not None]
    values = [score.value for score in scores if score.value is not None]
    lengths = [sum(sample.num_learnt for sample in one.samples) for one in trajectories]  # without what tools said
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
        "rollout/truncated_share": float(np.mean([one.last.finish_reason == "length" for one in trajectories])),
        "rollout/control_tokens": float(np.mean([without_control_tokens(one.last.text)[1] for one in trajectories])),
    }


def staleness_metrics(step: int, learnt: Iterable[Iterable[Sample]]) -> dict[str, float]:
    """Return by how many updates the weights that wrote a sample's oldest token are older than those that learn."""
    found = [
        int(own.max())
        for samples in learnt
        for sample in samples
        if len(own := sample.staleness(step)[sample.loss_mask])
    ]
    return {"staleness/mean": float(np.mean(found)), "staleness/max": float(max(found))} if found else {}


def conversation_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return how many turns conversations had, and what tools and environments did between them."""
    counts, num = Counter[str](), len(trajectories)
    for trajectory in trajectories:
        counts.update(trajectory.counts)
    calls = {name: count for name, count in counts.items() if name.startswith("calls_")}
    failed = sum(count for name, count in calls.items() if name != "calls_ok")
    return {
        "agent/turns": counts["turns"] / max(1, num),
        "agent/calls": sum(calls.values()) / max(1, num),
        "agent/failed_calls_share": failed / max(1, sum(calls.values())),
        "agent/failed_share": sum(_has_failed(trajectory) for trajectory in trajectories) / max(1, num),
        "agent/control_tokens": counts["control_tokens"] / max(1, num),
    }


def _has_failed(trajectory: Trajectory) -> bool:
    """Return whether tools or environment have failed, and the conversation ended for it."""
    return bool(trajectory.samples) and trajectory.last.finish_reason == "error"


def replay_metrics(stats: ReplayStats) -> dict[str, float]:
    """Return how often live routers would have chosen otherwise, and what replay changes."""
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
    if stats.num_rollout_known:
        found["replay/rollout_disagreement"] = stats.num_rollout_differing / stats.num_rollout_known
    return found


def update_metrics(stats: UpdateStats) -> dict[str, float]:
    num_tokens = max(1, stats.num_tokens)
    found = {} if stats.replay is None else replay_metrics(stats.replay)
    if stats.reference_kl is not None:
        found["actor/reference_kl"] = stats.reference_kl / num_tokens
    for staleness, figures in stats.by_staleness.items():
        found |= {
            f"staleness/share_{staleness}": figures.num_tokens / num_tokens,
            f"staleness/kl_{staleness}": figures.kl / figures.num_tokens,
            f"staleness/mean_weight_{staleness}": figures.weights.mean_weight,
            f"staleness/max_weight_{staleness}": figures.weights.max_weight,
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
        "rollout/max_log_prob_diff": stats.rollout_gap,
        "actor/loss": stats.loss / num_tokens,
        "actor/entropy": stats.entropy / num_tokens,
        "actor/clipped_share": stats.clipped / num_tokens,
        "actor/grad_norm": stats.grad_norm,
        "actor/lr": stats.lr,
        "actor/update_ratio": stats.update_ratio,
    }


def critic_metrics(stats: CriticStats, explained_variance: float | None) -> dict[str, float]:
    """Return the critic's metrics. `explained_variance` is that of the values before the update, None where returns are
    all equal."""
    num_tokens = max(1, stats.num_tokens)
    return {
        **({} if explained_variance is None else {"critic/explained_variance": explained_variance}),
        "critic/loss": stats.loss / num_tokens,
        "critic/clipped_share": stats.clipped / num_tokens,
        "critic/grad_norm": stats.grad_norm,
        "critic/lr": stats.lr,
        "critic/update_ratio": stats.update_ratio,
    }
