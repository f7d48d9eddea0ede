from __future__ import annotations

from pathlib import Path

import numpy as np

from practicum.controller import FusedWorker, LocalWorkerGroup, RayClassWithInitArgs, Worker
from practicum.models import load_model
from practicum.rollout import RolloutWorker
from practicum.types import Prompt, RolloutRequest, SamplingParams
from practicum.weights import WeightUpdate


class FrozenSource(Worker):
    """Publishes a model's weights as the trainer would."""

    def __init__(self, model_path: str) -> None:
        self.model = load_model(model_path)

    def publish(self, version: int) -> WeightUpdate:
        return WeightUpdate(version, self.model.named_parameters(), shared=True)


def test_the_engine_writes_with_the_weights_of_the_role_beside_it(tiny_model: Path) -> None:
    source = RayClassWithInitArgs(FrozenSource, str(tiny_model))
    rollout = RayClassWithInitArgs(
        RolloutWorker,
        engine="hf",
        model_path=str(tiny_model),
        device="cpu",
        dtype="float32",
        max_batch=4,
        weights_from="source",
    )
    group = LocalWorkerGroup(RayClassWithInitArgs(FusedWorker, source=source, rollout=rollout), name="hybrid")
    writers = group.role("rollout", RolloutWorker)
    writers.execute_all(RolloutWorker.update_weights, 3)
    ask = RolloutRequest(Prompt("p", text="1"), np.array([5], np.int32), SamplingParams(4, num_answers=2), seed=0)
    samples = writers.scatter(RolloutWorker.generate, [ask])
    assert len(samples) == 2
    assert all(set(sample.versions.tolist()) == {3} for sample in samples)
