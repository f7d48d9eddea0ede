"""What actor and critic have in common: a sharded model, its optimizer and its schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from practicum.errors import TrainingError
from practicum.models import DTYPES
from practicum.train.checkpoint import load_training_state, save_training_state
from practicum.train.fsdp import ModelSettings, shard, whole
from practicum.train.schedule import lr_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings(ModelSettings):
    """The settings of actor and critic; see the config for what each means."""

    seed: int
    lr: float
    lr_schedule: str
    num_updates: int
    num_warmup: int
    weight_decay: float
    max_grad_norm: float
    gradient_checkpointing: bool
    epochs: int = 1


@dataclass(frozen=True, slots=True)
class UpdateSize:
    """The size of an optimizer update, the same on all ranks."""

    grad_norm: float  # before clipping
    lr: float
    ratio: float  # norm of the change, without weight decay, over the norm of the weights before it


class Learner:
    """A sharded model with its optimizer. `root` is the module whose forward is called, `model` the model within."""

    def __init__(self, role: str, root: nn.Module, model: Any, mesh: DeviceMesh, settings: LearnerSettings) -> None:
        self._role = role
        self._root = root
        self._settings = settings
        shard(root, model, mesh, DTYPES[settings.compute_dtype])
        learnt = [parameter for parameter in root.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            learnt, lr=settings.lr, weight_decay=settings.weight_decay, fused=mesh.device_type == "cuda"
        )
        self._mesh = mesh
        self._weights: Tensor | None = None  # sums of squares by parameter, once they are known
        self.num_updates = 0

    def step(self, step: int) -> UpdateSize:
        """Learn from the gradient that has been gathered, in a step of the run."""
        settings = self._settings
        factor = lr_factor(settings.lr_schedule, self.num_updates, settings.num_updates, settings.num_warmup)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.lr * factor
        norm = whole(torch.nn.utils.clip_grad_norm_(self._root.parameters(), settings.max_grad_norm))
        if not norm.isfinite():  # the same on all ranks
            raise TrainingError(
                f"step {step}: the gradient of update {self.num_updates + 1} is {norm.item()}: nothing was changed. "
                f"Checkpoints, where there are any, are from before; try a lower {self._role}.lr, and look for rewards "
                f"or log-probs out of all measure, and in metrics.jsonl for steps with {self._role}/update_ratio above "
                "1, whose checkpoints are spoilt."
            )
        before = self._weights if self._weights is not None else self._sums_of_squares(_shard)
        self._optimizer.step()
        self.num_updates += 1
        change, after = self._sums_of_squares(self._change), self._sums_of_squares(_shard)
        self._optimizer.zero_grad()
        if not after.isfinite().all():  # squares of large weights are infinite in float32
            after = self._sums_of_squares(lambda own: _shard(own).double())
            if not after.isfinite().all():
                raise self._not_finite(step, after)
        self._weights = after
        ratio = (change.sum() / before.sum()).sqrt()
        return UpdateSize(norm.item(), settings.lr * factor, ratio.item())

    def _learnt(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, own) for name, own in self._root.named_parameters() if own.requires_grad]

    def _sums_of_squares(self, tensor_of: Callable[[nn.Parameter], Tensor | None]) -> Tensor:
        """Return the sum of squares for each learnt parameter over all ranks, in float64. `tensor_of` returns this
        rank's tensor, None for zeros."""
        tensors = [tensor_of(own) for _, own in self._learnt()]
        zero = torch.zeros((), device=self._mesh.device_type)
        norms = [zero if own is None else torch.linalg.vector_norm(own) for own in tensors]
        sums = torch.stack([norm.double() for norm in norms]).square()
        if self._mesh.size() > 1:
            dist.all_reduce(sums, group=self._mesh.get_group())
        return sums

    def _change(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the norm of what AdamW has just changed of a parameter, from its moments, without weight decay: no
        copy of the weights from before is needed."""
        if parameter.grad is None:
            return None
        group, state = self._optimizer.param_groups[0], self._optimizer.state[parameter]
        (first, second), num = group["betas"], float(state["step"])
        unbiased = math.sqrt(1 - second**num)
        change = _shard(state["exp_avg_sq"]).sqrt().add_(group["eps"] * unbiased)
        torch.div(_shard(state["exp_avg"]), change, out=change)
        norm: Tensor = torch.linalg.vector_norm(change).double()
        return norm.mul(group["lr"] * unbiased / (1 - first**num))

    def _not_finite(self, step: int, sums: Tensor) -> TrainingError:
        names = [name for name, _ in self._learnt()]
        broken = [name for name, sum_ in zip(names, sums.tolist(), strict=True) if not math.isfinite(sum_)]
        return TrainingError(
            f"step {step}: update {self.num_updates} has made weights of the {self._role} infinite or NaN, in "
            f"{len(broken)} of {len(names)} parameters, the first is {broken[0]}. They were neither published nor "
            f"saved. Lower {self._role}.lr={self._settings.lr:g}, and go on with resume=auto: checkpoints, where there "
            "are any, are from before."
        )

    def save(self, folder: Path, rank: int) -> None:
        save_training_state(self._root, self._optimizer, self.num_updates, folder, rank)

    def load(self, folder: Path, rank: int) -> None:
        self.num_updates = load_training_state(self._root, self._optimizer, folder, rank)
        self._weights = None
        for group in self._optimizer.param_groups:  # it came with the one of before, and may have been changed
            group["weight_decay"] = self._settings.weight_decay


def _shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
