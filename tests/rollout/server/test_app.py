"""What a client of a replica sees, with a computation that the test holds in its hands."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.rollout.server.fakes import WAIT_S, FakeClassifier, Served, doubled
from tests.rollout.server.models import ask


@pytest.fixture
def start() -> Iterator[Callable[..., str]]:
    servers: list[Served] = []

    def starting(fake: FakeClassifier, **settings: Any) -> str:
        servers.append(Served(fake.service(), **settings))
        return servers[-1].url

    yield starting
    for server in servers:
        server.close()


class Asking(threading.Thread):
    def __init__(self, url: str, path: str = "/classify", *digits: int) -> None:
        super().__init__()
        self._asked = (url, path, {"input": list(map(str, digits))} if digits else {})
        self.start()

    def run(self) -> None:
        self._answer = ask(*self._asked)

    def answer(self) -> tuple[int, Any]:
        self.join(WAIT_S)
        return self._answer


def test_models_and_health(start: Callable[..., str]) -> None:
    url = start(FakeClassifier())
    assert ask(url, "/health", method="GET") == (200, {"status": "awake"})
    status, told = ask(url, "/v1/models", method="GET")
    assert (status, told["data"][0]["id"], told["data"][0]["max_model_len"]) == (200, "fake", 7)


def test_mistakes_are_told_as_json(start: Callable[..., str]) -> None:
    url = start(FakeClassifier())
    for path, body, status, message in [
        ("/classify", b"{", 400, "not JSON"),
        ("/v1/chat/completions", {}, 400, "ask it at POST /classify"),
        ("/update_weights", {}, 400, "ask it at POST /classify"),
        ("/nowhere", {}, 404, "POST /nowhere: Not Found"),
        ("/health", {}, 405, "Method Not Allowed"),
        ("/classify", {"input": "-1"}, 500, "ValueError: it is negative"),
    ]:
        answered, told = ask(url, path, body)
        assert answered == status
        assert message in told["error"]["message"]
    assert doubled(ask(url, "/classify", {"input": "4"})) == [8]


def test_health_is_answered_in_the_middle_of_a_forward_pass(start: Callable[..., str]) -> None:
    fake = FakeClassifier(gated=True)
    url = start(fake)
    asking = Asking(url, "/classify", 1)
    assert fake.begun.acquire(timeout=WAIT_S)
    assert ask(url, "/health", method="GET") == (200, {"status": "awake"})
    fake.go_on.release()
    assert doubled(asking.answer()) == [2]


def test_asleep_it_is_well_but_answers_nothing(start: Callable[..., str]) -> None:
    fake = FakeClassifier()
    url = start(fake)
    for _ in range(2):
        assert ask(url, "/sleep") == (200, {})
    assert not fake.weights.is_awake
    assert ask(url, "/health", method="GET") == (200, {"status": "asleep"})
    status, told = ask(url, "/classify", {"input": "1"})
    assert status == 503
    assert "asleep" in told["error"]["message"] and "/wake_up" in told["error"]["message"]
    for _ in range(2):
        assert ask(url, "/wake_up") == (200, {})
    assert doubled(ask(url, "/classify", {"input": "1"})) == [2]


def test_sleep_waits_for_what_is_under_way_and_lets_nothing_new_in(start: Callable[..., str]) -> None:
    fake = FakeClassifier(gated=True)
    url = start(fake)
    asking = Asking(url, "/classify", 1)
    assert fake.begun.acquire(timeout=WAIT_S)
    falling_asleep = Asking(url, "/sleep")
    while ask(url, "/health", method="GET")[1]["status"] == "awake":
        assert falling_asleep.is_alive()
    assert ask(url, "/classify", {"input": "2"})[0] == 503
    assert fake.weights.is_awake
    fake.go_on.release()
    assert doubled(asking.answer()) == [2]
    assert falling_asleep.answer() == (200, {})
    assert not fake.weights.is_awake


def test_a_wake_up_that_fails_leaves_it_asleep_with_the_reason(start: Callable[..., str]) -> None:
    fake = FakeClassifier()
    url = start(fake)
    ask(url, "/sleep")
    fake.wake_error = MemoryError()
    status, told = ask(url, "/wake_up")
    assert status == 500
    assert "cannot wake up: its weights take" in told["error"]["message"]
    assert ask(url, "/health", method="GET") == (200, {"status": "asleep"})
    assert ask(url, "/classify", {"input": "1"})[0] == 503
    fake.wake_error = None
    assert ask(url, "/wake_up")[0] == 200
    assert doubled(ask(url, "/classify", {"input": "1"})) == [2]


def test_nothing_is_computed_for_a_client_that_went_away(start: Callable[..., str]) -> None:
    fake = FakeClassifier(gated=True)
    url = start(fake)
    asking = Asking(url, "/classify", 1)
    assert fake.begun.acquire(timeout=WAIT_S)
    host, _, port = url.removeprefix("http://").partition(":")
    leaving = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    leaving.request("POST", "/classify", json.dumps({"input": "2"}))
    staying = Asking(url, "/classify", 3)
    leaving.close()
    # Whatever was on its way before this answer has been seen by the server's event loop.
    assert ask(url, "/health", method="GET")[0] == 200
    fake.go_on.release(3)
    assert doubled(asking.answer()) == [2]
    assert doubled(staying.answer()) == [6]
    assert sorted(number for batch in fake.batches for number in batch) == [1, 3]


def test_everything_but_health_and_metrics_wants_the_token(start: Callable[..., str]) -> None:
    url = start(FakeClassifier(), token="secret")
    for path, method in [("/health", "GET"), ("/metrics", "GET")]:
        assert call(url, path, method)[0] == 200
    for path, method in [
        ("/classify", "POST"), ("/v1/models", "GET"), ("/sleep", "POST"), ("/tokenize", "POST"), ("/nowhere", "GET")
    ]:  # fmt: skip
        for sent in (None, "Bearer wrong", "Bearer", "Basic secret", "secret"):
            status, told = call(url, path, method, token=sent)
            assert status == 401 and b"invalid_api_key" in told
    assert call(url, "/v1/models", "GET", token="Bearer secret")[0] == 200
    assert call(url, "/classify", "POST", token="bearer secret", body={"input": "1"})[0] == 200


def call(url: str, path: str, method: str, *, token: str | None = None, body: Any = None) -> tuple[int, bytes]:
    host, _, port = url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    headers = {} if token is None else {"Authorization": token}
    connection.request(method, path, json.dumps(body or {}), headers)
    reply = connection.getresponse()
    return reply.status, reply.read()


def test_tokens_and_back_asleep_or_not(start: Callable[..., str]) -> None:
    url = start(FakeClassifier())
    ask(url, "/sleep")
    status, told = ask(url, "/tokenize", {"prompt": "1+2", "return_token_strs": True})
    assert (status, told["count"], told["max_model_len"], told["token_strs"]) == (200, 3, 7, ["1", "+", "2"])
    assert ask(url, "/detokenize", {"tokens": told["tokens"]}) == (200, {"prompt": "1+2"})
    chat = {"messages": [{"role": "user", "content": "1"}]}
    assert ask(url, "/tokenize", chat)[1]["count"] == 3
    assert ask(url, "/tokenize", chat | {"add_generation_prompt": False})[1]["count"] == 2
    assert ask(url, "/detokenize", {"tokens": [99]})[0] == 400
    assert ask(url, "/tokenize", {})[0] == 400


def test_metrics_tell_what_was_done(start: Callable[..., str]) -> None:
    fake = FakeClassifier(gated=True)
    url = start(fake)
    asking = Asking(url, "/classify", 1)
    assert fake.begun.acquire(timeout=WAIT_S)
    told = call(url, "/metrics", "GET")[1].decode()
    assert "practicum_server_running 1.0" in told and "practicum_server_awake 1.0" in told
    fake.go_on.release()
    asking.answer()
    ask(url, "/nowhere")
    told = call(url, "/metrics", "GET")[1].decode()
    for line in (
        'practicum_server_requests_total{path="/classify",status="200"} 1.0',
        'practicum_server_requests_total{path="other",status="404"} 1.0',
        'practicum_server_request_seconds_count{path="/classify"} 1.0',
        "practicum_server_prompt_tokens_total 1.0",
        "practicum_server_running 0.0",
    ):
        assert line in told
