"""Worker classes, packed; their place in a group and its meshes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.controller import Coordinates, Mesh, RayClassWithInitArgs, Worker, WorkerContext
from practicum.errors import CallError


def test_a_worker_knows_its_place_in_a_mesh_by_name() -> None:
    context = WorkerContext("group", rank=3, world_size=4, meshes={"model": Mesh(data=2, tensor=2)})
    worker = RayClassWithInitArgs(Worker).build(context)
    assert worker.coordinates("model").data == 1
    with pytest.raises(CallError, match="group 'group' has no mesh 'modle'; its meshes: model"):
        worker.coordinates("modle")


def test_the_environment_is_what_torch_looks_for() -> None:
    context = WorkerContext("group", rank=3, world_size=4, local_rank=1, master_address="10.0.0.1", master_port=99)
    environment = context.environment()
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["LOCAL_RANK"]) == ("3", "4", "1")
    assert context.environment(sees_one_device=True)["LOCAL_RANK"] == "0"  # the only one it can use
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "99")


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


sizes = st.integers(1, 5)


@given(sizes, sizes, sizes)
def test_each_rank_has_a_place_of_its_own_and_each_shard_one_answer(data: int, tensor: int, pipeline: int) -> None:
    mesh = Mesh(data=data, tensor=tensor, pipeline=pipeline)
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert len(set(places)) == mesh.size
    answers = [places[rank] for rank in mesh.answering_ranks()]
    assert answers == [Coordinates(data=shard, tensor=0, pipeline=pipeline - 1) for shard in range(data)]


def test_ranks_count_like_a_torch_mesh() -> None:
    import torch

    layout = torch.arange(2 * 3 * 4).reshape(2, 3, 4)  # pipeline, data, tensor
    mesh = Mesh(pipeline=2, data=3, tensor=4)
    for rank in range(mesh.size):
        place = mesh.coordinates(rank)
        assert layout[place.pipeline, place.data, place.tensor] == rank


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Mesh(data=0)
