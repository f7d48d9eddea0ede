"""Sleeping on a CUDA device."""

from __future__ import annotations

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


def test_sleep_gives_the_memory_back_and_awake_the_output_is_the_same() -> None:
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
