"""The manager with replicas that are nothing but what a test says they are, and with engines in processes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import pytest

from practicum.errors import RolloutError, TrainingError, WorkerDied, WorkerError
from practicum.rollout.manager import RolloutManager
from practicum.rollout.replica import RolloutReplica
from practicum.types import PromptGroup
from tests.rollout.replicas import ScriptedReplica, answer_to, assert_right, groups_of, in_a_loop, written


def manager_of(*replicas: ScriptedReplica, window: int | None = 8, **more: Any) -> RolloutManager:
    more = {"delivery": None, "sleeps": False} | more
    return RolloutManager(cast(list[RolloutReplica], list(replicas)), window=window, **more)


def write(groups: Sequence[PromptGroup], *replicas: ScriptedReplica, **more: Any) -> list[PromptGroup]:
    async def run() -> list[PromptGroup]:
        async with manager_of(*replicas, **more) as manager:
            return await written(manager, groups)

    came = asyncio.run(run())
    assert_right(came)
    return came


# How work is shared out


def test_a_fast_replica_writes_more_and_none_has_more_than_its_window() -> None:
    slow, fast = ScriptedReplica(0, pace=1), ScriptedReplica(1, pace=8)
    write(groups_of(240), slow, fast, window=16)
    assert fast.num_written > 2 * slow.num_written > 0
    assert slow.most_at_once <= 16 and fast.most_at_once <= 16


def test_no_worker_is_left_without_work_while_there_is_some() -> None:
    replicas = [ScriptedReplica(n, pace=3) for n in range(4)]
    write(groups_of(100, num_answers=2), *replicas)
    assert max(own.num_written for own in replicas) - min(own.num_written for own in replicas) <= 12


def test_few_prompts_with_many_answers_are_shared_out_too() -> None:
    replicas = [ScriptedReplica(n) for n in range(4)]
    write(groups_of(1, num_answers=32), *replicas)
    assert all(own.num_written == 8 for own in replicas)


def test_without_a_window_all_is_shared_out_by_order_alone() -> None:
    own = ScriptedReplica(0, pace=2, workers=2)
    write(groups_of(5, num_answers=3), own, window=None)
    assert [group.id for group in own.given] == ["0", "1", "2", "3", "4"] and own.lists == [3, 2]
    assert all(group.params.num_answers == 3 for group in own.given)


def test_lists_do_not_fall_to_pieces() -> None:
    own = ScriptedReplica(0, pace=1)
    write(groups_of(256), own, window=64)
    assert min(own.lists[:-1]) >= 4


def test_the_longest_are_begun_first() -> None:
    own = ScriptedReplica(0, pace=1)
    groups = [*groups_of(4, max_new_tokens=4), *groups_of(8, max_new_tokens=40)[4:]]
    write(groups, own, window=2)
    assert [group.id for group in own.given[:4]] == ["4", "5", "6", "7"]


def test_what_is_written_of_an_answer_already_does_not_count_to_its_length() -> None:
    own, groups = ScriptedReplica(0, pace=1), groups_of(6)
    for group in groups[:3]:
        group.trajectories[0].add(replace(answer_to(group, group.trajectories[0]), finish_reason="abort"))
    write(groups, own, window=2)
    assert [group.id for group in own.given[:3]] == ["3", "4", "5"]


def test_sources_whose_answers_are_longer_are_begun_first() -> None:
    own = ScriptedReplica(0, pace=1)
    short, unknown = groups_of(4, 100), groups_of(8, 100)[4:]
    for group in unknown:
        group.prompt = replace(group.prompt, data_source="unknown")

    async def run() -> None:
        async with manager_of(own, window=2) as manager:
            assert_right(await written(manager, groups_of(4, 100)))  # of the same source as the short ones
            own.given.clear()
            assert_right(await written(manager, [*short, *unknown]))

    asyncio.run(run())
    assert [group.id for group in own.given[:4]] == ["4", "5", "6", "7"]


def test_what_is_finished_already_is_not_written_again() -> None:
    own, groups = ScriptedReplica(0), groups_of(2, num_answers=3)
    for trajectory in (*groups[0].trajectories, groups[1].trajectories[1]):
        trajectory.add(answer_to(groups[0] if trajectory in groups[0].trajectories else groups[1], trajectory))
    write(groups, own)
    assert [(group.id, t.number) for group in own.given for t in group.trajectories] == [("1", 0), ("1", 2)]


def test_nothing_to_write_is_written_at_once() -> None:
    assert write([], ScriptedReplica(0)) == []


def test_two_groups_of_one_id_are_refused() -> None:
    with pytest.raises(RolloutError, match="two prompt groups have the id '0'"):
        write([*groups_of(1), *groups_of(1)], ScriptedReplica(0))


def test_a_session_stays_with_its_worker_while_that_lives() -> None:
    async def run() -> None:
        one, other = ScriptedReplica(0, pace=2), ScriptedReplica(1, pace=2)
        async with manager_of(one, other, window=4) as manager:
            for _ in range(2):  # also from one call to the next
                groups = groups_of(40)
                for i, group in enumerate(groups):
                    group.session = f"talk-{i % 5}"
                await written(manager, groups)
            talks = [{group.session for group in own.given} for own in (one, other)]
            assert not talks[0] & talks[1] and len(talks[0] | talks[1]) == 5
            one._num_lives, one.fate, one._num_in_life = 99, {"dies_after": 3}, 0
            assert_right(await written(manager, groups_of(40, session="talk-0")))

    asyncio.run(run())


# Several calls


@in_a_loop
async def test_calls_share_the_workers_and_the_lowest_priority_goes_first() -> None:
    own = ScriptedReplica(0, pace=1)
    order: list[str] = []
    async with manager_of(own, window=2) as manager:

        async def call(name: str, priority: int) -> None:
            groups = groups_of(20)
            for group in groups:
                group.id = f"{name}{group.id}"
            assert_right(await written(manager, groups, priority=priority))
            order.append(name)

        await asyncio.gather(call("late", 2), call("soon", 1), call("first", -1))
    assert order == ["first", "soon", "late"]
    begun = [group.id.rstrip("0123456789") for group in own.given]
    assert begun.count("first") == begun.count("soon") == begun.count("late") == 20
    assert begun.index("soon") < begun.index("late", 2)


@in_a_loop
async def test_a_call_that_is_left_early_is_aborted_and_others_go_on() -> None:
    replicas = [ScriptedReplica(n, pace=1) for n in range(2)]
    async with manager_of(*replicas) as manager:
        others = asyncio.create_task(written(manager, groups_of(60)))
        async with aclosing(manager.generate(groups_of(200, num_answers=2))) as generating:
            await anext(generating)
        assert sum(own.num_aborts for own in replicas) >= 1
        assert_right(await others)
        assert sum(len(own.given) for own in replicas) < 200
        assert_right(await written(manager, groups_of(10)))


@in_a_loop
async def test_a_cancelled_call_aborts_its_rest() -> None:
    own = ScriptedReplica(0, hangs=True, num_lives=9)
    async with manager_of(own, sleeps=True) as manager:
        call = asyncio.create_task(written(manager, groups_of(20)))
        while not own.given:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert own.num_aborts == 1 and own.log == ["awake", "asleep"]
        own.fate = {}
        assert_right(await written(manager, groups_of(20)))


@in_a_loop
async def test_a_call_that_is_cancelled_twice_leaves_no_work_behind() -> None:
    is_aborting, may_end = asyncio.Event(), asyncio.Event()

    class Slow(ScriptedReplica):
        async def generate(self, rank: int, groups: list[PromptGroup]) -> AsyncGenerator[list[PromptGroup], None]:
            try:
                async with aclosing(super().generate(rank, groups)) as generating:
                    async for some in generating:
                        yield some
            except asyncio.CancelledError:
                is_aborting.set()
                await may_end.wait()
                raise

    own = Slow(0, hangs=True)
    async with manager_of(own) as manager, asyncio.timeout(20):
        call = asyncio.create_task(written(manager, groups_of(20)))
        while not own.given:
            await asyncio.sleep(0)
        call.cancel()
        await is_aborting.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        own.fate = {}
        may_end.set()
        assert_right(await written(manager, groups_of(20)))
        assert not own.num_restarts


@in_a_loop
async def test_a_block_that_is_cancelled_as_it_ends_does_not_keep_replicas_awake() -> None:
    is_updating, may_end = asyncio.Event(), asyncio.Event()

    class Slow(ScriptedReplica):
        async def update_weights(self, version: int, ticket: Any = None) -> None:
            is_updating.set()
            await may_end.wait()

    own = Slow(0)
    async with manager_of(own, sleeps=True) as manager, asyncio.timeout(20):

        async def stay_awake() -> None:
            async with manager.awake():
                await is_updating.wait()

        block = asyncio.create_task(stay_awake())
        while not own.log:
            await asyncio.sleep(0)
        update = asyncio.create_task(manager.update_weights(1))
        await is_updating.wait()
        await asyncio.sleep(0.01)  # the block waits for the weights
        block.cancel()
        await asyncio.wait([block])
        may_end.set()
        await update
        async with manager.awake():
            pass
        assert own.log[-1] == "asleep"


@in_a_loop
async def test_replicas_sleep_when_the_last_block_ends() -> None:
    own = ScriptedReplica(0)
    async with manager_of(own, sleeps=True) as manager:
        async with manager.awake():
            await asyncio.gather(written(manager, groups_of(8)), written(manager, groups_of(8)))
            assert own.log == ["awake"]
        assert own.log == ["awake", "asleep"]
        await manager.update_weights(1)
        assert own.log == ["awake", "asleep"]
        await manager.update_weights(2, stays_awake=False)
        assert own.log == ["awake", "asleep", "asleep"]


@in_a_loop
async def test_nothing_is_sent_while_new_weights_are_on_their_way() -> None:
    class Slow(ScriptedReplica):
        async def update_weights(self, version: int, ticket: Any = None) -> None:
            while any(self._rows):  # as an engine: answers under way are finished first
                await asyncio.sleep(0)
            num_given = len(self.given)
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(self.given) == num_given
            self.version = version

    own = Slow(0, pace=1)
    async with manager_of(own) as manager:
        call = asyncio.create_task(written(manager, groups_of(100)))
        for version in range(1, 4):
            while own.num_written < 20 * version:
                await asyncio.sleep(0)
            await manager.update_weights(version)
        came = await call
    assert {int(sample.versions[0]) for group in came for sample in group.samples} == {0, 1, 2, 3}


# Replicas that are lost


@pytest.mark.parametrize("fate", [{"dies_after": 5}, {"fails_after": 5}])
def test_what_a_lost_replica_had_is_written_by_others(fate: dict[str, int]) -> None:
    lost = ScriptedReplica(0, pace=3, **fate)
    write(groups_of(30, num_answers=4), lost, ScriptedReplica(1, pace=3))
    assert lost.num_restarts == 1 and not lost.problem


def test_the_only_replica_is_waited_for() -> None:
    own = ScriptedReplica(0, pace=3, num_lives=2, dies_after=7)
    write(groups_of(10, num_answers=2), own)
    assert own.num_restarts == 2


def test_only_what_is_missing_is_written_again() -> None:
    own = ScriptedReplica(0, pace=1, dies_after=2)
    write(groups_of(1, num_answers=12, session="one piece"), own)
    assert [[t.number for t in group.trajectories] for group in own.given] == [[*range(12)], [*range(2, 12)]]


def test_a_replica_that_is_lost_again_and_again_stays_away_until_the_next_call() -> None:
    async def run() -> None:
        own = ScriptedReplica(0, pace=1, num_lives=5, dies_after=1)
        async with manager_of(own) as manager:
            with pytest.raises(RolloutError, match="rollout-0 died"):
                await written(manager, groups_of(12))
            assert own.num_restarts == 2 and own.problem and not manager.healthy
            own._num_lives = 3
            assert_right(await written(manager, groups_of(12)))
            assert own.num_restarts == 3 and not own.problem

    asyncio.run(run())


def test_new_weights_bring_back_who_stayed_away() -> None:
    async def run() -> None:
        own, other = ScriptedReplica(0, num_lives=3, dies_after=0), ScriptedReplica(1, pace=1)
        async with manager_of(own, other) as manager, manager.awake():
            assert_right(await written(manager, groups_of(40)))
            await manager._wait_for_restarts()
            assert own.problem and own.num_restarts == 2
            await manager.update_weights(1)
            await manager._wait_for_restarts()
            assert not own.problem and own.num_restarts == manager.num_restarts == 3

    asyncio.run(run())


def test_a_group_that_loses_every_replica_is_an_error() -> None:
    replicas = [ScriptedReplica(n, num_lives=99, dies_after=0) for n in range(2)]
    with pytest.raises(RolloutError, match=r"prompt 0 was given to replicas 4 times in turn.*rollout-\d died"):
        write(groups_of(1), *replicas)


@pytest.mark.parametrize("error", [RolloutError("too long"), TrainingError("weights are spoilt")])
def test_what_no_replica_could_do_better_is_raised_to_its_call_alone(error: Exception) -> None:
    async def run() -> None:
        replicas = [ScriptedReplica(n, raises=error) for n in range(2)]
        async with manager_of(*replicas) as manager:
            with pytest.raises(type(error), match=r"rollout-\d: (too long|weights are spoilt)"):
                await written(manager, groups_of(8))
            assert not manager.num_restarts and len(manager.healthy) == 2

    asyncio.run(run())


def test_an_aborted_answer_is_continued() -> None:
    own, groups = ScriptedReplica(0, aborts=True), groups_of(3, num_answers=2)
    write(groups, own)
    assert all(t.samples[-1].finish_reason == "abort" or t.is_finished for g in own.given[3:] for t in g.trajectories)
    assert all(trajectory.samples for group in own.given[3:] for trajectory in group.trajectories)


def test_what_did_not_arrive_is_written_again_also_in_this_process() -> None:
    class Here(ScriptedReplica):
        """Takes the groups as they are, as a worker in this process does."""

        async def generate(self, rank: int, groups: list[PromptGroup]) -> AsyncGenerator[list[PromptGroup], None]:
            for group in groups:
                for trajectory in group.trajectories:
                    assert not trajectory.is_finished
                    trajectory.add(answer_to(group, trajectory))
            if not self.num_restarts:
                raise WorkerError(f"{self.name} failed", group=self.name, ranks=[0])
            yield groups

    own = Here(0)
    write(groups_of(4, num_answers=3), own)
    assert own.num_restarts == 1


@pytest.mark.parametrize("num", [1, 2])
def test_a_replica_that_finishes_nothing_hangs(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = ScriptedReplica(0, hangs=True)
    write(groups_of(20), hangs, *(ScriptedReplica(1) for _ in range(num - 1)), silence_s=0.05)
    assert hangs.num_restarts == 1


def test_a_replica_that_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("practicum.rollout.manager._PING_EVERY_S", 0.01)
    deaf = ScriptedReplica(0, hangs=True, is_deaf=True)
    write(groups_of(20), deaf, ScriptedReplica(1))
    assert deaf.num_restarts == 1


@in_a_loop
async def test_a_replica_that_has_nothing_to_write_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("practicum.rollout.manager._PING_EVERY_S", 0.05)
    own = ScriptedReplica(0)
    async with manager_of(own, sleeps=True) as manager:
        assert_right(await written(manager, groups_of(4)))
        own.fate = {"is_deaf": True}
        await asyncio.sleep(0.2)
        assert own.log == ["awake", "asleep"] and not own.num_restarts


def test_the_trainers_own_processes_are_not_started_again() -> None:
    own = ScriptedReplica(0, dies_after=3)
    own.is_own = False
    with pytest.raises(RolloutError, match="rollout-0 cannot write: rollout-0 died"):
        write(groups_of(20), own, window=None)
    assert not own.num_restarts


def test_a_replica_that_does_not_fall_asleep_is_ended_and_started_again_when_needed() -> None:
    class Sleepless(ScriptedReplica):
        async def sleep(self) -> None:
            if not self.num_restarts:
                raise WorkerDied(f"{self.name} died", group=self.name, ranks=[0])

    async def run() -> None:
        own = Sleepless(0)
        async with manager_of(own, sleeps=True) as manager:
            assert_right(await written(manager, groups_of(4)))
            assert own.log == ["awake", "ended"]
            assert_right(await written(manager, groups_of(4)))
            assert own.num_restarts == 1

    asyncio.run(run())


def test_a_closed_manager_fails_its_calls() -> None:
    async def run() -> None:
        manager = manager_of(ScriptedReplica(0, hangs=True))
        call = asyncio.create_task(written(manager, groups_of(4)))
        await asyncio.sleep(0.01)
        await manager.close()
        with pytest.raises(RolloutError, match="has been closed"):
            await call
        await manager.close()

    asyncio.run(run())


@in_a_loop
async def test_closing_ends_a_restart_that_has_not_begun() -> None:
    own = ScriptedReplica(0)
    manager = manager_of(own)
    manager._mark_failed(own, "it is lost")  # type: ignore[arg-type]
    async with asyncio.timeout(10):
        await manager.close()
    assert not own.num_restarts and own.log == ["ended"]


def test_losses_at_random_lose_and_double_nothing() -> None:
    dice = random.Random(7)

    async def run() -> None:
        replicas = [
            ScriptedReplica(
                n, dice.randint(1, 5), dice.randint(1, 3), num_lives=dice.randint(1, 2), dies_after=dice.randint(0, 60)
            )
            for n in range(dice.randint(2, 4))
        ]
        replicas[0].fate = {}
        async with manager_of(*replicas, window=dice.randint(1, 20), sleeps=dice.random() < 0.5) as manager:

            async def call(number: int) -> None:
                groups = groups_of(dice.randint(1, 25), num_answers=dice.randint(1, 6))
                if dice.random() < 0.3:
                    async with aclosing(manager.generate(groups, priority=number)) as generating:
                        async for _ in generating:
                            if dice.random() < 0.3:
                                break
                    return
                assert_right(await written(manager, groups, priority=number))

            async def update() -> None:
                for version in range(3):
                    await manager.update_weights(version)
                    await asyncio.sleep(0)

            await asyncio.gather(*(call(number) for number in range(dice.randint(1, 4))), update())

    for _ in range(40):
        asyncio.run(run())
