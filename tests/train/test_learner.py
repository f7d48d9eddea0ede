"""The gradient itself, read from AdamW's first moment: what actor and critic share must not depend on the split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from practicum.algo import Objective
from practicum.controller import LocalWorkerGroup, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, WorkerGroup
from practicum.train import ActorSettings, ActorWorker
from practicum.types import Sample
from tests.train.test_actor import SAMPLES, mini_batches, settings

EVERYTHING = Objective("ppo", {}, "sequence_mean", "truncated", "sequence", {}, "k2", 0.01)
GIVEN = [
    replace(item, reference_log_probs=item.log_probs - np.float32(0.2 * (i % 3))) for i, item in enumerate(SAMPLES)
]


class PaddedActor(ActorWorker):
    """One whose model cannot keep samples in one row apart."""

    def __init__(self, settings: ActorSettings) -> None:
        super().__init__(settings)
        self._packing = False


def gradient_of(group: WorkerGroup[Any], folder: Path, batches: list[Any]) -> dict[str, torch.Tensor]:
    group.map(ActorWorker.update, batches, 1, 0.1)
    folder.mkdir()
    group.execute_all(ActorWorker.save, str(folder))
    return moments(folder / "optimizer.pt")


def moments(path: Path) -> dict[str, torch.Tensor]:
    """After one update AdamW's first moment is a tenth of the gradient."""
    state = torch.load(path, weights_only=True)["optimizer"]["state"]
    return {name: found["exp_avg"] * 10 for name, found in state.items()}


def gradient(
    model: Path, folder: Path, budget: int, kind: type[ActorWorker] = ActorWorker, **changes: Any
) -> dict[str, torch.Tensor]:
    told = settings(model, max_grad_norm=1e9, **changes)
    group = LocalWorkerGroup(RayClassWithInitArgs(kind, told), name="actor")
    try:
        return gradient_of(group, folder, mini_batches(GIVEN, 1, budget))
    finally:
        group.shutdown()


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    norm = torch.stack([tensor.norm() for tensor in first.values()]).norm()
    assert norm > 1e-3
    gap = torch.stack([(first[name] - second[name]).norm() for name in first]).norm()
    assert gap <= 1e-5 * norm


@pytest.mark.parametrize("objective", [Objective(), EVERYTHING, Objective("gspo", {}, "constant", kl="k3")])
def test_micro_batches_and_padding_leave_the_gradient_alone(
    objective: Objective, tiny_model: Path, tmp_path: Path
) -> None:
    one = gradient(tiny_model, tmp_path / "one", 200, objective=objective)
    assert len(mini_batches(GIVEN, 1, 12)[0][0].micro_batches) >= 8
    assert_equal(one, gradient(tiny_model, tmp_path / "many", 12, objective=objective))
    assert_equal(one, gradient(tiny_model, tmp_path / "padded", 200, PaddedActor, objective=objective))


@pytest.mark.slow
@pytest.mark.parametrize("num_samples", [len(GIVEN), 1])  # one: the second rank has nothing
def test_so_do_ranks(num_samples: int, tiny_model: Path, tmp_path: Path, ray_session: None) -> None:
    given: Sequence[Sample] = GIVEN[-num_samples:]
    told = settings(tiny_model, max_grad_norm=1e9, objective=EVERYTHING)
    group = LocalWorkerGroup(RayClassWithInitArgs(ActorWorker, told), name="actor")
    try:
        one = gradient_of(group, tmp_path / "one", mini_batches(given, 1, 40))
    finally:
        group.shutdown()
    with RayResourcePool([2]) as pool:
        ranks = RayWorkerGroup(pool, RayClassWithInitArgs(ActorWorker, told), name="actors")
        try:
            assert_equal(one, gradient_of(ranks, tmp_path / "two", mini_batches(given, 2, 40)))
        finally:
            ranks.shutdown()
