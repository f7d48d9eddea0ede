"""An actor's settings and mini-batches, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from practicum.data import plan_micro_batches
from practicum.train import ActorSettings, MiniBatch, totals_of
from practicum.types import Sample


def settings(model: Path, **changes: Any) -> ActorSettings:
    fields: dict[str, Any] = {
        "model_path": str(model),
        "device": "cpu",
        "compute_dtype": "float32",
        "threads": 1,
        "seed": 0,
        "lr": 1e-3,
        "lr_schedule": "linear",
        "num_updates": 10,
        "num_warmup": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "temperature": 1.0,
        "gradient_checkpointing": False,
        "collective_timeout_s": 60.0,
    }
    return ActorSettings(**{**fields, **changes})


def mini_batches(samples: Sequence[Sample], num_ranks: int, budget: int, parts: int = 1) -> list[Any]:
    """Deal samples out to ranks as the training loop does, in micro-batches of up to `budget` tokens."""
    ranks: list[list[MiniBatch]] = [[] for _ in range(num_ranks)]
    for part in range(parts):
        members = samples[part::parts]
        plan = plan_micro_batches([m.num_tokens for m in members], num_ranks, budget)
        totals = totals_of(members, max_tokens=8)
        for rank, micros in enumerate(plan):
            ranks[rank].append(MiniBatch([[members[i] for i in micro] for micro in micros], totals, len(samples)))
    return ranks
