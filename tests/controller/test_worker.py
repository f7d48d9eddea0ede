from __future__ import annotations

import socket

import pytest

from practicum.controller import RayClassWithInitArgs, Worker, WorkerContext
from practicum.controller.worker import Call, WorkerHost, free_port, host_address
from practicum.errors import WorkerError


class Odd(Worker):
    def fail(self) -> None:
        class Local(Exception):  # a class that no other process can import
            pass

        raise Local("only its text travels")


def test_an_exception_that_cannot_travel_still_arrives_as_text() -> None:
    host = WorkerHost()
    host.build(RayClassWithInitArgs(Odd), WorkerContext("odd", rank=1, world_size=2))
    with pytest.raises(WorkerError, match=r"rank 1 of 2 .*Local: only its text travels") as caught:
        host.call(Call(None, "fail"))
    assert caught.value.cause is None
    assert "only its text travels" in (caught.value.remote_traceback or "")


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind((host_address(), free_port()))
