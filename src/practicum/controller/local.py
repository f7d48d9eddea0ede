"""The in-process twin of a Ray group: one worker, called directly, so that a debugger steps right into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from practicum.controller.group import W, WorkerGroup
from practicum.controller.worker import Call, RayClassWithInitArgs, WorkerContext, WorkerHost
from practicum.errors import WorkerDied


class LocalWorkerGroup(WorkerGroup[W]):
    def __init__(self, packed: RayClassWithInitArgs[W], *, name: str, timeout_s: float = 600.0) -> None:
        super().__init__(name, packed, world_size=1, timeout_s=timeout_s)
        self._host = WorkerHost()
        seat = self._host.seat()
        self._host.build(packed, WorkerContext(name, master_port=seat.free_port))

    def shutdown(self) -> None:
        self._host.close()

    def _submit(self, rank: int, call: Call) -> Any:
        if not self._host.is_open:
            raise WorkerDied(f"group {self.name!r} has been shut down", group=self.name, ranks=[rank])
        return self._host.call(call)

    def _collect(self, handles: Sequence[Any], ranks: Sequence[int], what: str, deadline: float) -> list[Any]:
        return list(handles)
