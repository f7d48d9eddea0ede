"""The whole training step on a CUDA device, ours through Ray against TRL's GRPOTrainer with transformers' generation.

32 prompts of 128 tokens x 8 answers x 256 tokens and one update a step, in bfloat16. Both sides are in the Python that
runs this: a machine with a device seldom has the network that peers' environments are made from. They take their turns
one after the other, since the device has no room for both.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.gpu_models import save_shape
from bench.grpo_work import Job, write_prompts
from bench.harness import Row
from bench.turns import Contestant, Plan, Tally, alternate

PROMPT_WORDS = (127, 127)
PHASES = ("step", "rollout", "reward", "looking", "update", "weights")
WORK: dict[str, int] = {"prompts_per_step": 32, "answers_per_prompt": 8, "max_new_tokens": 256, "pass_answers": 32}
QUICK_WORK: dict[str, int] = {"prompts_per_step": 4, "answers_per_prompt": 4, "max_new_tokens": 32, "pass_answers": 4}
_SMALL = {"num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 4096, "intermediate_size": 512}


def grpo_rows(case: str, seen: dict[str, Any], *, quick: bool, peer: bool) -> list[Row]:
    """`seen` is told what a step of each side is made of."""
    plan = Plan(warmup_steps=1 if quick else 2, num_rounds=1 if quick else 3, steps_per_turn=1)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        folder = Path(name)
        prompts, model = folder / "prompts.jsonl", folder / case
        write_prompts(prompts, num_words=PROMPT_WORDS)
        save_shape(case, model, **(_SMALL if quick else {}))
        job = Job(
            str(model), str(prompts), str(folder / f"{case}-run"), 8, **(QUICK_WORK if quick else WORK),
            device="cuda", dtype="bfloat16", max_prompt_tokens=256, micro_batch_tokens=32_768,
            replay="R3" if case == "moe" else "disabled",
        )  # fmt: skip
        tallies = _contest(folder, job, plan, peer=peer and find_spec("trl") is not None)
    seen[f"grpo {case}, s of a step"] = {name: tally.parts() for name, tally in tallies.items()}
    return _rows(case, tallies)


def _contest(folder: Path, job: Job, plan: Plan, *, peer: bool) -> dict[str, Tally]:
    env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    modules = {"practicum": "bench.contestants.practicum_grpo", **({"trl": "bench.peers.trl_grpo"} if peer else {})}
    tallies: dict[str, Tally] = {}
    for name, module in modules.items():  # one after the other: the device has no room for both
        path = folder / f"{name}.json"
        replace(job, run_dir=f"{job.run_dir}-{name}").write(path)
        with Contestant(name, [sys.executable, "-m", module, str(path)], folder, env) as contestant:
            tallies |= alternate([contestant], plan)
        print(f"{name}: {tallies[name].parts()}", flush=True)
    return tallies


def _rows(case: str, tallies: dict[str, Tally]) -> list[Row]:
    ours, theirs = tallies["practicum"], tallies.get("trl")
    name = "trl" if theirs else None
    parts = ours.parts()
    rows = [Row(f"grpo {case}", "tokens/s", ours.rate, theirs.rate if theirs else None, name)]
    rows += [Row(f"grpo {case}", f"{part} s", parts[part], better="lower") for part in PHASES]
    if "device_idle" in parts:
        rows += [Row(f"grpo {case}", "device idle share", parts["device_idle"] / parts["step"], better="lower")]
    return rows
