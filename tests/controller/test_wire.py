from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from practicum.controller.wire import Slot, num_bytes, pack, pack_arguments, unpack, unpack_arguments
from practicum.errors import CallError


@dataclass
class Thing:
    array: NDArray[Any]
    text: str


def test_arrays_travel_beside_the_pickle_uncopied() -> None:
    array = np.arange(1000.0)
    payload = pack([Thing(array, "a"), Thing(array[::2], "b"), Thing(np.asfortranarray(array.reshape(10, 100)), "c")])
    assert isinstance(payload, list) and np.shares_memory(payload[1], array)
    assert num_bytes(payload) > 16_000
    back = unpack(payload)
    np.testing.assert_array_equal(back[0].array, array)
    np.testing.assert_array_equal(back[1].array, array[::2])
    np.testing.assert_array_equal(back[2].array, array.reshape(10, 100))


@pytest.mark.parametrize("value", [None, 0, "text", (), {"a": [1]}, np.float32(1.5)])
def test_small_things_come_back_as_they_were(value: Any) -> None:
    assert unpack(pack(value)) == value
    assert unpack(pack(np.zeros(0))).shape == (0,)


def test_the_argument_that_cannot_travel_is_named() -> None:
    arguments = {"good": 1, "bad": threading.Lock()}
    with pytest.raises(CallError, match=r"argument 'bad' of Some.method cannot be sent .*TypeError: cannot pickle"):
        pack_arguments(list(arguments.values()), "Some.method", lambda: arguments)


def test_slots_are_filled_with_the_replies_they_stand_for() -> None:
    shared = pack(([1, Slot(0, 2, sum)], {"x": Slot(2, 3, list), "y": "same"}))
    assert unpack_arguments(shared, b"", 10, 20, 30) == ([1, 30], {"x": [30], "y": "same"})
    assert unpack_arguments(shared, pack(Slot(2, 3, max)), 10, 20, 30)[0] == [30, 1, 30]
