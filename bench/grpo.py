"""`grpo`: the whole training step, ours against TRL's GRPOTrainer.

8 prompts x 8 answers x 64 tokens and one update a step, in float32 on the CPU, a small dense model and a small mixture
of experts with random weights. Generation, reward, advantages, loss and optimizer are all in the time.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench.grpo_work import Job, write_model, write_prompts
from bench.harness import Options, Outcome, Peer, Row, choose_peer
from bench.turns import Contestant, Plan, Tally, alternate

CASES = {"dense": False, "moe": True}  # name -> mixture of experts?
FULL = Plan(warmup_steps=2, num_rounds=20, steps_per_turn=1, extra_rounds=40, patience_s=900)
QUICK = Plan(warmup_steps=1, num_rounds=3, steps_per_turn=1)
FULL_WORK: dict[str, int] = {"prompts_per_step": 8, "answers_per_prompt": 8, "max_new_tokens": 64}
QUICK_WORK: dict[str, int] = {"prompts_per_step": 4, "answers_per_prompt": 8, "max_new_tokens": 32}


def run(options: Options) -> Outcome:
    peer = choose_peer(options.peer, ["trl"])
    commands = {"practicum": [sys.executable, "-m", "bench.contestants.practicum_grpo"]}
    if peer is not None:
        commands[peer.name] = [peer.python, "-m", f"bench.peers.{peer.name}_grpo"]
    plan, work = (QUICK, QUICK_WORK) if options.quick else (FULL, FULL_WORK)
    threads = os.cpu_count() or 1
    rows: list[Row] = []
    versions: dict[str, object] = {}
    others: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="bench-grpo-") as name:
        folder = Path(name)
        prompts = folder / "prompts.jsonl"
        write_prompts(prompts)
        for case, mixture_of_experts in CASES.items():
            if not options.wants(case):
                continue
            write_model(folder / case, mixture_of_experts)
            job = Job(str(folder / case), str(prompts), str(folder / f"{case}-run"), threads, **work)
            tallies = _contest(folder, job, commands, plan)
            rows += _rows(case, tallies, peer)
            others[case] = round(max(tally.others_share for tally in tallies.values()), 3)
            versions = {name: dict(tally.versions) for name, tally in tallies.items()}
            for contestant, tally in tallies.items():
                seconds = ", ".join(f"{part} {value:.3f}" for part, value in tally.parts().items())
                print(f"{case}: {contestant}, median seconds: {seconds}", flush=True)
    steps = plan.num_rounds * plan.steps_per_turn
    where = {"threads": threads, **work, "steps_per_contestant": steps}
    return Outcome(rows, {**where, "versions": versions, "cpu_share_of_others": others})


def _contest(folder: Path, job: Job, commands: dict[str, list[str]], plan: Plan) -> dict[str, Tally]:
    env = {"OMP_NUM_THREADS": str(job.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with ExitStack() as stack:
        contestants = []
        for name, command in commands.items():
            path = folder / f"{name}.json"
            replace(job, run_dir=f"{job.run_dir}-{name}").write(path)
            contestants.append(stack.enter_context(Contestant(name, [*command, str(path)], folder, env)))
        return alternate(contestants, plan)


def _rows(case: str, tallies: dict[str, Tally], peer: Peer | None) -> list[Row]:
    ours, theirs = tallies["practicum"], tallies[peer.name] if peer else None
    name = peer.name if peer else None
    rate = theirs.rate if theirs else None
    cpu_s = theirs.cpu_s_per_1000 if theirs else None
    return [
        Row(case, "tokens/s", ours.rate, rate, name),
        Row(case, "CPU s per 1000 tokens", ours.cpu_s_per_1000, cpu_s, name, better="lower"),
    ]
