"""Memory that goes and comes behind the same addresses."""

from __future__ import annotations

import pytest
import torch

from practicum.errors import ResourceError
from practicum.rollout.cuda.arena import Arena

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_addresses_stay_while_memory_goes_and_comes() -> None:
    device, size = torch.device("cuda"), 64 << 20
    arena = Arena(size, device)
    arena.map()
    whole = arena.tensor()
    address = whole.data_ptr()
    whole.fill_(7)
    assert int(whole.sum(dtype=torch.int64)) == 7 * len(whole)
    awake = torch.cuda.mem_get_info()[0]
    arena.unmap()
    arena.unmap()
    assert torch.cuda.mem_get_info()[0] - awake >= size
    arena.map(size // 2)
    assert arena.num_mapped == size // 2
    whole[: size // 2].fill_(3)
    assert whole.data_ptr() == address
    assert int(whole[: size // 2].sum(dtype=torch.int64)) == 3 * (size // 2)
    arena.close()


def test_more_than_there_is_is_refused_and_can_be_tried_again() -> None:
    arena = Arena(1 << 42, torch.device("cuda"))
    for _ in range(2):
        with pytest.raises(ResourceError, match=r"are wanted, and .* are free"):
            arena.map()
        assert not arena.is_mapped
    arena.map(1 << 21)
    arena.close()
