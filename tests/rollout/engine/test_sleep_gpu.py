"""Sleeping on a CUDA device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from practicum.errors import ResourceError
from practicum.rollout.engine.sleep import SleepingWeights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = torch.device("cuda", 0)


def make_model(num_layers: int, width: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, dtype=dtype) for _ in range(num_layers)))
    model.register_buffer("scale", torch.full((3,), 2.0))  # of another dtype, and not a multiple of anything
    return model.requires_grad_(False)


def fastest_s(function: Callable[[], Any], times: int = 3) -> float:
    taken = []
    for _ in range(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken)


def test_asleep_the_memory_is_the_devices_again_and_awake_the_output_is_the_same() -> None:
    model = make_model(16, 4096)  # 537 MB: two pinned blocks and more
    weights = SleepingWeights(model, DEVICE, lambda: pytest.fail("files are not needed"))
    assert not weights.is_awake
    weights.wake()
    x = torch.randn(4, 4096, dtype=torch.bfloat16, device=DEVICE)
    before = model(x)
    for _ in range(2):
        free, reserved = torch.cuda.mem_get_info(DEVICE)[0], torch.cuda.memory_reserved(DEVICE)
        weights.sleep()
        assert torch.cuda.mem_get_info(DEVICE)[0] - free >= 0.95 * weights.num_bytes
        assert reserved - torch.cuda.memory_reserved(DEVICE) >= 0.95 * weights.num_bytes
        weights.wake()
        assert torch.equal(model(x), before)
        assert model.scale.tolist() == [2.0] * 3


def test_waking_takes_little_longer_than_one_copy_of_all_bytes() -> None:
    weights = SleepingWeights(make_model(64, 4096), DEVICE, lambda: pytest.fail("files are not needed"))  # 2.1 GB
    weights.wake()

    def sleep_and_wake() -> float:
        weights.sleep()
        return fastest_s(weights.wake, times=1)

    woken_s = min(sleep_and_wake() for _ in range(5))
    weights.sleep()
    host = torch.empty(weights.num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=DEVICE)
    copied_s = fastest_s(lambda: there.copy_(host, non_blocking=True))
    print(f"wake {woken_s:.4f} s, one copy {copied_s:.4f} s, {weights.num_bytes / copied_s / 1e9:.1f} GB/s")
    assert woken_s < 1.2 * copied_s + 0.005  # the allocation itself takes some milliseconds


def test_a_device_that_is_full_leaves_it_asleep() -> None:
    model = make_model(16, 4096)
    weights = SleepingWeights(model, DEVICE, lambda: pytest.fail("files are not needed"))
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(DEVICE)[0]
    occupied = torch.empty(free - weights.num_bytes // 2, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ResourceError, match=r"cannot wake up: its weights take .* GB of cuda:0, where .* are free"):
        weights.wake()
    assert not weights.is_awake
    del occupied
    torch.cuda.empty_cache()
    weights.wake()
    assert weights.is_awake


def test_weights_that_were_changed_come_back_changed() -> None:
    model = make_model(4, 1024)
    weights = SleepingWeights(model, DEVICE, lambda: pytest.fail("files are not needed"))
    x = torch.randn(4, 1024, dtype=torch.bfloat16, device=DEVICE)
    for factor in (1.5, 0.5):
        weights.wake()
        for parameter in model.parameters():
            parameter.data.mul_(factor)
        weights.changed()
        before = model(x)
        for _ in range(2):
            weights.sleep()
            weights.wake()
            assert torch.equal(model(x), before)
