from __future__ import annotations

import http.client
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from practicum.controller.host import host_address
from practicum.errors import RolloutError
from practicum.rollout.serving.server import ModelServer, serve_until_told
from tests.rollout.serving.fakes import WAIT_S, FakeClassifier, doubled
from tests.rollout.serving.models import ask


def test_it_serves_until_it_is_closed() -> None:
    threads = threading.active_count()
    server = ModelServer(FakeClassifier().service(), host="127.0.0.1")
    assert doubled(ask(server.url, "/classify", {"input": ["1", "2"]})) == [2, 4]
    server.close()
    server.close()
    assert threading.active_count() == threads
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


def test_sleeping_has_a_deadline() -> None:
    fake = FakeClassifier(gated=True)
    server = ModelServer(fake.service(), host="127.0.0.1")
    try:
        asking = threading.Thread(target=ask, args=(server.url, "/classify", {"input": "1"}))
        asking.start()
        assert fake.begun.acquire(timeout=WAIT_S)
        with pytest.raises(TimeoutError, match=r"not done with falling asleep within 0\.1 s"):
            server.sleep(0.1)
        fake.go_on.release()
        asking.join(WAIT_S)
        server.sleep(WAIT_S)
        assert not fake.weights.is_awake
    finally:
        fake.go_on.release()
        server.close()


def test_an_address_that_cannot_be_had_is_an_error_that_says_why() -> None:
    with pytest.raises(RolloutError, match=r"cannot listen at 192\.0\.2\.1.* an address of this machine"):
        ModelServer(FakeClassifier().service(), host="192.0.2.1")
    server = ModelServer(FakeClassifier().service(), host="127.0.0.1")
    try:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(RolloutError, match=rf"port {port} of 127\.0\.0\.1 is in use: .*0 for a free one"):
            ModelServer(FakeClassifier().service(), host="127.0.0.1", port=port)
    finally:
        server.close()


def test_listening_everywhere_it_names_an_address_others_can_use() -> None:
    server = ModelServer(FakeClassifier().service(), host="0.0.0.0")
    try:
        assert server.url.startswith(f"http://{host_address()}:")
        assert ask(server.url, "/health", method="GET")[0] == 200
    finally:
        server.close()


def test_closing_gives_requests_under_way_their_time_and_lets_nobody_in() -> None:
    fake = FakeClassifier(gated=True)
    server = ModelServer(fake.service(), host="127.0.0.1")
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
def test_served_until_told_it_ends_by_itself(number: signal.Signals) -> None:
    answers = []

    def ask_and_tell(url: str) -> None:
        answers.append(ask(url, "/classify", {"input": "4"}))
        os.kill(os.getpid(), number)

    def on_ready(url: str) -> None:
        threading.Thread(target=ask_and_tell, args=(url,)).start()

    before = signal.getsignal(signal.SIGTERM)
    try:
        serve_until_told(FakeClassifier().service(), on_ready, host="127.0.0.1", port=0)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert doubled(answers[0]) == [8]
