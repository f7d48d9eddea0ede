"""Which worker gets which job, and what a client notices when workers fail.

    makespan  client, 128 in flight ──▶ router ──▶ 8 emulated workers of speeds 1, 1, 1, 1, 2, 2, 4, 4 with 4 slots each
    fault     client, 32 in flight ──▶ router ──▶ 4 emulated workers, a process each, 20 ms a job
              2 s as usual │ 4 s of fault at the last worker │ 5 s after it has recovered
    soak      ours alone: client, 64 in flight ──▶ router ──▶ 6 emulated workers, 1 ms a job; every second one fails

Makespans are relative to total work / total speed, which is the least possible. With the cost hint the client tells the
router how much work each job is, in a header that only ours reads; the peers are therefore measured once for all cases.
For every kind of fault contestants start afresh, with workers of their own. Each worker notes when it gets a request;
the kernel counts attempts to reach a worker that is gone. In the soak every request must be answered once, with its own
response; at the end nothing may be left in flight, and the router may hold no more memory than at the beginning.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.harness import Outcome, Row, beside
from bench.router import OURS, Router, Stage
from bench.router_work import Result, Worker, read_arrivals, request_of, run_fast, send_all, switch
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
    routers = open_sides(stage, sides)
    for seed in range(num_seeds):
        works = works_of(num_jobs, mean_work_s, seed)
        for side in sides if seed % 2 == 0 else reversed(sides):
            found[side].append(makespan_s(routers[side], works, side[1] == HINT) / ideal_s(works))
        last = ", ".join(f"{name} {values[-1]:.3f}" for (name, _), values in found.items())
        print(f"makespan, seed {seed}: {last}", file=sys.stderr, flush=True)
    spread = {
        f"{name}, {case}" if name == OURS else name: [round(min(values), 3), round(max(values), 3)]
        for (name, case), values in found.items()
    }
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


def open_sides(stage: Stage, sides: Sequence[Side]) -> dict[Side, Router]:
    """Start routers, each with workers of its own: one that learns speeds must not learn them from others' load."""
    ports = {side: free_ports(len(SPEEDS)) for side in sides}
    stage.open_workers(
        [
            [Worker(f"w{i}", port, speed, NUM_SLOTS) for i, (port, speed) in enumerate(zip(own, SPEEDS, strict=True))]
            for own in ports.values()
        ]
    )
    routers = {it: stage.open_router(it[0], ports[it], more=HEDGING if it[1] == HEDGED else ()) for it in sides}
    for router in routers.values():
        router.wait()
    return routers


def makespan_s(router: Router, works: Sequence[float], hint: bool) -> float:
    """Return the seconds from the first request to the last response. Every job must be answered."""
    results: list[Result] = []
    requests = [request_of(number, work, work if hint else None) for number, work in enumerate(works)]
    num_unasked = run_fast(send_all(router.port, requests, IN_FLIGHT, results.append))
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
SLOWEST, REQUESTS = "slowest answer, s", "requests"


@dataclass(frozen=True, slots=True)
class Phases:
    normal_s: float
    fault_s: float
    after_s: float
    response_timeout_s: float
    in_flight: int
    work_s: float


FULL = Phases(normal_s=2.0, fault_s=4.0, after_s=5.0, response_timeout_s=2.0, in_flight=32, work_s=0.02)
QUICK = Phases(normal_s=0.6, fault_s=1.5, after_s=1.5, response_timeout_s=1.0, in_flight=16, work_s=0.06)
# In a quick run several kinds go on at once. Not two of those whose attempts to connect the kernel counts.
QUICK_BATCHES = (("kill", "500s", "hang", "slow"), ("flapping",))
QUICK_PEERS = ("naive",)


@dataclass(slots=True)
class Scene:
    """A router in front of workers of its own, the last of which is to fail; and what was seen of them.

    Times are of `time.monotonic`."""

    kind: str
    router: Router
    workers: Sequence[Worker]
    faulty: Program
    results: list[Result] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)  # attempts to reach a worker that is gone
    fault_s: float = 0.0
    recovered_s: float = 0.0
    end_s: float = 0.0
    num_unasked: int = 0


Verdicts = dict[tuple[str, str], dict[str, float]]  # fault, contestant -> what was counted


def faults(stage: Stage, cases: Sequence[str]) -> Outcome:
    kinds = [case.removeprefix(PREFIX) for case in cases]
    phases = QUICK if stage.quick else FULL
    names = [name for name in stage.names if name == OURS or not stage.quick or name in QUICK_PEERS]
    verdicts: Verdicts = {}
    failures: dict[str, dict[str, int]] = {}
    for batch in QUICK_BATCHES if stage.quick else [(kind,) for kind in kinds]:
        with ExitStack() as stack:
            chosen = list(itertools.product(names, [kind for kind in batch if kind in kinds]))
            scenes = open_scenes(replace(stage, stack=stack), chosen, phases)
            for name in names:
                own = [scene for scene in scenes if scene.router.name == name]
                run_fast(play_all(own, phases))
                for scene in own:
                    verdicts[scene.kind, name], failed = judge(scene)
                    failures |= {f"{scene.kind}, {name}": failed} if failed else {}
                    counted = ", ".join(f"{what} {value:.4g}" for what, value in verdicts[scene.kind, name].items())
                    print(f"{PREFIX}{scene.kind}: {name}: {counted} {failed or ''}", file=sys.stderr, flush=True)
    where: dict[str, Any] = {"normal_s": phases.normal_s, "fault_s": phases.fault_s, "after_s": phases.after_s}
    where |= {"response_timeout_s": phases.response_timeout_s, "failures": failures}
    where["slowest_answer_s"] = {f"{kind}, {name}": round(it[SLOWEST], 3) for (kind, name), it in verdicts.items()}
    where["requests"] = {f"{kind}, {name}": it[REQUESTS] for (kind, name), it in verdicts.items()}
    return Outcome(fault_rows(verdicts, kinds), {"faults": where})


def fault_rows(verdicts: Verdicts, kinds: Sequence[str]) -> list[Row]:
    rows = []
    for kind, metric in itertools.product(kinds, METRICS):
        found = {name: verdict[metric] for (one, name), verdict in verdicts.items() if one == kind}
        rows += beside(PREFIX + kind, metric, found.pop(OURS), found, "lower")
    return rows


def open_scenes(stage: Stage, chosen: Sequence[tuple[str, str]], phases: Phases) -> list[Scene]:
    """Return one for each name and kind, all up. They start together, workers first."""
    ports = free_ports(NUM_WORKERS * len(chosen))
    workers = [
        Worker(f"w{number % NUM_WORKERS}", port, slots=SLOTS, arrivals=str(stage.folder / f"arrivals-{port}"))
        for number, port in enumerate(ports)
    ]
    programs = stage.open_workers([[worker] for worker in workers])
    scenes = []
    for place, (name, kind) in enumerate(chosen):
        own = slice(place * NUM_WORKERS, (place + 1) * NUM_WORKERS)
        router = stage.open_router(name, ports[own], response_timeout_s=phases.response_timeout_s)
        scenes.append(Scene(kind, router, workers[own], programs[own][-1]))
    for scene in scenes:
        scene.router.wait()
    return scenes


async def play_all(scenes: Sequence[Scene], phases: Phases) -> None:
    await asyncio.gather(*(play(scene, phases) for scene in scenes))


async def play(scene: Scene, phases: Phases) -> None:
    scene.end_s = time.monotonic() + phases.normal_s + phases.fault_s + phases.after_s
    numbers = itertools.takewhile(lambda _: time.monotonic() < scene.end_s, itertools.count())
    requests = (request_of(number, phases.work_s) for number in numbers)
    async with asyncio.TaskGroup() as tasks:
        counting = tasks.create_task(count_refused(scene.refused))
        running = tasks.create_task(send_all(scene.router.port, requests, phases.in_flight, scene.results.append))
        await asyncio.sleep(phases.normal_s)
        scene.fault_s = time.monotonic()
        await break_for(scene.kind, scene.workers[-1].port, scene.faulty, phases.fault_s)
        scene.recovered_s = time.monotonic()
        scene.end_s = scene.recovered_s + phases.after_s
        scene.num_unasked = await running
        counting.cancel()


async def break_for(kind: str, port: int, program: Program, seconds: float) -> None:
    """Let a worker fail in one way for that long; it works again when this returns."""
    end = time.monotonic() + seconds
    if kind in MODES:
        await asyncio.to_thread(switch, port, MODES[kind])
        await asyncio.sleep(end - time.monotonic())
        await asyncio.to_thread(switch, port, "ok")
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


def judge(scene: Scene) -> tuple[dict[str, float], dict[str, int]]:
    """Return what was counted, and the failed requests by their kind."""
    sent = {worker.name: read_arrivals(Path(worker.arrivals or "").read_bytes()) for worker in scene.workers}
    usual_start = scene.fault_s - min(1.5, (scene.fault_s - scene.results[0].sent_s) / 2)
    usual = sum(usual_start <= one < scene.fault_s for times in sent.values() for one in times)
    fair = usual / (scene.fault_s - usual_start) * WINDOW_S / NUM_WORKERS
    to_faulty = sorted(sent[scene.workers[-1].name] + ([] if scene.kind in MODES else scene.refused))
    during = [one - scene.fault_s for one in to_faulty if scene.fault_s <= one < scene.recovered_s]
    after = [one - scene.recovered_s for one in to_faulty if scene.recovered_s <= one < scene.end_s]
    failures = Counter(result.failure for result in scene.results if result.failure)
    failures["answers that nobody asked for"] += scene.num_unasked
    return {
        FAILED: failures.total(),
        AVOIDED: avoided_after(during, scene.recovered_s - scene.fault_s, fair),
        BACK: back_after(after, scene.end_s - scene.recovered_s, fair),
        SLOWEST: max(result.ended_s - result.sent_s for result in scene.results),
        REQUESTS: len(scene.results),
    }, dict(+failures)


def avoided_after(times: Sequence[float], duration_s: float, fair: float) -> float:
    """Return when the last window with more than a trickle ended; 0 if there was none, the duration if it never ends.

    `times` are of requests sent to the worker, from the start of the fault; `fair` is a fair share of one window.
    """
    last = 0.0
    for start in _starts(duration_s):
        inside = [one for one in times if start <= one < start + WINDOW_S]
        if len(inside) >= AVOIDED_SHARE * fair:
            last = max(inside)
    return duration_s if last > duration_s - STEP_S else last  # a request in the last moments: it is not avoided at all


def back_after(times: Sequence[float], duration_s: float, fair: float) -> float:
    """Return when the first window with a decent share began, from recovery on; the duration if there was none."""
    for start in _starts(duration_s):
        if sum(start <= one < start + WINDOW_S for one in times) >= BACK_SHARE * fair:
            return start
    return duration_s


def _starts(duration_s: float) -> list[float]:
    return [STEP_S * number for number in range(round((duration_s - WINDOW_S) / STEP_S) + 1)]


# Soak

SOAK = "soak"
SOAK_WORKERS, SOAK_IN_FLIGHT, SOAK_SLOTS, SOAK_WORK_S = 6, 64, 32, 0.001
SOAK_TIMEOUT_S, FAULT_EVERY_S, FAULT_S, SEED, SETTLE_S = 1.0, 1.0, 0.7, 7, 5.0
LOOKS = (0.1, 0.5, 1.0)  # shares of requests after which the router's memory is looked at


class Ledger:
    """Counts responses, one place for each request, and looks at the router's memory meanwhile."""

    def __init__(self, router: Router, num_requests: int) -> None:
        self.answered = bytearray(num_requests)  # how often each was
        self.failures: Counter[str] = Counter()
        self.workers: Counter[str] = Counter()
        self.rss: dict[float, int] = {}  # by share of requests
        self._router = router
        self._num_ended = 0

    def note(self, result: Result) -> None:
        self._num_ended += 1
        if result.failure or result.worker is None:
            self.failures[str(result.failure)] += 1
        else:
            self.answered[result.id] = min(255, self.answered[result.id] + 1)
            self.workers[result.worker] += 1
        for share in LOOKS:
            if share not in self.rss and self._num_ended >= share * len(self.answered):
                self.rss[share] = self._router.rss()
                what = f"{self.failures.total()} failed, {self.rss[share] / 2**20:.1f} MiB"
                print(f"soak: {share:.0%} of {len(self.answered):,}, {what}", file=sys.stderr, flush=True)

    def rows(self, num_unasked: int) -> list[Row]:
        first, last = self.rss[LOOKS[0]], self.rss[LOOKS[-1]]
        return [
            Row(SOAK, "failed requests", sum(count == 0 for count in self.answered), better="lower"),
            Row(SOAK, "answered twice", sum(count > 1 for count in self.answered) + num_unasked, better="lower"),
            Row(SOAK, "RSS growth, %", 100.0 * (last - first) / first, better="lower"),
        ]


def soak(stage: Stage, cases: Sequence[str]) -> Outcome:
    num_requests = 20_000 if stage.quick else 1_000_000
    ports = free_ports(SOAK_WORKERS)
    programs = stage.open_workers([[Worker(f"w{i}", port, slots=SOAK_SLOTS)] for i, port in enumerate(ports)])
    router = stage.open_router(OURS, ports, response_timeout_s=SOAK_TIMEOUT_S)
    router.wait()
    ledger = Ledger(router, num_requests)
    faults: Counter[str] = Counter()

    async def send_among_faults() -> int:
        requests = (request_of(number, SOAK_WORK_S) for number in range(num_requests))
        async with asyncio.TaskGroup() as tasks:  # a fault that cannot be made ends it
            breaking = tasks.create_task(keep_breaking(list(zip(ports, programs, strict=True)), faults))
            num_unasked = await send_all(router.port, requests, SOAK_IN_FLIGHT, ledger.note)
            breaking.cancel()
        return num_unasked

    start = time.monotonic()
    num_unasked = run_fast(send_among_faults())
    seconds = time.monotonic() - start
    where: dict[str, Any] = {"requests": num_requests, "seconds": round(seconds, 1), "faults": dict(faults)}
    where["rss_mib"] = {f"{share:.0%}": round(rss / 2**20, 1) for share, rss in ledger.rss.items()}
    where |= {"failures": dict(ledger.failures), "answers_by_worker": dict(sorted(ledger.workers.items()))}
    left = Row(SOAK, "in flight at the end", in_flight_at_end(router), better="lower")
    return Outcome([*ledger.rows(num_unasked), left, Row(SOAK, "requests/s", num_requests / seconds)], {SOAK: where})


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
        with urllib.request.urlopen(f"http://127.0.0.1:{router.port}/router/workers", timeout=5.0) as response:
            left = sum(int(worker["in_flight"]) for worker in json.loads(response.read()))
        if left == 0 or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


CASES = (  # names that are measured together, and how
    ((HINT, NO_HINT, HEDGED), makespan),
    (tuple(PREFIX + kind for kind in KINDS), faults),
    ((SOAK,), soak),
)
