"""The engines by name. Each is imported only when it is asked for: what one needs, the others can do without."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from practicum.adapters import LoneAdapters
from practicum.config import OpenAIConfig, RolloutConfig, VllmConfig
from practicum.errors import RolloutError
from practicum.models import DTYPES, load_config, resolve_device
from practicum.rollout.base import BaseRollout

log = logging.getLogger("practicum.rollout")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of all engines; each takes those that it has a use for. The config says what they mean."""

    engine: str
    model_path: str
    device: str = "auto"
    dtype: str = "float32"
    max_batch: int = 512
    max_batch_tokens: int | None = None  # of hf: fewer answers at a time where they are long
    cache_gb: float | None = None
    keep_routes: bool = False
    adapters: LoneAdapters | None = None  # new weights are adapters alone
    stays_loaded: bool = False  # of native and hf on CPUs
    vllm: VllmConfig = field(default_factory=VllmConfig)
    openai: OpenAIConfig = field(default_factory=OpenAIConfig)
    router: str | None = None
    """The address of a router in front of `openai.servers`."""
    router_token: str | None = field(default=None, repr=False)
    """The token of its control plane."""
    exchange_dir: str | None = None
    """A folder through which servers get new weights; None takes one for temporary files."""
    timeout_s: float = 300.0
    """The time for one request to a server."""
    start_timeout_s: float = 900.0
    """The time for the start of a server that the engine starts itself."""

    @classmethod
    def of(cls, config: RolloutConfig, model_path: str, **more: Any) -> EngineSettings:
        """Return the settings of a section of the config; `more` are fields that it does not have."""
        return cls(
            engine=config.engine,
            model_path=model_path,
            max_batch=config.max_batch,
            cache_gb=config.cache_gb,
            vllm=config.vllm,
            openai=config.openai,
            **more,
        )


def make_engine(settings: EngineSettings) -> BaseRollout:
    """Return an engine, asleep. Raise `RolloutError` where it is not known, or what it needs is not installed."""
    if settings.engine not in ENGINES:
        raise RolloutError(f"there is no engine {settings.engine!r}; there are {', '.join(ENGINES)}.")
    try:
        return ENGINES[settings.engine](settings)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "practicum":
            raise
        extra = f"pip install 'practicum[{settings.engine}]'" if settings.engine in _EXTRAS else "pip install practicum"
        raise RolloutError(
            f"rollout.engine={settings.engine} needs the package {error.name!r}, which is not installed here: {extra}."
        ) from error


def _native(settings: EngineSettings) -> BaseRollout:
    from practicum.rollout.native import NativeRollout

    device = resolve_device(settings.device)
    runner: Any = None
    if device.type == "cuda":
        from practicum.rollout.engine.cuda import unavailable_reason

        if reason := unavailable_reason(load_config(settings.model_path)):
            slow = "rollout.engine=native cannot use its CUDA kernels on %s and is several times slower: %s"
            log.warning(slow, device, reason)
        else:
            from practicum.rollout.engine.cuda.runner import CudaRunner

            runner = CudaRunner
    return NativeRollout(
        settings.model_path,
        device=device,
        dtype=DTYPES[settings.dtype],
        max_batch=settings.max_batch,
        cache_gb=settings.cache_gb,
        keep_routes=settings.keep_routes,
        stays_loaded=settings.stays_loaded,
        runner=runner,
    )


def _hf(settings: EngineSettings) -> BaseRollout:
    from practicum.rollout.hf import HFRollout

    return HFRollout(
        settings.model_path,
        device=resolve_device(settings.device),
        dtype=DTYPES[settings.dtype],
        max_batch=settings.max_batch,
        max_batch_tokens=settings.max_batch_tokens,
        stays_loaded=settings.stays_loaded,
    )


def _vllm(settings: EngineSettings) -> BaseRollout:
    from practicum.rollout.vllm.engine import VllmRollout

    return VllmRollout(
        settings.model_path,
        python=settings.vllm.python,
        in_process=settings.vllm.in_process,
        options=settings.vllm.options,
        device=resolve_device(settings.device),
        dtype=DTYPES[settings.dtype],
        tensor_parallel=settings.vllm.tensor_parallel,
        max_batch=settings.max_batch,
        cache_gb=settings.cache_gb,
        keep_routes=settings.keep_routes,
        adapters=settings.adapters,
        timeout_s=settings.timeout_s,
        start_timeout_s=settings.start_timeout_s,
        exchange_dir=settings.exchange_dir,
    )


def _openai(settings: EngineSettings) -> BaseRollout:
    from practicum.rollout.openai import OpenAIRollout

    return OpenAIRollout(
        settings.openai.servers,
        model_path=settings.model_path,
        model=settings.openai.model,
        api_key_env=settings.openai.api_key_env,
        router=settings.router,
        router_token=settings.router_token,
        max_batch=settings.max_batch,
        adapters=settings.adapters,
        timeout_s=settings.timeout_s,
        exchange_dir=settings.exchange_dir,
    )


ENGINES: dict[str, Callable[[EngineSettings], BaseRollout]] = {
    "native": _native,
    "hf": _hf,
    "vllm": _vllm,
    "openai": _openai,
}
_EXTRAS = ("vllm",)  # engines whose packages do not come with practicum itself
