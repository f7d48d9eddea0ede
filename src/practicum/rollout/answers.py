"""What engines that draw tokens themselves have in common: when an answer ends, and the sample that it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.errors import RolloutError
from practicum.replay import decoded
from practicum.types import FinishReason, RolloutRequest, RoutedExperts, Sample, SamplingParams


def check_length(request: RolloutRequest, most_tokens: int | None, model: str) -> None:
    """Raise `RolloutError` if prompt and longest answer are more than the model has positions for."""
    num_prompt, num_new = len(request.prompt_ids), request.params.max_new_tokens
    if most_tokens is not None and num_prompt + num_new > most_tokens:
        raise RolloutError(
            f"prompt {request.prompt.id} has {num_prompt} tokens, and with max_new_tokens={num_new} the sequence would "
            f"have {num_prompt + num_new}, but model {model!r} has room for {most_tokens}: shorten the prompt or lower "
            "max_new_tokens."
        )


def check_tokens(request: RolloutRequest, vocab_size: int, model: str) -> None:
    """Raise `RolloutError` for tokens the model has no embedding of."""
    largest = int(request.prompt_ids.max(initial=0))
    if largest >= vocab_size:
        raise RolloutError(
            f"prompt {request.prompt.id} has token {largest}, but model {model!r} knows {vocab_size} tokens: the "
            "tokenizer in its folder is not the one it was made with."
        )


def most_positions(model_config: Any) -> int | None:
    """The longest sequence a model is made for; None if its config does not say."""
    longest: int | None = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return longest


def written_ids(request: RolloutRequest) -> NDArray[np.int32]:
    """Prompt, and what there is of the answer already."""
    if request.written is None:
        return request.prompt_ids
    return np.concatenate([request.prompt_ids, request.written.token_ids])


class Ending:
    """When answers with certain parameters end."""

    def __init__(self, params: SamplingParams, eos_ids: Sequence[int], tokenizer: Any) -> None:
        ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        self._stop_ids = frozenset(ids)
        self._params = params
        self._tokenizer = tokenizer
        # A stop text spans at most so many tokens: each is at least a byte, but for special ones, which have no text.
        self._span = max((len(text.encode()) for text in params.stop), default=0) + 8

    @property
    def reads_text(self) -> bool:
        """Whether the answer so far must be known, and not only its last token and length."""
        return bool(self._params.stop)

    def of(self, token: int, length: int, recent: Sequence[int] | NDArray[np.int32] = ()) -> FinishReason | None:
        """Why the answer ends with `token`, its number `length`; `recent` are its last tokens, where they are read."""
        if token in self._stop_ids:
            return "stop"
        if self._params.stop:
            text = self._tokenizer.decode(recent[-self._span :], skip_special_tokens=True)
            if any(stop in text for stop in self._params.stop):
                return "stop"
        return "length" if length >= self._params.max_new_tokens else None


def sample_of(
    request: RolloutRequest,
    token_ids: NDArray[np.int32],
    log_probs: NDArray[np.float32],
    version: int,
    reason: FinishReason,
    tokenizer: Any,
    routes: RoutedExperts | None = None,
) -> Sample:
    """From the tokens that were written now; what was written before comes in front of them."""
    versions = np.full(len(token_ids), version, np.int32)
    before = request.written
    if before is not None:
        token_ids = np.concatenate([before.token_ids, token_ids])
        log_probs = np.concatenate([before.log_probs, log_probs])
        versions = np.concatenate([before.versions, versions])
        if routes is not None and before.routes is not None:
            routes = decoded([before.routes])[0].grown(routes)
    return Sample(
        prompt=request.prompt,
        prompt_ids=request.prompt_ids,
        token_ids=token_ids,
        log_probs=log_probs,
        loss_mask=np.ones(len(token_ids), np.bool_),
        versions=versions,
        text=tokenizer.decode(token_ids, skip_special_tokens=True),
        finish_reason=reason,
        routes=routes,
    )


def untouched(request: RolloutRequest) -> Sample:
    """An answer that was broken off before anything was added to it."""
    if request.written is not None:
        return request.written
    nothing = np.empty(0, np.int32)
    mask = np.empty(0, np.bool_)
    return Sample(request.prompt, request.prompt_ids, nothing, nothing.astype(np.float32), mask, nothing, "", "abort")


def eos_ids(model: Any, tokenizer: Any) -> list[int]:
    """All tokens that end a text, by the model's generation settings and by its tokenizer."""
    declared = model.generation_config.eos_token_id
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    return sorted({int(tokenizer.eos_token_id), *map(int, declared)})
