"""A replica as its manager holds it: the group that drives it, its address, and what is wrong with it."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

from practicum.controller import LocalWorkerGroup, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, WorkerGroup
from practicum.errors import WorkerError
from practicum.reward.serving.replica import ReplicaMemory, RewardModelReplica

# A replica answers this even in the middle of a forward pass: one that does not is gone or hangs.
_HEALTH_S = 3.0


class PlacedReplica:
    """A group of one, so that it can be started again alone: in a pool of one place, or in this process."""

    def __init__(
        self,
        number: int,
        place: RayResourcePool | None,
        packed: RayClassWithInitArgs[RewardModelReplica],
        timeout_s: float,
    ) -> None:
        self.number = number
        self.url: str | None = None  # None: ended, and to be started again
        self.problem = ""  # why it does not serve
        name = f"reward-model-{number}"
        self._group: WorkerGroup[RewardModelReplica]
        if place is None:
            self._group = LocalWorkerGroup(packed, name=name, timeout_s=timeout_s)
        else:
            self._group = RayWorkerGroup(place, packed, name=name, start_timeout_s=timeout_s, timeout_s=timeout_s)
        self._find_address()

    def is_well(self) -> bool:
        """Whether somebody answers at its address, within seconds."""
        if self.url is None:
            return False
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_HEALTH_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def sleep(self) -> None:
        self._group.execute_all(RewardModelReplica.sleep)

    def wake_up(self) -> None:
        self._group.execute_all(RewardModelReplica.wake_up)

    def memory(self) -> ReplicaMemory | None:
        """None when it is not there."""
        try:
            return self._group.execute_rank_zero(RewardModelReplica.memory)
        except WorkerError:
            return None

    def restart(self) -> str:
        """Its new address."""
        self.url = None
        self._group.restart()
        return self._find_address()

    def end(self) -> None:
        self.url = None
        self._group.shutdown()

    def _find_address(self) -> str:
        try:
            self.url = self._group.execute_rank_zero(RewardModelReplica.address)
        except BaseException:
            self._group.shutdown()
            raise
        return self.url
