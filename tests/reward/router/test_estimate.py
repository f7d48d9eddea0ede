from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.reward.router.estimate import CostModel
from practicum.reward.router.pool import Upstream, UpstreamPool
from tests.reward.router.simulation import (
    FakeRequest,
    Job,
    Simulation,
    begin,
    end,
    lognormal_jobs,
    make_head,
    make_pool,
)


def serve(pool: UpstreamPool, upstream: Upstream, latencies_s: list[float], now: float) -> float:
    """Requests of cost 1, one after the other. Returns when the last is done."""
    for latency_s in latencies_s:
        request = FakeRequest()
        begin(pool, upstream, request, now)
        now += latency_s
        end(pool, upstream, request, now)
        pool.average.record(1.0, latency_s)
        pool.tick(now)
    return now


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("num_slots", [1, 4, 16])
def test_how_many_a_worker_does_at_once_is_learned(num_slots: int, seed: int) -> None:
    simulation = Simulation("round_robin", [1.0], num_slots)
    upstream = next(iter(simulation.pool))
    simulation.run(lognormal_jobs(60, seed + 100, hint=True), max(1, num_slots // 2))  # a calm beginning
    seen: list[int] = []

    def watched(jobs: list[Job]) -> Iterator[Job]:
        for job in jobs:
            yield job
            seen.append(upstream.estimate.slots)

    simulation.run(watched(lognormal_jobs(600, seed, hint=True)), 6 * num_slots)
    assert 0.7 * num_slots <= median(seen[300:]) <= 1.5 * num_slots


def test_no_limit_is_assumed_where_none_is_in_sight() -> None:
    simulation = Simulation("round_robin", [1.0], num_slots=1000)
    simulation.run(lognormal_jobs(600, 0, hint=True), 50)
    assert next(iter(simulation.pool)).estimate.slots >= 40


@pytest.mark.parametrize("num_in_flight", [4, 16, 64])
def test_slow_and_fast_workers_are_told_apart(num_in_flight: int) -> None:
    simulation = Simulation("round_robin", [1.0, 4.0], num_slots=1000)
    paces: list[float] = []

    def watched(jobs: list[Job]) -> Iterator[Job]:
        for job in jobs:
            yield job
            slow, fast = simulation.pool
            paces.append(slow.estimate.seconds_per_cost / fast.estimate.seconds_per_cost)

    simulation.run(watched(lognormal_jobs(600, 0, hint=True)), num_in_flight)
    assert 2.0 < median(paces[300:]) < 6.0


def test_a_worker_that_nothing_is_known_of_counts_as_average() -> None:
    pool = make_pool("round_robin", 2)
    known, unknown = pool
    now = serve(pool, known, [0.3] * 200, 0.0)
    pool.tick(now)
    assert unknown.estimate.seconds_per_cost == pytest.approx(known.estimate.seconds_per_cost, rel=0.05)
    assert known.estimate.seconds_per_cost == pytest.approx(0.3, rel=0.1)


def test_a_worker_that_hangs_looks_slower_at_every_tick() -> None:
    pool = make_pool("round_robin", 2)
    hangs, works = pool
    now = serve(pool, works, [0.1] * 100, serve(pool, hangs, [0.1] * 100, 0.0))
    for _ in range(4):
        begin(pool, hangs, FakeRequest(), now)
    paces = [hangs.estimate.seconds_per_cost]
    for _ in range(40):
        now = serve(pool, works, [0.1], now)
        paces.append(hangs.estimate.seconds_per_cost)
    assert all(earlier < later for earlier, later in pairwise(paces))
    assert paces[-1] > 5.0 * works.estimate.seconds_per_cost
    assert hangs.estimate.slowdown(4, 4.0) > 5.0  # it has been silent that long
    assert works.estimate.slowdown(1, 0.05) < 1.5


def test_what_was_given_up_is_not_taken_for_done() -> None:
    pool = make_pool("round_robin", 2)
    fails, works = pool
    now = serve(pool, works, [0.1] * 100, serve(pool, fails, [0.1] * 100, 0.0))
    before = fails.estimate.seconds_per_cost
    for _ in range(20):  # fails at once: that is not fast
        request = FakeRequest()
        begin(pool, fails, request, now)
        end(pool, fails, request, now + 0.001, completed=False)
        now += 0.001
    pool.tick(now)
    assert fails.estimate.seconds_per_cost >= 0.95 * before


def test_a_worker_that_was_slow_long_ago_is_tried_again() -> None:
    pool = make_pool("round_robin", 2)
    slow, works = pool
    now = 0.0
    for _ in range(100):
        now = serve(pool, works, [0.1] * 5, serve(pool, slow, [1.0], now))
    assert slow.estimate.seconds_per_cost > 3.0 * works.estimate.seconds_per_cost
    serve(pool, works, [0.1] * 1200, now)  # two minutes
    assert slow.estimate.seconds_per_cost == pytest.approx(works.estimate.seconds_per_cost, rel=0.25)


def test_a_worker_that_has_started_anew_counts_as_average_again() -> None:
    pool = make_pool("round_robin", 2)
    slow, works = pool
    serve(pool, works, [0.1] * 200, serve(pool, slow, [1.0] * 100, 0.0))
    usual = slow.estimate.usual
    slow.estimate.reset()
    assert slow.estimate.seconds_per_cost == pytest.approx(pool.average.seconds_per_cost)
    assert slow.estimate.usual == usual


def test_what_is_usual_is_not_dragged_along_by_a_bad_time() -> None:
    pool = make_pool("round_robin", 2)
    bad, works = pool
    now = serve(pool, works, [0.1] * 300, serve(pool, bad, [0.1] * 300, 0.0))
    usual = bad.estimate.usual
    assert usual == pytest.approx(0.1, rel=0.2)
    now = serve(pool, bad, [5.0] * 100, now)
    assert bad.estimate.slowdown(1, 0.0) > 5.0
    assert bad.estimate.usual == pytest.approx(usual, rel=0.25)
    serve(pool, bad, [0.1] * 300, now)
    assert bad.estimate.slowdown(1, 0.0) == pytest.approx(1.0, rel=0.3)


def test_one_request_that_takes_far_too_long_does_not_make_a_worker_slow() -> None:
    pool = make_pool("round_robin", 1)
    (upstream,) = pool
    now = serve(pool, upstream, [0.1] * 100, 0.0)
    serve(pool, upstream, [60.0], now)
    assert upstream.estimate.slowdown(1, 0.0) < 3.0


def test_more_requests_explain_that_they_take_longer() -> None:
    simulation = Simulation("round_robin", [1.0], num_slots=2)
    simulation.run(lognormal_jobs(100, 0, hint=True), 2)
    upstream = next(iter(simulation.pool))
    slowdowns: list[float] = []

    def watched(jobs: list[Job]) -> Iterator[Job]:
        for job in jobs:
            yield job
            slowdowns.append(upstream.estimate.slowdown(1, 0.0))

    simulation.run(watched(lognormal_jobs(400, 1, hint=True)), 40)  # each waits for twenty others
    assert median(slowdowns[100:]) < 2.0


def test_what_is_usual_follows_a_slow_drift() -> None:
    pool = make_pool("round_robin", 1)
    (upstream,) = pool
    now = serve(pool, upstream, [0.1] * 300, 0.0)
    serve(pool, upstream, [0.14] * 3000, now)
    assert upstream.estimate.usual == pytest.approx(0.14, rel=0.1)


def test_nothing_is_usual_before_enough_is_known() -> None:
    pool = make_pool("round_robin", 1)
    (upstream,) = pool
    now = serve(pool, upstream, [0.1] * 10, 0.0)
    assert upstream.estimate.usual is None and upstream.estimate.slowdown(3, 10.0) == 1.0
    serve(pool, upstream, [0.1] * 50, now)
    assert upstream.estimate.usual is not None


def test_nothing_passes_while_nobody_asks() -> None:
    pool = make_pool("round_robin", 1)
    (upstream,) = pool
    now = serve(pool, upstream, [0.1] * 200, 0.0)
    serve(pool, upstream, [0.1] * 5, now + 3.0)
    assert upstream.estimate.seconds_per_cost == pytest.approx(0.1, rel=0.1)


PLAIN = make_head()


def costs_of_headers(values: list[float]) -> list[float]:
    costs = CostModel()
    return [costs.of(make_head(cost=value), b"")[0] for value in values]


def lognormal(num: int, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [math.exp(rng.gauss(0.0, 1.0)) for _ in range(num)]


def test_the_header_is_believed_first_then_the_tokens_then_the_length() -> None:
    costs = CostModel()
    asks = b'{"prompt": "2+2=", "max_tokens": 100}'
    _, header = costs.of(make_head(cost=3.0), asks)
    _, tokens = costs.of(PLAIN, asks)
    _, length = costs.of(PLAIN, b'{"prompt": "2+2="}')
    assert len({header, tokens, length}) == 3
    assert costs.of(make_head(cost=9.0), b"")[1] is header
    assert costs.of(PLAIN, b'{"max_tokens":5}')[1] is tokens
    assert costs.of(PLAIN, b"")[1] is length


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_new_tokens"])
@pytest.mark.parametrize(
    "form", ['{{"{}": {}}}', '{{"{}":{}}}', '{{"{}"  :\n {}, "n": 7}}', '{{"parameters": {{"{}": {}}}}}']
)
def test_who_asks_for_more_tokens_costs_more(name: str, form: str) -> None:
    costs = CostModel()
    few, kind = costs.of(PLAIN, form.format(name, 10).encode())
    many, same = costs.of(PLAIN, form.format(name, 1000).encode())
    assert kind is same and many > 1.5 * few
    assert costs.of(make_head(cost=1.0), b"")[1] is not kind


@pytest.mark.parametrize(
    "body", [b'{"max_tokens": null}', b'{"max_tokens": "5"}', b'{"tokens": 5}', b'{"prompt": "\\"max_tokens\\": 5"}']
)
def test_what_only_looks_like_tokens_counts_by_its_length(body: bytes) -> None:
    costs = CostModel()
    assert costs.of(PLAIN, body)[1] is costs.of(PLAIN, b"")[1]


def test_a_longer_prompt_costs_more_for_the_same_tokens() -> None:
    costs = CostModel()
    bodies = [b'{"max_tokens": 10, "prompt": "%s"}' % (b"x" * num) for num in (0, 10_000)]
    short, long = [costs.of(PLAIN, body)[0] for body in bodies * 30][-2:]
    assert long > 2 * short


def test_a_longer_body_costs_more() -> None:
    costs = CostModel()
    for num in (10, 1000) * 30:
        costs.of(PLAIN, b"x" * num)
    assert costs.of(PLAIN, b"x" * 1000)[0] == pytest.approx(1001 / 11 * costs.of(PLAIN, b"x" * 10)[0], rel=0.05)


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e9])
def test_an_average_request_costs_about_1_in_any_unit(unit: float) -> None:
    told = costs_of_headers([unit * value for value in lognormal(2000)])
    assert sum(told) / len(told) == pytest.approx(1.0, abs=0.1)
    assert sum(told[-500:]) / 500 == pytest.approx(1.0, abs=0.15)


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=30), st.sampled_from([0.001, 7.0, 1e6]))
def test_the_unit_makes_no_difference(values: list[float], unit: float) -> None:
    assert costs_of_headers([unit * value for value in values]) == pytest.approx(costs_of_headers(values))


def test_the_mean_follows_when_another_unit_is_used() -> None:
    values = lognormal(1000)
    told = costs_of_headers([*values, *(1000.0 * value for value in values)])
    assert sum(told[-500:]) / 500 == pytest.approx(1.0, abs=0.15)


def test_a_kind_whose_requests_take_longer_costs_more() -> None:
    costs = CostModel()
    quick, slow = make_head(cost=5.0), PLAIN
    before = [costs.of(head, b"")[0] for head in (quick, slow)]
    assert before == [1.0, 1.0]
    for _ in range(100):
        costs.record(costs.of(quick, b"")[1], 1.0)
        costs.record(costs.of(slow, b"")[1], 4.0)
    costs.tick()
    one, four = (costs.of(head, b"")[0] for head in (quick, slow))
    assert four == pytest.approx(4.0 * one)
    assert (one + four) / 2 == pytest.approx(1.0, abs=0.05)


def test_a_kind_that_nothing_was_learned_of_costs_what_all_cost() -> None:
    costs = CostModel()
    costs.tick()
    assert costs.of(PLAIN, b"")[0] == 1.0
    for _ in range(50):
        costs.record(costs.of(PLAIN, b"")[1], 10.0)
    costs.tick()
    assert costs.of(PLAIN, b"")[0] == pytest.approx(1.0)
    assert costs.of(make_head(cost=7.0), b"")[0] == 1.0


def test_within_a_kind_costs_keep_their_order() -> None:
    told = costs_of_headers([1.0] * 100 + [1.0, 2.0, 4.0, 8.0])[-4:]
    assert all(less < more for less, more in pairwise(told))
