from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from practicum.config import AgentConfig
from practicum.controller import FusedWorker, LocalWorkerGroup, RayClassWithInitArgs, Worker, WorkerContext
from practicum.errors import ConversationError, RolloutError, TrainingError
from practicum.models import load_model
from practicum.rollout.worker import RolloutWorker, _joined, _to_send
from practicum.types import CodedRoutes, PromptGroup, RoutedExperts
from practicum.weights import WeightUpdate
from tests.rollout.replicas import ModelWeights, answer_to, groups_of, hf_settings, in_a_loop

TALKS = f"{Path(__file__).parent / 'talks.py'}:Once"


@asynccontextmanager
async def worker_of(model: Path, **more: Any) -> AsyncIterator[RolloutWorker]:
    packed = RayClassWithInitArgs(RolloutWorker, hf_settings(model, 4), **more)
    worker = packed.build(WorkerContext("rollout-0"))
    await worker.resume()
    try:
        yield worker
    finally:
        await worker.close()


async def written(worker: RolloutWorker, groups: Sequence[PromptGroup]) -> list[PromptGroup]:
    """What came, in the order in which it came."""
    async with aclosing(worker.generate(list(groups))) as generating:
        return [group for some in [some async for some in generating] for group in some]


@in_a_loop
async def test_trajectories_come_as_they_are_finished_each_once(tiny_model: Path) -> None:
    async with worker_of(tiny_model) as worker:
        came = await written(worker, groups_of(6, num_answers=2))
        numbers = sorted((group.id, t.number) for group in came for t in group.trajectories)
        assert numbers == [(str(i), n) for i in range(6) for n in range(2)]
        assert all(group.is_finished for group in came) and await written(worker, []) == []


@in_a_loop
async def test_only_missing_trajectories_are_written(tiny_model: Path) -> None:
    async with worker_of(tiny_model) as worker:
        (group,) = groups_of(1, num_answers=3)
        group.trajectories[1].add(answer_to(group, group.trajectories[1]))
        came = await written(worker, [group])
        assert sorted(t.number for own in came for t in own.trajectories) == [0, 2]


@in_a_loop
async def test_leaving_early_aborts_the_rest(tiny_model: Path) -> None:
    async with worker_of(tiny_model) as worker:
        async with aclosing(worker.generate(groups_of(40, 50))) as generating:
            await anext(generating)
        assert not worker._engine.num_running and not worker._engine.num_waiting
        await worker.release()
        await worker.resume()
        assert len(await written(worker, groups_of(2))) == 2


@pytest.mark.parametrize(
    ("more", "keeps"),
    [
        ({}, False),
        ({"is_partial": True}, True),
        ({"is_partial": True, "agent": AgentConfig(environment=TALKS, max_turns=3)}, False),
    ],
    ids=["whole", "partial", "environment"],
)
@in_a_loop
async def test_an_aborted_answer_leaves_only_if_it_can_be_continued(
    tiny_model: Path, more: dict[str, Any], keeps: bool
) -> None:
    async with worker_of(tiny_model, **more) as worker:
        writing = asyncio.create_task(written(worker, groups_of(40, 50)))
        while not worker._engine.num_running:
            await asyncio.sleep(0)
        (worker._conversations or worker._engine).abort()
        aborted = [t for group in await writing for t in group.trajectories if not t.is_finished]
        assert aborted and all(bool(t.samples) == keeps for t in aborted)
        assert keeps or not any(t.counts for t in aborted)


@in_a_loop
async def test_the_engine_that_is_not_free_is_named_before_the_call_is_too_late(tiny_model: Path) -> None:
    async with worker_of(tiny_model, timeout_s=2.0) as worker, worker._engine.generating():
        with pytest.raises(TimeoutError, match="the engine was not free within"):
            async with asyncio.timeout(2.0):
                await worker.update_weights(1)


@in_a_loop
async def test_a_bad_request_is_refused_before_anything_is_written(tiny_model: Path) -> None:
    async with worker_of(tiny_model) as worker:
        with pytest.raises(RolloutError, match="room for 64"):
            await written(worker, [*groups_of(1), *groups_of(1, 500)])
        assert not worker._engine.num_running and not worker._engine.num_waiting


@pytest.mark.parametrize("agent", [None, AgentConfig(environment=TALKS)], ids=["answers", "conversations"])
@in_a_loop
async def test_a_request_is_checked_once(tiny_model: Path, agent: AgentConfig | None) -> None:
    async with worker_of(tiny_model, agent=agent) as worker:
        check, checked = worker._engine.check, []
        worker._engine.check = lambda request: (checked.append(request.prompt.id), check(request))[1]  # type: ignore[method-assign]
        generating = worker.generate(groups_of(3))
        await anext(generating)
        assert checked[:3] == ["0", "1", "2"] and (agent is not None or len(checked) == 3)
        await generating.aclose()


@in_a_loop
async def test_a_failure_of_the_engine_comes_after_what_was_finished(tiny_model: Path) -> None:
    async with worker_of(tiny_model) as worker:
        right = worker._engine.model.module.generate  # type: ignore[attr-defined]
        calls = []

        def out_of_memory(*args: object, **kwargs: object) -> object:
            calls.append(1)
            if len(calls) == 2:
                raise torch.cuda.OutOfMemoryError("no room")
            return right(*args, **kwargs)

        worker._engine.model.module.generate = out_of_memory  # type: ignore[attr-defined]
        came: list[PromptGroup] = []
        with pytest.raises(RuntimeError, match="the engine failed: OutOfMemoryError: no room"):
            async with aclosing(worker.generate(groups_of(8, 3))) as generating:
                async for some in generating:
                    came += some
        assert len(came) == 4
        assert len(await written(worker, groups_of(2))) == 2


@in_a_loop
async def test_a_server_that_fails_is_a_failure_of_this_engine(tiny_model: Path, monkeypatch: Any) -> None:
    async with worker_of(tiny_model) as worker:

        async def broken(groups: Any) -> AsyncGenerator[list[PromptGroup], None]:
            raise RolloutError("the server died")
            yield []

        monkeypatch.setattr(worker._engine, "generate", broken)
        with pytest.raises(RuntimeError, match="the engine failed: RolloutError: the server died"):
            await written(worker, groups_of(1))


@in_a_loop
async def test_spoilt_weights_are_no_matter_of_this_engine(tiny_model: Path) -> None:
    async with worker_of(tiny_model) as worker:
        weights = ModelWeights(tiny_model, channel="shared")
        await weights.open([await worker.where()])
        for parameter in weights.model.parameters():
            parameter.fill_(float("nan"))
        await worker.update_weights(1, await weights.send(1))
        with pytest.raises(TrainingError, match="no longer numbers"):
            await written(worker, groups_of(2))


@in_a_loop
async def test_a_conversation_that_fails_is_no_matter_of_this_engine(tiny_model: Path) -> None:
    agent = AgentConfig(environment="tests/rollout/agents.py:CannotReset")
    async with worker_of(tiny_model, agent=agent) as worker:
        for group in await written(worker, groups_of(2)):
            for trajectory in group.trajectories:
                assert trajectory.is_finished and trajectory.score is not None
                assert "no level of that name" in trajectory.score.reason

        async def broken(*_: Any) -> Any:
            raise KeyError("oh")

        worker._conversations.user_code.run = broken
        with pytest.raises(ConversationError, match="its conversation failed: KeyError: 'oh'"):
            await written(worker, groups_of(2))


@in_a_loop
async def test_weights_come_by_a_channel_and_are_the_trainers(tiny_model: Path) -> None:
    async with worker_of(tiny_model) as worker:
        weights = ModelWeights(tiny_model, channel="shm")
        await weights.open([await worker.where()])
        weights.nudge()
        sequences = [np.array([4, 5, 6, 7], np.int32)]
        (before,) = await worker.log_probs(sequences)
        await worker.release()
        await worker.update_weights(5, await weights.send(5))  # wakes it up
        (after,) = await worker.log_probs(sequences)
        assert np.abs(after - (await weights.log_probs(sequences))[0]).max() < 1e-5
        assert np.abs(after - before).max() > 1e-4
        (group,) = await written(worker, groups_of(1))
        assert set(group.samples[0].versions.tolist()) == {5}


@pytest.mark.parametrize("is_partial", [False, True])
@in_a_loop
async def test_weights_come_between_two_answers_or_within_them(tiny_model: Path, is_partial: bool) -> None:
    async with worker_of(tiny_model, is_partial=is_partial) as worker:
        weights = ModelWeights(tiny_model, channel="shm")
        await weights.open([await worker.where()])
        await worker.update_weights(1, await weights.send(1))
        ticket = await weights.send(2)
        writing = asyncio.create_task(written(worker, groups_of(40, 48)))
        while not worker._engine.num_running:
            await asyncio.sleep(0.001)
        await worker.update_weights(2, ticket)
        versions = [sample.versions.tolist() for group in await writing for sample in group.samples]
        assert all(own == sorted(own) and len(own) == 48 for own in versions)
        if is_partial:
            assert {2} in [set(own) for own in versions] or {1, 2} in [set(own) for own in versions]
        else:
            assert all(len(set(own)) == 1 for own in versions)
            assert {own[0] for own in versions} == {1, 2}  # what had not been begun waited for the new weights


@in_a_loop
async def test_asleep_and_awake_as_often_as_it_is_told(tiny_model: Path) -> None:
    async with worker_of(tiny_model) as worker:
        (before,) = await written(worker, groups_of(1))
        for _ in range(2):
            await worker.release()
        for _ in range(2):
            await worker.resume()
        (after,) = await written(worker, groups_of(1))
        assert after.samples[0].token_ids.tolist() == before.samples[0].token_ids.tolist()


@in_a_loop
async def test_with_an_agent_answers_are_conversations(tiny_model: Path) -> None:
    agent = AgentConfig(environment=TALKS, max_turns=3)
    async with worker_of(tiny_model, agent=agent) as worker:
        groups = groups_of(16, 40)
        for group in groups:
            object.__setattr__(group.params, "ignore_eos", False)
        came = await written(worker, groups)
        assert len(came) == 16
        masks = [group.samples[0].loss_mask for group in came]
        assert any(not mask.all() and mask[-1] for mask in masks)  # it was told something, and went on
        assert all(1 <= group.trajectories[0].counts["turns"] <= 3 for group in came)


def routes_of(num: int) -> RoutedExperts:
    experts = np.arange(num, dtype=np.uint8).reshape(num, 1, 1) % 4
    return RoutedExperts(experts, np.zeros(1, np.int32), np.ones(num, np.bool_), 4)


def test_routes_of_finished_samples_leave_coded() -> None:
    (group,) = groups_of(1, num_answers=3)
    for trajectory, reason in zip(group.trajectories, ("stop", "abort", "stop"), strict=True):
        sample = answer_to(group, trajectory)
        sample.finish_reason = reason  # type: ignore[assignment]
        sample.routes = routes_of(sample.num_tokens)
        trajectory.add(sample)
    parts = [
        PromptGroup(group.id, group.prompt, group.prompt_ids, groups_of(1)[0].params, 0, [t])
        for t in group.trajectories
    ]
    (sent,) = _to_send(parts)
    assert [t.number for t in sent.trajectories] == [0, 1, 2]
    assert [type(sample.routes) for sample in sent.samples] == [CodedRoutes, RoutedExperts, CodedRoutes]
    (there,) = pickle.loads(pickle.dumps([sent]))
    assert [len(sample.routes) for sample in there.samples] == [5, 5, 5]


@in_a_loop
async def test_lists_that_follow_closely_leave_together_and_the_last_at_once() -> None:
    async def lists() -> AsyncGenerator[list[int], None]:
        yield [0]
        yield [1, 2]
        await asyncio.sleep(0.2)
        yield [3]
        yield [4]
        await asyncio.sleep(3600)

    found = []
    async with aclosing(_joined(lists(), 5)) as joined:
        async for some in joined:
            found.append(some)
            if len(found) == 2:
                break
    assert found == [[0, 1, 2], [3, 4]]


class FrozenSource(Worker):
    """Publishes a model's weights as the trainer would."""

    def __init__(self, model_path: str) -> None:
        self.model = load_model(model_path)

    def publish(self, version: int) -> WeightUpdate:
        return WeightUpdate(version, self.model.named_parameters(), shared=True)


@in_a_loop
async def test_the_engine_writes_with_the_weights_of_the_role_beside_it(tiny_model: Path) -> None:
    source = RayClassWithInitArgs(FrozenSource, str(tiny_model))
    rollout = RayClassWithInitArgs(RolloutWorker, hf_settings(tiny_model), weights_from="source")
    group = LocalWorkerGroup(RayClassWithInitArgs(FusedWorker, source=source, rollout=rollout), name="hybrid")
    workers = group.role("rollout", RolloutWorker)
    await workers.execute_all_async(RolloutWorker.update_weights, 3)
    came: list[PromptGroup] = []
    async with aclosing(workers.stream(0, RolloutWorker.generate, groups_of(1, num_answers=2))) as generating:
        async for some in generating:
            came += some
    samples = [sample for own in came for sample in own.samples]
    assert len(samples) == 2 and all(set(sample.versions.tolist()) == {3} for sample in samples)
    await asyncio.to_thread(group.shutdown)
