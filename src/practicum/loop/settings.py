"""The settings of the roles that learn and of those beside them, from the config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from practicum.adapters import LoneAdapters, LoraSettings, find_targets
from practicum.algo import Objective
from practicum.config import AlgorithmConfig, Config
from practicum.models import absolute, empty_model, num_cores
from practicum.replay import ReplaySettings
from practicum.train import ActorSettings, CriticSettings, ReferenceSettings


def actor_settings(config: Config, model_path: str, device: str) -> ActorSettings:
    actor, per_step = config.actor, config.actor.mini_batches * config.actor.epochs
    base = model_path if actor.lora is None else absolute(config.model.path)
    return ActorSettings(
        model_path=base,
        lora=lora_settings(config),
        sends_adapters=sent_adapters(config) is not None,
        adapters_path=None if base == model_path else model_path,  # of the run that goes on
        lr=actor.lr,
        lr_schedule=actor.lr_schedule,
        num_updates=config.num_updates,
        num_warmup=actor.warmup_steps * per_step,
        weight_decay=actor.weight_decay,
        max_grad_norm=actor.max_grad_norm,
        temperature=config.rollout.temperature,
        objective=_objective(config.algorithm),
        replay=_replay_settings(config),
        measures_staleness=config.trainer.staleness > 0,
        **_settings_of_learners(config, device),
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
        **_settings_of_learners(config, device),
    )


def reference_settings(config: Config, device: str) -> ReferenceSettings | None:
    """Return the settings of the reference; None where it needs no model of its own."""
    path = reference_path(config)
    if path is None:
        return None
    return ReferenceSettings(
        model_path=path, temperature=config.rollout.temperature, **_settings_of_all(config, device)
    )


def _settings_of_learners(config: Config, device: str) -> dict[str, Any]:
    return {
        "seed": config.trainer.seed,
        "gradient_checkpointing": config.actor.gradient_checkpointing,
        "epochs": config.actor.epochs,
        **_settings_of_all(config, device),
    }


def _settings_of_all(config: Config, device: str) -> dict[str, Any]:
    return {
        "device": device,
        "compute_dtype": config.model.dtype,
        "threads": config.trainer.threads_per_worker or max(1, num_cores() // config.trainer.num_workers),
        "collective_timeout_s": config.controller.call_timeout_s,
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
    """Return the model that the run started from, also once it is resumed from a checkpoint, unless another is named;
    None where there is no reference, or where it is the actor without its adapters."""
    kl = config.algorithm.kl
    path, start = absolute(kl.reference or config.model.path), absolute(config.model.path)
    is_within = config.actor.lora is not None and path == start and kl.placement == "hybrid"
    return None if kl.coefficient == 0 or is_within else path


def lora_settings(config: Config) -> LoraSettings | None:
    lora = config.actor.lora
    if lora is None:
        return None
    return LoraSettings(lora.rank, lora.scale_by, None if lora.targets == "all-linear" else tuple(lora.targets))


def sent_adapters(config: Config) -> LoneAdapters | None:
    """Return what engines need for adapters that are sent alone; None where whole weights are sent."""
    settings = lora_settings(config)
    if settings is None or config.actor.lora is None or config.actor.lora.send == "merged":
        return None
    return LoneAdapters(absolute(config.model.path), settings)


def check_lora(config: Config, model_config: Any) -> None:
    """Raise where the model cannot have the adapters that are asked for: before anything is started."""
    settings = lora_settings(config)
    if settings is not None:
        find_targets(empty_model(model_config), settings)


def recorded_shape(config: Config) -> dict[str, str]:
    """Return the settings that must be the same for a recording to be replayed."""
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
