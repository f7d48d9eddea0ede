"""`python -m bench NAME`: run one benchmark, print its table, write its file."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from bench.harness import RESULTS, BenchError, Options, Outcome, UsageError, environment, print_table, write_json

_NAMES = ("grpo", "controller", "router", "reward", "rollout", "replay", "soak")
BENCHMARKS = {name: f"bench.{name}" for name in _NAMES} | {"async": "bench.overlap"}


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m bench", description="Ours and a peer on the same work, in turns.")
    parser.add_argument("name", help=f"which benchmark: {', '.join(BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help="the same rows from few steps, in less than a minute")
    parser.add_argument("--peer", metavar="NAME", help="whom to compare with, if not the usual one; none: nobody")
    parser.add_argument("--case", metavar="TEXT", help="only cases with TEXT in their name; no file without --out")
    parser.add_argument("--ours", metavar="ARGUMENTS", help="more arguments for our side's program (router)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for NAME.json, if not bench/results")
    given = parser.parse_args(arguments)
    options = Options(given.quick, given.peer, given.case, shlex.split(given.ours or ""))
    try:
        where = environment(shlex.join(["python", "-m", "bench", *arguments]))
        outcome = measure(given.name, options)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    print_table(given.name, outcome.rows)
    # Some cases alone must not take the place of a file that has them all.
    folder = given.out or (RESULTS if given.case is None else None)
    if folder is not None:
        path = folder / f"{given.name}.json"
        write_json(path, outcome.rows, {**where, **outcome.environment})
        print(f"written to {path}")
    return 0


def measure(name: str, options: Options) -> Outcome:
    if name not in BENCHMARKS:
        raise UsageError(f"benchmark {name!r} is not known; known: {', '.join(BENCHMARKS)}.")
    if options.ours and name != "router":
        raise UsageError(f"benchmark {name!r} takes no --ours; only 'router' does.")
    outcome: Outcome = import_module(BENCHMARKS[name]).run(options)
    rows = [row for row in outcome.rows if options.wants(row.case)]
    if not rows:
        raise UsageError(f"benchmark {name!r} has no case with {options.case!r} in its name.")
    return Outcome(rows, outcome.environment)


if __name__ == "__main__":
    # Without this a polite kill would skip the `finally`s that end the contestants.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
