"""Inside a worker's process: failures that travel, stacks that are asked for; how several failures are told."""

from __future__ import annotations

import pickle
import socket
import threading
import time

import pytest

from practicum.controller import RayClassWithInitArgs, Worker, WorkerContext
from practicum.controller.host import WorkerHost, free_port, host_address
from practicum.controller.stacks import fold_stacks, name_ranks, read_stacks, serve_stacks
from practicum.controller.workers import _with_others
from practicum.errors import WorkerDied, WorkerError


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
        host.call(None, "fail", [], {})
    assert caught.value.cause is None
    assert "only its text travels" in (caught.value.remote_traceback or "")


def test_a_huge_error_is_cut_so_that_it_comes_along_with_the_answer() -> None:
    host = WorkerHost()
    host.build(RayClassWithInitArgs(Odd), WorkerContext("odd"))
    with pytest.raises(WorkerError, match="ValueError: xxx") as caught:
        host.call(None, "fail_at_length", [], {})
    assert len(pickle.dumps(caught.value)) < 100_000


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind((host_address(), free_port()))


def failure(kind: type[WorkerError], rank: int, group: str = "group") -> WorkerError:
    return kind(f"rank {rank} failed", group=group, ranks=[rank])


def test_others_who_failed_in_the_same_way_are_named_too() -> None:
    told = _with_others([failure(WorkerError, 0), failure(WorkerError, 1), failure(WorkerError, 2)])
    assert (str(told), told.ranks) == ("rank 0 failed [ranks 1-2 failed too]", (0, 1, 2))


def test_those_who_failed_in_another_way_or_elsewhere_are_not() -> None:
    told = _with_others([failure(WorkerDied, 1), failure(WorkerError, 0), failure(WorkerDied, 2, "other")])
    assert (str(told), told.ranks) == ("rank 1 failed", (1,))
    assert [str(other) for other in told.others] == ["rank 0 failed", "rank 2 failed"]
    assert [str(other) for other in pickle.loads(pickle.dumps(told)).others] == ["rank 0 failed", "rank 2 failed"]


def wait_here(event: threading.Event) -> None:
    event.wait(30)


def test_a_busy_process_tells_what_all_its_threads_do() -> None:
    event = threading.Event()
    thread = threading.Thread(target=wait_here, args=[event], name="waiter")
    thread.start()
    try:
        (text,) = read_stacks({0: serve_stacks("127.0.0.1")}).values()
    finally:
        event.set()
        thread.join()
    assert text.startswith("thread MainThread:") and "test_a_busy_process" in text
    assert "thread waiter:" in text and "in wait_here" in text
    assert "practicum-stacks" not in text


def test_strangers_get_nothing() -> None:
    address = serve_stacks("127.0.0.1")
    with socket.create_connection(address[:2]) as connection:
        connection.sendall(b"x" * 16)
        assert connection.recv(100) == b""
    with socket.create_connection(address[:2]):
        pass  # goes away without asking
    assert "MainThread" in read_stacks({0: address})[0]


def test_who_does_not_answer_is_told_apart_and_nobody_waits_long() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as gone:
        silent_port, gone_port = silent.getsockname()[1], gone.getsockname()[1]
        gone.close()
        start = time.monotonic()
        token = b"t" * 16
        stacks = read_stacks({0: ("127.0.0.1", silent_port, token), 1: ("127.0.0.1", gone_port, token)}, timeout_s=0.5)
    assert time.monotonic() - start < 30
    assert "silent" in stacks[0] and "cannot be reached" in stacks[1]


def test_the_same_stack_is_shown_once() -> None:
    shown = fold_stacks({0: "waiting", 1: "working", 2: "waiting", 3: "waiting"})
    assert shown == "--- ranks 0, 2-3\nwaiting\n--- rank 1\nworking"
    assert name_ranks([5]) == "rank 5"
    assert read_stacks({}) == {}
