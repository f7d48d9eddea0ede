"""What rollout promises, counted: every number here is 0 where it is kept, or bounded as the README of bench says.

kill          a replica in a process of its own is killed in the middle of a batch: is each answer there, once?
new weights   they come while answers are written: does every answer tell one version, the old or the new?
conversation  fifty turns with a tool: are the tokens the trainer gets those that the engine had, all of them?
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.harness import BenchError, Options, Row
from bench.rollout_talk import conversation_rows
from practicum.config import RolloutConfig
from practicum.controller import Controller, RayResourcePool, ray_cluster
from practicum.demo.arithmetic import make_model, make_tokenizer
from practicum.models import load_model, save_model
from practicum.rollout.engines import EngineSettings
from practicum.rollout.manager import RolloutManager
from practicum.rollout.placement import ReplicaSettings, open_replicas
from practicum.types import Prompt, RolloutRequest, SamplingParams
from practicum.weights import ChannelSettings, Place, Ticket, choose, open_sender

KILL, UPDATE, CONVERSATION = "kill", "update under load", "conversation"
NUM_REPLICAS, MAX_BATCH = 2, 16
NUM_ANSWERS = 256
PATIENCE_S = 120.0
Answers = dict[tuple[int, int], Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    new_tokens: int
    num_turns: int


FULL, QUICK = Sizes(new_tokens=48, num_turns=50), Sizes(new_tokens=16, num_turns=50)


def rows(options: Options, folder: Path) -> list[Row]:
    sizes = QUICK if options.quick else FULL
    found: list[Row] = []
    torch.set_num_threads(1)
    if options.wants(CONVERSATION):
        found += conversation_rows(CONVERSATION, folder / CONVERSATION, sizes.num_turns)
    if options.wants(KILL) or options.wants(UPDATE):
        model = folder / "replicas"
        save_model(make_model(0), make_tokenizer(), model)
        with ray_cluster():
            found += _with_replicas(model, sizes)
    return found


def _with_replicas(model: Path, sizes: Sizes) -> list[Row]:
    """Nobody else uses their places and they never sleep: standalone ones, with the trainer in this process."""
    config = RolloutConfig(placement="colocated", max_batch=MAX_BATCH)
    engine = EngineSettings("native", str(model), device="cpu", max_batch=MAX_BATCH, cache_gb=0.05)
    times = ReplicaSettings(threads=1, start_timeout_s=PATIENCE_S, call_timeout_s=PATIENCE_S)
    weights = TrainersEnd(model)
    with RayResourcePool([NUM_REPLICAS], resources_per_process={"CPU": 1}) as pool:
        controller = Controller(pool, PATIENCE_S, PATIENCE_S)
        with open_replicas(config, controller, engine, weights, times) as manager:
            manager.sleeps = False
            manager.update_weights(1)
            return [*kill_rows(manager, sizes), *update_rows(manager, weights, sizes)]


def kill_rows(manager: RolloutManager, sizes: Sizes) -> list[Row]:
    asked = _requests(sizes.new_tokens)
    expected, _, undisturbed_s = _written(manager, asked)
    victim = manager.replicas[0].where().pid
    found, times, seconds = _written(manager, asked, lambda: os.kill(victim, signal.SIGKILL))
    deadline = time.monotonic() + PATIENCE_S
    while len(manager.well()) < NUM_REPLICAS:
        if time.monotonic() > deadline:
            raise BenchError(f"the replica that was killed was not back within {PATIENCE_S:g} s")
        time.sleep(0.05)
    others = sum(found[place].token_ids.tolist() != own.token_ids.tolist() for place, own in expected.items())
    return [
        Row(KILL, f"answers of {NUM_ANSWERS} that did not come", len(expected) - len(found), better="lower"),
        Row(KILL, "answers that came twice", sum(times.values()) - len(found), better="lower"),
        Row(KILL, "answers with other tokens than undisturbed", others, better="lower"),
        Row(KILL, "s for all answers", seconds, undisturbed_s, "undisturbed", better="lower"),
    ]


def update_rows(manager: RolloutManager, weights: TrainersEnd, sizes: Sizes) -> list[Row]:
    old, new = manager.version, manager.version + 1
    weights.learn()
    updating = threading.Thread(target=manager.update_weights, args=(new,))
    found, _, _ = _written(manager, _requests(sizes.new_tokens), updating.start)
    updating.join(PATIENCE_S)
    versions = [set(sample.versions.tolist()) for sample in found.values()]
    told = [versions.count({version}) for version in (old, new)]
    return [
        Row(UPDATE, "answers that mix versions or tell another", len(versions) - sum(told), better="lower"),
        Row(UPDATE, "answers by the old weights", told[0]),
        Row(UPDATE, "answers by the new weights", told[1]),
    ]


def _requests(new_tokens: int) -> list[RolloutRequest]:
    params = SamplingParams(new_tokens, ignore_eos=True)
    return [
        RolloutRequest(Prompt(str(i), text="a sum"), np.array([5, 6, 3 + i % 9], np.int32), params, seed=i)
        for i in range(NUM_ANSWERS)
    ]


def _written(
    manager: RolloutManager, requests: Sequence[RolloutRequest], at_first: Callable[[], object] | None = None
) -> tuple[Answers, Counter[tuple[int, int]], float]:
    """The answers, how often each came, and how long it took. `at_first` is done when the first have come."""
    samples: Answers = {}
    times: Counter[tuple[int, int]] = Counter()
    began = time.perf_counter()
    for answers in manager.write(requests):
        if at_first is not None and not samples:
            at_first()
        for answer in answers:
            times[answer.request, answer.number] += 1
            samples[answer.request, answer.number] = answer.sample
    return samples, times, time.perf_counter() - began


class TrainersEnd:
    """Of the weights: a model in this process that is sent to the replicas."""

    def __init__(self, folder: Path) -> None:
        self._model = load_model(str(folder)).eval().requires_grad_(False)
        self._thread = ThreadPoolExecutor(1)

    def open(self, engines: Sequence[Place]) -> None:
        settings = ChannelSettings(timeout_s=PATIENCE_S, num_receivers=len(engines))
        self._sender = open_sender(choose(Place.here(), engines), settings)

    def invite(self, version: int, num_receivers: int) -> Ticket | None:
        return self._sender.invite(version, num_receivers)

    def send(self, version: int) -> Callable[[], Ticket]:
        return self._thread.submit(self._sender.send, version, self._model.named_parameters()).result

    def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        with torch.no_grad():
            return [self._log_probs(torch.from_numpy(ids.astype(np.int64))) for ids in sequences]

    def _log_probs(self, ids: torch.Tensor) -> NDArray[np.float32]:
        logits = self._model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        found: NDArray[np.float32] = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy()
        return found

    def learn(self) -> None:
        for parameter in self._model.parameters():
            parameter.mul_(1.01)
