"""`soak`: ours alone, a million requests, and every second something breaks.

    client, 64 in flight ──▶ router ──▶ 6 emulated workers, a process each, 1 ms a job; one of them fails at a time

Every request must be answered once, with its own answer. At the end nothing may be left in flight, and the router may
hold no more memory than at the beginning.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from bench.harness import Outcome, Row
from bench.programs import Program, free_ports
from bench.router_client import Answer, Ask, Client
from bench.router_contestants import OURS
from bench.router_faults import KINDS, break_for
from bench.router_scene import Entry, Router, Stage, wait_for_ports
from bench.router_workers import Worker, new_event_loop

CASE = "soak"
NUM_WORKERS = 6
IN_FLIGHT = 64
SLOTS = 32
WORK_S = 0.001
RESPONSE_TIMEOUT_S = 1.0
FAULT_EVERY_S = 1.0
FAULT_S = 0.7
SEED = 7
LOOKS = (0.1, 0.5, 1.0)  # at the router's memory: when that share of the requests is answered
SETTLE_S = 5.0


@dataclass(frozen=True, slots=True)
class Plan:
    num_requests: int


FULL = Plan(num_requests=1_000_000)
QUICK = Plan(num_requests=20_000)


@dataclass(slots=True)
class Ledger:
    """Counts answers, one place for each request, and looks at the router's memory on the way."""

    program: Program
    num_requests: int
    answered: bytearray = field(init=False)
    failures: Counter[str] = field(default_factory=Counter)
    workers: Counter[str] = field(default_factory=Counter)
    num_ended: int = 0
    rss: dict[float, int] = field(default_factory=dict)  # by share of requests

    def __post_init__(self) -> None:
        self.answered = bytearray(self.num_requests)

    def note(self, answer: Answer) -> None:
        self.num_ended += 1
        if answer.failure or answer.worker is None:
            self.failures[str(answer.failure)] += 1
        else:
            self.answered[answer.id] = min(255, self.answered[answer.id] + 1)
            self.workers[answer.worker] += 1
        for share in LOOKS:
            if share not in self.rss and self.num_ended >= share * self.num_requests:
                self.rss[share] = self.program.rss()

    @property
    def num_twice(self) -> int:
        return sum(count > 1 for count in self.answered)

    @property
    def num_failed(self) -> int:
        """Every request without its answer, for whatever reason."""
        return sum(count == 0 for count in self.answered)

    @property
    def rss_growth(self) -> float:
        """In percent, from the first look to the last."""
        first, last = self.rss[LOOKS[0]], self.rss[LOOKS[-1]]
        return 100.0 * (last - first) / first


def run(entry: Entry) -> Outcome:
    plan = QUICK if entry.quick else FULL
    with ExitStack() as stack:
        stage = Stage(entry, stack)
        ports = free_ports(NUM_WORKERS)
        programs = [stage.open_workers([Worker(f"w{i}", port, slots=SLOTS)]) for i, port in enumerate(ports)]
        for program, port in zip(programs, ports, strict=True):
            wait_for_ports(program, [port])
        router = stage.open_router(OURS, ports, response_timeout_s=RESPONSE_TIMEOUT_S)
        router.wait()
        ledger = Ledger(router.program, plan.num_requests)
        start = time.monotonic()
        with asyncio.Runner(loop_factory=new_event_loop()) as runner:
            unasked, faults = runner.run(soak(router, ledger, list(zip(ports, programs, strict=True))))
        seconds = time.monotonic() - start
        left = in_flight_at_end(router)
    where: dict[str, Any] = {"requests": plan.num_requests, "seconds": round(seconds, 1), "faults": dict(faults)}
    where["rss_mib"] = {f"{share:.0%}": round(rss / 2**20, 1) for share, rss in ledger.rss.items()}
    where |= {"failures": dict(ledger.failures), "answers_by_worker": dict(sorted(ledger.workers.items()))}
    rows = [
        Row(CASE, "failed requests", ledger.num_failed, better="lower"),
        Row(CASE, "answered twice", ledger.num_twice + unasked, better="lower"),
        Row(CASE, "in flight at the end", left, better="lower"),
        Row(CASE, "RSS growth, %", ledger.rss_growth, better="lower"),
        Row(CASE, "requests/s", plan.num_requests / seconds),
    ]
    return Outcome(rows, {CASE: where})


async def soak(router: Router, ledger: Ledger, workers: list[tuple[int, Program]]) -> tuple[int, Counter[str]]:
    """How many answers came unasked, and which faults there were."""

    def asks() -> Iterator[Ask]:
        return (Ask(number, WORK_S) for number in range(ledger.num_requests))

    faults: Counter[str] = Counter()
    client = Client(router.port, asks(), IN_FLIGHT, ledger.note)
    breaking = asyncio.create_task(keep_breaking(workers, faults))
    running = asyncio.create_task(client.run())
    watching = asyncio.create_task(report(ledger))
    try:
        # Whichever ends first: a fault that cannot be made would otherwise go unnoticed.
        await asyncio.wait([running, breaking], return_when=asyncio.FIRST_COMPLETED)
        if breaking.done():
            breaking.result()
        await running
    finally:
        for task in (breaking, running, watching):
            task.cancel()
    return client.unasked, faults


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
        rss_mib = ledger.program.rss() / 2**20
        what = f"{ledger.num_ended:,} of {ledger.num_requests:,}, {sum(ledger.failures.values())} failed"
        print(f"soak: {what}, {rss_mib:.1f} MiB", file=sys.stderr, flush=True)


def in_flight_at_end(router: Router) -> int:
    """Summed over the workers. What a hanging worker still owes counts until the router gives it up."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{router.port}/router/workers", timeout=5.0) as reply:
            left = sum(int(worker["in_flight"]) for worker in json.loads(reply.read()))
        if left == 0 or time.monotonic() > deadline:
            return left
        time.sleep(0.1)
