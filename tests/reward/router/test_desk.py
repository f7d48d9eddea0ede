"""Waiting, turning away, retrying within a budget, hedging."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from practicum.reward.router.desk import Budget
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


def test_a_full_waiting_room_turns_the_least_urgent_away(start_worker: StartWorker, start_router: StartRouter) -> None:
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


def test_a_client_that_leaves_the_waiting_room_is_forgotten(
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
def test_other_answers_are_the_workers_and_no_failures(
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


def test_a_request_that_is_too_much_for_all_is_told_so_and_held_against_nobody(
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
    budget = Budget(0.2)
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
