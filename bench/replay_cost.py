"""`cost`: what replay adds to the rollout and to the update. Each mode is a process of its own, and they take turns.

    cost rollout                  disabled against R3, whose engine keeps the routes
    cost update, 1 mini-batch     disabled against R3
    cost update, 4 mini-batches   disabled against R2 and R3; here all of them compute old log-probs first

With one mini-batch R2 alone computes old log-probs, for the sake of its record: a forward pass more, which is no cost
of replay. Nothing is compared with the rollout (`compare_every=0`). The samples were written by the native engine.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from bench.grpo_work import VOCABULARY, write_model
from bench.harness import Options, Outcome, Row
from bench.replay_work import routes_of, write_samples
from bench.turns import Contestant, Plan, Tally, take_turns
from practicum.models import DTYPES
from practicum.replay import coded
from practicum.rollout.native import NativeRollout
from practicum.types import Sample

ROLLOUT, UPDATE, UPDATES = "cost rollout", "cost update, 1 mini-batch", "cost update, 4 mini-batches"
MODES: dict[str, Sequence[str]] = {
    ROLLOUT: ("disabled", "R3"),
    UPDATE: ("disabled", "R3"),
    UPDATES: ("disabled", "R2", "R3"),
}
FULL = Plan(warmup_steps=2, num_rounds=20, steps_per_turn=1, extra_rounds=40, patience_s=600)
QUICK = Plan(warmup_steps=1, num_rounds=1, steps_per_turn=1)
END_S = 3.0


@dataclass(frozen=True, slots=True)
class Job:
    """All a contestant needs to know."""

    folder: str  # of its own: for samples and recordings
    model: str
    threads: int
    num_samples: int = 64
    prompt_tokens: int = 40
    new_tokens: int = 64
    micro_batch_tokens: int = 8192
    vocabulary: int = VOCABULARY
    device: str = "cpu"
    dtype: str = "float32"

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: str) -> Job:
        return cls(**json.loads(Path(path).read_text()))

    def write_samples(self, samples: Sequence[Sample]) -> None:
        """With routes as they travel."""
        routes = coded(routes_of(samples))
        travelling = [replace(sample, routes=own) for sample, own in zip(samples, routes, strict=True)]
        (Path(self.folder) / "samples.pkl").write_bytes(pickle.dumps(travelling))

    def read_samples(self) -> list[Sample]:
        samples: list[Sample] = pickle.loads((Path(self.folder) / "samples.pkl").read_bytes())
        return samples


def parts_of(case: str) -> int:
    """Mini-batches of a step."""
    return {UPDATE: 1, UPDATES: 4}[case]


def run(options: Options) -> Outcome:
    wanted = [case for case in MODES if options.wants(case)]
    if not wanted:
        return Outcome([])
    threads = 1 if options.quick else os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="bench-replay-") as name:
        folder = Path(name)
        write_model(folder / "model", mixture_of_experts=True)
        few = {"num_samples": 8, "prompt_tokens": 8, "new_tokens": 8} if options.quick else {}
        job = Job(name, str(folder / "model"), threads, **few)
        if set(wanted) - {ROLLOUT}:
            make_samples(job)
        plan = QUICK if options.quick else FULL
        tallies = contest(job, wanted, plan, folder)
    rows = [row for case in wanted for row in case_rows(case, tallies[case])]
    others = {case: round(max(tally.others_share for tally in own.values()), 3) for case, own in tallies.items()}
    sizes = {name: value for name, value in asdict(job).items() if name not in ("folder", "model")}
    return Outcome(rows, {"cost": {"plan": asdict(plan), **sizes, "cpu_share_of_others": others}})


def make_samples(job: Job) -> None:
    """Written by the native engine, which keeps their routes."""
    engine = open_engine(job, keep_routes=True)
    lengths = (job.prompt_tokens - job.prompt_tokens // 4, job.prompt_tokens + job.prompt_tokens // 4)
    job.write_samples(write_samples(engine, job.num_samples, lengths, job.new_tokens, job.vocabulary))
    engine.close()


def open_engine(job: Job, keep_routes: bool) -> NativeRollout:
    engine = NativeRollout(
        job.model,
        device=torch.device(job.device),
        dtype=DTYPES[job.dtype],
        max_batch=job.num_samples,
        keep_routes=keep_routes,
    )
    engine.resume()
    return engine


def contest(job: Job, cases: Sequence[str], plan: Plan, folder: Path) -> dict[str, dict[str, Tally]]:
    """Tallies by case and mode."""
    job.write(folder / "job.json")
    env = {"OMP_NUM_THREADS": str(job.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    program = [sys.executable, "-m", "bench.contestants.practicum_replay", str(folder / "job.json")]
    found: dict[str, dict[str, Tally]] = {}
    with ExitStack() as stack:
        sides = {
            mode: stack.enter_context(Contestant(mode, [*program, mode], folder, env, end_s=END_S))
            for mode in dict.fromkeys(mode for case in cases for mode in MODES[case])
        }
        for side in sides.values():
            side.ready(plan.start_s)
        for case in cases:
            print(f"{case}:", file=sys.stderr, flush=True)
            found[case] = take_turns([sides[mode] for mode in MODES[case]], plan, case)
        for side in sides.values():
            side.dismiss()
    return found


def case_rows(case: str, tallies: Mapping[str, Tally]) -> list[Row]:
    rows = []
    plain = tallies["disabled"]
    for mode, tally in tallies.items():
        if mode == "disabled":
            continue
        for metric, read in (("s a step", seconds_of), ("CPU s a step", cpu_seconds_of)):
            rows.append(Row(case, f"{mode}: {metric}", read(tally), read(plain), "disabled", "lower"))
    return rows


def seconds_of(tally: Tally) -> float:
    return tally.parts()["step"]


def cpu_seconds_of(tally: Tally) -> float:
    return tally.cpu_s / len(tally.steps)
