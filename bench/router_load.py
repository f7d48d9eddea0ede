"""How fast a router is: throughput and CPU time, latency, and ours alone: choosing a worker.

1 KB POST: wrk, 64 connections ──▶ router ──▶ 4 light workers (one nginx that answers by itself)
one connection: a blocking socket, one request at a time, straight to a worker and through each router in turn
choosing a worker: what a choice costs among a thousand workers, where 1 is what it costs among ten; no network
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from bench.harness import ContestantError, Outcome, Row, beside
from bench.router import LIGHT_REQUEST, OURS, Router, Stage
from bench.router_work import PATH, post
from bench.turns import Plan, Program, Round, Step, Tally, Watch, others_share, take_rounds, unpacked
from practicum.reward.router.http1 import RequestParser
from practicum.reward.router.policy import POLICIES
from practicum.reward.router.pool import State, Upstream, UpstreamPool
from practicum.reward.router.settings import RouterSettings

SAME, DIFFERENT = "1 KB POST, 64 connections", "1 KB POST, every head different"
LATENCY, CHOICE = "one connection", "choosing a worker"
NUM_CONNECTIONS, NUM_WORKERS = 64, 4
DIRECT = "direct"
FEW, MANY, IN_FLIGHT_PER_WORKER, BATCH = 10, 1000, 4, 50

SCRIPT = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '%s'
%s
done = function(summary, latency, requests)
  local e = summary.errors
  local failed = e.connect + e.read + e.write + e.status + e.timeout
  io.write(string.format(
    '\\nRESULT {"requests": %%d, "duration_us": %%d, "failed": %%d}\\n', summary.requests, summary.duration, failed))
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
FULL = Plan(warmup_steps=2, num_rounds=7, steps_per_turn=4, extra_rounds=7, patience_s=120)  # steps of a second
QUICK = Plan(warmup_steps=0, num_rounds=1, steps_per_turn=1)


def load(stage: Stage, cases: Sequence[str]) -> Outcome:
    plan = QUICK if stage.quick else FULL
    rows: list[Row] = []
    where: dict[str, Any] = {"load_rounds": plan.num_rounds, "load_turn_s": plan.steps_per_turn}
    workers, ports = stage.open_light_workers(NUM_WORKERS)
    routers = stage.open_routers([(name, ports, ()) for name in stage.names], lean=True)
    for case in cases:
        script = write_script(stage.folder, case)
        direct = run_wrk(script, ports[0], plan.steps_per_turn)
        where[f"{case}: a worker without router, requests/s"] = round(direct.amount / direct.seconds)
        for router in routers if plan.warmup_steps else ():
            run_wrk(script, router.port, plan.warmup_steps)
        one_turn = partial(turn, script=script, workers=workers, duration_s=plan.steps_per_turn)
        rounds = take_rounds(routers, plan, one_turn)
        rows += load_rows(case, rounds)
        where[f"{case}: cpu_share_of_others"] = round(others_share(rounds), 3)
    return Outcome(rows, where)


def write_script(folder: Path, case: str) -> Path:
    path = folder / f"wrk-{case == DIFFERENT}.lua"
    path.write_text(SCRIPT % (LIGHT_REQUEST, UNIQUE_HEADS if case == DIFFERENT else ""))
    return path


def run_wrk(script: Path, port: int, duration_s: int) -> Step:
    program, env = unpacked("wrk", "usr/bin/wrk")
    size = ["-t1", f"-c{NUM_CONNECTIONS}", f"-d{duration_s}s", "--timeout", "10s"]
    command = [program, *size, "-s", str(script), f"http://127.0.0.1:{port}{PATH}"]
    env = {**os.environ, **env}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=duration_s + 30, check=False)
    return read_wrk(done.stdout + done.stderr)


def read_wrk(text: str) -> Step:
    """Read the line that our script has wrk print at its end."""
    lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
    if len(lines) != 1:
        raise ContestantError(f"wrk gave no result but: {text.strip()[-500:]!r}")
    result: dict[str, int] = json.loads(lines[0].removeprefix("RESULT "))
    return Step(result["duration_us"] / 1e6, result["requests"], result)


def turn(router: Router, script: Path, workers: Program, duration_s: int) -> Tally:
    """Put one router under load. A response other than 200 makes the numbers void."""

    def cpu_s() -> tuple[float, float]:
        """Return that of the router, and of the workers and programs that have ended: between two calls, wrk's."""
        return router.cpu_s(), workers.cpu_s() + sum(psutil.Process().cpu_times()[2:4])

    before, watch = cpu_s(), Watch()
    step = run_wrk(script, router.port, duration_s)
    watch.stop()
    router_s, rest_s = (now - then for now, then in zip(cpu_s(), before, strict=True))
    if step.parts["failed"] or not step.amount:
        raise router.failure(f"answered {step.amount} requests and failed {step.parts['failed']}")
    return Tally([step], router_s, watch.others_share(router_s + rest_s))


def load_rows(case: str, rounds: Sequence[Round]) -> list[Row]:
    """Return medians over the rounds, ours beside each peer."""

    def medians(read: Callable[[Tally], float]) -> tuple[float, dict[str, float]]:
        found = {name: statistics.median(read(one[name]) for one in rounds) for name in rounds[0]}
        return found.pop(OURS), found

    rates, costs = medians(lambda tally: tally.rate), medians(lambda tally: 1e3 * tally.cpu_s_per_1000)
    return [*beside(case, "requests/s", *rates), *beside(case, "CPU µs per request", *costs, "lower")]


# What a router adds to a round trip


def latency(stage: Stage, cases: Sequence[str]) -> Outcome:
    batch, num_rounds = (100, 6) if stage.quick else (200, 60)
    _, ports = stage.open_light_workers(1)
    routers = stage.open_routers([(name, ports, ()) for name in stage.names], lean=True)
    doors = {DIRECT: ports[0], **{router.name: router.port for router in routers}}
    sockets = {}
    for name, port in doors.items():
        one = sockets[name] = stage.stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        time_batch(one, batch)  # to warm up
    # Each round is compared with its own direct batch, so that a slow moment cancels out.
    added: dict[str, list[float]] = {name: [] for name in stage.names}
    order = list(sockets)
    for _ in range(num_rounds):
        medians = {name: time_batch(sockets[name], batch) for name in order}
        for name, values in added.items():
            values.append(1e6 * (medians[name] - medians[DIRECT]))
        order.reverse()
    found = {name: statistics.median(values) for name, values in added.items()}
    print(", ".join(f"{name} +{value:.0f} µs" for name, value in found.items()), file=sys.stderr, flush=True)
    where = {f"{LATENCY}: rounds": num_rounds, f"{LATENCY}: requests a batch": batch}
    return Outcome(beside(LATENCY, "added latency µs", found.pop(OURS), found, "lower"), where)


def time_batch(connection: socket.socket, size: int) -> float:
    """Return the median in seconds."""
    request, times = post(LIGHT_REQUEST), []
    for _ in range(size):
        start = time.perf_counter()
        connection.sendall(request)
        read_response(connection.recv)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def read_response(receive: Callable[[int], bytes]) -> bytes:
    """Return one whole response. It is no parser: it knows the two ways in which routers frame a short JSON body."""
    data, whole = b"", False
    while not whole:
        piece = receive(65536)
        if not piece:
            raise ContestantError("the connection was closed in the middle of an answer")
        data += piece
        head, end, body = data.partition(b"\r\n\r\n")
        if end and not data.startswith(b"HTTP/1.1 200"):
            raise ContestantError(f"a router answered {data[:100]!r}")
        _, sized, rest = head.lower().partition(b"content-length:")
        if end:
            whole = len(body) >= int(rest.partition(b"\r\n")[0]) if sized else body.endswith(b"\r\n0\r\n\r\n")
    return data


# What a choice costs


def choice(stage: Stage, cases: Sequence[str]) -> Outcome:
    num_rounds, num_choices = (5, 2000) if stage.quick else (15, 10_000)
    rows, where = [], {}
    for policy in POLICIES:
        chosen = {size: choices(policy, size) for size in (FEW, MANY)}
        costs: dict[int, list[float]] = {size: [] for size in chosen}
        for number in range(num_rounds):
            for size in chosen if number % 2 else reversed(chosen):
                costs[size].append(sum(itertools.islice(chosen[size], num_choices // BATCH)) / num_choices * 1e6)
        few, many = statistics.median(costs[FEW]), statistics.median(costs[MANY])
        rows.append(Row(f"{CHOICE}, {policy}", f"cost among {MANY:,} / among {FEW}", many / few))
        where[policy] = {"few_us": round(few, 2), "many_us": round(many, 2)}
    return Outcome(rows, {"choosing": where})


def choices(policy: str, num_workers: int) -> Iterator[float]:
    """Yield the seconds of a batch of choices alone, without end. Between batches requests come and go as in the
    router: each new one takes the place of the oldest."""
    settings = RouterSettings.make(policy=policy)
    pool = UpstreamPool(POLICIES[policy](settings), settings.max_in_flight, lambda: None)
    for number in range(num_workers):
        upstream = pool.add(f"http://worker-{number}:80")
        upstream.state = State.UP
        pool.refresh(upstream)
    parse = RequestParser(settings.session_header)
    lines = "POST / HTTP/1.1\r\nhost: a\r\nx-practicum-session: {}\r\n\r\n"
    made = ((parse(lines.format(n).encode()), b'{"prompt": "%d of many"}' % n) for n in range(977))
    requests: Iterator[Any] = itertools.cycle([SimpleNamespace(head=head, cost=1.0, body=body) for head, body in made])
    choose = pool.policy.choose
    in_flight: deque[tuple[Upstream, Any]] = deque()

    class Connection:
        def __init__(self) -> None:
            self.started = time.monotonic()

    def begin() -> None:
        upstream = choose(next(requests))
        connection: Any = Connection()
        assert upstream is not None
        pool.begin(upstream, connection, 1.0, connection.started)
        in_flight.append((upstream, connection))

    for _ in range(num_workers * IN_FLIGHT_PER_WORKER):
        begin()
    pool.tick(time.monotonic())
    while True:
        batch = list(itertools.islice(requests, BATCH))
        start = time.perf_counter()
        for request in batch:
            choose(request)
        yield time.perf_counter() - start
        for _ in batch:
            pool.end(*in_flight.popleft(), 1.0, time.monotonic(), completed=True)
            begin()


CASES = (((SAME, DIFFERENT), load), ((LATENCY,), latency), ((CHOICE,), choice))  # measured together, and how
