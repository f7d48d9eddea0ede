"""verl in the `controller` benchmark: its RayWorkerGroup with DataProto, and with the TensorDict its trainer sends.

Runs in the environment that verl.sh makes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from bench.contestant import Line
from bench.controller_work import ITEMS, ROWS, Job, items, rows, start_ray, take_steps

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


class VerlTeam:
    def __init__(self, num_workers: int) -> None:
        self._pool = RayResourcePool([num_workers], use_gpu=False, max_colocate_count=1)
        packed = RayClassWithInitArgs(ray.remote(Echo))
        self._group = RayWorkerGroup(self._pool, packed, device_name="cpu")

    def noop(self) -> Any:
        return self._group.noop()

    def batches(self) -> Iterator[tuple[str, str, Callable[[], Any]]]:
        few = DataProto.from_dict({"x": torch.tensor(items())})
        many = DataProto.from_dict({"x": torch.from_numpy(rows())})
        yield ITEMS, "", lambda: self._group.echo_proto(few).batch["x"]
        yield ROWS, "", lambda: self._group.echo_proto(many).batch["x"]
        yield ROWS, "TensorDict", lambda: self._group.echo_dict(many.batch)["x"]
        self._serialize_by("numpy")
        yield ROWS, "NumPy", lambda: self._group.echo_proto(many).batch["x"]
        self._serialize_by("default")

    def pids(self) -> Sequence[int]:
        return list(self._group.pid())

    def stop(self) -> None:
        for worker in self._group.workers:
            ray.kill(worker)
        for group in self._pool.get_placement_groups():
            ray.util.remove_placement_group(group)

    def _serialize_by(self, method: str) -> None:
        """DataProto looks at this variable whenever it is pickled or unpickled, in the driver and in the workers."""
        os.environ[SERIALIZATION] = method
        self._group.serialize_by(method)


if __name__ == "__main__":
    line = Line()
    start_ray()
    packages = ["verl", "tensordict", "torch", "ray"]
    take_steps(line, Job(**json.loads(sys.argv[1])), packages, {"verl": VerlTeam})
