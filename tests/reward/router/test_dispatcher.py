"""Waiting, turning away, retrying within a budget, hedging."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.reward.router.dispatcher import BOUNDS_S, Quantile, RetryBudget, Stats, WaitQueue
from practicum.reward.router.http1 import NUM_PRIORITIES
from tests.reward.router.client import Client, request, wait_until, wait_until_idle, worker_states
from tests.reward.router.fakes import Exchange, FakeWorker, answer, echo_target, plain

StartWorker = Callable[..., FakeWorker]
StartRouter = Callable[..., Any]


class Gate:
    """A worker's handler that answers only when it is opened; notes the order in which requests came."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __call__(self, exchange: Exchange) -> None:
        exchange.read_body()
        self.opened.wait(10.0)
        echo_target(exchange)


def error(data: bytes) -> tuple[str, str]:
    told = json.loads(data)["error"]
    return told["code"], told["message"]


def test_a_router_without_workers_is_503_with_a_reason(start_router: StartRouter) -> None:
    router = start_router()
    with Client(router.url) as client:
        response = client.get(b"/x")
        assert response.status == 503 and error(response.data)[0] == "no_workers"
        assert b"retry-after: 1" in response.head.raw
        assert client.get(b"/router/health").status == 503  # and the connection is kept


def test_a_worker_has_no_more_than_its_limit(start_worker: StartWorker, start_router: StartRouter) -> None:
    gate = Gate()
    worker = start_worker(gate)
    router = start_router(worker, max_in_flight=2)
    clients = [Client(router.url) for _ in range(5)]
    for number, client in enumerate(clients):
        client.send(request(target=b"/%d" % number))
    worker.wait_for(lambda worker: len(worker.requests) == 2, "two requests")
    wait_until(lambda state: state["in_flight"] == 2, "full", router.url, 5.0)
    time.sleep(0.1)
    assert len(worker.requests) == 2
    gate.opened.set()
    assert [client.response().data for client in clients] == [b"/0", b"/1", b"/2", b"/3", b"/4"]
    wait_until_idle(router.url)


def test_the_urgent_go_first_and_the_rest_in_order(start_worker: StartWorker, start_router: StartRouter) -> None:
    gate = Gate()
    worker = start_worker(gate)
    router = start_router(worker, max_in_flight=1)
    clients = []
    for target, priority in ((b"/first", 5), (b"/low", 0), (b"/a", 5), (b"/high", 9), (b"/b", 5)):
        clients.append(Client(router.url))
        clients[-1].send(request(target=target, fields=[b"X-Practicum-Priority: %d" % priority]))
        time.sleep(0.05)  # one after the other
    gate.opened.set()
    for client in clients:
        assert client.response().status == 200
    assert [seen.head.target for seen in worker.requests] == [b"/first", b"/high", b"/a", b"/b", b"/low"]


def test_a_full_queue_refuses_the_least_urgent(start_worker: StartWorker, start_router: StartRouter) -> None:
    gate = Gate()
    worker = start_worker(gate)
    router = start_router(worker, max_in_flight=1, max_waiting=1)
    first, low, same, high = (Client(router.url) for _ in range(4))
    first.send(request(target=b"/first"))
    worker.wait_for(lambda worker: len(worker.requests) == 1, "a request")
    low.send(request(target=b"/low"))
    time.sleep(0.05)
    refused = same.get(b"/same")
    assert refused.status == 429 and error(refused.data)[0] == "queue_full"
    assert b"retry-after: 1" in refused.head.raw
    high.send(request(target=b"/high", fields=[b"X-Practicum-Priority: 6"]))
    assert low.response().status == 429
    gate.opened.set()
    assert (first.response().data, high.response().data) == (b"/first", b"/high")
    assert same.is_kept() and low.is_kept()


def test_waiting_has_a_deadline_that_says_what_was_waited_for(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    worker = start_worker()
    router = start_router(worker, wait_timeout_s=0.3)
    router.pause()
    with Client(router.url) as client:
        start = time.monotonic()
        response = client.get(b"/x")
        assert 0.25 < time.monotonic() - start < 1.0
        code, told = error(response.data)
        assert (response.status, code) == (503, "wait_timeout")
        assert f"{worker.url} is paused" in told


def test_a_waiting_request_whose_client_leaves_is_forgotten(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    worker = start_worker()
    router = start_router(worker, max_waiting=1)
    router.pause()
    for _ in range(3):
        with Client(router.url) as client:
            client.send(request(target=b"/left"))
            time.sleep(0.05)
    time.sleep(0.1)
    with Client(router.url) as client:
        client.send(request(target=b"/stayed"))
        time.sleep(0.05)
        router.resume()
        assert client.response().data == b"/stayed"
    assert [seen.head.target for seen in worker.requests] == [b"/stayed"]


def test_a_failed_request_goes_to_another_worker(start_worker: StartWorker, start_router: StartRouter) -> None:
    failing = [start_worker(handler) for handler in (answer(plain(b"", b"503 No")), lambda exchange: exchange.reset())]
    good = start_worker()
    router = start_router(*failing, good)
    with Client(router.url) as client:
        for number in range(12):
            target = b"/%d" % number
            assert client.ask(request(b"POST", target, body=b"x" * 100)).data == target
    assert [seen.head.target for seen in good.requests] == [b"/%d" % number for number in range(12)]
    assert sum(state["failures"] for state in worker_states(router.url)) > 0


@pytest.mark.parametrize("status", [b"400 Bad", b"404 Not", b"422 Un", b"429 Too", b"501 Not", b"507 Full"])
def test_other_statuses_are_the_workers_and_no_failures(
    start_worker: StartWorker, start_router: StartRouter, status: bytes
) -> None:
    worker, other = start_worker(answer(plain(b"mine", status))), start_worker(answer(plain(b"mine", status)))
    router = start_router(worker, other, eject_after=1)
    with Client(router.url) as client:
        for _ in range(10):
            response = client.get(b"/x")
            assert (response.status, response.data) == (int(status[:3]), b"mine")
    assert len(worker.requests) + len(other.requests) == 10
    assert [(state["state"], state["failures"]) for state in worker_states(router.url)] == [("up", 0)] * 2


def test_a_request_that_all_workers_fail_gets_an_error_and_counts_against_no_worker(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    workers = [start_worker(answer(plain(b"too hard", b"500 Oh"))) for _ in range(3)]
    router = start_router(*workers, eject_after=3)
    with Client(router.url) as client:
        for _ in range(20):
            response = client.get(b"/hard")
            assert (response.status, response.data) == (500, b"too hard")
    assert [(state["state"], state["ejections"]) for state in worker_states(router.url)] == [("up", 0)] * 3


def test_a_silent_worker_is_not_waited_for_longer_than_its_deadline(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    silent, good = start_worker(lambda exchange: time.sleep(3.0)), start_worker()
    router = start_router(silent, good, response_timeout_s=0.3)
    with Client(router.url) as client:
        start = time.monotonic()
        for _ in range(4):
            assert client.get(b"/x").data == b"/x"
        assert time.monotonic() - start < 2.0
    router.remove(good.url)
    with Client(router.url) as client:
        response = client.get(b"/alone")
        assert response.status == 504 and error(response.data)[0] == "timeout"
        assert silent.url in error(response.data)[1]


def test_retries_have_a_budget() -> None:
    budget = RetryBudget(0.2)
    assert sum(budget.take() for _ in range(1000)) == 100
    for _ in range(50):
        budget.earn()
    assert sum(budget.take() for _ in range(1000)) == pytest.approx(10, abs=1)
    for _ in range(10_000):
        budget.earn()
    assert sum(budget.take() for _ in range(1000)) == 100


def test_stragglers_are_hedged_and_the_first_answer_wins(start_worker: StartWorker, start_router: StartRouter) -> None:
    stuck = threading.Event()

    def sometimes_stuck(exchange: Exchange) -> None:
        exchange.read_body()
        if exchange.head.target == b"/straggler":
            stuck.wait(5.0)
        echo_target(exchange)

    first, second = start_worker(sometimes_stuck), start_worker()
    router = start_router(first, second, hedge_quantile=0.9, policy="round_robin")
    with Client(router.url) as client:
        for _ in range(80):
            client.get(b"/usual")
        start = time.monotonic()
        for _ in range(2):  # one of them to each
            assert client.get(b"/straggler").data == b"/straggler"
        assert time.monotonic() - start < 2.0
    assert b"/straggler" in {seen.head.target for seen in first.requests}
    assert b"/straggler" in {seen.head.target for seen in second.requests}
    assert "practicum_router_hedges_total 0.0" not in router.metrics()
    stuck.set()
    wait_until_idle(router.url)
    assert [state["state"] for state in worker_states(router.url)] == ["up", "up"]


priorities = st.integers(0, NUM_PRIORITIES - 1)


def queue_of(size: int, *waiting: tuple[str, int]) -> WaitQueue[str]:
    queue: WaitQueue[str] = WaitQueue(size)
    for who, priority in waiting:
        assert queue.put(who, priority) is None
    return queue


def test_the_urgent_come_first_and_among_equals_the_first_to_come() -> None:
    waiting = [("b1", 5), ("c1", 0), ("a1", 9), ("b2", 5), ("a2", 9), ("c2", 0)]
    queue = queue_of(10, *waiting)
    served = []
    while queue.num:
        served.append(queue.first())
        queue.remove(served[-1], dict(waiting)[served[-1]])
    assert served == ["a1", "a2", "b1", "b2", "c1", "c2"]


def test_a_full_queue_drops_the_newest_of_the_least_urgent() -> None:
    queue = queue_of(4, ("low1", 1), ("low2", 1), ("mid", 5), ("high", 9))
    assert queue.put("urgent", 7) == "low2"
    assert queue.put("another", 7) == "low1"
    assert queue.put("third", 7) == "mid"
    assert queue.num == 4
    assert sorted(queue.all()) == ["another", "high", "third", "urgent"]


def test_a_full_queue_drops_a_new_request_that_is_not_more_urgent() -> None:
    queue = queue_of(2, ("one", 5), ("two", 5))
    assert queue.put("equal", 5) == "equal"
    assert queue.put("less", 0) == "less"
    assert queue.all() == ["one", "two"]


def test_a_queue_without_room_drops_every_request() -> None:
    queue = queue_of(0)
    assert queue.put("one", 9) == "one"
    assert not queue.num and queue.all() == []


def test_a_request_may_leave_from_the_middle() -> None:
    queue = queue_of(5, ("one", 5), ("two", 5), ("three", 5), ("low", 0))
    queue.remove("two", 5)
    assert queue.num == 3 and queue.first() == "one"
    queue.remove("one", 5)
    assert queue.first() == "three"
    queue.remove("three", 5)
    assert queue.first() == "low"


def test_room_that_is_left_is_taken_again() -> None:
    queue = queue_of(1, ("one", 5))
    queue.remove("one", 5)
    assert queue.put("two", 0) is None
    assert queue.first() == "two"


@pytest.mark.parametrize("size", [0, 1, 3, 8])
@settings(max_examples=40)
@given(st.data())
def test_as_a_sorted_list_would_do_it(size: int, data: st.DataObject) -> None:
    queue: WaitQueue[int] = WaitQueue(size)
    model: list[tuple[int, int]] = []  # (-priority, number), in the order in which they are served
    for number in range(data.draw(st.integers(0, 30))):
        leaves = data.draw(st.booleans())
        if model and leaves:
            gone = model.pop(data.draw(st.integers(0, len(model) - 1)))
            queue.remove(gone[1], -gone[0])
        else:
            priority = data.draw(priorities)
            model.append((-priority, number))
            model.sort()
            dropped = queue.put(number, priority)
            assert dropped == (model.pop()[1] if len(model) > size else None)
        assert queue.num == len(model)
        assert sorted(queue.all()) == sorted(number for _, number in model)
        if model:
            assert queue.first() == model[0][1]


def lognormal(num: int, median: float = 1.0, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [median * math.exp(rng.gauss(0.0, 1.0)) for _ in range(num)]


def quantile_of(values: list[float]) -> Quantile:
    quantile = Quantile()
    for value in values:
        quantile.add(value)
    return quantile


@given(st.lists(st.floats(1e-6, 1e6), min_size=50, max_size=200), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_a_quantile_is_never_too_small_and_at_most_15_percent_too_large(values: list[float], share: float) -> None:
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    found = quantile_of(values).value(share)
    assert found is not None and exact * 0.999 <= found <= exact * 1.15


@pytest.mark.parametrize("share", [0.5, 0.9, 0.95])
@pytest.mark.parametrize("median", [1e-3, 1.0, 500.0])
def test_a_quantile_of_many_values(median: float, share: float) -> None:
    values = lognormal(20_000, median)
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    found = quantile_of(values).value(share)
    assert found == pytest.approx(exact, rel=0.25)  # a step of 15 %, and chance: only the latest thousand count


def test_a_quantile_follows_when_everything_becomes_slower_or_faster() -> None:
    quantile = quantile_of(lognormal(3000))
    for median in (20.0, 0.05):
        for value in lognormal(3000, median, seed=1):
            quantile.add(value)
        assert quantile.value(0.5) == pytest.approx(median, rel=0.25)


def test_a_quantile_of_few_values_is_not_known() -> None:
    assert Quantile().value(0.5) is None
    assert quantile_of([1.0] * 49).value(0.5) is None
    assert quantile_of([1.0] * 50).value(0.5) == pytest.approx(1.0)


def test_no_time_at_all_is_a_value_too() -> None:
    found = quantile_of([0.0] * 60).value(0.5)
    assert found is not None and 0.0 < found < 1e-6


def test_each_latency_is_counted_in_its_bucket() -> None:
    stats = Stats()
    for latency_s in (0.0005, 0.001, 0.0011, 0.9, 1.0, 599.0, 601.0):
        stats.record(200, latency_s)
    counts = dict(zip([*BOUNDS_S, math.inf], stats.latencies, strict=True))
    assert {bound: num for bound, num in counts.items() if num} == {0.001: 2, 0.0025: 1, 1.0: 2, 600.0: 1, math.inf: 1}
    assert stats.seconds == pytest.approx(1201.9026)


@given(st.lists(st.tuples(st.sampled_from([200, 404, 500]), st.floats(0.0, 1000.0)), max_size=50))
def test_nothing_is_lost_in_counting(answers: list[tuple[int, float]]) -> None:
    stats = Stats()
    for status, latency_s in answers:
        stats.record(status, latency_s)
    assert sum(stats.latencies) == sum(stats.statuses.values()) == len(answers)
    for index, bound in enumerate(BOUNDS_S):
        assert sum(stats.latencies[: index + 1]) == sum(latency_s <= bound for _, latency_s in answers)


def test_refusals_are_counted_by_reason() -> None:
    stats = Stats()
    for code in ("queue_full", "bad_request", "queue_full"):
        stats.refusals[code] += 1
    assert stats.refusals == {"queue_full": 2, "bad_request": 1}
    assert not stats.statuses
