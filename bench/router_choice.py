"""`choosing a worker`: what a choice costs among a thousand workers, where 1 is what it costs among ten.

Ours alone, without a network. Only the choice is timed; between batches of choices, requests come and go as in the
router, so that the workers are busy in ever new ways.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from bench.harness import Outcome, Row
from bench.router_scene import Entry
from practicum.reward.router.http1 import RequestHead, RequestParser
from practicum.reward.router.policy import POLICIES
from practicum.reward.router.pool import State, Upstream, UpstreamPool
from practicum.reward.router.settings import RouterSettings

CASE = "choosing a worker"
FEW, MANY = 10, 1000
IN_FLIGHT_PER_WORKER = 4
BATCH = 50
METRIC = f"cost among {MANY:,} / among {FEW}"


class Request:
    """A request, and its connection."""

    def __init__(self, head: RequestHead, body: bytes) -> None:
        self.head = head
        self.cost = 1.0
        self.body = body
        self.started = 0.0


class Bench:
    """A pool that is kept busy: each new request takes the place of the oldest."""

    def __init__(self, policy: str, num_workers: int) -> None:
        settings = RouterSettings.make(policy=policy)
        self._pool = UpstreamPool(POLICIES[policy](settings), settings.max_in_flight, lambda: None)
        for number in range(num_workers):
            upstream = self._pool.add(f"http://worker-{number}:80")
            upstream.state = State.UP
            self._pool.refresh(upstream)
        parse = RequestParser(settings.session_header)
        lines = "POST / HTTP/1.1\r\nhost: a\r\nx-practicum-session: {}\r\n\r\n"
        self._requests = itertools.cycle(
            [Request(parse(lines.format(n).encode()), f'{{"prompt": "{n} of many"}}'.encode()) for n in range(977)]
        )
        self._under_way: deque[tuple[Upstream, Any, float]] = deque()
        for _ in range(num_workers * IN_FLIGHT_PER_WORKER):
            self._begin()
        self._pool.tick(time.monotonic())

    def cost_us(self, num_choices: int) -> float:
        choose, seconds = self._pool.policy.choose, 0.0
        for _ in range(num_choices // BATCH):
            batch = list(itertools.islice(self._requests, BATCH))
            start = time.perf_counter()
            for request in batch:
                choose(request)
            seconds += time.perf_counter() - start
            self._move_on()
        return seconds / num_choices * 1e6

    def _move_on(self) -> None:
        for _ in range(BATCH):
            upstream, connection, cost = self._under_way.popleft()
            self._pool.end(upstream, connection, cost, time.monotonic(), completed=True)
            self._begin()

    def _begin(self) -> None:
        request = next(self._requests)
        upstream = self._pool.policy.choose(request)
        assert upstream is not None
        now = time.monotonic()
        connection: Any = Request(request.head, request.body)
        connection.started = now
        self._pool.begin(upstream, connection, request.cost, now)
        self._under_way.append((upstream, connection, request.cost))


def run(entry: Entry) -> Outcome:
    num_rounds, num_choices = (5, 2000) if entry.quick else (15, 10_000)
    rows, where = [], {}
    for policy in POLICIES:
        sizes: Sequence[tuple[int, Bench]] = [(size, Bench(policy, size)) for size in (FEW, MANY)]
        costs: dict[int, list[float]] = {size: [] for size, _ in sizes}
        for number in range(num_rounds):
            for size, bench in sizes if number % 2 else reversed(sizes):
                costs[size].append(bench.cost_us(num_choices))
        few, many = statistics.median(costs[FEW]), statistics.median(costs[MANY])
        rows.append(Row(f"{CASE}, {policy}", METRIC, many / few))
        where[policy] = {"few_us": round(few, 2), "many_us": round(many, 2)}
    return Outcome(rows, {"choosing": where})
