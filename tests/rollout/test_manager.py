"""Replicas in processes of their own, driven by their manager: what dies, what hangs, new weights under load."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from practicum.rollout.sampling import draw

from practicum.config import RolloutConfig
from practicum.controller import Controller, RayResourcePool
from practicum.errors import RolloutError, WorkerDied, WorkerError
from practicum.rollout.manager import RolloutManager
from practicum.rollout.placement import ReplicaSettings, open_replicas
from practicum.rollout.replica import RolloutReplica
from practicum.rollout.writing import Answer, HandingOut
from practicum.types import RolloutRequest, Sample
from tests.rollout.test_writing import FakeReplica
from tests.rollout.writers import ModelWeights, hf_settings, requests_of

TIMES = ReplicaSettings(threads=1, start_timeout_s=120.0, call_timeout_s=120.0)
MAX_BATCH = 16
WAIT_S = 120.0


@pytest.fixture(scope="module")
def weights(tiny_model: Path) -> ModelWeights:
    return ModelWeights(tiny_model)


@pytest.fixture(scope="module")
def ours(weights: ModelWeights, tiny_model: Path, ray_session: None) -> Iterator[RolloutManager]:
    """Two replicas, each in a process of its own."""
    config = RolloutConfig(engine="hf", placement="colocated", max_batch=MAX_BATCH)
    with RayResourcePool([2], resources_per_process={"CPU": 0.5}) as pool:
        controller = Controller(pool, 120.0, 120.0)
        with open_replicas(config, controller, hf_settings(tiny_model, MAX_BATCH), weights, TIMES) as manager:
            weights.nudge()  # other weights than in the files that a new process reads
            manager.update_weights(1)
            yield manager


@pytest.fixture
def manager(ours: RolloutManager) -> RolloutManager:
    """With the next version of the weights, and nobody missing."""
    ours.update_weights(ours.version + 1)
    assert [replica.problem for replica in ours.replicas] == ["", ""]
    return ours


def tokens(samples: dict[tuple[int, int], Sample]) -> dict[tuple[int, int], list[int]]:
    return {place: sample.token_ids.tolist() for place, sample in samples.items()}


def by_place(answers: Sequence[Answer]) -> dict[tuple[int, int], Sample]:
    return {(answer.request, answer.number): answer.sample for answer in answers}


def written(manager: RolloutManager, requests: Sequence[RolloutRequest]) -> dict[tuple[int, int], Sample]:
    return by_place([answer for answers in manager.write(requests) for answer in answers])


def versions(samples: Sequence[Sample]) -> list[list[int]]:
    return [sorted(set(sample.versions.tolist())) for sample in samples]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.02)


def pids(manager: RolloutManager) -> list[int]:
    return [replica.where().pid for replica in manager.replicas]


@pytest.mark.slow
def test_a_replica_killed_in_the_middle_costs_no_answer_and_is_back_for_the_next_batch(
    manager: RolloutManager, weights: ModelWeights, monkeypatch: Any
) -> None:
    monkeypatch.setattr(manager, "sleeps", False)  # as standalone ones: nobody waits for it at the end of a batch
    requests = requests_of(256)
    undisturbed = tokens(written(manager, requests))
    assert len(undisturbed) == 256
    victim, num_sent, num_restarts = pids(manager)[0], weights.num_sent, manager.replicas[0].num_restarts
    came: list[Answer] = []
    for answers in manager.write(requests):
        if not came:
            os.kill(victim, signal.SIGKILL)
        came += answers
    assert Counter((answer.request, answer.number) for answer in came) == Counter((i, 0) for i in range(256))
    assert tokens(by_place(came)) == undisturbed  # seeds belong to requests: whoever writes, it is the same
    wait_until(lambda: len(manager.well()) == 2, "the replica is back")
    assert tokens(written(manager, requests)) == undisturbed
    assert victim not in pids(manager) and manager.replicas[0].num_restarts == num_restarts + 1
    assert weights.num_sent == num_sent  # it read what had been sent to all


@pytest.mark.slow
def test_no_answer_mixes_versions_when_new_weights_come_under_load(
    manager: RolloutManager, weights: ModelWeights
) -> None:
    old, new = manager.version, manager.version + 1
    requests = requests_of(160, 24)
    before = tokens(written(manager, requests))
    weights.nudge()
    updating = threading.Thread(target=manager.update_weights, args=(new,))
    came: list[Answer] = []
    for answers in manager.write(requests):
        if not came:
            updating.start()
        came += answers
    updating.join(60)
    assert manager.version == new and len(came) == len(by_place(came)) == 160
    told = versions([answer.sample for answer in came])
    assert {tuple(own) for own in told} == {(old,), (new,)}
    for place, sample in by_place(came).items():
        if sample.versions[0] == old:
            assert sample.token_ids.tolist() == before[place]
    assert versions(list(written(manager, requests_of(4)).values())) == [[new]] * 4


@pytest.mark.slow
def test_a_replica_that_hangs_is_replaced(manager: RolloutManager, monkeypatch: Any) -> None:
    monkeypatch.setattr("practicum.rollout.replica._ANSWER_S", 3.0)
    victim, came = pids(manager)[1], 0
    for answers in manager.write(requests_of(128)):
        if not came:
            os.kill(victim, signal.SIGSTOP)
        came += len(answers)
    assert came == 128
    assert victim not in pids(manager)


def test_what_is_left_unread_is_broken_off(manager: RolloutManager) -> None:
    restarts = [replica.num_restarts for replica in manager.replicas]
    for _ in manager.write(requests_of(200, 40)):
        break
    assert len(written(manager, requests_of(10))) == 10
    assert [replica.num_restarts for replica in manager.replicas] == restarts


def test_a_request_that_no_engine_can_answer_is_an_error_and_nobody_is_restarted(manager: RolloutManager) -> None:
    restarts = [replica.num_restarts for replica in manager.replicas]
    with pytest.raises(RolloutError, match=r"rollout-\d: prompt 0 has 3 tokens.*room for 64"):
        written(manager, requests_of(1, 500))
    assert len(written(manager, requests_of(10))) == 10
    assert [replica.num_restarts for replica in manager.replicas] == restarts


def test_one_round_at_a_time(manager: RolloutManager) -> None:
    first = manager.write(requests_of(8))
    next(first)
    with pytest.raises(RolloutError, match="writing already"):
        next(manager.write(requests_of(8)))
    first.close()
    assert list(manager.write([])) == []


@pytest.mark.slow
def test_new_weights_do_not_wait_for_a_replica_that_was_killed(tiny_model: Path, ray_session: None) -> None:
    """By a broadcast, where all meet: as between machines."""
    weights = ModelWeights(tiny_model, channel="collective")
    config = RolloutConfig(engine="hf", placement="colocated", max_batch=MAX_BATCH)
    settings = hf_settings(tiny_model, MAX_BATCH)
    with (
        RayResourcePool([2], resources_per_process={"CPU": 0.5}) as pool,
        open_replicas(config, Controller(pool, 120.0, 120.0), settings, weights, TIMES) as manager,
    ):
        manager.update_weights(1)
        os.kill(pids(manager)[0], signal.SIGKILL)
        weights.nudge()
        began = time.monotonic()
        manager.update_weights(2)
        assert time.monotonic() - began < 15  # the channel would wait for 30 s, and then again
        assert manager.replicas[1] in manager.well()
        assert versions(list(written(manager, requests_of(8)).values())) == [[2]] * 8
        wait_until(lambda: len(manager.well()) == 2, "the replica is back")


@pytest.fixture
def in_process(weights: ModelWeights, tiny_model: Path) -> Iterator[RolloutManager]:
    """One replica in this process, with partial rollout."""
    config = RolloutConfig(engine="hf", placement="standalone", max_batch=MAX_BATCH, partial=True)
    settings = hf_settings(tiny_model, MAX_BATCH)
    with open_replicas(config, Controller(None, 60.0, 60.0), settings, weights, TIMES) as manager:
        manager.update_weights(1)
        yield manager


def test_weights_that_did_not_arrive_right_are_noticed(
    in_process: RolloutManager, weights: ModelWeights, monkeypatch: Any
) -> None:
    right = weights.log_probs
    with monkeypatch.context() as patch:
        patch.setattr(weights, "log_probs", lambda sequences: [found * 1.5 for found in right(sequences)])
        with pytest.raises(RolloutError, match=r"no replica can write.*is not the model that the trainer has"):
            in_process.update_weights(in_process.version + 1)
    in_process.update_weights(in_process.version + 1)  # whoever stayed away is tried again
    assert versions(list(written(in_process, requests_of(4)).values())) == [[in_process.version]] * 4


def test_with_partial_rollout_answers_go_on_under_new_weights(in_process: RolloutManager, monkeypatch: Any) -> None:
    over = threading.Event()

    def slow_draw(*arguments: Any) -> Any:  # so that answers take longer than a worker waits for more of them
        time.sleep(0.005)
        return draw(*arguments)

    monkeypatch.setattr("practicum.rollout.hf.draw", slow_draw)

    def update() -> None:
        for version in itertools.count(2):
            if over.wait(0.02):
                return
            in_process.update_weights(version)

    updating = threading.Thread(target=update)
    is_mixed = False
    try:
        for number in range(20):  # new weights may come between two batches: until they have come in the middle of one
            came: list[Answer] = []
            for answers in in_process.write(requests_of(160, 48)):
                if not number and not came:
                    assert versions([answer.sample for answer in answers]) == [[1]] * len(answers)
                    updating.start()
                came += answers
            assert len(by_place(came)) == len(came) == 160
            for answer in came:
                assert (answer.sample.versions[:-1] <= answer.sample.versions[1:]).all()
                assert len(answer.sample.token_ids) == 48
            is_mixed = any(len(own) > 1 for own in versions([answer.sample for answer in came]))
            if is_mixed:
                break
    finally:
        over.set()
    updating.join(60)
    assert is_mixed


def test_the_trainers_own_processes_are_not_started_again(tiny_model: Path) -> None:
    from practicum.controller import LocalWorkerGroup, RayClassWithInitArgs
    from practicum.rollout.placement import hybrid_manager
    from practicum.rollout.worker import RolloutWorker

    settings = hf_settings(tiny_model)
    with LocalWorkerGroup(RayClassWithInitArgs(RolloutWorker, settings), name="learners") as group:
        manager = hybrid_manager(group, TIMES)
        assert len(written(manager, requests_of(4))) == 4
        group.shutdown()
        with pytest.raises((RolloutError, WorkerError), match="learners"):
            written(manager, requests_of(4))


class Mortal(FakeReplica):
    """Dies after one answer in each of its first lives, and when it is to break off."""

    def __init__(self, number: int = 0, num_short_lives: int = 0) -> None:
        super().__init__(number, pace=1)
        self.problem = ""
        self.num_restarts = 0
        self._num_short_lives = num_short_lives
        self._live()

    def _live(self) -> None:
        self.fate = {"dies_after": 1} if self.num_restarts < self._num_short_lives else {}
        self._open, self.num_written = {0: []}, 0

    def restart(self) -> None:
        self.num_restarts += 1
        self._live()

    def wake_up(self) -> None: ...

    def sleep(self) -> None: ...

    def end(self) -> None: ...

    def abort(self) -> None:
        raise WorkerDied(f"{self.name} died", group=self.name, ranks=[0])

    def take_counts(self) -> list[dict[str, int]]:
        if self.fate:
            raise WorkerDied(f"{self.name} died", group=self.name, ranks=[0])
        return [{"turns": 1 + self.number}, {"turns": 10, "calls_ok": 1}]


def manager_of(*replicas: Mortal) -> RolloutManager:
    return RolloutManager(cast(list[RolloutReplica], list(replicas)), HandingOut(8), delivery=None, sleeps=True)


def test_a_round_left_after_the_last_restart_ends_quietly_and_the_next_one_tries_again() -> None:
    replica = Mortal(num_short_lives=2)
    with manager_of(replica) as manager:
        writing = manager.write(requests_of(12))
        while replica.num_restarts < 2:
            next(writing)
        next(writing)  # in its last life it still has something to do
        assert manager.well()
        writing.close()
        assert "died" in replica.problem and replica.num_restarts == 2 and not manager.well()
        assert len(written(manager, requests_of(12))) == 12
        assert replica.num_restarts == 3 and not replica.problem


def test_counts_of_all_replicas_are_added_up_and_one_that_is_gone_is_left_out() -> None:
    with manager_of(Mortal(0), Mortal(1), Mortal(2, num_short_lives=1)) as manager:
        assert manager.take_counts() == {"turns": 23, "calls_ok": 2}


def test_a_replica_that_is_back_while_the_trainer_learns_is_waited_for(
    in_process: RolloutManager, weights: ModelWeights
) -> None:
    assert in_process._delivery is not None
    came: list[Answer] = []

    def publish() -> None:
        wait_until(lambda: bool(in_process._late), "it is back, without weights")
        in_process.update_weights(2)

    publishing = threading.Thread(target=publish)
    for answers in in_process.write(requests_of(64, 40)):
        if not came:
            weights.nudge()  # what had been sent cannot be sent again
            in_process._delivery._ticket = None
            in_process.lose(in_process.replicas[0], "it is gone")
            publishing.start()
        came += answers
    publishing.join(60)
    assert len(by_place(came)) == 64 and [2] in versions([answer.sample for answer in came])


def test_writing_can_be_broken_off_from_another_thread(in_process: RolloutManager) -> None:
    breaking = threading.Timer(0.1, in_process.break_off)
    breaking.start()
    with pytest.raises(RolloutError, match="broken off"):
        for _ in range(100):
            for _ in in_process.write(requests_of(160, 48)):
                pass
    breaking.join()


@pytest.mark.parametrize("placement", ["colocated", "standalone"])
def test_after_new_weights_replicas_wait_awake_or_asleep(
    weights: ModelWeights, tiny_model: Path, placement: Any
) -> None:
    config = RolloutConfig(engine="hf", placement=placement, max_batch=MAX_BATCH)
    settings = hf_settings(tiny_model, MAX_BATCH)
    with open_replicas(config, Controller(None, 60.0, 60.0), settings, weights, TIMES) as manager:
        worker: Any = manager.replicas[0]._group._hosts[0]._worker  # type: ignore[attr-defined]
        manager.update_weights(1)
        assert worker._is_awake
        manager.update_weights(2, stays_awake=False)
        assert worker._is_awake == (placement == "standalone")  # those have their places to themselves
        assert versions(list(written(manager, requests_of(4)).values())) == [[2]] * 4
