"""`soak`: ours alone, 500 steps of GRPO on a very small mixture of experts, as a user would run them, on Ray.

    Trainer ─ every few steps ─▶ memory, descriptors and threads of the driver and of each worker       is it flat?
    what the run has written (metrics, recording, checkpoints) ─▶ the same figures computed anew        are they equal?

Growth is that from step 50 on, when everything has happened once. What is computed anew shares no code with the loop:
rewards from token ids, log-probs and entropy by transformers' own forward pass over the model of the checkpoint before.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.grpo_work import even_share
from bench.harness import BenchError, Options, Outcome, Row, choose_peer

MEMORY, NUMBERS = "memory", "numbers"
DRIVER, WORKERS, HELPERS, RAY = "driver", "workers", "helpers", "Ray"
ANSWERS, PROMPTS = 4, 4
RIGHT_ABOVE = 0.5
TEMPERATURE = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    num_steps: int
    settled: int  # growth is counted from this step on
    look_every: int
    checkpoint_every: int


FULL = Plan(num_steps=500, settled=50, look_every=10, checkpoint_every=100)
QUICK = Plan(num_steps=30, settled=10, look_every=5, checkpoint_every=10)


@dataclass(frozen=True, slots=True)
class Look:
    """At one process, or at several together."""

    rss: int
    descriptors: int
    threads: int

    def __add__(self, other: Look) -> Look:
        return Look(self.rss + other.rss, self.descriptors + other.descriptors, self.threads + other.threads)


Looks = dict[int, dict[str, Look]]  # step -> who -> what


@dataclass(frozen=True, slots=True)
class Drift:
    """Largest differences, over the steps that were computed anew, from what the run had logged."""

    steps: list[int]
    metrics: dict[str, float]
    log_probs: float  # of any token
    validation: float


def run(options: Options) -> Outcome:
    choose_peer(options.peer or "none", [])
    plan = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory(prefix="bench-soak-") as name:
        folder = Path(name)
        prepare(folder)
        start = time.monotonic()
        looks = soak(folder, plan)
        seconds = time.monotonic() - start
        drift = drift_of(folder / "run", plan)
    where: dict[str, Any] = {**asdict(plan), "answers_per_step": PROMPTS * ANSWERS, "seconds": round(seconds, 1)}
    where["steps_computed_anew"] = drift.steps
    where["rss_mib"] = {
        who: {step: round(look[who].rss / 2**20, 1) for step, look in looks.items() if who in look}
        for who in looks[plan.num_steps]
    }
    rows = [*memory_rows(looks, plan), *drift_rows(drift)]
    return Outcome(rows, {"soak": where})


def grade(sample: Any) -> float:
    return even_share(sample.token_ids.tolist())


def prepare(folder: Path, seed: int = 0) -> None:
    """The demonstration's sums and words, and a model of one layer with four experts."""
    from practicum.demo.arithmetic import all_problems, make_model, make_tokenizer, write_problems
    from practicum.models import save_model

    train, held_out = all_problems(seed, 16)
    write_problems(folder / "train.jsonl", train)
    write_problems(folder / "held-out.jsonl", held_out)
    model = make_model(seed)
    small = {"num_hidden_layers": 1, "layer_types": None, "hidden_size": 32, "moe_intermediate_size": 16}
    config = type(model.config)(**{**model.config.to_dict(), **small, "num_experts": 4, "head_dim": 8})
    save_model(type(model)(config), make_tokenizer(), folder / "model")


def config_of(folder: Path, plan: Plan, backend: str = "ray") -> Any:
    from practicum import Config

    tree = {
        "model": {"path": str(folder / "model")},
        "data": {
            "train": str(folder / "train.jsonl"),
            "validation": str(folder / "held-out.jsonl"),
            "prompts_per_step": PROMPTS,
            "max_prompt_tokens": 16,
        },
        "rollout": {"answers_per_prompt": ANSWERS, "max_new_tokens": 6, "temperature": TEMPERATURE},
        "reward": {"function": f"{Path(__file__).resolve()}:grade"},
        "validation": {"every": plan.checkpoint_every, "right_above": RIGHT_ABOVE},
        # The recording keeps every sample as it was learnt from, to be looked at again.
        "actor": {"lr": 1.0e-3, "router_replay": {"mode": "R3", "record_file": str(folder / "samples.rec")}},
        "controller": {"backend": backend},
        "trainer": {
            "steps": plan.num_steps,
            "num_workers": 1,
            "threads_per_worker": 1,
            "checkpoint_every": plan.checkpoint_every,
            "keep_checkpoints": plan.num_steps,
            "run_dir": str(folder / "run"),
        },
    }
    return Config.from_tree(tree, source="bench soak")


def soak(folder: Path, plan: Plan, backend: str = "ray") -> Looks:
    from practicum import Trainer

    looks: Looks = {}
    for report in Trainer(config_of(folder, plan, backend)).steps():
        if report.number % plan.look_every == 0:
            looks[report.number] = look = look_at_all()
            if report.number % (10 * plan.look_every) == 0:
                rss = ", ".join(f"{who} {found.rss / 2**20:.1f}" for who, found in look.items())
                print(
                    f"soak: step {report.number}, reward {report.reward:.3f}, MiB: {rss}", file=sys.stderr, flush=True
                )
    return looks


# Memory


def look_at_all() -> dict[str, Look]:
    """This process is the driver; the others are those below it, and of a kind they are added up."""
    driver = psutil.Process()
    found = {DRIVER: look_at(driver)}
    for child in driver.children(recursive=True):
        try:
            who, look = kind_of(child.cmdline()), look_at(child)
        except psutil.Error:  # it has ended meanwhile
            continue
        found[who] = found[who] + look if who in found else look
    return found


def kind_of(command: list[str]) -> str:
    """Workers hold the learner and the reward centre. Helpers are ours too: the watchdog, processes that grade."""
    if command[:1] and command[0].startswith("ray::RayHost"):
        return WORKERS
    is_ray = any(part.startswith("ray::") or "/ray/" in part for part in command)
    return RAY if is_ray else HELPERS


def look_at(process: psutil.Process) -> Look:
    with process.oneshot():
        return Look(process.memory_info().rss, process.num_fds(), process.num_threads())


def memory_rows(looks: Looks, plan: Plan) -> list[Row]:
    """Of everyone who was there from the settled step to the last."""
    first, last = looks[plan.settled], looks[plan.num_steps]
    rows = []
    for who in [who for who in last if who in first]:
        before, after = first[who], last[who]
        rows.append(Row(MEMORY, f"{who}: RSS growth, MiB", (after.rss - before.rss) / 2**20, better="lower"))
        if who != RAY:  # which opens and closes as it likes
            more = max(after.descriptors - before.descriptors, after.threads - before.threads)
            rows.append(Row(MEMORY, f"{who}: more descriptors or threads", more, better="lower"))
    return rows


# Numbers


def drift_of(run_dir: Path, plan: Plan) -> Drift:
    """Of the first step, and of those that begin with the weights of a checkpoint."""
    from practicum.replay import Recording

    logged = {row["step"]: row for row in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())}
    steps = [1, *range(plan.checkpoint_every + 1, plan.num_steps + 1, plan.checkpoint_every)]
    metrics: dict[str, float] = {}
    gap = 0.0
    with Recording(run_dir.parent / "samples.rec") as recording:
        for step in steps:
            weights = run_dir.parent if step == 1 else run_dir / "checkpoints" / f"step-{step - 1:06d}"
            samples = [item.sample for item in recording.trainings(step)]
            if len(samples) != PROMPTS * ANSWERS:
                raise BenchError(f"step {step} has {len(samples)} samples in its recording, not {PROMPTS * ANSWERS}.")
            anew, step_gap = computed_anew(samples, weights / "model")
            gap = max(gap, step_gap)
            for name, value in anew.items():
                metrics[name] = max(metrics.get(name, 0.0), abs(value - logged[step][name]))
    return Drift(steps, metrics, gap, validation_drift(run_dir, logged))


def computed_anew(samples: list[Any], model: Path) -> tuple[dict[str, float], float]:
    """A step's figures by name, and the largest difference of a token's log-prob from what the engine had said."""
    rewards = [even_share(sample.token_ids.tolist()) for sample in samples]
    lengths = [len(sample.token_ids) for sample in samples]
    entropies: list[float] = []
    gap = 0.0
    for sample, (log_probs, entropy) in zip(samples, passes(samples, model), strict=True):
        gap = max(gap, float(np.abs(log_probs - sample.log_probs).max()))
        entropies += entropy.tolist()
    figures = {
        "reward/mean": sum(rewards) / len(rewards),
        "reward/std": float(np.std(rewards)),
        "rollout/answer_tokens": sum(lengths) / len(lengths),
        "actor/entropy": sum(entropies) / len(entropies),
    }
    return figures, gap


def passes(samples: list[Any], model: Path) -> Iterator[tuple[Any, Any]]:
    """Log-probs of each answer's tokens, and the entropies that they were drawn with, one answer at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.token_ids]).astype(np.int64))
        with torch.no_grad():
            logits = loaded(input_ids=ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1].double() / TEMPERATURE
        table = logits.log_softmax(-1)
        chosen = table.gather(-1, ids[len(sample.prompt_ids) :, None])[:, 0]
        yield chosen.numpy(), -(table.exp() * table).sum(-1).numpy()


def validation_drift(run_dir: Path, logged: dict[int, dict[str, float]]) -> float:
    """Of the accuracy and of the share of right answers, from the answers that the run has written down."""
    largest = 0.0
    for path in sorted((run_dir / "validation").glob("step-*.jsonl")):
        metrics = logged[int(path.stem.removeprefix("step-"))]
        scores = [json.loads(line)["score"] for line in path.read_text().splitlines()]
        for name, value in (
            ("validation/accuracy", sum(scores) / len(scores)),
            ("validation/pass@1", sum(score > RIGHT_ABOVE for score in scores) / len(scores)),
        ):
            largest = max(largest, abs(value - metrics[name]))
    return largest


def drift_rows(drift: Drift) -> list[Row]:
    return [
        *(Row(NUMBERS, f"{name}: largest difference", gap, better="lower") for name, gap in drift.metrics.items()),
        Row(NUMBERS, "log-probs of tokens: largest difference", drift.log_probs, better="lower"),
        Row(NUMBERS, "validation: largest difference", drift.validation, better="lower"),
    ]
