from __future__ import annotations

import pytest

from practicum.controller import Mesh, RayClassWithInitArgs, Worker, WorkerContext
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
