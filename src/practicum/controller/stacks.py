"""Stacks of busy processes: a thread in each worker sends them over a socket of its own.

A worker that hangs does not answer calls. The thread needs nothing but the interpreter lock; a process that holds on to
that, or is stopped, is reported as silent.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import secrets
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_TOKEN_BYTES = 16
_READERS = 128


StackAddress = tuple[str, int, bytes]
"""Where to ask a process for its stack: host, port, and a token that keeps strangers on the network from asking."""


def serve_stacks(host: str, loop: asyncio.AbstractEventLoop | None = None) -> StackAddress:
    """Answer those who send the token, until the process ends. `loop` is the one whose coroutines are shown."""
    server = socket.create_server((host, 0))
    token = secrets.token_bytes(_TOKEN_BYTES)
    threading.Thread(target=_serve, args=(server, token, loop), daemon=True, name="practicum-stacks").start()
    return host, server.getsockname()[1], token


def _serve(server: socket.socket, token: bytes, loop: asyncio.AbstractEventLoop | None) -> None:
    while True:
        connection, _ = server.accept()
        with connection:
            try:
                connection.settimeout(1.0)
                asked = connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
                if secrets.compare_digest(asked, token):
                    connection.sendall(stack_of_this_process(loop).encode())
            except OSError:
                continue  # the connection was closed


def stack_of_this_process(loop: asyncio.AbstractEventLoop | None = None) -> str:
    """Return the Python stacks of all threads but this one, the main thread first, and of a loop's coroutines."""
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    others = [ident for ident in frames if ident not in (main, threading.get_ident())]
    shown = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frames[ident])).rstrip()}"
        for ident in [main, *others]
        if ident is not None and ident in frames
    ]
    tasks = () if loop is None else asyncio.all_tasks(loop)
    stacks = sorted(stack for task in tasks if (stack := _stack_of_coroutine(task.get_coro())))
    return "\n".join([*shown, *(f"coroutine:\n{stack}" for stack in stacks)])


def _stack_of_coroutine(awaited: Any) -> str:
    """Return where a coroutine waits, down to the innermost that it awaits."""
    lines = []
    while awaited is not None:
        kind = next((kind for kind in ("cr", "ag", "gi") if hasattr(awaited, f"{kind}_frame")), None)
        if kind is None:  # an item of an async generator is asked for by an object that only shows what it refers to
            awaited = next((one for one in gc.get_referents(awaited) if inspect.isasyncgen(one)), None)
            continue
        frame = getattr(awaited, f"{kind}_frame")
        if frame is not None:
            lines += traceback.format_list(traceback.StackSummary.extract([(frame, frame.f_lineno)]))
        awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await", None)
    return "".join(lines).rstrip()


def read_stacks(addresses: Mapping[int, StackAddress], timeout_s: float = 1.0) -> dict[int, str]:
    """Ask all ranks for their stacks at once. A rank that does not answer in time gets a sentence instead."""
    if not addresses:
        return {}
    deadline = time.monotonic() + timeout_s
    with ThreadPoolExecutor(min(_READERS, len(addresses))) as pool:
        texts = pool.map(lambda address: _read_stack(address, deadline), addresses.values())
        return dict(zip(addresses, texts, strict=True))


def _read_stack(address: StackAddress, deadline: float) -> str:
    host, port, token = address
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        return "(no stack: there was no time left to ask)"
    try:
        with socket.create_connection((host, port), timeout=left_s) as connection, connection.makefile("rb") as answer:
            connection.sendall(token)
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            text = answer.read().decode(errors="replace")
        return text or "(no stack: the process did not answer)"
    except TimeoutError:
        return "(no stack: the process is silent; it is stopped, or in native code that holds the interpreter lock)"
    except OSError as error:
        return f"(no stack: the process cannot be reached: {error})"


def fold_stacks(stacks: Mapping[int, str]) -> str:
    """Return the stacks as text, each once with the ranks that have it."""
    ranks_with: dict[str, list[int]] = defaultdict(list)
    for rank, text in stacks.items():
        ranks_with[text].append(rank)
    return "\n".join(f"--- {name_ranks(ranks)}\n{text}" for text, ranks in ranks_with.items())


def name_ranks(ranks: Collection[int]) -> str:
    """Return `rank 3`, or `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
