"""What actor and critic have in common: a sharded model, its optimizer and its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

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
        self.num_updates = 0

    def step(self) -> tuple[float, float]:
        """Learn from the gradient that has been gathered. Return its norm and the learning rate, of all ranks."""
        settings = self._settings
        factor = lr_factor(settings.lr_schedule, self.num_updates, settings.num_updates, settings.num_warmup)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.lr * factor
        norm = whole(torch.nn.utils.clip_grad_norm_(self._root.parameters(), settings.max_grad_norm))
        if not norm.isfinite():  # the same on all ranks
            raise TrainingError(
                f"the gradient of update {self.num_updates + 1} is {norm.item()}: nothing was changed. Checkpoints, "
                f"where there are any, are from before; try a lower {self._role}.lr, and look for rewards or log-probs "
                "out of all measure."
            )
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.num_updates += 1
        return norm.item(), settings.lr * factor

    def save(self, folder: Path, rank: int) -> None:
        save_training_state(self._root, self._optimizer, self.num_updates, folder, rank)

    def load(self, folder: Path, rank: int) -> None:
        self.num_updates = load_training_state(self._root, self._optimizer, folder, rank)
        for group in self._optimizer.param_groups:  # it came with the one of before, and may have been changed
            group["weight_decay"] = self._settings.weight_decay
