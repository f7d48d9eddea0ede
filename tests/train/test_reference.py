"""The reference by itself, and beside an actor: it says what its model says, however the work is divided."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
from practicum.models import load_model
from practicum.train import ActorWorker, ReferenceSettings, ReferenceWorker
from tests.train.test_actor import SCORED, mini_batches
from tests.train.test_actor import settings as actor_settings


def settings(model: Path, **changes: Any) -> ReferenceSettings:
    fields: dict[str, Any] = {
        "model_path": str(model),
        "device": "cpu",
        "compute_dtype": "float32",
        "threads": 1,
        "temperature": 1.0,
        "collective_timeout_s": 60.0,
    }
    return ReferenceSettings(**{**fields, **changes})


@contextmanager
def reference(model: Path, **changes: Any) -> Iterator[WorkerGroup[ReferenceWorker]]:
    group = LocalWorkerGroup(RayClassWithInitArgs(ReferenceWorker, settings(model, **changes)), name="reference")
    try:
        yield group
    finally:
        group.shutdown()


def said_by(group: WorkerGroup[ReferenceWorker], budget: int = 40) -> dict[str, np.ndarray]:
    ranks = group.map(ReferenceWorker.log_probs, mini_batches(SCORED, group.world_size, budget))
    return {id: found for rank in ranks for id, found in rank.items()}


@torch.no_grad()
def expected(model: Any, temperature: float) -> dict[str, np.ndarray]:
    found = {}
    for item in SCORED:
        ids = torch.from_numpy(np.concatenate([item.prompt_ids, item.token_ids]).astype(np.int64))
        logits = model(input_ids=ids[None]).logits[0, :-1] / temperature
        own = logits.log_softmax(-1).gather(-1, ids[1:, None])[len(item.prompt_ids) - 1 :, 0].numpy()
        found[item.id] = np.where(item.loss_mask, own, np.nan)
    return found


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for id, own in one.items():
        assert own == pytest.approx(other[id], abs=2e-5, nan_ok=True)


@pytest.mark.parametrize("budget", [12, 200])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_says_what_its_model_says(tiny_model: Path, temperature: float, budget: int) -> None:
    with reference(tiny_model, temperature=temperature) as group:
        assert_same(said_by(group, budget), expected(load_model(str(tiny_model)).eval(), temperature))
        assert_same(said_by(group, budget), said_by(group))


@pytest.mark.slow
@pytest.mark.parametrize("is_beside_an_actor", [True, False])
def test_so_it_does_on_two_ranks(tiny_model: Path, ray_session: None, is_beside_an_actor: bool) -> None:
    own = RayClassWithInitArgs(ReferenceWorker, settings(tiny_model))
    actor = RayClassWithInitArgs(ActorWorker, actor_settings(tiny_model))
    packed = RayClassWithInitArgs(FusedWorker, actor=actor, reference=own) if is_beside_an_actor else own
    with RayResourcePool([2]) as pool:
        group: Any = RayWorkerGroup(pool, packed, name="ranks")
        try:
            found = said_by(group.role("reference", ReferenceWorker) if is_beside_an_actor else group)
        finally:
            group.shutdown()
    assert_same(found, expected(load_model(str(tiny_model)).eval(), 1.0))
