"""Services from a model's folder: a classifier if its config names one, else an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from practicum.config import ENGINES
from practicum.errors import ConfigError
from practicum.models import DTYPES, absolute, load_any_config, load_config, load_tokenizer, resolve_device
from practicum.rollout.engines import EngineSettings, make_engine
from practicum.rollout.server.classification import ClassificationService, Classifier
from practicum.rollout.server.encoder import Limit
from practicum.rollout.server.generation import GenerationService
from practicum.rollout.server.service import Service

_DEVICES = ("auto", "cpu", "cuda")
_BATCH_TOKENS = 16_384


def service_of(path: str, *, engine: str, device: str, dtype: str, max_batch: int) -> Service:
    """Return the service of `practicum serve`, asleep where it generates. Requests may call it by its path, the last
    part of that, or `default`."""
    serving = [name for name, own in ENGINES.items() if own.serves]
    if engine not in serving:
        raise ConfigError(f"unknown engine {engine!r}: those that serve are {', '.join(serving)}.")
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}: the dtypes are {', '.join(DTYPES)}.")
    if device not in _DEVICES:
        raise ConfigError(f"unknown device {device!r}: the devices are {', '.join(_DEVICES)}.")
    if max_batch < 1:
        raise ConfigError(f"max_batch={max_batch}, but at least one answer must be written at a time.")
    names = frozenset({path, absolute(path), PurePath(path).name, "default"})
    architectures = load_any_config(path).architectures or []
    if architectures and all(name.endswith("ForSequenceClassification") for name in architectures):
        return classification_service(path, device=device, dtype=dtype, max_batch_tokens=_BATCH_TOKENS, names=names)
    settings = EngineSettings(engine, path, device=device, dtype=dtype, max_batch=max_batch)
    return generation_service(settings, names=names)


def classification_service(
    path: str, *, device: str, dtype: str, max_batch_tokens: int, names: frozenset[str] | None = None
) -> ClassificationService:
    classifier = Classifier(path, device=resolve_device(device), dtype=DTYPES[dtype], max_batch_tokens=max_batch_tokens)
    return ClassificationService(path, classifier, max_batch_tokens, names)


def generation_service(
    settings: EngineSettings, *, limits: Sequence[Limit] = (), names: frozenset[str] | None = None
) -> GenerationService:
    path = settings.model_path
    return GenerationService(
        path,
        make_engine(settings),
        model_config=load_config(path),
        tokenizer=load_tokenizer(path),  # another than the engine's: prompts are encoded while it writes
        dtype=DTYPES[settings.dtype],
        limits=limits,
        names=names,
        reader=f"engine {settings.engine}",
    )
