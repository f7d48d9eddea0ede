"""Ours in the `reward` benchmark: `reward_ours PROGRAM LOADS TOKENIZER`.

contest    a reward centre for each case, all on one pool of two workers
bare       the math grader in a plain loop over all samples, and two such loops at once over half of them each: on cores
           that share caches or arithmetic units, the same work takes more CPU time when both are busy
hostile    answers that hang, raise, exit, crash or allocate without end: what all samples get, in which time
replicas   three replicas of a reward model: a batch undisturbed, and again with one killed and one hung
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.contestant import Line
from bench.controller_work import NUM_WORKERS, start_ray
from bench.reward_functions import ASYNC, AT_A_TIME, HOSTILE, MATH, RAISE, REPLICAS, RULE, SYNC
from bench.reward_work import CPU_MS, LOST, Batch, Item, Loads, hostile_items, math_items, serve, take_steps
from bench.sides import OURS
from practicum.config import RewardConfig
from practicum.controller import open_controller
from practicum.controller.loop import run_sync
from practicum.reward import RewardLoopManager, open_reward_centre
from practicum.reward.graders.math import Math
from practicum.reward.report import Progress
from practicum.types import Prompt, PromptGroup, Sample, SamplingParams, Score, Trajectory

FUNCTIONS = Path(__file__).with_name("reward_functions.py")
CONFIGS: dict[str, dict[str, Any]] = {
    RULE: {"grader": "exact"},
    MATH: {"grader": "math", "processes": NUM_WORKERS},
    ASYNC: {"function": f"{FUNCTIONS}:sleep_async", "limits": {"concurrency": AT_A_TIME[ASYNC]}},
    SYNC: {"function": f"{FUNCTIONS}:sleep_sync", "processes": AT_A_TIME[SYNC]},
}


def make_sample(item: Item, token_ids: Sequence[int] = (1,)) -> Sample:
    num = len(token_ids)
    return Sample(
        prompt=Prompt(str(item.prompt), text="?", answer=item.truth), prompt_ids=np.ones(32, np.int32),
        token_ids=np.asarray(token_ids, np.int32), log_probs=np.full(num, -1.0, np.float32),
        loss_mask=np.ones(num, np.bool_), versions=np.zeros(num, np.int32), text=item.text, finish_reason="stop",
    )  # fmt: skip


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


def contest(line: Line, loads: Loads, tokenizer_path: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{tokenizer_path}/tokenizer.json")
    start_ray()
    centres = AsyncExitStack()
    with open_controller("ray", num_workers=NUM_WORKERS, use_gpu=False, max_colocate_count=len(CONFIGS)) as controller:
        managers = {
            case: run_sync(centres.enter_async_context(open_reward_centre(RewardConfig(**CONFIGS[case]), controller)))
            for case in loads
        }

        def pack(case: str, items: list[Item]) -> Batch:
            encoded = tokenizer.encode_batch([item.text for item in items])
            groups = groups_of([make_sample(item, own.ids) for item, own in zip(items, encoded, strict=True)])
            grade = managers[case].grade
            return lambda: run_sync(grade(groups)), lambda _: [score.value for score in scores_of(groups)]

        try:
            take_steps(line, loads, ["practicum", "ray", "math-verify"], OURS, pack)
        finally:
            run_sync(centres.aclose())


# The bare grader


def bare(line: Line, loads: Loads, _: str) -> None:
    num = loads[MATH][0]
    Math().prepare()

    def measure(seed: int) -> dict[str, float]:
        samples = [make_sample(item) for item in math_items(num, seed)]
        # In this order: the two are forked from this process and would remember what it has just graded.
        cpu_s = {"bare loops on both cores": loops_cpu_s(samples), "bare loop": loop_cpu_s(samples)}
        return {f"{side}: {MATH}: {CPU_MS}": 1e3 * used_s / num for side, used_s in cpu_s.items()}

    serve(line, ["math-verify"], measure)


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


# Hostile answers

TIMEOUT_S, NUM_HOSTILE_PROCESSES = 2.0, 8
GONE_WITHIN_S = 20.0
MARK = "BENCH_REWARD_MARK"
STATUSES = {"fine": "ok", "hang": "timeout"}  # of all other answers: invalid


def hostile(line: Line, loads: Loads, _: str) -> None:
    mark = os.environ[MARK] = uuid.uuid4().hex
    num_samples = max(num for num, _ in loads.values())
    serve(line, ["practicum", "ray"], lambda seed: grade_hostile(hostile_items(num_samples), mark))


def grade_hostile(items: Sequence[Item], mark: str) -> dict[str, float]:
    """Grade a batch without the answers that hang, and all of it; count what is wrong, and processes with our mark in
    their environment that are left."""
    config = RewardConfig(
        function=f"{FUNCTIONS}:hostile", timeout_s=TIMEOUT_S, memory_mb=256, processes=NUM_HOSTILE_PROCESSES,
        max_failure_share=0.5,
    )  # fmt: skip
    groups = groups_of([make_sample(item) for item in items])
    rest = groups_of([make_sample(item) for item in items if item.text != "hang"])

    async def grade() -> tuple[float, float, int]:
        async with open_reward_centre(config, controller) as manager:
            rest_s, took_s = [(await manager.grade(batch)).seconds for batch in (rest, groups)]
            return rest_s, took_s, num_marked(mark)

    with open_controller("ray", num_workers=NUM_WORKERS, use_gpu=False, max_colocate_count=1) as controller:
        rest_s, took_s, num_seen = run_sync(grade())
    if num_seen < NUM_HOSTILE_PROCESSES:  # else no process that is left would be seen either
        raise RuntimeError(f"only {num_seen} processes carry the mark that all of ours inherit")
    deadline = time.monotonic() + GONE_WITHIN_S
    while (num_left := num_marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    wrong = mistaken(items, scores_of(groups))
    return {
        f"{OURS}: {RAISE}: {LOST}": sum(num for (what, _), num in wrong.items() if what in ("fine", "raise")),
        f"{OURS}: {HOSTILE}: s": took_s,
        f"deadline arithmetic: {HOSTILE}: s": allowed_s(len(groups) - len(rest), rest_s),
        f"{OURS}: {HOSTILE}: samples with a wrong status or score": wrong.total(),
        f"{OURS}: {HOSTILE}: processes left": num_left,
        **{f"{OURS}: {HOSTILE}: {what} taken for {status}": num for (what, status), num in wrong.items()},
    }


def mistaken(items: Sequence[Item], scores: Sequence[Score]) -> Counter[tuple[str, str]]:
    """Count the samples without the status and the value that they deserve, by what they are and their status."""
    found: Counter[tuple[str, str]] = Counter()
    for item, score in zip(items, scores, strict=True):
        what = "fine" if item.value is not None else item.text
        found[what, score.status] += (score.status, score.value) != (STATUSES.get(what, "invalid"), item.value)
    return +found


def allowed_s(num_hanging: int, rest_s: float) -> float:
    """Return the longest time, however the samples are shared out: all hanging ones at one worker, one of them begun
    last. `rest_s` is what the batch takes without them."""
    return num_hanging * TIMEOUT_S / (NUM_HOSTILE_PROCESSES / NUM_WORKERS) + TIMEOUT_S + rest_s


def num_marked(mark: str) -> int:
    """Count other processes with our mark. Those of other users, which hide their environment, cannot be ours."""
    others = [one for one in psutil.process_iter(["environ"]) if one.pid != os.getpid()]
    return sum((one.info["environ"] or {}).get(MARK) == mark for one in others)


# Replicas

NUM_REPLICAS = 3
AFTER_SHARE = 0.1  # of a batch is graded when the faults come: all replicas are at work, and much is left to do
TOKENS = 128


def replicas(line: Line, loads: Loads, _: str) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-reward-model-") as folder:
        write_classifier(
            Path(folder), hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=2 * TOKENS, initializer_range=0.2,
        )  # fmt: skip
        start_ray()  # more replicas than cores must fit
        packages = ["practicum", "ray", "transformers", "torch"]
        serve(line, packages, lambda seed: grade_with_replicas(folder, loads[REPLICAS][0]))


def write_classifier(folder: Path, dtype: str = "float32", **shape: Any) -> None:
    """Write a Llama with a classification head and random weights, and a tokenizer with a token for each digit."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from practicum.demo.arithmetic import make_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=18, num_labels=1, bos_token_id=None, eos_token_id=1, **shape)
    LlamaForSequenceClassification(config).to(getattr(torch, dtype)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def grade_with_replicas(folder: str, num_samples: int) -> dict[str, float]:
    model = {"path": folder, "kind": "classifier", "replicas": NUM_REPLICAS, "max_batch_tokens": TOKENS}
    config = RewardConfig(grader="classifier", model=model, timeout_s=120.0)  # type: ignore[arg-type]
    # Of one length: each fills a forward pass, so that its score does not depend on its neighbours.
    chance = random.Random(0)
    texts = ["".join(chance.choices("0123456789", k=TOKENS - 1)) for _ in range(num_samples)]
    samples = [make_sample(Item(i, text, "", None)) for i, text in enumerate(texts)]
    victims: list[int] = []  # empty: leave the batch in peace

    def disturb(progress: Progress) -> None:
        if victims and progress.num_done >= AFTER_SHARE * progress.num_samples:
            os.kill(victims.pop(), signal.SIGKILL)
            os.kill(victims.pop(), signal.SIGSTOP)
            victims.clear()

    async def grade() -> tuple[list[float], list[list[Score]]]:
        async with open_reward_centre(config, controller, on_progress=disturb) as manager:
            await manager.grade(groups_of(samples[:NUM_REPLICAS]))  # the first forward passes are slow
            undisturbed, disturbed = groups_of(samples), groups_of(samples)
            seconds = [(await manager.grade(undisturbed)).seconds]
            victims.extend(replica_pids(manager))
            seconds.append((await manager.grade(disturbed)).seconds)
            return seconds, [scores_of(undisturbed), scores_of(disturbed)]

    with open_controller("ray", num_workers=NUM_REPLICAS, use_gpu=False, max_colocate_count=2) as controller:
        (undisturbed_s, disturbed_s), (one, other) = run_sync(grade())
    if victims:
        raise RuntimeError(f"{num_samples} samples were graded before anything could be disturbed: take more")
    return {
        f"{OURS}: {REPLICAS}: s": disturbed_s,
        f"undisturbed: {REPLICAS}: s": undisturbed_s,
        f"{OURS}: {REPLICAS}: scores missing": sum(score.value is None for score in [*one, *other]),
        f"{OURS}: {REPLICAS}: largest difference of a score": largest_difference(one, other),
    }


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


PROGRAMS = {"contest": contest, "bare": bare, HOSTILE: hostile, REPLICAS: replicas}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](Line(), json.loads(sys.argv[2]), sys.argv[3])
