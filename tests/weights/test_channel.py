from __future__ import annotations

import pytest
import torch

from practicum.weights.channel import Deadline, as_bytes, describe, from_bytes, lost
from tests.weights.sending import random_tensors


def test_a_tensor_is_rebuilt_from_its_bytes_and_its_description() -> None:
    for name, tensor in random_tensors(0):
        found, dtype, shape = describe(name, tensor)
        assert found == name
        assert torch.equal(from_bytes(as_bytes(tensor.contiguous()), dtype, shape), tensor)


def test_a_deadline_ends() -> None:
    assert Deadline(0.0).is_over
    assert 50 < Deadline(60.0).left_s <= 60


def test_errors_name_channel_and_version() -> None:
    with pytest.raises(ValueError, match="weights of version 3 by channel 'shm': gone"):
        raise lost("shm", 3, "gone")
