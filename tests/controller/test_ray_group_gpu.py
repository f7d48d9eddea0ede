"""One GPU: two roles in one process, and two groups in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from practicum.controller import FusedWorker, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Trainer(Worker):
    def __init__(self, size: int) -> None:
        self.weights = torch.zeros(size, size, device="cuda")

    def step(self) -> None:
        self.weights += 1


class Engine(Worker):
    def weights(self) -> Tensor:
        trainer = self.siblings["trainer"]
        assert isinstance(trainer, Trainer)
        return trainer.weights

    def mean(self) -> float:
        return float(self.weights().mean())

    def address(self) -> int:
        return self.weights().data_ptr()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()


class Half(Worker):
    def square(self, size: int) -> tuple[float, int, str]:
        matrix = torch.eye(size, device="cuda") * 3
        return float((matrix @ matrix).sum()), torch.cuda.device_count(), str(torch.cuda.get_device_properties(0).uuid)


@pytest.fixture
def pool(ray_session: None) -> Iterator[RayResourcePool]:
    with RayResourcePool([1], use_gpu=True, max_colocate_count=2) as pool:
        yield pool


def test_fused_roles_share_the_memory_of_one_gpu(pool: RayResourcePool) -> None:
    size = 2048
    packed = RayClassWithInitArgs(
        FusedWorker, trainer=RayClassWithInitArgs(Trainer, size), engine=RayClassWithInitArgs(Engine)
    )
    group = RayWorkerGroup(pool, packed)
    try:
        trainer, engine = group.role("trainer", Trainer), group.role("engine", Engine)
        before = engine.execute_all(Engine.address)
        for _ in range(3):
            trainer.execute_all(Trainer.step)
        assert engine.execute_all(Engine.mean) == [3.0]
        assert engine.execute_all(Engine.address) == before
        assert engine.execute_all(Engine.allocated)[0] < 2 * size * size * 4  # one copy for both roles
    finally:
        group.shutdown()


def test_two_groups_take_half_a_gpu_each_and_work_at_once(pool: RayResourcePool) -> None:
    assert pool.share("GPU") == 0.5
    groups = [RayWorkerGroup(pool, RayClassWithInitArgs(Half), name=name) for name in ("left", "right")]
    try:
        futures = [group.execute_all_async(Half.square, 1024) for group in groups]
        (left,), (right,) = (future.result() for future in futures)
        assert left[0] == right[0] == 9 * 1024
        assert left[1] == right[1] == 1  # each sees one device,
        assert left[2] == right[2]  # the same one
    finally:
        for group in groups:
            group.shutdown()


def test_the_kind_of_gpu_can_be_asked_for(ray_session: None) -> None:
    import ray

    kinds = [name.partition(":")[2] for name in ray.cluster_resources() if name.startswith("accelerator_type:")]
    with RayResourcePool([1], use_gpu=True, accelerator_type=kinds[0]) as pool:
        assert pool.world_size == 1
