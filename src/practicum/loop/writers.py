"""Learners and writers: the trainer's processes, and the replicas that write with its weights, wherever they live."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from practicum.adapters import Adapted, LoraSettings, find_targets
from practicum.algo import Objective
from practicum.config import AlgorithmConfig, Config
from practicum.controller import Controller, FusedWorker, RayClassWithInitArgs, WorkerGroup, places_beside
from practicum.errors import RolloutError
from practicum.models import absolute, empty_model, num_cores, resolve_device
from practicum.replay import ReplaySettings
from practicum.reward.router import Router
from practicum.rollout.early import engine_problems, room_problems
from practicum.rollout.engines import EngineSettings
from practicum.rollout.manager import RolloutManager
from practicum.rollout.placement import ReplicaSettings, hybrid_manager, open_replicas
from practicum.rollout.remote.openai import server_address
from practicum.rollout.worker import RolloutWorker
from practicum.train import ActorSettings, ActorWorker, CriticSettings, CriticWorker
from practicum.weights import ChannelSettings, Place, Ticket, channel_timeout_s, choose


@contextmanager
def open_learners(
    config: Config, controller: Controller, model_path: str
) -> Iterator[tuple[WorkerGroup[ActorWorker], WorkerGroup[CriticWorker] | None, RolloutManager]]:
    """Actors, critics where there are any, and the writers, which end with the block."""
    device = _device(config, controller)
    roles: dict[str, RayClassWithInitArgs[Any]] = {
        "actor": RayClassWithInitArgs(ActorWorker, actor_settings(config, model_path, device))
    }
    has_critic = config.algorithm.needs_critic
    if has_critic and config.critic.placement == "hybrid":
        roles["critic"] = RayClassWithInitArgs(CriticWorker, critic_settings(config, device))
    engine = EngineSettings.of(
        config.rollout,
        model_path,
        device=device,
        dtype=config.model.dtype,
        keep_routes=config.actor.router_replay.mode == "R3",
        adapted=_adapted(config),
        timeout_s=config.controller.call_timeout_s,
        start_timeout_s=config.controller.start_timeout_s,
    )
    settings = ReplicaSettings(
        threads=config.trainer.threads_per_worker,
        start_timeout_s=config.controller.start_timeout_s,
        call_timeout_s=config.controller.call_timeout_s,
        num_spared=_num_spared(config),
    )
    if config.rollout.placement == "hybrid":
        roles["rollout"] = RayClassWithInitArgs(
            RolloutWorker,
            replace(engine, stays_loaded=True),
            weights_from="actor",
            agent=config.rollout.agent,
            is_partial=config.rollout.partial,
            timeout_s=config.controller.call_timeout_s,
        )
    fused = controller.group(RayClassWithInitArgs(FusedWorker, **roles), name="learners")
    actors = fused.role("actor", ActorWorker)
    with ExitStack() as stack:
        critics: WorkerGroup[CriticWorker] | None = None
        if "critic" in roles:
            critics = fused.role("critic", CriticWorker)
        elif has_critic:
            critics = stack.enter_context(_critics_apart(config, controller, device))
        if "rollout" in roles:
            manager = stack.enter_context(hybrid_manager(fused.role("rollout", RolloutWorker), settings))
        else:
            engine = _served(stack, config, controller, engine)
            weights = ActorWeights(actors, config.model.dtype, config.controller.call_timeout_s)
            manager = stack.enter_context(open_replicas(config.rollout, controller, engine, weights, settings))
        yield actors, critics, manager


@contextmanager
def _critics_apart(config: Config, controller: Controller, device: str) -> Iterator[WorkerGroup[CriticWorker]]:
    """In processes of their own, on the trainer's places or on as many beside them."""
    packed = RayClassWithInitArgs(CriticWorker, critic_settings(config, device))
    with ExitStack() as stack:
        pool = None
        if config.critic.placement == "standalone":
            num = config.trainer.num_workers
            beside = places_beside(controller, num, key="critic.placement", num_key="trainer.num_workers")
            pool = stack.enter_context(beside)
        yield stack.enter_context(controller.group(packed, name="critics", pool=pool))


def open_actors(config: Config, controller: Controller, model_path: str) -> WorkerGroup[ActorWorker]:
    """The trainer's group by itself."""
    settings = actor_settings(config, model_path, _device(config, controller))
    return controller.group(RayClassWithInitArgs(ActorWorker, settings), name="learners")


def _device(config: Config, controller: Controller) -> str:
    if config.controller.backend == "ray":
        return "cuda" if controller.uses_gpu else "cpu"
    return config.trainer.device


def check_writers(config: Config) -> None:
    """Raise where writers could not start, as far as that can be known before anything is started."""
    problems = writer_problems(config)
    if problems:
        raise RolloutError(" ".join(problems))


def writer_problems(config: Config) -> list[str]:
    if config.actor.router_replay.replay_file is not None:  # a recording is learnt from: nobody writes
        return []
    is_local, joins = config.controller.backend == "local", config.controller.address is not None
    unit, num_free = "CPU", None
    if not is_local and not joins:
        on_gpus = resolve_device(config.trainer.device).type == "cuda"
        unit, there = ("GPU", torch.cuda.device_count()) if on_gpus else ("CPU", os.cpu_count() or num_cores())
        apart = config.trainer.num_workers if config.critic.placement == "standalone" else 0
        num_free = there - config.trainer.num_workers - apart - (_num_spared(config) if on_gpus else 0)
    num_places = 1 if is_local else config.trainer.num_workers
    return [
        *engine_problems(config.rollout, runs_here=not joins),
        *room_problems(config.rollout, num_places=num_places, num_free=num_free, unit=unit),
    ]


class ActorWeights:
    """What replicas with weights of their own need of the learners."""

    def __init__(self, actors: WorkerGroup[ActorWorker], dtype: str, timeout_s: float) -> None:
        self._actors = actors
        self._dtype = dtype
        self._timeout_s = timeout_s

    def open(self, engines: Sequence[Place]) -> None:
        channel = choose(self._actors.execute_rank_zero(ActorWorker.place), engines)
        settings = ChannelSettings(
            timeout_s=channel_timeout_s(self._timeout_s),
            num_receivers=len(engines),
            host=self._actors.execute_rank_zero(ActorWorker.address),
        )
        self._actors.execute_all(ActorWorker.open_channel, channel, settings)

    def invite(self, version: int, num_receivers: int) -> Ticket | None:
        return self._actors.execute_rank_zero(ActorWorker.invite, version, num_receivers)

    def send(self, version: int) -> Callable[[], Ticket]:
        sending = self._actors.execute_all_async(ActorWorker.send, version, self._dtype)

        def sent() -> Ticket:
            ticket = sending.result()[0]
            assert ticket is not None, "rank 0 sends"
            return ticket

        return sent

    def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        return self._actors.execute_all(ActorWorker.log_probs, sequences)[0]


def actor_settings(config: Config, model_path: str, device: str) -> ActorSettings:
    actor, per_step = config.actor, config.actor.mini_batches * config.actor.epochs
    base = model_path if actor.lora is None else absolute(config.model.path)
    return ActorSettings(
        model_path=base,
        lora=lora_settings(config),
        sends_adapters=_adapted(config) is not None,
        adapters_path=None if base == model_path else model_path,  # of the run that goes on
        lr=actor.lr,
        lr_schedule=actor.lr_schedule,
        num_updates=config.num_updates,
        num_warmup=actor.warmup_steps * per_step,
        weight_decay=actor.weight_decay,
        max_grad_norm=actor.max_grad_norm,
        temperature=config.rollout.temperature,
        objective=_objective(config.algorithm),
        reference_path=reference_path(config),
        replay=_replay_settings(config),
        tells_ages=config.trainer.staleness > 0,
        **_common(config, device),
    )


def critic_settings(config: Config, device: str) -> CriticSettings:
    critic = config.critic
    return CriticSettings(
        model_path=absolute(critic.path or config.model.path),  # a checkpoint is loaded over it
        lr=critic.lr,
        lr_schedule="constant",
        num_updates=config.trainer.steps * config.actor.mini_batches * config.actor.epochs,
        num_warmup=0,
        weight_decay=critic.weight_decay,
        max_grad_norm=critic.max_grad_norm,
        value_clip=critic.value_clip,
        **_common(config, device),
    )


def _common(config: Config, device: str) -> dict[str, Any]:
    actor, trainer = config.actor, config.trainer
    return {
        "device": device,
        "compute_dtype": config.model.dtype,
        "threads": trainer.threads_per_worker or max(1, num_cores() // trainer.num_workers),
        "seed": trainer.seed,
        "gradient_checkpointing": actor.gradient_checkpointing,
        "collective_timeout_s": config.controller.call_timeout_s,
        "epochs": actor.epochs,
    }


def _objective(algorithm: AlgorithmConfig) -> Objective:
    kl, correction = algorithm.kl, algorithm.correction
    return Objective(
        loss=algorithm.loss,
        loss_options=algorithm.options("loss"),
        aggregation=algorithm.aggregation,
        correction=None if correction.kind == "none" else correction.kind,
        level=correction.level,
        bounds=correction.bounds,
        kl=kl.estimator if kl.coefficient > 0 and kl.place == "loss" else None,
        entropy_bonus=algorithm.entropy_bonus,
    )


def reference_path(config: Config) -> str | None:
    """The model that the run started from, also once it goes on from a checkpoint; unless another is named."""
    kl = config.algorithm.kl
    path, start = absolute(kl.reference or config.model.path), absolute(config.model.path)
    is_within = config.actor.lora is not None and path == start  # the actor without its adapters
    return None if kl.coefficient == 0 or is_within else path


def lora_settings(config: Config) -> LoraSettings | None:
    lora = config.actor.lora
    if lora is None:
        return None
    return LoraSettings(lora.rank, lora.scale_by, None if lora.targets == "all-linear" else tuple(lora.targets))


def _adapted(config: Config) -> Adapted | None:
    """What engines must know of adapters that are sent alone."""
    lora, settings = config.actor.lora, lora_settings(config)
    return Adapted(absolute(config.model.path), settings) if lora and settings and lora.send == "adapters" else None


def check_lora(config: Config, model_config: Any) -> None:
    """Raise where the adapters that are asked for cannot be had: before anything is started."""
    settings = lora_settings(config)
    if settings is not None:
        find_targets(empty_model(model_config), settings)


def recorded_shape(config: Config) -> dict[str, str]:
    """What must be the same for a recording to be repeated."""
    return {
        "data.prompts_per_step": str(config.data.prompts_per_step),
        "rollout.answers_per_prompt": str(config.rollout.answers_per_prompt),
    }


def _replay_settings(config: Config) -> ReplaySettings | None:
    replay = config.actor.router_replay
    if replay.mode == "disabled":
        return None
    record, repeat = (p and str(Path(p).resolve()) for p in (config.record_file, replay.replay_file))
    return ReplaySettings(replay.mode, record, repeat, replay.compare_every, recorded_shape(config))


def _served(stack: ExitStack, config: Config, controller: Controller, engine: EngineSettings) -> EngineSettings:
    """With a router in front of several servers; the run's folder is where they may find new weights."""
    if config.rollout.engine != "openai":
        return engine
    more: dict[str, Any] = {"exchange_dir": str(Path(config.trainer.run_dir).resolve())}
    servers = [server_address(server) for server in config.rollout.openai.servers]
    if len(servers) > 1:
        timeout_s, token = config.controller.call_timeout_s, secrets.token_urlsafe()
        router = Router(
            servers, host=controller.address, wait_timeout_s=timeout_s, response_timeout_s=timeout_s, token=token
        )
        more |= {"router": stack.enter_context(router.start_process()).url, "router_token": token}
    return replace(engine, **more)


def _num_spared(config: Config) -> int:
    """Free places that a reward model is going to ask for."""
    model = config.reward.model
    if model is None or model.placement != "standalone":
        return 0
    return 1 if model.replicas == "auto" else model.replicas
