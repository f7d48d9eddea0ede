"""A config explained without starting anything: placement, batch algebra, memory."""

from __future__ import annotations

import math
from typing import Any

from practicum.adapters import count_learnt, find_targets
from practicum.config import Config
from practicum.loop.placement import rollout_problems
from practicum.loop.settings import lora_settings, reference_path, sent_adapters
from practicum.loop.trainer import Trainer
from practicum.models import count_weights, empty_model, load_config, num_cores, resolve_device
from practicum.replay import router_shape

_GIB = 2**30
_FLOAT32 = 4


def explanation(config: Config) -> str:
    """Return the resolved config and what follows from it, as text. Model, data and reward are looked up and checked;
    what would keep the run from starting comes last, where a terminal shows it."""
    trainer = Trainer(config, checks_rollout=False)
    problems = rollout_problems(config)
    sections = [
        ("config", config.to_yaml().rstrip()),
        ("placement", _placement(config)),
        ("reward", str(trainer.rubric)),
        *([("adapters", _adapters(config))] if config.actor.lora is not None else []),
        *([("router replay", _replay(config))] if config.actor.router_replay.mode != "disabled" else []),
        *([("overlap", _overlap(config))] if config.trainer.staleness else []),
        ("batch algebra", config.batch_algebra().replace("; ", "\n")),
        ("memory per worker (estimate)", _memory(config)),
        *([("this cannot start", "\n".join(problems))] if problems else []),
    ]
    return "\n\n".join(f"# {title}\n{text}" for title, text in sections)


def _placement(config: Config) -> str:
    if config.controller.backend == "local":
        how = "with the actor's weights" if config.rollout.placement == "hybrid" else "with weights of its own"
        rollout = f"rollout ({config.rollout.placement}, {config.rollout.engine}, {how})"
        return f"this process: {' + '.join([*_fused(config), rollout])}, graders; no Ray, for a debugger"
    workers, device = config.trainer.num_workers, resolve_device(config.trainer.device).type
    where = f"joined at {config.controller.address}" if config.controller.address else "started on this machine"
    threads = config.trainer.threads_per_worker or max(1, num_cores() // workers)
    return "\n".join(
        [
            f"Ray: {where}; one pool of {workers} process place{'s' if workers > 1 else ''}, each with 1 CPU"
            + (" and 1 GPU" if device == "cuda" else ""),
            f"learners: {workers} x {_learner(config)}, {device}, {threads} thread(s) each",
            *_apart(config),
            *_rollout(config, device),
            f"graders:  {workers} x reward worker, in the same pool, CPU",
            *_models(config),
        ]
    )


def _learner(config: Config) -> str:
    roles = [*_fused(config), *(["rollout"] if config.rollout.placement == "hybrid" else [])]
    return f"({' + '.join(roles)} fused in one process)" if len(roles) > 1 else roles[0]


def _beside_actors(config: Config) -> dict[str, str]:
    """Return the placement of the critic and the reference, as far as there are any."""
    critics = {"critic": config.critic.placement} if config.algorithm.needs_critic else {}
    references = {"reference": config.algorithm.kl.placement} if reference_path(config) is not None else {}
    return {**critics, **references}


def _fused(config: Config) -> list[str]:
    return ["actor", *(role for role, placement in _beside_actors(config).items() if placement == "hybrid")]


def _apart(config: Config) -> list[str]:
    where = {"colocated": "in the same pool, in processes of their own", "standalone": "on places of their own"}
    num = config.trainer.num_workers
    return [
        f"{f'{role}s:':9} {num} x {role}, {where[at]}" for role, at in _beside_actors(config).items() if at != "hybrid"
    ]


def _rollout(config: Config, device: str) -> list[str]:
    rollout = config.rollout
    if rollout.placement == "hybrid":
        return [f"rollout:  in the learners' processes, with their weights: one {rollout.engine} engine in each"]
    if rollout.engine == "openai":
        router = "; a router in front" if len(rollout.openai.servers) > 1 else ""
        return [
            f"rollout:  servers at {', '.join(rollout.openai.servers)}, asked by one process beside the pool{router}"
        ]
    num = str(rollout.replicas)
    if rollout.replicas == "auto":
        num = str(config.trainer.num_workers)
        if rollout.placement == "standalone":
            num = "as many as GPUs are free" if device == "cuda" else "1"
    each = f", {rollout.vllm.tensor_parallel} GPUs each" if rollout.vllm.tensor_parallel > 1 else ""
    where = "in the same pool, asleep while the learners learn"
    if rollout.placement == "standalone":
        where = "on places of their own beside the pool"
    return [f"rollout:  {num} x {rollout.engine} engine{each}, {where}; weights come by a channel"]


def _overlap(config: Config) -> str:
    k, kind, placement = config.trainer.staleness, config.algorithm.correction.kind, config.rollout.placement
    turns = f"{placement} rollout takes turns with the learners, and grading goes on meanwhile"
    how = "rollout, grading and learning go on at once" if placement == "standalone" else turns
    return (
        f"the batches of {k} later step{'s' if k > 1 else ''} are made while a step learns: {how}\n"
        f"no token is staler than {k} update{'s' if k > 1 else ''}; importance weights are {kind}"
    )


def _models(config: Config) -> list[str]:
    model = config.reward.model
    if model is None:
        return []
    where = "in the same pool, asleep but for scoring" if model.placement == "colocated" else "on places of their own"
    return [f"models:   {model.replicas} replicas of {model.path}, {where}; a router in front"]


def _replay(config: Config) -> str:
    shape = router_shape(empty_model(load_config(config.model.path)))
    mode, num_layers = config.actor.router_replay.mode, len(shape.layers)
    size = math.log2(math.comb(shape.num_experts, shape.k)) * num_layers / 8
    most = config.samples_per_step * config.max_sequence_tokens * size
    sources = {"R2": "the trainer's own, of its old log-probs", "R3": f"those of the {config.rollout.engine} engine"}
    source = f"the recording {config.actor.router_replay.replay_file}"
    return "\n".join(
        [
            f"{mode}: {source if config.actor.router_replay.replay_file else sources[mode]}; {shape.k} of "
            f"{shape.num_experts} experts in {num_layers} layers",
            f"about {size:.1f} bytes a token, at most {most / 1e6:,.1f} MB a step"
            + (f", recorded in {config.record_file}" if config.record_file else ""),
            *(["the engine's choices are compared with them"] if mode == "R2" and config.captures_routes else []),
        ]
    )


def _adapters(config: Config) -> str:
    settings = lora_settings(config)
    assert settings is not None
    hf = load_config(config.model.path)
    model, num_parameters = empty_model(hf), count_parameters(hf)
    targets, num_learnt = find_targets(model, settings), count_learnt(model, settings)
    names = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in targets))
    return "\n".join(
        [
            f"LoRA of rank {settings.rank}, scaled by {settings.alpha / settings.rank:g}, on {len(targets)} linear "
            f"layers: {names}",
            f"{num_learnt:,} parameters are learnt ({num_learnt / num_parameters:.2%} of the model's "
            f"{num_parameters:,}, which stay as they are)",
            "engines get whole weights, with adapters merged"
            if sent_adapters(config) is None
            else f"engines get the adapters alone: {num_learnt * _FLOAT32 / 1e6:,.3g} MB a version",
        ]
    )


def _learnt_memory(config: Config, num_parameters: int) -> dict[str, float]:
    """Return the bytes of the actor's weights, gradients and optimizer, and of the reference, by name."""
    workers, settings = config.trainer.num_workers, lora_settings(config)
    has_reference = reference_path(config) is not None and config.algorithm.kl.placement != "standalone"
    frozen = {f"reference, frozen ({num_parameters:,} parameters / {workers})": 4 * num_parameters / workers}
    if settings is None:
        whole = f"master weights, gradients, AdamW ({num_parameters:,} parameters / {workers})"
        return {whole: 16 * num_parameters / workers, **(frozen if has_reference else {})}
    num_learnt = count_learnt(empty_model(load_config(config.model.path)), settings)
    within = ", the reference too" if config.algorithm.kl.coefficient > 0 and reference_path(config) is None else ""
    return {
        f"weights, frozen{within} ({num_parameters:,} parameters / {workers})": 4 * num_parameters / workers,
        f"adapters, gradients, AdamW ({num_learnt:,} parameters / {workers})": 16 * num_learnt / workers,
        **(frozen if has_reference else {}),
    }


def _memory(config: Config) -> str:
    """Return an estimate: weights, optimizer and caches exactly, activations by the usual count of saved tensors per
    layer."""
    hf = load_config(config.model.path)
    text: Any = hf.get_text_config()
    num_parameters = count_parameters(hf)
    workers = config.trainer.num_workers
    compute_bytes = 2 if config.model.dtype == "bfloat16" else _FLOAT32
    is_hybrid = config.rollout.placement == "hybrid"
    shared = is_hybrid and workers == 1 and config.model.dtype == "float32" and config.actor.lora is None
    engines = workers if is_hybrid or config.rollout.replicas == "auto" else config.rollout.replicas
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    at_once = min(config.rollout.max_batch, -(-config.samples_per_step // engines))
    micro = min(config.actor.micro_batch_tokens, config.samples_per_step * config.max_sequence_tokens)
    learnt = micro * config.rollout.max_new_tokens // config.max_sequence_tokens
    more = {}
    if config.algorithm.needs_critic and config.critic.placement != "standalone":
        more[f"critic, its gradients, AdamW (about {num_parameters:,} parameters / {workers})"] = (
            16 * num_parameters / workers
        )
    layers_kept = 1 if config.actor.gradient_checkpointing else text.num_hidden_layers
    parts = {
        **_learnt_memory(config, num_parameters),
        **more,
        "rollout's copy of the weights" + (" (shared with the actor)" if shared else ""): (
            0 if shared else num_parameters * compute_bytes
        ),
        f"rollout's key-value cache ({at_once} x {config.max_sequence_tokens} tokens)": (
            2 * at_once * config.max_sequence_tokens * text.num_hidden_layers * kv_heads * head_dim * compute_bytes
        ),
        f"activations ({micro:,} tokens a micro-batch)": micro * layers_kept * text.hidden_size * 16 * compute_bytes,
        f"logits ({learnt:,} learnt tokens x {text.vocab_size:,} of the vocabulary)": 4
        * learnt
        * text.vocab_size
        * _FLOAT32,
    }
    rows = [f"{size / _GIB:9.3f} GiB  {name}" for name, size in parts.items()]
    return "\n".join([*rows, f"{sum(parts.values()) / _GIB:9.3f} GiB  in all, if everything peaked at once"])


def count_parameters(hf_config: Any) -> int:
    """Return the number of parameters of the model that a transformers config describes; allocates nothing."""
    return count_weights(hf_config, classifier=False)
