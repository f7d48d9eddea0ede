"""What tests of replicas and their manager share: requests, a trainer's end that is a model in the test's process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from practicum.errors import WeightsGone
from practicum.models import load_model
from practicum.rollout.engines import EngineSettings
from practicum.weights import ChannelSettings, Place, Ticket, choose, open_sender

_THREADS = ThreadPoolExecutor(1)


def hf_settings(model: Path, max_batch: int = 16) -> EngineSettings:
    return EngineSettings("hf", str(model), device="cpu", max_batch=max_batch)


class ModelWeights:
    """A trainer's end: sends the weights of `model`, which a test may change."""

    def __init__(self, model_path: Path, channel: str | None = None) -> None:
        self.model = load_model(str(model_path)).eval().requires_grad_(False)
        self.num_sent = 0
        self._num_learnt = 0
        self._sent = (-1, 0)
        self._channel = channel

    def open(self, engines: Sequence[Place]) -> None:
        settings = ChannelSettings(timeout_s=30.0, num_receivers=len(engines))
        self._sender = open_sender(self._channel or choose(Place.here(), engines), settings)

    def invite(self, version: int, num_receivers: int) -> Ticket | None:
        if self._sent[0] == version and self._sent[1] != self._num_learnt:
            raise WeightsGone(f"weights of version {version} are gone")
        return self._sender.invite(version, num_receivers)

    def send(self, version: int) -> Callable[[], Ticket]:
        self.num_sent += 1
        self._sent = (version, self._num_learnt)
        sending = _THREADS.submit(self._sender.send, version, self.model.named_parameters())
        return sending.result

    def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        with torch.no_grad():
            return [self._log_probs(torch.from_numpy(ids.astype(np.int64))) for ids in sequences]

    def _log_probs(self, ids: torch.Tensor) -> NDArray[np.float32]:
        logits = self.model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        found: NDArray[np.float32] = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy()
        return found

    def nudge(self) -> None:
        """As if it had learnt something."""
        self._num_learnt += 1
        for parameter in self.model.parameters():
            parameter.mul_(1.01)
