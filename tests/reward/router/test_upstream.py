from __future__ import annotations

from typing import Any

import pytest

from practicum.reward.router.pace import Average
from practicum.reward.router.upstream import State, Upstream
from tests.reward.router.simulation import FakeRequest, begin, end, make_fleet


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
    upstream = Upstream(url, Average(), limit=4)
    assert upstream.address == address
    assert upstream.url == url.rstrip("/")
    assert (upstream.tls is not None) is url.startswith("https")


def test_a_new_worker_has_nothing_in_hand_and_is_not_known_to_live() -> None:
    upstream = Upstream("http://a:1", Average(), limit=4)
    assert upstream.state is State.STARTING and upstream.reason == "not probed yet"
    assert (len(upstream.in_flight), upstream.backlog, upstream.num_requests, upstream.limit) == (0, 0.0, 0, 4)
    assert not upstream.paused and not upstream.draining and upstream.position is None


def test_a_bad_url_is_refused() -> None:
    with pytest.raises(ValueError, match="is not a URL such as"):
        Upstream("worker:80", Average(), limit=4)


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [(None, None, True), (3, None, True), (None, 3, False), (2, 3, False), (3, 3, True), (4, 3, True), (0, 0, True)],
)
def test_weights_must_be_as_new_as_wanted(version: int | None, wanted: int | None, expected: bool) -> None:
    upstream = Upstream("http://a:1", Average(), limit=4)
    upstream.version = version
    assert upstream.has_version(wanted) is expected


def loaded(num: int) -> tuple[Upstream, list[Any]]:
    fleet = make_fleet("round_robin", 1, max_in_flight=10_000)
    (upstream,) = fleet
    requests: list[Any] = [FakeRequest() for _ in range(num)]
    for request in requests:
        begin(fleet, upstream, request)
    return upstream, requests


@pytest.mark.parametrize("num", [1, 5, 8, 16, 64])
def test_older_ones_are_those_that_came_before(num: int) -> None:
    upstream, requests = loaded(num)
    assert [upstream.num_older(request) for request in requests] == list(range(num))


def test_older_ones_that_are_done_no_longer_count() -> None:
    fleet = make_fleet("round_robin", 1)
    (upstream,) = fleet
    requests: list[Any] = [FakeRequest() for _ in range(4)]
    for request in requests:
        begin(fleet, upstream, request)
    end(fleet, upstream, requests[1])
    assert [upstream.num_older(requests[index]) for index in (0, 2, 3)] == [0, 1, 2]


def test_with_many_in_flight_they_are_counted_now_and_then() -> None:
    counted = []
    for num in range(9, 41):
        upstream, requests = loaded(num)
        counted.append(upstream.num_older(requests[-1]) is not None)
    assert sum(counted) == 4


def test_beyond_a_thousand_or_so_nobody_counts() -> None:
    upstream, requests = loaded(4000)
    assert upstream.num_older(requests[0]) == 0
    assert upstream.num_older(requests[-1]) is None
