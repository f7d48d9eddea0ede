"""`cost`: what replay adds to the rollout and to the update. Each mode is a process of its own, and they take turns.

    cost rollout                  disabled against R3, whose engine keeps the routes
    cost update, 1 mini-batch     disabled against R3
    cost update, 4 mini-batches   disabled against R2 and R3; here all of them compute old log-probs first

With one mini-batch R2 alone computes old log-probs, for the sake of its record: a forward pass more, which is no cost
of replay. `python -m bench.replay_cost JOB MODE` is a contestant.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from bench import work
from bench.contestant import Argument, Line, step
from bench.harness import Options, Outcome, Row
from bench.models import VOCABULARY, write_model
from bench.replay_exact import DISABLED, routes_of
from bench.turns import Plan, Tally, alternate, cpu_environment, opened
from practicum.replay import coded
from practicum.train import ActorWorker
from practicum.types import PromptGroup, Sample, SamplingParams
from tests.train.actors import mini_batches

ROLLOUT, UPDATE, UPDATES = "cost rollout", "cost update, 1 mini-batch", "cost update, 4 mini-batches"
MINI_BATCHES = {UPDATE: 1, UPDATES: 4}
MODES = {ROLLOUT: (DISABLED, "R3"), UPDATE: (DISABLED, "R3"), UPDATES: (DISABLED, "R2", "R3")}
FULL = Plan(warmup_steps=2, num_rounds=20, steps_per_turn=1, extra_rounds=40, patience_s=600)
QUICK = Plan(warmup_steps=1, num_rounds=1, steps_per_turn=1)


@dataclass(frozen=True)
class Job(Argument):
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

    @property
    def engine(self) -> dict[str, Any]:
        return {"device": self.device, "dtype": self.dtype, "max_batch": self.num_samples}

    def groups(self, spread: int = 0, seed: int = 0) -> list[PromptGroup]:
        params = SamplingParams(self.new_tokens, ignore_eos=True)
        lengths = (self.prompt_tokens - spread, self.prompt_tokens + spread)
        return work.groups_of(self.num_samples, lengths, params, self.vocabulary, seed)

    def make_samples(self) -> None:
        """Have the native engine write samples; keep them with routes as they travel."""
        with work.native_engine(self.model, keep_routes=True, **self.engine) as engine:
            samples = work.written(engine, self.groups(spread=self.prompt_tokens // 4))
        for sample, routes in zip(samples, coded(routes_of(samples)), strict=True):
            sample.routes = routes
        (Path(self.folder) / "samples.pkl").write_bytes(pickle.dumps(samples))

    def read_samples(self) -> list[Sample]:
        samples: list[Sample] = pickle.loads((Path(self.folder) / "samples.pkl").read_bytes())
        return samples


def run(options: Options) -> Outcome:
    wanted = [case for case in MODES if options.wants(case)]
    if not wanted:
        return Outcome([])
    threads = 1 if options.quick else os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="bench-replay-") as name:
        model = write_model(Path(name) / "model", mixture_of_experts=True)
        few: dict[str, Any] = {"num_samples": 8, "prompt_tokens": 8, "new_tokens": 8} if options.quick else {}
        job = Job(name, str(model), threads, **few)
        if set(wanted) - {ROLLOUT}:
            job.make_samples()
        plan = QUICK if options.quick else FULL
        tallies = dict(contests(job, wanted, plan))
    rows = [row for case in wanted for row in case_rows(case, tallies[case])]
    others = {case: round(own[DISABLED].others_share, 3) for case, own in tallies.items()}
    sizes = {name: value for name, value in asdict(job).items() if name not in ("folder", "model")}
    return Outcome(rows, {"cost": {"plan": asdict(plan), **sizes, "cpu_share_of_others": others}})


def contests(job: Job, cases: Sequence[str], plan: Plan) -> Iterator[tuple[str, dict[str, Tally]]]:
    """Yield each case with the tallies of its modes."""
    program = [sys.executable, "-m", "bench.replay_cost", job.dump()]
    commands = {mode: [*program, mode] for case in cases for mode in MODES[case]}
    with opened(commands, Path(job.folder), cpu_environment(job.threads), end_s=3.0) as sides:
        for side in sides:
            side.ready(plan.start_s)
        for case in cases:
            yield case, alternate([side for side in sides if side.name in MODES[case]], plan, case)


def case_rows(case: str, tallies: Mapping[str, Tally]) -> list[Row]:
    """Return what a step takes in each mode against disabled; CPU time where that was measured."""
    rows, plain = [], tallies[DISABLED]
    for mode, own in tallies.items():
        if mode != DISABLED:
            rows.append(Row(case, f"{mode}: s a step", own.parts()["step"], plain.parts()["step"], DISABLED, "lower"))
            if plain.cpu_s:
                cpu_s, plain_cpu_s = own.cpu_s / len(own.steps), plain.cpu_s / len(plain.steps)
                rows.append(Row(case, f"{mode}: CPU s a step", cpu_s, plain_cpu_s, DISABLED, "lower"))
    return rows


# A contestant: one mode of router replay


@contextmanager
def open_side(job: Job, mode: str) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Yield what takes a step of a case. Engine and actor are made when they are first needed."""
    numbers = itertools.count(1)
    with ExitStack() as stack:

        @cache
        def make_engine() -> Any:
            return stack.enter_context(work.native_engine(job.model, keep_routes=mode == "R3", **job.engine))

        @cache
        def make_actor() -> tuple[Any, list[Sample]]:
            replay = work.replay_settings(mode, Path(job.folder))
            where: dict[str, Any] = {"device": job.device, "compute_dtype": job.dtype, "threads": job.threads}
            samples = job.read_samples()
            if mode != "R3":
                samples = [replace(sample, routes=None) for sample in samples]
            return stack.enter_context(work.open_actors(Path(job.model), replay=replay, **where)), samples

        def take_step(case: str) -> dict[str, Any]:
            number = next(numbers)
            if case == ROLLOUT:
                engine, groups = make_engine(), job.groups(seed=1000 * number)
                began = time.perf_counter()
                samples = work.written(engine, groups)
                seconds, num_tokens = time.perf_counter() - began, sum(len(sample.token_ids) for sample in samples)
                num_kept = sum(sample.routes is not None for sample in samples)
                if num_kept != (len(samples) if mode == "R3" else 0):
                    raise RuntimeError(f"{num_kept} of {len(samples)} samples have routes in mode {mode}")
            else:
                actor, samples = make_actor()
                samples = work.to_learn_from(samples, number)
                batches = mini_batches(samples, 1, job.micro_batch_tokens, MINI_BATCHES[case])
                began = time.perf_counter()
                (stats,) = actor.map(ActorWorker.update, batches, number)
                seconds, num_tokens = time.perf_counter() - began, sum(sample.num_tokens for sample in samples)
                num_replayed = None if stats.replay is None else stats.replay.num_rows
                if num_replayed != (None if mode == DISABLED else num_tokens):
                    raise RuntimeError(f"{num_replayed} of {num_tokens} tokens were replayed in mode {mode}")
            return step(seconds, num_tokens)

        yield take_step


def main() -> None:
    line = Line()
    import torch

    job = Job.parse(sys.argv[1])
    torch.set_num_threads(job.threads)
    with open_side(job, sys.argv[2]) as take_step:
        line.serve(["practicum", "torch", "transformers"], take_step)


if __name__ == "__main__":
    main()
