"""Whole weights of adapters that come alone, for engines that compute with whole weights.

    adapters (a few MB) ─▶ W + (alpha / rank) B A ─▶ the engine's weights
                           └ of the model's files, read when the first adapters come; layers that have some are kept

The base is kept on the host: a copy of it in a device's memory would cost what merging saves there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from practicum.adapters import Adapted, merged_weight, paired
from practicum.models import load_model
from practicum.weights import WeightUpdate


class AdapterMerger:
    def __init__(self, adapted: Adapted, device: torch.device, dtype: torch.dtype) -> None:
        self._adapted = adapted
        self._device = device
        self._dtype = dtype
        self._base: dict[str, nn.Module] = {}  # layers

    def merged(self, update: WeightUpdate) -> WeightUpdate:
        """The weights that the adapters change."""
        return replace(update, tensors=self._merged(update.tensors), shared=False, is_whole=False)

    def _merged(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        model = None
        for name, down, up in paired(tensors):
            if name not in self._base:
                model = model or load_model(self._adapted.base)
                self._base[name] = _shortened(model.get_submodule(name))
            down, up = down.to(self._device), up.to(self._device)
            weight = merged_weight(self._base[name], down, up, self._adapted.settings.scaling)
            yield f"{name}.weight", weight.to(self._dtype)  # rounded once


def _shortened(layer: nn.Module) -> nn.Module:
    """In half the memory, where its file had it so and nothing is lost."""
    layer = layer.requires_grad_(False)
    short = layer.weight.to(torch.bfloat16)  # type: ignore[operator]
    if torch.equal(short.float(), layer.weight):  # type: ignore[arg-type]
        layer.weight.data = short
    return layer
