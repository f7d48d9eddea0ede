"""One answer being written: its tokens and log-probs, its random numbers, when it ends, and the sample it becomes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from practicum.errors import RolloutError
from practicum.replay import decoded
from practicum.replay.hooks import RouterShape
from practicum.types import FinishReason, Prompt, PromptGroup, RoutedExperts, Sample, SamplingParams, Trajectory


class Request(Protocol):
    """The part of a request that tells an engine whether it can answer: a `PromptGroup` or a `Sequence`."""

    @property
    def prompt(self) -> Prompt: ...
    @property
    def prompt_ids(self) -> NDArray[np.int32]: ...
    @property
    def params(self) -> SamplingParams: ...


class Sequence:
    """One answer being written, known by the object itself.

    `seed` and `number` decide its random numbers, whatever else is in the batch. `written` is what there is of the
    answer already: it is continued as if it had never been aborted. `on_tokens` is called on the event loop with
    new tokens and their log-probs.
    """

    __slots__ = (
        "_ending", "_uniforms", "blocks", "done", "finish_reason", "is_aborted", "log_probs", "max_tokens",
        "num_launched", "num_tokens", "num_written", "number", "on_tokens", "params", "prompt", "prompt_ids", "routes",
        "seed", "session", "slot", "token_ids", "written",
    )  # fmt: skip

    def __init__(
        self,
        prompt: Prompt,
        prompt_ids: NDArray[np.int32],
        params: SamplingParams,
        seed: int,
        number: int = 0,
        *,
        written: Sample | None = None,
        session: str | None = None,
        on_tokens: Callable[[list[int], list[float]], None] | None = None,
    ) -> None:
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.params = params
        self.seed = seed
        self.number = number
        self.session = session
        self.on_tokens = on_tokens
        self.max_tokens = len(prompt_ids) + params.max_new_tokens  # of prompt and answer
        self.done: asyncio.Future[Sample]  # made when it is submitted; the engine sets its result
        self.is_aborted = False  # by request: it is not continued
        self._ending: Ending | None = None
        self._uniforms: list[float] | None = None
        self.continue_from(written)

    @classmethod
    def of(
        cls,
        group: PromptGroup,
        trajectory: Trajectory,
        on_tokens: Callable[[list[int], list[float]], None] | None = None,
    ) -> Sequence:
        """Return the answer that a trajectory lacks: a new one, or what continues its aborted sample."""
        written = trajectory.samples[-1] if trajectory.samples and not trajectory.is_finished else None
        return cls(
            group.prompt,
            group.prompt_ids,
            group.params,
            group.seed,
            trajectory.number,
            written=written,
            session=group.session,
            on_tokens=on_tokens,
        )

    def continue_from(self, written: Sample | None) -> None:
        """Begin again after a sample of this answer, or anew; the sequence can then be submitted again."""
        self.written = written
        self.num_written = 0 if written is None else len(written.token_ids)
        self.token_ids: list[int] = []  # those that come after `written`, as do the log-probs
        self.log_probs: list[float] = []
        self.routes: list[NDArray[np.unsignedinteger[Any]]] = []  # [tokens, layers, k], ascending, from the start
        self.num_tokens = len(self.prompt_ids) + self.num_written  # of prompt and answer so far
        self.finish_reason: FinishReason | None = None
        # The scheduler's and the model runner's:
        self.blocks: list[int] = []  # of keys and values
        self.slot = -1  # of its own among those running
        self.num_launched = 0  # tokens that the device was asked for and the host has not read

    @property
    def is_begun(self) -> bool:
        """Tell whether there is a token of it, or one on its way."""
        return self.num_tokens > len(self.prompt_ids) or self.num_launched > 0

    # What is read before the next token

    @property
    def num_routed(self) -> int:
        """The number of tokens whose routes are known."""
        return sum(map(len, self.routes))

    @property
    def ids(self) -> NDArray[np.int32]:
        """Prompt and answer so far."""
        if self.written is None and not self.token_ids:
            return self.prompt_ids
        written = () if self.written is None else (self.written.token_ids,)
        return np.concatenate([self.prompt_ids, *written, np.array(self.token_ids, np.int32)])

    def shares_prompt(self, other: Sequence) -> bool:
        """Return whether both begin with the same tokens, which then are read once. Sequences of one group do."""
        if self.written is not None or other.written is not None or self.token_ids or other.token_ids:
            return False
        return self.prompt_ids is other.prompt_ids or np.array_equal(self.prompt_ids, other.prompt_ids)

    def uniform(self) -> float:
        """Return the random number in [0, 1) of the next token."""
        if self._uniforms is None:
            self._uniforms = uniforms(self.seed, self.number, self.params.max_new_tokens).tolist()
        return self._uniforms[self.num_written + len(self.token_ids)]

    # Growing and ending

    def begin(self, eos_ids: Iterable[int], tokenizer: Any) -> None:
        """Set the model's end-of-text tokens, and the tokenizer that reads the text where that can end the answer."""
        self._ending = Ending(self.params, eos_ids, tokenizer)

    def push(self, token: int, log_prob: float) -> FinishReason | None:
        """Append a token; return why the answer ends with it, or None."""
        assert self._ending is not None, "push before begin"
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        self.num_tokens += 1
        recent: Items[int] = ()
        if self.params.stop:
            recent = self.token_ids if self.written is None else [*self.written.token_ids.tolist(), *self.token_ids]
        self.finish_reason = self._ending.of(token, self.num_written + len(self.token_ids), recent)
        return self.finish_reason

    def to_sample(
        self,
        tokenizer: Any,
        versions: int | Items[int],
        finish_reason: FinishReason | None = None,
        routes: RoutedExperts | None = None,
    ) -> Sample:
        """Return the sample of the whole answer, with what was written before it was submitted.

        `versions` are those of the new tokens, `finish_reason` is "abort" where it has not ended by itself.
        """
        written, num = self.written, len(self.token_ids)
        reason = finish_reason or self.finish_reason or "abort"
        if num == 0 and written is not None and reason == "abort":
            return written
        token_ids, log_probs = np.array(self.token_ids, np.int32), np.array(self.log_probs, np.float32)
        own = np.full(num, versions, np.int32) if isinstance(versions, int) else np.array(versions, np.int32)
        if written is not None:
            token_ids = np.concatenate([written.token_ids, token_ids])
            log_probs = np.concatenate([written.log_probs, log_probs])
            own = np.concatenate([written.versions, own])
            if routes is not None and written.routes is not None:
                routes = decoded([written.routes])[0].grown(routes)
        return Sample(
            prompt=self.prompt,
            prompt_ids=self.prompt_ids,
            token_ids=token_ids,
            log_probs=log_probs,
            loss_mask=np.ones(len(token_ids), np.bool_),
            versions=own,
            text=tokenizer.decode(token_ids, skip_special_tokens=True) if len(token_ids) else "",
            finish_reason=reason,
            routes=routes if len(token_ids) else None,
        )

    def routed_experts(self, shape: RouterShape) -> RoutedExperts | None:
        """Return the routes of prompt and answer: all but those of the last token, which has been through no layer."""
        if not self.token_ids or not self.routes:
            return None
        num_tokens = self.num_tokens
        experts = np.concatenate(self.routes)
        known = np.ones(num_tokens, np.bool_)
        known[len(experts) :] = False
        blank = np.zeros((num_tokens - len(experts), *experts.shape[1:]), experts.dtype)
        return RoutedExperts(np.concatenate([experts, blank]), shape.layers, known, shape.num_experts)


class Ending:
    """The rule by which answers with certain parameters end."""

    def __init__(self, params: SamplingParams, eos_ids: Iterable[int], tokenizer: Any) -> None:
        self._stop_ids = frozenset({*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)})
        self._params = params
        self._tokenizer = tokenizer
        # A stop text spans at most so many tokens: each is at least a byte, but for special ones, which have no text.
        self._span = max((len(text.encode()) for text in params.stop), default=0) + 8

    def of(self, token: int, length: int, recent: Items[int] | NDArray[np.int32] = ()) -> FinishReason | None:
        """Return why the answer ends with `token`, its number `length`, or None; `recent` are its last tokens, where
        they are read."""
        if token in self._stop_ids:
            return "stop"
        if self._params.stop:
            text = self._tokenizer.decode(recent[-self._span :], skip_special_tokens=True)
            if any(stop in text for stop in self._params.stop):
                return "stop"
        return "length" if length >= self._params.max_new_tokens else None


def uniforms(seed: int, number: int, length: int) -> NDArray[np.float32]:
    """Return so many random numbers in [0, 1), which depend on the request's seed and the answer's number alone."""
    return np.random.Generator(np.random.Philox(key=np.array((seed, number), np.uint64))).random(length, np.float32)


def check_length(request: Request, max_tokens: int | None, model: str) -> None:
    """Raise `RolloutError` if prompt and longest answer are more than the model has positions for."""
    num_prompt, num_new = len(request.prompt_ids), request.params.max_new_tokens
    if max_tokens is not None and num_prompt + num_new > max_tokens:
        raise RolloutError(
            f"prompt {request.prompt.id} has {num_prompt} tokens, and with max_new_tokens={num_new} the sequence would "
            f"have {num_prompt + num_new}, but model {model!r} has room for {max_tokens}: shorten the prompt or lower "
            "max_new_tokens."
        )


def check_tokens(request: Request, vocab_size: int, model: str) -> None:
    """Raise `RolloutError` for tokens the model has no embedding of."""
    largest = int(request.prompt_ids.max(initial=0))
    if largest >= vocab_size:
        raise RolloutError(
            f"prompt {request.prompt.id} has token {largest}, but model {model!r} knows {vocab_size} tokens: the "
            "tokenizer in its folder is not the one it was made with."
        )
