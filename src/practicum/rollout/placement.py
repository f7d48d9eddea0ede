"""Where replicas live: how many fit, on which places, a manager over them; and what would keep them from starting.

hybrid       the trainer's own processes: one engine in each
colocated    the trainer's devices, a process of its own on each, asleep while the trainer learns
standalone   devices beside the trainer's, never asleep
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from practicum.config import ENGINES, RolloutConfig
from practicum.controller import Controller, RayClassWithInitArgs, RayResourcePool, num_replicas, places_beside
from practicum.controller.loop import run_sync
from practicum.errors import PracticumError, RolloutError, WorkerError
from practicum.models import load_config, load_tokenizer, num_cores
from practicum.rollout.delivery import TrainerWeights, WeightDelivery
from practicum.rollout.engines import EngineSettings
from practicum.rollout.manager import RolloutManager, all_of
from practicum.rollout.remote.client import CompletionsClient, ServerFailure
from practicum.rollout.replica import RolloutReplica
from practicum.rollout.worker import RolloutWorker

_ASK_S = 5.0
_SHUT = (401, 403)


@asynccontextmanager
async def open_replicas(
    config: RolloutConfig,
    controller: Controller,
    engine: EngineSettings,
    weights: TrainerWeights,
    *,
    threads: int | None = None,
    num_spared: int = 0,
) -> AsyncIterator[RolloutManager]:
    """Start replicas in processes of their own and yield a manager over them; they end with the block.

    `threads` are those of each replica on CPUs; None divides a machine's cores among its replicas. Standalone replicas
    leave `num_spared` free GPUs, which others are going to ask for.
    """
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(_places(config, controller, num_spared))
        num = num_replicas(1 if engine.engine == "openai" else config.replicas, pool, "the rollout engine")
        on_node = 1 if pool is None else max(pool.sub_pool(range(num)).process_on_nodes)
        packed = RayClassWithInitArgs(
            RolloutWorker,
            replace(engine, num_on_machine=on_node),
            agent=config.agent,
            threads=threads or max(1, num_cores() // on_node),
            is_partial=config.partial,
            timeout_s=controller.call_timeout_s,
        )

        async def start(number: int) -> RolloutReplica:
            place = None if pool is None else pool.sub_pool([number])
            replica = await RolloutReplica.start(number, controller, packed, place)
            stack.push_async_callback(replica.end)  # even if another does not start
            return replica

        try:
            replicas = await all_of(start(number) for number in range(num))
            await weights.open([await replica.where() for replica in replicas])
            num_tokens = len(load_tokenizer(engine.model_path))
            text_config = load_config(engine.model_path).get_text_config()
            delivery = WeightDelivery(weights, replicas, vocab_size=min(num_tokens, text_config.vocab_size))
            await delivery.calibrate(replicas)
        except WorkerError as error:
            if isinstance(error.cause, PracticumError):  # an engine that is not installed is no matter of one of them
                raise error.cause from error
            raise
        sleeps, silence_s = config.placement == "colocated", controller.call_timeout_s
        manager = RolloutManager(replicas, window=window(config), silence_s=silence_s, delivery=delivery, sleeps=sleeps)
        yield await stack.enter_async_context(manager)


def window(config: RolloutConfig) -> int:
    """Return the most answers that one worker has at a time."""
    return config.max_batch + max(1, int(config.max_batch * ENGINES[config.engine].waiting_share))


@asynccontextmanager
async def _places(
    config: RolloutConfig, controller: Controller, num_spared: int
) -> AsyncIterator[RayResourcePool | None]:
    if controller.pool is None or config.placement == "colocated":
        yield controller.pool
    elif config.engine == "openai":  # it only asks others, which takes hardly any room
        async with RayResourcePool([1], resources_per_process={"CPU": 0.01}, waits=False) as pool:
            yield pool
    else:
        async with places_beside(
            controller,
            config.replicas,
            key="rollout.placement",
            gpus_each=config.vllm.tensor_parallel if config.engine == "vllm" else 1,
            num_spared=num_spared,
        ) as pool:
            yield pool


def engine_problems(config: RolloutConfig, *, runs_here: bool) -> list[str]:
    """Return what would keep an engine from starting, by questions that cost little: before anything is started.

    They are asked on this machine; `runs_here`: the engine's processes are on it. What cannot be known from here, such
    as what a cluster has free, is left to the start.
    """
    if config.engine == "vllm" and runs_here:
        from practicum.rollout.vllm.engine import check_installed

        try:
            check_installed(config.vllm.python, in_process=config.vllm.in_process)
        except RolloutError as error:
            return [str(error)]
    if config.engine == "openai":
        return _server_problems(config)
    return []


def room_problems(config: RolloutConfig, *, num_places: int, num_free: int | None, unit: str) -> list[str]:
    """Return what the places for replicas lack. The trainer has `num_places`; beside them `num_free` of a `unit` (GPU
    or CPU) are left, None: not known."""
    if config.placement == "hybrid" or config.engine == "openai":
        return []
    wanted = 1 if config.replicas == "auto" else config.replicas
    if config.placement == "colocated":
        if wanted <= num_places:
            return []
        places = f"the trainer has room for {num_places} beside it, one a worker (trainer.num_workers)"
        return [f"rollout.replicas={wanted}, but {places}: lower rollout.replicas, or leave it at auto."]
    each = config.vllm.tensor_parallel if config.engine == "vllm" and unit == "GPU" else 1
    if num_free is None or wanted * each <= num_free:
        return []
    need = f"{wanted * each} {unit}{'s' if wanted * each > 1 else ''}"
    of = "" if each == 1 else f" ({wanted} replicas of {each})"
    return [
        f"rollout.placement=standalone needs {need}{of} beside the trainer's, and this machine has {max(0, num_free)}: "
        "lower rollout.replicas or trainer.num_workers, or use rollout.placement=colocated."
    ]


def _server_problems(config: RolloutConfig) -> list[str]:
    from practicum.rollout.openai import api_key, server_address

    try:
        servers = [server_address(server) for server in config.openai.servers]
        key = api_key(config.openai.api_key_env)
    except RolloutError as error:
        return [str(error)]

    async def ask() -> list[str]:
        client = CompletionsClient(api_key=key, timeout_s=_ASK_S)
        try:
            return await asyncio.gather(*(_problem_of(client, server) for server in servers))
        finally:
            await client.close()

    return [problem for problem in run_sync(ask()) if problem]


async def _problem_of(client: CompletionsClient, server: str) -> str:
    """Return what is wrong with a server. One that answers at all is there; whether it can be used is found out when it
    is asked to write."""
    try:
        await client.call(server, "GET", "/v1/models")
    except ServerFailure as failure:
        if failure.status in _SHUT:
            return (
                f"server {server} wants another token ({failure.status}): set rollout.openai.api_key_env to the name "
                "of the environment variable that holds it."
            )
        if failure.status is not None:
            return f"server {server} is in trouble: it answered {failure.status}." if failure.status >= 500 else ""
        if failure.is_transient:
            reason = failure.__cause__ or f"nothing within {_ASK_S:g} s"
            return f"server {server} does not answer ({reason}): start it, or take it out of rollout.openai.servers."
    return ""
