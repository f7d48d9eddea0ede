"""What every engine must be able to do: clock in, write, clock out, take new weights.

Contract, tested for every engine by tests/rollout/contract.py:
- Token in, token out. `generate` returns `num_answers` samples per request, in the order of the requests.
- The answers to a request depend on its prompt, its sampling parameters, its seed and the weights; never on what else
  is in the batch (up to floating-point order). Engines that draw by themselves (vllm, openai) repeat themselves for
  the same seed, but need not agree with the others.
- `log_probs` are those of the drawn tokens under `softmax(logits / temperature)`, before top-k and top-p; with
  temperature 0 the largest logit wins and log-probs are those of temperature 1.
- An answer ends with `stop` after an end-of-text token, one of `stop_token_ids`, or the token that completes one of the
  texts in `stop`, all of which stay in it; with `length` after `max_new_tokens`; with `abort` where it was broken off.
- `abort` may be called from another thread: `generate` returns at once, with what there is of each answer. A request
  made by `going_on` continues an answer, and ends as if it had never been broken off.
- `release` gives memory back; after `resume` the engine writes as before. All else needs a resumed engine.
- After `update_weights` every new token carries the new version; it is not called while answers are written.
- Bad requests (too long for the model, say) raise `RolloutError` before anything is written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from practicum.rollout.inbox import Inbox, Ticket
from practicum.types import RolloutRequest, Sample
from practicum.weights import WeightUpdate


class BaseRollout(ABC):
    eos_ids: Sequence[int]
    """The tokens that end a text."""
    takes_adapters: bool = False
    """Whether `update_weights` takes adapters that come alone, where it was made with them; or weights only."""
    _inbox: Inbox | None = None  # of the `generate` under way

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def release(self) -> None: ...

    @abstractmethod
    def update_weights(self, update: WeightUpdate) -> None: ...

    @abstractmethod
    def check(self, request: RolloutRequest) -> None:
        """Raise `RolloutError` where it cannot be answered by this engine, whatever else it has to do."""

    @abstractmethod
    def write(self, inbox: Inbox) -> None:
        """Answer what is in the inbox and what comes meanwhile, until it is over and all is written or broken off.

        Requests have been checked. A failure of the engine itself is raised; tickets with open answers then have none.
        """

    @abstractmethod
    def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """Of each token but the first given those before it, at temperature 1: what a fingerprint compares."""

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Sample]:
        """The answers to all requests."""
        for request in requests:
            self.check(request)
        self._inbox = inbox = Inbox()
        answers: list[list[Sample | None]] = [[None] * request.params.num_answers for request in requests]
        for request, own in zip(requests, answers, strict=True):
            inbox.put(Ticket(request, own.__setitem__))
        inbox.close()
        try:
            self.write(inbox)
        finally:
            self._inbox = None
        samples = [sample for own in answers for sample in own if sample is not None]
        assert len(samples) == sum(map(len, answers)), "the engine left answers out"
        return samples

    def abort(self) -> None:
        """Have a `generate` that is under way return. Does nothing where none is."""
        inbox = self._inbox
        if inbox is not None:
            inbox.abort()

    def close(self) -> None:  # noqa: B027
        """Give back what outlives the object, such as a server it has started."""
