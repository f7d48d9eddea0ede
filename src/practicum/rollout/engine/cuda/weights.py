"""The engine's own weights on a device: at addresses that stay, projections of one input adjacent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from practicum.rollout.engine.cuda.virtual_memory import VirtualMemory
from practicum.rollout.engine.sleep import PinnedBytes

_ALIGNMENT = 256
_ADJACENT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class DeviceWeights:
    """The parameters of a model. Asleep they are in pinned host memory, copied there once after each change.

    Buffers are small and stay on the device.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._spans: list[tuple[nn.Parameter, int]] = []
        size = 0
        for group in _groups(model):
            for parameter in group:
                self._spans.append((parameter, size))
                size += parameter.nbytes
            size = -(-size // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = size
        self._memory = VirtualMemory(size, device)
        self._is_placed = False  # the parameters are in it
        self._kept: PinnedBytes | None = None
        self._is_kept = False  # host memory holds the current values
        self.is_filled = False

    def map(self) -> None:
        """Take memory for the parameters. `fill`, or an update of all of them, then writes their values."""
        self._memory.map()
        if self._is_placed:
            return
        block = self._memory.tensor()
        for parameter, start in self._spans:
            own = block[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
            own.copy_(parameter.detach())
            parameter.data = own
        self._model.to(self._device)  # buffers; parameters are there
        self._is_placed = self.is_filled = True

    def fill(self) -> None:
        """Write the values of before the sleep; do nothing where they are there."""
        if not self.is_filled:
            assert self._kept is not None
            self._kept.fill(self._memory.tensor())
            self.is_filled = True

    def changed(self) -> None:
        """Note that the values on the device are new."""
        self._is_kept, self.is_filled = False, True

    def sleep(self) -> None:
        if not self._memory.is_mapped:
            return
        if self.is_filled and not self._is_kept:
            self._kept = self._kept or PinnedBytes(self.num_bytes)
            self._kept.write(0, self._memory.tensor()[: self.num_bytes])
            self._is_kept = True
        self.is_filled = False
        self._memory.unmap()

    def close(self) -> None:
        self._memory.close()


def _groups(model: Any) -> list[list[nn.Parameter]]:
    """Return each parameter once, those that become adjacent in one group."""
    left = {id(parameter): parameter for parameter in model.parameters()}
    groups: list[list[nn.Parameter]] = []
    for module in model.modules():
        for names in _ADJACENT:
            linears = [getattr(module, name, None) for name in names]
            if not all(isinstance(one, nn.Linear) for one in linears):
                continue
            for part in ("weight", "bias"):
                own: list[Any] = [getattr(one, part) for one in linears]
                if all(one is not None and id(one) in left for one in own):
                    groups.append([left.pop(id(one)) for one in own])
    return groups + [[parameter] for parameter in left.values()]


def as_one(tensors: list[Tensor]) -> Tensor | None:
    """Return weights [num, ...] that are adjacent in memory as one tensor; None if they are not adjacent."""
    at = tensors[0].data_ptr()
    for one in tensors:
        if one.data_ptr() != at or not one.is_contiguous():
            return None
        at += one.nbytes
    first = tensors[0].detach()
    return first.as_strided((sum(len(one) for one in tensors), *first.shape[1:]), first.stride())
