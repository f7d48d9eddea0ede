"""A worker: one object in one process of a group, which knows its place and does as it is called to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, ClassVar, ParamSpec, TypeVar

from practicum.controller.mesh import Coordinates, Mesh
from practicum.errors import CallError

P = ParamSpec("P")
R = TypeVar("R")


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
        """The same for libraries that look for it in the environment, such as torch with `env://`.

        LOCAL_RANK is what they take for the number of their GPU: 0 where Ray shows a process no other.
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
        """Where this rank stands in the mesh of that name."""
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
        """Give back what outlives the object; may be a coroutine. For in-process groups: a Ray worker ends with its
        process."""
        return None


def find_mesh(meshes: Mapping[str, Mesh], name: str, group: str) -> Mesh:
    if name not in meshes:
        raise CallError(f"group {group!r} has no mesh {name!r}; its meshes: {', '.join(meshes) or 'none'}")
    return meshes[name]
