"""Worker classes: what they know of their place, how they are packed to start elsewhere, several in one process.

RayClassWithInitArgs(cls, args) ── to the process ──▶ build(context) ──▶ Worker: rank, meshes, siblings known
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, ParamSpec, Self, TypeVar, cast

import ray

from practicum.controller.loop import run_or_begin
from practicum.errors import CallError, DeadlineError

W = TypeVar("W", bound="Worker")
P = ParamSpec("P")
R = TypeVar("R")

_MOST_CLOSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's place in a mesh."""

    data: int
    tensor: int
    pipeline: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """`data` shards of the batch x `tensor` slices of each layer x `pipeline` stages of the model.

    Ranks count through `tensor` first, then `data`, then `pipeline`, like a torch `DeviceMesh` of shape
    (pipeline, data, tensor). All ranks with the same data coordinate work on the same shard; the one with the first
    slice of the last stage answers for it.
    """

    data: int
    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        if min(self.data, self.tensor, self.pipeline) < 1:
            raise ValueError(f"all sizes of a mesh must be positive: {self}")

    @property
    def size(self) -> int:
        return self.data * self.tensor * self.pipeline

    def coordinates(self, rank: int) -> Coordinates:
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(data, tensor, pipeline)

    def answering_ranks(self) -> list[int]:
        """Return the rank that answers for each shard, in the order of the shards."""
        last_stage = (self.pipeline - 1) * self.data * self.tensor
        return [last_stage + shard * self.tensor for shard in range(self.data)]


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """A worker's place in its group, and where the group meets for collectives."""

    group: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = 0
    meshes: Mapping[str, Mesh] = field(default_factory=dict)

    def environment(self, sees_one_device: bool = False) -> dict[str, str]:
        """Return the variables for libraries that read their place from the environment, as torch does with `env://`.

        They take LOCAL_RANK for the number of their GPU: it is 0 where Ray shows a process only one.
        """
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": "0" if sees_one_device else str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "NODE_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }


class Worker:
    """Base of every worker class. Its place is known before `__init__` runs."""

    context: WorkerContext
    siblings: Mapping[str, Worker]
    """The other roles in this process by name, when the worker is fused with others; see `FusedWorker`."""
    device_thread: ClassVar[Executor | None] = None
    """The one thread of this process that runs plain methods, where methods that are coroutines have its event loop."""

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def world_size(self) -> int:
        return self.context.world_size

    def coordinates(self, mesh: str) -> Coordinates:
        """Return where this rank stands in the mesh of that name."""
        return find_mesh(self.context.meshes, mesh, self.context.group).coordinates(self.rank)

    async def on_device(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function from a coroutine as plain methods are called: on the device thread, in turn with them.

        In-process workers have no such thread: there it is called at once.
        """
        if self.device_thread is None:
            return function(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.device_thread, lambda: function(*args, **kwargs))

    def close(self) -> Coroutine[Any, Any, None] | None:
        """Give back what outlives the object. It may be a coroutine. Only groups in this process call it: a Ray worker
        ends with its process."""
        return None


def find_mesh(meshes: Mapping[str, Mesh], name: str, group: str) -> Mesh:
    if name not in meshes:
        raise CallError(f"group {group!r} has no mesh {name!r}; its meshes: {', '.join(meshes) or 'none'}")
    return meshes[name]


# Ray's options that decide where, under which name and how often a worker starts: the pool and the group set them.
_GROUP_SETS = frozenset({
    "name", "namespace", "lifetime", "get_if_exists", "num_cpus", "num_gpus", "accelerator_type",
    "scheduling_strategy", "placement_group", "placement_group_bundle_index",
    "max_restarts", "max_task_retries", "max_concurrency", "concurrency_groups", "memory", "object_store_memory",
})  # fmt: skip
# Variables that tell a worker its place: the group and Ray set them.
_PLACE_SETS = frozenset(WorkerContext("").environment()) | {"CUDA_VISIBLE_DEVICES"}


class RayClassWithInitArgs(Generic[W]):
    """A worker class packed with its arguments, to be built later in another process."""

    def __init__(self, cls: Callable[P, W], *args: P.args, **kwargs: P.kwargs) -> None:
        if not (isinstance(cls, type) and issubclass(cls, Worker)):
            raise CallError(f"{cls!r} cannot be packed: only classes derived from Worker can")
        try:
            inspect.signature(cls).bind(*args, **kwargs)
        except TypeError as error:
            raise CallError(f"wrong arguments for {cls.__name__}: {error}") from None
        self.cls = cast(type[W], cls)
        self.args: tuple[Any, ...] = args
        self.kwargs: Mapping[str, Any] = kwargs
        self.env: Mapping[str, str] = {}
        self.resources: Mapping[str, float] = {}
        self.ray_options: Mapping[str, Any] = {}

    def options(
        self,
        *,
        env: Mapping[str, str] | None = None,
        resources: Mapping[str, float] | None = None,
        **ray_options: Any,
    ) -> Self:
        """Return a copy with more environment variables, resources of its place, or options of Ray's actors.

        `env` is set before the process starts. `resources` must be among the pool's `resources_per_process`.
        """
        variables = {**ray_options.get("runtime_env", {}).get("env_vars", {}), **(env or {})}
        for name, text in variables.items():
            if not isinstance(text, str):
                raise CallError(f"{self.cls.__name__}: environment variable {name} must be text, not {text!r}")
        if {"CPU", "GPU"} & (resources or {}).keys():
            raise CallError(f"{self.cls.__name__}: CPU and GPU are shared out by the pool, not asked for as resources")
        reserved = sorted(name for name in variables if name in _PLACE_SETS or name.startswith("RAY_"))
        if reserved:
            raise CallError(f"{self.cls.__name__}: environment variable {', '.join(reserved)} is set by the group")
        taken = sorted(_GROUP_SETS & ray_options.keys())
        if taken:
            raise CallError(f"{self.cls.__name__}: option {', '.join(taken)} is set by the pool or the group")
        try:
            ray.remote(Worker).options(**ray_options)
        except (TypeError, ValueError) as error:
            raise CallError(f"{self.cls.__name__}: {error}") from None
        packed = copy.copy(self)
        packed.env = {**self.env, **(env or {})}
        packed.resources = {**self.resources, **(resources or {})}
        packed.ray_options = {**self.ray_options, **ray_options}
        return packed

    @property
    def has_options(self) -> bool:
        return bool(self.env or self.resources or self.ray_options)

    def by_name(self) -> dict[str, Any]:
        """Return the arguments by name, or by number where they have none, for messages."""
        return {**{f"#{index}": value for index, value in enumerate(self.args)}, **self.kwargs}

    def build(self, context: WorkerContext, siblings: Mapping[str, Worker] | None = None) -> W:
        worker = self.cls.__new__(self.cls)
        worker.context = context
        worker.siblings = siblings or {}
        worker.__init__(*self.args, **self.kwargs)  # type: ignore[misc]
        return worker


class FusedWorker(Worker):
    """Several workers in one process per rank. Roles are built in order and reach each other through `siblings`."""

    def __init__(self, **roles: RayClassWithInitArgs[Any]) -> None:
        self.roles: dict[str, Worker] = {}
        try:
            for name, packed in roles.items():
                # The mapping is shared, so that a role built early also sees the ones built after it.
                self.roles[name] = packed.build(self.context, self.roles)
        except BaseException:
            close_worker(self)
            raise


def close_worker(worker: Worker, loop: asyncio.AbstractEventLoop | None = None) -> None:
    """Close a worker and its roles, where that takes coroutines on `loop`, on which its other coroutines ran."""
    with ExitStack() as stack:  # all are closed, the last built first, even if one raises
        if isinstance(worker, FusedWorker):
            for role in worker.roles.values():
                stack.callback(close_worker, role, loop)
        closing = worker.close()
        if closing is not None and not run_or_begin(closing, loop, _MOST_CLOSE_S):
            raise DeadlineError(
                f"group {worker.context.group!r}: {type(worker).__name__}.close of rank {worker.rank} was not done "
                f"within {_MOST_CLOSE_S:g} s. Shut the group down before the event loop of its coroutines ends.",
                group=worker.context.group,
                ranks=[worker.rank],
            )


def roles_of(packed: RayClassWithInitArgs[Any]) -> Mapping[str, RayClassWithInitArgs[Any]]:
    """Return the roles of a packed `FusedWorker`; any other class has none."""
    if not issubclass(packed.cls, FusedWorker):
        return {}
    for name, role in packed.kwargs.items():
        if not isinstance(role, RayClassWithInitArgs):
            raise CallError(f"role {name!r} of {packed.cls.__name__} is a {type(role).__name__}: pack it first")
        if role.has_options:
            raise CallError(f"role {name!r} shares its process with others: give the options to the fused class")
    return packed.kwargs


def known_as(actual: type[Worker], wanted: type[W]) -> type[W] | None:
    """Return the class whose methods call workers of class `actual` as `wanted`; None if they are something else.

    A class defined in a script is another object in each driver: there the name decides.
    """
    if issubclass(actual, wanted):
        return actual
    names = {(base.__module__, base.__qualname__) for base in actual.__mro__}
    return wanted if (wanted.__module__, wanted.__qualname__) in names else None
