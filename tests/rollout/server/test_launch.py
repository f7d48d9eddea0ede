from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from practicum.errors import ConfigError, ModelError
from practicum.rollout.server import ClassificationService, GenerationService, service_of
from tests.rollout.server.client import ask
from tests.rollout.server.fakes import Served
from tests.test_adapters import save_adapted

CHOICES: dict[str, Any] = {"engine": "hf", "device": "cpu", "dtype": "float32", "max_batch": 4}


def test_what_serves_is_chosen_by_the_models_config(tiny_model: Path, classifier_folder: Path) -> None:
    assert isinstance(service_of(str(classifier_folder), **CHOICES), ClassificationService)
    service = service_of(str(tiny_model), **CHOICES)
    assert isinstance(service, GenerationService)
    assert service.limit.num_tokens == 64
    assert 1e6 < service.num_weight_bytes < 4e6
    with Served(service) as server:
        for name in (str(tiny_model), tiny_model.name, "default"):
            assert ask(server.url, "/v1/completions", {"prompt": "1", "max_tokens": 1, "model": name})[0] == 200
        assert ask(server.url, "/v1/completions", {"prompt": "1", "model": "gpt"})[0] == 404


def test_adapters_are_served_with_the_model_they_belong_to(tiny_model: Path, tmp_path: Path) -> None:
    folder = save_adapted(tiny_model, tmp_path / "adapters")
    with Served(service_of(str(folder), **CHOICES)) as server:
        assert ask(server.url, "/v1/completions", {"prompt": "1", "max_tokens": 1})[0] == 200


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"engine": "fast"}, ConfigError, "unknown engine 'fast': those that serve are native, hf"),
        ({"dtype": "int4"}, ConfigError, "unknown dtype 'int4': the dtypes are float32, bfloat16"),
        ({"device": "tpu"}, ConfigError, "unknown device 'tpu': the devices are auto, cpu, cuda"),
        ({"max_batch": 0}, ConfigError, "max_batch=0"),
        ({"path": "./nowhere"}, ModelError, "model folder './nowhere' does not exist"),
    ],
)
def test_a_wrong_choice_says_what_there_is(tiny_model: Path, change: Any, error: type[Exception], message: str) -> None:
    settings = {"path": str(tiny_model)} | CHOICES | change
    with pytest.raises(error, match=message):
        service_of(**settings)
