"""A pool in simulated time: the router's real bookkeeping, and workers that are rows of slots with a queue.

jobs ─▶ CostModel ─▶ Policy.choose ─▶ pool.begin ─▶ queue ─▶ a slot ─▶ pool.end ─▶ the next job (closed loop)
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from practicum.reward.router.estimate import CostModel, CostSource, ThroughputEstimate
from practicum.reward.router.http1 import RequestHead, RequestParser
from practicum.reward.router.policy import POLICIES, Policy
from practicum.reward.router.pool import State, Upstream, UpstreamPool
from practicum.reward.router.settings import RouterSettings

TICK_S = 0.05

_read = RequestParser("x-practicum-session")


def make_head(cost: float | None = None, session: str | None = None) -> RequestHead:
    lines = ["POST /grade HTTP/1.1", "host: a"]
    if cost is not None:
        lines.append(f"x-practicum-cost: {cost!r}")
    if session is not None:
        lines.append(f"x-practicum-session: {session}")
    return _read("\r\n".join([*lines, "", ""]).encode())


@dataclass(eq=False)
class FakeRequest:
    """All that a policy sees of a request. It stands for its connection, too."""

    head: RequestHead = field(default_factory=make_head)
    cost: float = 1.0
    body: bytes = b""
    started: float = 0.0


def make_pool(policy: str, num_workers: int, **settings: Any) -> UpstreamPool:
    """A pool whose workers are all up."""
    made = RouterSettings.make(policy=policy, **settings)
    pool = UpstreamPool(POLICIES[policy](made), made.max_in_flight, lambda: None)
    for index in range(num_workers):
        add_worker(pool, f"http://w{index}:80")
    return pool


def add_worker(pool: UpstreamPool, url: str) -> Upstream:
    upstream = pool.add(url)
    upstream.state = State.UP
    upstream.estimate = ThroughputEstimate(pool.average, 0.0)  # simulated time begins at 0
    pool.refresh(upstream)
    return upstream


def worker(pool: UpstreamPool, url: str) -> Upstream:
    found = pool.find(url)
    assert found is not None
    return found


def begin(pool: UpstreamPool, upstream: Upstream, request: FakeRequest, now: float = 0.0) -> None:
    connection: Any = request
    request.started = now
    pool.begin(upstream, connection, request.cost, now)


def end(
    pool: UpstreamPool, upstream: Upstream, request: FakeRequest, now: float = 0.0, *, completed: bool = True
) -> None:
    connection: Any = request
    pool.end(upstream, connection, request.cost, now, completed=completed)


@dataclass(eq=False)
class Job(FakeRequest):
    work: float = 1.0  # seconds at speed 1
    cost_source: CostSource = field(default_factory=CostSource)
    upstream: Upstream | None = None


@dataclass
class Server:
    """What is behind a worker's address."""

    speed: float
    num_slots: int
    num_running: int = 0
    queue: deque[Job] = field(default_factory=deque)


class Simulation:
    def __init__(self, policy: str, speeds: Iterable[float], num_slots: int) -> None:
        self.servers = [Server(speed, num_slots) for speed in speeds]
        self.pool = make_pool(policy, len(self.servers))
        self.policy: Policy = self.pool.policy
        self.costs = CostModel()
        self.now = 0.0
        self._server_of = dict(zip(self.pool, self.servers, strict=True))
        self._events: list[tuple[float, int, Job]] = []
        self._numbers = itertools.count()
        self._next_tick = TICK_S

    def run(self, jobs: Iterable[Job], num_in_flight: int) -> float:
        """Keep so many in flight until all are done; returns the seconds it took."""
        start, left = self.now, iter(jobs)
        for job in itertools.islice(left, num_in_flight):
            self._send(job)
        while self._events:
            until, _, job = heapq.heappop(self._events)
            self._tick_until(until)
            self.now = until
            self._finish(job)
            for another in itertools.islice(left, 1):
                self._send(another)
        return self.now - start

    def _send(self, job: Job) -> None:
        job.cost, job.cost_source = self.costs.of(job.head, job.body)
        job.upstream = self.policy.choose(job)
        assert job.upstream is not None
        begin(self.pool, job.upstream, job, self.now)
        server = self._server_of[job.upstream]
        server.queue.append(job)
        self._work_on(server)

    def _finish(self, job: Job) -> None:
        assert job.upstream is not None
        end(self.pool, job.upstream, job, self.now)
        self.costs.record(job.cost_source, self.now - job.started)
        self.pool.average.record(job.cost, self.now - job.started)
        server = self._server_of[job.upstream]
        server.num_running -= 1
        self._work_on(server)

    def _work_on(self, server: Server) -> None:
        while server.queue and server.num_running < server.num_slots:
            job = server.queue.popleft()
            server.num_running += 1
            heapq.heappush(self._events, (self.now + job.work / server.speed, next(self._numbers), job))

    def _tick_until(self, until: float) -> None:
        while self._next_tick < until:
            self.pool.tick(self._next_tick)
            self.costs.tick()
            self._next_tick += TICK_S


def lognormal_jobs(num: int, seed: int, *, hint: bool) -> list[Job]:
    """With a hint a request says what it costs, otherwise all look alike."""
    rng = random.Random(seed)
    works = [math.exp(rng.gauss(0.0, 1.0)) for _ in range(num)]
    return [Job(head=make_head(cost=work if hint else None), work=work) for work in works]
