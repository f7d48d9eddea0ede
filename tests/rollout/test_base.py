"""What all engines share: batches, aborts, pauses and failures, with an engine whose pace the test decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from functools import wraps
from typing import Any

import numpy as np
import pytest

from practicum.errors import RolloutError
from practicum.rollout import BaseRollout, base
from practicum.rollout.engine.sequence import Sequence
from practicum.types import Prompt, PromptGroup, Sample, SamplingParams

DUTIES = (
    "resume", "release", "update_weights", "check", "submit", "abort_submitted", "log_probs", "num_running"
)  # fmt: skip


@pytest.mark.parametrize("missing", DUTIES)
def test_an_engine_must_do_the_whole_job(missing: str) -> None:
    jobs: dict[str, Any] = {name: lambda self: None for name in DUTIES}
    type("Complete", (BaseRollout,), jobs)()
    jobs.pop(missing)
    with pytest.raises(TypeError, match=missing):
        type("Incomplete", (BaseRollout,), jobs)()


class Tokenizer:
    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, ids))


class FakeEngine(BaseRollout):
    """Writes one token a step for each of up to `max_batch` answers; the token is its number in the answer."""

    def __init__(self, max_batch: int = 4) -> None:
        super().__init__()
        self.max_batch = max_batch
        self.version = 0
        self.batches: list[list[str]] = []
        """The prompts of each submit."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    async def step(self, num: int = 1) -> None:
        for _ in range(num):
            await settle()
            while self.waiting and len(self.running) < self.max_batch:
                self.running.append(self.waiting.pop(0))
            for sequence in [*self.running]:
                if sequence.push(sequence.num_written + len(sequence.token_ids), -1.0):
                    self.end(sequence)
                if sequence.on_tokens is not None:
                    sequence.on_tokens(sequence.token_ids[-1:], sequence.log_probs[-1:])
        await settle()

    async def finish(self) -> None:
        await settle()
        while self.waiting or self.running:
            await self.step()

    def fail(self, error: Exception) -> None:
        for sequence in self.running:
            sequence.done.set_exception(error)
        self.running.clear()

    def end(self, sequence: Sequence) -> None:
        own = self.running if sequence in self.running else self.waiting
        own.remove(sequence)
        sequence.done.set_result(sequence.to_sample(Tokenizer(), self.version))

    def check(self, request: Any) -> None:
        if request.params.max_new_tokens > 1000:
            raise RolloutError(f"prompt {request.prompt.id} is too long")

    def submit(self, sequences: list[Sequence]) -> None:
        self.batches.append([sequence.prompt.id for sequence in sequences])
        for sequence in sequences:
            sequence.begin([], Tokenizer())
        self.waiting += sequences

    def abort_submitted(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence in self.running or sequence in self.waiting:
                self.end(sequence)

    def recall(self) -> None:
        for sequence in [*self.waiting]:
            self.end(sequence)

    async def resume(self) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, update: Any) -> None:
        assert not self.running and not self.waiting
        self.version = update

    async def log_probs(self, sequences: Any) -> list[Any]:
        return []

    @property
    def num_running(self) -> int:
        return len(self.running)


async def settle() -> None:
    """Let everybody do what they can do now."""
    for _ in range(20):
        await asyncio.sleep(0)


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 30))

    return run


def groups_of(num: int, length: int = 8, num_answers: int = 1) -> list[PromptGroup]:
    params = SamplingParams(length, num_answers=num_answers)
    return [PromptGroup(str(i), Prompt(str(i), text="1"), np.array([5, 6], np.int32), params, i) for i in range(num)]


def sequence_of(length: int = 8, **more: Any) -> Sequence:
    return Sequence(Prompt("p", text="1"), np.array([5, 6], np.int32), SamplingParams(length), 0, **more)


async def collect(engine: BaseRollout, groups: list[PromptGroup]) -> list[list[str]]:
    return [[group.id for group in some] async for some in engine.generate(groups)]


async def new_weights(engine: FakeEngine, version: int, **how: Any) -> None:
    async with engine.exclusive(**how):
        await engine.update_weights(version)


def versions(group: PromptGroup) -> list[list[int]]:
    return [sample.versions.tolist() for sample in group.samples]


@on_loop
async def test_groups_come_as_they_are_finished_and_are_submitted_together() -> None:
    engine = FakeEngine(max_batch=8)
    groups = [*groups_of(2, 2, num_answers=2), *groups_of(1, 1)]
    groups[2].id = "short"
    task = asyncio.create_task(collect(engine, groups))
    await engine.finish()
    assert await task == [["short"], ["0", "1"]]
    assert engine.batches == [["0", "0", "1", "1", "0"]]
    assert [trajectory.last.id for group in groups for trajectory in group.trajectories] == [
        "0/0", "0/1", "1/0", "1/1", "0/0",
    ]  # fmt: skip
    assert (engine.num_waiting, engine.num_running) == (0, 0)


@on_loop
async def test_only_what_a_group_lacks_is_written() -> None:
    engine = FakeEngine()
    (group,) = groups_of(1, 4, num_answers=3)
    done, begun = sequence_of(4), sequence_of(4)
    for sequence, num in ((done, 4), (begun, 1)):
        sequence.begin([], Tokenizer())
        for token in range(num):
            sequence.push(token, -1.0)
    group.trajectories[0].add(done.to_sample(Tokenizer(), 3))
    group.trajectories[1].add(begun.to_sample(Tokenizer(), 3, "abort"))
    task = asyncio.create_task(collect(engine, [group]))
    await engine.finish()
    assert await task == [["0"]] and group.is_finished
    assert engine.batches == [["0", "0"]]
    assert versions(group) == [[3] * 4, [3, 0, 0, 0], [0] * 4]
    assert [sample.token_ids.tolist() for sample in group.samples] == [[0, 1, 2, 3]] * 3
    assert await collect(engine, [group]) == [["0"]]


@on_loop
async def test_sequences_join_those_under_way_and_come_back_in_their_order() -> None:
    engine = FakeEngine()
    tokens: list[int] = []
    first = asyncio.create_task(engine.collect_samples([sequence_of(5), sequence_of(2)]))
    await engine.step(2)
    second = asyncio.create_task(
        engine.collect_samples([sequence_of(3, on_tokens=lambda new, log_probs: tokens.extend(new))])
    )
    await settle()
    assert (engine.num_waiting, engine.num_running) == (1, 1) and not first.done()
    await engine.finish()
    assert [len(sample.token_ids) for sample in await first] == [5, 2]
    assert (await second)[0].token_ids.tolist() == tokens == [0, 1, 2]


@on_loop
async def test_bad_requests_are_refused_with_all_that_came_with_them() -> None:
    engine = FakeEngine()
    with pytest.raises(RolloutError, match="too long"):
        await engine.collect_samples([sequence_of(), sequence_of(2000)])
    with pytest.raises(RolloutError, match="too long"):
        await collect(engine, [*groups_of(1), *groups_of(1, 2000)])
    assert not engine.batches


@on_loop
async def test_aborted_sequences_come_back_with_what_there_is() -> None:
    engine = FakeEngine(max_batch=2)
    sequences = [sequence_of() for _ in range(3)]
    task = asyncio.create_task(engine.collect_samples(sequences))
    await engine.step(2)
    engine.abort(sequences[:1])
    await engine.step()
    engine.abort()
    samples = await task
    assert [len(sample.token_ids) for sample in samples] == [2, 3, 1]
    assert {sample.finish_reason for sample in samples} == {"abort"}
    groups = groups_of(1)
    task2 = asyncio.create_task(collect(engine, groups))
    await engine.step(1)
    engine.abort()
    assert await task2 == [["0"]] and not groups[0].is_finished
    engine.abort()  # nothing is under way


@on_loop
async def test_leaving_early_aborts_the_rest() -> None:
    engine = FakeEngine()
    groups = [*groups_of(1, 1), *groups_of(1, 9)]
    async with aclosing(engine.generate(groups)) as stream:
        first = asyncio.create_task(anext(stream))
        await engine.step(1)
        assert await first == groups[:1]
    assert not engine.running and not engine.waiting and engine.num_waiting == 0
    task = asyncio.create_task(engine.collect_samples([sequence_of()]))
    await engine.step()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not engine.running
    await new_weights(engine, 1)


@on_loop
async def test_leaving_ends_though_the_engine_does_not_let_go(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(base, "_LET_GO_TIMEOUT_S", 0.01)
    engine = FakeEngine()
    end, engine.end = engine.end, lambda sequence: None  # type: ignore[method-assign]
    task = asyncio.create_task(engine.collect_samples([sequence_of(), sequence_of()]))
    await engine.step()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert "not let go of 2 unfinished answers, to prompt p within 0.01 s" in caplog.text
    with pytest.raises(TimeoutError, match="not free"):  # it writes on
        async with engine.exclusive(timeout_s=0.01):
            pytest.fail("something is under way")
    engine.end = end  # type: ignore[method-assign]
    await engine.finish()
    await new_weights(engine, 1)


@on_loop
async def test_a_failure_comes_after_what_was_finished_and_fails_what_was_begun_alone() -> None:
    engine = FakeEngine(max_batch=2)
    groups = [*groups_of(1, 1), *groups_of(1, 9)]
    stream = engine.generate(groups)
    first = asyncio.create_task(anext(stream))
    await settle()
    other = asyncio.create_task(engine.collect_samples([sequence_of(2)]))
    await settle()
    engine.running, engine.waiting = engine.waiting[:2], engine.waiting[2:]
    engine.running[0].push(0, -1.0)
    engine.end(engine.running[0])
    engine.fail(MemoryError("no room"))
    assert await first == groups[:1]
    with pytest.raises(MemoryError, match="no room"):
        await anext(stream)
    await engine.finish()
    assert (await other)[0].finish_reason == "length"


@on_loop
async def test_weights_wait_for_what_is_under_way_and_hold_up_what_is_new() -> None:
    engine = FakeEngine()
    groups, late = groups_of(2, 3), groups_of(1, 2)
    writing = asyncio.create_task(collect(engine, groups))
    await engine.step()
    updating = asyncio.create_task(new_weights(engine, 7))
    await settle()
    after = asyncio.create_task(collect(engine, late))
    await engine.step()
    assert not updating.done() and engine.version == 0 and len(engine.batches) == 1
    await engine.finish()
    await asyncio.gather(writing, updating)
    await engine.finish()
    await after
    assert [versions(group) for group in (*groups, *late)] == [[[0] * 3], [[0] * 3], [[7] * 2]]


@on_loop
async def test_what_is_not_begun_is_recalled_and_begun_under_the_new_weights() -> None:
    engine = FakeEngine(max_batch=2)
    groups = [*groups_of(1, 2), *groups_of(4, 4)[1:]]
    came: list[str] = []

    async def generate() -> None:
        async for some in engine.generate(groups):
            came.extend(group.id for group in some)

    generating = asyncio.create_task(generate())
    await engine.step()
    updating = asyncio.create_task(new_weights(engine, 7))
    await engine.step()
    assert came == ["0"] and not updating.done()  # it comes while the rest waits
    await engine.step(2)
    await updating
    await engine.finish()
    await generating
    assert engine.batches == [["0", "1", "2", "3"], ["2", "3"]]
    assert [versions(group) for group in groups] == [[[0] * 2], [[0] * 4], [[7] * 4], [[7] * 4]]


@on_loop
async def test_a_conversation_under_way_may_write_while_weights_wait() -> None:
    engine = FakeEngine()
    async with engine.generating():
        updating = asyncio.create_task(new_weights(engine, 7))
        await settle()
        task = asyncio.create_task(engine.collect_samples([sequence_of(2)]))
        await engine.finish()
        assert (await task)[0].versions.tolist() == [0, 0]
        assert not updating.done()
    await updating
    assert engine.version == 7


@on_loop
async def test_aborted_for_weights_sequences_are_continued_under_them() -> None:
    engine = FakeEngine()
    tokens: list[int] = []
    groups = groups_of(6, 4)  # of which four fit
    writing = asyncio.create_task(collect(engine, groups))
    async with engine.generating():
        heard = sequence_of(4, on_tokens=lambda new, _: tokens.extend(new))
        conversation = asyncio.create_task(engine.collect_samples([heard]))
        await engine.step(2)
        await new_weights(engine, 7, abort=True)
        await settle()
        assert sorted(engine.batches[2:]) == [["0", "1", "2", "3", "4", "5"], ["p"]]
        assert sum(one.written is None for one in engine.waiting) == 3  # begun anew, with whoever shares the prompt
        await engine.finish()
        assert (await conversation)[0].versions.tolist() == [7] * 4
    await writing
    assert [versions(group)[0] for group in groups] == [[0, 0, 7, 7]] * 4 + [[7] * 4] * 2
    assert all(group.samples[0].token_ids.tolist() == [0, 1, 2, 3] for group in groups)
    assert tokens == [0, 1, 2, 3]


@on_loop
async def test_what_is_aborted_during_a_pause_is_not_continued() -> None:
    engine = FakeEngine()
    stays, goes = sequence_of(4), sequence_of(4)
    task = asyncio.create_task(engine.collect_samples([stays, goes]))
    await engine.step(2)
    async with engine.exclusive(abort=True):
        engine.abort([goes])
        await settle()
    await engine.finish()
    samples: list[Sample] = await task
    assert [(len(sample.token_ids), sample.finish_reason) for sample in samples] == [(4, "length"), (2, "abort")]
    gone = asyncio.create_task(engine.collect_samples([sequence_of(4)]))
    await engine.step(2)
    async with engine.exclusive(abort=True):
        gone.cancel()
        await asyncio.wait([gone])
    await settle()
    assert not engine.waiting and engine.num_waiting == 0


@on_loop
async def test_exclusive_blocks_keep_their_order_and_have_a_deadline() -> None:
    engine = FakeEngine()
    order: list[int] = []

    async def note(number: int) -> None:
        async with engine.exclusive(abort=number == 1):
            order.append(number)
            await settle()
            order.append(number)

    await asyncio.gather(*map(note, range(3)))
    assert order == [0, 0, 1, 1, 2, 2]
    with pytest.raises(TimeoutError, match="mine"):
        async with engine.exclusive():
            raise TimeoutError("mine")
    task = asyncio.create_task(engine.collect_samples([sequence_of(3)]))
    await engine.step()
    with pytest.raises(TimeoutError, match=r"not free within 0\.01 s; it has 1 unfinished answers, to prompt p$"):
        async with engine.exclusive(timeout_s=0.01):
            pytest.fail("something is under way")
    await engine.finish()
    assert len((await task)[0].token_ids) == 3


@on_loop
async def test_who_waits_for_the_engine_has_a_deadline_and_is_told_who_has_it() -> None:
    engine = FakeEngine()
    engine.wait_timeout_s = 0.01
    late = r"not free within 0\.01 s; it is taken for new weights$"
    async with engine.exclusive("new weights"):
        for waiting in (collect(engine, groups_of(1)), new_weights(engine, 1)):
            with pytest.raises(TimeoutError, match=late):
                await waiting
    async with engine.generating():
        with pytest.raises(TimeoutError, match="1 calls are generating"):
            await new_weights(engine, 1)
    begun = asyncio.create_task(collect(engine, groups_of(1)))
    await engine.step()
    async with engine.exclusive("new weights", abort=True):
        with pytest.raises(TimeoutError, match=late):
            await begun
    assert not engine.running and not engine.waiting and engine.num_waiting == 0
