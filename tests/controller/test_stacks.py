from __future__ import annotations

import socket
import threading
import time

from practicum.controller.stacks import StackAddress, fold_stacks, name_ranks, read_stacks, serve_stacks


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
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(b"x" * 16)
        assert connection.recv(100) == b""
    with socket.create_connection((address.host, address.port)):
        pass  # goes away without asking
    assert "MainThread" in read_stacks({0: address})[0]


def test_who_does_not_answer_is_told_apart_and_nobody_waits_long() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as gone:
        silent_port, gone_port = silent.getsockname()[1], gone.getsockname()[1]
        gone.close()
        start = time.monotonic()
        stacks = read_stacks(
            {
                0: StackAddress("127.0.0.1", silent_port, b"t" * 16),
                1: StackAddress("127.0.0.1", gone_port, b"t" * 16),
            },
            timeout_s=0.5,
        )
    assert time.monotonic() - start < 3
    assert "silent" in stacks[0] and "cannot be reached" in stacks[1]


def test_the_same_stack_is_shown_once() -> None:
    shown = fold_stacks({0: "waiting", 1: "working", 2: "waiting", 3: "waiting"})
    assert shown == "--- ranks 0, 2-3\nwaiting\n--- rank 1\nworking"
    assert name_ranks([5]) == "rank 5"
    assert read_stacks({}) == {}
