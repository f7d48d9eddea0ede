"""What the engines that hold a transformers model themselves share: the model, its weights, and where they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from practicum.models import load_model, load_tokenizer
from practicum.rollout.answers import check_length, check_tokens, eos_ids, most_positions
from practicum.rollout.base import BaseRollout
from practicum.rollout.sleeping import SleepingWeights
from practicum.types import RolloutRequest
from practicum.weights import WeightUpdate


class OwnModelRollout(BaseRollout):
    """With `stays_loaded`, weights on a CPU stay in memory while it is released: where new ones come with every step,
    putting them away and back takes longer than it is worth."""

    def __init__(
        self, model_path: str, *, device: torch.device, dtype: torch.dtype, stays_loaded: bool = False
    ) -> None:
        self._stays_loaded = stays_loaded and device.type == "cpu"
        self._path = model_path
        self._device = device
        self._tokenizer = load_tokenizer(model_path)
        self._model = load_model(model_path, dtype).eval().requires_grad_(False)
        self.eos_ids = eos_ids(self._model, self._tokenizer)
        self._version = 0
        self._shared = False
        self._awake = False
        self._is_updated = False  # other weights than in its files
        self._sleeping: SleepingWeights | None = None  # since the first release of weights of our own

    def resume(self) -> None:
        if self._sleeping is not None:
            self._sleeping.wake()
        elif not self._shared:
            self._model.to(self._device)
        self._awake = True

    def release(self) -> None:
        if not (self._shared or self._stays_loaded):  # those of the trainer are not ours to give back
            if self._sleeping is None:
                load = partial(load_model, self._path, self._model.dtype)
                self._sleeping = SleepingWeights(self._model, self._device, load, is_as_loaded=not self._is_updated)
            self._sleeping.sleep()
        self._awake = False

    def update_weights(self, update: WeightUpdate) -> None:
        if self._sleeping is not None:
            self._sleeping.wake()  # for the buffers, which are no part of an update
        parameters = dict(self._model.named_parameters())
        self._shared = update.shared and self._model.dtype == torch.float32
        for name, tensor in update.tensors:
            parameter = parameters.pop(name)
            if self._shared:
                parameter.data = tensor
            else:
                parameter.data.copy_(tensor)
        assert not parameters or not update.is_whole, f"the update left out {', '.join(parameters)}"
        if self._shared:
            self._model.to(self._device)  # the parameters are there already; buffers such as rotary tables follow
        if self._sleeping is not None:
            self._sleeping.changed()
        self._is_updated = True
        self._version = update.version

    def check(self, request: RolloutRequest) -> None:
        check_length(request, most_positions(self._model.config), self._path)
        check_tokens(request, self._model.get_input_embeddings().num_embeddings, self._path)

    @torch.no_grad()
    def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        assert self._awake, "log_probs before resume"
        found = []
        for ids in sequences:
            tokens = torch.from_numpy(ids.astype(np.int64)).to(self._device)
            logits = self._logits(tokens)[:-1].float()
            found.append(logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].cpu().numpy())
        return found

    def _logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of one sequence, [tokens, vocabulary]."""
        logits: torch.Tensor = self._model(input_ids=tokens[None], use_cache=False).logits[0]
        return logits
