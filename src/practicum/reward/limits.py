"""Limits that hold for all reward workers together: requests at a time, requests and tokens per minute.

    worker ── ask(tokens) ──▶ LimitKeeper (in the driver) ── grant, in the order of the questions ──▶ worker
           ── done(tokens) ─▶

A worker keeps one connection. When it breaks, whatever the worker held is free again. Where only the number at a time
is limited, a turn is granted for a while: until then the worker may pass it on to the next of its own that waits, and
the way to the keeper and back is not between the two.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Self, cast

from practicum.config import LimitsConfig
from practicum.errors import RewardError

_WINDOW_S = 60.0
_FRAME = struct.Struct("!BQQ")  # what, ticket, tokens
_ASK, _DONE = 1, 2
_GRANT = struct.Struct("!Qd")  # ticket, seconds for which the turn may be passed on
_PASSED_ON_S = 0.25  # others wait too
_CONNECT_S = 10.0
_ENOUGH_BYTES = 16 * _FRAME.size

Holder = tuple[Hashable, int]  # who asks, and the ticket under which


@dataclass(slots=True)
class _Entry:
    at: float
    tokens: int


class LimitBook:
    """Who may go ahead. Exact: no window of a minute ever holds more than the limits say."""

    def __init__(self, limits: LimitsConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._queue: deque[tuple[Holder, int]] = deque()
        self._withdrawn: set[Holder] = set()  # still in the queue
        self._held: dict[Holder, _Entry] = {}
        self._recent: deque[_Entry] = deque()  # by time
        self._recent_tokens = 0

    @property
    def num_held(self) -> int:
        return len(self._held)

    def ask(self, holder: Holder, tokens: int) -> None:
        self._queue.append((holder, tokens))

    def done(self, holder: Holder, tokens: int) -> None:
        """It is over and took so many tokens, whatever was thought before; or it waits no more."""
        entry = self._held.pop(holder, None)
        if entry is None:
            self._withdrawn.add(holder)
        elif entry.at > self._clock() - _WINDOW_S:
            self._recent_tokens += tokens - entry.tokens
            entry.tokens = tokens

    def leave(self, who: Hashable) -> None:
        """Who asks no more: what it waits for is forgotten, what it holds is free, what it used stays used."""
        self._queue = deque(item for item in self._queue if item[0][0] != who)
        self._withdrawn = {holder for holder in self._withdrawn if holder[0] != who}
        self._held = {holder: entry for holder, entry in self._held.items() if holder[0] != who}

    def grants(self) -> list[Holder]:
        """Those whose turn has come, in order."""
        granted: list[Holder] = []
        now = self._clock()
        self._forget(now)
        while self._queue:
            holder, tokens = self._queue[0]
            if holder not in self._withdrawn and not self._has_room(tokens):
                break
            self._queue.popleft()
            if holder in self._withdrawn:
                self._withdrawn.discard(holder)
                continue
            self._held[holder] = entry = _Entry(now, tokens)
            self._recent.append(entry)
            self._recent_tokens += tokens
            granted.append(holder)
        return granted

    def next_change_s(self) -> float | None:
        """When the minute that holds the first in the queue back has gone by; None if it is something else."""
        if not self._queue or not self._recent or self._is_full():
            return None
        return max(0.0, self._recent[0].at + _WINDOW_S - self._clock())

    def _is_full(self) -> bool:
        return self._limits.concurrency is not None and len(self._held) >= self._limits.concurrency

    def _has_room(self, tokens: int) -> bool:
        per_minute, tokens_per_minute = self._limits.requests_per_minute, self._limits.tokens_per_minute
        if self._is_full() or (per_minute is not None and len(self._recent) >= per_minute):
            return False
        # A request larger than the limit goes alone: it could never go otherwise.
        return tokens_per_minute is None or not self._recent or self._recent_tokens + tokens <= tokens_per_minute

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0].at <= now - _WINDOW_S:
            self._recent_tokens -= self._recent.popleft().tokens


class LimitKeeper:
    """Keeps the book for workers that connect to `address`, on a thread of its own. A context manager."""

    def __init__(self, limits: LimitsConfig, host: str = "127.0.0.1") -> None:
        self._book = LimitBook(limits)
        is_by_minute = limits.requests_per_minute is not None or limits.tokens_per_minute is not None
        self._passed_on_s = 0.0 if is_by_minute else _PASSED_ON_S
        self._loop = asyncio.new_event_loop()
        self._clients: dict[int, _Client] = {}
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="practicum-limits", daemon=True)
        self._thread.start()
        listen = self._loop.create_server(lambda: _Client(self, next(self._numbers)), host, 0)
        try:
            self._server = asyncio.run_coroutine_threadsafe(listen, self._loop).result(_CONNECT_S)
        except OSError as error:
            self._end_loop()
            raise RewardError(f"the keeper of reward.limits cannot listen at {host}: {error}.") from error
        self.address: tuple[str, int] = (host, self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(_CONNECT_S)
            self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CONNECT_S)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _stop(self) -> None:
        self._server.close()
        for client in list(self._clients.values()):
            client.transport.abort()
        if self._timer is not None:
            self._timer.cancel()

    def joined(self, client: _Client) -> None:
        self._clients[client.number] = client

    def left(self, client: _Client) -> None:
        self._clients.pop(client.number, None)
        self._book.leave(client.number)
        self._hand_out()

    def told(self, client: _Client, data: bytes) -> None:
        for what, ticket, tokens in _FRAME.iter_unpack(data):
            if what == _ASK:
                self._book.ask((client.number, ticket), tokens)
            else:
                self._book.done((client.number, ticket), tokens)
        self._hand_out()

    def _hand_out(self) -> None:
        for who, ticket in self._book.grants():
            self._clients[who].transport.write(_GRANT.pack(ticket, self._passed_on_s))  # type: ignore[index]
        if self._timer is not None:
            self._timer.cancel()
        due_s = self._book.next_change_s()
        self._timer = None if due_s is None else self._loop.call_later(due_s, self._hand_out)


class _Client(asyncio.Protocol):
    """A worker as the keeper sees it."""

    def __init__(self, keeper: LimitKeeper, number: int) -> None:
        self._keeper = keeper
        self.number = number
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._keeper.joined(self)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        whole = len(data) - len(data) % _FRAME.size
        self._rest = data[whole:]
        self._keeper.told(self, data[:whole])

    def connection_lost(self, error: Exception | None) -> None:
        self._keeper.left(self)


class Permit:
    """Waits for its turn on entering, ends it on leaving. Entering raises ConnectionError if the keeper is gone."""

    __slots__ = ("_client", "_ticket", "tokens")

    def __init__(self, client: LimitClient, tokens: int) -> None:
        self._client = client
        self._ticket: int | None = None
        self.tokens = tokens
        """As estimated. Whoever holds the permit may write down what it really was."""

    async def enter(self) -> None:
        self._ticket = await self._client.ask(self.tokens)

    def leave(self) -> None:
        """Doing it twice does nothing."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._client.done(ticket, self.tokens)

    async def __aenter__(self) -> Self:
        await self.enter()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.leave()


class LimitClient(asyncio.Protocol):
    """A worker's connection to the keeper."""

    def __init__(self) -> None:
        self._tickets = itertools.count()
        self._asked: dict[int, asyncio.Future[int]] = {}  # in order
        self._held: dict[int, float] = {}  # tickets whose turn it is, and until when they may be passed on
        self._rest = b""
        self._unsent = bytearray()
        self._is_lost = False

    @classmethod
    async def connect(cls, address: tuple[str, int]) -> Self:
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, client = await asyncio.get_running_loop().create_connection(cls, *address)
        except (OSError, TimeoutError) as error:
            where = f"{address[0]}:{address[1]}"
            raise RewardError(f"the keeper of reward.limits at {where} does not answer: {error!r}.") from error
        return client

    def permit(self, tokens: int) -> Permit:
        return Permit(self, tokens)

    async def ask(self, tokens: int) -> int:
        """Wait for a turn, and get the ticket that ends it."""
        if self._is_lost:
            raise ConnectionError("the keeper of reward.limits is gone")
        ticket = next(self._tickets)
        granted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._asked[ticket] = granted
        self._tell(_ASK, ticket, tokens)
        try:
            return await granted
        except asyncio.CancelledError:
            self._asked.pop(ticket, None)
            # Its turn may have come in the same moment.
            has_turn = granted.done() and not granted.cancelled() and granted.exception() is None
            self.done(granted.result() if has_turn else ticket, 0)
            raise

    def done(self, ticket: int, tokens: int) -> None:
        until = self._held.pop(ticket, 0.0)
        if time.monotonic() < until:
            waiting = next((one for one, granted in self._asked.items() if not granted.done()), None)
            if waiting is not None:
                self._begin(waiting, ticket, until)
                ticket, tokens = waiting, 0  # under which nobody waits any more
        self._tell(_DONE, ticket, tokens)

    def _begin(self, waiting: int, ticket: int, until: float) -> None:
        """Who waits has a turn now: its own, or one that is passed on."""
        self._held[ticket] = until
        self._asked.pop(waiting).set_result(ticket)

    def _tell(self, what: int, ticket: int, tokens: int) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)  # with whatever else is said in this turn of the loop
        self._unsent += _FRAME.pack(what, ticket, tokens)
        if len(self._unsent) >= _ENOUGH_BYTES:  # the keeper can begin with these
            self._flush()

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, bytearray()
        if unsent and not self._is_lost:
            self._transport.write(bytes(unsent))

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        whole = len(data) - len(data) % _GRANT.size
        self._rest = data[whole:]
        now = time.monotonic()
        for ticket, passed_on_s in _GRANT.iter_unpack(data[:whole]):
            granted = self._asked.get(ticket)
            if granted is not None and not granted.done():  # else nobody waits any more, and the keeper is told so
                self._begin(ticket, ticket, now + passed_on_s)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        for granted in self._asked.values():
            if not granted.done():
                granted.set_exception(ConnectionError("the keeper of reward.limits is gone"))
        self._asked.clear()
