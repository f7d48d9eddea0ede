"""`python -m bench.replay_gpu`: router replay on a CUDA device, in rows like those of `python -m bench replay`.

`exact` is of three families in float32; `effect` and `cost` of a mixture of experts of 1.6 billion parameters in
bfloat16. A part that fails is named in the file and makes the exit code 1; the others stay.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.harness import RESULTS, Row, environment, free_memory, run_parts
from bench.models import LARGE_SHAPES, write_enlarged
from bench.replay_cost import MODES, ROLLOUT, UPDATE, UPDATES, Job, case_rows, open_side
from bench.replay_exact import DISABLED, Learner, effect_rows, exact_rows
from bench.turns import Step, Tally
from tests.models import save_family

FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
LARGE: dict[str, Any] = {
    "name": "1.6B", "shape": {**LARGE_SHAPES["moe"], "gates": 0.3, "experts": 1.0},
    "effect": {"num_samples": 32, "prompt_tokens": (64, 192), "new_tokens": 128},
    "cost": {"num_samples": 32, "prompt_tokens": 128, "new_tokens": 128}, "rounds": (2, 5),
}  # fmt: skip
SMALL: dict[str, Any] = {
    "name": "small",
    "shape": {"num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 16, "num_experts": 16,
              "num_experts_per_tok": 4, "vocab_size": 4096, "num_attention_heads": 2, "num_key_value_heads": 1,
              "gates": 0.3, "experts": 1.0},
    "effect": {"num_samples": 4, "prompt_tokens": (3, 9), "new_tokens": 5},
    "cost": {"num_samples": 4, "prompt_tokens": 8, "new_tokens": 6}, "rounds": (1, 2),
}  # fmt: skip


def cost_rows(job: Job, cases: Sequence[str], modes: Sequence[str], num_warm: int, num_rounds: int) -> list[Row]:
    """One mode comes after the other: a process has room for one. Disabled is first and last, to show any drift."""
    job.make_samples()
    tallies: dict[str, dict[str, Tally]] = {case: {} for case in cases}
    for mode in (DISABLED, *modes, DISABLED):
        free_memory()
        with open_side(job, mode) as take_step:
            for case, own in tallies.items():
                if mode in MODES[case]:
                    took = [timed(take_step, case) for _ in range(num_warm + num_rounds)][num_warm:]
                    print(f"{case}, {mode}: {Tally(took).parts()['step']:.4f} s", flush=True)
                    own.setdefault(mode, Tally()).steps.extend(took)
        del take_step
    return [row for case, own in tallies.items() for row in case_rows(case, own)]


def timed(take_step: Callable[[str], Any], case: str) -> Step:
    """Take a step, to the end of what it has set going on the device."""
    began = time.perf_counter()
    take_step(case)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Step(time.perf_counter() - began, 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.replay_gpu")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="a tiny model: does it run")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for replay_gpu.json")
    given = parser.parse_args()
    device, work = torch.device(given.device), SMALL if given.small else LARGE
    where = environment("python -m bench.replay_gpu") | {"work": work}
    where["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    with tempfile.TemporaryDirectory(prefix="bench-replay-") as name:
        folder, model = Path(name), Path(name) / "model"
        kind = {"vocabulary": work["shape"]["vocab_size"], "device": device.type, "dtype": "bfloat16"}
        job = Job(name, str(model), torch.get_num_threads(), **work["cost"], **kind)

        def exact(family: str) -> list[Row]:
            return exact_rows(f"exact {family}", Learner(save_family(family, folder / family), device))

        def effect() -> list[Row]:
            write_enlarged(model, device=device.type, dtype="bfloat16", **work["shape"])
            free_memory()
            return effect_rows(f"effect {work['name']}", model, device=device, **work["effect"])

        parts: dict[str, Callable[[], list[Row]]] = {f"exact {family}": partial(exact, family) for family in FAMILIES}
        parts["effect"] = effect
        parts["cost rollout"] = partial(cost_rows, job, [ROLLOUT], ["R3"], *work["rounds"])
        parts["cost update"] = partial(cost_rows, job, [UPDATE, UPDATES], ["R3", "R2"], *work["rounds"])
        return run_parts("replay_gpu", parts, given.out, where)


if __name__ == "__main__":
    sys.exit(main())
