"""Engines made by name. Each is imported only when it is asked for: what one needs, the others can do without."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

from practicum.adapters import LoneAdapters
from practicum.config import ENGINES, OpenAIConfig, RolloutConfig, VllmConfig
from practicum.errors import RolloutError
from practicum.rollout.base import BaseRollout


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
    log_dir: str | None = None
    """The folder for what servers print that the engine starts itself; None keeps it only while they run."""
    num_on_machine: int = 1
    """The engines of this sort on the machine."""
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
    name = settings.engine
    if name not in ENGINES:
        raise RolloutError(f"there is no engine {name!r}; there are {', '.join(ENGINES)}.")
    module, _, cls = ENGINES[name].cls.partition(":")
    try:
        engine: BaseRollout = getattr(importlib.import_module(module), cls).of(settings)
        return engine
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "practicum":
            raise
        extra = ENGINES[name].extra
        install = "pip install practicum" if extra is None else f"pip install 'practicum[{extra}]'"
        raise RolloutError(
            f"rollout.engine={name} needs the package {error.name!r}, which is not installed here: {install}."
        ) from error
