from __future__ import annotations

import pytest
import torch

from practicum.weights.channel import Deadline, as_bytes, describe, not_arrived, rebuilt
from tests.weights.sending import random_tensors


def test_a_tensor_is_rebuilt_from_its_bytes_and_its_description() -> None:
    for name, tensor in random_tensors(0):
        before = torch.zeros(16, dtype=torch.uint8)
        memory = torch.cat([before, as_bytes(tensor.contiguous())])
        ((found, again),) = rebuilt(memory, [[*describe(name, tensor), len(before)]])
        assert found == name and torch.equal(again, tensor)


def test_a_deadline_ends() -> None:
    assert Deadline(0.0).is_over
    assert 50 < Deadline(60.0).left_s <= 60


def test_errors_name_channel_and_version() -> None:
    with pytest.raises(ValueError, match="weights of version 3 by channel 'shm': gone"):
        raise not_arrived("shm", 3, "gone")
