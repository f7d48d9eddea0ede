"""What the cases of the `replay` benchmark share: a learner of one rank, samples, and how far two gradients differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.replay_models import Shape, enlarge
from practicum.algo import clipped_policy_loss
from practicum.data import pack
from practicum.models import load_model
from practicum.replay import Placed, RouteRecorder, RouteReplayer, decoded, find_routers
from practicum.replay.session import laid_out
from practicum.rollout.native import NativeRollout
from practicum.train import ActorSettings
from practicum.train.model import LogProbModel, keeps_samples_apart
from practicum.types import Prompt, RolloutRequest, RoutedExperts, Sample, SamplingParams, TrainingSample

CLIP = (0.2, 0.28)


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass over samples: log-probs of the learnt tokens, and the experts of every sample."""

    log_probs: Tensor  # [learnt]
    routes: list[RoutedExperts]


class Learner:
    """The trainer on one rank without its machinery: weights in float32, computed with in `dtype` as FSDP2 does."""

    def __init__(self, model: Any, dtype: torch.dtype, shares_rows: bool) -> None:
        self.shares_rows = shares_rows  # whether samples may
        self.model = model.to(dtype).train()
        self.device = model.device
        self._own = {name: parameter.detach().float() for name, parameter in self.model.named_parameters()}
        self._log_probs = LogProbModel(self.model)
        self._replayer = RouteReplayer(self.model)

    def weights(self) -> list[tuple[str, Tensor]]:
        return list(self._own.items())

    def forward(
        self,
        samples: Sequence[TrainingSample],
        routes: Sequence[RoutedExperts] | None = None,
        *,
        share_rows: bool | None = None,
        between: Callable[[], Any] = lambda: None,
        backward: Callable[[Tensor], None] | None = None,
    ) -> Pass:
        """With replay of `routes`, if they are given. `between` is called before the backward pass, if there is one."""
        packed = pack(samples, self.shares_rows if share_rows is None else share_rows)
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
        return Pass(log_probs.detach(), self._cut(chosen, placed))

    def take_gradients(self) -> dict[str, Tensor]:
        found = {name: p.grad.float() for name, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad()
        return found

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One update with the gradients there are."""
        for name, gradient in self.take_gradients().items():
            self._own[name].grad = gradient
        optimizer.step()
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self._own[name])

    def save_memory(self) -> None:
        """Layers are recomputed in backward passes from now on."""
        contexts = self._replayer.checkpoint_contexts
        self.model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})

    def gates(self) -> list[str]:
        """Names of the weights of all routers."""
        routers = {id(router.weight) for router in find_routers(self.model).values()}
        return [name for name, parameter in self.model.named_parameters() if id(parameter) in routers]

    def _cut(self, chosen: NDArray[Any], placed: Placed) -> list[RoutedExperts]:
        shape = self._replayer.shape
        ends = placed.starts + [item.sample.num_tokens for item in placed.samples]
        parts = [chosen[start:end] for start, end in zip(placed.starts.tolist(), ends.tolist(), strict=True)]
        return [RoutedExperts(one, shape.layers, np.ones(len(one), np.bool_), shape.num_experts) for one in parts]


def load_learner(
    folder: Path, device: torch.device, dtype: torch.dtype = torch.float32, shape: Shape | None = None
) -> Learner:
    """Of the model in `folder`, its weights enlarged to `shape` if one is given."""
    model = load_model(str(folder))
    shares_rows = keeps_samples_apart(model)
    model.to(device)
    if shape is not None:
        enlarge(model, shape)
    return Learner(model, dtype, shares_rows)


def policy_loss(samples: Sequence[TrainingSample], old: Tensor | None = None) -> Callable[[Tensor], None]:
    """A backward pass from the log-probs of their learnt tokens, as the trainer makes it."""
    advantages = np.concatenate([item.advantages[item.sample.loss_mask] for item in samples])

    def backward(log_probs: Tensor) -> None:
        before = log_probs.detach() if old is None else old
        given = torch.from_numpy(advantages).to(log_probs.device)
        losses, _ = clipped_policy_loss(log_probs, before, given, *CLIP)
        (losses.sum() / len(losses)).backward()

    return backward


# Samples


def write_samples(
    engine: NativeRollout, num: int, prompt_tokens: Sequence[int], new_tokens: int, vocabulary: int, seed: int = 0
) -> list[Sample]:
    """Answers of that engine to prompts of random tokens, between two lengths."""
    random = np.random.default_rng(seed)
    requests = [
        RolloutRequest(
            Prompt(str(index), text="a made-up prompt"),
            random.integers(2, vocabulary, random.integers(prompt_tokens[0], prompt_tokens[1] + 1)).astype(np.int32),
            SamplingParams(new_tokens, ignore_eos=True),
            seed=seed + index,
        )
        for index in range(num)
    ]
    return engine.generate(requests)


def made_samples(lengths: Sequence[tuple[int, int]], vocabulary: int, seed: int = 0) -> list[Sample]:
    """Of random tokens, so many in prompt and answer."""
    random = np.random.default_rng(seed)
    return [
        Sample(
            prompt=Prompt(str(index), text="a made-up prompt"),
            prompt_ids=random.integers(2, vocabulary, prompt).astype(np.int32),
            token_ids=random.integers(2, vocabulary, answer).astype(np.int32),
            log_probs=-random.random(answer).astype(np.float32),
            loss_mask=np.ones(answer, np.bool_),
            versions=np.zeros(answer, np.int32),
            text="",
            finish_reason="length",
        )
        for index, (prompt, answer) in enumerate(lengths)
    ]


def to_learn_from(samples: Sequence[Sample], step: int = 1) -> list[TrainingSample]:
    """With advantages of both signs."""
    signs = [1.0 if index % 2 else -1.0 for index in range(len(samples))]
    return [
        TrainingSample(sample, np.full(len(sample.token_ids), sign, np.float32), step=step, place=place)
        for place, (sample, sign) in enumerate(zip(samples, signs, strict=True))
    ]


def routes_of(samples: Sequence[Sample]) -> list[RoutedExperts]:
    """Those that the rollout recorded."""
    there = [sample.routes for sample in samples if sample.routes is not None]
    assert len(there) == len(samples), "the rollout kept no routes"
    return decoded(there)


# Comparisons


def moved_share(one: Sequence[RoutedExperts], other: Sequence[RoutedExperts]) -> float:
    """Of the token-layers known on both sides, how many were sent to different experts."""
    parts = [(a.experts != b.experts).any(-1)[a.known & b.known] for a, b in zip(one, other, strict=True)]
    return float(np.concatenate(parts).mean())


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Of the gradients of any weights, relative to the largest of those weights."""
    assert one.keys() == other.keys()
    found = [0.0]
    for name, gradient in one.items():
        size = float(gradient.abs().max())
        if size:
            found.append(float((gradient - other[name]).abs().max()) / size)
    return max(found)


def actor_settings(model: Path, **changes: Any) -> ActorSettings:
    fields: dict[str, Any] = {
        "model_path": str(model),
        "device": "cpu",
        "compute_dtype": "float32",
        "threads": 1,
        "seed": 0,
        "lr": 1e-6,
        "lr_schedule": "constant",
        "num_updates": 1_000_000,
        "num_warmup": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "temperature": 1.0,
        "gradient_checkpointing": False,
        "collective_timeout_s": 120.0,
    }
    return ActorSettings(**{**fields, **changes})
