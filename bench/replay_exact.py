"""`exact` and `effect` of the `replay` benchmark: is replay exact, and how much nearer are trainer and rollout with it?

exact    record ─ change all weights ─▶ replay: are these the experts recorded, and a plain pass's gradients?
         two ranks against one, through the trainer's own workers
effect   engine ─ samples, their log-probs and experts ─▶ trainer's pass: disabled, R2, R3    KL(rollout | trainer)
         trainer's pass ─ update on one half ─▶ pass over the other half: disabled, R2        KL(old | updated)
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench import work
from bench.harness import Options, Row
from bench.models import write_enlarged
from practicum.algo import clipped_policy_loss, k3
from practicum.controller import ray_cluster
from practicum.data import pack
from practicum.models import load_model
from practicum.replay import Placed, RouteRecorder, RouteReplayer, decoded, find_routers
from practicum.replay.session import laid_out
from practicum.train import ActorWorker, UpdateStats
from practicum.train.batch import model_inputs
from practicum.train.model import LogProbModel, supports_packing
from practicum.types import RoutedExperts, Sample, SamplingParams
from tests.models import MIXED, save_family
from tests.samples import with_routes
from tests.train.actors import mini_batches

CPU = torch.device("cpu")
FAMILIES = (*MIXED, "gpt_oss")
FSDP, DISABLED = "exact FSDP2", "disabled"
CLIP = (0.2, 0.28)
LENGTHS = [(5, 9), (3, 2), (7, 12), (2, 8), (4, 4), (6, 1)]  # tokens of prompts and answers
CHANGE = 0.3  # of the weights between record and replay, relative to their spread
_MANY = {"num_hidden_layers": 12, "hidden_size": 128, "moe_intermediate_size": 16, "num_experts": 64,
         "num_experts_per_tok": 8, "experts": 1.0}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"num_hidden_layers": 2, "hidden_size": 128, "moe_intermediate_size": 64, "gates": 0.3, "experts": 3.0,
             "attention": 2.0},
    "64 experts, flat": {**_MANY, "gates": 0.1},
    "64 experts, spread": {**_MANY, "gates": 3.0},
}  # fmt: skip
FULL: dict[str, Any] = {"num_samples": 32, "prompt_tokens": (16, 48), "new_tokens": 32}
QUICK: dict[str, Any] = {"num_samples": 8, "prompt_tokens": (8, 16), "new_tokens": 8}


def rows(options: Options) -> list[Row]:
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-replay-") as name:
        folder = Path(name)
        for family in FAMILIES:
            if options.wants(case := f"exact {family}"):
                found += exact_rows(case, Learner(save_family(family, folder / family)))
        if options.wants(FSDP):
            found += ranks_rows(folder)
        for model, shape in MODELS.items():
            if options.wants(case := f"effect {model}"):
                path = write_enlarged(folder / model.replace(" ", "-"), **shape)
                found += effect_rows(case, path, **(QUICK if options.quick else FULL))
    return found


# A learner of one rank

Pass = tuple[Tensor, list[RoutedExperts]]  # log-probs of the learnt tokens, and the experts of every sample


class Learner:
    """The trainer on one rank without its machinery: weights in float32, computed with in `dtype` as FSDP2 does."""

    def __init__(self, folder: Path, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> None:
        model = load_model(str(folder))
        self.packing = supports_packing(model)  # whether samples may share rows
        self.model = model.to(device, dtype).train()
        self.weights = {name: parameter.detach().float() for name, parameter in self.model.named_parameters()}
        self.replayer = RouteReplayer(self.model)
        self._recorder = RouteRecorder(self.model)
        self._log_probs = LogProbModel(self.model)

    def forward(
        self, samples: Sequence[Sample], routes: Sequence[RoutedExperts] | None = None, *, packing: bool | None = None,
        learns: bool = False,
    ) -> Pass:  # fmt: skip
        """Make a forward pass, in which `routes` are replayed if they are given."""
        packed, shape = pack(samples, self.packing if packing is None else packing), self.replayer.shape
        placed = Placed(samples, packed.starts, packed.input_ids.size, "a pass of the benchmark")
        replayed: Any = nullcontext()
        if routes is not None:
            laid = (torch.from_numpy(array).to(self.model.device) for array in laid_out(routes, placed, shape))
            replayed = self.replayer.replaying(*laid)
        with replayed, torch.set_grad_enabled(learns):
            log_probs, _ = self._log_probs(*model_inputs(packed, self.model.device), 1.0)
        chosen = self._recorder.take()
        made = []
        for start, sample in zip(placed.starts.tolist(), samples, strict=True):
            own = chosen[start : start + sample.num_tokens]
            made.append(RoutedExperts(own, shape.layers, np.ones(len(own), np.bool_), shape.num_experts))
        return log_probs, made

    def backward(self, samples: Sequence[Sample], log_probs: Tensor) -> dict[str, Tensor]:
        """Return the gradients by name, from the log-probs of a pass that learns."""
        advantages = np.concatenate([sample.advantages[sample.loss_mask] for sample in samples])  # type: ignore[index]
        given = torch.from_numpy(advantages).to(log_probs.device)
        losses, _ = clipped_policy_loss(log_probs, log_probs.detach(), given, *CLIP)
        (losses.sum() / len(losses)).backward()
        found = {name: p.grad.float() for name, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad()
        return found

    @torch.no_grad()
    def update(self, gradients: Mapping[str, Tensor], **settings: float) -> None:
        """Make the first update of AdamW."""
        for name, gradient in gradients.items():
            self.weights[name].grad = gradient
        torch.optim.AdamW(self.weights.values(), **settings).step()
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self.weights[name])


def moved_share(one: Sequence[RoutedExperts], other: Sequence[RoutedExperts]) -> float:
    """Return the share sent to different experts, of the token-layers known on both sides."""
    parts = [(a.experts != b.experts).any(-1)[a.known & b.known] for a, b in zip(one, other, strict=True)]
    return float(np.concatenate(parts).mean())


def largest(tensors: Mapping[str, Tensor], other: Mapping[str, Tensor] | None = None) -> dict[str, float]:
    """Return the largest number in each tensor, or the largest difference to another, without its sign."""
    assert other is None or tensors.keys() == other.keys()
    return {name: float((one if other is None else one - other[name]).abs().max()) for name, one in tensors.items()}


# Exact


def exact_rows(case: str, learner: Learner) -> list[Row]:
    """Record, change the weights, and replay in plain passes, packed ones and ones that recompute layers."""
    samples = work.made_samples(LENGTHS)
    _, recorded = learner.forward(samples, packing=False)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter += CHANGE * parameter.std() * torch.randn_like(parameter)
    _, live = learner.forward(samples, packing=False)

    def learnt(packing: bool = False, between: Callable[[], Any] = lambda: None) -> tuple[Any, list[RoutedExperts]]:
        """Return the gradients of a pass that replays, and the experts in it."""
        log_probs, replayed = learner.forward(samples, recorded, packing=packing, learns=True)
        between()
        return learner.backward(samples, log_probs), replayed

    plain, replayed = learnt()
    sizes = largest(plain)

    def apart(gradients: Mapping[str, Tensor]) -> float:
        """Return the largest difference of a gradient, relative to the largest of those weights."""
        return max(found / sizes[name] for name, found in largest(plain, gradients).items() if sizes[name])

    same, same_live = (1 - moved_share(recorded, own) for own in (replayed, live))
    routers = {id(router.weight) for router in find_routers(learner.model).values()}
    gates = [name for name, parameter in learner.model.named_parameters() if id(parameter) in routers]
    reached = sum(sizes.get(name, 0.0) > 0 for name in gates)
    packed = learnt(packing=True)[0] if learner.packing else None  # not every family can
    contexts = learner.replayer.checkpoint_contexts
    learner.model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    other = [RoutedExperts(one.experts[::-1].copy(), one.layers, one.known, one.num_experts) for one in recorded]
    # Between the two halves of the pass another is made with other experts: recomputed layers still get their own.
    saving, _ = learnt(between=lambda: learner.forward(samples, other, packing=False))
    found = [
        Row(case, "share of token-layers as recorded", same, same_live, "live router"),
        Row(case, "share of gates with a gradient", reached / len(gates)),
        Row(case, "gradient difference, checkpointed", apart(saving), better="lower"),
    ]
    return found + ([] if packed is None else [Row(case, "gradient difference, packed", apart(packed), better="lower")])


def ranks_rows(folder: Path) -> list[Row]:
    """Compare a step of two updates by two ranks with the same by one, through the trainer's own workers."""
    model = save_family("qwen3_moe", folder / "ranks")
    found: list[Row] = []

    def weights(folder: Path) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in load_model(str(folder)).named_parameters()}

    with ray_cluster():
        for mode in ("R2", "R3"):
            norms, after = [], []
            for num_ranks in (1, 2):
                samples = work.made_samples(LENGTHS * 2)
                if mode == "R3":
                    samples = [with_routes(sample, num_layers=3, k=2, num_experts=8) for sample in samples]
                own = folder / f"{mode}-{num_ranks}"
                own.mkdir()
                replay = work.replay_settings(mode, own)
                with work.open_actors(model, num_ranks, lr=1e-3, replay=replay) as actors:
                    batches = mini_batches(samples, num_ranks, budget=40, parts=2)
                    norms.append(UpdateStats.combined(actors.map(ActorWorker.update, batches)).grad_norm)
                    actors.execute_all(ActorWorker.save, str(own / "saved"))
                after.append(weights(own / "saved" / "model"))
            apart, change = (max(largest(after[0], other).values()) for other in (after[1], weights(model)))
            found += [
                Row(FSDP, f"{mode}: gradient norm, relative difference", abs(norms[1] / norms[0] - 1), better="lower"),
                Row(FSDP, f"{mode}: largest difference of a weight", apart, change, "the update", better="lower"),
            ]
    return found


# Effect


def effect_rows(
    case: str, folder: Path, *, num_samples: int, prompt_tokens: tuple[int, int], new_tokens: int,
    device: torch.device = CPU,
) -> list[Row]:  # fmt: skip
    """Return divergences per token and shares of token-layers sent elsewhere, in each mode against disabled."""
    learner = Learner(folder, device, torch.bfloat16)
    params = SamplingParams(new_tokens, ignore_eos=True)
    groups = work.groups_of(num_samples, prompt_tokens, params, learner.model.config.vocab_size)
    options: dict[str, Any] = {"dtype": "bfloat16", "max_batch": num_samples, "keep_routes": True}
    with work.native_engine(folder, device=device.type, **options) as engine:
        samples = work.to_learn_from(work.written(engine, groups))

    rollout = torch.cat([torch.from_numpy(sample.log_probs) for sample in samples]), routes_of(samples)
    live = learner.forward(samples)
    # The record of R2 is the trainer's own, which knows no rollout.
    passes = {DISABLED: live, "R2": learner.forward(samples, live[1]), "R3": learner.forward(samples, rollout[1])}
    found = compared_rows(case, "KL(rollout | trainer)", "share sent elsewhere than in the rollout", rollout, passes)

    # The second mini-batch of a step, after the update on the first, against the pass before it.
    first, second = samples[: len(samples) // 2], samples[len(samples) // 2 :]
    old = learner.forward(second)
    log_probs, _ = learner.forward(first, learns=True)
    learner.update(learner.backward(first, log_probs), lr=1e-5)
    passes = {DISABLED: learner.forward(second), "R2": learner.forward(second, old[1])}
    return found + compared_rows(case, "KL(old | updated)", "share sent elsewhere than in the old pass", old, passes)


def routes_of(samples: Sequence[Sample]) -> list[RoutedExperts]:
    """Return those that the rollout recorded."""
    there = [sample.routes for sample in samples if sample.routes is not None]
    assert len(there) == len(samples), "the rollout kept no routes"
    return decoded(there)


def compared_rows(case: str, kl: str, moved: str, before: Pass, passes: Mapping[str, Pass]) -> list[Row]:
    """Compare passes with one before; divergences are estimated on the tokens that the rollout has drawn."""
    kls = {mode: float(k3(before[0].double().cpu(), own[0].double().cpu()).mean()) for mode, own in passes.items()}
    moves = {mode: moved_share(before[1], own[1]) for mode, own in passes.items()}
    return [
        Row(case, f"{mode}: {metric}", values[mode], values[DISABLED], DISABLED, "lower")
        for metric, values in ((kl, kls), (moved, moves))
        for mode in passes
        if mode != DISABLED
    ]
