from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.errors import RouterError
from practicum.reward.router.cost import Costs
from practicum.reward.router.fleet import Fleet
from practicum.reward.router.policy import POLICIES
from practicum.reward.router.settings import RouterSettings
from practicum.reward.router.upstream import State, Upstream
from tests.reward.router.simulation import FakeRequest, add_worker, begin, end, make_fleet, make_head, worker


def ready(fleet: Fleet) -> set[str]:
    return {upstream.url for upstream in fleet.policy.ready}


def watched_fleet(num_workers: int, max_in_flight: int = 2) -> tuple[Fleet, list[int]]:
    """A fleet, and how many were ready each time that room appeared."""
    policy = POLICIES["least_requests"](RouterSettings.make())
    calls: list[int] = []
    fleet = Fleet(policy, max_in_flight, lambda: calls.append(len(policy.ready)))
    for index in range(num_workers):
        add_worker(fleet, f"http://w{index}:80")
    calls.clear()
    return fleet, calls


# The book


def test_workers_are_found_by_their_address() -> None:
    fleet = make_fleet("round_robin", 2)
    assert len(fleet) == 2
    assert [upstream.url for upstream in fleet] == ["http://w0:80", "http://w1:80"]
    for url in ("http://w1:80", "http://w1:80/", "http://w1", "http://W1"):
        assert worker(fleet, url).url == "http://w1:80"


@pytest.mark.parametrize("url", ["http://w0:80", "http://w0:80/", "http://w0", "http://W0:80"])
def test_a_worker_is_not_added_twice(url: str) -> None:
    fleet = make_fleet("round_robin", 1)
    with pytest.raises(RouterError, match=f"worker {url} is here already"):
        fleet.add(url)
    assert len(fleet) == 1


def test_an_unknown_worker_is_not_found() -> None:
    assert make_fleet("round_robin", 2).find("http://x:1") is None


@pytest.mark.parametrize(
    "url", ["", "w0", "w0:80", "ftp://w0", "http://", "http://w0:0", "http://w0:x", "http://w0/path"]
)
def test_what_is_no_address_of_a_worker_is_refused(url: str) -> None:
    fleet = make_fleet("round_robin", 1)
    for method in (fleet.add, fleet.find):
        with pytest.raises(RouterError, match="worker "):
            method(url)
    assert len(fleet) == 1


def test_a_removed_worker_can_be_added_again() -> None:
    fleet = make_fleet("round_robin", 2)
    old = worker(fleet, "http://w0:80")
    fleet.remove(old)
    assert len(fleet) == 1 and ready(fleet) == {"http://w1:80"}
    assert fleet.find("http://w0:80") is None
    assert add_worker(fleet, "http://w0:80") is not old
    assert ready(fleet) == {"http://w0:80", "http://w1:80"}


class Line:
    """An idle connection."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_a_removed_worker_finishes_what_it_has() -> None:
    fleet = make_fleet("least_requests", 2)
    leaving = worker(fleet, "http://w0:80")
    requests = [FakeRequest(), FakeRequest()]
    for request in requests:
        begin(fleet, leaving, request)
    line: Any = Line()
    leaving.idle.append(line)
    fleet.remove(leaving)
    assert ready(fleet) == {"http://w1:80"}
    for request in requests:
        assert leaving in fleet.tick(0.0) and not line.closed
        end(fleet, leaving, request)
    assert leaving not in fleet.tick(0.0)
    assert line.closed
    assert not leaving.in_flight and leaving.backlog == 0.0
    assert ready(fleet) == {"http://w1:80"}


# Who is ready


@pytest.mark.parametrize("state", State)
def test_only_who_is_alive_is_ready(state: State) -> None:
    fleet = make_fleet("round_robin", 1)
    (upstream,) = fleet
    upstream.state = state
    fleet.refresh(upstream)
    assert fleet.is_ready(upstream) is (state in (State.UP, State.TRIAL))
    assert ready(fleet) == ({upstream.url} if fleet.is_ready(upstream) else set())
    assert fleet.status_of(upstream) == state.value


@pytest.mark.parametrize(("what", "status"), [("paused", "paused"), ("draining", "draining")])
def test_who_is_paused_or_drained_is_out_and_comes_back(what: str, status: str) -> None:
    fleet = make_fleet("least_requests", 2)
    upstream = worker(fleet, "http://w0:80")
    setattr(upstream, what, True)
    fleet.refresh(upstream)
    fleet.refresh(upstream)  # nothing new
    assert ready(fleet) == {"http://w1:80"} and fleet.status_of(upstream) == status
    setattr(upstream, what, False)
    fleet.refresh(upstream)
    fleet.refresh(upstream)
    assert ready(fleet) == {"http://w0:80", "http://w1:80"} and fleet.status_of(upstream) == "up"


def test_who_has_old_weights_is_out_until_they_are_new_enough() -> None:
    fleet = make_fleet("least_requests", 3)
    for version, upstream in zip((None, 4, 5), fleet, strict=True):
        upstream.version = version
    fleet.want_version(5)
    assert ready(fleet) == {"http://w2:80"}
    assert [fleet.status_of(upstream) for upstream in fleet] == ["stale", "stale", "up"]
    behind = worker(fleet, "http://w1:80")
    behind.version = 6
    fleet.refresh(behind)
    assert ready(fleet) == {"http://w1:80", "http://w2:80"}
    fleet.want_version(None)
    assert len(ready(fleet)) == 3


def test_who_has_all_it_may_have_is_out_until_something_is_done() -> None:
    fleet = make_fleet("least_requests", 2, max_in_flight=2)
    upstream = worker(fleet, "http://w0:80")
    requests = [FakeRequest(), FakeRequest()]
    begin(fleet, upstream, requests[0])
    assert upstream.url in ready(fleet)
    begin(fleet, upstream, requests[1])
    assert ready(fleet) == {"http://w1:80"}
    end(fleet, upstream, requests[0])
    assert ready(fleet) == {"http://w0:80", "http://w1:80"}


def test_a_limit_can_be_changed() -> None:
    fleet = make_fleet("least_requests", 1)
    (upstream,) = fleet
    begin(fleet, upstream, FakeRequest())
    upstream.limit = 1
    fleet.refresh(upstream)
    assert ready(fleet) == set()
    upstream.limit = 2
    fleet.refresh(upstream)
    assert ready(fleet) == {upstream.url}


# Room


def test_room_is_told_of_when_somebody_becomes_ready_and_only_then() -> None:
    fleet, calls = watched_fleet(1)
    (upstream,) = fleet
    requests = [FakeRequest() for _ in range(3)]
    begin(fleet, upstream, requests[0])
    end(fleet, upstream, requests[0])
    assert calls == []  # it was ready all the time
    begin(fleet, upstream, requests[1])
    begin(fleet, upstream, requests[2])
    assert calls == []
    end(fleet, upstream, requests[1])
    assert calls == [1]
    upstream.paused = True
    fleet.refresh(upstream)
    assert calls == [1]
    end(fleet, upstream, requests[2])
    assert calls == [1]  # done, but still paused
    upstream.paused = False
    fleet.refresh(upstream)
    assert calls == [1, 1]
    add_worker(fleet, "http://new:80")
    assert calls == [1, 1, 2]
    fleet.want_version(1)
    assert calls == [1, 1, 2]
    fleet.want_version(None)
    assert calls == [1, 1, 2, 1, 2]


def test_room_can_be_taken_at_once() -> None:
    waiting = [FakeRequest() for _ in range(5)]
    policy = POLICIES["least_requests"](RouterSettings.make())

    def serve_waiting() -> None:
        while waiting and (upstream := policy.choose(waiting[0])) is not None:
            begin(fleet, upstream, waiting.pop(0))

    fleet = Fleet(policy, 1, serve_waiting)
    upstream = add_worker(fleet, "http://a:1")
    assert len(waiting) == 4 and len(upstream.in_flight) == 1
    while upstream.in_flight:
        (request,) = upstream.in_flight
        fleet.end(upstream, request, 1.0, 0.0, completed=True)
    assert waiting == [] and ready(fleet) == {"http://a:1"}


# Counts


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 100.0), st.booleans(), st.floats(0.0, 3.0)), max_size=25),
    st.randoms(),
)
def test_counts_return_to_zero(policy: str, sent: list[tuple[int, float, bool, float]], random: Any) -> None:
    fleet = make_fleet(policy, 4, max_in_flight=3)
    workers = list(fleet)
    open_ones: list[tuple[Upstream, FakeRequest, bool]] = []
    now = 0.0
    for index, cost, completed, seconds in sent:
        now += seconds
        if len(workers[index].in_flight) < 3:
            open_ones.append((workers[index], FakeRequest(cost=cost), completed))
            begin(fleet, workers[index], open_ones[-1][1], now)
        check_counts(fleet, open_ones)
    random.shuffle(open_ones)
    while open_ones:
        upstream, request, completed = open_ones.pop()
        now += 0.5
        end(fleet, upstream, request, now, completed=completed)
        check_counts(fleet, open_ones)
    assert {upstream.backlog for upstream in workers} == {0.0}
    assert len(fleet.policy.ready) == 4
    assert sum(upstream.num_requests for upstream in workers) <= len(sent)


def test_counts_return_to_zero_whatever_a_request_says_it_costs() -> None:
    fleet, costs = make_fleet("round_robin", 1), Costs()
    (upstream,) = fleet
    costs.of(make_head(cost=4.0), b"")
    request = FakeRequest(cost=costs.of(make_head(cost=5e-324), b"")[0])
    begin(fleet, upstream, request)
    end(fleet, upstream, request, 0.1)
    assert fleet.num_in_flight == 0


def check_counts(fleet: Fleet, open_ones: list[tuple[Upstream, FakeRequest, bool]]) -> None:
    assert fleet.num_in_flight == len(open_ones)
    for upstream in fleet:
        costs = [request.cost for holder, request, _ in open_ones if holder is upstream]
        assert len(upstream.in_flight) == len(costs)
        assert upstream.backlog == pytest.approx(sum(costs))
        assert (upstream.position is not None) is (len(costs) < upstream.limit)
    assert [upstream.position for upstream in fleet.policy.ready] == list(range(len(fleet.policy.ready)))


def test_closing_closes_every_connection() -> None:
    fleet = make_fleet("round_robin", 2)
    staying, leaving = fleet
    lines: list[Any] = [Line() for _ in range(4)]
    staying.idle.append(lines[0])
    fleet.begin(staying, lines[1], 1.0, 0.0)
    leaving.idle.append(lines[2])
    fleet.begin(leaving, lines[3], 1.0, 0.0)
    fleet.remove(leaving)
    fleet.close_connections()
    assert all(line.closed for line in lines)
    assert staying.idle == [] and leaving.idle == []
