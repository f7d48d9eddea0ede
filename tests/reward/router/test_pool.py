from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.errors import RouterError
from practicum.reward.router.estimate import CostModel, PoolAverage
from practicum.reward.router.policy import POLICIES
from practicum.reward.router.pool import State, Upstream, UpstreamPool
from practicum.reward.router.settings import RouterSettings
from tests.reward.router.simulation import FakeRequest, add_worker, begin, end, make_head, make_pool, worker


def ready(pool: UpstreamPool) -> set[str]:
    return {upstream.url for upstream in pool.policy.ready}


def watched_fleet(num_workers: int, max_in_flight: int = 2) -> tuple[UpstreamPool, list[int]]:
    """A pool, and how many were ready each time that room appeared."""
    policy = POLICIES["least_requests"](RouterSettings.make())
    calls: list[int] = []
    pool = UpstreamPool(policy, max_in_flight, lambda: calls.append(len(policy.ready)))
    for index in range(num_workers):
        add_worker(pool, f"http://w{index}:80")
    calls.clear()
    return pool, calls


# The book


def test_workers_are_found_by_their_address() -> None:
    pool = make_pool("round_robin", 2)
    assert len(pool) == 2
    assert [upstream.url for upstream in pool] == ["http://w0:80", "http://w1:80"]
    for url in ("http://w1:80", "http://w1:80/", "http://w1", "http://W1"):
        assert worker(pool, url).url == "http://w1:80"


@pytest.mark.parametrize("url", ["http://w0:80", "http://w0:80/", "http://w0", "http://W0:80"])
def test_a_worker_is_not_added_twice(url: str) -> None:
    pool = make_pool("round_robin", 1)
    with pytest.raises(RouterError, match=f"worker {url} is here already"):
        pool.add(url)
    assert len(pool) == 1


def test_an_unknown_worker_is_not_found() -> None:
    assert make_pool("round_robin", 2).find("http://x:1") is None


@pytest.mark.parametrize(
    "url", ["", "w0", "w0:80", "ftp://w0", "http://", "http://w0:0", "http://w0:x", "http://w0/path"]
)
def test_what_is_no_address_of_a_worker_is_refused(url: str) -> None:
    pool = make_pool("round_robin", 1)
    for method in (pool.add, pool.find):
        with pytest.raises(RouterError, match="worker "):
            method(url)
    assert len(pool) == 1


def test_a_removed_worker_can_be_added_again() -> None:
    pool = make_pool("round_robin", 2)
    old = worker(pool, "http://w0:80")
    pool.remove(old)
    assert len(pool) == 1 and ready(pool) == {"http://w1:80"}
    assert pool.find("http://w0:80") is None
    assert add_worker(pool, "http://w0:80") is not old
    assert ready(pool) == {"http://w0:80", "http://w1:80"}


class Line:
    """An idle connection."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_a_removed_worker_finishes_what_it_has() -> None:
    pool = make_pool("least_requests", 2)
    leaving = worker(pool, "http://w0:80")
    requests = [FakeRequest(), FakeRequest()]
    for request in requests:
        begin(pool, leaving, request)
    line: Any = Line()
    leaving.idle.append(line)
    pool.remove(leaving)
    assert ready(pool) == {"http://w1:80"}
    for request in requests:
        assert leaving in pool.tick(0.0) and not line.closed
        end(pool, leaving, request)
    assert leaving not in pool.tick(0.0)
    assert line.closed
    assert not leaving.in_flight and leaving.backlog == 0.0
    assert ready(pool) == {"http://w1:80"}


# Who is ready


@pytest.mark.parametrize("state", State)
def test_only_healthy_workers_are_ready(state: State) -> None:
    pool = make_pool("round_robin", 1)
    (upstream,) = pool
    upstream.state = state
    pool.refresh(upstream)
    assert pool.is_ready(upstream) is (state in (State.UP, State.TRIAL))
    assert ready(pool) == ({upstream.url} if pool.is_ready(upstream) else set())
    assert pool.status(upstream) == state.value


@pytest.mark.parametrize(("what", "status"), [("paused", "paused"), ("draining", "draining")])
def test_a_paused_or_drained_worker_is_not_ready_and_comes_back(what: str, status: str) -> None:
    pool = make_pool("least_requests", 2)
    upstream = worker(pool, "http://w0:80")
    setattr(upstream, what, True)
    pool.refresh(upstream)
    pool.refresh(upstream)  # nothing new
    assert ready(pool) == {"http://w1:80"} and pool.status(upstream) == status
    setattr(upstream, what, False)
    pool.refresh(upstream)
    pool.refresh(upstream)
    assert ready(pool) == {"http://w0:80", "http://w1:80"} and pool.status(upstream) == "up"


def test_a_worker_with_old_weights_is_not_ready_until_they_are_new_enough() -> None:
    pool = make_pool("least_requests", 3)
    for version, upstream in zip((None, 4, 5), pool, strict=True):
        upstream.version = version
    pool.want_version(5)
    assert ready(pool) == {"http://w2:80"}
    assert [pool.status(upstream) for upstream in pool] == ["stale", "stale", "up"]
    behind = worker(pool, "http://w1:80")
    behind.version = 6
    pool.refresh(behind)
    assert ready(pool) == {"http://w1:80", "http://w2:80"}
    pool.want_version(None)
    assert len(ready(pool)) == 3


def test_a_worker_at_its_limit_is_not_ready_until_a_request_is_done() -> None:
    pool = make_pool("least_requests", 2, max_in_flight=2)
    upstream = worker(pool, "http://w0:80")
    requests = [FakeRequest(), FakeRequest()]
    begin(pool, upstream, requests[0])
    assert upstream.url in ready(pool)
    begin(pool, upstream, requests[1])
    assert ready(pool) == {"http://w1:80"}
    end(pool, upstream, requests[0])
    assert ready(pool) == {"http://w0:80", "http://w1:80"}


def test_a_limit_can_be_changed() -> None:
    pool = make_pool("least_requests", 1)
    (upstream,) = pool
    begin(pool, upstream, FakeRequest())
    upstream.limit = 1
    pool.refresh(upstream)
    assert ready(pool) == set()
    upstream.limit = 2
    pool.refresh(upstream)
    assert ready(pool) == {upstream.url}


# Room


def test_on_ready_is_called_when_a_worker_becomes_ready_and_only_then() -> None:
    pool, calls = watched_fleet(1)
    (upstream,) = pool
    requests = [FakeRequest() for _ in range(3)]
    begin(pool, upstream, requests[0])
    end(pool, upstream, requests[0])
    assert calls == []  # it was ready all the time
    begin(pool, upstream, requests[1])
    begin(pool, upstream, requests[2])
    assert calls == []
    end(pool, upstream, requests[1])
    assert calls == [1]
    upstream.paused = True
    pool.refresh(upstream)
    assert calls == [1]
    end(pool, upstream, requests[2])
    assert calls == [1]  # done, but still paused
    upstream.paused = False
    pool.refresh(upstream)
    assert calls == [1, 1]
    add_worker(pool, "http://new:80")
    assert calls == [1, 1, 2]
    pool.want_version(1)
    assert calls == [1, 1, 2]
    pool.want_version(None)
    assert calls == [1, 1, 2, 1, 2]


def test_room_can_be_taken_at_once() -> None:
    waiting = [FakeRequest() for _ in range(5)]
    policy = POLICIES["least_requests"](RouterSettings.make())

    def serve_waiting() -> None:
        while waiting and (upstream := policy.choose(waiting[0])) is not None:
            begin(pool, upstream, waiting.pop(0))

    pool = UpstreamPool(policy, 1, serve_waiting)
    upstream = add_worker(pool, "http://a:1")
    assert len(waiting) == 4 and len(upstream.in_flight) == 1
    while upstream.in_flight:
        (request,) = upstream.in_flight
        pool.end(upstream, request, 1.0, 0.0, completed=True)
    assert waiting == [] and ready(pool) == {"http://a:1"}


# Counts


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 100.0), st.booleans(), st.floats(0.0, 3.0)), max_size=25),
    st.randoms(),
)
def test_counts_return_to_zero(policy: str, sent: list[tuple[int, float, bool, float]], random: Any) -> None:
    pool = make_pool(policy, 4, max_in_flight=3)
    workers = list(pool)
    open_ones: list[tuple[Upstream, FakeRequest, bool]] = []
    now = 0.0
    for index, cost, completed, seconds in sent:
        now += seconds
        if len(workers[index].in_flight) < 3:
            open_ones.append((workers[index], FakeRequest(cost=cost), completed))
            begin(pool, workers[index], open_ones[-1][1], now)
        check_counts(pool, open_ones)
    random.shuffle(open_ones)
    while open_ones:
        upstream, request, completed = open_ones.pop()
        now += 0.5
        end(pool, upstream, request, now, completed=completed)
        check_counts(pool, open_ones)
    assert {upstream.backlog for upstream in workers} == {0.0}
    assert len(pool.policy.ready) == 4
    assert sum(upstream.num_requests for upstream in workers) <= len(sent)


def test_counts_return_to_zero_whatever_a_request_says_it_costs() -> None:
    pool, costs = make_pool("round_robin", 1), CostModel()
    (upstream,) = pool
    costs.of(make_head(cost=4.0), b"")
    request = FakeRequest(cost=costs.of(make_head(cost=5e-324), b"")[0])
    begin(pool, upstream, request)
    end(pool, upstream, request, 0.1)
    assert pool.num_in_flight == 0


def check_counts(pool: UpstreamPool, open_ones: list[tuple[Upstream, FakeRequest, bool]]) -> None:
    assert pool.num_in_flight == len(open_ones)
    for upstream in pool:
        costs = [request.cost for holder, request, _ in open_ones if holder is upstream]
        assert len(upstream.in_flight) == len(costs)
        assert upstream.backlog == pytest.approx(sum(costs))
        assert (upstream.position is not None) is (len(costs) < upstream.limit)
    assert [upstream.position for upstream in pool.policy.ready] == list(range(len(pool.policy.ready)))


def test_closing_closes_every_connection() -> None:
    pool = make_pool("round_robin", 2)
    staying, leaving = pool
    lines: list[Any] = [Line() for _ in range(4)]
    staying.idle.append(lines[0])
    pool.begin(staying, lines[1], 1.0, 0.0)
    leaving.idle.append(lines[2])
    pool.begin(leaving, lines[3], 1.0, 0.0)
    pool.remove(leaving)
    pool.close_connections()
    assert all(line.closed for line in lines)
    assert staying.idle == [] and leaving.idle == []


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://10.0.0.7:8000", ("10.0.0.7", 8000)),
        ("http://10.0.0.7:8000/", ("10.0.0.7", 8000)),
        ("http://worker", ("worker", 80)),
        ("https://worker", ("worker", 443)),
        ("http://[::1]:8000", ("::1", 8000)),
        ("HTTP://Worker:81", ("worker", 81)),
    ],
)
def test_where_a_worker_is(url: str, address: tuple[str, int]) -> None:
    upstream = Upstream(url, PoolAverage(), limit=4)
    assert upstream.address == address
    assert upstream.url == url.rstrip("/")
    assert (upstream.tls is not None) is url.startswith("https")


def test_a_new_worker_has_nothing_in_flight_and_is_not_known_to_be_up() -> None:
    upstream = Upstream("http://a:1", PoolAverage(), limit=4)
    assert upstream.state is State.STARTING and upstream.reason == "not probed yet"
    assert (len(upstream.in_flight), upstream.backlog, upstream.num_requests, upstream.limit) == (0, 0.0, 0, 4)
    assert not upstream.paused and not upstream.draining and upstream.position is None


def test_a_bad_url_is_refused() -> None:
    with pytest.raises(ValueError, match="is not a URL such as"):
        Upstream("worker:80", PoolAverage(), limit=4)


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [(None, None, True), (3, None, True), (None, 3, False), (2, 3, False), (3, 3, True), (4, 3, True), (0, 0, True)],
)
def test_weights_must_be_as_new_as_wanted(version: int | None, wanted: int | None, expected: bool) -> None:
    upstream = Upstream("http://a:1", PoolAverage(), limit=4)
    upstream.version = version
    assert upstream.has_version(wanted) is expected


def loaded(num: int) -> tuple[Upstream, list[Any]]:
    pool = make_pool("round_robin", 1, max_in_flight=10_000)
    (upstream,) = pool
    requests: list[Any] = [FakeRequest() for _ in range(num)]
    for request in requests:
        begin(pool, upstream, request)
    return upstream, requests


@pytest.mark.parametrize("num", [1, 5, 8, 16, 64])
def test_older_ones_are_those_that_came_before(num: int) -> None:
    upstream, requests = loaded(num)
    assert [upstream.num_older(request) for request in requests] == list(range(num))


def test_older_ones_that_are_done_no_longer_count() -> None:
    pool = make_pool("round_robin", 1)
    (upstream,) = pool
    requests: list[Any] = [FakeRequest() for _ in range(4)]
    for request in requests:
        begin(pool, upstream, request)
    end(pool, upstream, requests[1])
    assert [upstream.num_older(requests[index]) for index in (0, 2, 3)] == [0, 1, 2]


def test_with_many_in_flight_they_are_counted_now_and_then() -> None:
    counted = []
    for num in range(9, 41):
        upstream, requests = loaded(num)
        counted.append(upstream.num_older(requests[-1]) is not None)
    assert sum(counted) == 4


def test_beyond_a_thousand_or_so_they_are_not_counted() -> None:
    upstream, requests = loaded(4000)
    assert upstream.num_older(requests[0]) == 0
    assert upstream.num_older(requests[-1]) is None
