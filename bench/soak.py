"""`soak`: ours alone, 500 steps of GRPO on a very small mixture of experts, as a user would run them, on Ray.

    Trainer ─ every few steps ─▶ memory, descriptors and threads of the driver and of each worker       is it flat?
    what the run has written (metrics, recording, checkpoints) ─▶ the same figures computed anew        are they equal?

What is computed anew shares no code with the loop.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.grpo_work import even_share
from bench.harness import BenchError, Options, Outcome, Row
from bench.models import save_random

MEMORY, NUMBERS = "memory", "numbers"
LOG_PROBS, VALIDATION = "log-probs of tokens", "validation"
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


HELD = RSS, DESCRIPTORS, THREADS = "rss", "descriptors", "threads"
Usage = Counter[tuple[str, str]]  # by kind of process and what it holds


def run(options: Options) -> Outcome:
    options.has_peer()
    plan = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory(prefix="bench-soak-") as name:
        folder = Path(name)
        prepare(folder)
        start = time.monotonic()
        usages = soak(folder, plan)
        seconds = time.monotonic() - start
        steps, drifts = drifts_of(folder / "run", plan)
    where: dict[str, Any] = {**asdict(plan), "answers_per_step": PROMPTS * ANSWERS, "seconds": round(seconds, 1)}
    where["steps_computed_anew"] = steps
    where["rss_mib"] = {
        kind: {step: round(usage[kind, RSS] / 2**20, 1) for step, usage in usages.items() if usage[kind, RSS]}
        for kind, what in usages[plan.num_steps]
        if what == RSS
    }
    numbers = [Row(NUMBERS, f"{name}: largest difference", drift, better="lower") for name, drift in drifts.items()]
    return Outcome([*memory_rows(usages, plan), *numbers], {"soak": where})


def grade(sample: Any) -> float:
    return even_share(sample.token_ids.tolist())


def prepare(folder: Path, seed: int = 0) -> None:
    """Write the demonstration's sums and words, and a model of one layer with four experts."""
    from practicum.demo.arithmetic import all_problems, make_model, make_tokenizer, write_problems

    train, held_out = all_problems(seed, 16)
    write_problems(folder / "train.jsonl", train)
    write_problems(folder / "held-out.jsonl", held_out)
    small = {"num_hidden_layers": 1, "layer_types": None, "hidden_size": 32, "moe_intermediate_size": 16}
    shape = {**make_model(seed).config.to_dict(), **small, "num_experts": 4, "head_dim": 8, "dtype": "float32"}
    save_random(folder / "model", shape.pop("model_type"), make_tokenizer(), seed=seed, **shape)


def soak(folder: Path, plan: Plan, backend: str = "ray") -> dict[int, Usage]:
    from practicum import Config, Trainer

    every = plan.checkpoint_every
    tree = {
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "train.jsonl"), "validation": str(folder / "held-out.jsonl"),
                 "prompts_per_step": PROMPTS, "max_prompt_tokens": 16},
        "rollout": {"answers_per_prompt": ANSWERS, "max_new_tokens": 6, "temperature": TEMPERATURE},
        "reward": {"function": f"{Path(__file__).resolve()}:grade"},
        "validation": {"every": every, "right_above": RIGHT_ABOVE},
        # The recording keeps every sample as it was learnt from, to be looked at again.
        "actor": {"lr": 1.0e-3, "router_replay": {"mode": "R3", "record_file": str(folder / "samples.rec")}},
        "controller": {"backend": backend},
        "trainer": {"steps": plan.num_steps, "num_workers": 1, "threads_per_worker": 1, "checkpoint_every": every,
                    "keep_checkpoints": plan.num_steps, "run_dir": str(folder / "run")},
    }  # fmt: skip
    usages: dict[int, Usage] = {}
    for report in Trainer(Config.from_tree(tree, source="bench soak")).steps():
        if report.number % plan.look_every == 0:
            usages[report.number] = usage = usage_of_all()
            rss = ", ".join(f"{kind} {held / 2**20:.1f}" for (kind, what), held in usage.items() if what == RSS)
            print(f"soak: step {report.number}, reward {report.reward:.3f}, MiB: {rss}", file=sys.stderr, flush=True)
    return usages


# Memory


def usage_of_all() -> Usage:
    """Return what this process, the driver, holds, and what those below it do, added up by kind."""
    found: Usage = Counter()
    driver = psutil.Process()
    for process in [driver, *driver.children(recursive=True)]:
        with suppress(psutil.Error), process.oneshot():  # one that has ended meanwhile does not count
            kind = DRIVER if process == driver else kind_of(process.cmdline())
            held = process.memory_info().rss, process.num_fds(), process.num_threads()
            found.update({(kind, what): number for what, number in zip(HELD, held, strict=True)})
    return found


def kind_of(command: list[str]) -> str:
    """Tell workers (the learner, the reward centre) from helpers (the watchdog, processes that grade) and from Ray."""
    if command[:1] and command[0].startswith("ray::RayHost"):
        return WORKERS
    is_ray = any(part.startswith("ray::") or "/ray/" in part for part in command)
    return RAY if is_ray else HELPERS


def memory_rows(usages: Mapping[int, Usage], plan: Plan) -> list[Row]:
    """Return the growth of each kind that was there from the settled step to the last."""
    first, last = usages[plan.settled], usages[plan.num_steps]
    more = {key: last[key] - first[key] for key in last if key in first}
    rows = []
    for kind in dict.fromkeys(kind for kind, _ in more):
        rows.append(Row(MEMORY, f"{kind}: RSS growth, MiB", more[kind, RSS] / 2**20, better="lower"))
        if kind != RAY:  # which opens and closes as it likes
            most = max(more[kind, DESCRIPTORS], more[kind, THREADS])
            rows.append(Row(MEMORY, f"{kind}: more descriptors or threads", most, better="lower"))
    return rows


# Numbers


def drifts_of(run_dir: Path, plan: Plan) -> tuple[list[int], dict[str, float]]:
    """Compute anew the first step, and those that begin with the weights of a checkpoint. Return them, and the largest
    differences from what the run had logged."""
    from practicum.replay import Recording

    logged = {row["step"]: row for row in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())}
    steps = [1, *range(plan.checkpoint_every + 1, plan.num_steps + 1, plan.checkpoint_every)]
    drifts: defaultdict[str, float] = defaultdict(float)

    def note(name: str, drift: float) -> None:
        drifts[name] = max(drifts[name], drift)

    with Recording(run_dir.parent / "samples.rec") as recording:
        for step in steps:
            weights = run_dir.parent if step == 1 else run_dir / "checkpoints" / f"step-{step - 1:06d}"
            samples = recording.samples(step)
            if len(samples) != PROMPTS * ANSWERS:
                raise BenchError(f"step {step} has {len(samples)} samples in its recording, not {PROMPTS * ANSWERS}.")
            anew, gap = computed_anew(samples, weights / "model")
            for name, value in anew.items():
                note(name, abs(value - logged[step][name]))
            note(LOG_PROBS, gap)
    for path in (run_dir / "validation").glob("step-*.jsonl"):
        scores = np.array([json.loads(line)["score"] for line in path.read_text().splitlines()])
        said = logged[int(path.stem.removeprefix("step-"))]
        note(VALIDATION, abs(float(scores.mean()) - said["validation/accuracy"]))
        note(VALIDATION, abs(float((scores > RIGHT_ABOVE).mean()) - said["validation/pass@1"]))
    return steps, drifts


def computed_anew(samples: Sequence[Any], model: Path) -> tuple[dict[str, float], float]:
    """Return a step's figures by name, and the largest difference of a token's log-prob from the engine's."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rewards = [grade(sample) for sample in samples]
    entropies: list[float] = []
    gap = 0.0
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.token_ids]).astype(np.int64))
        with torch.no_grad():
            logits = loaded(input_ids=ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1].double() / TEMPERATURE
        table = logits.log_softmax(-1)
        log_probs = table.gather(-1, ids[len(sample.prompt_ids) :, None])[:, 0].numpy()
        gap = max(gap, float(np.abs(log_probs - sample.log_probs).max()))
        entropies += (-(table.exp() * table).sum(-1)).tolist()
    figures = {
        "reward/mean": float(np.mean(rewards)),
        "reward/std": float(np.std(rewards)),
        "rollout/answer_tokens": float(np.mean([len(sample.token_ids) for sample in samples])),
        "actor/entropy": float(np.mean(entropies)),
    }
    return figures, gap
