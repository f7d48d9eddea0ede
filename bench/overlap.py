"""`async`: overlap of rollout and training, `trainer.staleness=1` against `trainer.staleness=0`, both ours.

The reward is an async function that sleeps as long as the generation of a batch takes, measured at the beginning of
the same run: rewards that wait for others (a judge, a sandbox, a service) cost no time of the cores here. Each side is
a run of its own in the same Ray, in turns; what is timed begins after some steps and ends before the last.

`learning` is the demonstration: after as many steps, are as many held-out sums right?
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from bench.grpo_work import make_word_tokenizer, write_prompts
from bench.harness import Options, Outcome, Row, UsageError

PEER = "staleness=0"
PLACEMENTS = ("standalone", "hybrid")
LEARNING = "learning"
PROMPTS, ANSWERS, NEW_TOKENS = 4, 2, 256
_GRADE = """
import asyncio, pathlib

DELAY = pathlib.Path({delay!r})

async def grade(sample):
    await asyncio.sleep(float(DELAY.read_text()))
    return sum(token % 2 == 0 for token in sample.token_ids.tolist()) / len(sample.token_ids)
"""


@dataclass(frozen=True, slots=True)
class Plan:
    num_rounds: int
    num_steps: int  # timed ones of a run
    num_warm: int
    learning_steps: int
    held_out: int | None


FULL = Plan(num_rounds=5, num_steps=20, num_warm=4, learning_steps=100, held_out=None)
QUICK = Plan(num_rounds=1, num_steps=6, num_warm=2, learning_steps=4, held_out=50)


@dataclass(slots=True)
class Pace:
    """Of one side, over its runs."""

    samples_per_s: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    """Median seconds of a step of each run."""

    def part(self, name: str) -> float:
        return statistics.median(parts.get(name, 0.0) for parts in self.parts)


def run(options: Options) -> Outcome:
    if options.peer not in (None, "none", PEER):
        raise UsageError(f"peer {options.peer!r} is not known here; known: {PEER}, none.")
    plan = QUICK if options.quick else FULL
    has_peer = options.peer != "none"
    from practicum.controller import ray_cluster

    rows: list[Row] = []
    where: dict[str, Any] = {
        "samples_per_step": PROMPTS * ANSWERS,
        "max_new_tokens": NEW_TOKENS,
        "threads_per_process": 1,
        "rounds": plan.num_rounds,
        "timed_steps_per_run": plan.num_steps,
    }
    with tempfile.TemporaryDirectory(prefix="bench-async-") as name, ray_cluster():
        folder = Path(name)
        write_work(folder)
        for placement in filter(options.wants, PLACEMENTS):
            paces, delay_s = contest(folder, placement, plan)
            rows += speed_rows(placement, paces, has_peer)
            where[placement] = told(placement, paces, delay_s)
        if options.wants(LEARNING):
            found, where[LEARNING] = learn(folder, plan, has_peer, options.quick)
            rows += found
    return Outcome(rows, where)


def contest(folder: Path, placement: str, plan: Plan) -> tuple[dict[int, Pace], float]:
    """By staleness; and how long the reward takes. The first run, without staleness, begins without any."""
    paces = {0: Pace(), 1: Pace()}
    delays: list[float] = []
    for number in range(plan.num_rounds):
        for staleness in (0, 1) if number % 2 == 0 else (1, 0):
            config = speed_config(folder, placement, staleness, f"{placement}-{number}-{staleness}")
            with closing(cast(Generator[Any], trainer_of(config).steps())) as reports:
                if not delays:
                    set_delay(folder, 0.0)
                    taken = [next(reports).metrics["time/rollout_s"] for _ in range(plan.num_warm + 3)]
                    delays.append(statistics.median(taken[-3:]))
                    set_delay(folder, delays[0])
                take(reports, paces[staleness], plan)
            rate = paces[staleness].samples_per_s[-1]
            print(f"{placement}, staleness {staleness}: {rate:.3g} samples/s", flush=True)
    return paces, delays[0]


def take(reports: Generator[Any], pace: Pace, plan: Plan) -> None:
    for _ in range(plan.num_warm):
        next(reports)
    start = time.perf_counter()
    metrics = [next(reports).metrics for _ in range(plan.num_steps)]
    seconds = time.perf_counter() - start
    pace.samples_per_s.append(plan.num_steps * PROMPTS * ANSWERS / seconds)
    names = [name for name in metrics[-1] if name.startswith(("time/", "age/max"))]
    pace.parts.append({name: statistics.median(step[name] for step in metrics if name in step) for name in names})


def speed_rows(placement: str, paces: dict[int, Pace], has_peer: bool) -> list[Row]:
    ours, theirs = (statistics.median(paces[staleness].samples_per_s) for staleness in (1, 0))
    return [Row(placement, "samples/s", ours, theirs if has_peer else None, PEER if has_peer else None)]


def told(placement: str, paces: dict[int, Pace], delay_s: float) -> dict[str, Any]:
    """What a step is made of, and what could be had at best of overlapping it."""
    before, after = paces[0], paces[1]
    generation = before.part("time/rollout_s")
    learning = sum(before.part(f"time/{name}_s") for name in ("looking", "update", "weights", "idle"))
    return {
        "reward_takes_s": round(delay_s, 4),
        "step_s": {f"staleness={k}": round(paces[k].part("time/step_s"), 4) for k in paces},
        "generation_s": round(generation, 4),
        "learning_s": round(learning, 4),
        "best_possible_ratio": round(best_ratio(placement, generation, delay_s, learning), 3),
        "oldest_token_age": after.part("age/max"),
        "learner_waited_s": round(after.part("time/waiting_s") + after.part("time/turn_s"), 4),
        "writers_waited_s": round(after.part("time/ahead/idle_s"), 4),
        "samples_per_s": {f"staleness={k}": [round(rate, 2) for rate in paces[k].samples_per_s] for k in paces},
    }


def best_ratio(placement: str, generation_s: float, reward_s: float, learning_s: float) -> float:
    """Of the samples per second with staleness 1: two batches are under way, and each part is done once at a time."""
    whole = generation_s + reward_s + learning_s
    apart = [generation_s, learning_s] if placement == "standalone" else [generation_s + learning_s]
    return whole / max(*apart, whole / 2)


def learn(folder: Path, plan: Plan, has_peer: bool, is_quick: bool) -> tuple[list[Row], dict[str, Any]]:
    import torch

    from practicum.demo.arithmetic import all_problems, write_problems
    from practicum.demo.run import NUM_HELD_OUT, WARM_UP_ACCURACY, WRONG_SHARE, demo_config
    from practicum.demo.warmup import warm_up

    train, held_out = all_problems(0, NUM_HELD_OUT)
    write_problems(folder / "train.jsonl", train)
    write_problems(folder / "held-out.jsonl", held_out)
    until = 0.0 if is_quick else WARM_UP_ACCURACY  # 0: it stops as soon as it may
    torch.set_num_threads(1)  # the model is too small to gain from more
    warm_up(folder / "model", train, seed=0, until_accuracy=until, wrong_share=WRONG_SHARE)
    before, after = {}, {}
    for staleness in (1, 0):
        overrides = [
            f"trainer.staleness={staleness}",
            "algorithm.correction.kind=truncated",
            f"trainer.steps={plan.learning_steps}",
            f"trainer.run_dir={folder / f'learning-{staleness}'}",
            f"validation.max_prompts={plan.held_out or 'null'}",
            f"controller.backend={'local' if is_quick else 'ray'}",
            "validation.every=0",
            "trainer.checkpoint_every=0",
        ]
        config = demo_config(folder, overrides)
        after[staleness] = [report.accuracy for report in trainer_of(config).steps()][-1]
        before[staleness] = first_accuracy(Path(config.trainer.run_dir))
    metric = f"held-out accuracy after {plan.learning_steps} steps"
    rows = [Row(LEARNING, metric, after[1], after[0] if has_peer else None, PEER if has_peer else None)]
    return rows, {"held_out_before": before[1], "steps": plan.learning_steps}


def first_accuracy(run_dir: Path) -> float:
    from practicum.loop.run_folder import read_metrics

    return float(read_metrics(run_dir)[0]["validation/accuracy"])


def trainer_of(config: Any) -> Any:
    from practicum import Trainer

    return Trainer(config, notify=lambda text: None)


def set_delay(folder: Path, seconds: float) -> None:
    written = folder / "delay.new"
    written.write_text(str(seconds))
    written.rename(folder / "delay")


def write_work(folder: Path, seed: int = 0) -> None:
    """A Qwen3 of two layers with random weights, hardly any of whose answers ends before it is cut off."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = make_word_tokenizer()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "work-model")
    tokenizer.save_pretrained(folder / "work-model")
    write_prompts(folder / "prompts.jsonl")
    set_delay(folder, 0.0)
    (folder / "grade.py").write_text(_GRADE.format(delay=str(folder / "delay")))


def speed_config(folder: Path, placement: str, staleness: int, name: str, backend: str = "ray") -> Any:
    from practicum import Config

    tree = {
        "model": {"path": str(folder / "work-model")},
        "data": {"train": str(folder / "prompts.jsonl"), "prompts_per_step": PROMPTS, "max_prompt_tokens": 64},
        "rollout": {"placement": placement, "answers_per_prompt": ANSWERS, "max_new_tokens": NEW_TOKENS},
        "reward": {"function": f"{folder / 'grade.py'}:grade", "timeout_s": 60.0},
        "actor": {"lr": 1.0e-6},
        "algorithm": {"correction": {"kind": "truncated"}},
        "controller": {"backend": backend},
        # More steps than will be taken, so that none of them is the last, which would also write a checkpoint.
        "trainer": {
            "steps": 1_000_000,
            "staleness": staleness,
            "checkpoint_every": 0,
            "device": "cpu",
            "threads_per_worker": 1,
            "run_dir": str(folder / name),
        },
    }
    return Config.from_tree(tree, source="bench async")
