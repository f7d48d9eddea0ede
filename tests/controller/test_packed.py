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
    with pytest.raises(CallError, match=f"variable {name} is set by the group"):
        RayClassWithInitArgs(Plain).options(runtime_env={"env_vars": {name: "1"}})


@pytest.mark.parametrize("name", ["num_gpus", "name", "max_restarts", "scheduling_strategy", "memory"])
def test_options_that_decide_the_place_are_protected(name: str) -> None:
    with pytest.raises(CallError, match=f"Plain: option {name} is set by the pool or the group"):
        RayClassWithInitArgs(Plain).options(**{name: 1})


def test_what_could_never_start_is_refused_when_it_is_packed() -> None:
    with pytest.raises(CallError, match="wrong arguments for Plain: got an unexpected keyword argument 'sise'"):
        RayClassWithInitArgs(Plain, sise=3)  # type: ignore[call-arg]
    packed = RayClassWithInitArgs(Plain)
    for wrong, match in [
        ({"env": {"A": 3}}, "environment variable A must be text, not 3"),
        ({"resources": {"CPU": 0.5}}, "CPU and GPU are shared out by the pool"),
        ({"bogus": 1}, "Plain: Invalid option keyword.*bogus"),
    ]:
        with pytest.raises(CallError, match=match):
            packed.options(**wrong)  # type: ignore[arg-type]


def test_only_workers_can_be_packed() -> None:
    with pytest.raises(CallError, match="only classes derived from Worker"):
        RayClassWithInitArgs(dict)  # type: ignore[type-var]
