"""What a client of a replica sees, with a computation that the test holds in its hands."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from practicum.controller.host import host_address
from practicum.errors import RolloutError
from practicum.rollout.server import serve
from practicum.rollout.server.errors import (
    BadRequest,
    NoSuchModel,
    Unauthorized,
    Unavailable,
    error_response,
)
from practicum.rollout.server.metrics import Metrics
from tests.rollout.server.client import ask
from tests.rollout.server.fakes import WAIT_S, FakeClassifier, Served, doubled


@pytest.fixture
def start() -> Iterator[Callable[..., str]]:
    servers: list[Served] = []

    def starting(fake: FakeClassifier, names: frozenset[str] | None = None, **settings: Any) -> str:
        servers.append(Served(fake.service(names), **settings))
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


def test_only_its_own_names_are_answered_to(start: Callable[..., str]) -> None:
    url = start(FakeClassifier(), names=frozenset({"fake", "default"}))
    for name in ("fake", "default", None):
        assert ask(url, "/tokenize", {"prompt": "1", "model": name})[0] == 200
    status, told = ask(url, "/tokenize", {"prompt": "1", "model": "other"})
    assert (status, told["error"]["message"]) == (404, "there is no model 'other' here; this is 'fake'.")
    assert ask(start(FakeClassifier()), "/tokenize", {"prompt": "1", "model": "other"})[0] == 200


def test_text_to_tokens_and_back(start: Callable[..., str]) -> None:
    url = start(FakeClassifier())
    assert ask(url, "/tokenize", {"prompt": "<user>1"}) == (200, {"tokens": [2, 5], "count": 2, "max_model_len": 7})
    assert ask(url, "/detokenize", {"tokens": [2, 5]}) == (200, {"prompt": "<user>1"})
    assert ask(url, "/detokenize", {"tokens": []})[0] == 400


def test_it_serves_until_it_is_closed() -> None:
    def own_threads() -> set[threading.Thread]:  # the loop that tests call from has threads too, which come and go
        names = "practicum-forward", "practicum-encode"
        return {thread for thread in threading.enumerate() if thread.name.startswith(names)}

    threads = own_threads()
    server = Served(FakeClassifier().service())
    assert doubled(ask(server.url, "/classify", {"input": ["1", "2"]})) == [2, 4]
    server.close()
    server.close()
    assert own_threads() <= threads
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


def test_sleeping_has_a_deadline() -> None:
    fake = FakeClassifier(gated=True)
    server = Served(fake.service())
    try:
        asking = threading.Thread(target=ask, args=(server.url, "/classify", {"input": "1"}))
        asking.start()
        assert fake.begun.acquire(timeout=WAIT_S)
        with pytest.raises(TimeoutError, match=r"not done with falling asleep within 0\.1 s"):
            server.run(server.server.sleep(0.1))

        async def both() -> None:
            first = asyncio.create_task(server.server.sleep(WAIT_S))
            while not server.server._switching.locked():
                await asyncio.sleep(0)
            with pytest.raises(TimeoutError, match=r"earlier call to sleep or wake up has not ended within 0\.1 s"):
                await server.server.wake_up(0.1)
            fake.go_on.release()
            await first

        server.run(both())
        asking.join(WAIT_S)
        server.run(server.server.sleep(WAIT_S))
        assert not fake.weights.is_awake
    finally:
        fake.go_on.release()
        server.close()


def test_an_address_that_cannot_be_had_is_an_error_that_says_why() -> None:
    with pytest.raises(RolloutError, match=r"cannot listen at 192\.0\.2\.1.* an address of this machine"):
        Served(FakeClassifier().service(), host="192.0.2.1")
    server = Served(FakeClassifier().service())
    try:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(RolloutError, match=rf"port {port} of 127\.0\.0\.1 is in use: .*0 for a free one"):
            Served(FakeClassifier().service(), host="127.0.0.1", port=port)
    finally:
        server.close()


def test_listening_everywhere_it_names_an_address_others_can_use() -> None:
    server = Served(FakeClassifier().service(), host="0.0.0.0")
    try:
        assert server.url.startswith(f"http://{host_address()}:")
        assert ask(server.url, "/health", method="GET")[0] == 200
    finally:
        server.close()


def test_closing_gives_requests_under_way_their_time_and_lets_nobody_in() -> None:
    fake = FakeClassifier(gated=True)
    server = Served(fake.service())
    kept = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=WAIT_S)
    kept.request("GET", "/health")
    kept.getresponse().read()
    with ThreadPoolExecutor(2) as threads:
        asking = threads.submit(ask, server.url, "/classify", {"input": "1"})
        assert fake.begun.acquire(timeout=WAIT_S)
        closing = threads.submit(server.close, WAIT_S)
        told = b""
        while b"about to end" not in told:  # until then it would be let in, if it had something to ask
            assert closing.running()
            kept.request("POST", "/classify", '{"input": []}')
            told = kept.getresponse().read()
        fake.go_on.release()
        assert doubled(asking.result(WAIT_S)) == [2]
        closing.result(WAIT_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_by_itself(number: signal.Signals) -> None:
    answers = []

    def ask_and_tell(url: str) -> None:
        answers.append(ask(url, "/classify", {"input": "4"}))
        os.kill(os.getpid(), number)

    def on_ready(url: str) -> None:
        threading.Thread(target=ask_and_tell, args=(url,)).start()

    before = signal.getsignal(signal.SIGTERM)
    try:
        asyncio.run(serve(FakeClassifier().service(), on_ready, host="127.0.0.1", port=0))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert doubled(answers[0]) == [8]


def test_errors_have_openais_shape() -> None:
    cases: list[tuple[Exception, int, str, str | None]] = [
        (BadRequest("too long", "context_length_exceeded"), 400, "invalid_request_error", "context_length_exceeded"),
        (BadRequest("bad"), 400, "invalid_request_error", None),
        (Unauthorized("who?"), 401, "authentication_error", "invalid_api_key"),
        (NoSuchModel("x"), 404, "invalid_request_error", "model_not_found"),
        (Unavailable("asleep"), 503, "service_unavailable", None),
        (ValueError("a bug"), 500, "server_error", None),
    ]
    for error, status, kind, code in cases:
        reply = error_response(error)
        assert reply.status == status and reply.body is not None
        told = json.loads(reply.body)["error"]  # type: ignore[arg-type]
        assert (told["type"], told["code"]) == (kind, code)
        assert str(error) in told["message"]
    assert error_response(Unauthorized("who?")).headers["WWW-Authenticate"] == "Bearer"


def test_figures_add_up() -> None:
    metrics, running = Metrics(), 2.0
    metrics.watch("running", "Requests.", lambda: running)
    for seconds in (0.02, 0.2):
        metrics.answered("/v1/completions", 200, seconds)
    metrics.add_tokens(5)
    metrics.add_tokens(0, 7)
    metrics.first_token_s.observe(0.05)
    metrics.num_abandoned.inc()
    told = metrics.text().decode()
    running = 3.0
    for line in (
        'practicum_server_requests_total{path="/v1/completions",status="200"} 2.0',
        'practicum_server_request_seconds_bucket{le="0.1",path="/v1/completions"} 1.0',
        "practicum_server_first_token_seconds_count 1.0",
        "practicum_server_prompt_tokens_total 5.0",
        "practicum_server_written_tokens_total 7.0",
        "practicum_server_abandoned_total 1.0",
        "practicum_server_running 2.0",
    ):
        assert line in told
    assert "practicum_server_running 3.0" in metrics.text().decode()
    assert "practicum_server_running" not in Metrics().text().decode()  # each has its own


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", r"the body is not JSON: "),
        (b"\xff", r"the body is not JSON: "),
        (b"[" * 100_000, r"the body is not JSON: "),
        (b"[]", r"valid dictionary"),
        (b"{}", r"give either prompt or messages"),
    ],
    ids=["cut off", "no text", "too deep", "a list", "incomplete"],
)
def test_what_cannot_be_read_says_why(start: Callable[..., str], data: bytes, message: str) -> None:
    status, told = ask(start(FakeClassifier()), "/tokenize", data)
    assert status == 400 and message in told["error"]["message"]
