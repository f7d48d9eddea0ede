"""Learners and rollout: the trainer's processes, and the replicas that write with its weights, wherever they live.

hybrid       roles of one process for each rank
colocated    processes of their own on the same devices
standalone   devices of their own
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from practicum.config import Config
from practicum.controller import (
    Controller,
    FusedWorker,
    RayClassWithInitArgs,
    Worker,
    WorkerGroup,
    places_beside,
    starts_here,
)
from practicum.errors import RolloutError
from practicum.loop.learners import LearningGroups
from practicum.loop.settings import actor_settings, critic_settings, reference_settings, sent_adapters
from practicum.models import empty_model, load_config, num_cores, resolve_device
from practicum.replay import find_routers
from practicum.reward.router import Router
from practicum.rollout.engines import EngineSettings
from practicum.rollout.manager import RolloutManager
from practicum.rollout.openai import server_address
from practicum.rollout.placement import engine_problems, open_replicas, room_problems
from practicum.rollout.replica import RolloutReplica
from practicum.rollout.vllm.engine import LORA_RANKS
from practicum.rollout.worker import RolloutWorker
from practicum.train import ActorWorker, CriticWorker, ReferenceWorker
from practicum.weights import ChannelSettings, Place, Ticket, channel_timeout_s, choose

W = TypeVar("W", bound=Worker)


@asynccontextmanager
async def open_learners(
    config: Config, controller: Controller, model_path: str
) -> AsyncIterator[tuple[LearningGroups, RolloutManager]]:
    """Start the roles that learn, those they are compared with, and the replicas; all end with the block."""
    timeout_s = config.controller.call_timeout_s
    engine = EngineSettings.of(
        config.rollout,
        model_path,
        device=_device(config, controller),
        dtype=config.model.dtype,
        keep_routes=config.captures_routes,
        adapters=sent_adapters(config),
        log_dir=str(log_dir(config)),
        timeout_s=timeout_s,
        start_timeout_s=config.controller.start_timeout_s,
    )
    hybrid: dict[str, RayClassWithInitArgs[Any]] = {}
    if config.rollout.placement == "hybrid":
        hybrid["rollout"] = RayClassWithInitArgs(
            RolloutWorker,
            replace(engine, stays_loaded=True),
            weights_from="actor",
            agent=config.rollout.agent,
            is_partial=config.rollout.partial,
            timeout_s=timeout_s,
        )
    opening: AbstractAsyncContextManager[RolloutManager]
    async with AsyncExitStack() as stack:
        fused, groups = await _open_ranks(stack, config, controller, model_path, hybrid)
        if hybrid:
            replica = RolloutReplica.hybrid(fused.role("rollout", RolloutWorker))
            opening = RolloutManager([replica], window=None, silence_s=timeout_s, delivery=None, sleeps=True)
        else:
            engine = await _with_router(stack, config, controller, engine)
            weights = ActorWeights(groups.actors, config.model.dtype, timeout_s)
            threads, num_spared = config.trainer.threads_per_worker, _num_spared(config)
            opening = open_replicas(config.rollout, controller, engine, weights, threads=threads, num_spared=num_spared)
        yield groups, await stack.enter_async_context(opening)


@asynccontextmanager
async def open_only_learners(config: Config, controller: Controller, model_path: str) -> AsyncIterator[LearningGroups]:
    """Start the roles that learn without any rollout."""
    async with AsyncExitStack() as stack:
        yield (await _open_ranks(stack, config, controller, model_path, {}))[1]


async def _open_ranks(
    stack: AsyncExitStack,
    config: Config,
    controller: Controller,
    model_path: str,
    hybrid: Mapping[str, RayClassWithInitArgs[Any]],
) -> tuple[WorkerGroup[FusedWorker], LearningGroups]:
    """Start the processes of the ranks, with the roles in `hybrid` too, and the roles beside the actor, wherever they
    are."""
    device, kl = _device(config, controller), config.algorithm.kl
    roles = {"actor": RayClassWithInitArgs(ActorWorker, actor_settings(config, model_path, device)), **hybrid}
    critic = reference = None
    if config.algorithm.needs_critic:
        critic = RayClassWithInitArgs(CriticWorker, critic_settings(config, device))
        roles |= {"critic": critic} if config.critic.placement == "hybrid" else {}
    if (of_reference := reference_settings(config, device)) is not None:
        reference = RayClassWithInitArgs(ReferenceWorker, of_reference)
        roles |= {"reference": reference} if kl.placement == "hybrid" else {}
    fused = await controller.group(RayClassWithInitArgs(FusedWorker, **roles), name="learners")

    async def beside(role: str, packed: RayClassWithInitArgs[W] | None, key: str) -> WorkerGroup[W] | None:
        if packed is None or role in roles:
            return None if packed is None else fused.role(role, packed.cls)
        pool, num = None, config.trainer.num_workers
        if config.placements[key] == "standalone":
            places = places_beside(controller, num, key=key, num_key="trainer.num_workers")
            pool = await stack.enter_async_context(places)
        group = await controller.group(packed, name=f"{role}s", pool=pool)
        stack.push_async_callback(asyncio.to_thread, group.shutdown)
        return group

    critics = await beside("critic", critic, "critic.placement")
    references = await beside("reference", reference, "algorithm.kl.placement")
    return fused, LearningGroups(fused.role("actor", ActorWorker), critics, references)


def _device(config: Config, controller: Controller) -> str:
    if config.controller.backend == "ray":
        return "cuda" if controller.uses_gpu else "cpu"
    return config.trainer.device


def check_rollout(config: Config) -> None:
    """Raise where the rollout could not start, as far as that can be known before anything is started."""
    problems = rollout_problems(config)
    if problems:
        raise RolloutError(" ".join(problems))


def rollout_problems(config: Config) -> list[str]:
    """Return what would keep the rollout from starting, in sentences."""
    if config.actor.router_replay.replay_file is not None:  # a recording is learnt from: nothing is generated
        return []
    is_local = config.controller.backend == "local"
    joins = not is_local and not starts_here(config.controller.address)
    unit, num_free = "CPU", None
    if not is_local and not joins:
        on_gpus = resolve_device(config.trainer.device).type == "cuda"
        unit, there = ("GPU", torch.cuda.device_count()) if on_gpus else ("CPU", os.cpu_count() or num_cores())
        apart = [key for key, placement in config.placements.items() if placement == "standalone"]
        num_free = there - config.trainer.num_workers * (1 + len(apart)) - (_num_spared(config) if on_gpus else 0)
        if config.trainer.num_workers > there:
            return [
                f"trainer.num_workers={config.trainer.num_workers} needs as many {unit}s, and this machine has "
                f"{there}: lower it, or join a Ray cluster by controller.address."
            ]
        if apart and num_free < 0:
            return [
                f"{' and '.join(f'{key}=standalone' for key in apart)} with trainer.num_workers="
                f"{config.trainer.num_workers} need more {unit}s beside the trainer's than the {there} of this machine "
                "leave: use colocated or hybrid, or fewer workers."
            ]
    num_places = 1 if is_local else config.trainer.num_workers
    return [
        *_adapter_problems(config),
        *engine_problems(config.rollout, runs_here=not joins),
        *room_problems(config.rollout, num_places=num_places, num_free=num_free, unit=unit),
    ]


def _adapter_problems(config: Config) -> list[str]:
    """Return what vLLM, which computes with adapters that come alone, could not do."""
    adapters = sent_adapters(config)
    if adapters is None or config.rollout.engine != "vllm":
        return []
    on_gpus = resolve_device(config.trainer.device).type == "cuda"
    rank, problems = adapters.settings.rank, []
    if rank > LORA_RANKS[-1]:
        problems += [f"vLLM takes adapters of rank {LORA_RANKS[-1]} at most, and actor.lora.rank={rank}"]
    if on_gpus and config.model.dtype == "float32":
        problems += ["on GPUs vLLM computes with adapters in bfloat16, and model.dtype=float32"]
    if not on_gpus and find_routers(empty_model(load_config(config.model.path))):
        problems += ["on CPUs vLLM cannot compute a mixture of experts with adapters"]
    return [f"{problem}: set actor.lora.send=merged." for problem in problems]


class ActorWeights:
    """The learners, as far as replicas with weights of their own need them: a `TrainerWeights`."""

    def __init__(self, actors: WorkerGroup[ActorWorker], dtype: str, timeout_s: float) -> None:
        self._actors = actors
        self._dtype = dtype
        self._timeout_s = timeout_s

    async def open(self, engines: Sequence[Place]) -> None:
        channel = choose(await self._actors.execute_rank_zero_async(ActorWorker.place), engines)
        settings = ChannelSettings(
            timeout_s=channel_timeout_s(self._timeout_s),
            num_receivers=len(engines),
            host=await self._actors.execute_rank_zero_async(ActorWorker.address),
        )
        await self._actors.execute_all_async(ActorWorker.open_channel, channel, settings)

    async def invite(self, version: int, num_receivers: int) -> Ticket | None:
        return await self._actors.execute_rank_zero_async(ActorWorker.invite, version, num_receivers)

    async def send(self, version: int) -> Ticket:
        ticket = (await self._actors.execute_all_async(ActorWorker.send, version, self._dtype))[0]
        assert ticket is not None, "rank 0 sends"
        return ticket

    async def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        return (await self._actors.execute_all_async(ActorWorker.log_probs, sequences))[0]


def log_dir(config: Config) -> Path:
    """Return the folder for what servers print."""
    return Path(config.trainer.run_dir).resolve() / "logs"


async def _with_router(
    stack: AsyncExitStack, config: Config, controller: Controller, engine: EngineSettings
) -> EngineSettings:
    """Put a router in front of several servers; the run's folder is where they may find new weights."""
    if config.rollout.engine != "openai":
        return engine
    more: dict[str, Any] = {"exchange_dir": str(Path(config.trainer.run_dir).resolve())}
    servers = [server_address(server) for server in config.rollout.openai.servers]
    if len(servers) > 1:
        timeout_s, token = config.controller.call_timeout_s, controller.secret
        router = Router(
            servers,
            host=controller.address,
            wait_timeout_s=timeout_s,
            response_timeout_s=timeout_s,
            token=token,
            token_for="all",
            paths=("/v1/completions",),
        )
        running = await router.start_process_async(log=log_dir(config) / "rollout-router.log")
        stack.push_async_callback(asyncio.to_thread, running.stop)
        more |= {"router": running.url, "router_token": token}
    return replace(engine, **more)


def _num_spared(config: Config) -> int:
    """Return how many free places a reward model is going to ask for."""
    model = config.reward.model
    if model is None or model.placement != "standalone":
        return 0
    return 1 if model.replicas == "auto" else model.replicas
