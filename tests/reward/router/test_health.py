"""Who is put out, why, and how it comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.reward.router.client import Client, request, worker_states
from tests.reward.router.fakes import Exchange, FakeWorker, answer, echo_target, plain

StartWorker = Callable[..., FakeWorker]
StartRouter = Callable[..., Any]
POLICIES = ("expected_finish", "least_requests", "round_robin", "power_of_two")


def wait_for_state(url: str, worker: FakeWorker, state: str, timeout_s: float = 4.0) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while True:
        found = next(one for one in worker_states(url) if one["url"] == worker.url)
        if found["state"] == state:
            return found
        assert time.monotonic() < deadline, f"still {found['state']} ({found['reason']}), not {state}"
        time.sleep(0.01)


class Load:
    """Clients that ask all the time; every answer must be right."""

    def __init__(self, url: str, num_clients: int = 8) -> None:
        self.num_done = 0
        self.wrong: list[object] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask_on, args=(url, n)) for n in range(num_clients)]

    def _ask_on(self, url: str, number: int) -> None:
        with Client(url) as client:
            asked = 0
            while not self._stop.is_set():
                target = b"/%d/%d" % (number, asked)
                try:
                    response = client.ask(request(b"POST", target, body=b"x"))
                except Exception as error:
                    self.wrong.append(error)
                    return
                if (response.status, response.data) != (200, target):
                    self.wrong.append(response)
                asked += 1
                self.num_done += 1

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(10.0)
        assert self.wrong == []


def in_5_ms(exchange: Exchange) -> None:
    exchange.read_body()
    time.sleep(0.005)
    echo_target(exchange)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_worker_that_fails_is_put_out_and_comes_back(
    start_worker: StartWorker, start_router: StartRouter, policy: str
) -> None:
    worker, other = start_worker(in_5_ms), start_worker(in_5_ms)
    router = start_router(worker, other, eject_after=3, retrial_s=0.1, policy=policy)
    with Load(router.url):
        worker.wait_for(lambda worker: len(worker.requests) > 5, "requests")
        worker.handler = answer(plain(b"", b"500 Broken"))
        found = wait_for_state(router.url, worker, "ejected")
        assert "answered 500" in found["reason"]
        worker.handler = in_5_ms
        wait_for_state(router.url, worker, "up")
        worker.forget()
        worker.wait_for(lambda worker: len(worker.requests) > 5, "requests again")
    assert [state["in_flight"] for state in worker_states(router.url)] == [0, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_worker_that_is_killed_and_restarted_loses_no_request(
    start_worker: StartWorker, start_router: StartRouter, policy: str
) -> None:
    worker, other = start_worker(in_5_ms), start_worker(in_5_ms)
    router = start_router(worker, other, eject_after=3, retrial_s=0.1, policy=policy)
    with Load(router.url):
        worker.wait_for(lambda worker: len(worker.requests) > 5, "requests")
        port = worker.port
        worker.close()
        deadline = time.monotonic() + 4.0
        while worker_states(router.url)[0]["state"] != "ejected" and time.monotonic() < deadline:
            time.sleep(0.01)
        again = start_worker(in_5_ms, port=port)
        wait_for_state(router.url, again, "up")
        again.wait_for(lambda worker: len(worker.requests) > 5, "requests")


def test_on_trial_a_worker_gets_one_request_and_one_more_with_each_success(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    going, at_once, most = threading.Event(), [0], [0]

    def held(exchange: Exchange) -> None:
        exchange.read_body()
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        going.wait(20.0)
        at_once[0] -= 1
        echo_target(exchange)

    worker = start_worker(answer(plain(b"", b"500 Broken")))
    other = start_worker(in_5_ms)
    router = start_router(worker, other, eject_after=1, retrial_s=0.1, policy="round_robin")
    with Load(router.url):
        while wait_for_state(router.url, worker, "ejected")["in_flight"]:
            time.sleep(0.01)  # what it was sent before is no part of the trial
        worker.handler = held
        wait_for_state(router.url, worker, "trial")
        worker.wait_for(lambda _: most[0] == 1, "a request on trial")
        time.sleep(0.3)
        assert most[0] == 1
        going.set()
        wait_for_state(router.url, worker, "up")


def test_a_worker_far_slower_than_it_was_is_put_out(start_worker: StartWorker, start_router: StartRouter) -> None:
    delay = [0.005]

    def slowly(exchange: Exchange) -> None:
        exchange.read_body()
        time.sleep(delay[0])
        echo_target(exchange)

    workers = [start_worker(slowly), start_worker(in_5_ms), start_worker(in_5_ms)]
    router = start_router(*workers, retrial_s=0.1)
    with Load(router.url, 12):
        for worker in workers:
            worker.wait_for(lambda worker: len(worker.requests) > 60, "what is usual")
        delay[0] = 0.15
        found = wait_for_state(router.url, workers[0], "ejected")
        assert "slow" in found["reason"]
        delay[0] = 0.005
        wait_for_state(router.url, workers[0], "up")


def test_a_worker_that_always_was_slow_stays(start_worker: StartWorker, start_router: StartRouter) -> None:
    def slowly(exchange: Exchange) -> None:
        exchange.read_body()
        time.sleep(0.08)
        echo_target(exchange)

    slow, fast = start_worker(slowly), start_worker(in_5_ms)
    router = start_router(slow, fast)
    with Load(router.url):
        slow.wait_for(lambda worker: len(worker.requests) > 40, "requests", 8.0)
        assert worker_states(router.url)[0]["ejections"] == 0


def test_probes_find_out_when_nobody_asks(start_worker: StartWorker, start_router: StartRouter) -> None:
    worker, other = start_worker(), start_worker()
    router = start_router(worker, other, eject_after=2, probe_interval_s=0.05, retrial_s=0.1)
    port = worker.port
    worker.close()
    deadline = time.monotonic() + 4.0
    while (state := worker_states(router.url)[0])["state"] != "ejected" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state["state"] == "ejected" and "refused" in state["reason"]
    again = start_worker(port=port)
    wait_for_state(router.url, again, "trial")  # a probe is not yet proof that requests succeed
    with Client(router.url) as client:
        for _ in range(40):
            client.get(b"/x")
    wait_for_state(router.url, again, "up")


def test_a_busy_worker_may_leave_probes_unanswered(start_worker: StartWorker) -> None:
    """A grader that does one thing at a time answers no probe while it grades."""
    import socketserver

    from practicum.reward.router import Router

    class OneAtATime(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline():
                while self.rfile.readline() not in (b"\r\n", b""):
                    pass
                if b"/grade" in line:
                    time.sleep(1.0)
                self.wfile.write(plain(b"ok", fields=[b"Connection: close"]))
                return

    with socketserver.TCPServer(("127.0.0.1", 0), OneAtATime) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        settings = {"probe_interval_s": 0.1, "probe_timeout_s": 0.1, "eject_after": 2}
        with Router([url], **settings).start() as router, Client(router.url) as client:  # type: ignore[arg-type]
            assert client.get(b"/grade").status == 200
            assert router.workers()[0]["ejections"] == 0
        server.shutdown()
