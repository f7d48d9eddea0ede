"""Ours in the `reward` benchmark: `reward_ours PROGRAM ARGUMENT`.

contest JOB    a reward centre for each case, all on one pool of two workers
bare JOB       the math grader in a plain loop over all samples, and two such loops at once over half of them each: on
               cores that share caches or arithmetic units, the same work takes more CPU time when both are busy
hostile NUM    answers that hang, raise, exit, crash or allocate without end: the statuses of all samples, the seconds,
               what they may be by arithmetic, and which of our processes are left
replicas NUM   three replicas of a reward model: a batch undisturbed, and again with one killed and one hung
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tokenizers import Tokenizer

from bench.contestant import Line, step
from bench.controller_work import start_ray
from bench.reward_functions import ASYNC, MATH, MISDEEDS, RULE, SYNC
from bench.reward_work import (
    CONCURRENCY,
    CPU,
    NUM_PROCESSES,
    NUM_WORKERS,
    Item,
    Job,
    hostile_items,
    math_items,
    part_of,
    take_steps,
)
from practicum.config import RewardConfig
from practicum.controller import open_controller
from practicum.controller.loop import run_sync
from practicum.reward import RewardLoopManager, open_reward_centre
from practicum.reward.graders.math import Math
from practicum.reward.report import GradingReport, Progress
from practicum.types import Prompt, PromptGroup, Sample, SamplingParams, Score, Trajectory

FUNCTIONS = Path(__file__).with_name("reward_functions.py")
CONFIGS: dict[str, dict[str, Any]] = {
    RULE: {"grader": "exact"},
    MATH: {"grader": "math", "processes": NUM_WORKERS},
    ASYNC: {"function": f"{FUNCTIONS}:sleep_async", "limits": {"concurrency": CONCURRENCY}},
    SYNC: {"function": f"{FUNCTIONS}:sleep_sync", "processes": NUM_PROCESSES},
}


class OurBatch:
    def __init__(self, manager: RewardLoopManager, groups: Sequence[PromptGroup]) -> None:
        self._manager = manager
        self._groups = groups

    def grade(self) -> Sequence[PromptGroup]:
        run_sync(self._manager.grade(self._groups))
        return self._groups

    def values(self, groups: Sequence[PromptGroup]) -> list[float | None]:
        return [score.value for score in scores_of(groups)]


def groups_of(samples: Sequence[Sample]) -> list[PromptGroup]:
    """Make a group of each answer."""
    params = SamplingParams(max_new_tokens=1, num_answers=1)
    return [
        PromptGroup(str(i), sample.prompt, sample.prompt_ids, params, 0, [Trajectory(f"{i}/0", 0, [sample])])
        for i, sample in enumerate(samples)
    ]


def scores_of(groups: Sequence[PromptGroup]) -> list[Score]:
    scores = [trajectory.score for group in groups for trajectory in group.trajectories]
    return [score for score in scores if score is not None]


def make_sample(item: Item, token_ids: Sequence[int]) -> Sample:
    num = len(token_ids)
    return Sample(
        prompt=Prompt(str(item.prompt), text="?", answer=item.truth), prompt_ids=np.ones(32, np.int32),
        token_ids=np.asarray(token_ids, np.int32), log_probs=np.full(num, -1.0, np.float32),
        loss_mask=np.ones(num, np.bool_), versions=np.zeros(num, np.int32), text=item.text, finish_reason="stop",
    )  # fmt: skip


def contest_main(line: Line, job: Job) -> None:
    tokenizer = Tokenizer.from_file(str(Path(job.tokenizer) / "tokenizer.json"))
    start_ray()
    with ExitStack() as stack:
        controller = stack.enter_context(
            open_controller("ray", num_workers=NUM_WORKERS, use_gpu=False, max_colocate_count=len(CONFIGS))
        )
        centres = AsyncExitStack()
        stack.callback(lambda: run_sync(centres.aclose()))
        managers = {
            case: run_sync(centres.enter_async_context(open_reward_centre(RewardConfig(**CONFIGS[case]), controller)))
            for case in job.loads
        }

        def pack(case: str, items: list[Item]) -> OurBatch:
            encoded = tokenizer.encode_batch([item.text for item in items])
            samples = [make_sample(item, own.ids) for item, own in zip(items, encoded, strict=True)]
            return OurBatch(managers[case], groups_of(samples))

        take_steps(line, job, ["practicum", "ray", "math-verify"], pack)


# The bare grader

ALONE, BOTH = "bare loop", "bare loops on both cores"


def loop_cpu_s(samples: Sequence[Sample]) -> float:
    grader = Math()
    before = time.process_time()
    for sample in samples:
        grader.grade(sample)
    return time.process_time() - before


def loops_cpu_s(samples: Sequence[Sample]) -> float:
    """Run as many loops at once as there are workers."""
    halves = [samples[rank::NUM_WORKERS] for rank in range(NUM_WORKERS)]
    with multiprocessing.get_context("fork").Pool(NUM_WORKERS) as pool:
        return sum(pool.map(loop_cpu_s, halves, chunksize=1))


def bare_main(line: Line, job: Job) -> None:
    seed = -1
    Math().prepare()

    def take_step(_: str) -> dict[str, Any]:
        nonlocal seed
        seed += 1
        began = time.perf_counter()
        samples = [make_sample(item, [1]) for item in math_items(job.loads[MATH].num_samples, seed)]
        # In this order: the two are forked from this process and would remember what it has just graded.
        both_s = loops_cpu_s(samples)
        parts = {part_of(ALONE, CPU): loop_cpu_s(samples), part_of(BOTH, CPU): both_s}
        return step(time.perf_counter() - began, 1, **parts)

    line.serve(["math-verify"], take_step)


# Hostile answers

TIMEOUT_S = 2.0
NUM_HOSTILE_PROCESSES = 8
GONE_WITHIN_S = 20.0
MARK = "BENCH_REWARD_MARK"
HOSTILE_CONFIG = {
    "function": f"{FUNCTIONS}:hostile",
    "timeout_s": TIMEOUT_S,
    "memory_mb": 256,
    "processes": NUM_HOSTILE_PROCESSES,
    "max_failure_share": 0.5,
}
HANG, OTHERS = "hang", tuple(kind for kind in MISDEEDS if kind != "hang")


def allowed_s(num_hanging: int, rest_s: float) -> float:
    """Return the longest time, however the samples are shared out: all hanging ones at one worker, one of them begun
    last. `rest_s` is what the batch takes without them."""
    return num_hanging * TIMEOUT_S / (NUM_HOSTILE_PROCESSES / NUM_WORKERS) + TIMEOUT_S + rest_s


def wrong_ones(items: Sequence[Item], scores: Sequence[Score]) -> list[tuple[Item, Score]]:
    """Return the samples without the status and the value that they deserve."""
    wanted = {HANG: "timeout", **dict.fromkeys(OTHERS, "invalid")}
    pairs = zip(items, scores, strict=True)
    return [(i, s) for i, s in pairs if (s.status, s.value) != (wanted.get(i.text, "ok"), i.value)]


def kinds_of(wrong: Sequence[tuple[Item, Score]]) -> Counter[str]:
    """Return what was taken for what, for the result file."""
    return Counter(f"{item.text if item.value is None else 'fine'} taken for {score.status}" for item, score in wrong)


def num_left(mark: str) -> int:
    """Count other processes with our mark in their environment, once they have had time to end."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return len(left)


def _marked(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        # Those of other users cannot be ours.
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process.pid)
    return found


def hostile_step(num_samples: int) -> dict[str, float]:
    mark = os.environ[MARK] = uuid.uuid4().hex
    items = hostile_items(num_samples)
    groups = groups_of([make_sample(item, [1]) for item in items])

    async def grade() -> tuple[float, float]:
        async with open_reward_centre(RewardConfig(**HOSTILE_CONFIG), controller) as manager:  # type: ignore[arg-type]
            rest = [make_sample(item, [1]) for item in hostile_items(num_samples) if item.text != HANG]
            rest_s = (await manager.grade(groups_of(rest))).seconds
            took_s = (await manager.grade(groups)).seconds
            marked.extend(_marked(mark))
            return rest_s, took_s

    marked: list[int] = []
    with open_controller("ray", num_workers=NUM_WORKERS, use_gpu=False, max_colocate_count=1) as controller:
        rest_s, took_s = run_sync(grade())
    # Else no process that is left would be seen either.
    if len(marked) < NUM_HOSTILE_PROCESSES:
        raise RuntimeError(f"only {len(marked)} processes carry the mark that all of ours inherit")
    wrong = wrong_ones(items, scores_of(groups))
    num_hanging = sum(item.text == HANG for item in items)
    return {
        "took_s": took_s, "allowed_s": allowed_s(num_hanging, rest_s), "wrong": len(wrong),
        "wrong_raise": sum(item.value is not None or item.text == "raise" for item, _ in wrong),
        "left": num_left(mark), **kinds_of(wrong),
    }  # fmt: skip


# Replicas

NUM_REPLICAS = 3
# Of a batch, before the faults come: all replicas are at work then, and much is left to do.
AFTER_SHARE = 0.1
TOKENS = 128


def write_model(folder: Path) -> None:
    """Write a Llama with a classification head and random weights, and a tokenizer with a token for each digit."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from practicum.demo.arithmetic import make_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=18, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=2 * TOKENS, num_labels=1, initializer_range=0.2,
        pad_token_id=None, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def make_samples(num: int) -> list[Sample]:
    """Return samples of one length: each fills a forward pass, so that its score does not depend on its neighbours."""
    chance = random.Random(0)
    texts = ["".join(chance.choices("0123456789", k=TOKENS - 1)) for _ in range(num)]
    return [make_sample(Item(i, text, "", None), [1]) for i, text in enumerate(texts)]


class Faults:
    """Kills one replica and stops another, once a batch is under way."""

    def __init__(self) -> None:
        self.victims: list[int] = []  # pids; empty: leave the batch in peace
        self.done_before: int | None = None  # samples that were graded before the faults came

    def look(self, progress: Progress) -> None:
        if self.victims and progress.num_done >= AFTER_SHARE * progress.num_samples:
            killed, hung, *_ = self.victims
            os.kill(killed, signal.SIGKILL)
            os.kill(hung, signal.SIGSTOP)
            self.victims, self.done_before = [], progress.num_done


def replica_pids(manager: RewardLoopManager) -> list[int]:
    """Return the processes that listen at the addresses that the router has."""
    assert manager.models is not None
    ports = {int(worker["url"].rpartition(":")[2]) for worker in manager.models.router.workers()}
    found = [
        process.pid
        for process in psutil.Process().children(recursive=True)
        if any(c.status == psutil.CONN_LISTEN and c.laddr.port in ports for c in process.net_connections("tcp"))
    ]
    if len(found) != NUM_REPLICAS:
        raise RuntimeError(f"found {len(found)} processes of replicas instead of {NUM_REPLICAS}")
    return found


def largest_difference(one: Sequence[Score], other: Sequence[Score]) -> float:
    """Return that between scores of the same samples, where both have one."""
    pairs = zip(one, other, strict=True)
    return max((abs(a.value - b.value) for a, b in pairs if a.value is not None and b.value is not None), default=0.0)


def replicas_step(num_samples: int, folder: Path) -> dict[str, float]:
    model = {"path": str(folder), "kind": "classifier", "replicas": NUM_REPLICAS, "max_batch_tokens": TOKENS}
    config = RewardConfig(grader="classifier", model=model, timeout_s=120.0)  # type: ignore[arg-type]
    samples = make_samples(num_samples)
    faults = Faults()

    async def grade() -> list[tuple[GradingReport, list[Score]]]:
        async with open_reward_centre(config, controller, on_progress=faults.look) as manager:
            await manager.grade(groups_of(samples[:NUM_REPLICAS]))  # the first forward passes are slow
            found = []
            for disturbs in (False, True):
                faults.victims = replica_pids(manager) if disturbs else []
                groups = groups_of(samples)
                report = await manager.grade(groups)
                found.append((report, scores_of(groups)))
            return found

    with open_controller("ray", num_workers=NUM_REPLICAS, use_gpu=False, max_colocate_count=2) as controller:
        (undisturbed, first), (disturbed, second) = run_sync(grade())
    if faults.done_before is None:
        raise RuntimeError(f"{num_samples} samples were graded before anything could be disturbed: take more")
    return {
        "undisturbed_s": undisturbed.seconds,
        "disturbed_s": disturbed.seconds,
        "done_before": faults.done_before,
        "missing": sum(score.value is None for score in [*first, *second]),
        "difference": largest_difference(first, second),
    }


def steps_main(line: Line, seconds: str, take_step: Callable[[], dict[str, float]], num_samples: int) -> None:
    def counted(_: str) -> dict[str, Any]:
        parts = take_step()
        return step(parts[seconds], num_samples, **parts)

    line.serve(["practicum", "ray", "transformers", "torch"], counted)


def main() -> None:
    line = Line()
    program, argument = sys.argv[1:]
    if program == "contest":
        contest_main(line, Job.parse(argument))
    elif program == "bare":
        bare_main(line, Job.parse(argument))
    elif program == "hostile":
        steps_main(line, "took_s", lambda: hostile_step(int(argument)), int(argument))
    else:
        with tempfile.TemporaryDirectory(prefix="bench-reward-model-") as name:
            write_model(Path(name))
            start_ray()  # more replicas than cores must fit
            steps_main(line, "disturbed_s", lambda: replicas_step(int(argument), Path(name)), int(argument))


if __name__ == "__main__":
    main()
