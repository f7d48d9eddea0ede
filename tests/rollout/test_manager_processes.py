"""The manager with engines in processes of their own and in this one: what dies, what hangs, new weights under load."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from practicum.config import RolloutConfig
from practicum.controller import Controller, LocalWorkerGroup, RayClassWithInitArgs, RayResourcePool
from practicum.controller.loop import run_sync
from practicum.errors import RolloutError, WorkerError
from practicum.rollout.manager import RolloutManager
from practicum.rollout.placement import open_replicas
from practicum.rollout.replica import RolloutReplica
from practicum.rollout.worker import RolloutWorker
from practicum.types import PromptGroup
from tests.rollout.replicas import ModelWeights, groups_of, hf_settings, on_the_loop, written

MAX_BATCH = 16


@pytest.fixture(scope="module")
def weights(tiny_model: Path) -> ModelWeights:
    return ModelWeights(tiny_model)


@pytest.fixture(scope="module")
def on_ray(weights: ModelWeights, tiny_model: Path, ray_session: None) -> Iterator[RolloutManager]:
    """Two replicas, each in a process of its own."""
    config = RolloutConfig(engine="hf", placement="colocated", max_batch=MAX_BATCH)
    with RayResourcePool([2], resources_per_process={"CPU": 0.5}) as pool:
        opening = open_replicas(
            config, Controller(pool, 120.0, 120.0), hf_settings(tiny_model, MAX_BATCH), weights, threads=1
        )
        manager = run_sync(opening.__aenter__())
        weights.nudge()  # other weights than in the files that a new process reads
        try:
            run_sync(manager.update_weights(1))
            yield manager
        finally:
            run_sync(opening.__aexit__(None, None, None))


@pytest.fixture
def manager(on_ray: RolloutManager) -> RolloutManager:
    """With the next version of the weights, and nobody missing."""
    run_sync(on_ray.update_weights(on_ray.version + 1))
    assert [replica.problem for replica in on_ray.replicas] == ["", ""]
    return on_ray


def tokens(groups: Sequence[PromptGroup]) -> dict[str, list[int]]:
    return {sample.id: sample.token_ids.tolist() for group in groups for sample in group.samples}


def versions(groups: Sequence[PromptGroup]) -> list[list[int]]:
    return [sorted(set(sample.versions.tolist())) for group in groups for sample in group.samples]


async def pids(manager: RolloutManager) -> list[int]:
    return [(await replica.where()).pid for replica in manager.replicas]


async def at_first(
    manager: RolloutManager, groups: Sequence[PromptGroup], do: Callable[[], object]
) -> list[PromptGroup]:
    """All groups; something is done when the first have come."""
    came: list[PromptGroup] = []
    async with aclosing(manager.generate(groups)) as generating:
        async for some in generating:
            if not came:
                do()
            came += some
    assert sorted(map(id, came)) == sorted(map(id, groups)) and all(group.is_finished for group in came)
    return came


@pytest.mark.slow
@on_the_loop
async def test_a_replica_killed_in_the_middle_costs_no_answer_and_is_back_for_the_next_call(
    manager: RolloutManager, weights: ModelWeights
) -> None:
    undisturbed = tokens(await written(manager, groups_of(256)))
    assert len(undisturbed) == 256
    victim, num_sent, num_restarts = (await pids(manager))[0], weights.num_sent, manager.replicas[0].num_restarts
    came = await at_first(manager, groups_of(256), lambda: os.kill(victim, signal.SIGKILL))
    assert tokens(came) == undisturbed  # seeds belong to groups: whoever writes, it is the same
    assert len(manager.healthy) == 2  # it has been waited for before they fell asleep
    assert tokens(await written(manager, groups_of(256))) == undisturbed
    assert victim not in await pids(manager) and manager.replicas[0].num_restarts == num_restarts + 1
    assert weights.num_sent == num_sent  # it read what had been sent to all


@pytest.mark.slow
@on_the_loop
async def test_no_answer_mixes_versions_when_new_weights_come_under_load(
    manager: RolloutManager, weights: ModelWeights
) -> None:
    old, new = manager.version, manager.version + 1
    before = tokens(await written(manager, groups_of(160, 24)))
    weights.nudge()
    updating: list[asyncio.Task[None]] = []
    came = await at_first(
        manager,
        groups_of(160, 24),
        lambda: updating.append(asyncio.create_task(manager.update_weights(new))),
    )
    await updating[0]
    assert manager.version == new
    assert {tuple(own) for own in versions(came)} == {(old,), (new,)}
    for group in came:
        if group.samples[0].versions[0] == old:
            assert group.samples[0].token_ids.tolist() == before[group.samples[0].id]
    assert versions(await written(manager, groups_of(4))) == [[new]] * 4


@pytest.mark.slow
def test_a_replica_that_hangs_is_replaced(manager: RolloutManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("practicum.rollout.replica._PING_S", 3.0)
    monkeypatch.setattr("practicum.rollout.manager._PING_EVERY_S", 1.0)

    async def run() -> None:
        victim = (await pids(manager))[1]
        await at_first(manager, groups_of(128), lambda: os.kill(victim, signal.SIGSTOP))
        assert victim not in await pids(manager)

    run_sync(run())


@on_the_loop
async def test_what_is_left_unread_is_aborted(manager: RolloutManager) -> None:
    restarts = manager.num_restarts
    async with aclosing(manager.generate(groups_of(200, 40))) as generating:
        await anext(generating)
    assert len(await written(manager, groups_of(10))) == 10
    assert manager.num_restarts == restarts


@on_the_loop
async def test_a_group_that_no_engine_can_answer_is_an_error_and_nobody_is_restarted(manager: RolloutManager) -> None:
    restarts = manager.num_restarts
    others = asyncio.create_task(written(manager, groups_of(40)))
    with pytest.raises(RolloutError, match=r"rollout-\d: prompt 0 has 3 tokens.*room for 64"):
        await written(manager, groups_of(1, 500))
    assert len(await others) == 40 and manager.num_restarts == restarts


@on_the_loop
async def test_several_calls_write_the_same_as_one_after_the_other(manager: RolloutManager) -> None:
    alone = tokens(await written(manager, groups_of(40, num_answers=2)))
    calls = (written(manager, groups_of(40, num_answers=2), priority=priority) for priority in (2, 1, 0))
    assert [tokens(came) for came in await asyncio.gather(*calls)] == [alone] * 3


@pytest.mark.slow
def test_new_weights_do_not_wait_for_a_replica_that_was_killed(tiny_model: Path, ray_session: None) -> None:
    """By a broadcast, where all meet, as between machines: the channel would wait for half a minute."""

    async def run(pool: RayResourcePool) -> None:
        weights = ModelWeights(tiny_model, channel="collective")
        config = RolloutConfig(engine="hf", placement="colocated", max_batch=MAX_BATCH)
        controller, settings = Controller(pool, 120.0, 120.0), hf_settings(tiny_model, MAX_BATCH)
        async with open_replicas(config, controller, settings, weights, threads=1) as manager:
            await manager.update_weights(1)
            os.kill((await pids(manager))[0], signal.SIGKILL)
            weights.nudge()
            await manager.update_weights(2)
            assert manager.replicas[1] in manager.healthy
            assert versions(await written(manager, groups_of(8))) == [[2]] * 8
            assert len(manager.healthy) == 2

    with RayResourcePool([2], resources_per_process={"CPU": 0.5}) as pool:
        run_sync(run(pool))


@asynccontextmanager
async def in_process(
    weights: ModelWeights, model: Path, placement: Any = "standalone", *, partial: bool = True
) -> AsyncIterator[RolloutManager]:
    """One replica in this process."""
    config = RolloutConfig(engine="hf", placement=placement, max_batch=MAX_BATCH, partial=partial)
    settings = hf_settings(model, MAX_BATCH)
    async with open_replicas(config, Controller(None, 120.0, 120.0), settings, weights, threads=1) as manager:
        await manager.update_weights(1)
        yield manager


def test_weights_that_did_not_arrive_right_are_noticed(
    weights: ModelWeights, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = weights.log_probs

    async def wrong(sequences: Any) -> Any:
        return [found * 1.5 for found in await right(sequences)]

    async def run() -> None:
        async with in_process(weights, tiny_model) as manager:
            with monkeypatch.context() as patch:
                patch.setattr(weights, "log_probs", wrong)
                with pytest.raises(RolloutError, match=r"no replica can write.*is not the model that the trainer has"):
                    await manager.update_weights(2)
            await manager.update_weights(3)  # whoever stayed away is tried again
            assert versions(await written(manager, groups_of(4))) == [[3]] * 4

    run_sync(run())


@pytest.mark.parametrize("partial", [False, True])
@on_the_loop
async def test_answers_are_continued_under_new_weights_with_partial_rollout_alone(
    weights: ModelWeights, tiny_model: Path, partial: bool
) -> None:
    async with in_process(weights, tiny_model, partial=partial) as manager:

        async def update() -> None:
            for version in itertools.count(2):
                await manager.update_weights(version)
                await asyncio.sleep(0.02)

        updating: list[asyncio.Task[None]] = []
        is_mixed = False
        for _ in range(10):  # new weights may come between two batches: until they have come in the middle of one
            came = await at_first(
                manager,
                groups_of(160, 48),
                lambda: None if updating else updating.append(asyncio.create_task(update())),
            )
            for group in came:
                (sample,) = group.samples
                assert (sample.versions[:-1] <= sample.versions[1:]).all() and len(sample.token_ids) == 48
            is_mixed = any(len(own) > 1 for own in versions(came))
            if is_mixed or not partial:
                break
        updating[0].cancel()
        with suppress(asyncio.CancelledError):
            await updating[0]
        assert is_mixed == partial and manager.version > 1


@on_the_loop
async def test_the_trainers_own_processes_are_not_started_again(tiny_model: Path) -> None:
    with LocalWorkerGroup(RayClassWithInitArgs(RolloutWorker, hf_settings(tiny_model)), name="learners") as group:
        manager = RolloutManager([RolloutReplica.hybrid(group)], window=None, delivery=None, sleeps=True)
        assert len(await written(manager, groups_of(4))) == 4
        group.shutdown()
        with pytest.raises((RolloutError, WorkerError), match="learners"):
            await written(manager, groups_of(4))


@on_the_loop
async def test_a_replica_that_is_back_while_the_trainer_learns_is_waited_for(
    weights: ModelWeights, tiny_model: Path
) -> None:
    async with in_process(weights, tiny_model) as manager:
        delivery = manager._delivery
        assert delivery is not None

        async def publish() -> None:
            await manager._wait_for_restarts()
            assert manager._late  # it is back, without weights
            await manager.update_weights(2)

        publishing: list[asyncio.Task[None]] = []

        def lose() -> None:
            weights.nudge()  # what had been sent cannot be sent again
            delivery._ticket = None
            manager._mark_failed(manager.replicas[0], "it is gone")
            publishing.append(asyncio.create_task(publish()))

        came = await at_first(manager, groups_of(64, 40), lose)
        await publishing[0]
        assert [2] in versions(came)


@pytest.mark.parametrize("placement", ["colocated", "standalone"])
@on_the_loop
async def test_after_new_weights_replicas_wait_awake_or_asleep(
    weights: ModelWeights, tiny_model: Path, placement: Any
) -> None:
    async with in_process(weights, tiny_model, placement) as manager:
        worker: Any = manager.replicas[0]._group._hosts[0]._worker  # type: ignore[attr-defined]
        assert worker._engine.is_awake
        await manager.update_weights(2, stays_awake=False)
        assert worker._engine.is_awake == (placement == "standalone")  # those have their devices to themselves
        assert versions(await written(manager, groups_of(4))) == [[2]] * 4
