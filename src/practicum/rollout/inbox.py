"""Between those who ask for answers and the engine that writes them: requests come in while others are under way.

    put(request) ─▶ waiting ─ take, by the engine between two steps ─▶ written ─▶ on_sample, as each answer is done
    cancel, abort ─▶ the engine hears of it between two steps and tells what there is

`put`, `cancel`, `abort`, `close` and `recall` may be called from any thread; what a ticket is told comes from the
engine's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from practicum.types import RolloutRequest, Sample


@dataclass(slots=True, eq=False)
class Ticket:
    """A request in an inbox, and who is told of its answers."""

    request: RolloutRequest
    on_sample: Callable[[int, Sample], None]
    """Told once for each answer, by its number within the request, when it is done or broken off."""
    on_tokens: Callable[[int, list[int], list[float]], None] | None = None
    """Told the tokens of an answer and their log-probs as they are written."""
    is_cancelled: bool = False
    num_open: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_open = self.request.params.num_answers

    def done(self, answer: int, sample: Sample) -> None:
        """For the engine."""
        self.num_open -= 1
        self.on_sample(answer, sample)


class Inbox:
    def __init__(self) -> None:
        self._news = threading.Condition()
        self._waiting: list[Ticket] = []
        self._is_closed = False
        self._is_aborted = False

    def put(self, *tickets: Ticket) -> bool:
        """Whether they were taken in: not after `close`. The engine sees all of them at once, or none yet."""
        with self._news:
            if not self._is_closed:
                self._waiting += tickets
                self._news.notify_all()
            return not self._is_closed

    def cancel(self, ticket: Ticket) -> None:
        """Its answers are broken off where they are."""
        with self._news:
            ticket.is_cancelled = True
            self._news.notify_all()

    def abort(self) -> None:
        """All answers are broken off where they are, those that wait too; nothing more is taken."""
        with self._news:
            self._is_aborted = self._is_closed = True
            self._news.notify_all()

    def close(self) -> None:
        """Nothing more comes: the engine is done when all is written."""
        with self._news:
            self._is_closed = True
            self._news.notify_all()

    def recall(self) -> list[Ticket]:
        """Close it, and have back what the engine has not taken: nobody will be told of that."""
        with self._news:
            self._is_closed = True
            waiting, self._waiting = self._waiting, []
            self._news.notify_all()
            return waiting

    # For the engine

    def take(self, num: int, wait_s: float = 0.0) -> list[Ticket]:
        """Up to so many tickets, the oldest first; waits for one only where there is none and `wait_s` is given."""
        deadline = time.monotonic() + wait_s
        with self._news:
            while not (self._waiting or self._is_closed) and (left_s := deadline - time.monotonic()) > 0:
                self._news.wait(left_s)
            taken, self._waiting = self._waiting[:num], self._waiting[num:]
            return taken

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_aborted(self) -> bool:
        return self._is_aborted

    @property
    def is_over(self) -> bool:
        """Closed, and nothing waits."""
        with self._news:
            return self._is_closed and not self._waiting
