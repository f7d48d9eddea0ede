"""Limits that hold for all reward workers together: requests at a time, requests and tokens per minute.

    worker ── ask(tokens) ──▶ LimitKeeper (in the driver) ── grant, in the order of the requests ──▶ worker
           ── done(tokens) ─▶

A worker keeps one connection, and begins it with the secret of the run: who does not is sent away. When it breaks,
whatever the worker held is free again. Where only the number at a time is limited, a grant holds for a while: until
then the worker may pass it on to the next of its own requests that wait, which saves the way to the keeper and back
between the two.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

from practicum.config import LimitsConfig
from practicum.errors import RewardError

_WINDOW_S = 60.0
_FRAME = struct.Struct("!BQQ")  # what, number of the request, tokens
_ASK, _DONE = 1, 2
_GRANT = struct.Struct("!Qd")  # number of the request, seconds for which the grant may be passed on
_PASSED_ON_S = 0.25  # others wait too
_CONNECT_S = 10.0
_GREETING_S = 5.0  # in which a connection must have said the secret
_MOST_STRANGERS = 200  # connections that have not: more than are accepted at once, so that none of ours is among them
_ENOUGH_BYTES = 16 * _FRAME.size

Holder = tuple[int, int]  # who asks, and the number of its request


@dataclass(slots=True)
class _Entry:
    at: float
    tokens: int


class LimitBook:
    """Decides who may go ahead. Exact: no window of a minute ever holds more than the limits say."""

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
        """End a request that took so many tokens, whatever was thought before; or one that waits no more."""
        entry = self._held.pop(holder, None)
        if entry is None:
            self._withdrawn.add(holder)
        elif entry.at > self._clock() - _WINDOW_S:
            self._recent_tokens += tokens - entry.tokens
            entry.tokens = tokens

    def leave(self, who: int) -> None:
        """Forget what somebody waits for and free what it holds. What it used stays used."""
        self._queue = deque(item for item in self._queue if item[0][0] != who)
        self._withdrawn = {holder for holder in self._withdrawn if holder[0] != who}
        self._held = {holder: entry for holder, entry in self._held.items() if holder[0] != who}

    def grants(self) -> list[Holder]:
        """Return the requests whose turn has come, in order."""
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
        """Return when the minute that holds back the first in the queue is over; None if something else does."""
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
    """Grants requests of the workers that connect to `address` and know the secret. An async context manager, on one
    event loop."""

    def __init__(self, limits: LimitsConfig, secret: str, host: str = "127.0.0.1") -> None:
        self._book = LimitBook(limits)
        is_by_minute = limits.requests_per_minute is not None or limits.tokens_per_minute is not None
        self._passed_on_s = 0.0 if is_by_minute else _PASSED_ON_S
        self._greeting = _greeting(secret)
        self._strangers: dict[int, _Connection] = {}  # that have not said the secret yet, oldest first
        self._connections: dict[int, _Connection] = {}  # by the number of the worker
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self.address: tuple[str, int] = (host, 0)

    async def __aenter__(self) -> Self:
        host = self.address[0]
        self._loop = asyncio.get_running_loop()
        try:
            self._server = await self._loop.create_server(self._accept, host, 0)
        except OSError as error:
            raise RewardError(f"the keeper of reward.limits cannot listen at {host}: {error}.") from error
        self.address = (host, self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for connection in [*self._connections.values(), *self._strangers.values()]:
            connection.abort()
        if self._timer is not None:
            self._timer.cancel()

    def _accept(self) -> _Connection:
        who = next(self._numbers)
        stranger = _Connection(_FRAME, partial(self._received, who), partial(self._lost, who))
        stranger.expect(self._greeting, partial(self._admit, who))
        self._strangers[who] = stranger
        if len(self._strangers) > _MOST_STRANGERS:
            self._send_away(next(iter(self._strangers)))
        self._loop.call_later(_GREETING_S, self._send_away, who)
        return stranger

    def _admit(self, who: int) -> None:
        self._connections[who] = self._strangers.pop(who)

    def _send_away(self, who: int) -> None:
        stranger = self._strangers.pop(who, None)
        if stranger is not None:
            stranger.abort()

    def _lost(self, who: int) -> None:
        self._strangers.pop(who, None)
        if self._connections.pop(who, None) is not None:
            self._book.leave(who)
            self._grant()

    def _received(self, who: int, frames: Iterator[tuple[int, int, int]]) -> None:
        for what, number, tokens in frames:
            if what == _ASK:
                self._book.ask((who, number), tokens)
            else:
                self._book.done((who, number), tokens)
        self._grant()

    def _grant(self) -> None:
        for who, number in self._book.grants():
            self._connections[who].transport.write(_GRANT.pack(number, self._passed_on_s))
        if self._timer is not None:
            self._timer.cancel()
        due_s = self._book.next_change_s()
        self._timer = None if due_s is None else self._loop.call_later(due_s, self._grant)


def _greeting(secret: str) -> bytes:
    """Return what a connection begins with: of one length, whatever the secret is."""
    return hashlib.sha256(secret.encode()).digest()


class _Connection(asyncio.Protocol):
    """Cuts what comes into whole frames."""

    transport: asyncio.Transport
    _is_open = _is_aborted = False

    def __init__(
        self, frame: struct.Struct, on_frames: Callable[[Iterator[Any]], None], on_end: Callable[[], None]
    ) -> None:
        self._frame = frame
        self._on_frames = on_frames
        self._on_end = on_end
        self._rest = b""
        self._greeting = b""  # that must come first

    def expect(self, greeting: bytes, on_greeting: Callable[[], None]) -> None:
        self._greeting, self._on_greeting = greeting, on_greeting

    def abort(self) -> None:
        self._is_aborted = True
        if self._is_open:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._is_open = True
        if self._is_aborted:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        if self._greeting:
            said, rest = data[: len(self._greeting)], data[len(self._greeting) :]
            if len(said) < len(self._greeting):
                self._rest = data
                return
            if not hmac.compare_digest(said, self._greeting):
                self.abort()
                return
            self._greeting, data = b"", rest
            self._on_greeting()
        whole = len(data) - len(data) % self._frame.size
        self._rest = data[whole:]
        self._on_frames(self._frame.iter_unpack(data[:whole]))

    def connection_lost(self, error: Exception | None) -> None:
        self._on_end()


class Permit:
    """Waits for a grant on entering, ends it on leaving. Entering raises ConnectionError if the keeper is gone."""

    __slots__ = ("_client", "_number", "tokens")

    def __init__(self, client: LimitClient, tokens: int) -> None:
        self._client = client
        self.tokens = tokens
        """As estimated. The holder of the permit may write down what it really was."""

    async def __aenter__(self) -> Self:
        self._number = await self._client.ask(self.tokens)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._client.done(self._number, self.tokens)


class LimitClient:
    """A worker's end of a connection to the keeper."""

    def __init__(self) -> None:
        self.connection = _Connection(_GRANT, self._received, self._lost)
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[int]] = {}  # in order
        self._held: dict[int, float] = {}  # requests that are granted, and until when the grant may be passed on
        self._unsent = bytearray()
        self._is_lost = False

    @classmethod
    async def connect(cls, address: tuple[str, int], secret: str) -> Self:
        client = cls()
        try:
            async with asyncio.timeout(_CONNECT_S):
                await asyncio.get_running_loop().create_connection(lambda: client.connection, *address)
        except (OSError, TimeoutError) as error:
            where = f"{address[0]}:{address[1]}"
            raise RewardError(f"the keeper of reward.limits at {where} does not answer: {error!r}.") from error
        client.connection.transport.write(_greeting(secret))
        return client

    def permit(self, tokens: int) -> Permit:
        return Permit(self, tokens)

    async def ask(self, tokens: int) -> int:
        """Wait for a grant, and return the number that ends it."""
        if self._is_lost:
            raise ConnectionError("the keeper of reward.limits is gone")
        number = next(self._numbers)
        granted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._asked[number] = granted
        self._send(_ASK, number, tokens)
        try:
            return await granted
        except asyncio.CancelledError:
            self._asked.pop(number, None)
            # It may have been granted in the same moment.
            is_granted = granted.done() and not granted.cancelled() and granted.exception() is None
            self.done(granted.result() if is_granted else number, 0)
            raise

    def done(self, number: int, tokens: int) -> None:
        until = self._held.pop(number, 0.0)
        if time.monotonic() < until:
            waiting = next((one for one, granted in self._asked.items() if not granted.done()), None)
            if waiting is not None:
                self._begin(waiting, number, until)
                number, tokens = waiting, 0  # under which nobody waits any more
        self._send(_DONE, number, tokens)

    def _begin(self, waiting: int, number: int, until: float) -> None:
        """Let a request go ahead with a grant: its own, or one that is passed on."""
        self._held[number] = until
        self._asked.pop(waiting).set_result(number)

    def _send(self, what: int, number: int, tokens: int) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)  # with whatever else is sent in this turn of the loop
        self._unsent += _FRAME.pack(what, number, tokens)
        if len(self._unsent) >= _ENOUGH_BYTES:  # the keeper can begin with these
            self._flush()

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, bytearray()
        if unsent and not self._is_lost:
            self.connection.transport.write(bytes(unsent))

    def close(self) -> None:
        self.connection.transport.close()

    def _received(self, grants: Iterator[tuple[int, float]]) -> None:
        now = time.monotonic()
        for number, passed_on_s in grants:
            granted = self._asked.get(number)
            if granted is not None and not granted.done():  # else nobody waits any more, and the keeper knows
                self._begin(number, number, now + passed_on_s)

    def _lost(self) -> None:
        self._is_lost = True
        for granted in self._asked.values():
            if not granted.done():
                granted.set_exception(ConnectionError("the keeper of reward.limits is gone"))
        self._asked.clear()
