"""What every engine must be able to do: clock in, write, clock out, take new weights.

Contract:
- Token in, token out. `generate` returns `num_answers` samples per request, in the order of the requests.
- The answers to a request depend on its prompt, its sampling parameters, its seed and the weights; never on what else
  is in the batch (up to floating-point order).
- `log_probs` are those of the drawn tokens under `softmax(logits / temperature)`, before top-k and top-p; with
  temperature 0 the largest logit wins and log-probs are those of temperature 1.
- `release` gives memory back; after `resume` the engine writes as before. `generate` needs a resumed engine.
- After `update_weights` every token carries the new version.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from practicum.types import RolloutRequest, Sample
from practicum.weights import WeightUpdate


class BaseRollout(ABC):
    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def generate(self, requests: Sequence[RolloutRequest]) -> list[Sample]: ...

    @abstractmethod
    def release(self) -> None: ...

    @abstractmethod
    def update_weights(self, update: WeightUpdate) -> None: ...
