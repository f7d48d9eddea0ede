"""`makespan`: how long a router takes to get a batch of unequal jobs done by unequal workers.

    client, 128 in flight ──▶ router ──▶ 8 emulated workers of speeds 1, 1, 1, 1, 2, 2, 4, 4 with 4 slots each

Relative to total work / total speed, which nobody can beat: 1 is perfect. With the cost hint the client tells the
router how much work each job is, in a header that only ours reads; the peers' numbers are therefore the same in all
cases and measured once.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from bench.harness import Outcome, Row
from bench.programs import free_ports
from bench.router_client import Answer, Ask, Client
from bench.router_contestants import OURS
from bench.router_scene import Entry, Router, Stage, wait_for_ports
from bench.router_workers import Worker, new_event_loop

HINT, NO_HINT, HEDGED = "makespan, cost hint", "makespan, no hint", "makespan, no hint, hedged"
CASES = (HINT, NO_HINT, HEDGED)
HEDGING = ("--hedge-quantile", "0.95")  # what ours can do besides, when asked to: stragglers go to a second worker
Play = tuple[str, str]  # a contestant and a case
METRIC = "makespan / (total work / total speed)"
SPEEDS = (1, 1, 1, 1, 2, 2, 4, 4)
NUM_SLOTS = 4
IN_FLIGHT = 128
SIGMA = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    num_jobs: int
    mean_work_s: float  # at speed 1
    num_seeds: int


FULL = Plan(num_jobs=2000, mean_work_s=0.2, num_seeds=10)
QUICK = Plan(num_jobs=1000, mean_work_s=0.06, num_seeds=1)


def jobs(plan: Plan, seed: int) -> list[float]:
    """Log-normal, scaled so that the total is the same for every seed."""
    dice = random.Random(seed)
    works = [dice.lognormvariate(0.0, SIGMA) for _ in range(plan.num_jobs)]
    scale = plan.mean_work_s * plan.num_jobs / sum(works)
    return [scale * work for work in works]


def ideal_s(works: Sequence[float]) -> float:
    """All slots busy to the end."""
    return sum(works) / (NUM_SLOTS * sum(SPEEDS))


def run(entry: Entry, cases: Sequence[str]) -> Outcome:
    plan = QUICK if entry.quick else FULL
    # A peer cannot tell the cases apart, so it plays without the hint.
    plays = [(OURS, case) for case in cases] + [(name, NO_HINT) for name in entry.peers]
    found: dict[Play, list[float]] = {play: [] for play in plays}
    with ExitStack() as stack:
        teams = open_teams(Stage(entry, stack), plays)
        for seed in range(plan.num_seeds):
            works = jobs(plan, seed)
            for play in plays if seed % 2 == 0 else reversed(plays):
                found[play].append(makespan_s(teams[play], works, play[1] == HINT) / ideal_s(works))
            print(f"makespan, seed {seed}: {described(found)}", file=sys.stderr, flush=True)
    where: dict[str, Any] = {"makespan": {"jobs": plan.num_jobs, "mean_work_s": plan.mean_work_s}}
    where["makespan"] |= {"seeds": plan.num_seeds, "spread": spread(found)}
    return Outcome(makespan_rows(found, cases, entry), where)


def open_teams(stage: Stage, plays: Sequence[Play]) -> dict[Play, Router]:
    """A router before eight workers of its own: one that learns how fast they are must not learn it from others."""
    ports = {play: free_ports(len(SPEEDS)) for play in plays}
    programs = {play: stage.open_workers(emulated(ports[play])) for play in plays}
    for play, program in programs.items():
        wait_for_ports(program, ports[play])
    routers = {
        play: stage.open_router(play[0], ports[play], more=HEDGING if play[1] == HEDGED else ()) for play in plays
    }
    for router in routers.values():
        router.wait()
    return routers


def emulated(ports: Sequence[int]) -> list[Worker]:
    pairs = zip(ports, SPEEDS, strict=True)
    return [Worker(f"w{number}", port, speed, NUM_SLOTS) for number, (port, speed) in enumerate(pairs)]


def makespan_s(router: Router, works: Sequence[float], hint: bool) -> float:
    """Seconds from the first request to the last answer. Every job must be answered."""
    answers: list[Answer] = []
    asks = [Ask(number, work, work if hint else None) for number, work in enumerate(works)]
    client = Client(router.port, asks, IN_FLIGHT, answers.append)
    with asyncio.Runner(loop_factory=new_event_loop()) as runner:
        runner.run(client.run())
    failures = [answer.failure for answer in answers if answer.failure]
    if failures or client.unasked:
        raise router.program.failure(f"failed {len(failures)} jobs of {len(works)} ({failures[:1]})")
    return max(answer.ended_s for answer in answers) - min(answer.sent_s for answer in answers)


def makespan_rows(found: dict[Play, list[float]], cases: Sequence[str], entry: Entry) -> list[Row]:
    peers: list[str | None] = [*entry.peers] or [None]
    return [
        Row(
            case,
            METRIC,
            statistics.mean(found[OURS, case]),
            statistics.mean(found[peer, NO_HINT]) if peer else None,
            peer,
            better="lower",
        )
        for case, peer in itertools.product(cases, peers)
    ]


def spread(found: dict[Play, list[float]]) -> dict[str, list[float]]:
    """Best and worst seed of each."""
    return {
        f"{name}, {case}" if name == OURS else name: [round(min(values), 3), round(max(values), 3)]
        for (name, case), values in found.items()
    }


def described(found: dict[Play, list[float]]) -> str:
    return ", ".join(f"{name} {values[-1]:.3f}" for (name, _), values in found.items())
