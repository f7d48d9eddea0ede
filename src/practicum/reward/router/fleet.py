"""The address book: all workers, and which of them are ready for a request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from practicum.errors import RouterError
from practicum.reward.router.pace import Average
from practicum.reward.router.policy import Policy
from practicum.reward.router.settings import worker_address
from practicum.reward.router.upstream import State, Upstream

if TYPE_CHECKING:
    from practicum.reward.router.connection import WorkerConnection

log = logging.getLogger("practicum.router")


class Fleet:
    """Counts go up in `begin` and down in `end`, nowhere else. `on_room` is called whenever somebody becomes ready."""

    def __init__(self, policy: Policy, max_in_flight: int, on_room: Callable[[], None]) -> None:
        self.policy = policy
        self._follows_moves = type(policy).moved is not Policy.moved  # a call saved for each request and policy
        self.max_in_flight = max_in_flight
        self.wanted_version: int | None = None
        self.average = Average()
        self._on_room = on_room
        self._by_address: dict[tuple[str, int], Upstream] = {}
        self._leaving: list[Upstream] = []  # no longer in the book, but not done yet

    def __iter__(self) -> Iterator[Upstream]:
        return iter(self._by_address.values())

    def __len__(self) -> int:
        return len(self._by_address)

    @property
    def num_in_flight(self) -> int:
        return self.policy.num_in_flight

    def add(self, url: str) -> Upstream:
        try:
            _, host, port = worker_address(url)
        except ValueError as error:
            raise RouterError(f"{error}.") from None
        if (host, port) in self._by_address:
            raise RouterError(f"worker {url} is here already.")
        upstream = Upstream(url, self.average, self.max_in_flight)
        log.info("worker %s is added", upstream.url)
        self._by_address[host, port] = upstream
        return upstream

    def find(self, url: str) -> Upstream | None:
        try:
            _, host, port = worker_address(url)
        except ValueError as error:
            raise RouterError(f"{error}.") from None
        return self._by_address.get((host, port))

    def tick(self, now: float) -> list[Upstream]:
        """Work out how fast everyone is. Returns all workers, and those removed that still have requests to finish."""
        for upstream in self._leaving:
            if not upstream.in_flight:
                for connection in list(upstream.idle):
                    connection.close()
        self._leaving = [upstream for upstream in self._leaving if upstream.in_flight]
        at_work = [*self, *self._leaving]
        busy_s = done = 0.0
        most_tried = 1
        for upstream in at_work:
            upstream.pace.tick(now, len(upstream.in_flight))
            one_busy_s, one_done = upstream.pace.evidence
            busy_s, done = busy_s + one_busy_s, done + one_done
            most_tried = max(most_tried, upstream.pace.most_tried)
        self.average.most_tried = most_tried
        if done > 0.0:
            self.average.pace = busy_s / done
        return at_work

    def remove(self, upstream: Upstream) -> None:
        """Take it out of the book. Requests it still has are finished all the same."""
        del self._by_address[upstream.address]
        log.info("worker %s is removed", upstream.url)
        upstream.draining = True
        self.refresh(upstream)
        self.policy.forget(upstream)
        self._leaving.append(upstream)

    def begin(self, upstream: Upstream, connection: WorkerConnection, cost: float, now: float) -> None:
        in_flight = upstream.in_flight
        num_before = len(in_flight)
        upstream.pace.passed(now, num_before)
        in_flight[connection] = num_before + 1
        upstream.backlog += cost
        upstream.num_requests += 1
        self.policy.num_in_flight += 1
        if upstream.position is not None:
            if self._follows_moves:
                self.policy.moved(upstream, num_before)
            if num_before + 1 >= upstream.limit:
                self.policy.leave(upstream)

    def end(
        self, upstream: Upstream, connection: WorkerConnection, cost: float, now: float, *, completed: bool
    ) -> None:
        """Give back what `begin` took. Only what was completed teaches anything about the worker's pace."""
        num_before = len(upstream.in_flight)
        if completed:
            older = upstream.num_older(connection)
            came_as = upstream.in_flight.pop(connection)
            upstream.pace.ended(now, num_before, cost, now - connection.started, came_as, older)
        else:
            del upstream.in_flight[connection]
            upstream.pace.passed(now, num_before)
        upstream.backlog = upstream.backlog - cost if num_before > 1 else 0.0  # exact when empty, whatever rounding did
        self.policy.num_in_flight -= 1
        if upstream.position is None:
            self.refresh(upstream)
        elif self._follows_moves:
            self.policy.moved(upstream, num_before)

    def is_ready(self, upstream: Upstream) -> bool:
        return (
            len(upstream.in_flight) < upstream.limit
            and (upstream.state is State.UP or upstream.state is State.TRIAL)
            and self.is_wanted(upstream)
        )

    def is_wanted(self, upstream: Upstream) -> bool:
        """Or it is kept from requests on purpose, and what it does meanwhile is no failure."""
        return not upstream.paused and not upstream.draining and upstream.has_version(self.wanted_version)

    def refresh(self, upstream: Upstream) -> None:
        """Something about this worker has changed: let it in, or out."""
        ready = self.is_ready(upstream)
        if ready and upstream.position is None:
            self.policy.enter(upstream)
            self._on_room()
        elif not ready and upstream.position is not None:
            self.policy.leave(upstream)

    def want_version(self, version: int | None) -> None:
        self.wanted_version = version
        for upstream in list(self):
            self.refresh(upstream)

    def status_of(self, upstream: Upstream) -> str:
        """In a word, what keeps it from requests, or how it is."""
        if upstream.draining:
            return "draining"
        if upstream.paused:
            return "paused"
        if not upstream.has_version(self.wanted_version):
            return "stale"
        return upstream.state.value

    def why(self, upstream: Upstream) -> str:
        """What more there is to say about that."""
        if not upstream.has_version(self.wanted_version):
            return f"it has version {upstream.version}, {self.wanted_version} is wanted"
        if not upstream.reason and len(upstream.in_flight) >= upstream.limit:
            return f"full: {len(upstream.in_flight)} requests"
        return upstream.reason

    def close_connections(self) -> None:
        for upstream in [*self, *self._leaving]:
            for connection in [*upstream.idle, *upstream.in_flight]:
                connection.close()
            upstream.idle.clear()
