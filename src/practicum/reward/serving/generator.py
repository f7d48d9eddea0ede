"""A causal model that writes judgements: the rollout's transformers engine, with weights that can sleep."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from practicum.models import load_model, load_tokenizer
from practicum.reward.serving.texts import Encoder, Limit
from practicum.reward.serving.weights import SleepingWeights
from practicum.rollout.hf import HFRollout
from practicum.types import RolloutRequest, Sample


class Generator(HFRollout):
    """Awake while its weights are."""

    def __init__(self, path: str, *, device: torch.device, dtype: torch.dtype, max_batch_tokens: int) -> None:
        super().__init__(path, device=device, dtype=dtype, max_batch=1)
        self._max_batch_tokens = max_batch_tokens
        tokenizer = load_tokenizer(path)  # another than the engine's: prompts are encoded while it writes
        self.encoder = Encoder(tokenizer)
        self.limit = Limit.of(self._model.config, tokenizer, max_batch_tokens)
        self.weights = SleepingWeights(self._model, device, lambda: load_model(path, dtype))
        self._awake = self.weights.is_awake

    def resume(self) -> None:
        self.weights.wake()
        self._awake = True

    def release(self) -> None:
        self._awake = False
        self.weights.sleep()

    def answers(self, requests: Sequence[RolloutRequest]) -> list[list[Sample] | Exception]:
        """The samples of each request. All have the same parameters; as many rows at a time as the tokens allow."""
        params = requests[0].params
        widest = max(len(request.prompt_ids) for request in requests) + params.max_new_tokens
        self._max_batch = max(1, self._max_batch_tokens // widest)
        samples = self.generate(requests)
        num = params.num_answers
        return [samples[start : start + num] for start in range(0, len(samples), num)]
