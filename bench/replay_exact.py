"""`exact` and `effect` of the `replay` benchmark: is replay exact, and how much nearer are trainer and rollout with it?

    exact    record ─ change all weights ─▶ replay: are these the experts recorded, and a plain pass's gradients?
             two ranks against one, through the trainer's own workers
    effect   engine ─ samples, their log-probs and experts ─▶ trainer's pass: disabled, R2, R3    KL(rollout | trainer)
             trainer's pass ─ update on one half ─▶ pass over the other half: disabled, R2        KL(old | updated)

The weights of `effect` are random, but enlarged, see models.py. The engine gets them as it gets those of any trainer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bench.harness import Options, Row
from bench.models import MIXTURES, Shape, save_family
from bench.work import groups_of, made_samples, native_engine, to_learn_from, written
from practicum.algo import clipped_policy_loss, k3
from practicum.data import pack, plan_micro_batches
from practicum.models import load_model
from practicum.replay import (
    Placed,
    ReplaySettings,
    RouteRecorder,
    RouteReplayer,
    RouterShape,
    decoded,
    find_routers,
    router_shape,
)
from practicum.replay.session import laid_out
from practicum.train import ActorSettings, ActorWorker, MiniBatch, UpdateStats, totals_of
from practicum.train.model import LogProbModel, supports_packing
from practicum.types import RoutedExperts, Sample, SamplingParams, route_dtype
from practicum.weights import WeightUpdate

if TYPE_CHECKING:
    from practicum.controller import WorkerGroup

CPU = torch.device("cpu")
CLIP = (0.2, 0.28)
FSDP = "exact FSDP2"
LIVE, UPDATE, DISABLED = "live router", "the update", "disabled"
LENGTHS = [(5, 9), (3, 2), (7, 12), (2, 8), (4, 4), (6, 1)]  # tokens of prompts and answers
CHANGE = 0.3  # of the weights between record and replay, relative to their spread
MODELS: dict[str, Shape] = {
    "tiny": Shape(2, 128, 64, 8, 2, gates=0.3, experts=3.0, attention=2.0),
    "64 experts, flat": Shape(12, 128, 16, 64, 8, gates=0.1, experts=1.0),
    "64 experts, spread": Shape(12, 128, 16, 64, 8, gates=3.0, experts=1.0),
}
LR = 1e-5


def rows(options: Options) -> list[Row]:
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-replay-") as name:
        folder = Path(name)
        for family in MIXTURES:
            if options.wants(f"exact {family}"):
                learner = load_learner(save_family(family, folder / family), CPU)
                found += exactness(learner).rows(f"exact {family}")
        if options.wants(FSDP):
            found += ranks_rows(folder)
        for model, shape in MODELS.items():
            if options.wants(f"effect {model}"):
                path = shape.save(folder / model.replace(" ", "-"))
                found += measured(path, shape, QUICK if options.quick else FULL, CPU).rows(f"effect {model}")
    return found


# A learner of one rank


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass over samples: log-probs of the learnt tokens, and the experts of every sample."""

    log_probs: Tensor  # [learnt]
    routes: list[RoutedExperts]


class Learner:
    """The trainer on one rank without its machinery: weights in float32, computed with in `dtype` as FSDP2 does."""

    def __init__(self, model: Any, dtype: torch.dtype, packing: bool) -> None:
        self.packing = packing  # whether samples may share rows
        self.model = model.to(dtype).train()
        self.device = model.device
        self._own = {name: parameter.detach().float() for name, parameter in self.model.named_parameters()}
        self._log_probs = LogProbModel(self.model)
        self._replayer = RouteReplayer(self.model)

    def weights(self) -> list[tuple[str, Tensor]]:
        return list(self._own.items())

    def forward(
        self,
        samples: Sequence[Sample],
        routes: Sequence[RoutedExperts] | None = None,
        *,
        packing: bool | None = None,
        between: Callable[[], Any] = lambda: None,
        backward: Callable[[Tensor], None] | None = None,
    ) -> Pass:
        """Replay `routes`, if they are given. `between` is called before the backward pass, if there is one."""
        packed = pack(samples, self.packing if packing is None else packing)
        placed = Placed(samples, packed.starts, packed.input_ids.size, "a pass of the benchmark")
        replayed: Any = nullcontext()
        if routes is not None:
            experts, known = laid_out(routes, placed, self._replayer.shape)
            replayed = self._replayer.replaying(*(torch.from_numpy(a).to(self.device) for a in (experts, known)))
        inputs = (packed.input_ids, packed.position_ids, packed.predict_at, packed.targets)
        recorder = RouteRecorder(self.model)
        try:
            with replayed, torch.set_grad_enabled(backward is not None):
                log_probs, _ = self._log_probs(*(torch.from_numpy(array).to(self.device) for array in inputs), 1.0)
            chosen = recorder.take()
        finally:
            recorder.close()
        if backward is not None:
            between()
            backward(log_probs)
        shape = self._replayer.shape
        ends = placed.starts + [sample.num_tokens for sample in samples]
        parts = [chosen[start:end] for start, end in zip(placed.starts.tolist(), ends.tolist(), strict=True)]
        cut = [RoutedExperts(one, shape.layers, np.ones(len(one), np.bool_), shape.num_experts) for one in parts]
        return Pass(log_probs.detach(), cut)

    def take_gradients(self) -> dict[str, Tensor]:
        found = {name: p.grad.float() for name, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad()
        return found

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make one update with the gradients there are."""
        for name, gradient in self.take_gradients().items():
            self._own[name].grad = gradient
        optimizer.step()
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self._own[name])

    @torch.no_grad()
    def perturb(self) -> None:
        """Change the weights, so that the live routers choose other experts than they did."""
        torch.manual_seed(1)
        for parameter in self.model.parameters():
            parameter += CHANGE * parameter.std() * torch.randn_like(parameter)

    def save_memory(self) -> None:
        """Recompute layers in backward passes from now on."""
        contexts = self._replayer.checkpoint_contexts
        self.model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})

    def gates(self) -> list[str]:
        """Return the names of the weights of all routers."""
        routers = {id(router.weight) for router in find_routers(self.model).values()}
        return [name for name, parameter in self.model.named_parameters() if id(parameter) in routers]


def load_learner(
    folder: Path, device: torch.device, dtype: torch.dtype = torch.float32, shape: Shape | None = None
) -> Learner:
    """Load the model in `folder`, its weights enlarged to `shape` if one is given."""
    model = load_model(str(folder))
    packing = supports_packing(model)
    model.to(device)
    if shape is not None:
        shape.enlarge(model)
    return Learner(model, dtype, packing)


def policy_loss(samples: Sequence[Sample]) -> Callable[[Tensor], None]:
    """Return a backward pass from the log-probs of their learnt tokens, as the trainer makes it."""
    advantages = np.concatenate([sample.advantages[sample.loss_mask] for sample in samples])  # type: ignore[index]

    def backward(log_probs: Tensor) -> None:
        given = torch.from_numpy(advantages).to(log_probs.device)
        losses, _ = clipped_policy_loss(log_probs, log_probs.detach(), given, *CLIP)
        (losses.sum() / len(losses)).backward()

    return backward


def moved_share(one: Sequence[RoutedExperts], other: Sequence[RoutedExperts]) -> float:
    """Return the share sent to different experts, of the token-layers known on both sides."""
    parts = [(a.experts != b.experts).any(-1)[a.known & b.known] for a, b in zip(one, other, strict=True)]
    return float(np.concatenate(parts).mean())


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return that of the gradients of any weights, relative to the largest of those weights."""
    assert one.keys() == other.keys()
    found = [0.0]
    for name, gradient in one.items():
        size = float(gradient.abs().max())
        if size:
            found.append(float((gradient - other[name]).abs().max()) / size)
    return max(found)


# Exact


@dataclass(frozen=True, slots=True)
class Exactness:
    """What was found of one family, after its weights have changed."""

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


def exactness(learner: Learner) -> Exactness:
    vocabulary = learner.model.config.get_text_config().vocab_size
    samples = to_learn_from(made_samples(LENGTHS, vocabulary))
    recorded = learner.forward(samples, packing=False).routes
    learner.perturb()
    live = learner.forward(samples, packing=False).routes

    def gradients(**how: Any) -> tuple[dict[str, Tensor], float]:
        made = learner.forward(samples, recorded, backward=policy_loss(samples), **({"packing": False} | how))
        return learner.take_gradients(), moved_share(recorded, made.routes)

    plain, moved = gradients()
    packed = largest_difference(plain, gradients(packing=True)[0]) if learner.packing else None
    learner.save_memory()
    other = [RoutedExperts(one.experts[::-1].copy(), one.layers, one.known, one.num_experts) for one in recorded]
    # Between the two halves of the pass another is made with other experts: recomputed layers still get their own.
    saving, _ = gradients(between=lambda: learner.forward(samples, other, packing=False))
    gates = learner.gates()
    reached = [name for name in gates if name in plain and bool(plain[name].abs().max() > 0)]
    return Exactness(
        1 - moved, 1 - moved_share(recorded, live), len(reached) / len(gates), largest_difference(plain, saving), packed
    )


def ranks_rows(folder: Path) -> list[Row]:
    """Compare two ranks with one, through the trainer's own workers."""
    import ray

    from bench.controller_work import start_ray

    model = save_family("qwen3_moe", folder / "ranks")
    shape = router_shape(load_model(str(model)))
    found: list[Row] = []
    with ExitStack() as stack:
        if not ray.is_initialized():
            start_ray()
            stack.callback(ray.shutdown)
        for mode in ("R2", "R3"):
            made = []
            for num_ranks in (1, 2):
                samples = to_learn_from(made_samples(LENGTHS * 2, 16))
                if mode == "R3":
                    add_routes(samples, shape)
                own = folder / f"{mode}-{num_ranks}"
                own.mkdir()
                settings = actor_settings(model, lr=1e-3, replay=replay_settings(mode, own))
                with open_group(settings, num_ranks) as group:
                    made.append(updated(group, samples, own / "saved"))
            found += compared(mode, made[0], made[1], weights_of(model))
    return found


@contextmanager
def open_group(settings: ActorSettings, num_ranks: int) -> Iterator[WorkerGroup[ActorWorker]]:
    """Open one rank in this process, several on Ray."""
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


def updated(group: WorkerGroup[ActorWorker], samples: Sequence[Sample], folder: Path) -> Updated:
    """Make a step of two updates; return what was seen in it, and the weights after it."""
    stats = group.map(ActorWorker.update, dealt(samples, group.world_size, num_parts=2, budget=40))
    group.execute_all(ActorWorker.save, str(folder))
    return UpdateStats.combined(stats), weights_of(folder / "model")


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in load_model(str(folder)).named_parameters()}


def dealt(samples: Sequence[Sample], num_ranks: int, num_parts: int, budget: int) -> list[list[MiniBatch]]:
    """Return mini-batches by rank, as the training loop deals them out."""
    ranks: list[list[MiniBatch]] = [[] for _ in range(num_ranks)]
    for part in range(num_parts):
        members = samples[part::num_parts]
        totals = totals_of(members, max_tokens=max(len(sample.token_ids) for sample in members))
        plan = plan_micro_batches([sample.num_tokens for sample in members], num_ranks, budget)
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


def add_routes(samples: Sequence[Sample], shape: RouterShape) -> None:
    """Send samples anywhere, so that the live routers would not choose the same; of the last token nothing is known."""
    for place, sample in enumerate(samples):
        random = np.random.default_rng(place)
        scores = random.random((sample.num_tokens, len(shape.layers), shape.num_experts))
        experts = np.sort(np.argsort(scores)[..., : shape.k], axis=-1).astype(route_dtype(shape.num_experts))
        known = np.arange(sample.num_tokens) < sample.num_tokens - 1
        sample.routes = RoutedExperts(experts, shape.layers, known, shape.num_experts)


def actor_settings(model: Path, **changes: Any) -> ActorSettings:
    fields: dict[str, Any] = {
        "model_path": str(model), "device": "cpu", "compute_dtype": "float32", "threads": 1, "seed": 0, "lr": 1e-6,
        "lr_schedule": "constant", "num_updates": 1_000_000, "num_warmup": 0, "weight_decay": 0.0,
        "max_grad_norm": 1.0, "temperature": 1.0, "gradient_checkpointing": False, "collective_timeout_s": 120.0,
    }  # fmt: skip
    return ActorSettings(**{**fields, **changes})


# Effect


@dataclass(frozen=True, slots=True)
class Sizes:
    num_samples: int
    prompt_tokens: tuple[int, int]  # fewest and most
    new_tokens: int


FULL = Sizes(32, (16, 48), 32)
QUICK = Sizes(8, (8, 16), 8)


@dataclass(frozen=True, slots=True)
class Effect:
    """Divergences per token and shares of token-layers sent elsewhere, by mode."""

    kl: dict[str, float]  # KL(rollout | trainer)
    moved: dict[str, float]  # between rollout and trainer
    kl_after: dict[str, float]  # KL(old | updated)
    moved_after: dict[str, float]

    def rows(self, case: str) -> list[Row]:
        return [
            Row(case, f"{mode}: {metric}", by_mode[mode], by_mode[DISABLED], DISABLED, "lower")
            for metric, by_mode in (
                ("KL(rollout | trainer)", self.kl),
                ("share sent elsewhere than in the rollout", self.moved),
                ("KL(old | updated)", self.kl_after),
                ("share sent elsewhere than in the old pass", self.moved_after),
            )
            for mode in by_mode
            if mode != DISABLED
        ]


def measured(folder: Path, shape: Shape, sizes: Sizes, device: torch.device) -> Effect:
    learner = load_learner(folder, device, torch.bfloat16, shape)
    params = SamplingParams(sizes.new_tokens, ignore_eos=True)
    groups = groups_of(sizes.num_samples, sizes.prompt_tokens, params, shape.vocabulary)
    update = WeightUpdate(1, learner.weights(), shared=False)
    options: dict[str, Any] = {"dtype": "bfloat16", "max_batch": sizes.num_samples, "keep_routes": True}
    with native_engine(folder, device=device.type, weights=update, **options) as engine:
        samples = to_learn_from(written(engine, groups))
    return Effect(*against_the_rollout(learner, samples), *against_the_old_pass(learner, samples))


def routes_of(samples: Sequence[Sample]) -> list[RoutedExperts]:
    """Return those that the rollout recorded."""
    there = [sample.routes for sample in samples if sample.routes is not None]
    assert len(there) == len(samples), "the rollout kept no routes"
    return decoded(there)


def against_the_rollout(learner: Learner, samples: Sequence[Sample]) -> tuple[dict[str, float], dict[str, float]]:
    recorded = routes_of(samples)
    rollout = torch.cat([torch.from_numpy(sample.log_probs) for sample in samples])
    live = learner.forward(samples)
    passes = {
        DISABLED: live,
        "R2": learner.forward(samples, live.routes),  # its record is the trainer's own, which knows no rollout
        "R3": learner.forward(samples, recorded),
    }
    return (
        {mode: divergence(rollout, made.log_probs) for mode, made in passes.items()},
        {mode: moved_share(recorded, made.routes) for mode, made in passes.items()},
    )


def against_the_old_pass(learner: Learner, samples: Sequence[Sample]) -> tuple[dict[str, float], dict[str, float]]:
    """Compare the second mini-batch of a step, after the update on the first, with the pass before it."""
    first, second = samples[: len(samples) // 2], samples[len(samples) // 2 :]
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
    """Return the divergence per token, estimated on the tokens that the rollout has drawn."""
    return float(k3(one.double().cpu(), other.double().cpu()).mean())
