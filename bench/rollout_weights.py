"""`weights`: how fast a version gets from a trainer's process into an engine's, by channel, against a plain memcpy.

The clock runs from the order to send until the last tensor is copied into the engine's own memory. CPU time is that of
both processes together. Channels and memcpy take turns, so that all see the same machine.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from statistics import median

import torch
from torch import Tensor

from bench.harness import Options, Row
from practicum.weights import ChannelSettings, WeightReceiver, open_sender

CHANNELS = ("shm", "collective", "disk")
MEMCPY = "memcpy"
NUM_TENSORS = 100
PATIENCE_S = 120.0


def rows(options: Options) -> list[Row]:
    num_bytes, num_rounds = (20_000_000, 2) if options.quick else (500_000_000, 7)
    times = {name: list(zip(*own, strict=True)) for name, own in measured(num_bytes, num_rounds).items()}
    case = f"weights, {num_bytes // 1_000_000} MB of float32"
    found = []
    for channel in CHANNELS:
        (seconds, cpu), (memcpy_s, memcpy_cpu) = times[channel], times[MEMCPY]
        rates = (num_bytes / 1e9 / median(own) for own in (seconds, memcpy_s))
        found.append(Row(case, f"GB/s by {channel}", *rates, MEMCPY))
        found.append(Row(case, f"CPU s by {channel}", median(cpu), median(memcpy_cpu), MEMCPY, better="lower"))
    return found


def measured(num_bytes: int, num_rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return seconds and CPU seconds of each round, by channel."""
    torch.set_num_threads(1)
    tensors = make_tensors(num_bytes)
    engine = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in (MEMCPY, *CHANNELS)}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-weights-"))
        senders = {name: stack.enter_context(sender(name, num_bytes, folder)) for name in CHANNELS}
        receiver = WeightReceiver(PATIENCE_S)
        for version in range(num_rounds + 1):  # the first is for warming up
            for name, own in times.items():
                began, began_cpu, others = time.perf_counter(), cpu_s(), 0.0
                if name == MEMCPY:
                    copy(engine, tensors.items())
                else:
                    others = receive(senders[name], receiver, version, engine)
                if version:
                    own.append((time.perf_counter() - began, cpu_s() - began_cpu + others))
    return times


def make_tensors(num_bytes: int) -> dict[str, Tensor]:
    return {f"layers.{index}.weight": torch.randn(num_bytes // 4 // NUM_TENSORS) for index in range(NUM_TENSORS)}


def copy(engine: dict[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
    for name, tensor in tensors:
        engine[name].copy_(tensor)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def receive(trainer: Connection, receiver: WeightReceiver, version: int, engine: dict[str, Tensor]) -> float:
    """Receive one version; return the CPU seconds of the trainer's process."""
    trainer.send(version)
    invited = trainer.recv()
    update = receiver.receive(invited if invited is not None else trainer.recv())
    copy(engine, update.tensors)
    if invited is not None:
        trainer.recv()
    used: float = trainer.recv()
    return used


@contextmanager
def sender(channel: str, num_bytes: int, folder: str) -> Iterator[Connection]:
    """Start a trainer's process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # once for all of them
    ours, theirs = context.Pipe()
    settings = ChannelSettings(PATIENCE_S, folder=f"{folder}/{channel}")
    process = context.Process(target=serve, args=(theirs, channel, settings, num_bytes), daemon=True)
    process.start()
    theirs.close()
    killer = threading.Timer(10 * PATIENCE_S, process.kill)  # a driver that waits for it then hears the end of its pipe
    killer.daemon = True
    killer.start()
    try:
        yield ours
    finally:
        killer.cancel()
        process.kill()
        process.join()


def serve(connection: Connection, channel: str, settings: ChannelSettings, num_bytes: int) -> None:
    torch.set_num_threads(1)
    tensors = make_tensors(num_bytes)
    sender = open_sender(channel, settings)
    while True:
        version = connection.recv()
        began = cpu_s()
        connection.send(sender.invite(version))
        connection.send(sender.send(version, tensors.items()))
        connection.send(cpu_s() - began)
