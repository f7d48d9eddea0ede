from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from practicum.errors import RolloutError
from practicum.rollout.runner import EngineRunner, Order
from practicum.types import RolloutRequest, Sample
from practicum.weights import WeightUpdate
from tests.rollout.fakes import FakeEngine
from tests.rollout.writers import requests_of

WAIT_S = 20.0


class Told:
    """What came of an order."""

    def __init__(self, request: RolloutRequest) -> None:
        self.samples: dict[int, Sample] = {}
        self.errors: list[Exception] = []
        self.tokens: list[int] = []
        self.order = Order(
            request, self._on_sample, self.errors.append, lambda _, tokens, __: self.tokens.extend(tokens)
        )

    def _on_sample(self, answer: int, sample: Sample) -> None:
        assert answer not in self.samples and not self.errors, "told too often"
        self.samples[answer] = sample

    @property
    def is_done(self) -> bool:
        return len(self.samples) == self.order.request.params.num_answers

    @property
    def versions(self) -> list[int]:
        return self.samples[0].versions.tolist()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def runner(engine: FakeEngine) -> Iterator[EngineRunner]:
    runner = EngineRunner(engine)
    yield runner
    engine.let_go()
    runner.close()


def told_of(num: int, *lengths: Any, **more: Any) -> list[Told]:
    return [Told(request) for request in requests_of(num, *lengths, **more)]


def submit(runner: EngineRunner, told: list[Told]) -> None:
    runner.submit(*(one.order for one in told))


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.002)


def new_weights(runner: EngineRunner, version: int, break_off: bool | None = None) -> threading.Thread:
    update = WeightUpdate(version, [], shared=False)
    thread = threading.Thread(
        target=lambda: runner.between(lambda: runner.engine.update_weights(update), WAIT_S, break_off=break_off)
    )
    thread.start()
    return thread


def test_requests_join_those_under_way(engine: FakeEngine, runner: EngineRunner) -> None:
    first, second = told_of(2, 5)
    submit(runner, [first])
    engine.step(2)
    wait_until(lambda: engine.batches == [["0"]], "the first is begun with")
    submit(runner, [second])
    wait_until(lambda: engine.batches == [["0"], ["1"]], "the second has joined it")
    assert not first.is_done
    engine.let_go()
    wait_until(lambda: first.is_done and second.is_done, "both are done")


def test_what_is_submitted_together_is_begun_with_together(engine: FakeEngine, runner: EngineRunner) -> None:
    for start in range(20):
        engine.batches.clear()
        told = told_of(4, 1 + start % 2)
        submit(runner, told)
        engine.step(2)
        wait_until(lambda told=told: all(one.is_done for one in told), "all are done")  # type: ignore[misc]
        assert engine.batches == [["0", "1", "2", "3"]]


def test_answers_carry_the_version_they_were_begun_with(engine: FakeEngine, runner: EngineRunner) -> None:
    told = told_of(6, 3)  # of which four fit
    submit(runner, told)
    engine.step()
    wait_until(lambda: runner.num_running == 4, "four are under way")
    updating = new_weights(runner, 7)
    time.sleep(0.1)
    assert engine.version == 0 and updating.is_alive()  # it waits for them
    engine.let_go()
    updating.join(WAIT_S)
    wait_until(lambda: all(one.is_done for one in told), "all are done")
    assert [one.versions for one in told] == [[0] * 3] * 4 + [[7] * 3] * 2


def test_partial_answers_go_on_under_new_weights() -> None:
    engine = FakeEngine()
    runner = EngineRunner(engine, is_partial=True)
    told = told_of(6, 4)
    submit(runner, told)
    engine.step(2)
    wait_until(lambda: engine._steps._value == 0, "two steps are done")
    new_weights(runner, 7).join(WAIT_S)
    engine.let_go()
    wait_until(lambda: all(one.is_done for one in told), "all are done")
    assert [one.versions for one in told] == [[0, 0, 7, 7]] * 4 + [[7] * 4] * 2
    assert all(one.samples[0].token_ids.tolist() == [0, 1, 2, 3] for one in told)
    runner.close()


def test_what_was_not_begun_keeps_its_answers_together() -> None:
    """An engine reads their prompt once only if they come as one request."""
    engine = FakeEngine(max_batch=1)
    runner = EngineRunner(engine, is_partial=True)
    told = told_of(2, 4, num_answers=3)
    submit(runner, told)
    wait_until(lambda: engine.batches == [["0"]], "the first is begun with")
    new_weights(runner, 1).join(WAIT_S)
    engine.let_go()
    wait_until(lambda: all(one.is_done for one in told), "all are done")
    assert engine.batches == [["0"]] * 4 + [["1"]] and sorted(told[1].samples) == [0, 1, 2]
    runner.close()


def test_a_failure_is_told_once_and_the_engine_lives_on(engine: FakeEngine, runner: EngineRunner) -> None:
    told = told_of(6, 3)
    submit(runner, told)
    engine.fails_with = MemoryError("no room")
    engine.step()
    begun, waiting = told[:4], told[4:]
    wait_until(lambda: all(one.errors for one in begun), "all that it had begun were told")
    assert {type(one.errors[0]) for one in begun} == {MemoryError}
    engine.let_go()
    (again,) = told_of(1)
    submit(runner, [again])
    wait_until(lambda: all(one.is_done for one in [*waiting, again]), "it writes again, first what waited in its inbox")
    assert not any(one.samples for one in begun) and not any(one.errors for one in [*waiting, again])


def test_a_failure_is_the_end_of_answers_that_wait_to_be_gone_on_with(engine: FakeEngine, runner: EngineRunner) -> None:
    (told,) = told_of(1, 4, num_answers=2)
    submit(runner, [told])
    wait_until(lambda: runner.num_running == 1, "it is under way")
    runner._is_breaking_off = True  # one answer is broken off just before the engine fails
    ticket = next(iter(runner._orders))
    ticket.on_sample(0, requests_sample(ticket.request))
    assert runner.num_waiting == 1
    engine.fails_with = RuntimeError("broken")
    engine.step()
    wait_until(lambda: bool(told.errors), "it was told")
    assert runner.num_waiting == 0 and len(told.errors) == 1 and not told.samples


def requests_sample(request: RolloutRequest) -> Sample:
    from practicum.rollout.answers import untouched

    return untouched(request)


def test_cancelled_requests_are_told_what_there_is(engine: FakeEngine, runner: EngineRunner) -> None:
    told = told_of(6, 5)
    submit(runner, told)
    engine.step(2)
    wait_until(lambda: engine._steps._value == 0, "two steps are done")
    runner.cancel(told[0].order)
    wait_until(lambda: told[0].is_done, "it was told")
    assert told[0].samples[0].finish_reason == "abort"
    assert len(told[0].samples[0].token_ids) in (1, 2)
    runner.abort()
    wait_until(lambda: all(one.is_done for one in told), "all were told")
    assert told[5].samples[0].token_ids.tolist() == []


def test_between_has_the_engine_to_itself_in_the_order_of_the_calls(engine: FakeEngine, runner: EngineRunner) -> None:
    assert runner.between(lambda: threading.current_thread().name, WAIT_S) == "practicum-engine"
    with pytest.raises(ZeroDivisionError):
        runner.between(lambda: 1 / 0, WAIT_S)
    with pytest.raises(TimeoutError, match="mine"):

        def raises() -> None:
            raise TimeoutError("mine")

        runner.between(raises, WAIT_S)
    (told,) = told_of(1, 3)
    submit(runner, [told])
    wait_until(lambda: runner.num_running == 1, "it is under way")
    with pytest.raises(TimeoutError, match=r"not free within 0\.05 s"):
        runner.between(lambda: pytest.fail("it was given up"), 0.05)
    engine.let_go()
    wait_until(lambda: told.is_done, "what was under way goes on")


def test_a_bad_request_is_refused_with_all_that_came_with_it(engine: FakeEngine, runner: EngineRunner) -> None:
    (good,), (bad,) = told_of(1), told_of(1, 2000)
    with pytest.raises(RolloutError, match="too long"):
        submit(runner, [good, bad])
    assert runner.num_waiting == runner.num_running == 0


def test_tokens_are_told_as_they_are_written_to_those_who_listen(tiny_model: Any) -> None:
    import torch

    from practicum.rollout.hf import HFRollout

    engine = HFRollout(str(tiny_model), device=torch.device("cpu"), dtype=torch.float32, max_batch=4)
    runner = EngineRunner(engine)
    runner.between(engine.resume, WAIT_S)
    (told,) = told_of(1, 6)
    submit(runner, [told])
    wait_until(lambda: told.is_done, "it is done")
    assert told.tokens == told.samples[0].token_ids.tolist()
    runner.close()


def test_nothing_is_begun_after_the_end() -> None:
    engine = FakeEngine()
    runner = EngineRunner(engine)
    told = told_of(6, 5)
    submit(runner, told)
    wait_until(lambda: runner.num_running == 4, "four are under way")
    runner.close()
    assert all(one.is_done or one.errors for one in told)
    with pytest.raises(RolloutError, match="closed"):
        submit(runner, told_of(1))
    with pytest.raises(RolloutError, match="closed"):
        runner.between(lambda: None, WAIT_S)
