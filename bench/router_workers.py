"""Emulated workers behind a router: `python -m bench.router_workers '[{"name": "w0", "port": 20001}, ...]'`.

A request tells in its text how much work it is, since some routers drop fields and headers that they do not know:

    POST /v1/completions {"prompt": "ID WORK ...", ...}  ──▶  {"id": "ID", "worker": "w0"} after WORK / speed seconds

A worker has slots, which serve in order of arrival. Its clock is exact: a job that waited begins when the one before
was due, not when the event loop came round to it, so that late timers do not add up. `POST /control/MODE` makes it
healthy, fail, hang or slow. All imports here are light, since workers are killed and started again in mid-run.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import os
import re
import signal
import struct
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, cast, get_args

import httptools

Mode = Literal["ok", "500", "hang", "slow"]
MODES = get_args(Mode)
SLOWDOWN = 10.0  # of a worker that is slow
CONTROL = b"/control/"
JOB = re.compile(rb'"prompt":\s*"(\S+) (\S+) ')
# What the peers ask workers about themselves before they send them anything.
ABOUT = json.dumps({"status": "ok", "model_path": "m", "object": "list", "data": [{"id": "m", "object": "model"}]})


@dataclass(frozen=True, slots=True)
class Worker:
    name: str
    port: int
    speed: float = 1.0
    slots: int = 4
    arrivals: str | None = None  # a file that gets the time of each request as a double; it outlives the worker

    @staticmethod
    def command(workers: Sequence[Worker]) -> list[str]:
        """One process that plays all of them."""
        return [sys.executable, "-m", "bench.router_workers", json.dumps([asdict(worker) for worker in workers])]


def switch(port: int, mode: Mode) -> None:
    """Change how the worker at that port behaves from now on."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{CONTROL.decode()}{mode}", method="POST", data=b"")
    with urllib.request.urlopen(request, timeout=5.0) as reply:
        reply.read()


def read_arrivals(data: bytes) -> list[float]:
    """Times of `time.monotonic`, which all processes of a machine share. A kill may have cut the last one short."""
    return [value for (value,) in struct.iter_unpack("d", data[: len(data) // 8 * 8])]


class Emulation:
    """One worker's slots and mode."""

    def __init__(self, worker: Worker) -> None:
        self.name = worker.name
        self._speed = worker.speed
        self._free_at = [0.0] * worker.slots  # a heap: when each slot is done with what it has been given so far
        self._held: list[asyncio.Transport] = []  # whom a hanging worker owes an answer
        self.mode: Mode = "ok"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._arrivals = None if worker.arrivals is None else os.open(worker.arrivals, flags, 0o644)

    def note_arrival(self) -> None:
        if self._arrivals is not None:
            os.write(self._arrivals, struct.pack("d", time.monotonic()))

    def serve(self, work_s: float, reply: Callable[[], None]) -> None:
        """Call `reply` when a job of that much work is done."""
        now = time.monotonic()
        service_s = work_s / self._speed * (SLOWDOWN if self.mode == "slow" else 1.0)
        end = max(now, self._free_at[0]) + service_s
        heapq.heapreplace(self._free_at, end)
        asyncio.get_running_loop().call_later(end - now, reply)

    def hold(self, transport: asyncio.Transport) -> None:
        self._held.append(transport)

    def switch(self, mode: Mode) -> None:
        """A worker that hung has lost what it was asked, as after the restart that such a worker gets in earnest."""
        self.mode = mode
        if mode != "hang":
            held, self._held = self._held, []
            for transport in held:
                transport.close()


class Connection(asyncio.Protocol):
    """HTTP/1.1 without pipelining, as far as routers need it."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_message_begin(self) -> None:
        self._url = self._body = b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        emulation = self._emulation
        if self._url.startswith(CONTROL):
            mode = self._url.removeprefix(CONTROL).decode()
            assert mode in MODES
            emulation.switch(mode)
            self._answer(b"200 OK", b"{}")
        elif job := JOB.search(self._body):
            emulation.note_arrival()
            self._serve(job[1].decode(), float(job[2]))
        elif emulation.mode == "hang":
            emulation.hold(self._transport)
        else:
            # A worker whose jobs fail may well call itself healthy, so it does here.
            self._answer(b"200 OK", ABOUT.encode())

    def _serve(self, name: str, work_s: float) -> None:
        if self._emulation.mode == "hang":
            self._emulation.hold(self._transport)
        elif self._emulation.mode == "500":
            self._answer(b"500 Internal Server Error", b'{"error": "broken"}')
        else:
            body = json.dumps({"id": name, "worker": self._emulation.name}).encode()
            self._emulation.serve(work_s, lambda: self._answer(b"200 OK", body))

    def _answer(self, status: bytes, body: bytes) -> None:
        if not self._transport.is_closing():
            head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
            self._transport.write(head + body)


async def serve(workers: Sequence[Worker]) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    for worker in workers:
        emulation = Emulation(worker)
        await loop.create_server(lambda it=emulation: Connection(it), "127.0.0.1", worker.port, backlog=1024)
    await ended.wait()


def main() -> None:
    workers = [Worker(**fields) for fields in json.loads(sys.argv[1])]
    with asyncio.Runner(loop_factory=new_event_loop()) as runner:
        runner.run(serve(workers))


def new_event_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The factory of the fastest event loop there is; None for the usual one."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    main()
