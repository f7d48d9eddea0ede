"""Memory that is given back and taken again behind the same addresses, and weights in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from practicum.errors import ResourceError
from practicum.models import load_model
from practicum.rollout.engine.cuda.virtual_memory import VirtualMemory
from practicum.rollout.engine.cuda.weights import DeviceWeights
from tests.models import save_family
from tests.rollout.engine.cuda.device import DEVICE, HAS_CUDA, emulate_cuda

needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")


@pytest.mark.gpu
@needs_cuda
def test_addresses_stay_while_memory_is_given_back_and_taken_again() -> None:
    size = 64 << 20
    memory = VirtualMemory(size, DEVICE)
    memory.map()
    whole = memory.tensor()
    address = whole.data_ptr()
    whole.fill_(7)
    assert int(whole.sum(dtype=torch.int64)) == 7 * len(whole)
    awake = torch.cuda.mem_get_info()[0]
    memory.unmap()
    memory.unmap()
    assert torch.cuda.mem_get_info()[0] - awake >= size
    memory.map(size // 2)
    assert memory.num_mapped == size // 2
    whole[: size // 2].fill_(3)
    assert whole.data_ptr() == address
    assert int(whole[: size // 2].sum(dtype=torch.int64)) == 3 * (size // 2)
    memory.close()


@pytest.mark.gpu
@needs_cuda
def test_more_than_there_is_is_refused_and_can_be_tried_again() -> None:
    memory = VirtualMemory(1 << 42, DEVICE)
    for _ in range(2):
        with pytest.raises(ResourceError, match=r"are wanted, and .* are free"):
            memory.map()
        assert not memory.is_mapped
    memory.map(1 << 21)
    memory.close()


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_weights_are_the_same_after_sleep_and_adjacent(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate_cuda(monkeypatch)
    folder = str(save_family(family, tmp_path))
    model, expected = load_model(folder), dict(load_model(folder).named_parameters())
    weights = DeviceWeights(model, DEVICE)
    weights.map()
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    own = model.base_model.layers[0].self_attn
    assert own.q_proj.weight.data_ptr() + own.q_proj.weight.nbytes == own.k_proj.weight.data_ptr()
    for _ in range(2):
        weights.sleep()
        weights.map()
        weights.fill()
        for name, parameter in model.named_parameters():
            assert parameter.data_ptr() == addresses[name]
            assert torch.equal(parameter.cpu(), expected[name])
    weights.sleep()
    weights.map()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(expected[name] * 2)
    weights.changed()
    weights.sleep()
    weights.map()
    weights.fill()
    assert all(torch.equal(p.cpu(), expected[name] * 2) for name, p in model.named_parameters())
    weights.close()
