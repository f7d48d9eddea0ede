"""Faster training on a CUDA device: what transformers does in many passes over data is done in one."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from practicum.models import unfused_reason

_MIN_CAPABILITY = 8  # for flash attention


def speed_up(model: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Use fast layers where the model can, and return whether it does: its passes then need `spans_of` positions."""
    if device.type != "cuda" or find_spec("triton") is None or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(device)[0] < _MIN_CAPABILITY:
        return False
    if unfused_reason(model.config) or dtype not in (torch.bfloat16, torch.float16):
        return False
    from practicum.train.cuda.layers import use_fast_layers

    use_fast_layers(model)
    return True
