from __future__ import annotations

import socket
import threading

import pytest

from practicum.reward.serving.server import ModelServer
from tests.reward.serving.fakes import WAIT_S, FakeEndpoint
from tests.reward.serving.models import ask


def test_it_serves_until_it_is_closed() -> None:
    threads = threading.active_count()
    server = ModelServer("fake", FakeEndpoint(), host="127.0.0.1", max_batch_tokens=10)
    assert ask(server.url, "/classify", {"numbers": [1, 2]}) == (200, {"doubled": [2, 4]})
    server.close()
    server.close()
    assert threading.active_count() == threads
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


def test_sleeping_has_a_deadline() -> None:
    endpoint = FakeEndpoint(gated=True)
    server = ModelServer("fake", endpoint, host="127.0.0.1", max_batch_tokens=10)
    try:
        asking = threading.Thread(target=ask, args=(server.url, "/classify", {"numbers": [1]}))
        asking.start()
        assert endpoint.begun.acquire(timeout=WAIT_S)
        with pytest.raises(TimeoutError, match=r"not done with falling asleep within 0\.1 s"):
            server.sleep(0.1)
        endpoint.go_on.release()
        asking.join(WAIT_S)
        server.sleep(WAIT_S)
        assert not endpoint.weights.is_awake
    finally:
        endpoint.go_on.release()
        server.close()


def test_an_address_that_is_not_this_machines_is_an_error() -> None:
    with pytest.raises(OSError):
        ModelServer("fake", FakeEndpoint(), host="192.0.2.1", max_batch_tokens=10)
