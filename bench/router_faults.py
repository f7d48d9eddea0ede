"""`fault: ...`: what a client notices when one of four workers is killed, fails, hangs, is slow or flaps.

    client, 32 in flight ──▶ router ──▶ 4 emulated workers, a process each, 20 ms a job
    2 s as usual │ 4 s of fault at the last worker │ 5 s after it has recovered

Every contestant starts afresh, with workers of its own, for every kind of fault. Each worker notes when it is sent a
request; attempts to reach a worker that is not there are counted by the kernel.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import Outcome, Row
from bench.programs import Program, free_ports, is_listened_to
from bench.router_client import Answer, Ask, Client
from bench.router_contestants import OURS
from bench.router_scene import Entry, Router, Stage, wait_for_ports
from bench.router_workers import Mode, Worker, new_event_loop, read_arrivals, switch

PREFIX = "fault: "
KINDS = ("kill", "500s", "hang", "slow", "flapping")
CASES = tuple(PREFIX + kind for kind in KINDS)
MODES: dict[str, Mode] = {"500s": "500", "hang": "hang", "slow": "slow"}
NUM_WORKERS = 4
SLOTS = 8
FLAP_S = 0.7  # how often a flapping worker is killed and started again
WINDOW_S = 0.5
STEP_S = 0.05
AVOIDED_SHARE = 0.2  # of a fair share: trial requests are fine
BACK_SHARE = 0.5
FAILED, AVOIDED, BACK = "failed requests", "s until traffic avoids it", "s until it is back"


@dataclass(frozen=True, slots=True)
class Plan:
    normal_s: float
    fault_s: float
    after_s: float
    response_timeout_s: float
    in_flight: int
    work_s: float


FULL = Plan(normal_s=2.0, fault_s=4.0, after_s=5.0, response_timeout_s=2.0, in_flight=32, work_s=0.02)
QUICK = Plan(normal_s=0.6, fault_s=1.5, after_s=1.5, response_timeout_s=1.0, in_flight=16, work_s=0.06)
# In a quick run several kinds go on at once. Not two of those whose attempts to connect the kernel counts.
QUICK_BATCHES = (("kill", "500s", "hang", "slow"), ("flapping",))
QUICK_PEERS = ("naive",)


@dataclass(frozen=True, slots=True)
class Scene:
    """A router before workers of its own, the last of which is to fail."""

    kind: str
    router: Router
    workers: Sequence[Worker]
    faulty: Program


@dataclass(slots=True)
class Record:
    """What was seen. Times are of `time.monotonic`."""

    answers: list[Answer] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)  # attempts to reach a worker that is not there
    fault_s: float = 0.0
    recovered_s: float = 0.0
    end_s: float = 0.0
    unasked: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    failed: int
    avoided_s: float
    back_s: float
    slowest_s: float
    failures: dict[str, int]
    num_requests: int

    def __str__(self) -> str:
        what = f"{self.failed} of {self.num_requests} failed, avoided after {self.avoided_s:.2f} s"
        return f"{what}, back after {self.back_s:.2f} s, slowest {self.slowest_s:.2f} s {self.failures or ''}"


def count_between(times: Sequence[float], start: float, end: float) -> int:
    return sum(start <= one < end for one in times)


def avoided_after(times: Sequence[float], duration_s: float, fair: float) -> float:
    """When the last window with more than a trickle ended; 0 if there was none, the whole duration if it never ends.

    `times` are of requests sent to the worker, from the start of the fault; `fair` is a fair share of one window.
    """
    last = 0.0
    for start in _starts(duration_s):
        inside = [one for one in times if start <= one < start + WINDOW_S]
        if len(inside) >= AVOIDED_SHARE * fair:
            last = max(inside)
    # A request in the last moments means that nobody avoids it at all.
    return duration_s if last > duration_s - STEP_S else last


def back_after(times: Sequence[float], duration_s: float, fair: float) -> float:
    """When the first window with a decent share began, from recovery on; the whole duration if there was none."""
    for start in _starts(duration_s):
        if count_between(times, start, start + WINDOW_S) >= BACK_SHARE * fair:
            return start
    return duration_s


def _starts(duration_s: float) -> list[float]:
    return [STEP_S * number for number in range(round((duration_s - WINDOW_S) / STEP_S) + 1)]


def run(entry: Entry, cases: Sequence[str]) -> Outcome:
    kinds = [case.removeprefix(PREFIX) for case in cases]
    plan = QUICK if entry.quick else FULL
    peers = [peer for peer in entry.peers if not entry.quick or peer in QUICK_PEERS]
    batches = QUICK_BATCHES if entry.quick else [(kind,) for kind in kinds]
    results: dict[tuple[str, str], Result] = {}
    for batch in batches:
        chosen = [kind for kind in batch if kind in kinds]
        with ExitStack() as stack:
            scenes = open_scenes(Stage(entry, stack), itertools.product([OURS, *peers], chosen), plan)
            for name, theirs in itertools.groupby(scenes, key=lambda scene: scene.router.name):
                for kind, result in play_all(list(theirs), plan).items():
                    results[kind, name] = result
                    print(f"{PREFIX}{kind}: {name}: {result}", file=sys.stderr, flush=True)
    where: dict[str, Any] = {"normal_s": plan.normal_s, "fault_s": plan.fault_s, "after_s": plan.after_s}
    where["response_timeout_s"] = plan.response_timeout_s
    where["failures"] = {f"{kind}, {name}": it.failures for (kind, name), it in results.items() if it.failures}
    where["slowest_answer_s"] = {f"{kind}, {name}": round(it.slowest_s, 3) for (kind, name), it in results.items()}
    where["requests"] = {f"{kind}, {name}": it.num_requests for (kind, name), it in results.items()}
    return Outcome(fault_rows(results, kinds, peers), {"faults": where})


def fault_rows(results: dict[tuple[str, str], Result], kinds: Sequence[str], peers: Sequence[str]) -> list[Row]:
    rows = []
    for kind, peer in itertools.product(kinds, peers or [None]):
        ours, theirs = results[kind, OURS], results[kind, peer] if peer else None
        values = {
            FAILED: (ours.failed, theirs.failed if theirs else None),
            AVOIDED: (ours.avoided_s, theirs.avoided_s if theirs else None),
            BACK: (ours.back_s, theirs.back_s if theirs else None),
        }
        rows += [Row(PREFIX + kind, metric, *pair, peer, better="lower") for metric, pair in values.items()]
    return rows


def open_scenes(stage: Stage, chosen: Iterable[tuple[str, str]], plan: Plan) -> list[Scene]:
    """One for each name and kind, all up. They start together, workers first."""
    teams = [(name, kind, open_team(stage)) for name, kind in chosen]
    for _, _, team in teams:
        for worker, program in team:
            wait_for_ports(program, [worker.port])
    scenes = []
    for name, kind, team in teams:
        workers = [worker for worker, _ in team]
        ports = [worker.port for worker in workers]
        router = stage.open_router(name, ports, response_timeout_s=plan.response_timeout_s)
        scenes.append(Scene(kind, router, workers, faulty=team[-1][1]))
    for scene in scenes:
        scene.router.wait()
    return scenes


def open_team(stage: Stage) -> list[tuple[Worker, Program]]:
    folder = stage.entry.folder
    workers = [
        Worker(f"w{number}", port, slots=SLOTS, arrivals=str(folder / f"arrivals-{port}"))
        for number, port in enumerate(free_ports(NUM_WORKERS))
    ]
    return [(worker, stage.open_workers([worker])) for worker in workers]


def play_all(scenes: Sequence[Scene], plan: Plan) -> dict[str, Result]:
    """By kind of fault, all at the same time."""

    async def together() -> list[Record]:
        return await asyncio.gather(*(play(scene, plan) for scene in scenes))

    with asyncio.Runner(loop_factory=new_event_loop()) as runner:
        records = runner.run(together())
    return {scene.kind: judge(scene, record) for scene, record in zip(scenes, records, strict=True)}


async def play(scene: Scene, plan: Plan) -> Record:
    record = Record()
    record.end_s = time.monotonic() + plan.normal_s + plan.fault_s + plan.after_s

    def asks() -> Iterator[Ask]:
        for number in itertools.count():
            if time.monotonic() > record.end_s:
                return
            yield Ask(number, plan.work_s)

    client = Client(scene.router.port, asks(), plan.in_flight, record.answers.append)
    counting = asyncio.create_task(count_refused(record.refused))
    running = asyncio.create_task(client.run())
    try:
        await asyncio.sleep(plan.normal_s)
        record.fault_s = time.monotonic()
        await break_for(scene.kind, scene.workers[-1].port, scene.faulty, plan.fault_s)
        record.recovered_s = time.monotonic()
        record.end_s = record.recovered_s + plan.after_s
        await running
    finally:
        counting.cancel()
        running.cancel()
    record.unasked = client.unasked
    return record


async def break_for(kind: str, port: int, program: Program, seconds: float) -> None:
    """Let a worker fail in one way for that long; it is in order again when this returns."""
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
    """Note each attempt to connect that fails, here or in any other process: nobody else sees those."""
    before = refused_connects()
    while True:
        await asyncio.sleep(STEP_S / 2)
        now = refused_connects()
        times.extend([time.monotonic()] * (now - before))
        before = now


def refused_connects() -> int:
    """Of all processes that share our network, since it is up."""
    names, values = (
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    )
    return int(values[names.index("AttemptFails")])


def judge(scene: Scene, record: Record) -> Result:
    sent = {worker.name: read_arrivals(Path(worker.arrivals or "").read_bytes()) for worker in scene.workers}
    usual_start = record.fault_s - min(1.5, (record.fault_s - record.answers[0].sent_s) / 2)
    usual = sum(count_between(times, usual_start, record.fault_s) for times in sent.values())
    fair = usual / (record.fault_s - usual_start) * WINDOW_S / NUM_WORKERS
    is_killed = scene.kind not in MODES
    to_faulty = sorted(sent[scene.workers[-1].name] + (record.refused if is_killed else []))
    during_s, after_s = record.recovered_s - record.fault_s, record.end_s - record.recovered_s
    during = [one - record.fault_s for one in to_faulty if record.fault_s <= one < record.recovered_s]
    after = [one - record.recovered_s for one in to_faulty if record.recovered_s <= one < record.end_s]
    failures: dict[str, int] = {}
    for answer in record.answers:
        if answer.failure:
            failures[answer.failure] = failures.get(answer.failure, 0) + 1
    if record.unasked:
        failures["answers that nobody asked for"] = record.unasked
    return Result(
        sum(failures.values()),
        avoided_after(during, during_s, fair),
        back_after(after, after_s, fair),
        max(answer.ended_s - answer.sent_s for answer in record.answers),
        failures,
        len(record.answers),
    )
