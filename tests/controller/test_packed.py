from __future__ import annotations

import pytest

from practicum.controller import RayClassWithInitArgs, Worker
from practicum.errors import CallError


class Plain(Worker):
    def __init__(self, size: int = 1) -> None:
        self.size = size


def test_options_add_up_in_copies() -> None:
    first = RayClassWithInitArgs(Plain, 3).options(env={"A": "1"}, resources={"nvme": 1})
    second = first.options(env={"B": "2"}, max_pending_calls=9)
    assert (dict(first.env), dict(first.ray_options)) == ({"A": "1"}, {})
    assert (dict(second.env), dict(second.resources)) == ({"A": "1", "B": "2"}, {"nvme": 1})
    assert dict(second.ray_options) == {"max_pending_calls": 9}
    assert second.args == (3,)


@pytest.mark.parametrize("name", ["RANK", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "RAY_ADDRESS"])
def test_variables_that_tell_a_worker_its_place_are_protected(name: str) -> None:
    with pytest.raises(CallError, match=f"Plain: environment variable {name} is set by the group"):
        RayClassWithInitArgs(Plain).options(env={name: "1", "HARMLESS": "1"})


@pytest.mark.parametrize("name", ["num_gpus", "name", "max_restarts", "scheduling_strategy", "memory"])
def test_options_that_decide_the_place_are_protected(name: str) -> None:
    with pytest.raises(CallError, match=f"Plain: option {name} is set by the pool or the group"):
        RayClassWithInitArgs(Plain).options(**{name: 1})


def test_only_workers_can_be_packed() -> None:
    with pytest.raises(CallError, match="only classes derived from Worker"):
        RayClassWithInitArgs(dict)  # type: ignore[type-var]
