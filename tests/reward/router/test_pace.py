from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median

import pytest

from practicum.reward.router.fleet import Fleet
from practicum.reward.router.upstream import Upstream
from tests.reward.router.simulation import FakeRequest, Job, Simulation, begin, end, lognormal_jobs, make_fleet


def serve(fleet: Fleet, upstream: Upstream, latencies_s: list[float], now: float) -> float:
    """Requests of cost 1, one after the other. Returns when the last is done."""
    for latency_s in latencies_s:
        request = FakeRequest()
        begin(fleet, upstream, request, now)
        now += latency_s
        end(fleet, upstream, request, now)
        fleet.average.learn(1.0, latency_s)
        fleet.tick(now)
    return now


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("num_slots", [1, 4, 16])
def test_how_many_a_worker_does_at_once_is_learned(num_slots: int, seed: int) -> None:
    simulation = Simulation("round_robin", [1.0], num_slots)
    upstream = next(iter(simulation.fleet))
    simulation.run(lognormal_jobs(60, seed + 100, hint=True), max(1, num_slots // 2))  # a calm beginning
    seen: list[int] = []

    def watched(jobs: list[Job]) -> Iterator[Job]:
        for job in jobs:
            yield job
            seen.append(upstream.pace.slots)

    simulation.run(watched(lognormal_jobs(600, seed, hint=True)), 6 * num_slots)
    assert 0.7 * num_slots <= median(seen[300:]) <= 1.5 * num_slots


def test_no_limit_is_assumed_where_none_is_in_sight() -> None:
    simulation = Simulation("round_robin", [1.0], num_slots=1000)
    simulation.run(lognormal_jobs(600, 0, hint=True), 50)
    assert next(iter(simulation.fleet)).pace.slots >= 40


@pytest.mark.parametrize("num_in_flight", [4, 16, 64])
def test_slow_and_fast_workers_are_told_apart(num_in_flight: int) -> None:
    simulation = Simulation("round_robin", [1.0, 4.0], num_slots=1000)
    paces: list[float] = []

    def watched(jobs: list[Job]) -> Iterator[Job]:
        for job in jobs:
            yield job
            slow, fast = simulation.fleet
            paces.append(slow.pace.pace / fast.pace.pace)

    simulation.run(watched(lognormal_jobs(600, 0, hint=True)), num_in_flight)
    assert 2.0 < median(paces[300:]) < 6.0


def test_a_worker_that_nothing_is_known_of_counts_as_average() -> None:
    fleet = make_fleet("round_robin", 2)
    known, unknown = fleet
    now = serve(fleet, known, [0.3] * 200, 0.0)
    fleet.tick(now)
    assert unknown.pace.pace == pytest.approx(known.pace.pace, rel=0.05) == pytest.approx(0.3, rel=0.1)


def test_a_worker_that_hangs_looks_slower_at_every_tick() -> None:
    fleet = make_fleet("round_robin", 2)
    hangs, works = fleet
    now = serve(fleet, works, [0.1] * 100, serve(fleet, hangs, [0.1] * 100, 0.0))
    for _ in range(4):
        begin(fleet, hangs, FakeRequest(), now)
    paces = [hangs.pace.pace]
    for _ in range(40):
        now = serve(fleet, works, [0.1], now)
        paces.append(hangs.pace.pace)
    assert all(earlier < later for earlier, later in pairwise(paces))
    assert paces[-1] > 5.0 * works.pace.pace
    assert hangs.pace.slowdown(4, 4.0) > 5.0  # it has been silent that long
    assert works.pace.slowdown(1, 0.05) < 1.5


def test_what_was_given_up_is_not_taken_for_done() -> None:
    fleet = make_fleet("round_robin", 2)
    fails, works = fleet
    now = serve(fleet, works, [0.1] * 100, serve(fleet, fails, [0.1] * 100, 0.0))
    before = fails.pace.pace
    for _ in range(20):  # fails at once: that is not fast
        request = FakeRequest()
        begin(fleet, fails, request, now)
        end(fleet, fails, request, now + 0.001, completed=False)
        now += 0.001
    fleet.tick(now)
    assert fails.pace.pace >= 0.95 * before


def test_a_worker_that_was_slow_long_ago_is_tried_again() -> None:
    fleet = make_fleet("round_robin", 2)
    slow, works = fleet
    now = 0.0
    for _ in range(100):
        now = serve(fleet, works, [0.1] * 5, serve(fleet, slow, [1.0], now))
    assert slow.pace.pace > 3.0 * works.pace.pace
    serve(fleet, works, [0.1] * 1200, now)  # two minutes
    assert slow.pace.pace == pytest.approx(works.pace.pace, rel=0.25)


def test_a_worker_that_has_started_anew_counts_as_average_again() -> None:
    fleet = make_fleet("round_robin", 2)
    slow, works = fleet
    serve(fleet, works, [0.1] * 200, serve(fleet, slow, [1.0] * 100, 0.0))
    usual = slow.pace.usual
    slow.pace.forget()
    assert slow.pace.pace == pytest.approx(fleet.average.pace)
    assert slow.pace.usual == usual


def test_what_is_usual_is_not_dragged_along_by_a_bad_time() -> None:
    fleet = make_fleet("round_robin", 2)
    bad, works = fleet
    now = serve(fleet, works, [0.1] * 300, serve(fleet, bad, [0.1] * 300, 0.0))
    usual = bad.pace.usual
    assert usual == pytest.approx(0.1, rel=0.2)
    now = serve(fleet, bad, [5.0] * 100, now)
    assert bad.pace.slowdown(1, 0.0) > 5.0
    assert bad.pace.usual == pytest.approx(usual, rel=0.25)
    serve(fleet, bad, [0.1] * 300, now)
    assert bad.pace.slowdown(1, 0.0) == pytest.approx(1.0, rel=0.3)


def test_one_request_that_takes_far_too_long_does_not_make_a_worker_slow() -> None:
    fleet = make_fleet("round_robin", 1)
    (upstream,) = fleet
    now = serve(fleet, upstream, [0.1] * 100, 0.0)
    serve(fleet, upstream, [60.0], now)
    assert upstream.pace.slowdown(1, 0.0) < 3.0


def test_more_requests_explain_that_they_take_longer() -> None:
    simulation = Simulation("round_robin", [1.0], num_slots=2)
    simulation.run(lognormal_jobs(100, 0, hint=True), 2)
    upstream = next(iter(simulation.fleet))
    slowdowns: list[float] = []

    def watched(jobs: list[Job]) -> Iterator[Job]:
        for job in jobs:
            yield job
            slowdowns.append(upstream.pace.slowdown(1, 0.0))

    simulation.run(watched(lognormal_jobs(400, 1, hint=True)), 40)  # each waits for twenty others
    assert median(slowdowns[100:]) < 2.0


def test_what_is_usual_follows_a_slow_drift() -> None:
    fleet = make_fleet("round_robin", 1)
    (upstream,) = fleet
    now = serve(fleet, upstream, [0.1] * 300, 0.0)
    serve(fleet, upstream, [0.14] * 3000, now)
    assert upstream.pace.usual == pytest.approx(0.14, rel=0.1)


def test_nothing_is_usual_before_enough_is_known() -> None:
    fleet = make_fleet("round_robin", 1)
    (upstream,) = fleet
    now = serve(fleet, upstream, [0.1] * 10, 0.0)
    assert upstream.pace.usual is None and upstream.pace.slowdown(3, 10.0) == 1.0
    serve(fleet, upstream, [0.1] * 50, now)
    assert upstream.pace.usual is not None


def test_nothing_passes_while_nobody_asks() -> None:
    fleet = make_fleet("round_robin", 1)
    (upstream,) = fleet
    now = serve(fleet, upstream, [0.1] * 200, 0.0)
    serve(fleet, upstream, [0.1] * 5, now + 3.0)
    assert upstream.pace.pace == pytest.approx(0.1, rel=0.1)
