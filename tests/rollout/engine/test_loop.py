"""What becomes of an exception in the engine's thread: whoever waits is told, and the engine lives on."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch

from practicum.errors import TrainingError
from practicum.rollout.engine.model import ModelRunner
from practicum.rollout.engine.sequence import Sequence
from practicum.rollout.native import NativeRollout
from practicum.types import Prompt, Sample, SamplingParams
from practicum.weights import WeightUpdate

LONG = 20_000
SPOILT = "the logits are no longer numbers"


class Tokenizer:
    fails = False

    def decode(self, ids: Any, **_: Any) -> str:
        if self.fails:
            self.fails = False
            raise ValueError("no such token")
        return ""


class FakeRunner(ModelRunner):
    """Draws zeros, one launch behind, and fails where the test says, once."""

    block_size = 1000
    prefill_tokens = 1000
    num_behind = 1
    num_blocks = 1000

    def __init__(self, path: str, **_: Any) -> None:
        self.tokenizer = Tokenizer()
        self.eos_ids = []
        self.recorder = None
        self.version = 0
        self.on_last: Exception | None = None
        """Raised by the `collect` that leaves nothing in flight: not by that of a step, while there is more to draw."""
        self.on_decode: Exception | None = None
        self.on_reset: Exception | None = None
        self.on_load: Exception | None = None
        self.on_sleep: Exception | None = None
        self._drawn: deque[list[tuple[Sequence, int, float]]] = deque()

    def check(self, request: Any) -> None: ...

    def wake(self) -> None: ...

    def sleep(self) -> None:
        self._raise("on_sleep")

    def close(self) -> None: ...

    def load_weights(self, update: WeightUpdate) -> None:
        self._raise("on_load")
        self.version = update.version

    def prefill(self, groups: list[list[Sequence]]) -> None:
        self._drawn.append([(sequence, 0, -1.0) for group in groups for sequence in group])

    def decode(self, sequences: list[Sequence], grown: list[Sequence]) -> None:
        self._raise("on_decode")
        time.sleep(0.001)
        self._drawn.append([(sequence, 0, -1.0) for sequence in sequences])

    def collect(self) -> list[tuple[Sequence, int, float]]:
        drawn = self._drawn.popleft()
        if not self._drawn:
            self._raise("on_last")
        return drawn

    @property
    def num_in_flight(self) -> int:
        return len(self._drawn)

    def reset(self) -> None:
        self._raise("on_reset")
        self._drawn.clear()

    def _raise(self, name: str) -> None:
        error = getattr(self, name)
        if error is not None:
            setattr(self, name, None)
            raise error


def with_engine(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    async def opened(*args: Any, **kwargs: Any) -> None:
        engine = NativeRollout("", device=torch.device("cpu"), dtype=torch.float32, max_batch=2, runner=FakeRunner)
        await engine.resume()
        async with asyncio.timeout(10):
            await test(engine, engine.model, *args, **kwargs)
            assert len((await engine.collect_samples([sequence_of(3)]))[0].token_ids) == 3
            await engine.close()

    @wraps(test)
    def run(**kwargs: Any) -> None:
        asyncio.run(opened(**kwargs))

    del run.__wrapped__  # type: ignore[attr-defined]  # pytest takes the engine for a fixture
    return run


def sequence_of(length: int, **more: Any) -> Sequence:
    return Sequence(Prompt("p", text="?"), np.array([5, 6], np.int32), SamplingParams(length), 0, **more)


async def begin(engine: NativeRollout, *lengths: int) -> list[asyncio.Task[list[Sample]]]:
    """Begin so many answers, each for a caller of its own; return when the last that fits in the batch has a token."""
    has_begun = asyncio.Event()
    sequences = [sequence_of(length) for length in lengths]
    sequences[min(len(lengths), 2) - 1].on_tokens = lambda tokens, log_probs: has_begun.set()
    tasks = [asyncio.create_task(engine.collect_samples([sequence])) for sequence in sequences]
    await has_begun.wait()
    return tasks


async def new_weights(engine: NativeRollout, abort: bool = True) -> None:
    async with engine.exclusive(abort=abort, timeout_s=5):
        await engine.update_weights(WeightUpdate(7, iter(()), shared=False))


@with_engine
async def test_what_was_begun_fails_with_an_abort_that_fails_and_what_waits_is_written(
    engine: NativeRollout, runner: FakeRunner
) -> None:
    *begun, waiting = await begin(engine, LONG, LONG, 3)
    runner.on_last = TrainingError(SPOILT)
    await new_weights(engine)
    for task in begun:
        with pytest.raises(TrainingError, match=SPOILT):
            await task
    ((sample),) = await waiting
    assert sample.versions.tolist() == [7] * 3


@with_engine
async def test_a_stop_iteration_which_futures_refuse_is_told_as_another_error(
    engine: NativeRollout, runner: FakeRunner
) -> None:
    tasks = await begin(engine, LONG, LONG)
    runner.on_decode = StopIteration("no next one")
    for task in tasks:
        with pytest.raises(RuntimeError, match="StopIteration: no next one"):
            await task
    runner.on_load = StopIteration("no tensor")
    with pytest.raises(RuntimeError, match="StopIteration: no tensor"):
        await new_weights(engine)

    def refuse(tokens: list[int], log_probs: list[float]) -> None:
        raise StopIteration("mine")

    with pytest.raises(RuntimeError, match="StopIteration: mine"):
        await engine.collect_samples([sequence_of(LONG, on_tokens=refuse)])


@with_engine
async def test_new_weights_wait_for_what_is_begun_and_come_before_what_waits(
    engine: NativeRollout, runner: FakeRunner
) -> None:
    tasks = await begin(engine, 300, 300, 3, 3)
    await new_weights(engine, abort=False)
    ends = [(await task)[0] for task in tasks]
    assert [sample.versions.tolist() for sample in ends] == [[0] * 300, [0] * 300, [7] * 3, [7] * 3]
    assert {sample.finish_reason for sample in ends} == {"length"}


@with_engine
async def test_an_engine_that_cannot_fall_asleep_stays_awake(engine: NativeRollout, runner: FakeRunner) -> None:
    runner.on_sleep = MemoryError("no room on the host")
    with pytest.raises(MemoryError, match="no room on the host"):
        await engine.release()
    assert engine.is_awake


@with_engine
async def test_a_caller_that_goes_away_ends_though_its_abort_fails(engine: NativeRollout, runner: FakeRunner) -> None:
    gone, other = await begin(engine, LONG, LONG)
    runner.on_last = TrainingError(SPOILT)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    with pytest.raises(TrainingError, match=SPOILT):
        await other


@with_engine
async def test_an_answer_of_which_no_sample_can_be_made_fails(engine: NativeRollout, runner: FakeRunner) -> None:
    runner.tokenizer.fails = True
    with pytest.raises(ValueError, match="no such token"):
        await engine.collect_samples([sequence_of(2)])
    tasks = await begin(engine, LONG, LONG)
    runner.tokenizer.fails = True
    engine.abort()
    for task in tasks:
        with pytest.raises(ValueError, match="no such token"):
            await task


@with_engine
async def test_where_it_cannot_begin_anew_everybody_is_told(engine: NativeRollout, runner: FakeRunner) -> None:
    tasks = await begin(engine, LONG, LONG, 3)
    runner.on_reset, runner.on_decode = MemoryError("no room to begin anew"), ValueError("a step")
    for task in tasks:
        with pytest.raises(MemoryError, match="no room to begin anew"):
            await task


@with_engine
async def test_an_answer_whose_caller_cannot_take_its_tokens_is_written_no_further(
    engine: NativeRollout, runner: FakeRunner
) -> None:
    calls: list[list[int]] = []

    def refuse(tokens: list[int], log_probs: list[float]) -> None:
        calls.append(tokens)
        raise KeyError("mine")

    for length in (LONG, 1):
        calls.clear()
        task = asyncio.create_task(engine.collect_samples([sequence_of(length, on_tokens=refuse)]))
        await asyncio.sleep(0)
        await new_weights(engine, abort=False)
        with pytest.raises(KeyError, match="mine"):
            await task
        assert len(calls) == 1 and engine.num_running == 0
