from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from practicum.config import AgentConfig
from practicum.controller import FusedWorker, LocalWorkerGroup, RayClassWithInitArgs, Worker, WorkerContext
from practicum.errors import ConversationError, RolloutError, TrainingError
from practicum.models import load_model
from practicum.rollout.worker import Batch, RolloutWorker, Written
from practicum.types import RolloutRequest, Sample
from practicum.weights import WeightUpdate
from tests.rollout.writers import ModelWeights, hf_settings, requests_of

WAIT_S = 30.0


def worker_of(model: Path, **more: object) -> RolloutWorker:
    packed = RayClassWithInitArgs(RolloutWorker, hf_settings(model, 4), **more)  # type: ignore[arg-type]
    return packed.build(WorkerContext("rollout-0"))


@pytest.fixture
def worker(tiny_model: Path) -> Iterator[RolloutWorker]:
    worker = worker_of(tiny_model)
    worker.resume()
    yield worker
    worker.close()


def batch(requests: Sequence[RolloutRequest], number: int = 0, first: int = 0) -> Batch:
    return Batch(number, range(first, first + len(requests)), requests)


def all_of(worker: RolloutWorker, written: Written) -> dict[tuple[int, int], Sample]:
    found = dict(zip(zip(written.places, written.answers, strict=True), written.samples, strict=True))
    deadline = time.monotonic() + WAIT_S
    while written.num_left:
        assert time.monotonic() < deadline and not written.failure
        written = worker.collect(1.0)
        found |= dict(zip(zip(written.places, written.answers, strict=True), written.samples, strict=True))
    return found


def test_answers_are_handed_out_as_they_come_each_once(worker: RolloutWorker) -> None:
    first = worker.begin(batch(requests_of(6, num_answers=2)), 0.0)
    assert first.num_left + len(first.samples) == 12
    more = worker.begin(batch(requests_of(2), first=6), 0.0)
    found = all_of(worker, more) | dict(zip(zip(first.places, first.answers, strict=True), first.samples, strict=True))
    assert sorted(found) == [*((place, n) for place in range(6) for n in range(2)), (6, 0), (7, 0)]
    assert worker.collect(0.0) == Written(0, (), (), (), 0)


def test_batches_and_answers_travel_whole(worker: RolloutWorker) -> None:
    sent = batch(requests_of(3))
    there: Batch = pickle.loads(pickle.dumps(sent))
    assert [request.seed for request in there.requests] == [0, 1, 2] and list(there.places) == [0, 1, 2]
    worker.begin(there, 0.0)
    for num in (1, 200):  # few and many go different ways
        samples = list(all_of(worker, worker.begin(batch(requests_of(1, 3), number=num), WAIT_S)).values()) * num
        written = Written(1, range(num), [0] * num, samples, 2, "why")
        back: Written = pickle.loads(pickle.dumps(written))
        assert (back.round, back.num_left, back.failure) == (1, 2, "why")
        assert [s.token_ids.tolist() for s in back.samples] == [s.token_ids.tolist() for s in samples]


def test_another_round_puts_the_last_aside(worker: RolloutWorker) -> None:
    worker.begin(batch(requests_of(40, 50)), 0.0)
    found = all_of(worker, worker.begin(batch(requests_of(2, 3), number=1, first=100), 0.0))
    assert sorted(found) == [(100, 0), (101, 0)]
    worker.begin(batch(requests_of(40, 50), number=2), 0.0)
    worker.abort()
    assert worker.collect(0.0).num_left == 0


def test_a_bad_request_is_refused_before_anything_is_written(worker: RolloutWorker) -> None:
    with pytest.raises(RolloutError, match="room for 64"):
        worker.begin(batch([*requests_of(1), *requests_of(1, 500)]), 0.0)
    assert worker.collect(0.0).num_left == 0


def test_a_failure_of_the_engine_is_told_after_what_was_finished(
    worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = worker._engine._model.generate  # type: ignore[attr-defined]
    calls = []

    def out_of_memory(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise torch.cuda.OutOfMemoryError("no room")
        return right(*args, **kwargs)

    monkeypatch.setattr(worker._engine._model, "generate", out_of_memory)  # type: ignore[attr-defined]
    written = worker.begin(batch(requests_of(8, 3)), WAIT_S)
    samples = list(written.samples)
    while not written.failure:
        written = worker.collect(WAIT_S)
        samples += written.samples
    assert len(samples) == 4 and "OutOfMemoryError: no room" in written.failure and written.num_left == 0
    assert len(all_of(worker, worker.begin(batch(requests_of(2), number=1), 1.0))) == 2


def test_spoilt_weights_are_no_matter_of_this_engine(worker: RolloutWorker, tiny_model: Path) -> None:
    weights = ModelWeights(tiny_model, channel="shared")
    weights.open([worker.where()])
    for parameter in weights.model.parameters():
        parameter.fill_(float("nan"))
    worker.update_weights(1, weights.send(1)())
    with pytest.raises(TrainingError, match="no longer numbers"):
        worker.begin(batch(requests_of(2)), WAIT_S)


def test_a_conversation_that_fails_is_no_matter_of_this_engine(tiny_model: Path) -> None:
    worker = worker_of(tiny_model, agent=AgentConfig(environment="tests/rollout/agents.py:CannotReset"))
    worker.resume()
    with pytest.raises(ConversationError, match="no level of that name"):
        worker.begin(batch(requests_of(2)), WAIT_S)
    worker.close()


def test_weights_come_by_a_channel_and_are_the_trainers(worker: RolloutWorker, tiny_model: Path) -> None:
    weights = ModelWeights(tiny_model, channel="shm")
    weights.open([worker.where()])
    weights.nudge()
    sequences = [np.array([4, 5, 6, 7], np.int32)]
    before = worker.log_probs(sequences)[0]
    worker.release()
    worker.update_weights(5, weights.send(5)())  # wakes it up
    assert np.abs(worker.log_probs(sequences)[0] - weights.log_probs(sequences)[0]).max() < 1e-5
    assert np.abs(worker.log_probs(sequences)[0] - before).max() > 1e-4
    (sample,) = all_of(worker, worker.begin(batch(requests_of(1)), 1.0)).values()
    assert set(sample.versions.tolist()) == {5}


def test_asleep_and_awake_as_often_as_it_is_told(worker: RolloutWorker) -> None:
    (before,) = all_of(worker, worker.begin(batch(requests_of(1)), 1.0)).values()
    for _ in range(2):
        worker.release()
    for _ in range(2):
        worker.resume()
    (after,) = all_of(worker, worker.begin(batch(requests_of(1), number=1), 1.0)).values()
    assert after.token_ids.tolist() == before.token_ids.tolist()


def test_with_an_agent_answers_are_conversations(tiny_model: Path) -> None:
    agent = AgentConfig(environment=f"{Path(__file__).parent / 'talks.py'}:Once", max_turns=3)
    worker = worker_of(tiny_model, agent=agent)
    worker.resume()
    try:
        asked = [replace(r, params=replace(r.params, ignore_eos=False)) for r in requests_of(16, 40)]
        found = all_of(worker, worker.begin(batch(asked), 1.0))
        assert len(found) == 16
        masks = [sample.loss_mask for sample in found.values()]
        assert any(not mask.all() and mask[-1] for mask in masks)  # it was said something, and went on
        worker.release()
    finally:
        worker.close()


def test_it_counts_conversations_since_the_last_time(tiny_model: Path) -> None:
    agent = AgentConfig(environment=f"{Path(__file__).parent / 'talks.py'}:Once", max_turns=3)
    worker = worker_of(tiny_model, agent=agent)
    worker.resume()
    try:
        found = all_of(worker, worker.begin(batch(requests_of(6, 20)), 1.0))
        counts = worker.take_counts()
        assert counts["conversations"] == len(found) == 6 and counts["turns"] >= 6
        assert worker.take_counts() == {}
        all_of(worker, worker.begin(batch(requests_of(2, 20), number=1), 1.0))
        assert worker.take_counts()["conversations"] == 2
    finally:
        worker.close()


def test_where_nobody_talks_nothing_is_counted(worker: RolloutWorker) -> None:
    all_of(worker, worker.begin(batch(requests_of(2)), 1.0))
    assert worker.take_counts() == {}


class FrozenSource(Worker):
    """Publishes a model's weights as the trainer would."""

    def __init__(self, model_path: str) -> None:
        self.model = load_model(model_path)

    def publish(self, version: int) -> WeightUpdate:
        return WeightUpdate(version, self.model.named_parameters(), shared=True)


def test_the_engine_writes_with_the_weights_of_the_role_beside_it(tiny_model: Path) -> None:
    source = RayClassWithInitArgs(FrozenSource, str(tiny_model))
    rollout = RayClassWithInitArgs(RolloutWorker, hf_settings(tiny_model), weights_from="source")
    with LocalWorkerGroup(RayClassWithInitArgs(FusedWorker, source=source, rollout=rollout), name="hybrid") as group:
        writers = group.role("rollout", RolloutWorker)
        writers.execute_all(RolloutWorker.update_weights, 3)
        (written,) = writers.map(RolloutWorker.begin, [batch(requests_of(1, num_answers=2))], WAIT_S)
        assert len(written.samples) == 2
        assert all(set(sample.versions.tolist()) == {3} for sample in written.samples)
