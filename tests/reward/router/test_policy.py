from __future__ import annotations

import contextlib
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.reward.router.policy import POLICIES
from practicum.reward.router.pool import Upstream, UpstreamPool
from tests.reward.router.simulation import (
    FakeRequest,
    Simulation,
    add_worker,
    begin,
    end,
    lognormal_jobs,
    make_head,
    make_pool,
    worker,
)


def choose(pool: UpstreamPool, request: FakeRequest | None = None) -> Upstream:
    upstream = pool.policy.choose(request or FakeRequest())
    assert upstream is not None
    return upstream


def load(pool: UpstreamPool, *numbers: int) -> None:
    """Give the workers so many requests each."""
    for upstream, number in zip(pool, numbers, strict=True):
        for _ in range(number):
            begin(pool, upstream, FakeRequest())


def set_paused(pool: UpstreamPool, upstream: Upstream, paused: bool) -> None:
    upstream.paused = paused
    pool.refresh(upstream)


def in_session(name: str) -> FakeRequest:
    return FakeRequest(head=make_head(session=name))


def asking(prompt: str) -> FakeRequest:
    return FakeRequest(body=b'{"model": "m", "prompt": "%s"}' % prompt.encode())


# All of them


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_is_chosen_when_nobody_is_ready(policy: str) -> None:
    pool = make_pool(policy, 0)
    for request in (FakeRequest(), in_session("a"), asking("b")):
        assert pool.policy.choose(request) is None
        upstream = add_worker(pool, "http://only:1")
        assert pool.policy.choose(request) is upstream
        set_paused(pool, upstream, True)
        assert pool.policy.choose(request) is None
        pool.remove(upstream)
        assert pool.policy.choose(request) is None


@pytest.mark.parametrize("policy", ["expected_finish", "least_requests", "round_robin", "session", "prefix"])
@pytest.mark.parametrize("num_workers", [2, 5, 16])
def test_equals_take_turns(policy: str, num_workers: int) -> None:
    pool = make_pool(policy, num_workers)
    chosen: Counter[Upstream] = Counter()
    for _ in range(3 * num_workers):
        request = FakeRequest()
        upstream = choose(pool, request)
        chosen[upstream] += 1
        begin(pool, upstream, request)
        end(pool, upstream, request, completed=False)
    assert set(chosen.values()) == {3} and len(chosen) == num_workers


@pytest.mark.parametrize("num_workers", [32, 40, 64])
def test_equals_take_turns_when_not_all_are_compared(num_workers: int) -> None:
    pool = make_pool("expected_finish", num_workers)
    assert len({choose(pool) for _ in range(20 * num_workers)}) == num_workers


@pytest.mark.parametrize("policy", ["expected_finish", "least_requests", "round_robin", "session", "prefix"])
def test_equals_share_what_stays(policy: str) -> None:
    pool = make_pool(policy, 8)
    for _ in range(40):
        begin(pool, choose(pool), FakeRequest())
    assert [len(upstream.in_flight) for upstream in pool] == [5] * 8


ACTIONS = ["send", "send", "send", "force", "end", "end", "pause", "resume", "limit", "add", "remove", "version"]


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 1000)), max_size=60))
def test_whatever_happens_the_chosen_one_is_ready_and_by_least_requests_has_fewest(
    policy: str, actions: list[tuple[str, int]]
) -> None:
    pool = make_pool(policy, 3, max_in_flight=4)
    open_ones: list[tuple[Upstream, FakeRequest]] = []
    for action, number in actions:
        act(pool, open_ones, action, number)
        could = [upstream for upstream in pool if pool.is_ready(upstream)]
        assert sorted(map(id, pool.policy.ready)) == sorted(map(id, could))
        chosen = pool.policy.choose(FakeRequest())
        assert (chosen in could) if could else (chosen is None)
        if policy in ("least_requests", "session", "prefix") and chosen is not None:
            assert len(chosen.in_flight) == min(len(upstream.in_flight) for upstream in could)
    assert pool.num_in_flight == len(open_ones)


def act(pool: UpstreamPool, open_ones: list[tuple[Upstream, FakeRequest]], action: str, number: int) -> None:
    workers = list(pool)
    one = workers[number % len(workers)] if workers else None
    if action == "send":
        request = [FakeRequest(), in_session(str(number)), asking(str(number))][number % 3]
        if (chosen := pool.policy.choose(request)) is not None:
            open_ones.append((chosen, request))
            begin(pool, chosen, request)
    elif action == "end" and open_ones:
        upstream, request = open_ones.pop(number % len(open_ones))
        end(pool, upstream, request, completed=number % 2 == 0)
    elif action == "add" and len(workers) < 6:
        with contextlib.suppress(ValueError):
            add_worker(pool, f"http://new{number % 10}:80")
    elif one is not None:
        if action == "force":  # as a retry may do: not by this policy's choice, and to one that is ready or not
            open_ones.append((one, FakeRequest()))
            begin(pool, one, open_ones[-1][1])
        elif action in ("pause", "resume"):
            set_paused(pool, one, action == "pause")
        elif action == "limit":
            one.limit = 1 + number % 5
            pool.refresh(one)
        elif action == "version":
            one.version = number % 3
            pool.want_version([None, 1, 2][number % 3])
        elif action == "remove":
            pool.remove(one)


# Round robin


def test_round_robin_goes_on_when_somebody_is_away() -> None:
    pool = make_pool("round_robin", 4)
    set_paused(pool, worker(pool, "http://w1"), True)
    chosen = Counter(choose(pool).url for _ in range(30))
    assert chosen == {"http://w0:80": 10, "http://w2:80": 10, "http://w3:80": 10}


def test_round_robin_does_not_care_who_has_how_much() -> None:
    pool = make_pool("round_robin", 2)
    load(pool, 20, 0)
    assert Counter(choose(pool).url for _ in range(10)) == {"http://w0:80": 5, "http://w1:80": 5}


# Power of two


def test_power_of_two_picks_the_emptier_of_two() -> None:
    pool = make_pool("power_of_two", 2)
    load(pool, 1, 3)
    assert {choose(pool).url for _ in range(50)} == {"http://w0:80"}


def test_power_of_two_draws_from_all_and_never_picks_the_fullest() -> None:
    pool = make_pool("power_of_two", 4)
    load(pool, 2, 0, 9, 1)
    chosen = Counter(choose(pool).url for _ in range(600))
    assert set(chosen) == {"http://w0:80", "http://w1:80", "http://w3:80"}
    # Of six pairs the emptiest is in three, the next in two more, and the third in one.
    assert chosen["http://w1:80"] == pytest.approx(300, abs=80)
    assert chosen["http://w3:80"] == pytest.approx(200, abs=80)


def test_power_of_two_spreads_far_better_than_chance() -> None:
    pool = make_pool("power_of_two", 50, max_in_flight=10_000)
    for _ in range(5000):
        begin(pool, choose(pool), FakeRequest())
    assert max(len(upstream.in_flight) for upstream in pool) <= 110


# Sessions

SESSIONS = [f"session-{index}" for index in range(300)]


def homes(pool: UpstreamPool) -> dict[str, str]:
    return {name: choose(pool, in_session(name)).url for name in SESSIONS}


def test_a_session_stays_with_its_worker_whatever_that_has_in_hand() -> None:
    pool = make_pool("session", 5)
    before = homes(pool)
    load(pool, 50, 3, 0, 100, 7)
    assert homes(pool) == before
    assert min(Counter(before.values()).values()) > 300 / 5 / 3
    assert homes(make_pool("session", 5)) == before  # also with another router, or after a restart


def test_only_the_sessions_of_a_removed_worker_move() -> None:
    pool = make_pool("session", 5)
    before = homes(pool)
    gone = worker(pool, "http://w2")
    pool.remove(gone)
    after = homes(pool)
    assert gone.url not in after.values()
    assert {name for name in SESSIONS if before[name] != after[name]} == {
        name for name in SESSIONS if before[name] == gone.url
    }
    assert len({after[name] for name in SESSIONS if before[name] == gone.url}) == 4  # to all the others
    add_worker(pool, gone.url)
    assert homes(pool) == before


def test_a_new_worker_takes_its_share_and_the_other_sessions_stay() -> None:
    pool = make_pool("session", 5)
    before = homes(pool)
    new = add_worker(pool, "http://new:80")
    after = homes(pool)
    moved = [name for name in SESSIONS if before[name] != after[name]]
    assert {after[name] for name in moved} == {new.url}
    assert 10 < len(moved) < 120


def test_sessions_come_back_to_a_worker_that_was_away() -> None:
    pool = make_pool("session", 5)
    before = homes(pool)
    upstream = worker(pool, "http://w3")
    set_paused(pool, upstream, True)
    during = homes(pool)
    assert all(during[name] == before[name] for name in SESSIONS if before[name] != upstream.url)
    set_paused(pool, upstream, False)
    assert homes(pool) == before


@pytest.mark.parametrize("policy", ["session", "prefix"])
def test_workers_that_were_removed_are_in_nobodys_way(policy: str) -> None:
    pool = make_pool(policy, 2)
    for index in range(100):
        pool.remove(add_worker(pool, f"http://gone{index}:80"))
    for index in range(20):
        request = FakeRequest(head=make_head(session=f"{index}"), body=asking(f"{index}").body)
        with counted_steps() as steps:
            choose(pool, request)
            assert steps() < 500


# Prefixes


def test_prompts_that_begin_alike_go_to_one_worker() -> None:
    pool = make_pool("prefix", 8)
    template = "You are a careful grader. " * 20
    assert len({choose(pool, asking(f"{template} question {index}")) for index in range(20)}) == 1
    assert len({choose(pool, asking(f"question {index}: {template}")) for index in range(50)}) == 8


def test_what_stands_before_the_prompt_makes_no_difference() -> None:
    pool = make_pool("prefix", 64)
    prompt = b'"%s"' % (b"Once upon a time " * 30)
    for name in (b"prompt", b"messages", b"input", b"text", b"conversation"):
        bodies = [b'{"%s":%s}' % (name, prompt), b'{"model": "m", "seed": 7, "%s" : %s, "n": 1}' % (name, prompt)]
        assert len({choose(pool, FakeRequest(body=body)) for body in bodies}) == 1


def test_bodies_of_any_form_have_a_beginning() -> None:
    pool = make_pool("prefix", 8)
    same = [FakeRequest(body=b"\x00\xff" * 200 + bytes([index])) for index in range(10)]
    assert len({choose(pool, request) for request in same}) == 1


def test_how_much_of_a_prompt_counts_can_be_set() -> None:
    pool = make_pool("prefix", 8, prefix_bytes=5)
    assert len({choose(pool, asking(f"abcd{index}")) for index in range(50)}) == 1
    pool = make_pool("prefix", 8, prefix_bytes=6)
    assert len({choose(pool, asking(f"abcd{index}")) for index in range(50)}) > 1


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=80))
def test_no_worker_gets_far_more_than_the_average_however_prompts_begin(
    num_workers: int, sent: list[tuple[int, bool]]
) -> None:
    pool = make_pool("prefix", num_workers, max_in_flight=1000)
    open_ones: list[tuple[Upstream, FakeRequest]] = []
    for beginning, ends in sent:
        if ends and open_ones:
            end(pool, *open_ones.pop(0))
        request = asking("ab"[beginning % 2])  # few beginnings: some workers would get far too much
        upstream = choose(pool, request)
        begin(pool, upstream, request)
        open_ones.append((upstream, request))
        assert len(upstream.in_flight) <= math.ceil(1.25 * len(open_ones) / num_workers)


def test_the_average_is_that_of_the_workers_that_are_ready() -> None:
    pool = make_pool("prefix", 3)
    load(pool, 100, 0, 0)
    set_paused(pool, worker(pool, "http://w0"), True)
    for num in range(1, 41):
        request = asking("the same")
        upstream = choose(pool, request)
        begin(pool, upstream, request)
        assert len(upstream.in_flight) <= math.ceil(1.25 * num / 2)


def test_what_overflows_goes_to_the_same_next_workers() -> None:
    def loads() -> list[int]:
        pool = make_pool("prefix", 8)
        for _ in range(40):
            request = asking("the same")
            begin(pool, choose(pool, request), request)
        return [len(upstream.in_flight) for upstream in pool]

    assert loads() == loads()
    assert max(loads()) == 7 > 5 > min(loads())  # at most ceil(1.25 x 40 / 8), and not spread evenly


# Expected finish


@pytest.mark.parametrize("hint", [True, False])
def test_expected_finish_gives_more_work_to_fast_workers(hint: bool) -> None:
    simulation = Simulation("expected_finish", [1.0, 4.0], num_slots=4)
    jobs = lognormal_jobs(1000, 0, hint=hint)
    simulation.run(jobs, 24)
    slow, fast = (sum(job.work for job in jobs if job.upstream is upstream) for upstream in simulation.pool)
    assert 2.5 < fast / slow < 6.0


def test_expected_finish_gives_a_large_request_to_a_fast_worker() -> None:
    simulation = Simulation("expected_finish", [1.0, 4.0], num_slots=4)
    jobs = lognormal_jobs(1000, 0, hint=True)
    simulation.run(jobs, 16)
    slow = next(iter(simulation.pool))
    large = sorted(jobs, key=lambda job: -job.work)[:50]
    assert sum(job.upstream is slow for job in large) < 0.2 * 50


def test_expected_finish_leaves_a_worker_that_hangs_alone() -> None:
    simulation = Simulation("expected_finish", [1.0] * 4, num_slots=4)
    simulation.run(lognormal_jobs(400, 0, hint=True), 16)
    before = [upstream.num_requests for upstream in simulation.pool]
    hung = next(iter(simulation.pool))
    for _ in range(4):
        begin(simulation.pool, hung, FakeRequest(), simulation.now)
    simulation.run(lognormal_jobs(400, 1, hint=True), 12)
    gained = [upstream.num_requests - num for upstream, num in zip(simulation.pool, before, strict=True)]
    assert gained[0] < 0.4 * min(gained[1:])


SPEEDS = (1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0)
NUM_SLOTS = 4


def makespan(policy: str, *, hint: bool) -> float:
    """How many times longer than work divided by speed 2,000 jobs take, 128 at a time; mean of five seeds."""
    ratios = []
    for seed in range(5):
        jobs = lognormal_jobs(2000, seed, hint=hint)
        seconds = Simulation(policy, SPEEDS, NUM_SLOTS).run(jobs, 128)
        ratios.append(seconds * sum(SPEEDS) * NUM_SLOTS / sum(job.work for job in jobs))
    return sum(ratios) / len(ratios)


def test_expected_finish_keeps_unequal_workers_busy_to_the_end() -> None:
    least_requests = makespan("least_requests", hint=True)
    with_hint, without = makespan("expected_finish", hint=True), makespan("expected_finish", hint=False)
    assert with_hint <= 1.10
    assert without <= 1.25
    assert with_hint < without < least_requests


# Work


@contextlib.contextmanager
def counted_steps() -> Iterator[Callable[[], int]]:
    """How many steps (bytecodes) Python takes."""
    num = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal num
        frame.f_trace_opcodes = True
        num += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: num
    finally:
        sys.settrace(before)


def steps_to_choose(policy: str, num_workers: int) -> float:
    """A choice, on average, with three requests a worker in flight."""
    rng = random.Random(0)
    pool = make_pool(policy, num_workers)

    def make() -> FakeRequest:
        name = f"{rng.random()}"
        head = make_head(session=name)
        return FakeRequest(head=head, body=asking(name).body, cost=rng.random() + 0.5)

    open_ones = []
    for _ in range(3 * num_workers):
        request = make()
        upstream = choose(pool, request)
        begin(pool, upstream, request)
        open_ones.append((upstream, request))
    total = 0
    for _ in range(50):
        request = make()
        with counted_steps() as steps:
            chosen = pool.policy.choose(request)
            total += steps()
        assert chosen is not None
        begin(pool, chosen, request)
        end(pool, *open_ones.pop(rng.randrange(len(open_ones))), completed=False)
        open_ones.append((chosen, request))
    return total / 50


@pytest.mark.parametrize("policy", POLICIES)
def test_choosing_among_a_thousand_takes_hardly_more_work_than_among_ten(policy: str) -> None:
    few, many = steps_to_choose(policy, 10), steps_to_choose(policy, 1000)
    assert few > 5
    assert many <= 3.0 * few


def test_prompts_that_all_begin_alike_take_no_more_work_either() -> None:
    def steps_of(num_workers: int) -> float:
        pool = make_pool("prefix", num_workers)
        request = asking("You are a careful grader.")
        for _ in range(int(1.5 * num_workers)):
            begin(pool, choose(pool, request), FakeRequest(head=request.head))
        with counted_steps() as steps:
            pool.policy.choose(request)
            return steps()

    assert steps_of(1000) <= 3.0 * steps_of(10)
