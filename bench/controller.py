"""`controller`: our worker groups against bare Ray actors and against verl's RayWorkerGroup.

What a call, a batch and a start cost beyond what Ray itself takes for them, and how a call's cost grows with the number
of workers. Ours and bare actors share a process and a Ray, verl has its own. A contestant's step is one round of all of
it (controller_work.py), the seconds of each case in its parts.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
from bench.series import Series
from bench.turns import Contestant, Plan, Tally, alternate

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
    growth = Growth.of(by_side(tally.parts() for tally in growing.values()), growth_job)
    where = {
        "rounds": plan.num_rounds,
        "ray_settings": RAY_SETTINGS,
        **growth.as_dict(),
        "versions": {name: dict(tally.versions) for name, tally in tallies.items()},
        "cpu_share_of_others": round(max(tally.others_share for tally in [*tallies.values(), *growing.values()]), 3),
    }
    return Outcome([*case_rows(medians), *growth.rows()], where)


def contest(commands: Mapping[str, list[str]], plan: Plan) -> dict[str, Tally]:
    with tempfile.TemporaryDirectory(prefix="bench-controller-") as folder, ExitStack() as stack:
        contestants = [
            stack.enter_context(Contestant(name, command, Path(folder), RAY_SETTINGS, end_s=END_S))
            for name, command in commands.items()
        ]
        return alternate(contestants, plan)


def by_side(contestants: Iterable[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The parts of each side, whichever process they were timed in."""
    medians: dict[str, dict[str, float]] = {}
    for parts in contestants:
        for name, seconds in parts.items():
            side, colon, part = name.partition(": ")
            if colon:  # else it is the step as a whole
                medians.setdefault(side, {})[part] = seconds
    return medians


def case_rows(medians: Medians) -> list[Row]:
    """A row for each case and each peer that has it, ways of doing it that are the peer's own included."""
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


@dataclass(frozen=True, slots=True)
class Growth:
    """The no-op by number of workers: on processes, ours and bare Ray's, and on fakes, where only the driver works."""

    ours: Series
    bare: Series
    fakes: Series

    @classmethod
    def of(cls, medians: Medians, job: Job) -> Growth:
        def on_processes(parts: Mapping[str, float]) -> Series:
            return Series({NUM_WORKERS: parts[NOOP], **{n: parts[part_of(NOOP, n)] for n in job.larger_teams}})

        fakes = Series({n: medians[OURS][part_of(FAKES, n)] for n in job.fakes})
        return cls(on_processes(medians[OURS]), on_processes(medians[BARE]), fakes)

    def rows(self) -> list[Row]:
        ours, bare, fakes = (1e6 * series.slope for series in (self.ours, self.bare, self.fakes))
        return [
            Row("no-op, each further worker", "µs per call", ours, bare, BARE, better="lower"),
            Row("no-op, driver's own work per worker", "µs per call", fakes, better="lower"),
        ]

    def as_dict(self) -> dict[str, Any]:
        """What shows whether the rows' slopes are of straight lines."""
        return {
            "no_op_by_workers": {OURS: self.ours.as_dict(), BARE: self.bare.as_dict()},
            "no_op_by_fakes": {OURS: self.fakes.as_dict()},
        }
