"""`python -m bench.replay_gpu`: router replay on a CUDA device, in rows like those of `python -m bench replay`.

    exact    three families, in float32
    effect   a mixture of experts of 1.6 billion parameters in bfloat16, native engine against trainer
    cost     of the same: rollout that keeps routes, updates that replay them

A part that fails is named in the file and makes the exit code 1; the others stay. `--small --device cpu` tries it out.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.contestants.practicum_replay import Side
from bench.harness import ROOT, Row, environment, print_table, write_json
from bench.replay_cost import MODES, ROLLOUT, UPDATE, UPDATES, Job, make_samples
from bench.replay_effect import Sizes, measured
from bench.replay_exact import exactness
from bench.replay_models import Shape, save_family, save_plain
from bench.replay_work import load_learner

FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
DISABLED = "disabled"


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
    "1.6B",
    Shape(16, 1024, 384, 64, 8, gates=0.3, experts=1.0, vocabulary=151_936, heads=16, head_dim=128),
    Sizes(32, (64, 192), 128),
    num_samples=32,
    prompt_tokens=128,
    new_tokens=128,
    num_warm=2,
    num_rounds=5,
)
SMALL = Work(
    "small",
    Shape(2, 64, 16, 16, 4, gates=0.3, experts=1.0, vocabulary=4096, heads=2),
    Sizes(4, (3, 9), 5),
    num_samples=4,
    prompt_tokens=8,
    new_tokens=6,
    num_warm=1,
    num_rounds=2,
)


def exact_rows(device: torch.device, folder: Path) -> list[Row]:
    rows = []
    for family in FAMILIES:
        learner = load_learner(save_family(family, folder / family), device)
        rows += exactness(learner).rows(f"exact {family}")
    return rows


def make_model(work: Work, device: torch.device, model: Path) -> list[Row]:
    """No rows: the parts after it need the model."""
    save_plain(work.shape, model, device.type, torch.bfloat16)
    return []


def effect_rows(work: Work, device: torch.device, model: Path) -> list[Row]:
    return measured(model, work.shape, work.effect, device).rows(f"effect {work.name}")


def make_job(work: Work, device: torch.device, model: Path, folder: Path) -> Job:
    folder.mkdir()
    return Job(
        str(folder),
        str(model),
        torch.get_num_threads(),
        work.num_samples,
        work.prompt_tokens,
        work.new_tokens,
        vocabulary=work.shape.vocabulary,
        device=device.type,
        dtype="bfloat16",
    )


def rollout_rows(work: Work, job: Job) -> list[Row]:
    """Both engines in this process, a batch each in turn."""
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
    """One learner after the other: a process has room for one. Disabled comes first and last, to show any drift."""
    make_samples(job)
    free()
    by_case: dict[str, dict[str, list[float]]] = {UPDATE: {}, UPDATES: {}}
    for number, mode in enumerate((DISABLED, "R3", "R2", DISABLED)):
        side = Side(job, mode)
        try:
            for case, seconds in by_case.items():
                if mode in MODES[case]:
                    took = [timed(side, case) for _ in range(work.num_warm + work.num_rounds)][work.num_warm :]
                    seconds.setdefault(mode, []).extend(took)
                    print(f"{case}, {mode} ({number + 1}): {statistics.median(took):.4f} s", flush=True)
        finally:
            side.close()
            del side
            free()
    return [row for case, seconds in by_case.items() for row in cost_rows(case, seconds)]


def timed(side: Side, case: str) -> float:
    """Seconds of a step, to the end of what it has set going on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    side.step(case)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def cost_rows(case: str, seconds: dict[str, list[float]]) -> list[Row]:
    medians = {mode: statistics.median(own) for mode, own in seconds.items()}
    return [
        Row(case, f"{mode}: s a step", own, medians[DISABLED], DISABLED, "lower")
        for mode, own in medians.items()
        if mode != DISABLED
    ]


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(work: Work, device: torch.device, folder: Path) -> tuple[list[Row], dict[str, str], dict[str, float]]:
    """Rows, what failed and why, and the seconds of each part."""
    rows: list[Row] = []
    failed: dict[str, str] = {}
    seconds: dict[str, float] = {}
    model = folder / "model"
    job = make_job(work, device, model, folder / "cost")
    parts: Sequence[tuple[str, Callable[[], list[Row]]]] = [
        ("exact", lambda: exact_rows(device, folder)),
        ("model", lambda: make_model(work, device, model)),
        ("effect", lambda: effect_rows(work, device, model)),
        ("cost rollout", lambda: rollout_rows(work, job)),
        ("cost update", lambda: update_rows(work, job)),
    ]
    for name, part in parts:
        began = time.perf_counter()
        try:
            rows += part()
        except Exception as error:  # time on such a machine is dear: the other parts are measured all the same
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"
        free()
        seconds[name] = round(time.perf_counter() - began, 1)
        print(f"{name}: {seconds[name]} s", flush=True)
    return rows, failed, seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.replay_gpu")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="a tiny model: does it run")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder for replay_gpu.json")
    given = parser.parse_args()
    device = torch.device(given.device)
    work = SMALL if given.small else LARGE
    where = environment("python -m bench.replay_gpu")
    where["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    with tempfile.TemporaryDirectory(prefix="bench-replay-") as name:
        rows, failed, seconds = measure(work, device, Path(name))
    where |= {"work": asdict(work), "seconds_of_parts": seconds, "failed": failed}
    print_table("replay_gpu", rows)
    write_json(given.out / "replay_gpu.json", rows, where)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
