"""The reference: one rank of a frozen model that the policy is kept near. It says how probable it finds the answers.

Its routers, if it has any, choose for themselves: nothing is replayed to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from practicum.data import pack
from practicum.models import DTYPES, load_model
from practicum.train.batch import MiniBatch, by_id, model_inputs, spans_of
from practicum.train.cuda import speed_up
from practicum.train.fsdp import ModelSettings, ModelWorker, reshard, shard
from practicum.train.model import LogProbModel, supports_packing


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSettings(ModelSettings):
    """The settings of a `ReferenceWorker`; see the config for what each means."""

    temperature: float


class ReferenceWorker(ModelWorker):
    def __init__(self, settings: ReferenceSettings) -> None:
        super().__init__(settings)
        self._settings = settings
        model = load_model(settings.model_path).eval().requires_grad_(False)
        self._packing = supports_packing(model)
        self._model = LogProbModel(model)
        mesh = self.join()
        self._model.is_fast = speed_up(model, self._device, DTYPES[settings.compute_dtype])
        shard(self._model, model, mesh, DTYPES[settings.compute_dtype])

    def log_probs(self, mini_batches: Sequence[MiniBatch]) -> dict[str, NDArray[np.float32]]:
        """Return the log-probs of the answers of a step, by the ids of the samples."""
        return log_probs_by_id(self._model, mini_batches, self._settings.temperature, self._device, self._packing)


@torch.no_grad()
def log_probs_by_id(
    model: LogProbModel,
    mini_batches: Sequence[MiniBatch],
    temperature: float,
    device: torch.device,
    packing: bool,
) -> dict[str, NDArray[np.float32]]:
    """Return the log-probs of the answers of a step, by the ids of the samples. All ranks must call it."""
    found: dict[str, NDArray[np.float32]] = {}
    for samples in (micro for batch in mini_batches for micro in batch.micro_batches):
        packed = pack(samples, packing)
        spans = spans_of(packed.position_ids, device) if model.is_fast else {}
        log_probs, _ = model(*model_inputs(packed, device), temperature, **spans)
        found |= by_id(samples, packed, log_probs)
    reshard(model)
    return found
