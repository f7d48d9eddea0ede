"""What a client of a replica sees, with a computation that the test holds in its hands."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from practicum.reward.serving.server import ModelServer
from tests.reward.serving.fakes import WAIT_S, FakeEndpoint
from tests.reward.serving.models import ask


@pytest.fixture
def start() -> Iterator[Callable[[FakeEndpoint], str]]:
    servers: list[ModelServer] = []

    def starting(endpoint: FakeEndpoint) -> str:
        servers.append(ModelServer("fake", endpoint, host="127.0.0.1", max_batch_tokens=10))
        return servers[-1].url

    yield starting
    for server in servers:
        server.close()


class Asking(threading.Thread):
    def __init__(self, url: str, path: str = "/classify", *numbers: int) -> None:
        super().__init__()
        self._asked = (url, path, {"numbers": list(numbers)} if numbers else {})
        self.start()

    def run(self) -> None:
        self._answer = ask(*self._asked)

    def answer(self) -> tuple[int, Any]:
        self.join(WAIT_S)
        return self._answer


def test_models_and_health(start: Callable[[FakeEndpoint], str]) -> None:
    url = start(FakeEndpoint())
    assert ask(url, "/health", method="GET") == (200, {"status": "awake"})
    status, told = ask(url, "/v1/models", method="GET")
    assert (status, told["data"][0]["id"], told["data"][0]["max_model_len"]) == (200, "fake", 7)


def test_mistakes_are_told_as_json(start: Callable[[FakeEndpoint], str]) -> None:
    url = start(FakeEndpoint())
    for path, body, status, message in [
        ("/classify", b"{", 400, "not JSON"),
        ("/v1/chat/completions", {}, 400, "ask it at POST /classify"),
        ("/nowhere", {}, 404, "POST /nowhere: Not Found"),
        ("/health", {}, 405, "Method Not Allowed"),
        ("/classify", {"numbers": [-1]}, 500, "ValueError: it is negative"),
    ]:
        answered, told = ask(url, path, body)
        assert answered == status
        assert message in told["error"]["message"]
    assert ask(url, "/classify", {"numbers": [4]}) == (200, {"doubled": [8]})


def test_health_is_answered_in_the_middle_of_a_forward_pass(start: Callable[[FakeEndpoint], str]) -> None:
    endpoint = FakeEndpoint(gated=True)
    url = start(endpoint)
    asking = Asking(url, "/classify", 1)
    assert endpoint.begun.acquire(timeout=WAIT_S)
    assert ask(url, "/health", method="GET") == (200, {"status": "awake"})
    endpoint.go_on.release()
    assert asking.answer() == (200, {"doubled": [2]})


def test_asleep_it_is_well_but_answers_nothing(start: Callable[[FakeEndpoint], str]) -> None:
    endpoint = FakeEndpoint()
    url = start(endpoint)
    for _ in range(2):
        assert ask(url, "/sleep") == (200, {})
    assert not endpoint.weights.is_awake
    assert ask(url, "/health", method="GET") == (200, {"status": "asleep"})
    status, told = ask(url, "/classify", {"numbers": [1]})
    assert status == 503
    assert "asleep" in told["error"]["message"] and "/wake_up" in told["error"]["message"]
    for _ in range(2):
        assert ask(url, "/wake_up") == (200, {})
    assert ask(url, "/classify", {"numbers": [1]}) == (200, {"doubled": [2]})


def test_sleep_waits_for_what_is_under_way_and_lets_nothing_new_in(start: Callable[[FakeEndpoint], str]) -> None:
    endpoint = FakeEndpoint(gated=True)
    url = start(endpoint)
    asking = Asking(url, "/classify", 1)
    assert endpoint.begun.acquire(timeout=WAIT_S)
    falling_asleep = Asking(url, "/sleep")
    while ask(url, "/health", method="GET")[1]["status"] == "awake":
        assert falling_asleep.is_alive()
    assert ask(url, "/classify", {"numbers": [2]})[0] == 503
    assert endpoint.weights.is_awake
    endpoint.go_on.release()
    assert asking.answer() == (200, {"doubled": [2]})
    assert falling_asleep.answer() == (200, {})
    assert not endpoint.weights.is_awake


def test_a_wake_up_that_fails_leaves_it_asleep_with_the_reason(start: Callable[[FakeEndpoint], str]) -> None:
    endpoint = FakeEndpoint()
    url = start(endpoint)
    ask(url, "/sleep")
    endpoint.wake_error = MemoryError()
    status, told = ask(url, "/wake_up")
    assert status == 500
    assert "cannot wake up: its weights take" in told["error"]["message"]
    assert ask(url, "/health", method="GET") == (200, {"status": "asleep"})
    assert ask(url, "/classify", {"numbers": [1]})[0] == 503
    endpoint.wake_error = None
    assert ask(url, "/wake_up")[0] == 200
    assert ask(url, "/classify", {"numbers": [1]}) == (200, {"doubled": [2]})


def test_nothing_is_computed_for_a_client_that_went_away(start: Callable[[FakeEndpoint], str]) -> None:
    endpoint = FakeEndpoint(gated=True)
    url = start(endpoint)
    asking = Asking(url, "/classify", 1)
    assert endpoint.begun.acquire(timeout=WAIT_S)
    host, _, port = url.removeprefix("http://").partition(":")
    leaving = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    leaving.request("POST", "/classify", json.dumps({"numbers": [2]}))
    staying = Asking(url, "/classify", 3)
    leaving.close()
    # Whatever was on its way before this answer has been seen by the server's event loop.
    assert ask(url, "/health", method="GET")[0] == 200
    endpoint.go_on.release(3)
    assert asking.answer() == (200, {"doubled": [2]})
    assert staying.answer() == (200, {"doubled": [6]})
    assert sorted(number for batch in endpoint.batches for number in batch) == [1, 3]
