"""What the native engine keeps of each request and of each answer under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.rollout.answers import Ending, written_ids
from practicum.rollout.inbox import Ticket
from practicum.rollout.sampling import uniforms
from practicum.types import FinishReason


@dataclass(slots=True, eq=False)
class Pending:
    """A request of which some answers have no row yet."""

    ticket: Ticket
    ending: Ending
    next_answer: int = 0

    @property
    def num_left(self) -> int:
        return self.ticket.request.params.num_answers - self.next_answer

    @property
    def num_tokens(self) -> int:
        """To be read before the first is written."""
        written = self.ticket.request.written
        return len(self.ticket.request.prompt_ids) + (0 if written is None else len(written.token_ids))

    @property
    def most_tokens(self) -> int:
        return len(self.ticket.request.prompt_ids) + self.ticket.request.params.max_new_tokens


class Row:
    """One answer as it is written."""

    __slots__ = (
        "_before", "_ending", "_noise", "answer", "length", "log_probs", "most_tokens", "routes", "ticket", "tokens"
    )  # fmt: skip

    def __init__(self, ticket: Ticket, answer: int, ending: Ending, length: int) -> None:
        request = ticket.request
        self.ticket = ticket
        self.answer = answer
        self.length = length  # of prompt and answer so far
        self.most_tokens = len(request.prompt_ids) + request.params.max_new_tokens
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.routes: list[NDArray[Any]] = []
        self._ending = ending
        self._before: list[int] = [] if request.written is None else request.written.token_ids.tolist()
        self._noise: list[float] | None = None

    @property
    def seed(self) -> tuple[int, int]:
        """Of its random numbers, which are its own."""
        return self.ticket.request.seed, self.ticket.request.first_answer + self.answer

    def uniform(self) -> float:
        """The random number of the next token."""
        if self._noise is None:
            self._noise = uniforms([self.seed], self.ticket.request.params.max_new_tokens)[0].tolist()
        return self._noise[len(self._before) + len(self.tokens)]

    def ids(self) -> NDArray[np.int32]:
        """Prompt and answer so far."""
        return np.concatenate([written_ids(self.ticket.request), np.array(self.tokens, np.int32)])

    def push(self, token: int, log_prob: float) -> FinishReason | None:
        """Why the answer ends with it; None if it does not."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.length += 1
        if self.ticket.on_tokens is not None:
            self.ticket.on_tokens(self.answer, [token], [log_prob])
        recent = [*self._before, *self.tokens] if self._ending.reads_text else ()
        return self._ending.of(token, len(self._before) + len(self.tokens), recent)
