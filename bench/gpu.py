"""`python -m bench.gpu`: the native engine and the trainer on a CUDA device, against transformers, TRL and the bounds.

    engine      decoding and whole generation, dense and mixture of experts; one sequence; long contexts
    agreement   greedy tokens of the engine and of `generate`; log-probs of the engine and of the trainer
    memory      what sleeping gives back, and what a hundred times of it leave
    train       updates against a plain step of transformers' model
    grpo        whole training steps through Ray against TRL, with their phases and how idle the device is

A part that fails is named in the file and makes the exit code 1; the others stay. `--quick` takes small shapes,
`--part` only some, `--peer none` ours alone; what is not all of it goes where `--out` says. Models are of bfloat16 with
random weights, see models.py. In `grpo` both sides are in the Python that runs this: a machine with a device seldom has
the network that peers' environments are made from. They run one after the other, for lack of room on the device.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.grpo import OURS, commands_of
from bench.grpo_work import Job
from bench.harness import RESULTS, Row, environment, free_memory, run_parts
from bench.models import save_large, step_bytes, write_prompts
from bench.turns import Plan, Tally, alternate, opened
from bench.work import (
    groups_of,
    made_samples,
    mini_batches,
    native_engine,
    open_actors,
    replay_settings,
    to_learn_from,
    written,
)
from practicum.models import load_config
from practicum.rollout.base import BaseRollout
from practicum.train import ActorWorker, UpdateStats
from practicum.types import PromptGroup, Sample, SamplingParams

CASES = ("dense", "moe")
_WORDS = 2000  # tokens from the first of them are used
_ROUNDING = 2.0**-6  # of bfloat16 logits that were summed in another order
MICRO_BATCH_TOKENS = 32_768
PHASES = ("step", "rollout", "reward", "reference", "update", "weights")
GRPO_WORK = {"prompts_per_step": 32, "answers_per_prompt": 8, "max_new_tokens": 256, "pass_answers": 32}
QUICK_GRPO_WORK = {"prompts_per_step": 4, "answers_per_prompt": 4, "max_new_tokens": 32, "pass_answers": 4}


@dataclass
class Work:
    folder: Path
    quick: bool
    peer: bool
    seen: dict[str, Any]  # for the environment

    def model(self, case: str) -> Path:
        path = self.folder / case
        return path if path.exists() else save_large(case, path, quick=self.quick)

    @cached_property
    def bandwidth(self) -> float:
        """The bytes a second that a copy on the device reads and writes."""
        source = torch.empty(1 << (28 if self.quick else 32), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        target.copy_(source)
        seconds = min(timed(lambda: target.copy_(source)) for _ in range(5))
        self.seen["copy_tb_per_s"] = 2 * source.nbytes / seconds / 1e12
        return 2 * source.nbytes / seconds

    @contextmanager
    def engine(self, case: str) -> Iterator[BaseRollout]:
        options = {"dtype": "bfloat16", "max_batch": 256, "keep_routes": case == "moe"}
        with native_engine(self.model(case), device="cuda", **options) as engine:
            yield engine
        del engine
        free_memory()

    @contextmanager
    def actor(self, case: str, mode: str = "disabled") -> Iterator[Any]:
        settings: dict[str, Any] = {"threads": 8, "device": "cuda", "compute_dtype": "bfloat16"}
        with open_actors(self.model(case), replay=replay_settings(mode, self.folder), **settings) as actor:
            yield actor
        del actor
        free_memory()


def timed(function: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def groups(num: int, prompt: int, new: int, seed: int = 0, **params: Any) -> list[PromptGroup]:
    sampling = SamplingParams(new, ignore_eos=True, **params)
    return groups_of(num, (prompt, prompt), sampling, _WORDS, seed * num)


def median_seconds(engine: BaseRollout, num: int, prompt: int, new: int, num_rounds: int) -> float:
    written(engine, groups(num, prompt, new, 99))  # graphs are recorded, kernels are built
    made = [groups(num, prompt, new, seed) for seed in range(num_rounds)]
    return statistics.median(timed(partial(written, engine, asked)) for asked in made)


@contextmanager
def transformers_model(path: Path) -> Iterator[Any]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda().eval()
    yield model
    del model
    free_memory()


# The engine


def engine_rows(work: Work) -> list[Row]:
    sizes = {"many": (256, 128, 256), "one": (1, 128, 512), "long": (32, 8192, 128)}
    if work.quick:
        sizes = {"many": (8, 16, 24), "one": (1, 16, 24), "long": (2, 512, 16)}
    rows = []
    for case in CASES:
        config = load_config(str(work.model(case)))
        rates: dict[str, float] = {}
        with work.engine(case) as engine:
            for size, (num, prompt, new) in sizes.items():
                half, num_rounds = new // 2, 1 if work.quick else 2
                seconds, half_s, first_s = (median_seconds(engine, num, prompt, n, num_rounds) for n in (new, half, 1))
                # Between two runs that decode: what the prefill does differently for one token alone does not count.
                step_s = (seconds - half_s) / (new - half)
                bound_s = step_bytes(config, num, prompt + (half + new) // 2) / work.bandwidth
                rates[size] = num * new / seconds
                label = f"{case} {num} x ({prompt} + {new})"
                rows += [
                    Row(label, "decode tokens/s", num / step_s, num / bound_s, "bandwidth bound"),
                    Row(label, "decode ms a step", 1e3 * step_s, 1e3 * bound_s, "bandwidth bound", better="lower"),
                    Row(label, "prompt tokens/s", num * prompt / first_s),
                ]
        num, prompt, new = sizes["many"]
        theirs = _generate_rate(work, case, num, prompt, new) if work.peer else None
        name = "generate" if work.peer else None
        rows.append(Row(f"{case} {num} x ({prompt} + {new})", "tokens/s", rates["many"], theirs, name))
    return rows


def _generate_rate(work: Work, case: str, num: int, prompt: int, new: int) -> float:
    """Return that of transformers' `generate`, warmed up at full size."""
    exactly = {"do_sample": True, "max_new_tokens": new, "min_new_tokens": new}
    with transformers_model(work.model(case)) as model:
        for seed in range(2):
            ids = torch.from_numpy(np.stack([group.prompt_ids for group in groups(num, prompt, 1, seed)])).long().cuda()
            seconds = timed(partial(model.generate, ids, attention_mask=torch.ones_like(ids), **exactly))
    return num * new / seconds


def memory_rows(work: Work) -> list[Row]:
    rows = []

    def tokens() -> list[list[int]]:
        return [sample.token_ids.tolist() for sample in written(engine, groups(8, 16, 8))]

    with work.engine("dense") as engine:
        before = tokens()
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
                assert tokens() == before
        asyncio.run(engine.release())
        grown = asleep - torch.cuda.mem_get_info()[0]
        rows.append(Row("memory", f"MiB more asleep after {len(seconds)} times", grown / 2**20, better="lower"))
        rows.append(Row("memory", "ms to wake up", 1e3 * statistics.median(seconds), better="lower"))
        asyncio.run(engine.resume())
    return rows


# The trainer, and how far it is from the engine


def update(actor: Any, samples: Sequence[Sample], step: int) -> UpdateStats:
    (stats,) = actor.map(ActorWorker.update, mini_batches(to_learn_from(samples, step), 1, 1, MICRO_BATCH_TOKENS), step)
    return stats  # type: ignore[no-any-return]


def train_rows(work: Work) -> list[Row]:
    num, prompt, new = (8, 16, 24) if work.quick else (256, 128, 256)
    rows = []
    for case in CASES:
        samples = made_samples([(prompt, new)] * num, _WORDS)
        with work.actor(case) as actor:
            update(actor, samples, 1)
            torch.cuda.reset_peak_memory_stats()
            seconds = [timed(partial(update, actor, samples, step)) for step in range(2, 5)]
            peak = torch.cuda.max_memory_allocated()
        theirs = _plain_rate(work.model(case), 4 if work.quick else 32, prompt + new) if work.peer else None
        rate = num * (prompt + new) / statistics.median(seconds)
        rows.append(Row(f"train {case}", "tokens/s", rate, theirs, "a plain step" if work.peer else None))
        rows.append(Row(f"train {case}", "peak GB", peak / 1e9, better="lower"))
    return rows


def _plain_rate(model: Path, num: int, length: int) -> float:
    """Return that of transformers' model in bfloat16 with AdamW: forward and backward over all tokens, an update."""
    with transformers_model(model) as plain:
        plain.train()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-6)
        ids = torch.randint(2, _WORDS, (num, length), device="cuda")

        def step() -> None:
            plain(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        seconds = [timed(step) for _ in range(6)]
    return num * length / statistics.median(seconds[2:])


def agreement_rows(work: Work) -> list[Row]:
    rows = []
    for case in CASES:
        with work.engine(case) as engine:
            samples = written(engine, groups(*((8, 16, 24) if work.quick else (64, 128, 256))))
            greedy = written(engine, groups(*((4, 16, 16) if work.quick else (32, 128, 64)), temperature=0.0))
        rows += _greedy_rows(work.model(case), case, greedy)
        for mode in ("disabled", "R3") if case == "moe" else ("disabled",):
            own = samples if mode == "R3" else [replace(sample, routes=None) for sample in samples]
            with work.actor(case, mode) as actor:
                stats = update(actor, own, 1)
            label = f"agreement {case} R3" if mode == "R3" else f"agreement {case}"
            rows += [
                Row(label, "KL(rollout|trainer) a token", stats.rollout_kl / stats.num_tokens, better="lower"),
                Row(label, "largest log-prob difference", stats.rollout_gap, better="lower"),
            ]
            if stats.replay is not None:
                share = sum(stats.replay.differing) / max(1, stats.replay.num_known * len(stats.replay.layers))
                rows.append(Row(label, "share of choices that the trainer would make otherwise", share, better="lower"))
    return rows


def _greedy_rows(path: Path, case: str, samples: Sequence[Sample]) -> list[Row]:
    """Count the greedy tokens that are those of the largest logit by transformers, after the same tokens; and those of
    the rest whose logits are no further apart than bfloat16's rounding."""
    num = same = tied = 0
    with transformers_model(path) as model, torch.inference_mode():
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


# Whole training steps


def grpo_rows(case: str, work: Work) -> list[Row]:
    """32 prompts of 128 tokens x 8 answers x 256 tokens and one update a step, in bfloat16."""
    quick = work.quick
    plan = Plan(warmup_steps=1 if quick else 2, num_rounds=1 if quick else 3, steps_per_turn=1)
    pythons = {OURS: sys.executable}
    if work.peer and find_spec("trl") is not None:
        pythons["trl"] = sys.executable
    prompts = work.folder / "prompts.jsonl"
    write_prompts(prompts, num_words=(127, 127))
    sizes = QUICK_GRPO_WORK if quick else GRPO_WORK
    job = Job(
        str(work.model(case)), str(prompts), str(work.folder / f"{case}-run"), 8, **sizes, device="cuda",
        dtype="bfloat16", max_prompt_tokens=256, micro_batch_tokens=MICRO_BATCH_TOKENS,
        replay="R3" if case == "moe" else "disabled",
    )  # fmt: skip
    tallies: dict[str, Tally] = {}
    for name, command in commands_of(job, pythons).items():
        env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with opened({name: command}, work.folder, env) as contestants:
            tallies |= alternate(contestants, plan)
        print(f"{name}: {tallies[name].parts()}", flush=True)
    work.seen[f"grpo {case}, s of a step"] = {name: tally.parts() for name, tally in tallies.items()}
    ours, theirs = tallies[OURS], tallies.get("trl")
    parts = ours.parts()
    rate = theirs.rate if theirs else None
    rows = [Row(f"grpo {case}", "tokens/s", ours.rate, rate, "trl" if theirs else None)]
    rows += [Row(f"grpo {case}", f"{part} s", parts[part], better="lower") for part in PHASES]
    if "device_idle" in parts:
        rows += [Row(f"grpo {case}", "device idle share", parts["device_idle"] / parts["step"], better="lower")]
    return rows


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
    where = environment(shlex.join(["python", "-m", "bench.gpu", *arguments]))
    where["device"] = torch.cuda.get_device_name()
    parts = PARTS | {f"grpo {case}": partial(grpo_rows, case) for case in options.case or CASES}
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        work = Work(Path(name), options.quick, options.peer != "none", where)
        chosen = {
            name: partial(part, work)
            for name, part in parts.items()
            if options.part is None or name.split()[0] in options.part
        }
        return run_parts("gpu", chosen, options.out or RESULTS, where)


if __name__ == "__main__":
    sys.exit(main())
