"""Ours with three replicas of a reward model: a batch undisturbed, and again with one replica killed and one hung."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.contestant import Line, step
from bench.controller_work import start_ray
from bench.reward_items import Item
from bench.reward_ours import groups_of, make_sample, scores_of
from practicum.config import RewardConfig
from practicum.controller import open_controller
from practicum.controller.loop import run_sync
from practicum.reward import RewardLoopManager, open_reward_centre
from practicum.reward.report import GradingReport, Progress
from practicum.types import Sample, Score

NUM_REPLICAS = 3
# Of a batch, before the faults come: all replicas are at work then, and much is left to do.
AFTER_SHARE = 0.1
TOKENS = 128


def write_model(folder: Path) -> None:
    """A Llama with a classification head and random weights, and a tokenizer with a token for each digit."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from practicum.demo.arithmetic import make_tokenizer

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 18,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2 * TOKENS,
        "num_labels": 1,
        "initializer_range": 0.2,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    LlamaForSequenceClassification(LlamaConfig(**shape)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def make_samples(num: int) -> list[Sample]:
    """All of one length: each fills a forward pass of its own, so that its score does not depend on its neighbours."""
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
    """The processes that listen at the addresses that the router has."""
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
    """Between scores of the same samples, where both have one."""
    pairs = zip(one, other, strict=True)
    return max((abs(a.value - b.value) for a, b in pairs if a.value is not None and b.value is not None), default=0.0)


def take_step(num_samples: int, folder: Path) -> dict[str, float]:
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
        "missing": num_missing(first) + num_missing(second),
        "difference": largest_difference(first, second),
    }


def num_missing(scores: Sequence[Score]) -> int:
    return sum(score.value is None for score in scores)


def main() -> None:
    line = Line()
    num_samples = int(json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory(prefix="bench-reward-model-") as name:
        folder = Path(name)
        write_model(folder)
        start_ray()  # more replicas than cores must fit
        line.ready(["practicum", "ray", "transformers", "torch"])
        while num_steps := line.wait_for_go():
            steps = []
            for _ in range(num_steps):
                parts = take_step(num_samples, folder)
                steps.append(step(parts["disturbed_s"], num_samples, **parts))
            line.answer(steps)


if __name__ == "__main__":
    main()
