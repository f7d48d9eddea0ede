"""`grpo`: the whole training step, ours against TRL's GRPOTrainer, with a small dense model and a small mixture of
experts. Generation, reward, advantages, loss and optimizer are all in the time."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.grpo_work import Job
from bench.harness import Options, Outcome, Row, choose_peer
from bench.models import write_model, write_prompts
from bench.turns import Plan, Tally, alternate, cpu_environment, opened

OURS, _CPU = "practicum", "CPU s per 1000 tokens"
CASES = {"dense": False, "moe": True}  # name -> mixture of experts?
FULL = Plan(warmup_steps=2, num_rounds=20, steps_per_turn=1, extra_rounds=40, patience_s=900)
QUICK = Plan(warmup_steps=1, num_rounds=3, steps_per_turn=1)
FULL_WORK: dict[str, Any] = {"prompts_per_step": 8, "answers_per_prompt": 8, "max_new_tokens": 64}
QUICK_WORK: dict[str, Any] = {"prompts_per_step": 4, "answers_per_prompt": 8, "max_new_tokens": 32}


def run(options: Options) -> Outcome:
    peer = choose_peer(options.peer, ["trl"])
    pythons = {OURS: sys.executable} | ({peer.name: peer.python} if peer is not None else {})
    plan, work = (QUICK, QUICK_WORK) if options.quick else (FULL, FULL_WORK)
    threads = os.cpu_count() or 1
    tallies: dict[str, dict[str, Tally]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-grpo-") as name:
        folder = Path(name)
        write_prompts(folder / "prompts.jsonl")
        for case in filter(options.wants, CASES):
            write_model(folder / case, CASES[case])
            job = Job(str(folder / case), str(folder / "prompts.jsonl"), str(folder / f"{case}-run"), threads, **work)
            tallies[case] = contest(job, [pythons], plan, folder, cpu_environment(threads))
    rows = [row for case, own in tallies.items() for row in rate_rows(case, own)]
    where = {"threads": threads, **work, "steps_per_contestant": plan.num_rounds * plan.steps_per_turn}
    where["versions"] = {side: dict(tally.versions) for own in tallies.values() for side, tally in own.items()}
    where["cpu_share_of_others"] = {case: round(own[OURS].others_share, 3) for case, own in tallies.items()}
    return Outcome(rows, where)


def contest(
    job: Job, together: Iterable[Mapping[str, str]], plan: Plan, folder: Path, env: Mapping[str, str]
) -> dict[str, Tally]:
    """Let sides, each with its Python, take turns; those of one mapping after those of another."""
    modules = {OURS: "bench.contestants.practicum_grpo", "trl": "bench.peers.trl_grpo"}
    tallies: dict[str, Tally] = {}
    for pythons in together:
        jobs = {side: replace(job, run_dir=f"{job.run_dir}-{side}") for side in pythons}
        commands = {side: [python, "-m", modules[side], jobs[side].dump()] for side, python in pythons.items()}
        with opened(commands, folder, env) as contestants:
            tallies |= alternate(contestants, plan)
    for side, tally in tallies.items():
        seconds = ", ".join(f"{part} {value:.3f}" for part, value in tally.parts().items())
        print(f"{Path(job.model).name}: {side}, median seconds: {seconds}", flush=True)
    return tallies


def rate_rows(case: str, tallies: Mapping[str, Tally]) -> list[Row]:
    """Return ours beside each peer: tokens/s and CPU time."""
    ours = tallies[OURS]
    rows = []
    for name, theirs in tallies.items():
        if name != OURS:
            rows.append(Row(case, "tokens/s", ours.rate, theirs.rate, name))
            rows.append(Row(case, _CPU, ours.cpu_s_per_1000, theirs.cpu_s_per_1000, name, "lower"))
    return rows or [Row(case, "tokens/s", ours.rate), Row(case, _CPU, ours.cpu_s_per_1000, better="lower")]
