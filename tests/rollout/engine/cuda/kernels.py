"""What the tests of kernels share: on a CUDA device; with TRITON_INTERPRET=1 on a CPU, where Triton is installed."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None or not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("no CUDA device, or no Triton", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6


def random(*shape: int) -> torch.Tensor:
    """Another number in each place, not another one in each run: seeded by the shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight
