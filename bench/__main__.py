"""`python -m bench NAME`: run one benchmark, print its table, write its file."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import controller, grpo
from bench.harness import ROOT, BenchError, Options, Outcome, UsageError, environment, print_table, write_json

BENCHMARKS: dict[str, Callable[[Options], Outcome]] = {"grpo": grpo.run, "controller": controller.run}


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m bench", description="Ours and a peer on the same work, in turns.")
    parser.add_argument("name", help=f"which benchmark: {', '.join(BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help="the same rows from few steps, in less than a minute")
    parser.add_argument("--peer", metavar="NAME", help="whom to compare with, if not the usual one; none: nobody")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", metavar="FOLDER", help="for NAME.json")
    options = parser.parse_args(arguments)
    try:
        if options.name not in BENCHMARKS:
            raise UsageError(f"benchmark {options.name!r} is not known; known: {', '.join(BENCHMARKS)}.")
        where = environment(" ".join(["python -m bench", *arguments]))
        outcome = BENCHMARKS[options.name](Options(quick=options.quick, peer=options.peer))
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    print_table(options.name, outcome.rows)
    path = options.out / f"{options.name}.json"
    write_json(path, outcome.rows, {**where, **outcome.environment})
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    # Without this a polite kill would skip the `finally`s that end the contestants.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
