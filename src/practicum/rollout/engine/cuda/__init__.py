"""The native engine's model runner for CUDA devices: kernels in Triton, steps as graphs, the host one step behind."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from practicum.models import unfused_reason

_MIN_CAPABILITY = 8


def unavailable_reason(config: Any) -> str:
    """Return why the runner cannot compute a model with this config on the CUDA device here; empty if it can."""
    if find_spec("triton") is None:
        return "Triton, which its kernels are written in, is not installed"
    if torch.version.hip is not None:
        return "its kernels are for NVIDIA's devices"
    if torch.cuda.get_device_capability()[0] < _MIN_CAPABILITY:
        return f"its kernels need a device of compute capability {_MIN_CAPABILITY}.0 or newer"
    return unsupported_reason(config)


def unsupported_reason(config: Any) -> str:
    """Return why no device can compute a model with this config by the runner's kernels; empty if one can."""
    has_bias = getattr(config.get_text_config(), "mlp_bias", False)
    return unfused_reason(config) or ("its MLPs have biases" if has_bias else "")
