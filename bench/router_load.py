"""`1 KB POST, 64 connections`: how many requests a router passes on, and what CPU time each costs it.

    wrk, 64 connections ──▶ router ──▶ 4 light workers (one nginx that answers by itself)

Client and workers cost little, so the router is what is measured. Contestants take turns in front of the same workers;
who is not on turn idles. The second case gives every request a header of its own, which makes all heads different.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import ContestantError, Outcome, Row
from bench.programs import Program, unpacked
from bench.router_client import PATH
from bench.router_contestants import OURS
from bench.router_scene import Entry, Router, Stage, light_request, start_all
from bench.turns import busy_s, wait_for_quiet

SAME, DIFFERENT = "1 KB POST, 64 connections", "1 KB POST, every head different"
CASES = (SAME, DIFFERENT)
NUM_CONNECTIONS = 64
NUM_WORKERS = 4
QUIET_SHARE = 0.1

SCRIPT = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '%s'
%s
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format(
    '\\nRESULT {"requests": %%d, "duration_us": %%d, "p50_us": %%d, "p99_us": %%d, "failed": %%d}\\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    e.connect + e.read + e.write + e.status + e.timeout))
end
"""
UNIQUE_HEADS = """
local count = 0
request = function()
  count = count + 1
  wrk.headers["X-Request-Id"] = string.format("request-%012d", count)
  return wrk.format()
end
"""


@dataclass(frozen=True, slots=True)
class Plan:
    turn_s: int
    warmup_s: int
    num_rounds: int
    extra_rounds: int  # to replace rounds in which others on the machine were busy
    patience_s: float


FULL = Plan(turn_s=4, warmup_s=2, num_rounds=7, extra_rounds=7, patience_s=120)
QUICK = Plan(turn_s=1, warmup_s=0, num_rounds=1, extra_rounds=0, patience_s=0)


@dataclass(frozen=True, slots=True)
class Turn:
    rate: float  # requests per second
    cpu_us: float  # of the router, per request
    p99_us: float
    others_share: float  # of the machine's cores


@dataclass(slots=True)
class Round:
    turns: dict[str, Turn] = field(default_factory=dict)

    @property
    def others_share(self) -> float:
        return max(turn.others_share for turn in self.turns.values())


def read_wrk(text: str) -> dict[str, int]:
    """The line that our script has wrk print at its end."""
    lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
    if len(lines) != 1:
        raise ContestantError(f"wrk gave no result but: {text.strip()[-500:]!r}")
    return json.loads(lines[0].removeprefix("RESULT "))


@dataclass(frozen=True, slots=True)
class Wrk:
    """The load generator with one of the two scripts."""

    script: Path

    @classmethod
    def write(cls, folder: Path, case: str) -> Wrk:
        path = folder / f"wrk-{CASES.index(case)}.lua"
        path.write_text(SCRIPT % (light_request(), UNIQUE_HEADS if case == DIFFERENT else ""))
        return cls(path)

    def run(self, port: int, seconds: int) -> dict[str, int]:
        program, env = unpacked("wrk", "usr/bin/wrk")
        size = ["-t1", f"-c{NUM_CONNECTIONS}", f"-d{seconds}s", "--timeout", "10s"]
        command = [program, *size, "-s", str(self.script), f"http://127.0.0.1:{port}{PATH}"]
        done = subprocess.run(
            command, env={**os.environ, **env}, capture_output=True, text=True, timeout=seconds + 30, check=False
        )
        return read_wrk(done.stdout + done.stderr)


def run(entry: Entry, cases: Sequence[str]) -> Outcome:
    plan = QUICK if entry.quick else FULL
    rows: list[Row] = []
    where: dict[str, Any] = {"load_rounds": plan.num_rounds, "load_turn_s": plan.turn_s}
    with ExitStack() as stack:
        stage = Stage(entry, stack)
        workers, ports = stage.open_light_workers(NUM_WORKERS)
        routers = start_all(stage, ports, lean=True)
        for case in cases:
            wrk = Wrk.write(entry.folder, case)
            direct = wrk.run(ports[0], plan.turn_s)
            where[f"{case}: a worker without router, requests/s"] = round(rate_of(direct))
            rounds = take_turns(routers, wrk, workers, plan)
            rows += load_rows(case, rounds, entry)
            where[f"{case}: cpu_share_of_others"] = round(max(one.others_share for one in rounds), 3)
            where[f"{case}: p99_us"] = {
                router.name: round(statistics.median(one.turns[router.name].p99_us for one in rounds))
                for router in routers
            }
    return Outcome(rows, where)


def take_turns(routers: Sequence[Router], wrk: Wrk, workers: Program, plan: Plan) -> list[Round]:
    for router in routers:
        if plan.warmup_s:
            wrk.run(router.port, plan.warmup_s)
    rounds: list[Round] = []
    order = list(routers)
    patience_s = plan.patience_s
    while len(rounds) < plan.num_rounds + plan.extra_rounds:
        patience_s -= wait_for_quiet(QUIET_SHARE, patience_s)
        rounds.append(Round({router.name: turn(router, wrk, workers, plan.turn_s) for router in order}))
        print(f"round {len(rounds)}: {described(rounds[-1])}", file=sys.stderr, flush=True)
        order.reverse()
        if sum(one.others_share <= QUIET_SHARE for one in rounds) == plan.num_rounds:
            break
    # Which rounds count depends on the rest of the machine alone, never on how anyone did in them.
    return sorted(rounds, key=lambda one: one.others_share)[: plan.num_rounds]


def turn(router: Router, wrk: Wrk, workers: Program, seconds: int) -> Turn:
    """One contestant under load. An answer other than 200 makes the numbers void."""
    router_before, ours_before = router.program.cpu_s(), workers.cpu_s() + _children_cpu_s()
    busy_before, start = busy_s(), time.monotonic()
    result = wrk.run(router.port, seconds)
    wall_s, busy = time.monotonic() - start, busy_s() - busy_before
    router_s = router.program.cpu_s() - router_before
    ours_s = workers.cpu_s() + _children_cpu_s() - ours_before
    if result["failed"] or not result["requests"]:
        raise router.program.failure(f"answered {result['requests']} requests and failed {result['failed']}")
    share = max(0.0, busy - router_s - ours_s) / (wall_s * (os.cpu_count() or 1))
    return Turn(rate_of(result), 1e6 * router_s / result["requests"], result["p99_us"], share)


def rate_of(result: dict[str, int]) -> float:
    return 1e6 * result["requests"] / result["duration_us"]


def load_rows(case: str, rounds: Sequence[Round], entry: Entry) -> list[Row]:
    """Medians over the rounds; ours beside each peer."""

    def rate(name: str) -> float:
        return statistics.median(one.turns[name].rate for one in rounds)

    def cpu_us(name: str) -> float:
        return statistics.median(one.turns[name].cpu_us for one in rounds)

    peers: list[str | None] = [*entry.peers] or [None]
    rows = [Row(case, "requests/s", rate(OURS), rate(peer) if peer else None, peer) for peer in peers]
    metric = "CPU µs per request"
    rows += [Row(case, metric, cpu_us(OURS), cpu_us(peer) if peer else None, peer, better="lower") for peer in peers]
    return rows


def described(one: Round) -> str:
    turns = ", ".join(f"{name} {turn.rate:,.0f}/s {turn.cpu_us:.0f} µs" for name, turn in one.turns.items())
    return f"{turns}; others used {one.others_share:.0%} of the machine"


def _children_cpu_s() -> float:
    """Of programs that were waited for: between two looks around a run of wrk, that is wrk alone."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
