"""What tests of replicas and their manager share: groups, replicas that are what a test says, a trainer's weights."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from practicum.controller.loop import run_sync
from practicum.errors import WeightsGone, WorkerDied, WorkerError
from practicum.models import load_model
from practicum.rollout.engines import EngineSettings
from practicum.rollout.manager import RolloutManager
from practicum.types import Prompt, PromptGroup, Sample, SamplingParams, Trajectory
from practicum.weights import ChannelSettings, Place, Ticket, choose, open_sender


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def on_the_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on the driver's loop, where managers of fixtures live."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_sync(test(*args, **kwargs))

    return run


def groups_of(num: int, max_new_tokens: int = 8, num_answers: int = 1, **more: Any) -> list[PromptGroup]:
    params = SamplingParams(max_new_tokens, num_answers=num_answers, ignore_eos=True)
    return [
        PromptGroup(f"{i}", Prompt(str(i), text="1"), np.array([5, 6, 3 + i % 9], np.int32), params, seed=i, **more)
        for i in range(num)
    ]


async def written(manager: RolloutManager, groups: Sequence[PromptGroup], **more: Any) -> list[PromptGroup]:
    """All groups, each of which must come once and be finished."""
    async with aclosing(manager.generate(groups, **more)) as generating:
        came: list[PromptGroup] = []
        async for some in generating:
            came += some
    assert sorted(map(id, came)) == sorted(map(id, groups))
    for group in came:
        assert group.is_finished and [t.number for t in group.trajectories] == list(range(group.params.num_answers))
        assert [sample.id for sample in group.samples] == [t.id for t in group.trajectories]
    return came


def answer_to(group: PromptGroup, trajectory: Trajectory, version: int = 0) -> Sample:
    """Its tokens say whose answer it is."""
    ids = np.array([group.seed, trajectory.number], np.int32)
    rest = np.zeros(2, np.float32), np.ones(2, np.bool_), np.full(2, version, np.int32)
    return Sample(group.prompt, group.prompt_ids, ids, *rest, text="", finish_reason="stop")


def assert_right(groups: Sequence[PromptGroup]) -> None:
    for group in groups:
        for trajectory in group.trajectories:
            (sample,) = trajectory.samples
            assert sample.token_ids.tolist() == [group.seed, trajectory.number]


class ScriptedReplica:
    """Finishes up to `pace` answers at a time. What crosses to it and back is copied, as between processes.

    `fate`: `dies_after` so many answers it is dead, `fails_after` its engine fails, `raises` an error of the request,
    `aborts` each answer once, `hangs` finishing nothing, `is_deaf` not even answering. It has it in `num_lives` lives.
    """

    def __init__(self, number: int = 0, pace: int = 4, workers: int = 1, *, num_lives: int = 1, **fate: Any) -> None:
        self.number = number
        self.name = f"rollout-{number}"
        self.is_own = True
        self.problem = ""
        self.num_restarts = 0
        self.num_workers = workers
        self.pace = pace
        self.fate = fate
        self.given: list[PromptGroup] = []
        self.lists: list[int] = []
        self.most_at_once = 0
        self.num_written = 0
        self.num_aborts = 0
        self.version = 0
        self.log: list[str] = []
        self._num_lives = num_lives
        self._rows: list[list[tuple[list[PromptGroup], PromptGroup, Trajectory]]] = [[] for _ in range(workers)]
        self._steps = [asyncio.Lock() for _ in range(workers)]
        self._num_in_life = 0

    async def generate(self, rank: int, groups: list[PromptGroup]) -> AsyncGenerator[list[PromptGroup], None]:
        groups = pickle.loads(pickle.dumps(groups))
        self.given += groups
        self.lists.append(len(groups))
        finished: list[PromptGroup] = []
        rows = [(finished, group, t) for group in groups for t in group.trajectories if not t.is_finished]
        self._rows[rank] += rows
        self.most_at_once = max(self.most_at_once, len(self._rows[rank]))
        left = len(rows)
        try:
            while left:
                async with self._steps[rank]:
                    if not finished:
                        await asyncio.sleep(0)
                        self._step(rank)
                    while "hangs" in self.fate:
                        await asyncio.sleep(3600)
                if finished:
                    left -= len(finished)
                    yield pickle.loads(pickle.dumps(finished))
                    finished.clear()
        finally:
            self._rows[rank] = [row for row in self._rows[rank] if row[0] is not finished]
            self.num_aborts += left > 0

    def _step(self, rank: int) -> None:
        rows = self._rows[rank][: self.pace]
        self._num_in_life += len(rows)
        if "raises" in self.fate:
            error = self.fate["raises"]
            raise WorkerError(f"{self.name} raised", group=self.name, ranks=[0], cause=error)
        if self._num_in_life > self.fate.get("dies_after", 10**9):
            raise WorkerDied(f"{self.name} died", group=self.name, ranks=[0])
        if self._num_in_life > self.fate.get("fails_after", 10**9):
            error = RuntimeError("the engine failed: OutOfMemoryError")
            raise WorkerError(f"{self.name} is tired", group=self.name, ranks=[0], cause=error)
        if "hangs" not in self.fate:
            del self._rows[rank][: self.pace]
            self.num_written += len(rows)
            for finished, group, trajectory in rows:
                finished.append(self._finish(group, trajectory))

    def _finish(self, group: PromptGroup, trajectory: Trajectory) -> PromptGroup:
        sample = answer_to(group, trajectory, self.version)
        if "aborts" in self.fate and not trajectory.samples:
            sample = replace(sample, finish_reason="abort")
        trajectory.add(sample)
        return replace(group, params=replace(group.params, num_answers=1), trajectories=[trajectory])

    async def ping(self, rank: int) -> None:
        if "is_deaf" in self.fate:
            raise WorkerDied(f"{self.name} did not answer", group=self.name, ranks=[0])

    async def update_weights(self, version: int, ticket: Ticket | None = None) -> None:
        self.version = version

    async def restart(self) -> None:
        await asyncio.sleep(0)
        self.num_restarts += 1
        self._num_in_life = 0
        if self.num_restarts >= self._num_lives:
            self.fate = {}

    async def wake_up(self) -> None:
        self.log.append("awake")

    async def sleep(self) -> None:
        self.log.append("asleep")

    async def end(self) -> None:
        self.log.append("ended")


def hf_settings(model: Path, max_batch: int = 16) -> EngineSettings:
    return EngineSettings("hf", str(model), device="cpu", max_batch=max_batch)


class ModelWeights:
    """A trainer's weights: those of `model`, which a test may change."""

    def __init__(self, model_path: Path, channel: str | None = None) -> None:
        self.model = load_model(str(model_path)).eval().requires_grad_(False)
        self.num_sent = 0
        self._num_learnt = 0
        self._sent = (-1, 0)
        self._channel = channel

    async def open(self, engines: Sequence[Place]) -> None:
        settings = ChannelSettings(timeout_s=30.0, num_receivers=len(engines))
        self._sender = open_sender(self._channel or choose(Place.here(), engines), settings)

    async def invite(self, version: int, num_receivers: int) -> Ticket | None:
        if self._sent[0] == version and self._sent[1] != self._num_learnt:
            raise WeightsGone(f"weights of version {version} are gone")
        return self._sender.invite(version, num_receivers)

    async def send(self, version: int) -> Ticket:
        self.num_sent += 1
        self._sent = (version, self._num_learnt)
        return await asyncio.to_thread(self._sender.send, version, self.model.named_parameters())

    async def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        with torch.no_grad():
            return [self._log_probs(torch.from_numpy(ids.astype(np.int64))) for ids in sequences]

    def _log_probs(self, ids: torch.Tensor) -> NDArray[np.float32]:
        logits = self.model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        found: NDArray[np.float32] = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy()
        return found

    def nudge(self) -> None:
        """As if it had learnt something."""
        self._num_learnt += 1
        for parameter in self.model.parameters():
            parameter.mul_(1.01)
