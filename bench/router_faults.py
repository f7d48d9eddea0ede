"""Which worker gets which job, and what a client notices when workers fail.

    makespan  client, 128 in flight ──▶ router ──▶ 8 emulated workers of speeds 1, 1, 1, 1, 2, 2, 4, 4 with 4 slots each
    fault     client, 32 in flight ──▶ router ──▶ 4 emulated workers, a process each, 20 ms a job
              2 s as usual │ 4 s of fault at the last worker │ 5 s after it has recovered
    soak      ours alone: client, 64 in flight ──▶ router ──▶ 6 emulated workers, 1 ms a job; every second one fails

Only ours reads the cost hint, a header; the peers are therefore measured once for all makespans. Each worker notes when
it gets a request; the kernel counts attempts to reach a worker that is gone.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench.harness import Outcome, Row, beside
from bench.router import OURS, Router, Stage
from bench.router_work import Result, Worker, fetch, request_of, send_all
from bench.turns import Program, free_ports, is_listened_to

# Makespan

HINT, NO_HINT, HEDGED = "makespan, cost hint", "makespan, no hint", "makespan, no hint, hedged"
HEDGING = ("--hedge-quantile", "0.95")  # an option of ours: stragglers are sent to a second worker
SPEEDS = (1, 1, 1, 1, 2, 2, 4, 4)
NUM_SLOTS, IN_FLIGHT, SIGMA = 4, 128, 1.0
FULL_JOBS, QUICK_JOBS = (2000, 0.2, 10), (1000, 0.06, 1)  # jobs, their mean work at speed 1 in seconds, seeds
Side = tuple[str, str]  # a contestant and a case


def makespan(stage: Stage, cases: Sequence[str]) -> Outcome:
    num_jobs, mean_work_s, num_seeds = QUICK_JOBS if stage.quick else FULL_JOBS
    sides = [(OURS, case) for case in cases] + [(name, NO_HINT) for name in stage.names if name != OURS]
    found: dict[Side, list[float]] = {side: [] for side in sides}
    # Each has workers of its own: a router that learns speeds must not learn them from others' load.
    teams = {
        side: [Worker(*it, NUM_SLOTS) for it in zip(free_ports(len(SPEEDS)), SPEEDS, strict=True)] for side in sides
    }
    stage.open_workers(list(teams.values()))
    more = {HEDGED: HEDGING}
    wanted = [(name, [one.port for one in team], more.get(case, ())) for (name, case), team in teams.items()]
    routers = dict(zip(sides, stage.open_routers(wanted), strict=True))
    for seed in range(num_seeds):
        works = works_of(num_jobs, mean_work_s, seed)
        for side in sides if seed % 2 == 0 else reversed(sides):
            found[side].append(makespan_s(routers[side], works, side[1] == HINT) / ideal_s(works))
        last = ", ".join(f"{name} {values[-1]:.3f}" for (name, _), values in found.items())
        print(f"makespan, seed {seed}: {last}", file=sys.stderr, flush=True)
    spread = {", ".join(side): [round(min(values), 3), round(max(values), 3)] for side, values in found.items()}
    where = {"jobs": num_jobs, "mean_work_s": mean_work_s, "seeds": num_seeds, "spread": spread}
    return Outcome(makespan_rows(found, cases), {"makespan": where})


def works_of(num: int, mean_s: float, seed: int) -> list[float]:
    """Return log-normal work, scaled so that the total is the same for every seed."""
    dice = random.Random(seed)
    works = [dice.lognormvariate(0.0, SIGMA) for _ in range(num)]
    scale = mean_s * num / sum(works)
    return [scale * work for work in works]


def ideal_s(works: Sequence[float]) -> float:
    """Return the time with all slots busy to the end."""
    return sum(works) / (NUM_SLOTS * sum(SPEEDS))


def makespan_s(router: Router, works: Sequence[float], hint: bool) -> float:
    """Return the seconds from the first request to the last response. Every job must be answered."""
    results: list[Result] = []
    requests = [request_of(number, work, work if hint else None) for number, work in enumerate(works)]
    num_unasked = uvloop.run(send_all(router.port, requests, IN_FLIGHT, results.append))
    failures = [result.failure for result in results if result.failure]
    if failures or num_unasked:
        raise router.failure(f"failed {len(failures)} jobs of {len(works)} ({failures[:1]})")
    return max(result.ended_s for result in results) - min(result.sent_s for result in results)


def makespan_rows(found: dict[Side, list[float]], cases: Sequence[str]) -> list[Row]:
    means = {side: statistics.mean(values) for side, values in found.items()}
    peers = {name: mean for (name, _), mean in means.items() if name != OURS}
    metric = "makespan / (total work / total speed)"
    return [row for case in cases for row in beside(case, metric, means[OURS, case], peers, "lower")]


# Faults

PREFIX = "fault: "
MODES = {"500s": "500", "hang": "hang", "slow": "slow"}  # faults that a worker plays itself
KINDS = ("kill", *MODES, "flapping")
NUM_WORKERS, SLOTS = 4, 8
FLAP_S = 0.7  # how often a flapping worker is killed and started again
WINDOW_S, STEP_S = 0.5, 0.05
AVOIDED_SHARE = 0.2  # of a fair share: trial requests are fine
BACK_SHARE = 0.5
METRICS = FAILED, AVOIDED, BACK = "failed requests", "s until traffic avoids it", "s until it is back"
Counts = dict[str, float]
# Seconds of each phase and what is asked meanwhile: arguments of `play`.
FULL = {"normal_s": 2.0, "fault_s": 4.0, "after_s": 5.0, "response_timeout_s": 2.0, "in_flight": 32, "work_s": 0.02}
QUICK = {"normal_s": 0.6, "fault_s": 1.5, "after_s": 1.5, "response_timeout_s": 1.0, "in_flight": 16, "work_s": 0.06}
QUICK_PEERS = ("naive",)


def faults(stage: Stage, cases: Sequence[str]) -> Outcome:
    kinds = [case.removeprefix(PREFIX) for case in cases]
    phases: dict[str, Any] = QUICK if stage.quick else FULL
    names = [name for name in stage.names if name == OURS or not stage.quick or name in QUICK_PEERS]
    found: dict[tuple[str, str], Counts] = {}
    for kind, name in itertools.product(kinds, names):
        with ExitStack() as stack:
            found[kind, name] = uvloop.run(play(replace(stage, stack=stack), kind, name, **phases))
        print(f"{PREFIX}{kind}: {name}: {found[kind, name]}", file=sys.stderr, flush=True)
    counted = {f"{kind}, {name}": counts for (kind, name), counts in found.items()}
    return Outcome(fault_rows(found, kinds), {"faults": {**phases, "counted": counted}})


def fault_rows(found: Mapping[tuple[str, str], Counts], kinds: Sequence[str]) -> list[Row]:
    rows = []
    for kind, metric in itertools.product(kinds, METRICS):
        values = {name: counts[metric] for (one, name), counts in found.items() if one == kind}
        rows += beside(PREFIX + kind, metric, values.pop(OURS), values, "lower")
    return rows


async def play(
    stage: Stage, kind: str, name: str, *, normal_s: float, fault_s: float, after_s: float, response_timeout_s: float,
    in_flight: int, work_s: float,
) -> Counts:  # fmt: skip
    """Keep asking a router while one of its workers works as usual, fails and has recovered. Count also what failed
    requests got. Times are of `time.monotonic`."""
    ports = free_ports(NUM_WORKERS)
    arrivals = [stage.folder / f"arrivals-{port}" for port in ports]
    teams = [[Worker(port, slots=SLOTS, arrivals=str(path))] for port, path in zip(ports, arrivals, strict=True)]
    faulty = stage.open_workers(teams)[-1]
    [router] = stage.open_routers([(name, ports, ())], response_timeout_s=response_timeout_s)
    results: list[Result] = []
    refused: list[float] = []  # attempts to reach a worker that is gone
    end_s = time.monotonic() + normal_s + fault_s + after_s
    numbers = itertools.takewhile(lambda _: time.monotonic() < end_s, itertools.count())
    requests = (request_of(number, work_s) for number in numbers)
    async with asyncio.TaskGroup() as tasks:
        counting = tasks.create_task(count_refused(refused))
        running = tasks.create_task(send_all(router.port, requests, in_flight, results.append))
        await asyncio.sleep(normal_s)
        failed_s = time.monotonic()
        await break_for(kind, ports[-1], faulty, fault_s)
        recovered_s = time.monotonic()
        end_s = recovered_s + after_s
        num_unasked = await running
        counting.cancel()
    sent = [np.fromfile(path).tolist() for path in arrivals]
    usual_start = failed_s - min(1.5, (failed_s - results[0].sent_s) / 2)
    usual = sum(usual_start <= one < failed_s for times in sent for one in times)
    fair = usual / (failed_s - usual_start) * WINDOW_S / NUM_WORKERS
    to_faulty = sorted(sent[-1] + ([] if kind in MODES else refused))
    during = [one - failed_s for one in to_faulty if failed_s <= one < recovered_s]
    after = [one - recovered_s for one in to_faulty if recovered_s <= one < end_s]
    failures = Counter(f"failed: {result.failure}" for result in results if result.failure)
    failures["failed: answer that nobody asked for"] += num_unasked
    return {
        FAILED: failures.total(),
        AVOIDED: avoided_after(during, recovered_s - failed_s, fair),
        BACK: back_after(after, end_s - recovered_s, fair),
        "slowest answer, s": max(result.ended_s - result.sent_s for result in results),
        **+failures,
    }


async def break_for(kind: str, port: int, program: Program, seconds: float) -> None:
    """Let a worker fail in one way for that long; it works again when this returns."""
    end = time.monotonic() + seconds
    if kind in MODES:
        await asyncio.to_thread(fetch, port, f"/control/{MODES[kind]}", "")
        await asyncio.sleep(end - time.monotonic())
        await asyncio.to_thread(fetch, port, "/control/ok", "")
        return
    await asyncio.to_thread(program.kill)
    while kind == "flapping" and time.monotonic() < end - FLAP_S:
        await asyncio.to_thread(program.start)
        await asyncio.sleep(FLAP_S)
        await asyncio.to_thread(program.kill)
    await asyncio.sleep(max(0.0, end - time.monotonic()))
    await asyncio.to_thread(program.start)
    while not is_listened_to(port):
        await asyncio.sleep(0.01)


async def count_refused(times: list[float]) -> None:
    """Note each attempt to connect that fails, here or in any other process: only the kernel sees those."""
    before = refused_connects()
    while True:
        await asyncio.sleep(STEP_S / 2)
        now = refused_connects()
        times.extend([time.monotonic()] * (now - before))
        before = now


def refused_connects() -> int:
    """Return the number of all processes that share our network, since it is up."""
    lines = Path("/proc/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(values[names.index("AttemptFails")])


def avoided_after(times: Sequence[float], duration_s: float, fair: float) -> float:
    """Return when the last window with more than a trickle ended; 0 if there was none, the duration if it never ends.

    `times` are of requests sent to the worker, from the start of the fault; `fair` is a fair share of one window.
    """
    busy = [inside for _, inside in windows(times, duration_s) if len(inside) >= AVOIDED_SHARE * fair]
    last = max(busy[-1]) if busy else 0.0
    return duration_s if last > duration_s - STEP_S else last  # a request in the last moments: it is not avoided at all


def back_after(times: Sequence[float], duration_s: float, fair: float) -> float:
    """Return when the first window with a decent share began, from recovery on; the duration if there was none."""
    starts = (start for start, inside in windows(times, duration_s) if len(inside) >= BACK_SHARE * fair)
    return next(starts, duration_s)


def windows(times: Sequence[float], duration_s: float) -> Iterator[tuple[float, list[float]]]:
    """Yield the start of each window and the times in it."""
    for number in range(round((duration_s - WINDOW_S) / STEP_S) + 1):
        start = STEP_S * number
        yield start, [one for one in times if start <= one < start + WINDOW_S]


# Soak

SOAK = "soak"
SOAK_WORKERS, SOAK_IN_FLIGHT, SOAK_SLOTS, SOAK_WORK_S = 6, 64, 32, 0.001
SOAK_TIMEOUT_S, FAULT_EVERY_S, FAULT_S, SEED, SETTLE_S = 1.0, 1.0, 0.7, 7, 5.0
LOOKS = (0.1, 0.5, 1.0)  # shares of requests after which the router's memory is looked at


def soak(stage: Stage, cases: Sequence[str]) -> Outcome:
    num_requests = 20_000 if stage.quick else 1_000_000
    ports = free_ports(SOAK_WORKERS)
    programs = stage.open_workers([[Worker(port, slots=SOAK_SLOTS)] for port in ports])
    [router] = stage.open_routers([(OURS, ports, ())], response_timeout_s=SOAK_TIMEOUT_S)
    faults, failures = Counter[str](), Counter[str]()
    rss: list[int] = []
    numbers = itertools.count(1)
    looks = {round(share * num_requests) for share in LOOKS}

    def note(result: Result) -> None:
        if result.failure is not None:
            failures[result.failure] += 1
        if (number := next(numbers)) in looks:
            rss.append(router.rss())
            what = f"{number:,} requests, {failures.total()} failed, {rss[-1] / 2**20:.1f} MiB"
            print(f"soak: {what}", file=sys.stderr, flush=True)

    async def send_among_faults() -> int:
        requests = (request_of(number, SOAK_WORK_S) for number in range(num_requests))
        async with asyncio.TaskGroup() as tasks:  # a fault that cannot be made ends it
            breaking = tasks.create_task(keep_breaking(list(zip(ports, programs, strict=True)), faults))
            num_unasked = await send_all(router.port, requests, SOAK_IN_FLIGHT, note)
            breaking.cancel()
        return num_unasked

    start = time.monotonic()
    num_unasked = uvloop.run(send_among_faults())
    seconds = time.monotonic() - start
    rows = [
        Row(SOAK, "failed requests", failures.total(), better="lower"),
        Row(SOAK, "answered twice", num_unasked, better="lower"),
        Row(SOAK, "in flight at the end", in_flight_at_end(router), better="lower"),
        Row(SOAK, "RSS growth, %", 100.0 * (rss[-1] - rss[0]) / rss[0], better="lower"),
        Row(SOAK, "requests/s", num_requests / seconds),
    ]
    where = {
        "requests": num_requests, "seconds": round(seconds, 1), "faults": dict(faults), "failures": dict(failures),
        "rss_mib": {f"{share:.0%}": round(held / 2**20, 1) for share, held in zip(LOOKS, rss, strict=True)},
    }  # fmt: skip
    return Outcome(rows, {SOAK: where})


async def keep_breaking(workers: Sequence[tuple[int, Program]], faults: Counter[str]) -> None:
    dice = random.Random(SEED)
    while True:
        start = time.monotonic()
        kind, (port, program) = dice.choice(KINDS), dice.choice(workers)
        faults[kind] += 1
        await break_for(kind, port, program, FAULT_S)
        await asyncio.sleep(max(0.0, start + FAULT_EVERY_S - time.monotonic()))


def in_flight_at_end(router: Router) -> int:
    """Return the sum over the workers. What a hanging worker still owes counts until the router gives it up."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        left = sum(int(worker["in_flight"]) for worker in fetch(router.port, "/router/workers"))
        if left == 0 or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


CASES = (  # names that are measured together, and how
    ((HINT, NO_HINT, HEDGED), makespan),
    (tuple(PREFIX + kind for kind in KINDS), faults),
    ((SOAK,), soak),
)
