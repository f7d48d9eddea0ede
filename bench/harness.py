"""What all benchmarks share: options in, rows out, the environment they were measured in, peers, errors."""

from __future__ import annotations

import gc
import json
import os
import platform
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from bench.contestant import version_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


class BenchError(Exception):
    """A benchmark could not be finished."""


class UsageError(BenchError):
    """A benchmark was asked for that cannot be run as things are: an unknown name, a peer that is not installed."""


class ContestantError(BenchError):
    """A contestant died, was late or answered nonsense. Carries the end of what it wrote to standard error."""


@dataclass(frozen=True, slots=True)
class Row:
    """One number of ours beside the same number of the peer; without a peer `peer` and `peer_name` are None."""

    case: str
    metric: str
    ours: float
    peer: float | None = None
    peer_name: str | None = None
    better: Literal["higher", "lower"] = "higher"

    @property
    def ratio(self) -> float | None:
        """How many times better ours is: above 1 ours is better, whichever way the metric points."""
        if self.peer is None:
            return None
        above, below = (self.ours, self.peer) if self.better == "higher" else (self.peer, self.ours)
        return above / below if below else None

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("case", "metric", "ours", "peer", "peer_name", "ratio")}


def beside(
    case: str, metric: str, ours: float, peers: Mapping[str, float], better: Literal["higher", "lower"] = "higher"
) -> list[Row]:
    """Return a row of ours beside each peer, or one of ours alone."""
    if not peers:
        return [Row(case, metric, ours, better=better)]
    return [Row(case, metric, ours, value, name, better) for name, value in peers.items()]


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks of a benchmark. `peer` is None for the benchmark's usual ones, or "none"."""

    quick: bool = False
    peer: str | None = None
    case: str | None = None  # a part of the names of the cases that are wanted; None: all
    ours: Sequence[str] = ()  # more arguments for our program, where a benchmark starts one that takes any

    def wants(self, case: str) -> bool:
        """Tell a benchmark which work to leave out. Rows of other cases are dropped in any case."""
        return self.case is None or self.case in case

    def has_peer(self, known: Sequence[str] = ()) -> bool:
        """Return whether the other side runs. Raises a `UsageError` for a peer that is not known."""
        return bool(asked_peers(self.peer, known))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a benchmark returns: its rows, and what to add to the environment they were measured in."""

    rows: list[Row]
    environment: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Peer:
    """Someone else's program in an environment of its own: bench/peers/venv-NAME, made by bench/peers/NAME.sh."""

    name: str

    @property
    def python(self) -> str:
        """Its interpreter. A `UsageError` when the environment has not been made."""
        path = ROOT / "bench" / "peers" / f"venv-{self.name}" / "bin" / "python"
        if not path.exists():
            script = f"bash bench/peers/{self.name}.sh"
            raise UsageError(f"peer {self.name!r} is not installed: run `{script}` first, or use --peer none.")
        return str(path)


def asked_peers(asked: str | None, known: Sequence[str]) -> list[str]:
    """Return the known peers, the one that was asked for, or none. Raises a `UsageError` for one that is not known."""
    if asked not in (None, "none", *known):
        raise UsageError(f"peer {asked!r} is not known here; known: {', '.join([*known, 'none'])}.")
    return list(known) if asked is None else [asked] if asked != "none" else []


def choose_peer(asked: str | None, known: Sequence[str]) -> Peer | None:
    """Return the peer to run against: the first known one unless another, or none, was asked for."""
    names = asked_peers(asked, known)
    return Peer(names[0]) if names else None


def environment(command: str) -> dict[str, Any]:
    """Return what a reader needs to judge the numbers, or to measure them again."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "command": command, "date": datetime.now(UTC).isoformat(timespec="seconds"), "platform": platform.platform(),
        "processor": models[0] if models else platform.processor(), "cpu_count": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2), "python": platform.python_version(),
        **{package: version_of(package) for package in ("torch", "transformers", "ray", "practicum")},
    }  # fmt: skip


def write_json(path: Path, rows: Sequence[Row], where: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": where, "rows": [row.as_dict() for row in rows]}, indent=2) + "\n")


def run_parts(name: str, parts: Mapping[str, Callable[[], list[Row]]], out: Path, where: Mapping[str, Any]) -> int:
    """Measure the parts of a benchmark on a device; return the exit code. A part that fails is named in the file, and
    the others are measured all the same: time on such a machine is dear."""
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for part, measure in parts.items():
        began = time.monotonic()
        try:
            rows += measure()
        except Exception as error:
            traceback.print_exc()
            failed[part] = f"{type(error).__name__}: {error}"
        free_memory()
        print(f"{part}: {time.monotonic() - began:.1f} s", flush=True)
        write_json(out / f"{name}.json", rows, {**where, "failed": failed})
    print_table(name, rows)
    return 1 if failed else 0


def free_memory() -> None:
    """Give back memory of the device that nothing holds any more."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def print_table(title: str, rows: Sequence[Row], console: Console | None = None) -> None:
    table = Table("case", "metric", title=title)
    for heading in ("ours", "peer", "peer name", "ratio (>1: ours is better)"):
        table.add_column(heading, justify="right")
    for row in rows:
        values = (_number(row.ours), _number(row.peer), row.peer_name or "", _number(row.ratio))
        table.add_row(row.case, row.metric, *values)
    (console or Console()).print(table)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
