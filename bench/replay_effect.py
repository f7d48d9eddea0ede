"""`effect`: how far trainer and rollout are apart in bfloat16, and a step's updates from its beginning, with replay and
without.

    native engine ─ samples, their log-probs and experts ─▶ trainer's pass: disabled, R2, R3      KL(rollout | trainer)
    trainer's pass ─ update on one half ─▶ pass over the other half: disabled, R2                 KL(old | updated)

The weights are random, but enlarged, see replay_models.py. The engine gets them as it gets those of any trainer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.harness import Options, Row
from bench.replay_models import Shape, save_plain
from bench.replay_work import (
    Learner,
    load_learner,
    moved_share,
    policy_loss,
    routes_of,
    to_learn_from,
    write_samples,
)
from practicum.algo import k3
from practicum.rollout.native import NativeRollout
from practicum.types import Sample
from practicum.weights import WeightUpdate

DISABLED = "disabled"
MODELS: dict[str, Shape] = {
    "tiny": Shape(2, 128, 64, 8, 2, gates=0.3, experts=3.0, attention=2.0),
    "64 experts, flat": Shape(12, 128, 16, 64, 8, gates=0.1, experts=1.0),
    "64 experts, spread": Shape(12, 128, 16, 64, 8, gates=3.0, experts=1.0),
}
LR = 1e-5


@dataclass(frozen=True, slots=True)
class Sizes:
    num_samples: int
    prompt_tokens: tuple[int, int]  # fewest and most
    new_tokens: int


FULL = Sizes(32, (16, 48), 32)
QUICK = Sizes(8, (8, 16), 8)


@dataclass(frozen=True, slots=True)
class Effect:
    """KL is per token; a share is of token-layers sent elsewhere. By mode, where there are several."""

    kl: dict[str, float]  # KL(rollout | trainer)
    moved: dict[str, float]  # between rollout and trainer
    kl_after: dict[str, float]  # KL(old | updated)
    moved_after: dict[str, float]  # between the old pass and the update

    def rows(self, case: str) -> list[Row]:
        found = []
        for metric, by_mode in (
            ("KL(rollout | trainer)", self.kl),
            ("share sent elsewhere than in the rollout", self.moved),
            ("KL(old | updated)", self.kl_after),
            ("share sent elsewhere than in the old pass", self.moved_after),
        ):
            for mode in [mode for mode in by_mode if mode != DISABLED]:
                found.append(Row(case, f"{mode}: {metric}", by_mode[mode], by_mode[DISABLED], DISABLED, "lower"))
        return found


def rows(options: Options) -> list[Row]:
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-replay-") as name:
        for model, shape in MODELS.items():
            case = f"effect {model}"
            if options.wants(case):
                folder = save_plain(shape, Path(name) / model.replace(" ", "-"))
                found += measured(folder, shape, QUICK if options.quick else FULL, torch.device("cpu")).rows(case)
    return found


def measured(folder: Path, shape: Shape, sizes: Sizes, device: torch.device) -> Effect:
    learner = load_learner(folder, device, torch.bfloat16, shape)
    samples = written(folder, learner, shape, sizes)
    kl, moved = against_the_rollout(learner, samples)
    kl_after, moved_after = against_the_old_pass(learner, samples)
    return Effect(kl, moved, kl_after, moved_after)


def written(folder: Path, learner: Learner, shape: Shape, sizes: Sizes) -> list[Sample]:
    engine = NativeRollout(
        str(folder), device=learner.device, dtype=torch.bfloat16, max_batch=sizes.num_samples, keep_routes=True
    )
    try:
        engine.update_weights(WeightUpdate(1, learner.weights(), shared=False))
        engine.resume()
        return write_samples(engine, sizes.num_samples, sizes.prompt_tokens, sizes.new_tokens, shape.vocabulary)
    finally:
        engine.close()


def against_the_rollout(learner: Learner, samples: Sequence[Sample]) -> tuple[dict[str, float], dict[str, float]]:
    graded, recorded = to_learn_from(samples), routes_of(samples)
    rollout = torch.cat([torch.from_numpy(sample.log_probs) for sample in samples])
    live = learner.forward(graded)
    passes = {
        DISABLED: live,
        "R2": learner.forward(graded, live.routes),  # its record is the trainer's own, which knows no rollout
        "R3": learner.forward(graded, recorded),
    }
    return (
        {mode: divergence(rollout, made.log_probs) for mode, made in passes.items()},
        {mode: moved_share(recorded, made.routes) for mode, made in passes.items()},
    )


def against_the_old_pass(learner: Learner, samples: Sequence[Sample]) -> tuple[dict[str, float], dict[str, float]]:
    """The second mini-batch of a step, after the update on the first."""
    graded = to_learn_from(samples)
    first, second = graded[: len(graded) // 2], graded[len(graded) // 2 :]
    old = learner.forward(second)
    optimizer = torch.optim.AdamW([weight for _, weight in learner.weights()], lr=LR)
    learner.forward(first, backward=policy_loss(first))
    learner.step(optimizer)
    passes = {DISABLED: learner.forward(second), "R2": learner.forward(second, old.routes)}
    return (
        {mode: divergence(old.log_probs, made.log_probs) for mode, made in passes.items()},
        {mode: moved_share(old.routes, made.routes) for mode, made in passes.items()},
    )


def divergence(one: Tensor, other: Tensor) -> float:
    """Per token, estimated on the tokens that the rollout has drawn."""
    return float(k3(one.double().cpu(), other.double().cpu()).mean())
