"""Whole weights of adapters that come alone, for engines that compute with whole weights.

    adapters (a few MB) ─▶ W + (alpha / rank) B A ─▶ the engine's weights
                           └ of the model's files, of which the layers that have adapters are kept

They are kept on the host: a copy of them in a device's memory would cost what merging saves there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from practicum.adapters import LoneAdapters, find_targets, merged_weight, paired
from practicum.models import load_model
from practicum.weights import WeightUpdate


class AdapterMerger:
    """Reads the model once, when it is made."""

    def __init__(
        self,
        adapters: LoneAdapters,
        device: torch.device,
        dtype: torch.dtype,
        load: Callable[[str], Any] = load_model,
    ) -> None:
        self._scaling = adapters.settings.scaling
        self._device = device
        self._dtype = dtype
        self._base = find_targets(load(adapters.base), adapters.settings)
        for layer in self._base.values():
            _shorten(layer)

    @property
    def num_bytes(self) -> int:
        """The size of the weights that are kept."""
        return sum(parameter.nbytes for layer in self._base.values() for parameter in layer.parameters())

    def merged(self, update: WeightUpdate) -> WeightUpdate:
        """Return an update with the weights that the adapters change."""
        return replace(update, tensors=self._merged(update.tensors), shared=False)

    def _merged(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, down, up in paired(tensors):
            down, up = down.to(self._device), up.to(self._device)
            yield f"{name}.weight", merged_weight(self._base[name], down, up, self._scaling).to(self._dtype)


def _shorten(layer: nn.Module) -> None:
    """Keep the weight in half the memory, where its file has it so and nothing is lost."""
    weight = layer.get_parameter("weight").requires_grad_(False)
    short = weight.to(torch.bfloat16)
    if torch.equal(short.float(), weight):
        weight.data = short
