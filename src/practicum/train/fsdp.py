"""FSDP2: the group of ranks, sharding, and whole tensors back out of the shards."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from practicum.controller import Worker, WorkerContext
from practicum.errors import ModelError, ResourceError
from practicum.models import resolve_device
from practicum.weights.collective import open_store


class _HasMesh(Protocol):
    mesh: DeviceMesh


def join_ranks(context: WorkerContext, device: torch.device, timeout_s: float) -> DeviceMesh:
    """Meet the other ranks (NCCL on GPUs, gloo on CPUs). A collective that takes longer than the deadline fails."""
    if dist.is_initialized():
        raise ResourceError("another run is open in this process: end it first (close its generator), or use Ray.")
    if device.type == "cuda":
        torch.cuda.set_device(0)  # each worker sees only its own device
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=_store(context, timeout_s),
        rank=context.rank,
        world_size=context.world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    return init_device_mesh(device.type, (context.world_size,))


def _store(context: WorkerContext, timeout_s: float) -> Any:
    """Return where the ranks meet. A single one meets nobody, and needs no port that another run may have taken."""
    host, port = context.master_address, context.master_port
    if context.world_size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    if context.rank == 0:
        return open_store(host, timeout_s, port)
    timeout = datetime.timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The settings of all workers with a model; see the config for what each means."""

    model_path: str
    device: str
    compute_dtype: str
    threads: int
    collective_timeout_s: float


class ModelWorker(Worker):
    """A rank of a model: in the actor's group of ranks where it lives in its process, else in one of its own."""

    _packing: bool
    _has_joined = False

    def __init__(self, settings: ModelSettings) -> None:
        torch.set_num_threads(settings.threads)
        self._device = resolve_device(settings.device)
        self._timeout_s = settings.collective_timeout_s

    def supports_packing(self) -> bool:
        """Return whether the model can take several samples in one row; micro-batches are planned accordingly."""
        return self._packing

    def join(self) -> DeviceMesh:
        """Join the ranks, once."""
        actor = self.siblings.get("actor")
        if actor is not None:
            return cast(_HasMesh, actor).mesh
        mesh = join_ranks(self.context, self._device, self._timeout_s)
        self._has_joined = True
        return mesh

    def close(self) -> None:
        if self._has_joined:
            dist.destroy_process_group()


def shard(root: nn.Module, model: Any, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Shard `model` layer by layer, and `root`, the module around it whose forward is called."""
    layer_classes = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in layer_classes]
    if not layers:
        raise ModelError(f"{type(model).__name__} does not name its layers (_no_split_modules): it cannot be sharded.")
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    if mesh.size() == 1:  # there is nothing to gather, and what each layer's own group costs the host is most of a pass
        fully_shard(layers, mesh=mesh, mp_policy=policy)
    else:
        for layer in reversed(layers):  # some families name modules inside one another: the inner ones first
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(root, mesh=mesh, mp_policy=policy)


def reshard(root: nn.Module) -> None:
    """Reshard after passes without a backward pass: what the root has gathered would stay, and stand for its shards."""
    cast(FSDPModule, root).reshard()


def whole(tensor: Tensor) -> Tensor:
    """Return the unsharded tensor. On one rank that is the shard itself, not a copy; else it is gathered from all."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if tensor.device_mesh.size() == 1:
        return tensor.to_local().detach()
    full: Tensor = tensor.full_tensor()
    return full.detach()
