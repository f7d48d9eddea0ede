"""`python -m bench.gpu`: the native engine and the trainer on a CUDA device, against transformers, TRL and the bounds.

    engine      decoding and whole generation, dense and mixture of experts; one sequence; long contexts
    agreement   greedy tokens of the engine and of `generate`; log-probs of the engine and of the trainer
    memory      what sleeping gives back, and what a hundred times of it leave
    train       updates against a plain step of transformers' model
    grpo        whole training steps through Ray against TRL, with their phases and how idle the device is

A part that fails is named in the file and makes the exit code 1; the others stay. In `grpo` both sides are in the
Python that runs this, and run one after the other, for lack of room on the device.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench import work
from bench.grpo import OURS, contest
from bench.grpo_work import Job
from bench.harness import RESULTS, Row, beside, environment, free_memory, run_parts
from bench.models import LARGE_SHAPES, QUICK_SHAPE, step_bytes, write_model, write_prompts
from bench.turns import Plan
from practicum.models import load_config
from practicum.train import ActorWorker, UpdateStats
from practicum.types import PromptGroup, Sample, SamplingParams
from tests.train.actors import mini_batches

CASES = ("dense", "moe")
_WORDS = 2000  # tokens from the first of them are used
_ROUNDING = 2.0**-6  # of bfloat16 logits that were summed in another order
MICRO_BATCH_TOKENS = 32_768
PHASES = ("step", "rollout", "reward", "reference", "update", "weights")
GRPO_WORK = {"prompts_per_step": 32, "answers_per_prompt": 8, "max_new_tokens": 256, "pass_answers": 32}
QUICK_GRPO_WORK = {"prompts_per_step": 4, "answers_per_prompt": 4, "max_new_tokens": 32, "pass_answers": 4}


@dataclass
class Device:
    """What the parts share. Engines, actors and models of transformers have it to themselves, one after the other."""

    folder: Path
    quick: bool
    has_peer: bool
    seen: dict[str, Any]  # for the environment

    def model(self, case: str) -> Path:
        path, shape = self.folder / case, LARGE_SHAPES[case] | (QUICK_SHAPE if self.quick else {})
        return path if path.exists() else write_model(path, case == "moe", device="cuda", dtype="bfloat16", **shape)

    @cached_property
    def bandwidth(self) -> float:
        """The bytes a second that a copy on the device reads and writes."""
        source = torch.empty(1 << (28 if self.quick else 32), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        target.copy_(source)
        seconds = min(timed(lambda: target.copy_(source)) for _ in range(5))
        self.seen["copy_tb_per_s"] = 2 * source.nbytes / seconds / 1e12
        return 2 * source.nbytes / seconds

    def engine(self, case: str) -> AbstractContextManager[Any]:
        options = {"dtype": "bfloat16", "max_batch": 256, "keep_routes": case == "moe"}
        return alone(work.native_engine(self.model(case), device="cuda", **options))

    def actor(self, case: str, mode: str = "disabled") -> AbstractContextManager[Any]:
        replay = work.replay_settings(mode, self.folder)
        settings: dict[str, Any] = {"threads": 8, "device": "cuda", "compute_dtype": "bfloat16", "replay": replay}
        return alone(work.open_actors(self.model(case), **settings))

    def transformers(self, case: str) -> AbstractContextManager[Any]:
        model = AutoModelForCausalLM.from_pretrained(self.model(case), dtype=torch.bfloat16)
        return alone(nullcontext(model.cuda().eval()))


@contextmanager
def alone(opening: AbstractContextManager[Any]) -> Iterator[Any]:
    """Give back what something held of the device when it is closed."""
    with opening as one:
        del opening
        yield one
    del one
    free_memory()


def timed(function: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def groups(num: int, prompt: int, new: int, seed: int = 0, **params: Any) -> list[PromptGroup]:
    sampling = SamplingParams(new, ignore_eos=True, **params)
    return work.groups_of(num, (prompt, prompt), sampling, _WORDS, seed * num)


def update(actor: Any, samples: Sequence[Sample], step: int) -> UpdateStats:
    batches = mini_batches(work.to_learn_from(samples, step), 1, MICRO_BATCH_TOKENS)
    (stats,) = actor.map(ActorWorker.update, batches, step)
    return stats  # type: ignore[no-any-return]


def engine_rows(device: Device, case: str) -> list[Row]:
    sizes = [(256, 128, 256), (1, 128, 512), (32, 8192, 128)]
    if device.quick:
        sizes = [(8, 16, 24), (1, 16, 24), (2, 512, 16)]
    config = load_config(str(device.model(case)))
    rows, rates = [], []
    with device.engine(case) as engine:

        def seconds(num: int, prompt: int, new: int) -> float:
            work.written(engine, groups(num, prompt, new, 99))  # graphs are recorded, kernels are built
            made = [groups(num, prompt, new, seed) for seed in range(1 if device.quick else 3)]
            return median(timed(partial(work.written, engine, asked)) for asked in made)

        for num, prompt, new in sizes:
            half = new // 2
            whole_s, half_s, first_s = (seconds(num, prompt, n) for n in (new, half, 1))
            # Between two runs that decode: what a prefill for a single token does differently is no part of it.
            step_s = (whole_s - half_s) / (new - half)
            bound_s = step_bytes(config, num, prompt + (half + new) // 2) / device.bandwidth
            label, bound = f"{case} {num} x ({prompt} + {new})", "bandwidth bound"
            rows += [
                Row(label, "decode tokens/s", num / step_s, num / bound_s, bound),
                Row(label, "decode ms a step", 1e3 * step_s, 1e3 * bound_s, bound, better="lower"),
                Row(label, "prompt tokens/s", num * prompt / first_s),
            ]
            rates.append(num * new / whole_s)
    num, prompt, new = sizes[0]
    theirs = {"generate": generate_rate(device, case, *sizes[0])} if device.has_peer else {}
    return rows + beside(f"{case} {num} x ({prompt} + {new})", "tokens/s", rates[0], theirs)


def generate_rate(device: Device, case: str, num: int, prompt: int, new: int) -> float:
    """Return that of transformers' `generate`, warmed up at full size."""
    exactly = {"do_sample": True, "max_new_tokens": new, "min_new_tokens": new}
    with device.transformers(case) as model:
        for seed in range(2):
            ids = torch.from_numpy(np.stack([group.prompt_ids for group in groups(num, prompt, 1, seed)])).long().cuda()
            seconds = timed(partial(model.generate, ids, attention_mask=torch.ones_like(ids), **exactly))
    return num * new / seconds


def memory_rows(device: Device, case: str) -> list[Row]:
    def free_asleep() -> int:
        asyncio.run(engine.release())
        return torch.cuda.mem_get_info()[0]

    def tokens() -> list[list[int]]:
        return [sample.token_ids.tolist() for sample in work.written(engine, groups(8, 16, 8))]

    with device.engine(case) as engine:
        before, asleep = tokens(), free_asleep()
        asyncio.run(engine.resume())
        share = (asleep - torch.cuda.mem_get_info()[0]) / engine.model.held_bytes
        seconds = []
        for number in range(10 if device.quick else 100):
            asyncio.run(engine.release())
            seconds.append(timed(lambda: asyncio.run(engine.resume())))
            if number % 10 == 0:
                assert tokens() == before
        grown = asleep - free_asleep()
        asyncio.run(engine.resume())
    return [
        Row("memory", "share of weights and cache that sleep gives back", share),
        Row("memory", f"MiB more asleep after {len(seconds)} times", grown / 2**20, better="lower"),
        Row("memory", "ms to wake up", 1e3 * median(seconds), better="lower"),
    ]


def train_rows(device: Device, case: str) -> list[Row]:
    num, prompt, new = (8, 16, 24) if device.quick else (256, 128, 256)
    samples = work.made_samples([(prompt, new)] * num, _WORDS)
    with device.actor(case) as actor:
        update(actor, samples, 1)
        torch.cuda.reset_peak_memory_stats()
        seconds = [timed(partial(update, actor, samples, step)) for step in range(2, 5)]
        peak = torch.cuda.max_memory_allocated()
    theirs = {"a plain step": plain_rate(device, case, prompt + new)} if device.has_peer else {}
    rows = beside(f"train {case}", "tokens/s", num * (prompt + new) / median(seconds), theirs)
    return [*rows, Row(f"train {case}", "peak GB", peak / 1e9, better="lower")]


def plain_rate(device: Device, case: str, length: int) -> float:
    """Return that of transformers' model in bfloat16 with AdamW: forward and backward over all tokens, an update."""
    num = 4 if device.quick else 32
    with device.transformers(case) as plain:
        plain.train()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-6)
        ids = torch.randint(2, _WORDS, (num, length), device="cuda")

        def step() -> None:
            plain(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        seconds = [timed(step) for _ in range(6)]
    return num * length / median(seconds[2:])


def agreement_rows(device: Device, case: str) -> list[Row]:
    sampled, greedy = ((8, 16, 24), (4, 16, 16)) if device.quick else ((64, 128, 256), (32, 128, 64))
    with device.engine(case) as engine:
        samples = work.written(engine, groups(*sampled))
        greedy_samples = work.written(engine, groups(*greedy, temperature=0.0))
    rows = greedy_rows(device, case, greedy_samples)
    for mode in ("disabled", "R3") if case == "moe" else ("disabled",):
        own = samples if mode == "R3" else [replace(sample, routes=None) for sample in samples]
        with device.actor(case, mode) as actor:
            stats = update(actor, own, 1)
        label = f"agreement {case} R3" if mode == "R3" else f"agreement {case}"
        rows.append(Row(label, "KL(rollout|trainer) a token", stats.rollout_kl / stats.num_tokens, better="lower"))
        rows.append(Row(label, "largest log-prob difference", stats.rollout_gap, better="lower"))
        if stats.replay is not None:
            share = sum(stats.replay.differing) / max(1, stats.replay.num_known * len(stats.replay.layers))
            rows.append(Row(label, "share of choices that the trainer would make otherwise", share, better="lower"))
    return rows


def greedy_rows(device: Device, case: str, samples: Sequence[Sample]) -> list[Row]:
    """Count the greedy tokens that are those of the largest logit by transformers, after the same tokens; and those of
    the rest whose logits are no further apart than bfloat16's rounding."""
    num = same = tied = 0
    with device.transformers(case) as model, torch.inference_mode():
        for sample in samples:
            ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.token_ids])).long().cuda()
            logits = model(input_ids=ids[None], use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1].float()
            chosen = ids[len(sample.prompt_ids) :]
            best = logits.max(-1)
            is_same = best.indices == chosen
            gap = best.values - logits.gather(-1, chosen[:, None])[:, 0]
            num, same = num + len(chosen), same + int(is_same.sum())
            tied += int((~is_same & (gap <= _ROUNDING * best.values.abs())).sum())
    return [
        Row(f"agreement {case}", "share of greedy tokens that are transformers'", same / num),
        Row(f"agreement {case}", "share of the others that are ties within rounding", tied / max(1, num - same)),
    ]


def grpo_rows(device: Device, case: str) -> list[Row]:
    """32 prompts of 128 tokens x 8 answers x 256 tokens and one update a step, in bfloat16."""
    sides = [OURS, "trl"] if device.has_peer and find_spec("trl") is not None else [OURS]
    prompts = device.folder / "prompts.jsonl"
    write_prompts(prompts, (127, 127))
    job = Job(
        str(device.model(case)), str(prompts), str(device.folder / f"{case}-run"), threads=8, device="cuda",
        dtype="bfloat16", max_prompt_tokens=256, micro_batch_tokens=MICRO_BATCH_TOKENS,
        replay="R3" if case == "moe" else "disabled", **(QUICK_GRPO_WORK if device.quick else GRPO_WORK),
    )  # fmt: skip
    plan = Plan(warmup_steps=1, num_rounds=1, steps_per_turn=1) if device.quick else Plan(2, 3, 1)
    env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    tallies = contest(job, [{side: sys.executable} for side in sides], plan, device.folder, env)
    device.seen[f"grpo {case}, s of a step"] = {name: tally.parts() for name, tally in tallies.items()}
    ours = tallies.pop(OURS)
    parts = ours.parts()
    rows = beside(f"grpo {case}", "tokens/s", ours.rate, {name: theirs.rate for name, theirs in tallies.items()})
    rows += [Row(f"grpo {case}", f"{part} s", parts[part], better="lower") for part in PHASES]
    if "device_idle" in parts:
        rows += [Row(f"grpo {case}", "device idle share", parts["device_idle"] / parts["step"], better="lower")]
    return rows


PARTS: dict[str, tuple[Callable[[Device, str], list[Row]], Sequence[str]]] = {
    "engine": (engine_rows, CASES), "agreement": (agreement_rows, CASES), "memory": (memory_rows, ["dense"]),
    "train": (train_rows, CASES), "grpo": (grpo_rows, CASES),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small shapes")
    parser.add_argument("--peer", choices=["none"], help="none: ours alone")
    parser.add_argument("--part", action="append", choices=list(PARTS))
    parser.add_argument("--case", action="append", choices=CASES, help="of grpo")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for gpu.json, if not bench/results")
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    if options.out is None and (options.quick or options.part or options.case):
        parser.error("--quick, --part and --case need --out FOLDER: what they find must not stand for all of it.")
    where = environment(shlex.join(["python", "-m", "bench.gpu", *arguments]))
    where["device"] = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        device = Device(Path(name), options.quick, options.peer != "none", where)
        chosen = {
            f"{part} {case}": partial(rows, device, case)
            for part, (rows, cases) in PARTS.items()
            for case in cases
            if part in (options.part or PARTS) and (part != "grpo" or case in (options.case or CASES))
        }
        return run_parts("gpu", chosen, options.out or RESULTS, where)


if __name__ == "__main__":
    sys.exit(main())
