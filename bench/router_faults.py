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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.harness import Outcome, Row, beside
from bench.router import OURS, Router, Stage, wait_for_ports
from bench.router_work import Client, Mode, Request, Result, Worker, read_arrivals, run_fast, switch
from bench.turns import Program, free_ports, is_listened_to

# Makespan

HINT, NO_HINT, HEDGED = "makespan, cost hint", "makespan, no hint", "makespan, no hint, hedged"
HEDGING = ("--hedge-quantile", "0.95")  # an option of ours: stragglers are sent to a second worker
SPEEDS = (1, 1, 1, 1, 2, 2, 4, 4)
NUM_SLOTS, IN_FLIGHT, SIGMA = 4, 128, 1.0
Side = tuple[str, str]  # a contestant and a case


@dataclass(frozen=True, slots=True)
class Jobs:
    num: int
    mean_work_s: float  # at speed 1
    num_seeds: int

    def works(self, seed: int) -> list[float]:
        """Return log-normal work, scaled so that the total is the same for every seed."""
        dice = random.Random(seed)
        works = [dice.lognormvariate(0.0, SIGMA) for _ in range(self.num)]
        scale = self.mean_work_s * self.num / sum(works)
        return [scale * work for work in works]


FULL_JOBS, QUICK_JOBS = Jobs(2000, 0.2, 10), Jobs(1000, 0.06, 1)


def makespan(stage: Stage, cases: Sequence[str]) -> Outcome:
    jobs = QUICK_JOBS if stage.quick else FULL_JOBS
    sides = [(OURS, case) for case in cases] + [(name, NO_HINT) for name in stage.peers]
    found: dict[Side, list[float]] = {side: [] for side in sides}
    routers = open_sides(stage, sides)
    for seed in range(jobs.num_seeds):
        works = jobs.works(seed)
        for side in sides if seed % 2 == 0 else reversed(sides):
            found[side].append(makespan_s(routers[side], works, side[1] == HINT) / ideal_s(works))
        last = ", ".join(f"{name} {values[-1]:.3f}" for (name, _), values in found.items())
        print(f"makespan, seed {seed}: {last}", file=sys.stderr, flush=True)
    spread = {
        f"{name}, {case}" if name == OURS else name: [round(min(values), 3), round(max(values), 3)]
        for (name, case), values in found.items()
    }
    where = {"jobs": jobs.num, "mean_work_s": jobs.mean_work_s, "seeds": jobs.num_seeds, "spread": spread}
    return Outcome(makespan_rows(found, cases), {"makespan": where})


def ideal_s(works: Sequence[float]) -> float:
    """Return the time with all slots busy to the end."""
    return sum(works) / (NUM_SLOTS * sum(SPEEDS))


def open_sides(stage: Stage, sides: Sequence[Side]) -> dict[Side, Router]:
    """Start routers, each with workers of its own: one that learns speeds must not learn them from others' load."""
    ports = {side: free_ports(len(SPEEDS)) for side in sides}
    for side in sides:
        pairs = enumerate(zip(ports[side], SPEEDS, strict=True))
        workers = [Worker(f"w{number}", port, speed, NUM_SLOTS) for number, (port, speed) in pairs]
        wait_for_ports(stage.open_workers(workers), ports[side])
    routers = {it: stage.open_router(it[0], ports[it], more=HEDGING if it[1] == HEDGED else ()) for it in sides}
    for router in routers.values():
        router.wait()
    return routers


def makespan_s(router: Router, works: Sequence[float], hint: bool) -> float:
    """Return the seconds from the first request to the last response. Every job must be answered."""
    results: list[Result] = []
    requests = [Request(number, work, work if hint else None) for number, work in enumerate(works)]
    client = Client(router.port, requests, IN_FLIGHT, results.append)
    run_fast(client.run())
    failures = [result.failure for result in results if result.failure]
    if failures or client.num_unasked:
        raise router.program.failure(f"failed {len(failures)} jobs of {len(works)} ({failures[:1]})")
    return max(result.ended_s for result in results) - min(result.sent_s for result in results)


def makespan_rows(found: dict[Side, list[float]], cases: Sequence[str]) -> list[Row]:
    means = {side: statistics.mean(values) for side, values in found.items()}
    peers = {name: mean for (name, _), mean in means.items() if name != OURS}
    metric = "makespan / (total work / total speed)"
    return [row for case in cases for row in beside(case, metric, means[OURS, case], peers, "lower")]


# Faults

PREFIX = "fault: "
KINDS = ("kill", "500s", "hang", "slow", "flapping")
MODES: dict[str, Mode] = {"500s": "500", "hang": "hang", "slow": "slow"}
NUM_WORKERS, SLOTS = 4, 8
FLAP_S = 0.7  # how often a flapping worker is killed and started again
WINDOW_S, STEP_S = 0.5, 0.05
AVOIDED_SHARE = 0.2  # of a fair share: trial requests are fine
BACK_SHARE = 0.5
FAILED, AVOIDED, BACK = "failed requests", "s until traffic avoids it", "s until it is back"


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


@dataclass(frozen=True, slots=True)
class Verdict:
    failed: int
    avoided_s: float
    back_s: float
    slowest_s: float
    failures: dict[str, int]
    num_requests: int

    def __str__(self) -> str:
        what = f"{self.failed} of {self.num_requests} failed, avoided after {self.avoided_s:.2f} s"
        return f"{what}, back after {self.back_s:.2f} s, slowest {self.slowest_s:.2f} s {self.failures or ''}"


def faults(stage: Stage, cases: Sequence[str]) -> Outcome:
    kinds = [case.removeprefix(PREFIX) for case in cases]
    phases = QUICK if stage.quick else FULL
    names = [OURS, *(peer for peer in stage.peers if not stage.quick or peer in QUICK_PEERS)]
    verdicts: dict[tuple[str, str], Verdict] = {}
    for batch in QUICK_BATCHES if stage.quick else [(kind,) for kind in kinds]:
        with ExitStack() as stack:
            chosen = itertools.product(names, [kind for kind in batch if kind in kinds])
            scenes = open_scenes(replace(stage, stack=stack), chosen, phases)
            for name in names:
                own = [scene for scene in scenes if scene.router.name == name]
                run_fast(play_all(own, phases))
                for scene in own:
                    verdict = verdicts[scene.kind, name] = judge(scene)
                    print(f"{PREFIX}{scene.kind}: {name}: {verdict}", file=sys.stderr, flush=True)
    where: dict[str, Any] = {"normal_s": phases.normal_s, "fault_s": phases.fault_s, "after_s": phases.after_s}
    where["response_timeout_s"] = phases.response_timeout_s
    where["failures"] = {f"{kind}, {name}": it.failures for (kind, name), it in verdicts.items() if it.failures}
    where["slowest_answer_s"] = {f"{kind}, {name}": round(it.slowest_s, 3) for (kind, name), it in verdicts.items()}
    where["requests"] = {f"{kind}, {name}": it.num_requests for (kind, name), it in verdicts.items()}
    return Outcome(fault_rows(verdicts, kinds), {"faults": where})


def fault_rows(verdicts: dict[tuple[str, str], Verdict], kinds: Sequence[str]) -> list[Row]:
    rows = []
    for kind in kinds:
        ours = verdicts[kind, OURS]
        peers = {name: it for (one, name), it in verdicts.items() if one == kind and name != OURS}
        for name in peers or [None]:
            for metric, attribute in ((FAILED, "failed"), (AVOIDED, "avoided_s"), (BACK, "back_s")):
                theirs = {name: getattr(peers[name], attribute)} if name else {}
                rows += beside(PREFIX + kind, metric, getattr(ours, attribute), theirs, "lower")
    return rows


def open_scenes(stage: Stage, chosen: Iterable[tuple[str, str]], phases: Phases) -> list[Scene]:
    """Return one for each name and kind, all up. They start together, workers first."""
    teams = [(name, kind, *open_team(stage)) for name, kind in chosen]
    scenes = []
    for name, kind, workers, programs in teams:
        for worker, program in zip(workers, programs, strict=True):
            wait_for_ports(program, [worker.port])
        ports = [worker.port for worker in workers]
        router = stage.open_router(name, ports, response_timeout_s=phases.response_timeout_s)
        scenes.append(Scene(kind, router, workers, programs[-1]))
    for scene in scenes:
        scene.router.wait()
    return scenes


def open_team(stage: Stage) -> tuple[list[Worker], list[Program]]:
    folder = stage.folder
    workers = [
        Worker(f"w{number}", port, slots=SLOTS, arrivals=str(folder / f"arrivals-{port}"))
        for number, port in enumerate(free_ports(NUM_WORKERS))
    ]
    return workers, [stage.open_workers([worker]) for worker in workers]


async def play_all(scenes: Sequence[Scene], phases: Phases) -> None:
    await asyncio.gather(*(play(scene, phases) for scene in scenes))


async def play(scene: Scene, phases: Phases) -> None:
    scene.end_s = time.monotonic() + phases.normal_s + phases.fault_s + phases.after_s

    def requests() -> Iterator[Request]:
        for number in itertools.count():
            if time.monotonic() > scene.end_s:
                return
            yield Request(number, phases.work_s)

    client = Client(scene.router.port, requests(), phases.in_flight, scene.results.append)
    counting = asyncio.create_task(count_refused(scene.refused))
    running = asyncio.create_task(client.run())
    try:
        await asyncio.sleep(phases.normal_s)
        scene.fault_s = time.monotonic()
        await break_for(scene.kind, scene.workers[-1].port, scene.faulty, phases.fault_s)
        scene.recovered_s = time.monotonic()
        scene.end_s = scene.recovered_s + phases.after_s
        await running
    finally:
        counting.cancel()
        running.cancel()
    scene.num_unasked = client.num_unasked


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


def judge(scene: Scene) -> Verdict:
    sent = {worker.name: read_arrivals(Path(worker.arrivals or "").read_bytes()) for worker in scene.workers}
    usual_start = scene.fault_s - min(1.5, (scene.fault_s - scene.results[0].sent_s) / 2)
    usual = sum(usual_start <= one < scene.fault_s for times in sent.values() for one in times)
    fair = usual / (scene.fault_s - usual_start) * WINDOW_S / NUM_WORKERS
    to_faulty = sorted(sent[scene.workers[-1].name] + ([] if scene.kind in MODES else scene.refused))
    during = [one - scene.fault_s for one in to_faulty if scene.fault_s <= one < scene.recovered_s]
    after = [one - scene.recovered_s for one in to_faulty if scene.recovered_s <= one < scene.end_s]
    failures = dict(Counter(result.failure for result in scene.results if result.failure))
    if scene.num_unasked:
        failures["answers that nobody asked for"] = scene.num_unasked
    return Verdict(
        sum(failures.values()), avoided_after(during, scene.recovered_s - scene.fault_s, fair),
        back_after(after, scene.end_s - scene.recovered_s, fair),
        max(result.ended_s - result.sent_s for result in scene.results), failures, len(scene.results),
    )  # fmt: skip


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


@dataclass(slots=True)
class Ledger:
    """Counts responses, one place for each request, and looks at the router's memory meanwhile."""

    program: Program
    num_requests: int
    answered: bytearray = field(init=False)
    failures: Counter[str] = field(default_factory=Counter)
    workers: Counter[str] = field(default_factory=Counter)
    num_ended: int = 0
    rss: dict[float, int] = field(default_factory=dict)  # by share of requests

    def __post_init__(self) -> None:
        self.answered = bytearray(self.num_requests)

    def note(self, result: Result) -> None:
        self.num_ended += 1
        if result.failure or result.worker is None:
            self.failures[str(result.failure)] += 1
        else:
            self.answered[result.id] = min(255, self.answered[result.id] + 1)
            self.workers[result.worker] += 1
        for share in LOOKS:
            if share not in self.rss and self.num_ended >= share * self.num_requests:
                self.rss[share] = self.program.rss()

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
    programs = [stage.open_workers([Worker(f"w{i}", port, slots=SOAK_SLOTS)]) for i, port in enumerate(ports)]
    for program, port in zip(programs, ports, strict=True):
        wait_for_ports(program, [port])
    router = stage.open_router(OURS, ports, response_timeout_s=SOAK_TIMEOUT_S)
    router.wait()
    ledger = Ledger(router.program, num_requests)
    faults: Counter[str] = Counter()
    client = Client(router.port, (Request(n, SOAK_WORK_S) for n in range(num_requests)), SOAK_IN_FLIGHT, ledger.note)
    start = time.monotonic()
    run_fast(run_among_faults(client, ledger, list(zip(ports, programs, strict=True)), faults))
    seconds = time.monotonic() - start
    failed, twice, growth = ledger.rows(client.num_unasked)
    where: dict[str, Any] = {"requests": num_requests, "seconds": round(seconds, 1), "faults": dict(faults)}
    where["rss_mib"] = {f"{share:.0%}": round(rss / 2**20, 1) for share, rss in ledger.rss.items()}
    where |= {"failures": dict(ledger.failures), "answers_by_worker": dict(sorted(ledger.workers.items()))}
    left = Row(SOAK, "in flight at the end", in_flight_at_end(router), better="lower")
    rows = [failed, twice, left, growth, Row(SOAK, "requests/s", num_requests / seconds)]
    return Outcome(rows, {SOAK: where})


async def run_among_faults(
    client: Client, ledger: Ledger, workers: list[tuple[int, Program]], faults: Counter[str]
) -> None:
    breaking = asyncio.create_task(keep_breaking(workers, faults))
    running = asyncio.create_task(client.run())
    watching = asyncio.create_task(report(ledger))
    try:
        # Until one ends: a fault that cannot be made would otherwise go unnoticed.
        await asyncio.wait([running, breaking], return_when=asyncio.FIRST_COMPLETED)
        if breaking.done():
            breaking.result()
        await running
    finally:
        for task in (breaking, running, watching):
            task.cancel()


async def keep_breaking(workers: list[tuple[int, Program]], faults: Counter[str]) -> None:
    dice = random.Random(SEED)
    while True:
        start = time.monotonic()
        kind, (port, program) = dice.choice(KINDS), dice.choice(workers)
        faults[kind] += 1
        await break_for(kind, port, program, FAULT_S)
        await asyncio.sleep(max(0.0, start + FAULT_EVERY_S - time.monotonic()))


async def report(ledger: Ledger) -> None:
    while True:
        await asyncio.sleep(15.0)
        what = f"{ledger.num_ended:,} of {ledger.num_requests:,}, {sum(ledger.failures.values())} failed"
        print(f"soak: {what}, {ledger.program.rss() / 2**20:.1f} MiB", file=sys.stderr, flush=True)


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
