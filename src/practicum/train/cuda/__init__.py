"""What makes training faster on a CUDA device: what transformers does in many passes over data, done in one."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

_LEAST_CAPABILITY = 8  # of what flash attention runs on


def speed_up(model: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Use fast layers where they fit; return whether they do: passes must then be given `spans_of` positions."""
    if device.type != "cuda" or find_spec("triton") is None or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(device)[0] < _LEAST_CAPABILITY:
        return False
    from practicum.train.cuda.layers import can_be_fast, use_fast_layers

    if not can_be_fast(model.config, dtype):
        return False
    use_fast_layers(model)
    return True
