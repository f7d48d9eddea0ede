"""The work all sides of the `controller` benchmark do, and how each of them times it.

    take_steps(sides) ──▶ once:      a team of 2, larger ones, and fakes that live in the driver
                          per step:  no-op and batches on the team of 2     timed by name
                                     no-op on the larger ones and fakes     timed as `noop_8`, `fakes_256`, ...
                                     another team of 2: start, first no-op  timed as `start`
                                     its end, until its processes are gone

Sides that can share a process and a Ray do, and take turns call by call: the same code is up to a tenth faster in one
process than in another, for as long as they live.

Calls are timed on teams that have long been up, as in training; starts on fresh processes only. All sides import this
in environments of their own; it needs NumPy, psutil and Ray.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import psutil

from bench.contestant import Line, step

NUM_WORKERS = 2
OURS, BARE = "practicum", "bare ray"
START, NOOP, ITEMS, ROWS, FAKES = "start", "noop", "items", "rows", "fakes"
TENSORDICT, NUMPY = "TensorDict", "NumPy"  # other ways in which verl sends rows
GONE_WITHIN_S = 30.0
CALLS_IN_A_ROW = 25

# For everyone alike. The reserve of idle processes is off: else some starts would find their processes already running.
RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_num_workers_soft_limit": "0",
}


@dataclass(frozen=True, slots=True)
class Job:
    """How often a step repeats each call, and on which other numbers of workers the no-op is timed.

    Without batches nothing is started anew either: that is for the growth of the no-op alone.
    """

    num_noops: int
    num_items: int = 0
    num_rows: int = 0
    larger_teams: tuple[int, ...] = ()
    fakes: tuple[int, ...] = ()  # workers that live in the driver, to see what it spends on each itself

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Job:
        fields: dict[str, Any] = json.loads(text)
        sizes: dict[str, Any] = {name: tuple(fields[name]) for name in ("larger_teams", "fakes")}
        return cls(**{**fields, **sizes})


class Team(Protocol):
    """A group of workers the way one side builds it."""

    def noop(self) -> Any:
        """Every worker does nothing; returns when all have answered."""

    def batches(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """The calls that send a batch out in shards and return what came back, joined in one piece.

        Each is named after its batch; a variant adds a word of its own after a blank.
        """

    def pids(self) -> Sequence[int]: ...

    def stop(self) -> None:
        """End the workers and give back their resources."""


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


def part_of(kind: str, size: int) -> str:
    """The name of the part in which the no-op on a standing team is timed."""
    return f"{kind}_{size}"


Sides = Mapping[str, Callable[[int], Team]]
Timings = dict[str, dict[str, float]]  # side -> part -> median seconds


def take_steps(
    line: Line,
    job: Job,
    packages: Iterable[str],
    sides: Sides,
    pretend: Callable[[int], Callable[[], Any]] | None = None,
) -> None:
    """Be a contestant, once Ray is up. `pretend` makes the no-op of a team without processes."""
    teams = {side: start(NUM_WORKERS) for side, start in sides.items()}
    larger = {size: {side: start(size).noop for side, start in sides.items()} for size in job.larger_teams}
    fakes = {size: pretend(size) for size in job.fakes} if pretend is not None else {}
    order = list(sides)

    def take_step(_: str) -> dict[str, Any]:
        began = time.perf_counter()
        timings = time_calls(teams, job)
        for size, noops in larger.items():
            _add(timings, part_of(NOOP, size), medians_s(noops, repeats(job, size)))
        for size, noop in fakes.items():
            _add(timings, part_of(FAKES, size), medians_s({next(iter(sides)): noop}, repeats(job, size)))
        ended_cpu_s = 0.0
        for side in order if job.num_rows else ():
            timings[side][START], used_cpu_s = time_start(sides[side])
            ended_cpu_s += used_cpu_s
        order.reverse()
        parts = {f"{side}: {part}": seconds for side, by_part in timings.items() for part, seconds in by_part.items()}
        return step(time.perf_counter() - began, 1, ended_cpu_s=ended_cpu_s, **parts)

    line.serve(packages, take_step)


def repeats(job: Job, size: int) -> int:
    return max(10, job.num_noops * NUM_WORKERS // size)


def _add(timings: Timings, part: str, seconds: Mapping[str, float]) -> None:
    for side, median in seconds.items():
        timings.setdefault(side, {})[part] = median


def time_calls(teams: Mapping[str, Team], job: Job) -> Timings:
    """Median seconds of each call, by name. Of each batch one is sent beforehand, to see that all of it comes back."""
    timings: Timings = {}
    _add(timings, NOOP, medians_s({side: team.noop for side, team in teams.items()}, job.num_noops))
    if not job.num_rows:
        return timings
    # In step: a team may set itself up for a batch just before it hands it out.
    for named in zip(*(team.batches() for team in teams.values()), strict=True):
        name = named[0][0]
        calls = {side: call for side, (_, call) in zip(teams, named, strict=True)}
        sent, count = (items(), job.num_items) if name.split()[0] == ITEMS else (rows(), job.num_rows)
        for side, call in calls.items():
            if not np.array_equal(np.asarray(call()), sent):
                raise RuntimeError(f"{side}, {name}: what came back is not what was sent")
        _add(timings, name, medians_s(calls, count))
    return timings


def time_start(start: Callable[[int], Team]) -> tuple[float, float]:
    """Seconds from nothing to the first answered call of two workers, and the CPU seconds of their processes."""
    account = Account()
    began = time.perf_counter()
    team = start(NUM_WORKERS)
    account.note()  # takes 2 ms, and processes that only helped to start are soon gone
    team.noop()
    seconds = time.perf_counter() - began
    pids = set(team.pids())
    if old := pids & account.before:
        raise RuntimeError(f"processes {sorted(old)} were running before the start-up that was to start them")
    account.note()
    team.stop()
    wait_until_gone(pids)
    return seconds, account.cpu_s


class Account:
    """CPU seconds of processes below this one that were not there when it was opened.

    Has to be asked while they live: Ray's raylet lets the kernel forget what its workers used.
    """

    def __init__(self) -> None:
        self.before = {process.pid for process in psutil.Process().children(recursive=True)}
        self._cpu_s: dict[int, float] = {}

    def note(self) -> None:
        for process in psutil.Process().children(recursive=True):
            if process.pid not in self.before:
                with suppress(psutil.NoSuchProcess):
                    self._cpu_s[process.pid] = sum(process.cpu_times()[:2])

    @property
    def cpu_s(self) -> float:
        return sum(self._cpu_s.values())


def medians_s(calls: Mapping[str, Callable[[], Any]], count: int) -> dict[str, float]:
    """The median of each side, from `count` calls of each, a few at a time in turns, the other side first each time."""
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
    return {side: statistics.median(taken) for side, taken in seconds.items()}


def wait_until_gone(pids: Iterable[int]) -> None:
    """Until the processes have ended and Ray has put away those that only helped to start them."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while leftovers := [pid for pid in pids if psutil.pid_exists(pid)] + idle_ray_workers():
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"processes {leftovers} were still there {GONE_WITHIN_S:g} s after the end of their team"
            )
        time.sleep(0.05)


def idle_ray_workers() -> list[int]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.cmdline()[:1] == ["ray::IDLE"]:
                found.append(process.pid)
    return found
