"""`controller`: our worker groups against bare Ray actors and against verl's RayWorkerGroup.

What a call, a batch and a start cost beyond what Ray itself takes for them, and how a call's cost grows with the number
of workers. Ours and bare actors share a process and a Ray, verl has its own. A contestant's step is one round of all of
it (controller_work.py), the seconds of each case in its parts.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.controller_work import (
    BARE,
    FAKES,
    ITEMS,
    NOOP,
    NUM_WORKERS,
    NUMPY,
    OURS,
    RAY_SETTINGS,
    ROWS,
    START,
    TENSORDICT,
    Job,
    part_of,
)
from bench.harness import Options, Outcome, Row, choose_peer
from bench.turns import Plan, Tally, alternate, opened

Medians = Mapping[str, Mapping[str, float]]  # contestant -> part of its step -> seconds

FAKE_SIZES = (256, 1024, 4096)
FULL = Plan(warmup_steps=2, num_rounds=12, steps_per_turn=1, extra_rounds=24, patience_s=600)
QUICK = Plan(warmup_steps=1, num_rounds=1, steps_per_turn=1)  # each start of verl's workers takes many seconds
FULL_JOB = Job(num_noops=500, num_items=200, num_rows=24)
QUICK_JOB = Job(num_noops=200, num_items=50, num_rows=8)
# Apart from the others: dozens of processes at rest slow every call of their Ray.
FULL_GROWTH = Job(num_noops=500, larger_teams=(8, 32), fakes=FAKE_SIZES)
QUICK_GROWTH = Job(num_noops=200, larger_teams=(4,), fakes=FAKE_SIZES)

OUR_PROGRAM = ("-m", "bench.contestants.practicum_controller")
END_S = 3.0  # then they are killed: dozens of Ray's processes take their time to part, and leave nothing of worth


@dataclass(frozen=True, slots=True)
class Case:
    """One part of a step, in the unit people read it in."""

    name: str
    part: str
    unit: str
    per_second: float  # how many of the unit


CASES = (
    Case("no-op, 2 workers", NOOP, "ms per call", 1e3),
    Case("64 MiB batch, 2 workers", ROWS, "ms per call", 1e3),
    Case("64 small items, 2 workers", ITEMS, "ms per call", 1e3),
    Case("start-up, 2 workers", START, "s", 1.0),
)
VARIANTS = (TENSORDICT, NUMPY)  # rows of their own, where a peer has them


def run(options: Options) -> Outcome:
    """`--peer none` leaves verl out. Bare Ray stays: it shares our process."""
    peer = choose_peer(options.peer, ["verl"])
    plan, job, growth_job = (QUICK, QUICK_JOB, QUICK_GROWTH) if options.quick else (FULL, FULL_JOB, FULL_GROWTH)
    commands = {OURS: [sys.executable, *OUR_PROGRAM, job.dump()]}
    if peer is not None:
        # A large batch takes it many times as long as us, and it is sent in three ways.
        peer_job = replace(job, num_rows=job.num_rows // 4)
        commands[peer.name] = [peer.python, "-m", f"bench.peers.{peer.name}_controller", peer_job.dump()]
    tallies = contest(commands, plan)
    medians = by_side(tally.parts() for tally in tallies.values())
    growing = contest({OURS: [sys.executable, *OUR_PROGRAM, growth_job.dump()]}, plan)
    growth_rows, growth = growth_of(by_side(tally.parts() for tally in growing.values()), growth_job)
    where = {
        "rounds": plan.num_rounds,
        "ray_settings": RAY_SETTINGS,
        **growth,
        "versions": {name: dict(tally.versions) for name, tally in tallies.items()},
        "cpu_share_of_others": round(max(tally.others_share for tally in [*tallies.values(), *growing.values()]), 3),
    }
    return Outcome([*case_rows(medians), *growth_rows], where)


def contest(commands: Mapping[str, list[str]], plan: Plan) -> dict[str, Tally]:
    with (
        tempfile.TemporaryDirectory(prefix="bench-controller-") as folder,
        opened(commands, Path(folder), RAY_SETTINGS, END_S) as contestants,
    ):
        return alternate(contestants, plan)


def by_side(contestants: Iterable[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the parts of each side, whichever process they were timed in."""
    medians: dict[str, dict[str, float]] = {}
    for parts in contestants:
        for name, seconds in parts.items():
            side, colon, part = name.partition(": ")
            if colon:  # else it is the step as a whole
                medians.setdefault(side, {})[part] = seconds
    return medians


def case_rows(medians: Medians) -> list[Row]:
    """Return a row for each case and each peer that has it, including ways of doing it that are the peer's own."""
    rows = []
    for case in CASES:
        ours = medians[OURS][case.part] * case.per_second
        for peer, parts in medians.items():
            names = {case.part: peer} | {f"{case.part} {variant}": f"{peer} ({variant})" for variant in VARIANTS}
            rows += [
                Row(case.name, case.unit, ours, parts[part] * case.per_second, name, better="lower")
                for part, name in names.items()
                if peer != OURS and part in parts
            ]
    return rows


def growth_of(medians: Medians, job: Job) -> tuple[list[Row], dict[str, Any]]:
    """Compare the no-op by number of workers: on processes, ours and bare Ray's, and on fakes, where only the driver
    works. Return rows, and what shows whether their slopes are of straight lines."""

    def on_processes(parts: Mapping[str, float]) -> Series:
        return Series({NUM_WORKERS: parts[NOOP], **{n: parts[part_of(NOOP, n)] for n in job.larger_teams}})

    ours, bare = on_processes(medians[OURS]), on_processes(medians[BARE])
    fakes = Series({n: medians[OURS][part_of(FAKES, n)] for n in job.fakes})
    workers, own = "no-op, each further worker", "no-op, driver's own work per worker"
    rows = [
        Row(workers, "µs per call", 1e6 * ours.slope, 1e6 * bare.slope, BARE, better="lower"),
        Row(own, "µs per call", 1e6 * fakes.slope, better="lower"),
    ]
    points = {"no_op_by_workers": {OURS: ours.as_dict(), BARE: bare.as_dict()}}
    return rows, {**points, "no_op_by_fakes": {OURS: fakes.as_dict()}}


@dataclass(frozen=True, slots=True)
class Series:
    """A cost measured on groups of several sizes: seconds by size, for two sizes or more."""

    seconds: Mapping[int, float]

    @property
    def slope(self) -> float:
        """The seconds that one more costs: the slope of the straight line nearest to all points."""
        return statistics.linear_regression(*self._points()).slope

    @property
    def r_squared(self) -> float:
        """The share of the variation that the straight line explains: 1 when all points lie on it."""
        return statistics.correlation(*self._points()) ** 2

    @property
    def worst_growth(self) -> float:
        """The largest factor by which the cost of each one grows from a size to the next: above 1 is worse than linear.

        R² alone would not do, since on sizes that differ this much a mild curve hides behind the largest.
        """
        each = [seconds / size for size, seconds in sorted(self.seconds.items())]
        return max(larger / smaller for smaller, larger in pairwise(each))

    def as_dict(self) -> dict[str, Any]:
        """Return what the environment block of a result file has of it."""
        return {
            "ms_by_size": {str(size): round(1e3 * seconds, 4) for size, seconds in sorted(self.seconds.items())},
            "r_squared": round(self.r_squared, 4),
            "worst_growth_of_cost_per_worker": round(self.worst_growth, 3),
        }

    def _points(self) -> tuple[list[int], list[float]]:
        sizes = sorted(self.seconds)
        return sizes, [self.seconds[size] for size in sizes]
