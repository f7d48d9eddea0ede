"""How long connections live on both sides, and who is told what when one ends."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.reward.router.client import Client, chunks, request, wait_until_idle
from tests.reward.router.conftest import Pair
from tests.reward.router.fakes import Exchange, FakeWorker, answer, echo_target, plain

StartWorker = Callable[..., FakeWorker]
StartRouter = Callable[..., Any]


def test_many_requests_share_a_connection(pair: Pair) -> None:
    before = pair.worker.num_connections
    with pair.client() as client:
        for number in range(50):
            assert client.is_kept(b"/%d" % number)
    assert len(pair.worker.requests) == 50
    assert pair.worker.num_connections - before <= 1, "the router should keep its connection to the worker"


@pytest.mark.parametrize(
    "raw",
    [
        plain(b"body"),
        plain(b""),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks(b"body", trailers=[b"X: 1"]),
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\n\r\n",
        plain(b"no", b"404 Not Found"),
    ],
    ids=["length", "length 0", "chunks", "204", "304", "404"],
)
@pytest.mark.parametrize("says_close", [False, True], ids=["worker keeps", "worker closes"])
def test_the_clients_connection_outlives_the_answer(pair: Pair, raw: bytes, says_close: bool) -> None:
    if says_close:
        raw = raw.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    pair.worker.handler = answer(raw, close=says_close)
    with pair.client() as client:
        response = client.get()
        assert b"close" not in response.head.tokens(b"connection")
        pair.worker.handler = echo_target
        assert client.is_kept()


@pytest.mark.parametrize("value", [b"close", b"Close", b"CLOSE, X-Hop", b"x-hop , close"], ids=bytes.decode)
def test_a_client_that_asks_for_it_is_answered_and_closed(pair: Pair, value: bytes) -> None:
    with pair.client() as client:
        response = client.ask(request(target=b"/last", fields=[b"Connection: " + value]))
        assert response.data == b"/last"
        assert client.is_closed()
    assert b"close" not in pair.worker.requests[0].head.tokens(b"connection"), "the router keeps its own connection"


def test_nothing_after_a_last_request_is_served(pair: Pair) -> None:
    with pair.client() as client:
        client.offer([request(target=b"/last", fields=[b"Connection: close"]) + request(target=b"/after")])
        assert client.response().data == b"/last"
        assert client.is_closed()
    assert [seen.head.target for seen in pair.worker.requests] == [b"/last"]


def test_an_answer_until_close_closes_the_client_too(pair: Pair) -> None:
    pair.worker.handler = answer(b"HTTP/1.1 200 OK\r\nX: 1\r\n\r\n", b"all ", b"there is", pause_s=0.01, close=True)
    with pair.client() as client:
        response = client.get()
        assert (response.status, response.data) == (200, b"all there is")
    pair.worker.handler = echo_target
    with pair.client() as client:
        assert client.is_kept()


def test_a_worker_of_http_1_0(pair: Pair) -> None:
    pair.worker.handler = answer(b"HTTP/1.0 200 OK\r\nX: 1\r\n\r\nold", close=True)
    with pair.client() as client:
        response = client.get()
        assert (response.status, response.data, response.head.values(b"x")) == (200, b"old", [b"1"])


def test_a_worker_of_http_1_0_with_a_length(pair: Pair) -> None:
    pair.worker.handler = answer(b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nold", close=True)
    with pair.client() as client:
        assert client.get().data == b"old"
    pair.worker.handler = echo_target
    with pair.client() as client:
        assert client.is_kept()


def test_a_worker_of_http_1_0_that_keeps_alive(pair: Pair) -> None:
    pair.worker.handler = answer(b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 3\r\n\r\nold")
    for _ in range(3):
        with pair.client() as client:
            assert client.get().data == b"old"


@pytest.mark.parametrize("host", [b"", b"Host: worker.test\r\n"], ids=["no host", "host"])
def test_a_client_of_http_1_0_is_answered_and_closed(pair: Pair, host: bytes) -> None:
    with pair.client() as client:
        client.send(b"GET /old HTTP/1.0\r\n" + host + b"X: 1\r\n\r\n")
        response = client.response()
        assert (response.status, response.data) == (200, b"/old")
        assert client.is_closed()
    assert pair.worker.requests[0].head.values(b"x") == [b"1"]


def test_a_client_of_http_1_0_with_a_body(pair: Pair) -> None:
    with pair.client() as client:
        client.send(b"POST /old HTTP/1.0\r\nContent-Length: 4\r\n\r\nbody")
        assert client.response().data == b"/old"
        assert client.is_closed()
    assert pair.worker.requests[0].data == b"body"


def test_a_client_of_http_1_0_may_ask_to_keep_alive(pair: Pair) -> None:
    """The router may keep the connection, saying so, or close it."""
    with pair.client() as client:
        client.send(b"GET /old HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        response = client.response()
        assert response.data == b"/old"
        if b"keep-alive" in response.head.tokens(b"connection"):
            assert client.is_kept()
        else:
            assert client.is_closed()


PIPELINES = {
    "gets": [request(target=b"/%d" % number) for number in range(20)],
    "bodies": [
        request(b"POST", b"/0", body=b"first"),
        request(b"PUT", b"/1", [b"Transfer-Encoding: chunked"], chunks(b"second", trailers=[b"X: 1"])),
        request(b"HEAD", b"/2"),
        request(b"GET", b"/3", body=b"a GET with a body"),
        request(b"POST", b"/4", [b"Content-Length: 0"]),
        request(b"DELETE", b"/5"),
    ],
}


@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=PIPELINES.keys())
@pytest.mark.parametrize("at_once", [True, False], ids=["one packet", "a packet each"])
def test_pipelined_requests_are_answered_in_order(pair: Pair, pipeline: list[bytes], at_once: bool) -> None:
    def slower_first(exchange: Exchange) -> None:
        time.sleep(0.02 if exchange.head.target == b"/0" else 0.0)
        echo_target(exchange)

    pair.worker.handler = slower_first
    with pair.client() as client:
        client.send(*([b"".join(pipeline)] if at_once else pipeline))
        for number, raw in enumerate(pipeline):
            method = raw.split(b" ")[0]
            assert client.response(method).data == (b"" if method == b"HEAD" else b"/%d" % number)
        assert client.is_kept()
    assert [seen.raw for seen in pair.worker.requests[:-1]] == pipeline


def test_a_client_that_hangs_up_gets_nothing_more(pair: Pair) -> None:
    """The end of what a client sends is the end of its interest: nobody can tell whether it still listens, and a
    worker should not go on for a client that has given up."""
    pair.worker.handler = lambda exchange: time.sleep(0.2)
    with pair.client() as client:
        client.send(request(target=b"/one"))
        time.sleep(0.03)
        client.half_close()
        assert client.is_closed()


def test_an_idle_client_that_leaves_is_let_go(pair: Pair) -> None:
    with pair.client() as client:
        assert client.is_kept()
        client.half_close()
        assert client.is_closed()
    with pair.client() as client:
        client.half_close()
        assert client.is_closed()


@pytest.mark.parametrize("method", [b"GET", b"POST"], ids=bytes.decode)
@pytest.mark.parametrize("wait_s", [0.0, 0.05], ids=["racing", "settled"])
def test_a_worker_may_close_idle_connections(pair: Pair, method: bytes, wait_s: float) -> None:
    with pair.client() as client:
        for number in range(10):
            assert client.ask(request(method, b"/%d" % number)).data == b"/%d" % number
            pair.worker.close_idle()
            time.sleep(wait_s)


@pytest.mark.parametrize("method", [b"GET", b"POST"], ids=bytes.decode)
def test_a_close_that_crosses_the_request_is_no_error(pair: Pair, method: bytes) -> None:
    """The worker closes exactly when the next request arrives on a kept connection: it goes out again on a new one."""
    served: dict[int, int] = {}

    def close_at_the_second(exchange: Exchange) -> None:
        served[exchange.connection] = served.get(exchange.connection, 0) + 1
        if served[exchange.connection] > 1:
            exchange.close()
        else:
            echo_target(exchange)

    pair.worker.close_idle()
    pair.worker.handler = close_at_the_second
    with pair.client() as client:
        for number in range(5):
            raw = request(method, b"/%d" % number, body=b"" if method == b"GET" else b"body")
            assert client.ask(raw).data == b"/%d" % number


def gone_setup(start_worker: StartWorker, start_router: StartRouter) -> tuple[FakeWorker, str]:
    worker = start_worker()
    return worker, start_router(worker, response_timeout_s=30.0).url


LEAVING = {
    "waiting": request(target=b"/gone"),
    "in a body": request(b"POST", b"/gone", [b"Content-Length: 1000000"]) + b"a part" * 50_000,
    "in chunks": request(b"POST", b"/gone", [b"Transfer-Encoding: chunked"]) + b"6\r\na part\r\n",
}


# An orderly close after a whole request can't be told from a half-close, which must still be answered.
@pytest.mark.parametrize(
    "kind, by_reset", [*((kind, True) for kind in LEAVING), ("in a body", False), ("in chunks", False)]
)
def test_a_client_that_leaves_frees_its_worker(
    start_worker: StartWorker, start_router: StartRouter, kind: str, by_reset: bool
) -> None:
    worker, url = gone_setup(start_worker, start_router)
    arrived: queue.Queue[int] = queue.Queue()

    def wait(exchange: Exchange) -> None:
        arrived.put(exchange.connection)
        exchange.wait_for_close()

    worker.handler = wait
    with Client(url) as client:
        client.send(LEAVING[kind])
        connection = arrived.get(timeout=5.0)
        if by_reset:
            client.reset()
    worker.wait_for_closed(connection, 3.0)
    wait_until_idle(url, 3.0)


def test_a_client_that_leaves_an_answer_frees_its_worker(start_worker: StartWorker, start_router: StartRouter) -> None:
    worker, url = gone_setup(start_worker, start_router)
    arrived: queue.Queue[int] = queue.Queue()

    def endless(exchange: Exchange) -> None:
        arrived.put(exchange.connection)
        exchange.read_body()
        exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            exchange.send(b"5\r\nhello\r\n")
            time.sleep(0.005)

    worker.handler = endless
    with Client(url) as client:
        client.send(request(target=b"/gone"))
        assert b"hello" in client.reader.exactly(100)
    worker.wait_for_closed(arrived.get(timeout=5.0), 3.0)
    wait_until_idle(url, 3.0)


def test_counts_return_to_zero_after_every_kind_of_end(start_worker: StartWorker, start_router: StartRouter) -> None:
    worker, url = gone_setup(start_worker, start_router)
    for handler in (echo_target, answer(b"garbage\r\n\r\n"), answer(b"", close=True), answer(plain()[:-1], close=True)):
        worker.handler = handler
        with Client(url) as client:
            client.send(request(b"POST", b"/x", [b"Connection: close"], b"body"))
            client.rest()
    for raw in (b"garbage\r\n\r\n", request(b"POST", b"/", [b"Transfer-Encoding: chunked"]) + b"-1\r\n"):
        with Client(url) as client:
            client.offer([raw])
            client.rest()
    wait_until_idle(url, 3.0)


def test_answers_are_never_mixed_up(start_worker: StartWorker, start_router: StartRouter) -> None:
    """Many clients at once, answers that come out of order, and connections that end at random."""

    def at_random(exchange: Exchange) -> None:
        draw = random.Random(exchange.head.target)
        time.sleep(draw.choice([0.0, 0.0, 0.001, 0.01]))
        echo_target(exchange)
        if draw.random() < 0.2:
            exchange.close()

    url = start_router(start_worker(at_random), start_worker(at_random)).url
    wrong: list[object] = []

    def ask(name: int) -> None:
        try:
            with Client(url) as client:
                for number in range(25):
                    target = b"/%d/%d" % (name, number)
                    body = target * (number * 50)
                    if (answered := client.ask(request(b"POST", target, body=body))).data != target:
                        wrong.append((target, answered.raw[:200]))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask, args=(name,)) for name in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert wrong == []
    wait_until_idle(url)


def test_a_client_that_leaves_the_queue_is_forgotten(start_worker: StartWorker, start_router: StartRouter) -> None:
    """Its request waits for a worker that has all it may have at a time, and is not sent when there's room again."""
    go_on = threading.Event()

    def held(exchange: Exchange) -> None:
        assert go_on.wait(5.0)
        echo_target(exchange)

    worker = start_worker(held)
    url = start_router(worker, max_in_flight=1, response_timeout_s=30.0).url
    with Client(url) as first, Client(url) as second, Client(url) as third:
        first.send(request(target=b"/first"))
        worker.wait_for(lambda worker: bool(worker.received()), "the first request")
        second.send(request(target=b"/second"))
        time.sleep(0.05)
        third.send(request(target=b"/third"))
        second.reset()
        time.sleep(0.05)
        go_on.set()
        assert first.response().data == b"/first"
        assert third.response().data == b"/third"
    assert [seen.head.target for seen in worker.requests] == [b"/first", b"/third"]
    wait_until_idle(url)
