"""`controller`: our worker groups against bare Ray actors and against verl's RayWorkerGroup.

Ours and bare actors share a process and a Ray, verl has its own. A contestant's step is one round of all that
controller_work.py times.
"""

from __future__ import annotations

import json
import statistics
import sys
from itertools import pairwise
from typing import Any

from bench.controller_work import FAKES, ITEMS, NOOP, NUM_WORKERS, RAY_SETTINGS, ROWS, START
from bench.harness import Options, Outcome, choose_peer
from bench.sides import OURS, Sides, Table, contest, rows_of
from bench.turns import Plan

FAKE_SIZES = (256, 1024, 4096)
FULL = Plan(warmup_steps=2, num_rounds=12, steps_per_turn=1, extra_rounds=24, patience_s=600)
QUICK = Plan(warmup_steps=1, num_rounds=1, steps_per_turn=1)  # each start of verl's workers takes many seconds
# How often a step repeats each call: arguments of `take_steps`.
FULL_JOB = {"num_noops": 500, "num_items": 200, "num_rows": 24}
QUICK_JOB = {"num_noops": 200, "num_items": 50, "num_rows": 8}
# Apart from the others: dozens of processes at rest slow every call of their Ray.
FULL_GROWTH = {"num_noops": 500, "larger_teams": (8, 32), "fakes": FAKE_SIZES}
QUICK_GROWTH = {"num_noops": 200, "larger_teams": (4,), "fakes": FAKE_SIZES}

FURTHER, OWN = "further worker", "own work"
TABLE: Table = (
    ("no-op, 2 workers", "ms per call", NOOP, "lower"),
    ("64 MiB batch, 2 workers", "ms per call", ROWS, "lower"),
    ("64 small items, 2 workers", "ms per call", ITEMS, "lower"),
    ("start-up, 2 workers", "s", START, "lower"),
    ("no-op, each further worker", "µs per call", FURTHER, "lower"),
    ("no-op, driver's own work per worker", "µs per call", OWN, "lower"),
)


def run(options: Options) -> Outcome:
    """`--peer none` leaves verl out. Bare Ray stays: it shares our process."""
    peer = choose_peer(options.peer, ["verl"])
    plan, job, growth_job = (QUICK, QUICK_JOB, QUICK_GROWTH) if options.quick else (FULL, FULL_JOB, FULL_GROWTH)
    program = [sys.executable, "-m", "bench.contestants.practicum_controller"]
    commands = {OURS: [*program, json.dumps(job)]}
    if peer is not None:
        # A large batch takes it many times as long as us, and it is sent in three ways.
        peer_job = json.dumps({**job, "num_rows": job["num_rows"] // 4})
        commands[peer.name] = [peer.python, "-m", f"bench.peers.{peer.name}_controller", peer_job]
    sides, where = contest(commands, plan, RAY_SETTINGS)
    growing, apart = contest({OURS: [*program, json.dumps(growth_job)]}, plan, RAY_SETTINGS)
    where["cpu_share_of_others"] = max(where["cpu_share_of_others"], apart["cpu_share_of_others"])
    where["no_op_by_workers"] = add_growth(sides, FURTHER, growing, NOOP)
    where["no_op_by_fakes"] = add_growth(sides, OWN, growing, FAKES)
    return Outcome(rows_of(TABLE, sides), where)


def add_growth(sides: Sides, number: str, growing: Sides, kind: str) -> dict[str, dict[str, Any]]:
    """Add what one more worker costs each side, in µs: the slope of the straight line nearest to the no-op on several
    numbers of workers, or of fakes, where only the driver works. Return by side what shows whether it is straight.

    The worst growth is the largest factor by which the cost of each worker grows from a size to the next: above 1 is
    worse than linear. On sizes that differ this much R² alone would let a mild curve hide behind the largest.
    """
    found = {}
    for side, numbers in growing.items():
        named = [name.partition("_") for name in numbers]  # `noop` is on NUM_WORKERS, `noop_8` on 8
        points = {int(size or NUM_WORKERS): numbers[one + bar + size] for one, bar, size in named if one == kind}
        if points:
            sizes, times = zip(*sorted(points.items()), strict=True)
            each = [ms / size for size, ms in zip(sizes, times, strict=True)]
            sides[side][number] = 1e3 * statistics.linear_regression(sizes, times).slope
            found[side] = {
                "ms_by_size": {str(size): round(ms, 4) for size, ms in zip(sizes, times, strict=True)},
                "r_squared": round(statistics.correlation(sizes, times) ** 2, 4),
                "worst_growth_of_cost_per_worker": round(max(b / a for a, b in pairwise(each)), 3),
            }
    return found
