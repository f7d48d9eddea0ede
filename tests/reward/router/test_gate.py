"""Who gets past a router, for which paths, and for how long a request may be on its way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from practicum.errors import RouterError
from practicum.reward.router import Router, RouterSettings
from tests.reward.router.client import Client, Response, chunks, request
from tests.reward.router.conftest import OPTIONS
from tests.reward.router.fakes import FakeWorker

StartWorker = Callable[..., FakeWorker]
RIGHT = b"X-Practicum-Token: secret"
WAIT_S = 30.0


@contextlib.contextmanager
def guarded(worker: FakeWorker, **settings: Any) -> Iterator[Any]:
    settings = {"token": "secret", "token_for": "all", **OPTIONS, **settings}
    with Router([worker.url], **settings).start() as running:
        deadline = time.monotonic() + WAIT_S
        while running.workers()[0]["state"] != "up":
            assert time.monotonic() < deadline
            time.sleep(0.005)
        yield running


def ask(url: str, *fields: bytes, method: bytes = b"POST", target: bytes = b"/classify", body: bytes = b"") -> Response:
    with Client(url, WAIT_S) as client:
        return client.ask(request(method, target, fields, body))


@pytest.mark.parametrize(
    "field",
    [
        b"X-Any: 1",
        b"X-Practicum-Token:",
        b"X-Practicum-Token: secre",
        b"X-Practicum-Token: secrets",
        b"X-Practicum-Token: SECRET",
        b"X-Practicum-Token: \xe9",
        b"Authorization: Bearer secret",
    ],
)
def test_a_request_without_the_token_is_refused_before_its_body_is_read(
    start_worker: StartWorker, field: bytes
) -> None:
    worker = start_worker()
    with guarded(worker) as router, Client(router.url, WAIT_S) as client:
        client.send(request(b"POST", b"/classify", [field, b"Content-Length: 1000000"]))
        response = client.response()
        assert response.status == 401 and b"wrong_token" in response.data
        assert client.is_closed(WAIT_S)
        assert router.workers()[0]["requests"] == 0
        assert 'refusals_total{reason="wrong_token"} 1.0' in router.metrics()
    assert worker.requests == []


def test_with_the_token_it_is_passed_on_without_it(start_worker: StartWorker) -> None:
    worker = start_worker()
    with guarded(worker) as router:
        assert ask(router.url, RIGHT, b"Authorization: Bearer theirs", body=b"x").data == b"/classify"
        assert ask(router.url, RIGHT, b"Transfer-Encoding: chunked", body=chunks(b"x")).status == 200
    first, second = worker.requests
    assert first.head.values(b"authorization") == [b"Bearer theirs"]
    assert not first.head.values(b"x-practicum-token") and not second.head.values(b"x-practicum-token")


def test_the_token_of_the_control_plane_alone_leaves_the_requests_open(start_worker: StartWorker) -> None:
    with guarded(start_worker(), token_for="control") as router:
        assert ask(router.url).status == 200


@pytest.mark.parametrize(
    "target",
    [
        b"/sleep",
        b"/update_weights",
        b"/classify/",
        b"/classify/../sleep",
        b"//classify",
        b"/CLASSIFY",
        b"/%63lassify",
        b"/classify%3f",
        b"/classify;x",
        b"/classify#x",
        b"http://worker.test/classify",
        b"http://worker.test/sleep",
        b"*",
        b"/",
        b"/routerx/classify",
    ],
)
def test_a_path_that_is_not_named_is_not_passed_on(start_worker: StartWorker, target: bytes) -> None:
    worker = start_worker()
    with guarded(worker, token=None, token_for="control", paths=("/classify", "/v1/completions")) as router:
        response = ask(router.url, target=target)
        assert response.status in (400, 404)
        assert ask(router.url, target=b"/classify?top=1").data == b"/classify?top=1"
        assert ask(router.url, method=b"GET", target=b"/v1/completions").status == 200
    assert [seen.head.target for seen in worker.requests] == [b"/classify?top=1", b"/v1/completions"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"token_for": "all"}, "token_for='all': needs a token"),
        ({"token_for": "some", "token": "secret"}, "token_for='some'"),
        ({"paths": ("classify",)}, "path 'classify' must begin with /"),
        ({"paths": ("/classify?x",)}, "no query"),
    ],
)
def test_settings_that_would_guard_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RouterError) as caught:
        RouterSettings.make(**settings)
    assert message in str(caught.value) and "secret" not in str(caught.value)


def test_a_token_is_not_shown_with_the_settings() -> None:
    assert "topsecret" not in repr(RouterSettings(token="topsecret"))


HEAD = request(b"POST", b"/slow", [b"Content-Length: 5000"])
DRIPS = {"the head": b"", "the body": HEAD, "the chunks": request(b"POST", b"/slow", [b"Transfer-Encoding: chunked"])}


@pytest.mark.parametrize("part", DRIPS)
def test_a_client_that_drips_is_ended_after_a_time_in_all(
    start_worker: StartWorker, start_router: Callable[..., Any], part: str
) -> None:
    worker = start_worker()
    router = start_router(worker, client_timeout_s=5.0, request_timeout_s=1.0)
    drops = {"the head": HEAD[:-4] + b"\r\nX-Any: " + b"x" * 5000, "the body": b"x" * 5000}
    drops["the chunks"] = b"1388\r\n" + b"x" * 5000
    with Client(router.url, WAIT_S) as client:
        client.send(DRIPS[part])
        client.sock.settimeout(0.02)
        answered = b""
        for byte in drops[part]:
            with contextlib.suppress(ConnectionError):
                client.sock.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                answered = client.sock.recv(1000)
                break
        assert answered.startswith(b"HTTP/1.1 408 ") and b"not come in full after 1 s" in answered
    assert worker.requests == []
    assert [state["failures"] for state in router.workers()] == [0]
    with Client(router.url, WAIT_S) as client:
        assert client.is_kept()


def test_the_time_begins_with_each_request(start_worker: StartWorker, start_router: Callable[..., Any]) -> None:
    router = start_router(start_worker(), request_timeout_s=1.5)
    with Client(router.url, WAIT_S) as client:
        assert client.get(b"/first").status == 200
        time.sleep(2.5)  # nobody waits for a request that has not begun
        assert client.ask(b"GET /second HTTP/1.1\r\n", b"Host: a\r\n\r\n", pause_s=0.3).data == b"/second"
        time.sleep(1.3)
        assert client.ask(b"GET /third HTTP/1.1\r\n", b"Host: a\r\n\r\n", pause_s=1.2).data == b"/third"
