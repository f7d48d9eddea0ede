"""`one connection`: what a router adds to the round trip of a 1 KB POST when nothing else is going on.

A blocking socket, one request at a time, in small batches in turn: straight to a worker, then through each router.
"""

from __future__ import annotations

import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from bench.harness import ContestantError, Outcome, Row
from bench.router_client import PATH
from bench.router_contestants import OURS
from bench.router_scene import Entry, Stage, light_request, start_all

CASE = "one connection"
METRIC = "added latency µs"
DIRECT = "direct"
HEAD_END = b"\r\n\r\n"
LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Plan:
    batch: int
    num_rounds: int


FULL = Plan(batch=200, num_rounds=60)
QUICK = Plan(batch=100, num_rounds=6)


def run(entry: Entry) -> Outcome:
    plan = QUICK if entry.quick else FULL
    with ExitStack() as stack:
        stage = Stage(entry, stack)
        _, ports = stage.open_light_workers(1)
        routers = start_all(stage, ports, lean=True)
        doors = {DIRECT: ports[0], **{router.name: router.port for router in routers}}
        lines = {name: stack.enter_context(Line(port)) for name, port in doors.items()}
        for line in lines.values():
            time_batch(line.trip, plan.batch)  # to warm up
        added = added_latency_us(lines, plan)
    print(", ".join(f"{name} +{value:.0f} µs" for name, value in added.items()), file=sys.stderr, flush=True)
    where = {"one connection: rounds": plan.num_rounds, "one connection: requests a batch": plan.batch}
    if "nginx" in added:
        where["one connection: ours - nginx, µs"] = round(added[OURS] - added["nginx"], 1)
    peers: list[str | None] = [*entry.peers] or [None]
    rows = [Row(CASE, METRIC, added[OURS], added[peer] if peer else None, peer, better="lower") for peer in peers]
    return Outcome(rows, where)


def added_latency_us(lines: Mapping[str, Line], plan: Plan) -> dict[str, float]:
    """By contestant. Each round is compared with its own direct batch, so that a slow moment cancels out."""
    added: dict[str, list[float]] = {name: [] for name in lines if name != DIRECT}
    order = list(lines)
    for _ in range(plan.num_rounds):
        medians = {name: time_batch(lines[name].trip, plan.batch) for name in order}
        for name, values in added.items():
            values.append(1e6 * (medians[name] - medians[DIRECT]))
        order.reverse()
    return {name: statistics.median(values) for name, values in added.items()}


def time_batch(trip: Callable[[], None], size: int) -> float:
    """The median in seconds."""
    times = []
    for _ in range(size):
        start = time.perf_counter()
        trip()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class Line:
    """A connection that asks the same thing over and over."""

    def __init__(self, port: int) -> None:
        body = light_request()
        head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
        self._port = port

    def __enter__(self) -> Line:
        self._socket = socket.create_connection(("127.0.0.1", self._port), timeout=10.0)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def trip(self) -> None:
        self._socket.sendall(self._request)
        read_answer(self._socket.recv)


def read_answer(receive: Callable[[int], bytes]) -> bytes:
    """One answer, whole. Not a parser: it knows the two ways in which routers frame a short JSON body."""
    data = b""
    length: int | None = None
    while length is None or len(data) < length:
        piece = receive(65536)
        if not piece:
            raise ContestantError("the connection was closed in the middle of an answer")
        data += piece
        end = data.find(HEAD_END)
        if end >= 0 and length is None:
            if not data.startswith(b"HTTP/1.1 200"):
                raise ContestantError(f"a router answered {data[:100]!r}")
            length = _length(data[:end].lower())
        if 0 <= end < len(data) - len(HEAD_END) and length is None and data.endswith(LAST_CHUNK):
            break
    return data


def _length(head: bytes) -> int | None:
    """Of head and body together; None if the body comes in chunks."""
    _, found, rest = head.partition(b"content-length:")
    return len(head) + len(HEAD_END) + int(rest.partition(b"\r\n")[0]) if found else None
