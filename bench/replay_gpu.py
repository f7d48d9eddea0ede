"""`python -m bench.replay_gpu`: router replay on a CUDA device, in rows like those of `python -m bench replay`.

    exact    three families, in float32
    effect   a mixture of experts of 1.6 billion parameters in bfloat16, native engine against trainer
    cost     of the same: rollout that keeps routes, updates that replay them

A part that fails is named in the file and makes the exit code 1; the others stay. `--small --device cpu` tries it out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.harness import RESULTS, Row, environment, free_memory, run_parts
from bench.models import LARGE_VOCABULARY, MIXTURES, Shape, save_family
from bench.replay_cost import DISABLED, MODES, ROLLOUT, UPDATE, UPDATES, Job, Side
from bench.replay_exact import Sizes, exactness, load_learner, measured

FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
assert set(FAMILIES) <= MIXTURES.keys()


@dataclass(frozen=True, slots=True)
class Work:
    name: str
    shape: Shape
    effect: Sizes
    num_samples: int  # of the cost, as are the rest
    prompt_tokens: int
    new_tokens: int
    num_warm: int
    num_rounds: int


LARGE = Work(
    "1.6B", Shape(16, 1024, 384, 64, 8, gates=0.3, experts=1.0, vocabulary=LARGE_VOCABULARY, heads=16, head_dim=128),
    Sizes(32, (64, 192), 128), num_samples=32, prompt_tokens=128, new_tokens=128, num_warm=2, num_rounds=5,
)  # fmt: skip
SMALL = Work(
    "small", Shape(2, 64, 16, 16, 4, gates=0.3, experts=1.0, vocabulary=4096, heads=2), Sizes(4, (3, 9), 5),
    num_samples=4, prompt_tokens=8, new_tokens=6, num_warm=1, num_rounds=2,
)  # fmt: skip


def exact_rows(device: torch.device, folder: Path) -> list[Row]:
    learners = {family: load_learner(save_family(family, folder / family), device) for family in FAMILIES}
    return [row for family, own in learners.items() for row in exactness(own).rows(f"exact {family}")]


def rollout_rows(work: Work, job: Job) -> list[Row]:
    """Both engines are in this process and write a batch each in turn."""
    sides = {mode: Side(job, mode) for mode in MODES[ROLLOUT]}
    seconds: dict[str, list[float]] = {mode: [] for mode in sides}
    for number in range(work.num_warm + work.num_rounds):
        for mode, side in sides.items():
            took = timed(side, ROLLOUT)
            if number >= work.num_warm:
                seconds[mode].append(took)
    for side in sides.values():
        side.close()
    return cost_rows(ROLLOUT, seconds)


def update_rows(work: Work, job: Job) -> list[Row]:
    """One learner comes after the other: a process has room for one. Disabled is first and last, to show any drift."""
    job.make_samples()
    free_memory()
    by_case: dict[str, dict[str, list[float]]] = {UPDATE: {}, UPDATES: {}}
    for mode in (DISABLED, "R3", "R2", DISABLED):
        side = Side(job, mode)
        try:
            for case, seconds in by_case.items():
                if mode in MODES[case]:
                    took = [timed(side, case) for _ in range(work.num_warm + work.num_rounds)][work.num_warm :]
                    seconds.setdefault(mode, []).extend(took)
                    print(f"{case}, {mode}: {statistics.median(took):.4f} s", flush=True)
        finally:
            side.close()
            del side
            free_memory()
    return [row for case, seconds in by_case.items() for row in cost_rows(case, seconds)]


def timed(side: Side, case: str) -> float:
    """Return the seconds of a step, to the end of what it has set going on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    side.step(case)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def cost_rows(case: str, seconds: dict[str, list[float]]) -> list[Row]:
    medians = {mode: statistics.median(own) for mode, own in seconds.items()}
    plain = medians.pop(DISABLED)
    return [Row(case, f"{mode}: s a step", own, plain, DISABLED, "lower") for mode, own in medians.items()]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.replay_gpu")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="a tiny model: does it run")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for replay_gpu.json")
    given = parser.parse_args()
    device = torch.device(given.device)
    work = SMALL if given.small else LARGE
    where = environment("python -m bench.replay_gpu") | {"work": asdict(work)}
    where["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    with tempfile.TemporaryDirectory(prefix="bench-replay-") as name:
        model, folder = Path(name) / "model", Path(name) / "cost"
        folder.mkdir()
        sizes = (work.num_samples, work.prompt_tokens, work.new_tokens)
        kind = {"vocabulary": work.shape.vocabulary, "device": device.type, "dtype": "bfloat16"}
        job = Job(str(folder), str(model), torch.get_num_threads(), *sizes, **kind)

        def make_model() -> list[Row]:
            work.shape.save(model, device.type, "bfloat16")
            return []  # no rows: the parts after it need the model

        parts = {
            "exact": lambda: exact_rows(device, Path(name)),
            "model": make_model,
            "effect": lambda: measured(model, work.shape, work.effect, device).rows(f"effect {work.name}"),
            "cost rollout": lambda: rollout_rows(work, job),
            "cost update": lambda: update_rows(work, job),
        }
        return run_parts("replay_gpu", parts, given.out, where)


if __name__ == "__main__":
    sys.exit(main())
