"""The critic: one rank of a model that says, before each token, what the answer is going to be worth.

    values before the update ─▶ (advantages and returns, on the driver) ─▶ clipped squared error ─▶ AdamW

It is sharded as the actor is, among the same ranks when it shares their processes. Its routers, if it has any, choose
for themselves: nothing is replayed to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from practicum.algo import clipped_value_loss
from practicum.data import MicroBatch, pack
from practicum.models import DTYPES, load_model
from practicum.train.batch import MiniBatch, by_id, model_inputs, on_device, spans_of
from practicum.train.checkpoint import load_weights, save_weights
from practicum.train.cuda import speed_up
from practicum.train.fsdp import ModelWorker, reshard
from practicum.train.learner import Learner, LearnerSettings
from practicum.train.model import ValueModel, supports_packing


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings(LearnerSettings):
    """The settings of a `CriticWorker`; see the config for what each means."""

    value_clip: float


@dataclass(slots=True)
class CriticStats:
    """The sums over the learnt tokens of a step on one rank, except where it says otherwise."""

    num_tokens: int = 0
    loss: float = 0.0
    clipped: float = 0.0
    grad_norm: float = 0.0  # mean over the updates, the same on all ranks
    lr: float = 0.0  # of the last update
    update_ratio: float = 0.0  # largest of the updates: their change over the weights, in norms

    @classmethod
    def combined(cls, ranks: Sequence[CriticStats]) -> CriticStats:
        """Return the sums over all ranks."""
        return cls(
            num_tokens=sum(stats.num_tokens for stats in ranks),
            loss=sum(stats.loss for stats in ranks),
            clipped=sum(stats.clipped for stats in ranks),
            grad_norm=ranks[0].grad_norm,
            lr=ranks[0].lr,
            update_ratio=ranks[0].update_ratio,
        )


class CriticWorker(ModelWorker):
    def __init__(self, settings: CriticSettings) -> None:
        super().__init__(settings)
        self._settings = settings
        model = load_model(settings.model_path).train()  # checkpointing looks at the mode; there is no dropout
        self._packing = supports_packing(model)
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._model = ValueModel(model)
        mesh = self.join()
        self._model.is_fast = speed_up(model, self._device, DTYPES[settings.compute_dtype])
        self._learner = Learner("critic", self._model, self._model.body, mesh, settings)

    @torch.no_grad()
    def values(self, mini_batches: Sequence[MiniBatch]) -> dict[str, NDArray[np.float32]]:
        """Return what it expects before each token of the samples of a step, by their ids."""
        found: dict[str, NDArray[np.float32]] = {}
        for samples in (micro for batch in mini_batches for micro in batch.micro_batches):
            packed = pack(samples, self._packing)
            found |= by_id(samples, packed, self._forward(packed))
        reshard(self._model)
        return found

    def update(self, mini_batches: Sequence[MiniBatch], step: int = 1) -> CriticStats:
        """Learn from the returns of a step, one optimizer update per mini-batch and epoch."""
        stats = CriticStats()
        work = [[pack(micro, self._packing) for micro in batch.micro_batches] for batch in mini_batches]
        for _ in range(self._settings.epochs):
            for batch, micros in zip(mini_batches, work, strict=True):
                for micro in micros:
                    loss = self._loss(micro, stats) / max(1, batch.totals.num_tokens)
                    (loss * self.world_size).backward()  # FSDP averages gradients over ranks
                size = self._learner.step(step)
                stats.grad_norm += size.grad_norm / (len(mini_batches) * self._settings.epochs)
                stats.lr, stats.update_ratio = size.lr, max(size.ratio, stats.update_ratio)
        return stats

    def save(self, folder: str) -> None:
        """Write weights, optimizer and random state into `folder`/critic."""
        own = Path(folder) / "critic"
        own.mkdir(exist_ok=True)
        save_weights(self._model, own, self.rank)
        self._learner.save(own, self.rank)

    def load(self, folder: str) -> None:
        """Restore what `save` wrote."""
        load_weights(self._model, Path(folder) / "critic")
        self._learner.load(Path(folder) / "critic", self.rank)

    def _forward(self, micro: MicroBatch) -> Tensor:
        spans = spans_of(micro.position_ids, self._device) if self._model.is_fast else {}
        values: Tensor = self._model(*model_inputs(micro, self._device)[:3], **spans)
        return values

    def _loss(self, micro: MicroBatch, stats: CriticStats) -> Tensor:
        """Return the sum over the tokens of a micro-batch."""
        values = self._forward(micro)
        before, returns = on_device(micro.values, self._device), on_device(micro.returns, self._device)
        losses, clipped = clipped_value_loss(values, before, returns, self._settings.value_clip)
        stats.num_tokens += len(losses)
        stats.loss += losses.detach().sum().item()
        stats.clipped += clipped.sum().item()
        return losses.sum()
