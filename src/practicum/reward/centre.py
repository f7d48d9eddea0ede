"""Opening the reward centre: everything that the `reward` section of the config describes, for the time of a block.

driver        RewardLoopManager, LimitKeeper
pool          RewardLoopWorkers, each with processes of its own; replicas of the reward model
processes     a router in front of the replicas, and one in front of each set of endpoints
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import ray

from practicum.config import RewardConfig, RewardModelConfig
from practicum.controller import Controller, RayClassWithInitArgs, RayResourcePool, places_beside
from practicum.models import num_cores
from practicum.reward.cache import fingerprint
from practicum.reward.client import Target
from practicum.reward.graders.remote import OWN_MODEL
from practicum.reward.limits import LimitKeeper
from practicum.reward.manager import RewardLoopManager
from practicum.reward.model_manager import RewardModelManager, check_reward_model
from practicum.reward.report import Progress
from practicum.reward.router import Router
from practicum.reward.rubric import Rubric
from practicum.reward.worker import RewardLoopWorker, RewardSettings
from practicum.secret import headers_for

# Out at a time: one batch that is computed and one that waits behind it.
_QUESTIONS_PER_SERVER = 64
_MOST_ATTEMPTS = 3  # as the router has it
# Calls of an async function in one process. Each has its time from when it is handed over: with many more, those with
# some work of their own would hold each other up beyond it.
_MOST_COROUTINES = 128


def check_reward(config: RewardConfig) -> Rubric:
    """Return the rubric that the config describes. Fails early, and by name, when it cannot work."""
    rubric = Rubric.make(config)
    if config.model is not None:
        check_reward_model(config.model)
    return rubric


@asynccontextmanager
async def open_reward_centre(
    config: RewardConfig,
    controller: Controller,
    *,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    log_dir: Path | None = None,
) -> AsyncIterator[RewardLoopManager]:
    """Open a manager with its workers on the controller's pool, and all that they need; it ends with the block. What
    routers print is kept in `log_dir`, if there is one."""
    rubric = check_reward(config)
    async with AsyncExitStack() as stack:
        models = None
        targets: dict[str, Target] = {}
        if config.model is not None:
            pool = await stack.enter_async_context(_places(config.model, controller))
            opening = RewardModelManager(config.model, pool, secret=controller.secret, log_dir=log_dir)
            models = await stack.enter_async_context(opening)
            # It waits for its turn, is tried by up to three replicas, each for so long: then something is wrong.
            timeout_s = (_MOST_ATTEMPTS + 1) * config.model.request_timeout_s
            window = _window(models.num_replicas, controller)
            targets[OWN_MODEL] = Target(models.url, window, timeout_s, models.headers)
        all_servers = sorted({grader.servers for grader in rubric.asks if grader.servers})
        for number, servers in enumerate(all_servers):
            router = Router(
                servers,
                host=controller.address,
                wait_timeout_s=config.timeout_s,
                response_timeout_s=config.timeout_s,
                token=controller.secret,
                token_for="all",
            )
            router_log = None if log_dir is None else log_dir / f"judge-router-{number}.log"
            running = await router.start_process_async(log=router_log)
            stack.push_async_callback(asyncio.to_thread, running.stop)
            window = config.limits.concurrency or _window(len(servers), controller)
            # Each attempt has its time; a server that hangs is not the last to be asked.
            timeout_s, headers = _MOST_ATTEMPTS * config.timeout_s, headers_for(controller.secret, server=False)
            targets[" ".join(servers)] = Target(running.url, window, timeout_s, headers)
        keeper = None
        if config.limits.are_set:
            keeper = await stack.enter_async_context(LimitKeeper(config.limits, controller.secret, controller.address))
        num_processes = config.processes or _num_cores(controller)
        settings = RewardSettings(
            rubric,
            timeout_s=config.timeout_s,
            num_processes=max(1, num_processes // controller.world_size),
            memory_bytes=config.memory_mb << 20,
            num_coroutines=config.limits.concurrency or _MOST_COROUTINES,
            targets=targets,
            limits_at=None if keeper is None else keeper.address,
            secret=controller.secret,
            cache_folder=None if config.cache.folder is None else str(Path(config.cache.folder).resolve()),
            cache_version=_cache_version(config),
        )
        packed = RayClassWithInitArgs(RewardLoopWorker, settings)
        workers = await controller.group(packed, name="graders", use_gpu=False)
        stack.push_async_callback(asyncio.to_thread, workers.shutdown)
        manager = RewardLoopManager(
            workers,
            retries=config.retries,
            max_failure_share=config.max_failure_share,
            inline=rubric if settings.is_inline else None,
            models=models,
            asks_models=rubric.asks_model,
            on_progress=on_progress,
        )
        await manager.start()
        yield manager


def _num_cores(controller: Controller) -> int:
    """Count those of all nodes together."""
    if controller.pool is None:
        return num_cores()
    return int(ray.cluster_resources().get("CPU", 1))


def _window(num_servers: int, controller: Controller) -> int:
    return -(-_QUESTIONS_PER_SERVER * num_servers // controller.world_size)


@asynccontextmanager
async def _places(config: RewardModelConfig, controller: Controller) -> AsyncIterator[RayResourcePool | None]:
    """Give the replicas the controller's own places, or some beside them that nobody uses."""
    if controller.pool is None or config.placement == "colocated":
        yield controller.pool
        return
    async with places_beside(controller, config.replicas, key="reward.model.placement") as pool:
        yield pool


def _cache_version(config: RewardConfig) -> str:
    """Return what the user calls it, and which model grades."""
    if config.model is None:
        return config.cache.version
    folder = Path(config.model.path)
    model = fingerprint(folder) if folder.is_dir() else config.model.path
    return f"{config.cache.version} {config.model.dtype} {model}"
