"""The roles that learn and those they look to, and what each gets of a step.

    reference log-probs, values ─▶ (advantages) ─▶ critic: values towards returns ─▶ actor: policy towards advantages

All are given the same mini-batches, dealt out to ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from practicum.algo import AdaptiveKL
from practicum.config import Config
from practicum.controller import WorkerGroup
from practicum.data import plan_micro_batches
from practicum.loop.advantages import Batch, variance_explained
from practicum.loop.metrics import critic_metrics, update_metrics
from practicum.train import (
    ActorWorker,
    CriticStats,
    CriticWorker,
    MiniBatch,
    ReferenceWorker,
    UpdateStats,
    totals_of,
)


@dataclass(frozen=True, slots=True)
class LearningGroups:
    """One worker a rank each, in the same processes or in others."""

    actors: WorkerGroup[ActorWorker]
    critics: WorkerGroup[CriticWorker] | None
    references: WorkerGroup[ReferenceWorker] | None
    """None where there is none, or where it is the actor without its adapters."""


class Learners:
    def __init__(self, config: Config, groups: LearningGroups) -> None:
        self._config = config
        self._actors, self._critics, self._references = groups.actors, groups.critics, groups.references
        self.share_rows = self._actors.execute_rank_zero(ActorWorker.shares_rows)
        if self._critics is not None:
            self.share_rows &= self._critics.execute_rank_zero(CriticWorker.shares_rows)
        if self._references is not None:
            self.share_rows &= self._references.execute_rank_zero(ReferenceWorker.shares_rows)
        kl = config.algorithm.kl
        self._kl = AdaptiveKL(kl.coefficient, kl.target) if kl.target is not None else None

    @property
    def kl_coefficient(self) -> float:
        """As it stands."""
        return self._config.algorithm.kl.coefficient if self._kl is None else self._kl.coefficient

    def look(self, batch: Batch, groups: NDArray[np.int64]) -> Batch:
        """Samples with what models that are not learning have to say of them, where the algorithm wants it."""
        if self._config.algorithm.kl.coefficient > 0:
            said = _joined(self._reference_log_probs(self._shared_out(batch, groups)))
            batch = [item and replace(item, reference_log_probs=said[item.place]) for item in batch]
        if self._critics is not None:
            said = _joined(self._critics.map(CriticWorker.values, self._shared_out(batch, groups)))
            batch = [item and replace(item, values=said[item.place]) for item in batch]
        return batch

    def _reference_log_probs(self, shared: list[list[MiniBatch]]) -> list[dict[int, NDArray[np.float32]]]:
        if self._references is None:
            return self._actors.map(ActorWorker.base_log_probs, shared)
        return self._references.map(ReferenceWorker.log_probs, shared)

    def learn(self, number: int, batch: Batch, groups: NDArray[np.int64]) -> dict[str, float]:
        """One step's updates, and their metrics."""
        shared = self._shared_out(batch, groups)
        metrics: dict[str, float] = {}
        if self._critics is not None:
            learnt = CriticStats.combined(self._critics.map(CriticWorker.update, shared))
            metrics |= critic_metrics(learnt, variance_explained(batch))
        coefficient, learns = self.kl_coefficient, number > self._config.critic.warmup_steps
        stats = UpdateStats.combined(self._actors.map(ActorWorker.update, shared, number, coefficient, learns))
        metrics |= update_metrics(stats)
        if stats.reference_kl is not None:
            metrics |= {"actor/kl_coefficient": coefficient}
            if self._kl is not None:
                self._kl.update(stats.reference_kl / max(1, stats.num_tokens))
        return metrics

    def begin_at(self, number: int) -> None:
        """Which step comes first."""
        self._actors.execute_all(ActorWorker.begin_at, number)

    def save(self, folder: Path) -> None:
        self._actors.execute_all(ActorWorker.save, str(folder.resolve()))
        if self._critics is not None:
            self._critics.execute_all(CriticWorker.save, str(folder.resolve()))

    def load(self, folder: Path, kl_coefficient: float | None) -> None:
        """What `save` wrote, and the coefficient as it stood then."""
        self._actors.execute_all(ActorWorker.load, str(folder.resolve()))
        if self._critics is not None:
            self._critics.execute_all(CriticWorker.load, str(folder.resolve()))
        if self._kl is not None and kl_coefficient is not None:
            self._kl.coefficient = kl_coefficient

    def _shared_out(self, batch: Batch, groups: NDArray[np.int64]) -> list[list[MiniBatch]]:
        """The mini-batches of each rank. Answers to one prompt stay in one mini-batch."""
        config = self._config
        actor, num_ranks = config.actor, config.trainer.num_workers
        per_mini_batch = config.data.prompts_per_step // actor.mini_batches
        longest = config.algorithm.constant_tokens or config.rollout.max_new_tokens
        ranks: list[list[MiniBatch]] = [[] for _ in range(num_ranks)]
        for mini_batch in range(actor.mini_batches):
            members = [s for s, g in zip(batch, groups, strict=True) if s and g // per_mini_batch == mini_batch]
            if not members:
                continue
            totals = totals_of(members, longest)
            lengths = [member.sample.num_tokens for member in members]
            plans = plan_micro_batches(lengths, num_ranks, actor.micro_batch_tokens, self.share_rows)
            for rank, plan in enumerate(plans):
                ranks[rank].append(MiniBatch([[members[i] for i in micro] for micro in plan], totals))
        return ranks


def _joined(ranks: Iterable[Mapping[int, NDArray[np.float32]]]) -> dict[int, NDArray[np.float32]]:
    return {place: array for rank in ranks for place, array in rank.items()}
