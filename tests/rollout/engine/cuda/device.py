"""The device of these tests: CUDA's; or the CPU, where Triton interprets kernels and the rest of CUDA is emulated.

For that Triton must be installed, with NumPy before 2.3, and TRITON_INTERPRET be 1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
HAS_KERNELS = find_spec("triton") is not None and (HAS_CUDA or os.environ.get("TRITON_INTERPRET") == "1")
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
EPS = 1e-6


def random(*shape: int) -> torch.Tensor:
    """Return another number in each place, the same ones in each run: seeded by the shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


class EmulatedMemory:
    """Memory of the host in place of `VirtualMemory`; what was mapped before is lost."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._block = torch.empty(num_bytes, dtype=torch.uint8)
        self.num_mapped = 0

    @property
    def is_mapped(self) -> bool:
        return self.num_mapped > 0

    def map(self, num_bytes: int | None = None) -> None:
        if not self.num_mapped:
            self.num_mapped = num_bytes or len(self._block)
            self._block.fill_(255)

    def unmap(self) -> None:
        self.num_mapped = 0

    close = unmap

    def tensor(self) -> torch.Tensor:
        return self._block


def emulate_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the engine's CUDA side compute on the CPU, where there is no CUDA device."""
    if HAS_CUDA:
        return
    import_module("torch._dynamo")  # it looks for functions as they are
    nothing: Callable[..., Any] = lambda *_: 0  # noqa: E731
    for name in ("synchronize", "set_device", "current_device", "empty_cache", "memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, nothing)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=nothing, synchronize=nothing))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    for name in ("zeros", "empty"):
        monkeypatch.setattr(torch, name, _unpinned(getattr(torch, name)))
    from practicum.rollout.engine.cuda import graphs, weights

    monkeypatch.setattr(weights, "VirtualMemory", EmulatedMemory)
    monkeypatch.setattr(graphs.DecodeGraphs, "_record", _recorded)
    if not HAS_KERNELS:
        return
    from practicum.rollout.engine.cuda import runner

    usual = runner.ModelRunner.__init__
    monkeypatch.setattr(runner, "VirtualMemory", EmulatedMemory)
    monkeypatch.setattr(runner, "_TRIAL_TOKENS", 12)  # the interpreter takes its time
    monkeypatch.setattr(
        runner.ModelRunner, "__init__", lambda self, path, **options: usual(self, path, **{**options, "device": DEVICE})
    )


def _unpinned(usual: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return usual(*args, **options)

    return made


def _recorded(self: Any, num_rows: int, num_splits: int, filters: bool) -> Any:
    return SimpleNamespace(replay=lambda: self._step(self._slots[:num_rows], num_splits, filters))
