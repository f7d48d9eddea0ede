"""`weights`: how fast a version gets from a trainer's process into an engine's, by channel, against a plain memcpy.

The clock runs from the word to send until the last tensor is copied into the engine's own memory. CPU time is that of
both processes together. Channels and memcpy take turns, so that all see the same machine.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

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
    tallies = measured(num_bytes, num_rounds)
    case = f"weights, {num_bytes // 1_000_000} MB of float32"
    found = []
    for channel in CHANNELS:
        ours, memcpy = tallies[channel], tallies[MEMCPY]
        rates = (num_bytes / 1e9 / median(tally.seconds) for tally in (ours, memcpy))
        found.append(Row(case, f"GB/s by {channel}", *rates, MEMCPY))
        cpu = (median(ours.cpu_seconds), median(memcpy.cpu_seconds))
        found.append(Row(case, f"CPU s by {channel}", *cpu, MEMCPY, better="lower"))
    return found


@dataclass(slots=True)
class Tally:
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


def measured(num_bytes: int, num_rounds: int) -> dict[str, Tally]:
    torch.set_num_threads(1)
    tensors = make_tensors(num_bytes)
    engine = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    tallies = {name: Tally() for name in (MEMCPY, *CHANNELS)}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-weights-"))
        senders = {name: stack.enter_context(sender(name, num_bytes, folder)) for name in CHANNELS}
        receiver = WeightReceiver(PATIENCE_S)
        for version in range(num_rounds + 1):  # the first is for warming up
            for name, tally in tallies.items():
                began, began_cpu = time.perf_counter(), cpu_s()
                if name == MEMCPY:
                    copy(engine, tensors.items())
                    others = 0.0
                else:
                    others = pass_on(senders[name], receiver, version, engine)
                if version:
                    tally.seconds.append(time.perf_counter() - began)
                    tally.cpu_seconds.append(cpu_s() - began_cpu + others)
    return tallies


def make_tensors(num_bytes: int) -> dict[str, Tensor]:
    return {f"layers.{index}.weight": torch.randn(num_bytes // 4 // NUM_TENSORS) for index in range(NUM_TENSORS)}


def copy(engine: dict[str, Tensor], tensors: Any) -> None:
    for name, tensor in tensors:
        engine[name].copy_(tensor)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def pass_on(trainer: Connection, receiver: WeightReceiver, version: int, engine: dict[str, Tensor]) -> float:
    """One version; returns the CPU seconds of the trainer's process."""
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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # once for all of them
    ours, theirs = context.Pipe()
    settings = ChannelSettings(PATIENCE_S, folder=f"{folder}/{channel}")
    process = context.Process(target=serve, args=(theirs, channel, settings, num_bytes), daemon=True)
    process.start()
    theirs.close()
    killer = threading.Timer(10 * PATIENCE_S, process.kill)  # whoever waits for it then hears the end of its pipe
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
