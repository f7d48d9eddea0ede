"""The roles that learn and those they are compared with, and what each does in a step.

    reference log-probs, values ─▶ (advantages) ─▶ critic: values towards returns ─▶ actor: policy towards advantages

All are given the same mini-batches, split over ranks and micro-batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from practicum.algo import AdaptiveKL
from practicum.config import Config
from practicum.controller import WorkerGroup
from practicum.data import plan_micro_batches
from practicum.loop.advantages import Learnable, variance_explained
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
    references: WorkerGroup[ReferenceWorker] | None  # None too where it is the actor without its adapters


class Learners:
    def __init__(self, config: Config, groups: LearningGroups, support_packing: bool) -> None:
        self._config = config
        self._actors, self._critics, self._references = groups.actors, groups.critics, groups.references
        self.support_packing = support_packing
        kl = config.algorithm.kl
        self._kl = AdaptiveKL(kl.coefficient, kl.target) if kl.target is not None else None

    @classmethod
    async def of(cls, config: Config, groups: LearningGroups) -> Learners:
        """Ask the models whether they take several samples in one row, and return the learners."""
        asked = [groups.actors.execute_rank_zero_async(ActorWorker.supports_packing)]
        if groups.critics is not None:
            asked.append(groups.critics.execute_rank_zero_async(CriticWorker.supports_packing))
        if groups.references is not None:
            asked.append(groups.references.execute_rank_zero_async(ReferenceWorker.supports_packing))
        return cls(config, groups, all(await asyncio.gather(*asked)))

    @property
    def kl_coefficient(self) -> float:
        """The coefficient as it stands."""
        return self._config.algorithm.kl.coefficient if self._kl is None else self._kl.coefficient

    async def add_reference_and_values(self, learnt: Learnable) -> None:
        """Fill in reference log-probs and the critic's values, where the algorithm wants them."""
        samples = {sample.id: sample for own in learnt for sample in own}
        if self._config.algorithm.kl.coefficient > 0:
            for name, array in (await _joined(self._reference_log_probs(self._mini_batches(learnt)))).items():
                samples[name].reference_log_probs = array
        if self._critics is not None:
            values = self._critics.map_async(CriticWorker.values, self._mini_batches(learnt))
            for name, array in (await _joined(values)).items():
                samples[name].values = array

    def _reference_log_probs(self, ranks: list[list[MiniBatch]]) -> Awaitable[list[dict[str, NDArray[np.float32]]]]:
        if self._references is None:
            return self._actors.map_async(ActorWorker.base_log_probs, ranks)
        return self._references.map_async(ReferenceWorker.log_probs, ranks)

    async def update(self, step: int, learnt: Learnable) -> dict[str, float]:
        """Make the updates of a step; return their metrics."""
        ranks = self._mini_batches(learnt)
        metrics: dict[str, float] = {}
        if self._critics is not None:
            critic = CriticStats.combined(await self._critics.map_async(CriticWorker.update, ranks, step))
            metrics |= critic_metrics(critic, variance_explained(learnt))
        coefficient, learns = self.kl_coefficient, step > self._config.critic.warmup_steps
        actor = await self._actors.map_async(ActorWorker.update, ranks, step, coefficient, learns)
        stats = UpdateStats.combined(actor)
        metrics |= update_metrics(stats)
        if stats.reference_kl is not None:
            metrics |= {"actor/kl_coefficient": coefficient}
            if self._kl is not None:
                self._kl.update(stats.reference_kl / max(1, stats.num_tokens))
        return metrics

    async def begin_at(self, step: int) -> None:
        """Say which step comes first."""
        await self._actors.execute_all_async(ActorWorker.begin_at, step)

    async def save(self, folder: Path) -> None:
        await self._actors.execute_all_async(ActorWorker.save, str(folder.resolve()))
        if self._critics is not None:
            await self._critics.execute_all_async(CriticWorker.save, str(folder.resolve()))

    async def load(self, folder: Path, kl_coefficient: float | None) -> None:
        """Restore what `save` wrote, and the coefficient as it stood then."""
        await self._actors.execute_all_async(ActorWorker.load, str(folder.resolve()))
        if self._critics is not None:
            await self._critics.execute_all_async(CriticWorker.load, str(folder.resolve()))
        if self._kl is not None and kl_coefficient is not None:
            self._kl.coefficient = kl_coefficient

    def _mini_batches(self, learnt: Learnable) -> list[list[MiniBatch]]:
        """Return the mini-batches of each rank. The answers to one prompt stay in one mini-batch."""
        config, actor = self._config, self._config.actor
        per_mini_batch = config.data.prompts_per_step // actor.mini_batches
        longest = config.algorithm.constant_tokens or config.rollout.max_new_tokens
        groups = [own for own in learnt if own]
        num_samples = sum(map(len, groups))
        ranks: list[list[MiniBatch]] = [[] for _ in range(config.trainer.num_workers)]
        for start in range(0, len(groups), per_mini_batch):
            members = [sample for own in groups[start : start + per_mini_batch] for sample in own]
            lengths = [sample.num_tokens for sample in members]
            plans = plan_micro_batches(lengths, len(ranks), actor.micro_batch_tokens, self.support_packing)
            for rank, plan in enumerate(plans):
                micro_batches = [[members[i] for i in micro] for micro in plan]
                ranks[rank].append(MiniBatch(micro_batches, totals_of(members, longest), num_samples))
        return ranks


async def _joined(
    ranks: Awaitable[list[dict[str, NDArray[np.float32]]]],
) -> dict[str, NDArray[np.float32]]:
    return {name: array for rank in await ranks for name, array in rank.items()}
