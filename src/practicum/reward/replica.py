"""One copy of a reward model in a process of the pool, with its server, and the manager's view of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Self

import aiohttp
import psutil
import torch

from practicum.config import RewardModelConfig
from practicum.controller import (
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    WorkerGroup,
)
from practicum.controller.host import host_address
from practicum.errors import ResourceError, WorkerError
from practicum.models import (
    DTYPES,
    count_weights,
    load_classifier_config,
    load_config,
    num_cores,
    resolve_device,
)
from practicum.rollout.engine.sleep import gigabytes, give_back_memory, total_bytes
from practicum.rollout.engines import EngineSettings
from practicum.rollout.server import ModelServer, Service, classification_service, generation_service
from practicum.rollout.server.encoder import Limit

_MOST_ANSWERS = 512  # that a judge writes at a time; max_batch_tokens is the narrower limit
# A replica answers this even in the middle of a forward pass: one that does not is gone or hangs.
_HEALTH_S = 3.0


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """Bytes. `device_allocated` is what tensors hold, `device_reserved` what the process keeps of the GPU; None without
    one. `weights` is the size of the model, awake or not."""

    device_allocated: int | None
    device_reserved: int | None
    host_rss: int
    weights: int


class RewardModelReplica(Worker):
    """Loads the model and serves it from then on, at `address()`.

    `on_node` is how many replicas share a machine, and with it its memory and cores; None leaves PyTorch's threads as
    they are. `public` listens for other machines, at this one's address. Callers must send the `secret`.
    """

    def __init__(
        self,
        config: RewardModelConfig,
        *,
        device: str,
        on_node: int | None,
        public: bool,
        asleep: bool,
        secret: str,
    ) -> None:
        if on_node is not None:
            torch.set_num_threads(max(1, num_cores() // on_node))
        self._device = resolve_device(device)
        self._timeout_s = config.start_timeout_s
        check_room(config, self._device, on_node or 1)
        self._service = _service_of(config, device)
        host = host_address() if public else "127.0.0.1"
        self._server = ModelServer(self._service, host=host, token=secret)
        self._starts_asleep = asleep

    async def address(self) -> str:
        """Start the server, on the first call; return its address."""
        if not self._server.url:
            await self._server.start()
            await (self.sleep() if self._starts_asleep else self.wake_up())
        return self._server.url

    async def sleep(self) -> None:
        """Give the weights' memory back, once the requests under way are answered. Does nothing when asleep."""
        await self._server.sleep(self._timeout_s)

    async def wake_up(self) -> None:
        """Take the memory again. Does nothing when awake; if it cannot be had, the replica stays asleep."""
        await self._server.wake_up(self._timeout_s)

    def memory(self) -> ReplicaMemory:
        on_gpu = self._device.type == "cuda"
        return ReplicaMemory(
            device_allocated=torch.cuda.memory_allocated(self._device) if on_gpu else None,
            device_reserved=torch.cuda.memory_reserved(self._device) if on_gpu else None,
            host_rss=psutil.Process().memory_info().rss,
            weights=self._service.num_weight_bytes,
        )

    async def close(self) -> None:
        await self._server.close()
        del self._server, self._service
        give_back_memory(self._device)


def check_room(config: RewardModelConfig, device: torch.device, on_node: int) -> None:
    """Raise ResourceError when the weights alone are more than the device has, whoever else uses it."""
    is_classifier = config.kind == "classifier"
    model_config = load_classifier_config(config.path) if is_classifier else load_config(config.path)
    num, size = count_weights(model_config, classifier=is_classifier), DTYPES[config.dtype].itemsize
    copies = on_node if device.type == "cpu" else 1  # each has a GPU of its own
    needed, room = copies * num * size, total_bytes(device)
    if needed > room:
        times = f"{copies} replicas x " if copies > 1 else ""
        raise ResourceError(
            f"reward model {config.path!r} does not fit: {times}{num:,} weights x {size} bytes ({config.dtype}) = "
            f"{gigabytes(needed)}, and {device} has {gigabytes(room)} in all. "
            f"Take a smaller model{', fewer replicas' if copies > 1 else ''} or a narrower dtype."
        )


def _service_of(config: RewardModelConfig, device: str) -> Service:
    """Make what answers requests. Any name of the model will do: there is only the one."""
    path, dtype, most = config.path, config.dtype, config.max_batch_tokens
    if config.kind == "classifier":
        return classification_service(path, device=device, dtype=dtype, max_batch_tokens=most)
    return generation_service(
        EngineSettings("hf", path, device=device, dtype=dtype, max_batch=_MOST_ANSWERS, max_batch_tokens=most),
        limits=[Limit(most, "max_batch_tokens of the reward model")],
    )


class PlacedReplica:
    """A replica as its manager holds it: a group of one, its address, and what is wrong with it.

    It can be started again alone, in a pool of one place or in this process.
    """

    def __init__(self, number: int, group: WorkerGroup[RewardModelReplica]) -> None:
        self.number = number
        self.url: str | None = None  # None: ended, and to be started again
        self.problem = ""  # why it does not serve
        self._group = group

    @classmethod
    async def start(
        cls,
        number: int,
        place: RayResourcePool | None,
        packed: RayClassWithInitArgs[RewardModelReplica],
        timeout_s: float,
    ) -> Self:
        name = f"reward-model-{number}"
        group: WorkerGroup[RewardModelReplica]
        if place is None:
            group = await asyncio.to_thread(LocalWorkerGroup, packed, name=name, timeout_s=timeout_s)
        else:
            group = RayWorkerGroup(
                place, packed, name=name, start_timeout_s=timeout_s, timeout_s=timeout_s, starts=False
            )
            await group.restart_async()
        replica = cls(number, group)
        await replica._find_address()
        return replica

    async def is_well(self) -> bool:
        """Return whether somebody answers at its address, within seconds."""
        if self.url is None:
            return False
        timeout = aiohttp.ClientTimeout(total=_HEALTH_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
                session.get(f"{self.url}/health") as reply,
            ):
                return reply.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def sleep(self) -> None:
        await self._group.execute_all_async(RewardModelReplica.sleep)

    async def wake_up(self) -> None:
        await self._group.execute_all_async(RewardModelReplica.wake_up)

    async def memory(self) -> ReplicaMemory | None:
        """Return what it holds; None when it is not there."""
        try:
            return await self._group.execute_rank_zero_async(RewardModelReplica.memory)
        except WorkerError:
            return None

    async def restart(self) -> str:
        """Start it again. Return its new address."""
        self.url = None
        await self._group.restart_async()
        return await self._find_address()

    async def end(self) -> None:
        self.url = None
        await asyncio.to_thread(self._group.shutdown)

    async def _find_address(self) -> str:
        try:
            self.url = await self._group.execute_rank_zero_async(RewardModelReplica.address)
        except BaseException:
            await self.end()
            raise
        return self.url
