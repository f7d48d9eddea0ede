"""A transformers model in this process: its weights, which may be the trainer's own, and how they sleep and wake."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Items
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from practicum.errors import RolloutError
from practicum.models import eos_ids, load_model, load_tokenizer
from practicum.replay import RouteRecorder
from practicum.replay.hooks import RouterShape
from practicum.rollout.engine.sequence import Request, Sequence, check_length, check_tokens
from practicum.rollout.engine.sleep import SleepingWeights
from practicum.weights import WeightUpdate

AGREES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""How far log-probs of a runner may be from transformers' own."""


class EngineModel:
    """The model and its weights.

    With `stays_loaded`, weights on a CPU stay in memory while it sleeps: where new ones come with every step, putting
    them away and back takes longer than it is worth. With `keep_routes` a recorder listens to its routers.
    """

    def __init__(
        self,
        path: str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        keep_routes: bool = False,
        stays_loaded: bool = False,
    ) -> None:
        self.path = path
        self.device = device
        self.tokenizer = load_tokenizer(path)
        self.module: Any = load_model(path, dtype).eval().requires_grad_(False)
        self.eos_ids = eos_ids(self.module.generation_config, self.tokenizer)
        self.version = 0
        self.recorder = RouteRecorder(self.module) if keep_routes else None
        self._stays_loaded = stays_loaded
        self._shared = False
        self._is_updated = False  # other weights than in its files
        self._sleeping: SleepingWeights | None = None  # since the first sleep of the engine's own weights

    @property
    def router_shape(self) -> RouterShape | None:
        """The shape of the routes that are kept, if any are."""
        return None if self.recorder is None else self.recorder.shape

    def check(self, request: Request) -> None:
        """Raise `RolloutError` for what the model cannot read."""
        check_length(request, max_positions(self.module.config), self.path)
        check_tokens(request, self.module.get_input_embeddings().num_embeddings, self.path)

    def gather_routes(self) -> None:
        """Append all routes that are known to their sequences: a runner may keep those of the last steps together."""

    def wake(self) -> None:
        if self._sleeping is not None:
            self._sleeping.wake()
        elif not self._shared:
            self.module.to(self.device)

    def sleep(self) -> None:
        if self._shared or (
            self._stays_loaded and self.device.type == "cpu"
        ):  # the trainer's are not ours to give back
            return
        if self._sleeping is None:
            load = partial(load_model, self.path, self.module.dtype)
            self._sleeping = SleepingWeights(self.module, self.device, load, is_as_loaded=not self._is_updated)
        self._sleeping.sleep()

    def load_weights(self, update: WeightUpdate) -> None:
        if self._sleeping is not None:
            self._sleeping.wake()  # for the buffers, which are no part of an update
        parameters = dict(self.module.named_parameters())
        self._shared = update.shared and self.module.dtype == torch.float32
        for name, tensor in update.tensors:
            parameter = parameters.pop(name)
            if self._shared:
                parameter.data = tensor
            else:
                parameter.data.copy_(tensor)
        assert not parameters or not update.is_whole, f"the update left out {', '.join(parameters)}"
        if self._shared:
            self.module.to(self.device)  # the parameters are there already; buffers such as rotary tables follow
        if self._sleeping is not None:
            self._sleeping.changed()
        self._is_updated = True
        self.version = update.version

    @torch.no_grad()
    def log_probs(self, sequences: Items[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """Return those of each token but the first given the ones before it."""
        found = []
        for ids in sequences:
            tokens = torch.from_numpy(ids.astype(np.int64)).to(self.device)
            logits = self.logits(tokens)[:-1].float()
            found.append(logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].cpu().numpy())
        return found

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits [tokens, vocabulary] of one sequence."""
        logits: Tensor = self.module(input_ids=tokens[None], use_cache=False).logits[0]
        return logits

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()


class ModelRunner(EngineModel, ABC):
    """The model with a cache of keys and values in blocks: it reads and writes what the scheduler says.

    `cache_gb` bounds the memory for keys and values; None takes a third of what is free when it first wakes. `prefill`
    and `decode` launch the drawing of one token for each sequence, `collect` returns what the oldest launch has drawn.
    A device may be as many as `num_behind` launches behind the host.
    """

    block_size: int
    prefill_tokens: int  # that are read in one pass
    grow_blocks = 1  # that a sequence gets at once
    num_behind = 0
    num_blocks: int | None = None
    """How many blocks the cache has; known when it is awake."""
    block_bytes = 0  # of each

    def __init__(self, path: str, *, max_batch: int, cache_gb: float | None, **options: Any) -> None:
        super().__init__(path, **options)
        self.max_batch = max_batch
        self.cache_gb = cache_gb

    def check(self, request: Request) -> None:
        super().check(request)
        if self.num_blocks is not None:
            num_tokens = len(request.prompt_ids) + request.params.max_new_tokens
            self.check_room(f"prompt {request.prompt.id} and its answer", num_tokens)

    def check_room(self, what: str, num_tokens: int) -> None:
        """Raise `RolloutError` where the cache has not enough blocks for so many tokens of one sequence."""
        needed, there = -(-num_tokens // self.block_size), self.num_blocks or 0
        if needed > there:
            room_gb = there * self.block_bytes / 1e9 or self.cache_gb
            raise RolloutError(
                f"{what} may take {needed * self.block_bytes / 1e9:.3g} GB of keys and values, more than "
                f"rollout.cache_gb={room_gb:.3g}: raise it, or lower rollout.max_new_tokens."
            )

    @abstractmethod
    def prefill(self, groups: list[list[Sequence]]) -> None:
        """Read what the sequences of each group have in common, which have their slots and blocks, and draw a token for
        each."""

    @abstractmethod
    def decode(self, sequences: list[Sequence], grown: list[Sequence]) -> None:
        """Draw the next token of each sequence; `grown` have got more blocks since."""

    @abstractmethod
    def collect(self) -> list[tuple[Sequence, int, float]]:
        """Return tokens and log-probs of the oldest launch, when they are there; keep its routes with the sequences."""

    @property
    @abstractmethod
    def num_in_flight(self) -> int:
        """The number of launches that are not collected."""

    @abstractmethod
    def reset(self) -> None:
        """Forget what is in flight, after a failure."""

    def unsupported(self, why: str) -> RolloutError:
        return RolloutError(
            f"the native engine does not support the model family {self.module.config.model_type!r} of {self.path!r} "
            f"({why}). Use the engine hf (rollout.engine=hf, or --engine hf), which runs every causal model of "
            "transformers."
        )


def max_positions(model_config: Any) -> int | None:
    """Return the longest sequence a model is made for; None if its config does not say."""
    longest: int | None = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return longest
