"""The critic on its own, and beside an actor: what it learns, and that the split of the work does not matter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from practicum.controller import (
    FusedWorker,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    WorkerGroup,
)
from practicum.errors import CheckpointError, WorkerError
from practicum.train import ActorWorker, CriticSettings, CriticStats, CriticWorker
from practicum.types import Sample
from tests.samples import make_sample
from tests.train.test_actor import mini_batches
from tests.train.test_actor import settings as actor_settings
from tests.train.test_learner import assert_equal, moments


def sample(i: int) -> Sample:
    item = make_sample(2 + i % 3, 1 + i % 7, advantage=1.0, seed=i, id=f"1/{i}/0")
    returns = np.full(len(item.token_ids), (-1.0) ** i, np.float32)
    return replace(item, values=np.zeros_like(returns), returns=returns)


SAMPLES = [sample(i) for i in range(13)]


def settings(model: Path, **changes: Any) -> CriticSettings:
    fields: dict[str, Any] = {
        "model_path": str(model),
        "device": "cpu",
        "compute_dtype": "float32",
        "threads": 1,
        "seed": 0,
        "lr": 1e-3,
        "lr_schedule": "constant",
        "num_updates": 10,
        "num_warmup": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1e9,
        "value_clip": 10.0,
        "gradient_checkpointing": False,
        "collective_timeout_s": 60.0,
    }
    return CriticSettings(**{**fields, **changes})


@contextmanager
def critic(model: Path, **changes: Any) -> Iterator[WorkerGroup[CriticWorker]]:
    group = LocalWorkerGroup(RayClassWithInitArgs(CriticWorker, settings(model, **changes)), name="critic")
    try:
        yield group
    finally:
        group.shutdown()


def values(group: WorkerGroup[CriticWorker], samples: Sequence[Sample] = SAMPLES) -> dict[str, np.ndarray]:
    ranks = group.map(CriticWorker.values, mini_batches(samples, group.world_size, 40))
    return {id: found for rank in ranks for id, found in rank.items()}


def update(group: WorkerGroup[CriticWorker], budget: int = 40, parts: int = 1) -> CriticStats:
    return CriticStats.combined(group.map(CriticWorker.update, mini_batches(SAMPLES, group.world_size, budget, parts)))


def test_it_begins_with_nothing_and_comes_to_expect_what_is_returned(tiny_model: Path) -> None:
    with critic(tiny_model) as group:
        assert all((found == 0).all() for found in values(group).values())
        first = update(group)
        for _ in range(30):
            last = update(group)
        after = values(group)
    assert first.num_tokens == sum(len(item.token_ids) for item in SAMPLES)
    assert first.loss / first.num_tokens == pytest.approx(0.5)
    assert last.loss < 0.2 * first.loss
    assert np.mean([after[item.id].mean() * (-1.0) ** i for i, item in enumerate(SAMPLES)]) > 0.7


def test_a_value_is_that_before_its_token(tiny_model: Path) -> None:
    """It may not depend on the token whose advantage it is a part of."""
    item = SAMPLES[4]
    other = replace(item, id="1/1/0", token_ids=item.token_ids.copy())
    other.token_ids[-1] = 4 + (other.token_ids[-1] - 3) % 12
    assert other.token_ids[-1] != item.token_ids[-1]
    with critic(tiny_model) as group:
        for _ in range(3):
            update(group)
        found = values(group, [item, other])
    assert found[item.id].any() and found[item.id] == pytest.approx(found["1/1/0"], abs=1e-6)


def test_a_value_that_has_moved_far_enough_is_left_alone(tiny_model: Path) -> None:
    with critic(tiny_model, value_clip=0.01, lr=1e-2) as group:
        assert update(group).clipped == 0
        assert update(group).clipped > 0


def test_epochs_and_mini_batches_are_updates(tiny_model: Path, tmp_path: Path) -> None:
    with critic(tiny_model, epochs=2) as group:
        stats = update(group, parts=3)
        group.execute_all(CriticWorker.save, str(tmp_path))
    assert torch.load(tmp_path / "critic" / "optimizer.pt", weights_only=True)["num_updates"] == 6
    assert stats.num_tokens == 2 * sum(len(item.token_ids) for item in SAMPLES)


def gradient(group: WorkerGroup[CriticWorker], folder: Path, budget: int) -> dict[str, torch.Tensor]:
    """Of the second update: in the first, with a head of zeros, the body gets none."""
    folder.mkdir()
    update(group)
    group.execute_all(CriticWorker.save, str(folder))
    first = moments(folder / "critic" / "optimizer.pt")
    update(group, budget)
    group.execute_all(CriticWorker.save, str(folder))
    return {name: moment - 0.9 * first[name] for name, moment in moments(folder / "critic" / "optimizer.pt").items()}


def test_the_gradient_does_not_depend_on_the_micro_batches(tiny_model: Path, tmp_path: Path) -> None:
    found = []
    for budget in (200, 12):
        with critic(tiny_model) as group:
            found.append(gradient(group, tmp_path / str(budget), budget))
    assert_equal(*found)


@pytest.mark.slow
def test_nor_on_the_ranks_beside_an_actor(tiny_model: Path, tmp_path: Path, ray_session: None) -> None:
    with critic(tiny_model) as group:
        one = gradient(group, tmp_path / "one", 40)
        alone = values(group)
    roles = {
        "actor": RayClassWithInitArgs(ActorWorker, actor_settings(tiny_model)),
        "critic": RayClassWithInitArgs(CriticWorker, settings(tiny_model)),
    }
    with RayResourcePool([2]) as pool:
        fused = RayWorkerGroup(pool, RayClassWithInitArgs(FusedWorker, **roles), name="learners")
        try:
            ranks = fused.role("critic", CriticWorker)
            assert_equal(one, gradient(ranks, tmp_path / "two", 40))
            together = values(ranks)
        finally:
            fused.shutdown()
    assert together.keys() == alone.keys()
    for id, found in together.items():
        assert found == pytest.approx(alone[id], abs=1e-3)


def test_a_restored_critic_goes_on_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    with critic(tiny_model) as group:
        update(group)
        group.execute_all(CriticWorker.save, str(tmp_path))
        stats, expected = update(group), values(group)
    with critic(tiny_model) as group:
        group.execute_all(CriticWorker.load, str(tmp_path))
        assert update(group) == stats
        again = values(group)
    assert all((again[id] == expected[id]).all() for id in expected)
    (tmp_path / "critic" / "weights.pt").write_bytes(b"spoilt")
    with critic(tiny_model) as group:
        with pytest.raises(WorkerError, match=r"weights\.pt cannot be read") as caught:
            group.execute_all(CriticWorker.load, str(tmp_path))
        assert isinstance(caught.value.cause, CheckpointError)


def test_checkpointing_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    found = []
    for saving in (False, True):
        with critic(tiny_model, gradient_checkpointing=saving) as group:
            found.append(gradient(group, tmp_path / str(saving), 40))
    assert_equal(*found)
