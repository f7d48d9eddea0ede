"""`python -m bench.reward_gpu`: a reward model and a policy that take turns on one CUDA device.

the replica by itself    memory asleep and awake; sleeping and waking against one copy of the same bytes
in a training run        a policy that learns from the reward model's scores; the device's memory in each phase
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu import timed
from bench.harness import RESULTS, environment, free_memory
from bench.models import save_random
from bench.reward_ours import write_classifier
from practicum import Config, Trainer
from practicum.config import RewardModelConfig
from practicum.controller import RayResourcePool
from practicum.demo.arithmetic import all_problems, make_tokenizer, write_problems
from practicum.reward import RewardModelManager

_ROUNDS = 7
_MIB = 1 << 20


def save_models(folder: Path) -> None:
    """Write random weights: a policy of 0.2 and a reward model of 1.6 billion parameters."""
    words = {"max_position_embeddings": 256, "num_attention_heads": 16}
    policy = {"vocab_size": 18, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12}
    judge = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24}
    save_random(folder / "policy", "llama", make_tokenizer(), device="cuda", **words, **policy)
    with torch.device("cuda"):
        write_classifier(folder / "judge", "bfloat16", **words, **judge)
    free_memory()


def used_mib() -> float:
    """Return what all processes hold of the device."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / _MIB


async def replica_alone(folder: Path) -> dict[str, Any]:
    before, woken, slept = used_mib(), [], []
    with RayResourcePool([1], use_gpu=True) as pool:
        config = RewardModelConfig(path=str(folder / "judge"), dtype="bfloat16")
        async with RewardModelManager(config, pool) as models:
            for _ in range(_ROUNDS):
                (asleep,), on_device = await models.memory(), used_mib()
                start = time.perf_counter()
                async with models.awake():
                    woken.append(time.perf_counter() - start)
                    (awake,), on_device_awake = await models.memory(), used_mib()
                    start = time.perf_counter()
                slept.append(time.perf_counter() - start)
    assert asleep is not None and awake is not None
    assert awake.device_reserved is not None and asleep.device_reserved is not None
    return {
        "weights_mib": awake.weights / _MIB, "device_before_mib": before, "device_asleep_mib": on_device,
        "device_awake_mib": on_device_awake, "reserved_asleep_mib": asleep.device_reserved / _MIB,
        "reserved_awake_mib": awake.device_reserved / _MIB,
        "released_share": (on_device_awake - on_device) * _MIB / awake.weights,
        "wake_all_s": statistics.median(woken), "sleep_all_s": statistics.median(slept),
    }  # fmt: skip


def waking_against_a_copy(folder: Path) -> dict[str, float]:
    """Time the weights alone, in this process: without Ray, HTTP and the router."""
    from practicum.models import load_classifier
    from practicum.rollout.engine.sleep import SleepingWeights

    def load() -> Any:
        return load_classifier(str(folder / "judge"), torch.bfloat16)

    device = torch.device("cuda", 0)
    weights = SleepingWeights(load(), device, load)
    woken = []
    for _ in range(_ROUNDS):
        woken.append(timed(weights.wake))
        weights.sleep()
    host = torch.empty(weights.num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    copied = [timed(partial(there.copy_, host, non_blocking=True)) for _ in range(_ROUNDS)]
    free_memory()
    wake_s, copy_s = statistics.median(woken), statistics.median(copied)
    copy_gb_per_s = weights.num_bytes / copy_s / 1e9
    return {"wake_s": wake_s, "copy_s": copy_s, "wake_over_copy": wake_s / copy_s, "copy_gb_per_s": copy_gb_per_s}


def training_run(folder: Path) -> dict[str, Any]:
    """Return what the device held at the beginning, at most and at the end of each phase of each step."""
    train, _ = all_problems(0, 100)
    write_problems(folder / "train.jsonl", train[:256])
    tree = {
        "model": {"path": str(folder / "policy"), "dtype": "bfloat16"},
        "data": {"train": str(folder / "train.jsonl"), "prompts_per_step": 32, "max_prompt_tokens": 32},
        "rollout": {"answers_per_prompt": 8, "max_new_tokens": 32},
        "reward": {"grader": "classifier", "model": {"path": str(folder / "judge"), "dtype": "bfloat16"}},
        "trainer": {"steps": 4, "run_dir": str(folder / "run"), "checkpoint_every": 0, "device": "cuda"},
    }
    seen: list[tuple[float, float]] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.005):
            seen.append((time.perf_counter(), used_mib()))

    threading.Thread(target=watch, daemon=True).start()
    steps: list[dict[str, dict[str, float]]] = []
    for step in Trainer(Config.from_tree(tree)).steps():
        steps.append({})
        start = time.perf_counter() - step.metrics["time/step_s"]
        for phase in ("rollout", "reward", "update"):
            seconds = step.metrics[f"time/{phase}_s"]
            held = [used for at, used in seen if start <= at <= start + seconds]
            if held:
                steps[-1][phase] = {"seconds": seconds, "first": held[0], "most": max(held), "last": held[-1]}
            start += seconds
    stop.set()
    return {"device_mib_by_phase": steps}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.reward_gpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for reward_gpu.json")
    out: Path = parser.parse_args().out
    torch.cuda.init()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_models(folder)
        where = {**environment("python -m bench.reward_gpu"), "device": torch.cuda.get_device_name()}
        waking = waking_against_a_copy(folder)
        replica = asyncio.run(replica_alone(folder))
        found = {"environment": where, "waking": waking, "replica": replica, "training": training_run(folder)}
    text = json.dumps(found, indent=1)
    print(text)
    out.mkdir(parents=True, exist_ok=True)
    (out / "reward_gpu.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
