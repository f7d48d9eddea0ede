"""verl in the `controller` benchmark: its RayWorkerGroup with DataProto, and with the TensorDict its trainer sends."""

from __future__ import annotations

import json
import os
import sys

import ray
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from bench.controller_work import ITEMS, ROWS, Batches, Team, items, rows, take_steps

SERIALIZATION = "VERL_DATAPROTO_SERIALIZATION_METHOD"


class Echo(Worker):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self._register_dispatch_collect_info("train", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def noop(self) -> None:
        pass

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def serialize_by(self, method: str) -> None:
        os.environ[SERIALIZATION] = method

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo_proto(self, shard: DataProto) -> DataProto:
        return shard

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def echo_dict(self, shard: TensorDict) -> TensorDict:
        return shard


def verl_team(num_workers: int) -> Team:
    pool = RayResourcePool([num_workers], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Echo)), device_name="cpu")

    def serialize_by(method: str) -> None:
        """DataProto looks at this variable whenever it is pickled or unpickled, in the driver and in the workers."""
        os.environ[SERIALIZATION] = method
        group.serialize_by(method)

    def batches() -> Batches:
        few = DataProto.from_dict({"x": torch.tensor(items())})
        many = DataProto.from_dict({"x": torch.from_numpy(rows())})
        yield ITEMS, "", lambda: group.echo_proto(few).batch["x"]
        yield ROWS, "", lambda: group.echo_proto(many).batch["x"]
        yield ROWS, "TensorDict", lambda: group.echo_dict(many.batch)["x"]
        serialize_by("numpy")
        yield ROWS, "NumPy", lambda: group.echo_proto(many).batch["x"]
        serialize_by("default")

    def stop() -> None:
        for worker in group.workers:
            ray.kill(worker)
        for placement_group in pool.get_placement_groups():
            ray.util.remove_placement_group(placement_group)

    return Team(group.noop, batches, group.pid, stop)


if __name__ == "__main__":
    take_steps(["verl", "tensordict", "torch", "ray"], {"verl": verl_team}, **json.loads(sys.argv[1]))
