"""Routing policies. A policy chooses among the workers that are ready: healthy, not paused, with room.

Choosing costs about the same among ten and among a thousand: `least_requests` keeps the workers sorted by requests in
flight, `session` and `prefix` look up a ring of hashes, `expected_finish` compares sixteen of them at a time.
"""

from __future__ import annotations

import math
import random
import re
from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Protocol

from practicum.reward.router.http1 import RequestHead
from practicum.reward.router.pool import Upstream
from practicum.reward.router.settings import RouterSettings

# How much a request is assumed to lose to those that run beside it, if they are as many as workers have on average: so
# many times its cost. Between workers about as fast the emptier one wins, and a fast one is preferred, for a request of
# unknown cost may be a long one. With a quarter of this, noise piles requests up. Makespans relative to the ideal, over
# 400 simulations: 1.185 without hints and 1.054 with them at 1, 1.172 and 1.059 at 2, 1.172 and 1.067 at 4.
CONTENTION = 2.0


class RoutedRequest(Protocol):
    """A request, as far as policies are concerned."""

    head: RequestHead
    cost: float

    @property
    def body(self) -> bytes:
        """The body, or as much of it as has come."""
        ...


class Policy:
    """Base of the policies: knows which workers are ready."""

    follows_load = False  # True: `load_changed` is wanted. The others save the call for each request.

    def __init__(self, settings: RouterSettings) -> None:
        self.ready: list[Upstream] = []
        self.num_in_flight = 0  # of all workers together

    def enter(self, upstream: Upstream) -> None:
        upstream.position = len(self.ready)
        self.ready.append(upstream)

    def leave(self, upstream: Upstream) -> None:
        position, last = upstream.position, self.ready.pop()
        assert position is not None
        if last is not upstream:
            self.ready[position] = last
            last.position = position
        upstream.position = None

    def load_changed(self, upstream: Upstream, num_before: int) -> None:
        """A ready worker had `num_before` requests in flight, and now has another number."""

    def forget(self, upstream: Upstream) -> None:
        """A worker that is not ready has been removed for good."""

    def choose(self, request: RoutedRequest) -> Upstream | None:
        raise NotImplementedError


class RoundRobin(Policy):
    """Each in turn."""

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self._turn = -1

    def choose(self, request: RoutedRequest) -> Upstream | None:
        if not self.ready:
            return None
        self._turn = (self._turn + 1) % len(self.ready)
        return self.ready[self._turn]


class LeastRequests(Policy):
    """The one with the fewest in flight; of several, the one that has been so longest."""

    follows_load = True

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        # OrderedDict, since finding the first entry of a dict takes long after much was removed from its front.
        self._by_number: dict[int, OrderedDict[Upstream, None]] = {}
        self._fewest = 0  # no worker has fewer

    def enter(self, upstream: Upstream) -> None:
        super().enter(upstream)
        self._put(upstream)

    def leave(self, upstream: Upstream) -> None:
        super().leave(upstream)
        self._take(upstream, len(upstream.in_flight))

    def load_changed(self, upstream: Upstream, num_before: int) -> None:
        self._take(upstream, num_before)
        self._put(upstream)

    def choose(self, request: RoutedRequest) -> Upstream | None:
        if not self.ready:
            return None
        while not (level := self._by_number.get(self._fewest)):
            self._fewest += 1
        return next(iter(level))

    def _put(self, upstream: Upstream) -> None:
        number = len(upstream.in_flight)
        self._by_number.setdefault(number, OrderedDict())[upstream] = None
        self._fewest = min(self._fewest, number)

    def _take(self, upstream: Upstream, number: int) -> None:
        del self._by_number[number][upstream]


class PowerOfTwo(Policy):
    """The emptier of two drawn at random."""

    def choose(self, request: RoutedRequest) -> Upstream | None:
        num = len(self.ready)
        if num < 2:
            return self.ready[0] if num else None
        one = int(random.random() * num)
        other = int(random.random() * (num - 1))
        if other >= one:
            other += 1
        first, second = self.ready[one], self.ready[other]
        return first if len(first.in_flight) <= len(second.in_flight) else second


class ExpectedFinish(Policy):
    """The one that should be done with it first, by what it costs and how fast each worker has been.

    With a free slot, that takes its cost at the worker's speed; without, it first waits until enough of the requests in
    flight there are done. The requests beside it slow it down: each of them by `contention`.
    """

    NUM_COMPARED = 16

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self._turn = 0

    def choose(self, request: RoutedRequest) -> Upstream | None:
        compared: Sequence[Upstream] = self.ready
        num = len(compared)
        self._turn += 1
        if num > self.NUM_COMPARED:
            start = self._turn % num
            compared = self.ready[start : start + self.NUM_COMPARED]
            if len(compared) < self.NUM_COMPARED:
                compared = compared + self.ready[: self.NUM_COMPARED - len(compared)]
        elif num > 1:  # another one comes first each time, so that ties go round
            start = self._turn % num
            compared = self.ready[start:] + self.ready[:start]
        best, earliest, cost = None, math.inf, request.cost
        contention = CONTENTION * num / (num + self.num_in_flight + 1)
        for upstream in compared:
            estimate, in_flight = upstream.estimate, len(upstream.in_flight)
            slots = estimate.slots
            if in_flight < slots:
                finish_s = estimate.seconds_per_cost * cost * (1.0 + contention * in_flight)
            else:
                wait = upstream.backlog / in_flight * (in_flight - slots + 1) / slots
                finish_s = estimate.seconds_per_cost * (wait + cost * (1.0 + contention * slots))
            if finish_s < earliest:
                best, earliest = upstream, finish_s
        return best


class HashRing:
    """Workers on a circle, each at many places: a key belongs to the next one, and keeps it when others come or go."""

    NUM_PLACES = 64
    NUM_LOOKED_AT = 32

    def __init__(self) -> None:
        self._hashes: list[int] = []  # in order
        self._owners: list[Upstream] = []  # of the places at these hashes
        self._members: set[Upstream] = set()

    def add(self, upstream: Upstream) -> None:
        """Add a worker, unless it is here: it keeps its places while it is not ready, since it may be back soon."""
        if upstream not in self._members:
            self._members.add(upstream)
            for place in range(self.NUM_PLACES):
                key = _hash(f"{upstream.url}#{place}".encode())
                index = bisect(self._hashes, key)
                self._hashes.insert(index, key)
                self._owners.insert(index, upstream)

    def remove(self, upstream: Upstream) -> None:
        if upstream in self._members:
            self._members.remove(upstream)
            kept = [index for index, owner in enumerate(self._owners) if owner is not upstream]
            self._hashes = [self._hashes[index] for index in kept]
            self._owners = [self._owners[index] for index in kept]

    def first(self, key: bytes, accepts: Callable[[Upstream], bool]) -> Upstream | None:
        """Return the owner of a key, or the next one that accepts it, unless that would take long."""
        start = bisect(self._hashes, _hash(key))
        for index in range(min(self.NUM_LOOKED_AT, len(self._owners))):
            upstream = self._owners[(start + index) % len(self._owners)]
            if accepts(upstream):
                return upstream
        return None


def _hash(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")


class Session(LeastRequests):
    """The same worker for all requests of a session. Without a session, or when neither its worker nor its neighbours
    are ready, the worker with the fewest in flight."""

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self._ring = HashRing()

    def enter(self, upstream: Upstream) -> None:
        super().enter(upstream)
        self._ring.add(upstream)

    def forget(self, upstream: Upstream) -> None:
        self._ring.remove(upstream)

    def key(self, request: RoutedRequest) -> bytes | None:
        return request.head.session

    def accepts(self, upstream: Upstream) -> bool:
        return upstream.position is not None

    def choose(self, request: RoutedRequest) -> Upstream | None:
        key = self.key(request) if self.ready else None
        found = self._ring.first(key, self.accepts) if key is not None else None
        return found or super().choose(request)


class Prefix(Session):
    """The same worker for prompts that begin alike, since its cache has the beginning, unless it has far more in flight
    than the others."""

    MAX_LOAD = 1.25  # times the average
    _PROMPT = re.compile(rb'"(?:prompt|messages|input|text|conversation)"\s*:\s*')

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self._num_bytes = settings.prefix_bytes
        self._num_here = 0  # in flight at the ready workers
        self._most = 0

    def enter(self, upstream: Upstream) -> None:
        super().enter(upstream)
        self._num_here += len(upstream.in_flight)

    def leave(self, upstream: Upstream) -> None:
        super().leave(upstream)
        self._num_here -= len(upstream.in_flight)

    def load_changed(self, upstream: Upstream, num_before: int) -> None:
        super().load_changed(upstream, num_before)
        self._num_here += len(upstream.in_flight) - num_before

    def key(self, request: RoutedRequest) -> bytes | None:
        body = request.body
        found = self._PROMPT.search(body)
        start = found.end() if found else 0
        return body[start : start + self._num_bytes] or None

    def accepts(self, upstream: Upstream) -> bool:
        return upstream.position is not None and len(upstream.in_flight) < self._most

    def choose(self, request: RoutedRequest) -> Upstream | None:
        if self.ready:
            self._most = math.ceil(self.MAX_LOAD * (self._num_here + 1) / len(self.ready))
        return super().choose(request)


POLICIES: dict[str, type[Policy]] = {
    "expected_finish": ExpectedFinish,
    "least_requests": LeastRequests,
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
    "session": Session,
    "prefix": Prefix,
}
