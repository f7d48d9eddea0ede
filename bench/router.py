"""`router`: our reward router against verl's naive one, the Rust routers of SGLang and vLLM, nginx and haproxy.

Each case is a file: router_load.py (throughput and CPU time), router_latency.py, router_makespan.py (who gets which
job), router_faults.py, router_soak.py, router_choice.py. Their workers are in router_workers.py, how each router is
started in router_contestants.py.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench import router_choice, router_faults, router_latency, router_load, router_makespan, router_soak
from bench.harness import Options, Outcome, Row, UsageError
from bench.router_contestants import OURS, ROUTERS
from bench.router_scene import Entry

Case = tuple[Sequence[str], Callable[[Entry, Sequence[str]], Outcome]]  # names that are measured together, and how

CASES: Sequence[Case] = (
    (router_load.CASES, router_load.run),
    ((router_latency.CASE,), lambda entry, _: router_latency.run(entry)),
    (router_makespan.CASES, router_makespan.run),
    (router_faults.CASES, router_faults.run),
    ((router_soak.CASE,), lambda entry, _: router_soak.run(entry)),
    ((router_choice.CASE,), lambda entry, _: router_choice.run(entry)),
)


def run(options: Options) -> Outcome:
    """`--ours "--policy least_requests"` gives our router more arguments."""
    names = contestants(options.peer)
    rows: list[Row] = []
    where: dict[str, Any] = {"our_arguments": list(options.ours), "uvloop": version("uvloop")}
    with tempfile.TemporaryDirectory(prefix="bench-router-") as folder:
        entry = Entry(names, options.quick, Path(folder), options.ours)
        for cases, measure in CASES:
            wanted = [case for case in cases if options.wants(case)]
            if wanted:
                start = time.monotonic()
                outcome = measure(entry, wanted)
                rows += outcome.rows
                where |= outcome.environment
                print(f"{', '.join(wanted)}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return Outcome(rows, where)


def contestants(asked: str | None) -> list[str]:
    """Ours, and all peers unless one or none was asked for."""
    peers = [name for name in ROUTERS if name != OURS]
    if asked == "none":
        return [OURS]
    if asked is not None and asked not in peers:
        raise UsageError(f"peer {asked!r} is not known here; known: {', '.join(peers)}, none.")
    return [OURS, *(peers if asked is None else [asked])]
