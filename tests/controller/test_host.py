from __future__ import annotations

import pickle
import socket

import pytest

from practicum.controller import RayClassWithInitArgs, Worker, WorkerContext
from practicum.controller.host import CallHead, WorkerHost, free_port, host_address
from practicum.errors import WorkerError


class Odd(Worker):
    def fail(self) -> None:
        class Local(Exception):  # a class that no other process can import
            pass

        raise Local("only its text travels")

    def fail_at_length(self) -> None:
        raise ValueError("x" * 1_000_000)


def test_an_exception_that_cannot_travel_still_arrives_as_text() -> None:
    host = WorkerHost()
    host.build(RayClassWithInitArgs(Odd), WorkerContext("odd", rank=1, world_size=2))
    with pytest.raises(WorkerError, match=r"rank 1 of 2 .*Local: only its text travels") as caught:
        host.call(CallHead(None, "fail"), [], {})
    assert caught.value.cause is None
    assert "only its text travels" in (caught.value.remote_traceback or "")


def test_a_huge_error_is_cut_so_that_it_comes_along_with_the_answer() -> None:
    host = WorkerHost()
    host.build(RayClassWithInitArgs(Odd), WorkerContext("odd"))
    with pytest.raises(WorkerError, match="ValueError: xxx") as caught:
        host.call(CallHead(None, "fail_at_length"), [], {})
    assert len(pickle.dumps(caught.value)) < 100_000


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind((host_address(), free_port()))
