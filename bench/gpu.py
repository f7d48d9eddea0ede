"""`python -m bench.gpu`: the native engine and the trainer on a CUDA device, against transformers, TRL and the bounds.

    engine      decoding and whole generation, dense and mixture of experts; one sequence; long contexts
    agreement   greedy tokens of the engine and of `generate`; log-probs of the engine and of the trainer
    memory      what sleeping gives back, and what a hundred times of it leave
    train       updates against a plain step of transformers' model
    grpo        whole training steps through Ray against TRL, with their phases and how idle the device is

A part that fails is named in the file and makes the exit code 1; the others stay. `--quick` takes small shapes,
`--part` only some, `--peer none` ours alone; what is not all of it goes where `--out` says. Models are of bfloat16 with
random weights, see gpu_models.py.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import shlex
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_models import save_shape, step_bytes
from bench.harness import ROOT, Row, environment, print_table, write_json
from practicum.models import load_config
from practicum.rollout.engine.cuda.runner import CudaRunner
from practicum.rollout.native import NativeRollout
from practicum.types import Prompt, PromptGroup, Sample, SamplingParams

CASES = ("dense", "moe")
_SMALL = {"num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 4096, "intermediate_size": 512}
_WORDS = 2000


@dataclass(slots=True)
class Work:
    folder: Path
    quick: bool
    peer: bool
    num_rounds: int = 3
    seen: dict[str, Any] = field(default_factory=dict)  # for the environment
    _bandwidth: float = 0.0

    def model(self, case: str) -> Path:
        path = self.folder / case
        return path if path.exists() else save_shape(case, path, **(_SMALL if self.quick else {}))

    @property
    def bandwidth(self) -> float:
        """Bytes a second that a copy on the device reads and writes."""
        if not self._bandwidth:
            source = torch.empty(1 << (28 if self.quick else 32), dtype=torch.uint8, device="cuda")
            target = torch.empty_like(source)
            target.copy_(source)
            seconds = min(timed(lambda: target.copy_(source)) for _ in range(5))
            self._bandwidth = 2 * source.nbytes / seconds
            self.seen["copy_tb_per_s"] = self._bandwidth / 1e12
        return self._bandwidth


def timed(function: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def groups(num: int, prompt: int, new: int, seed: int = 0, **params: Any) -> list[PromptGroup]:
    random = np.random.default_rng(seed)
    return [
        PromptGroup(
            str(i),
            Prompt(str(i), text="?"),
            random.integers(2, _WORDS, prompt).astype(np.int32),
            SamplingParams(new, ignore_eos=True, **params),
            seed * num + i,
        )
        for i in range(num)
    ]


@contextmanager
def opened(model: Path, **options: Any) -> Iterator[NativeRollout]:
    engine = NativeRollout(
        str(model), device=torch.device("cuda"), dtype=torch.bfloat16, max_batch=256, runner=CudaRunner, **options
    )
    asyncio.run(engine.resume())
    try:
        yield engine
    finally:
        asyncio.run(engine.close())
        del engine
        gc.collect()
        torch.cuda.empty_cache()


def samples_of(engine: NativeRollout, asked: list[PromptGroup]) -> list[Sample]:
    return [sample for group in engine.generate_all(asked) for sample in group.samples]


def median_seconds(engine: NativeRollout, asked: Callable[[int], list[PromptGroup]], num_rounds: int) -> float:
    engine.generate_all(asked(99))  # graphs are recorded, kernels are built
    return statistics.median(timed(lambda i=i: engine.generate_all(asked(i))) for i in range(num_rounds))  # type: ignore[misc]


def engine_rows(work: Work) -> list[Row]:
    sizes = {"many": (256, 128, 256), "one": (1, 128, 512), "long": (32, 8192, 128)}
    if work.quick:
        sizes = {"many": (8, 16, 24), "one": (1, 16, 24), "long": (2, 512, 16)}
    rows = []
    for case in CASES:
        config = load_config(str(work.model(case)))
        whole: dict[str, float] = {}
        with opened(work.model(case), keep_routes=case == "moe") as engine:
            for size, (num, prompt, new) in sizes.items():
                seconds = [
                    median_seconds(engine, lambda seed, n=n: groups(num, prompt, n, seed), work.num_rounds)  # noqa: B023
                    for n in (new, 1)
                ]
                step_s = (seconds[0] - seconds[1]) / (new - 1)
                bound_s = step_bytes(config, num, prompt + new // 2) / work.bandwidth
                whole[size] = num * new / seconds[0]
                label = f"{case} {num} x ({prompt} + {new})"
                rows += [
                    Row(label, "decode tokens/s", num / step_s, num / bound_s, "bandwidth bound"),
                    Row(label, "decode ms a step", 1e3 * step_s, 1e3 * bound_s, "bandwidth bound", better="lower"),
                    Row(label, "prompt tokens/s", num * prompt / seconds[1]),
                ]
        num, prompt, new = sizes["many"]
        theirs = _generate_rate(work, case, num, prompt, new) if work.peer else None
        name = "generate" if work.peer else None
        rows.append(Row(f"{case} {num} x ({prompt} + {new})", "tokens/s", whole["many"], theirs, name))
    return rows


def _generate_rate(work: Work, case: str, num: int, prompt: int, new: int) -> float:
    """Of transformers' `generate`, warmed up at full size."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(work.model(case), dtype=torch.bfloat16).cuda().eval()
    asked = [
        torch.from_numpy(np.stack([group.prompt_ids for group in groups(num, prompt, 1, i)])).long() for i in range(2)
    ]

    exactly = {"do_sample": True, "max_new_tokens": new, "min_new_tokens": new}
    seconds = [
        timed(partial(model.generate, ids.cuda(), attention_mask=torch.ones_like(ids).cuda(), **exactly))
        for ids in asked
    ]
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return num * new / seconds[-1]


def memory_rows(work: Work) -> list[Row]:
    rows = []
    with opened(work.model("dense")) as engine:
        before = [sample.token_ids.tolist() for sample in samples_of(engine, groups(8, 16, 8))]
        asyncio.run(engine.release())
        asleep = torch.cuda.mem_get_info()[0]
        asyncio.run(engine.resume())
        awake = torch.cuda.mem_get_info()[0]
        held: int = engine.model.held_bytes  # type: ignore[attr-defined]
        rows.append(Row("memory", "share of weights and cache that sleep gives back", (asleep - awake) / held))
        seconds = []
        for number in range(10 if work.quick else 100):
            asyncio.run(engine.release())
            seconds.append(timed(lambda: asyncio.run(engine.resume())))
            if number % 10 == 0:
                assert [sample.token_ids.tolist() for sample in samples_of(engine, groups(8, 16, 8))] == before
        asyncio.run(engine.release())
        grown = asleep - torch.cuda.mem_get_info()[0]
        rows.append(Row("memory", f"MiB more asleep after {len(seconds)} times", grown / 2**20, better="lower"))
        rows.append(Row("memory", "ms to wake up", 1e3 * statistics.median(seconds), better="lower"))
        asyncio.run(engine.resume())
    return rows


def written(work: Work, case: str, num: int, prompt: int, new: int, **params: Any) -> list[Sample]:
    with opened(work.model(case), keep_routes=case == "moe") as engine:
        return samples_of(engine, groups(num, prompt, new, **params))


def agreement_rows(work: Work) -> list[Row]:
    from bench import gpu_train

    rows = []
    for case in CASES:
        drawn = written(work, case, *((8, 16, 24) if work.quick else (64, 128, 256)))
        greedy = written(work, case, *((4, 16, 16) if work.quick else (32, 128, 64)), temperature=0.0)
        rows += gpu_train.agreement_rows(work.model(case), case, drawn, greedy)
    return rows


def train_rows(work: Work) -> list[Row]:
    from bench import gpu_train

    return [
        row for case in CASES for row in gpu_train.train_rows(work.model(case), case, quick=work.quick, peer=work.peer)
    ]


def grpo_rows(case: str, work: Work) -> list[Row]:
    from bench.gpu_grpo import grpo_rows

    return grpo_rows(case, work.seen, quick=work.quick, peer=work.peer)


PARTS: dict[str, Callable[[Work], list[Row]]] = {
    "engine": engine_rows,
    "agreement": agreement_rows,
    "memory": memory_rows,
    "train": train_rows,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peer", choices=["none"])
    parser.add_argument("--part", action="append", choices=[*PARTS, "grpo"])
    parser.add_argument("--case", action="append", choices=CASES, help="of grpo")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for gpu.json, if not bench/results")
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    if options.out is None and (options.quick or options.part or options.case):
        parser.error("--quick, --part and --case need --out FOLDER: what they find must not stand for all of it.")
    out = options.out or ROOT / "bench" / "results"
    where = environment(shlex.join(["python", "-m", "bench.gpu", *arguments])) | {
        "device": torch.cuda.get_device_name()
    }
    rows: list[Row] = []
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        work = Work(Path(name), options.quick, options.peer != "none", 1 if options.quick else 2)
        parts = dict(PARTS)
        for case in options.case or CASES:
            parts[f"grpo {case}"] = partial(grpo_rows, case)
        for part in [name for name in parts if options.part is None or name.split()[0] in options.part]:
            began = time.monotonic()
            try:
                rows += parts[part](work)
            except Exception as error:
                traceback.print_exc()
                failed[part] = f"{type(error).__name__}: {error}"
            print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
            write_json(out / "gpu.json", rows, where | work.seen | {"failed": failed})  # what there is so far
            gc.collect()
            torch.cuda.empty_cache()
    print_table("gpu", rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
