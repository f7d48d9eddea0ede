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
from practicum.errors import TrainingError, WorkerError
from practicum.train import ActorSettings, ActorWorker, UpdateStats
from practicum.types import Sample
from tests.train.test_actor import SAMPLES, mini_batches, settings, updated

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


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_size_of_an_update_is_what_it_changes(weight_decay: float, tiny_model: Path, tmp_path: Path) -> None:
    lr = 1e-3
    told = settings(tiny_model, lr_schedule="constant", lr=lr, weight_decay=weight_decay)
    stats, after = updated_after(told, tmp_path / "two", steps=2)
    _, before = updated_after(told, tmp_path / "one", steps=1)
    change = torch.stack([(after[n] - before[n] * (1 - lr * weight_decay)).norm() for n in after]).norm()
    assert stats.update_ratio == pytest.approx((change / norm_of(before)).item(), rel=1e-3)


@pytest.mark.slow
def test_so_it_is_on_two_ranks(tiny_model: Path, tmp_path: Path, ray_session: None) -> None:
    one, _ = updated_after(settings(tiny_model), tmp_path / "one", steps=2)
    with RayResourcePool([2]) as pool:
        ranks = RayWorkerGroup(pool, RayClassWithInitArgs(ActorWorker, settings(tiny_model)), name="actors")
        try:
            two, _ = updated(ranks, tmp_path / "two", 40, steps=2)
        finally:
            ranks.shutdown()
    assert two.update_ratio == pytest.approx(one.update_ratio, rel=1e-3)


def test_weights_that_are_no_numbers_are_an_error_that_names_them(tiny_model: Path) -> None:
    beyond_float32 = settings(tiny_model, lr=3.3e37, weight_decay=10.0)
    group = LocalWorkerGroup(RayClassWithInitArgs(ActorWorker, beyond_float32), name="actor")
    try:
        told = r"step 7: update 1 .*the first is model\.\S+\. .*neither published nor saved\. Lower actor\.lr=3\.3e\+37"
        with pytest.raises(WorkerError, match=told) as caught:
            group.map(ActorWorker.update, mini_batches(SAMPLES, 1, 200), 7)
        assert isinstance(caught.value.cause, TrainingError)
    finally:
        group.shutdown()


def updated_after(told: ActorSettings, folder: Path, steps: int) -> tuple[UpdateStats, dict[str, torch.Tensor]]:
    group = LocalWorkerGroup(RayClassWithInitArgs(ActorWorker, told), name="actor")
    try:
        return updated(group, folder, 200, steps=steps)
    finally:
        group.shutdown()


def norm_of(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.norm() for tensor in weights.values()]).norm()
