"""What rollout promises, counted, in the `rollout` benchmark: `FOLDER NEW_TOKENS NUM_TURNS`.

    kill          a replica in a process of its own is killed in the middle of a batch: is each answer there, once?
    update        new weights come while answers are written: does every answer tell one version, the old or the new?
    conversation  many turns with a tool: are the tokens the trainer gets those that the engine had, all of them?

Each is a step, whose parts are what was counted.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench.contestant import Line, step
from bench.contestants.talk import talk
from practicum.config import RolloutConfig
from practicum.controller import Controller, RayResourcePool, ray_cluster
from practicum.demo.arithmetic import make_model, make_tokenizer
from practicum.models import load_model, save_model
from practicum.rollout.engines import EngineSettings
from practicum.rollout.manager import RolloutManager
from practicum.rollout.placement import ReplicaSettings, open_replicas
from practicum.types import Prompt, PromptGroup, Sample, SamplingParams
from practicum.weights import ChannelSettings, Place, Ticket, choose, open_sender

NUM_REPLICAS, MAX_BATCH = 2, 16
NUM_ANSWERS = 256
PATIENCE_S = 120.0
Answers = dict[str, Sample]
Counts = dict[str, float]


def main() -> None:
    line = Line()
    folder, new_tokens, num_turns = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    line.ready(["practicum", "torch", "transformers", "ray"])
    while True:
        num_steps, case = line.wait_for_case()
        if not num_steps:
            return
        if case == "conversation":
            line.answer([step(1.0, 1.0, **talk(folder / "talk", num_turns))])
            continue
        line.answer([step(1.0, 1.0, **asyncio.run(under_fire(folder, new_tokens)))])


async def under_fire(folder: Path, new_tokens: int) -> Counts:
    async with replicas(folder) as (manager, weights):
        updated = await under_new_weights(manager, weights, new_tokens)
        return updated | await under_a_kill(manager, new_tokens)


@asynccontextmanager
async def replicas(folder: Path) -> AsyncIterator[tuple[RolloutManager, ModelWeights]]:
    """Nobody else uses their devices and they never sleep: standalone ones, with the trainer in this process."""
    model = folder / "replicas"
    save_model(make_model(0), make_tokenizer(), model)
    config = RolloutConfig(placement="colocated", max_batch=MAX_BATCH)
    engine = EngineSettings("native", str(model), device="cpu", max_batch=MAX_BATCH, cache_gb=0.05)
    times = ReplicaSettings(threads=1, start_timeout_s=PATIENCE_S, call_timeout_s=PATIENCE_S)
    weights = ModelWeights(model)
    with ray_cluster(), RayResourcePool([NUM_REPLICAS], resources_per_process={"CPU": 1}) as pool:
        controller = Controller(pool, PATIENCE_S, PATIENCE_S)
        async with open_replicas(config, controller, engine, weights, times) as manager:
            manager.sleeps = False
            await manager.update_weights(1)
            yield manager, weights


async def under_a_kill(manager: RolloutManager, new_tokens: int) -> Counts:
    expected, _, undisturbed_s = await _written(manager, new_tokens)
    victim = (await manager.replicas[0].where()).pid
    found, times, seconds = await _written(manager, new_tokens, lambda: os.kill(victim, signal.SIGKILL))
    return {
        "missing": len(expected) - len(found),
        "twice": sum(times.values()) - len(found),
        "other": sum(found[name].token_ids.tolist() != own.token_ids.tolist() for name, own in expected.items()),
        "killed_s": seconds,
        "undisturbed_s": undisturbed_s,
    }


async def under_new_weights(manager: RolloutManager, weights: ModelWeights, new_tokens: int) -> Counts:
    old, new = manager.version, manager.version + 1
    weights.learn()
    updating: list[asyncio.Task[None]] = []
    found, _, _ = await _written(
        manager, new_tokens, lambda: updating.append(asyncio.create_task(manager.update_weights(new)))
    )
    await updating[0]
    versions = [set(sample.versions.tolist()) for sample in found.values()]
    num = [versions.count({version}) for version in (old, new)]
    return {"mixed": len(versions) - sum(num), "by_old": num[0], "by_new": num[1]}


async def _written(
    manager: RolloutManager, new_tokens: int, at_first: Callable[[], object] | None = None
) -> tuple[Answers, Counter[str], float]:
    """The answers, how often each came, and how long it took. `at_first` is done when the first have come."""
    params = SamplingParams(new_tokens, ignore_eos=True)
    asked = [
        PromptGroup(str(i), Prompt(str(i), text="a sum"), np.array([5, 6, 3 + i % 9], np.int32), params, seed=i)
        for i in range(NUM_ANSWERS)
    ]
    samples: Answers = {}
    times: Counter[str] = Counter()
    began = time.perf_counter()
    async with aclosing(manager.generate(asked)) as generating:
        async for groups in generating:
            if at_first is not None and not samples:
                at_first()
            for sample in (sample for group in groups for sample in group.samples):
                times[sample.id] += 1
                samples[sample.id] = sample
    return samples, times, time.perf_counter() - began


class ModelWeights:
    """A trainer's weights: a model in this process that is sent to the replicas."""

    def __init__(self, folder: Path) -> None:
        self._model = load_model(str(folder)).eval().requires_grad_(False)

    async def open(self, engines: Sequence[Place]) -> None:
        settings = ChannelSettings(timeout_s=PATIENCE_S, num_receivers=len(engines))
        self._sender = open_sender(choose(Place.here(), engines), settings)

    async def invite(self, version: int, num_receivers: int) -> Ticket | None:
        return self._sender.invite(version, num_receivers)

    async def send(self, version: int) -> Ticket:
        return await asyncio.to_thread(self._sender.send, version, self._model.named_parameters())

    async def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        with torch.no_grad():
            return [self._log_probs(torch.from_numpy(ids.astype(np.int64))) for ids in sequences]

    def _log_probs(self, ids: torch.Tensor) -> NDArray[np.float32]:
        logits = self._model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        found: NDArray[np.float32] = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy()
        return found

    def learn(self) -> None:
        for parameter in self._model.parameters():
            parameter.mul_(1.01)


if __name__ == "__main__":
    main()
