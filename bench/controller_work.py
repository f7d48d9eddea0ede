"""The work all sides of the `controller` benchmark do, and how each of them times it.

    take_steps(sides) ──▶ once:      a team of 2, larger ones, and fakes that live in the driver
                          per step:  no-op and batches on the team of 2     timed by name
                                     no-op on the larger ones and fakes     timed as `noop_8`, `fakes_256`, ...
                                     another team of 2: start, first no-op  timed as `start`
                                     its end, until its processes are gone

Sides that can share a process do: the same code is up to a tenth faster in one process than in another, for as long as
they live. All sides import this in environments of their own; it needs NumPy, psutil and Ray.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from bench.contestant import Line, step

NUM_WORKERS = 2
BARE = "bare ray"
START, NOOP, ITEMS, ROWS, FAKES = "start", "noop", "items", "rows", "fakes"
GONE_WITHIN_S = 30.0
CALLS_IN_A_ROW = 25

# For everyone alike. The reserve of idle processes is off: else some starts would find their processes already running.
RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_num_workers_soft_limit": "0",
}


# The name of a batch, which way of sending it this is if a side has several, and the call that sends it out in shards
# and returns what came back, joined in one piece.
Batches = Iterator[tuple[str, str, Callable[[], Any]]]


@dataclass(frozen=True, slots=True)
class Team:
    """A group of workers the way one side builds it."""

    noop: Callable[[], Any]  # every worker does nothing; returns when all have answered
    batches: Callable[[], Batches]
    pids: Callable[[], Iterable[int]]
    stop: Callable[[], None]  # ends the workers and gives back their resources


Start = Callable[[int], Team]  # from the number of workers


@cache
def items() -> list[tuple[int, ...]]:
    """64 small items, as a batch of a few numbers a sample would be."""
    return [tuple(range(row, row + 8)) for row in range(64)]


@cache
def rows() -> npt.NDArray[np.float32]:
    """A batch of 64 MiB."""
    return np.random.default_rng(0).random((8192, 2048), dtype=np.float32)


def start_ray() -> None:
    """A Ray of its own, the same for everyone. It may believe in many CPUs: what is timed are calls, not work."""
    import ray

    ray.init(
        address="local", num_cpus=128, object_store_memory=2**30, include_dashboard=False, log_to_driver=False,
        logging_level=logging.ERROR,
    )  # fmt: skip


def take_steps(
    packages: Iterable[str], sides: Mapping[str, Start], pretend: Callable[[int], Callable[[], Any]] | None = None, *,
    num_noops: int, num_items: int = 0, num_rows: int = 0, larger_teams: Iterable[int] = (), fakes: Iterable[int] = (),
) -> None:  # fmt: skip
    """Be a contestant, which repeats each call so often in a step.

    Without batches nothing is started anew either: that is for the growth of the no-op alone, which is timed on larger
    teams too, and on fakes that live in the driver: `pretend` makes the no-op of so many, for the first side.
    """
    line = Line()
    start_ray()
    teams = {side: start(NUM_WORKERS) for side, start in sides.items()}
    standing = [(NOOP, n, {side: start(n).noop for side, start in sides.items()}) for n in larger_teams]
    if pretend is not None:
        standing += [(FAKES, n, {next(iter(sides)): pretend(n)}) for n in fakes]
    order = list(sides)

    def take_step(_: str) -> dict[str, Any]:
        began, ended_cpu_s = time.perf_counter(), 0.0
        found = timed(NOOP, {side: team.noop for side, team in teams.items()}, num_noops)
        for kind, size, noops in standing:
            found |= timed(f"{kind}_{size}", noops, max(10, num_noops * NUM_WORKERS // size))
        if num_rows:
            found |= time_batches(teams, {ITEMS: num_items, ROWS: num_rows})
            for side in order:
                found[f"{side}: {START}"], used_cpu_s = time_start(sides[side])
                ended_cpu_s += used_cpu_s
        order.reverse()
        return step(time.perf_counter() - began, 1, ended_cpu_s=ended_cpu_s, **found)

    line.serve(packages, take_step)


def time_batches(teams: Mapping[str, Team], counts: Mapping[str, int]) -> dict[str, float]:
    """Time each batch, so often. One of each is sent beforehand, to see that all of it comes back."""
    found: dict[str, float] = {}
    # In step: a team may set itself up for a batch just before it hands it out.
    for offers in zip(*(team.batches() for team in teams.values()), strict=True):
        calls = {f"{side} ({way})" if way else side: call for side, (_, way, call) in zip(teams, offers, strict=True)}
        batch = offers[0][0]
        for side, call in calls.items():
            if not np.array_equal(np.asarray(call()), items() if batch == ITEMS else rows()):
                raise RuntimeError(f"{side}, {batch}: what came back is not what was sent")
        found |= timed(batch, calls, counts[batch])
    return found


def timed(part: str, calls: Mapping[str, Callable[[], Any]], count: int) -> dict[str, float]:
    """Return each side's median in ms, from `count` calls of each, a few at a time in turns, the other side first each
    time."""
    seconds: dict[str, list[float]] = {side: [] for side in calls}
    in_a_row = max(1, min(CALLS_IN_A_ROW, count // 4))
    order = list(calls)
    while any(len(taken) < count for taken in seconds.values()):
        for side in order:
            for _ in range(min(in_a_row, count - len(seconds[side]))):
                began = time.perf_counter()
                calls[side]()
                seconds[side].append(time.perf_counter() - began)
        order.reverse()
    return {f"{side}: {part}": 1e3 * statistics.median(taken) for side, taken in seconds.items()}


def time_start(start: Start) -> tuple[float, float]:
    """Return the seconds from nothing to the first answered call of two workers, and the CPU seconds of all processes
    that were not there before. Those are read while they live: Ray's raylet lets the kernel forget what they used."""
    before = cpu_s_by_pid()
    began = time.perf_counter()
    team = start(NUM_WORKERS)
    used = cpu_s_by_pid()  # takes 2 ms, and processes that only helped to start are soon gone
    team.noop()
    seconds = time.perf_counter() - began
    pids = set(team.pids())
    if old := pids & before.keys():
        raise RuntimeError(f"processes {sorted(old)} were running before the start-up that was to start them")
    used |= cpu_s_by_pid()
    team.stop()
    # Those that only helped to start the others, which Ray keeps without work, are to be gone as well.
    deadline = time.monotonic() + GONE_WITHIN_S
    while left := [p.pid for p in psutil.Process().children(recursive=True) if p.pid in pids or is_kept_by_ray(p)]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {left} were still there {GONE_WITHIN_S:g} s after the end of their team")
        time.sleep(0.05)
    return seconds, sum(cpu_s for pid, cpu_s in used.items() if pid not in before)


def cpu_s_by_pid() -> dict[int, float]:
    """Return those of this process and all below it, Ray's included; children that ended count with parents."""
    found: dict[int, float] = {}
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            found[process.pid] = sum(process.cpu_times()[:4])
    return found


def is_kept_by_ray(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()[:1] == ["ray::IDLE"]
    return False
