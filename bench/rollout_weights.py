"""`weights`: how fast a version gets from a trainer's process into an engine's, by channel, against a plain memcpy.

The clock runs from the order to send until the last tensor is copied into the engine's own memory. CPU time is that of
both processes together. Channels and memcpy take turns, so that all see the same machine.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import cache
from statistics import fmean, median

import psutil
import torch
from torch import Tensor

from bench.harness import Options, Row
from practicum.weights import ChannelSettings, WeightReceiver
from tests.weights.sending import TrainerProcess

CHANNELS = ("shm", "collective", "disk")
MEMCPY = "memcpy"
NUM_TENSORS = 100
PATIENCE_S = 120.0


def rows(options: Options) -> list[Row]:
    num_bytes, num_rounds = (20_000_000, 2) if options.quick else (500_000_000, 7)
    # CPU times of processes come in hundredths of a second: their mean says more than their median.
    times = {name: (median(s), fmean(cpu_s)) for name, (s, cpu_s) in measured(num_bytes, num_rounds).items()}
    case = f"weights, {num_bytes // 1_000_000} MB of float32"
    memcpy_s, memcpy_cpu_s = times[MEMCPY]
    found = []
    for channel in CHANNELS:
        seconds, cpu_s = times[channel]
        found.append(Row(case, f"GB/s by {channel}", num_bytes / 1e9 / seconds, num_bytes / 1e9 / memcpy_s, MEMCPY))
        found.append(Row(case, f"CPU s by {channel}", cpu_s, memcpy_cpu_s, MEMCPY, better="lower"))
    return found


def measured(num_bytes: int, num_rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Return seconds and CPU seconds of each round, by channel."""
    torch.set_num_threads(1)
    tensors = made_tensors(num_bytes)
    engine = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in (MEMCPY, *CHANNELS)}

    def copy(received: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in received:
            engine[name].copy_(tensor)

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-weights-"))
        settings = {name: ChannelSettings(PATIENCE_S, folder=f"{folder}/{name}") for name in CHANNELS}
        trainers = {name: stack.enter_context(TrainerProcess(name, own)) for name, own in settings.items()}
        receiver = WeightReceiver(PATIENCE_S)
        for version in range(num_rounds + 1):  # the first is for warming up
            for name, (seconds, cpu_s) in times.items():
                trainer = trainers.get(name)
                began, cpu_began = time.perf_counter(), used_s(trainer)
                if trainer is None:
                    copy(tensors.items())
                else:
                    update, sending = trainer.pass_on(receiver, version, tensors_of, num_bytes)
                    copy(update.tensors)
                    sending.result(PATIENCE_S)
                if version:
                    seconds.append(time.perf_counter() - began)
                    cpu_s.append(used_s(trainer) - cpu_began)
    return times


@cache
def made_tensors(num_bytes: int) -> dict[str, Tensor]:
    return {f"layers.{index}.weight": torch.randn(num_bytes // 4 // NUM_TENSORS) for index in range(NUM_TENSORS)}


def tensors_of(num_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """Yield those of a trainer, which are made for the first version only."""
    yield from made_tensors(num_bytes).items()


def used_s(trainer: TrainerProcess | None) -> float:
    """Return the CPU seconds of this process and the trainer's so far."""
    theirs = 0.0 if trainer is None else sum(psutil.Process(trainer.process.pid).cpu_times()[:2])
    return time.process_time() + theirs
