"""The rollout role of a worker: holds one engine and fetches its weights from the trainer beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from practicum.controller import Worker
from practicum.models import DTYPES, resolve_device
from practicum.rollout.base import BaseRollout
from practicum.types import RolloutRequest, Sample
from practicum.weights import WeightSource


def _hf(**settings: Any) -> BaseRollout:
    from practicum.rollout.hf import HFRollout

    return HFRollout(**settings)


ENGINES: dict[str, Callable[..., BaseRollout]] = {"hf": _hf}


class RolloutWorker(Worker):
    """Hybrid placement: fused with the worker under the role `weights_from`, whose weights the engine writes with."""

    def __init__(
        self, *, engine: str, model_path: str, device: str, dtype: str, max_batch: int, weights_from: str
    ) -> None:
        self._engine = ENGINES[engine](
            model_path=model_path, device=resolve_device(device), dtype=DTYPES[dtype], max_batch=max_batch
        )
        self._weights_from = weights_from

    def update_weights(self, version: int) -> None:
        source = cast(WeightSource, self.siblings[self._weights_from])
        self._engine.update_weights(source.publish(version))

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Sample]:
        """Clock in, write, clock out."""
        self._engine.resume()
        try:
            return self._engine.generate(requests)
        finally:
            self._engine.release()
