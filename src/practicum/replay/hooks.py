"""Hooks on the routers of transformers' mixture-of-experts models.

A router is a module with `top_k` and `num_experts` whose forward returns (logits, weights, indices [tokens, k]); it
stands in a layer whose number is part of its name. Each model has its own hooks and its own records.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from practicum.replay.codec import route_dtype


def find_routers(model: nn.Module) -> dict[int, nn.Module]:
    """By the index of their layer in the whole model; none in a dense model."""
    routers: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "top_k", None), int) and isinstance(getattr(module, "num_experts", None), int):
            layer = re.search(r"layers\.(\d+)\.", name)
            if layer is not None and hasattr(module, "weight"):
                routers[int(layer.group(1))] = module
    return dict(sorted(routers.items()))


class RouteRecorder:
    """Keeps the choice of every router in the last forward pass of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._routers = find_routers(model)
        self.layers: NDArray[np.int32] = np.array(list(self._routers), np.int32)
        first = next(iter(self._routers.values()), None)
        self.dtype = route_dtype(0 if first is None else int(first.num_experts))  # type: ignore[arg-type]
        self.top_k = 0 if first is None else int(first.top_k)  # type: ignore[arg-type]
        self._chosen: dict[int, Tensor] = {}
        self._hooks = [
            router.register_forward_hook(lambda _, __, out, layer=layer: self._keep(layer, out))
            for layer, router in self._routers.items()
        ]

    def take(self) -> NDArray[np.unsignedinteger[Any]]:
        """[tokens, layers, k] of the forward pass that has just ended."""
        missing = [layer for layer in self._routers if layer not in self._chosen]
        assert not missing, f"layers {missing} routed nothing"
        taken = torch.stack([self._chosen[layer] for layer in self._routers], dim=1)
        self._chosen.clear()
        return taken.cpu().numpy().astype(self.dtype)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, layer: int, output: tuple[Tensor, ...]) -> None:
        indices = output[2]
        self._chosen[layer] = indices.reshape(-1, indices.shape[-1])
