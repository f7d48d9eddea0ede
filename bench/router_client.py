"""A client that keeps a fixed number of requests on the way through a router and checks every answer.

    asks ─ next ─▶ lane 1 ─ request ─▶ router ─ answer ─▶ lane 1 ─ next ...      (as many lanes as may be in flight)

A lane is a connection with one request at a time; it takes the next one as soon as it has the answer, so the load
follows what the router delivers. Lost connections are opened again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import httptools

PATH = "/v1/completions"  # all peers pass it on, and those who read bodies keep its prompt
GIVE_UP_S = 15.0  # a request that is answered later is lost


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: who it is, how much work it is for the worker, and what the router is told about that."""

    id: int
    work_s: float
    cost: float | None = None

    def as_bytes(self) -> bytes:
        body = json.dumps({"model": "m", "prompt": f"{self.id} {self.work_s:.6f} please", "max_tokens": 1})
        hint = "" if self.cost is None else f"x-practicum-cost: {self.cost:.6f}\r\n"
        head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{hint}"
        return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request: the worker who answered it, or what went wrong."""

    id: int
    sent_s: float
    ended_s: float
    worker: str | None = None
    failure: str | None = None


def judge(id: int, status: int, body: bytes) -> tuple[str | None, str | None]:
    """The worker who answered, or why this is not an answer to request `id`."""
    if status != 200:
        return None, f"status {status}"
    try:
        reply = json.loads(body)
        if reply["id"] == str(id):
            return reply["worker"], None
        return None, "answer to another request"
    except (ValueError, KeyError, TypeError):
        return None, "body is not a worker's"


class Connection(asyncio.Protocol):
    """One request at a time. `unasked` counts whole answers that came when none was due."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""
        self._due: asyncio.Future[tuple[int, bytes]] | None = None
        self.sent_s = 0.0
        self.unasked = 0

    def exchange(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """Status and body, once they are here; a `ConnectionError` if the connection ends first."""
        self._due = asyncio.get_running_loop().create_future()
        self.sent_s = time.monotonic()
        if self._transport.is_closing():
            self._due.set_exception(ConnectionError("connection was closed"))
        else:
            self._transport.write(request)
        return self._due

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    @property
    def is_late(self) -> bool:
        waits = self._due is not None and not self._due.done()
        return waits and time.monotonic() - self.sent_s > GIVE_UP_S

    def close(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"connection lost: {error}" if error else "connection closed")

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")
            self._transport.abort()

    def on_message_begin(self) -> None:
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._due is None or self._due.done():
            self.unasked += 1
            return
        if not self._parser.should_keep_alive():
            self._transport.close()
        self._due.set_result((self._parser.get_status_code(), self._body))

    def _fail(self, what: str) -> None:
        if self._due is not None and not self._due.done():
            self._due.set_exception(ConnectionError(what))


class Client:
    """Sends all of `asks`, `in_flight` at a time, and hands each answer to `finished`."""

    def __init__(self, port: int, asks: Iterable[Ask], in_flight: int, finished: Callable[[Answer], None]) -> None:
        self._port = port
        self._asks = iter(asks)
        self._in_flight = in_flight
        self._finished = finished
        self._open: dict[int, Connection] = {}  # by lane
        self.unasked = 0  # answers to nothing

    async def run(self) -> None:
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.gather(*(self._lane(number) for number in range(self._in_flight)))
        finally:
            watch.cancel()
            for connection in self._open.values():
                self.unasked += connection.unasked
                connection.close()

    async def _lane(self, number: int) -> None:
        for ask in self._asks:
            sent_s = time.monotonic()
            try:
                connection = await self._connection(number)
                status, body = await connection.exchange(ask.as_bytes())
                worker, failure = judge(ask.id, status, body)
                if failure:
                    connection.close()  # verl's router does so too, without notice, and one fault is to count once
            except OSError as error:
                worker, failure = None, str(error)
                await asyncio.sleep(0.02)  # a router that refuses connections is not to be hammered
            self._finished(Answer(ask.id, sent_s, time.monotonic(), worker, failure))

    async def _connection(self, number: int) -> Connection:
        connection = self._open.get(number)
        if connection is None or not connection.is_open:
            if connection is not None:
                self.unasked += connection.unasked
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(Connection, "127.0.0.1", self._port)
            self._open[number] = connection
        return connection

    async def _watch(self) -> None:
        """One look at all lanes now and then is cheaper than a timer for each request."""
        while True:
            await asyncio.sleep(0.25)
            for connection in self._open.values():
                if connection.is_late:
                    connection.close()
