"""Both ends of a router: emulated workers, and a client that keeps a number of requests in flight and checks responses.

    client, one request on each connection ──▶ router ──▶ workers
    POST /v1/completions {"prompt": "ID WORK ...", ...}  ──▶  {"id": "ID", "worker": "wPORT"} after WORK / speed seconds

`POST /control/MODE` makes a worker healthy, fail, hang or slow. `python -m bench.router_work '[{"port": 20001}, ...]'`
plays workers; all imports here are light, since workers are killed and started again while a benchmark runs.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import os
import re
import struct
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import uvloop

SLOWDOWN = 10.0  # of a worker that is slow
PATH = "/v1/completions"  # all peers forward it, and those that read bodies keep its prompt
GIVE_UP_S = 15.0  # a request that is answered later is lost
JOB = re.compile(rb'"prompt":\s*"(\S+) (\S+) ')
# What the peers ask workers about themselves before they send them anything.
ABOUT = json.dumps({"status": "ok", "model_path": "m", "object": "list", "data": [{"id": "m", "object": "model"}]})


async def read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Return first line and body of a message. It is no parser: it knows how routers frame a short JSON body."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    line = head[: head.index(b"\r\n")]
    if b"\r\ntransfer-encoding: chunked" not in head:
        _, found, rest = head.partition(b"\r\ncontent-length:")
        return line, await reader.readexactly(int(rest[: rest.index(b"\r\n")])) if found else b""
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")
    return line, body


# Workers


@dataclass(frozen=True, slots=True)
class Worker:
    port: int
    speed: float = 1.0
    slots: int = 4
    arrivals: str | None = None  # a file that gets the time of each request as a double; it outlives the worker

    @staticmethod
    def command(workers: Sequence[Worker]) -> list[str]:
        """Return the command of one process that plays all of them."""
        return [sys.executable, "-m", "bench.router_work", json.dumps([asdict(worker) for worker in workers])]


def fetch(port: int, path: str, body: str | None = None) -> Any:
    """Return what a worker or a router says at that path; with a body it is a POST."""
    data = None if body is None else body.encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=5.0) as response:
        return json.load(response)


class Emulation:
    """One worker's slots and mode."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._mode = "ok"
        self._mended = asyncio.Event()  # of the time that it hangs
        self._free_at = [0.0] * worker.slots  # a heap: when each slot is done with its jobs so far
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._arrivals = None if worker.arrivals is None else os.open(worker.arrivals, flags, 0o644)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while response := await self.respond(*await read_message(reader)):
                head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                writer.write(head % (response[0], len(response[1])) + response[1])
        except (OSError, EOFError):  # the router closes connections as it likes
            pass
        finally:
            writer.close()

    async def respond(self, line: bytes, body: bytes) -> tuple[bytes, bytes] | None:
        """Return status and body. None: close the connection."""
        if line.startswith(b"post /control/"):
            self._mode = line.split()[1].removeprefix(b"/control/").decode()
            self._mended.set()
            self._mended = asyncio.Event()
            return b"200 OK", b"{}"
        job = JOB.search(body)
        if job and self._arrivals is not None:
            os.write(self._arrivals, struct.pack("d", time.monotonic()))
        if self._mode == "hang":  # its requests are lost, as after the restart that such a worker gets in reality
            await self._mended.wait()
            return None
        if job is None:  # a worker whose jobs fail may well call itself healthy, so it does here
            return b"200 OK", ABOUT.encode()
        if self._mode == "500":
            return b"500 Internal Server Error", b'{"error": "broken"}'
        now = time.monotonic()
        slowdown = SLOWDOWN if self._mode == "slow" else 1.0
        # A job that waited begins when the one before was due, so that late timers do not add up.
        end = max(now, self._free_at[0]) + float(job[2]) / self._worker.speed * slowdown
        heapq.heapreplace(self._free_at, end)
        await asyncio.sleep(end - now)
        return b"200 OK", json.dumps({"id": job[1].decode(), "worker": f"w{self._worker.port}"}).encode()


async def serve(workers: Sequence[Worker]) -> None:
    for worker in workers:
        await asyncio.start_server(Emulation(worker).serve, "127.0.0.1", worker.port, backlog=1024)
    await asyncio.Event().wait()


# The client

Request = tuple[int, bytes]  # an id and what is sent


def request_of(id: int, work_s: float, cost: float | None = None) -> Request:
    """Return a request that is so much work for the worker; `cost` is what the router is told."""
    body = json.dumps({"model": "m", "prompt": f"{id} {work_s:.6f} please", "max_tokens": 1})
    return id, post(body, "" if cost is None else f"x-practicum-cost: {cost:.6f}\r\n")


def post(body: str, more_headers: str = "") -> bytes:
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{more_headers}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a request: the worker that answered it, or what went wrong."""

    id: int
    sent_s: float
    ended_s: float
    worker: str | None = None
    failure: str | None = None


def judge(id: int, line: bytes, body: bytes) -> tuple[str | None, str | None]:
    """Return the worker that answered, or why this is no response to request `id`."""
    if line.split()[1] != b"200":
        return None, f"status {line.split()[1].decode()}"
    try:
        response = json.loads(body)
        if response["id"] == str(id):
            return response["worker"], None
        return None, "answer to another request"
    except (ValueError, KeyError, TypeError):
        return None, "body is not a worker's"


async def send_all(port: int, requests: Iterable[Request], in_flight: int, on_result: Callable[[Result], None]) -> int:
    """Send all requests, so many at a time, and call `on_result` for each. Lost connections are opened again, so the
    load follows what the router delivers. Return on how many connections more came than was asked for."""
    waiting = iter(requests)

    async def send_in_turn() -> bool:
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        for id, request in waiting:
            sent_s = time.monotonic()
            try:
                async with asyncio.timeout(GIVE_UP_S):
                    if streams is None or streams[0].at_eof():
                        streams = await asyncio.open_connection("127.0.0.1", port)
                    streams[1].write(request)
                    worker, failure = judge(id, *await read_message(streams[0]))
            except (OSError, EOFError) as error:
                worker, failure = None, str(error) or type(error).__name__
                await asyncio.sleep(0.02)  # a router that refuses connections is not to be hammered
            if failure and streams is not None:
                streams[1].close()  # verl's router does so too, without notice, and one fault is to count once
                streams = None
            on_result(Result(id, sent_s, time.monotonic(), worker, failure))
        if streams is None:
            return False
        more = b""
        with suppress(TimeoutError, OSError):
            more = await asyncio.wait_for(streams[0].read(1), 0.05)
        streams[1].close()
        return bool(more)

    return sum(await asyncio.gather(*(send_in_turn() for _ in range(in_flight))))


if __name__ == "__main__":
    uvloop.run(serve([Worker(**fields) for fields in json.loads(sys.argv[1])]))
