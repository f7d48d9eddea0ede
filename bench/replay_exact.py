"""`exact`: that replay chooses what was recorded and changes nothing else, family by family and over ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bench.harness import Options, Row
from bench.replay_models import FAMILIES, save_family
from bench.replay_work import (
    Learner,
    actor_settings,
    largest_difference,
    load_learner,
    made_samples,
    moved_share,
    policy_loss,
    to_learn_from,
)
from practicum.data import plan_micro_batches
from practicum.models import load_model
from practicum.replay import ReplaySettings, RouterShape, router_shape
from practicum.train import ActorSettings, ActorWorker, MiniBatch, UpdateStats, totals_of
from practicum.types import RoutedExperts, TrainingSample, route_dtype

if TYPE_CHECKING:
    from practicum.controller import WorkerGroup

FSDP = "exact FSDP2"
LIVE, UPDATE = "live router", "the update"
LENGTHS = [(5, 9), (3, 2), (7, 12), (2, 8), (4, 4), (6, 1)]  # tokens of prompts and answers
CHANGE = 0.3  # of the weights between record and replay, relative to their spread


@dataclass(frozen=True, slots=True)
class Exactness:
    """Of one family, after its weights have changed."""

    as_recorded: float  # share of token-layers, with replay
    as_recorded_live: float  # and without
    gates_with_gradient: float  # share of them
    checkpointed: float  # largest relative difference of a gradient to that of a plain pass
    packed: float | None  # the same for samples that share rows; None for a family that cannot

    def rows(self, case: str) -> list[Row]:
        found = [
            Row(case, "share of token-layers as recorded", self.as_recorded, self.as_recorded_live, LIVE),
            Row(case, "share of gates with a gradient", self.gates_with_gradient),
            Row(case, "gradient difference, checkpointed", self.checkpointed, better="lower"),
        ]
        if self.packed is not None:
            found.append(Row(case, "gradient difference, packed", self.packed, better="lower"))
        return found


def rows(options: Options) -> list[Row]:
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-replay-") as name:
        for family in FAMILIES:
            if options.wants(f"exact {family}"):
                folder = save_family(family, Path(name) / family)
                found += exactness(load_learner(folder, torch.device("cpu"))).rows(f"exact {family}")
        if options.wants(FSDP):
            found += ranks_rows(Path(name))
    return found


def exactness(learner: Learner) -> Exactness:
    vocabulary = learner.model.config.get_text_config().vocab_size
    samples = to_learn_from(made_samples(LENGTHS, vocabulary))
    recorded = learner.forward(samples, share_rows=False).routes
    perturb(learner)
    live = learner.forward(samples, share_rows=False).routes

    def gradients(**how: Any) -> tuple[dict[str, Tensor], float]:
        made = learner.forward(samples, recorded, backward=policy_loss(samples), **({"share_rows": False} | how))
        return learner.take_gradients(), moved_share(recorded, made.routes)

    plain, moved = gradients()
    packed = largest_difference(plain, gradients(share_rows=True)[0]) if learner.shares_rows else None
    learner.save_memory()
    other = [RoutedExperts(one.experts[::-1].copy(), one.layers, one.known, one.num_experts) for one in recorded]
    # Between the two halves of the pass another is made with other experts: recomputed layers still get their own.
    saving, _ = gradients(between=lambda: learner.forward(samples, other, share_rows=False))
    gates = learner.gates()
    reached = [name for name in gates if name in plain and bool(plain[name].abs().max() > 0)]
    return Exactness(
        1 - moved, 1 - moved_share(recorded, live), len(reached) / len(gates), largest_difference(plain, saving), packed
    )


@torch.no_grad()
def perturb(learner: Learner) -> None:
    """So that the live routers choose other experts than they did."""
    torch.manual_seed(1)
    for parameter in learner.model.parameters():
        parameter += CHANGE * parameter.std() * torch.randn_like(parameter)


# Several ranks


def ranks_rows(folder: Path) -> list[Row]:
    """Two ranks against one, through the trainer's own workers."""
    import ray

    from bench.controller_work import start_ray

    model = save_family("qwen3_moe", folder / "ranks")
    samples = to_learn_from(made_samples(LENGTHS * 2, 16))
    shape = router_shape(load_model(str(model)))
    found: list[Row] = []
    with ExitStack() as stack:
        if not ray.is_initialized():
            start_ray()
            stack.callback(ray.shutdown)
        for mode in ("R2", "R3"):
            given = [with_routes(item, shape) for item in samples] if mode == "R3" else samples
            made = []
            for num_ranks in (1, 2):
                own = folder / f"{mode}-{num_ranks}"
                own.mkdir()
                settings = actor_settings(model, lr=1e-3, replay=replay_settings(mode, own))
                with open_group(settings, num_ranks) as group:
                    made.append(updated(group, given, own / "saved"))
            found += compared(mode, made[0], made[1], weights_of(model))
    return found


@contextmanager
def open_group(settings: ActorSettings, num_ranks: int) -> Iterator[WorkerGroup[ActorWorker]]:
    """One rank in this process, several on Ray."""
    from practicum.controller import LocalWorkerGroup, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    packed = RayClassWithInitArgs(ActorWorker, settings)
    with ExitStack() as stack:
        group: WorkerGroup[ActorWorker]
        if num_ranks == 1:
            group = LocalWorkerGroup(packed, name="one")
        else:
            group = RayWorkerGroup(stack.enter_context(RayResourcePool([num_ranks])), packed, name="several")
        stack.callback(group.shutdown)
        yield group


Updated = tuple[UpdateStats, dict[str, Tensor]]


def updated(group: WorkerGroup[ActorWorker], samples: Sequence[TrainingSample], folder: Path) -> Updated:
    """A step of two updates; what was seen in it, and the weights after it."""
    stats = group.map(ActorWorker.update, dealt(samples, group.world_size, num_parts=2, budget=40))
    group.execute_all(ActorWorker.save, str(folder))
    return UpdateStats.combined(stats), weights_of(folder / "model")


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in load_model(str(folder)).named_parameters()}


def dealt(samples: Sequence[TrainingSample], num_ranks: int, num_parts: int, budget: int) -> list[list[MiniBatch]]:
    """Mini-batches by rank, as the training loop deals them out."""
    ranks: list[list[MiniBatch]] = [[] for _ in range(num_ranks)]
    for part in range(num_parts):
        members = samples[part::num_parts]
        totals = totals_of(members, max_tokens=max(len(item.sample.token_ids) for item in members))
        plan = plan_micro_batches([item.sample.num_tokens for item in members], num_ranks, budget)
        for rank, micros in enumerate(plan):
            ranks[rank].append(MiniBatch([[members[i] for i in micro] for micro in micros], totals))
    return ranks


def compared(mode: str, one: Updated, two: Updated, before: dict[str, Tensor]) -> list[Row]:
    norms = (one[0].grad_norm, two[0].grad_norm)
    apart = max(float((one[1][name] - two[1][name]).abs().max()) for name in before)
    change = max(float((one[1][name] - before[name]).abs().max()) for name in before)
    return [
        Row(FSDP, f"{mode}: gradient norm, relative difference", abs(norms[1] / norms[0] - 1), better="lower"),
        Row(FSDP, f"{mode}: largest difference of a weight", apart, change, UPDATE, better="lower"),
    ]


def replay_settings(mode: str, folder: Path) -> ReplaySettings:
    return ReplaySettings("R3") if mode == "R3" else ReplaySettings("R2", record_file=str(folder / "routes.rec"))


def with_routes(item: TrainingSample, shape: RouterShape) -> TrainingSample:
    """Sent anywhere, so that the live routers would not choose the same; of the last token nothing is known."""
    random = np.random.default_rng(item.place)
    num = item.sample.num_tokens
    scores = random.random((num, len(shape.layers), shape.num_experts))
    experts = np.sort(np.argsort(scores)[..., : shape.k], axis=-1).astype(route_dtype(shape.num_experts))
    routes = RoutedExperts(experts, shape.layers, np.arange(num) < num - 1, shape.num_experts)
    return replace(item, sample=replace(item.sample, routes=routes))
