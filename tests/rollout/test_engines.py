from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import practicum.rollout
from practicum.config import ENGINES, Engine, RolloutConfig
from practicum.controller.loop import run_sync
from practicum.errors import PracticumError, RolloutError
from practicum.rollout.engines import EngineSettings, make_engine
from practicum.rollout.hf import HFRollout
from practicum.rollout.native import NativeRollout
from practicum.rollout.placement import window
from practicum.rollout.server import service_of
from practicum.types import Prompt, PromptGroup, SamplingParams
from tests.rollout.contract import run


def test_engines_are_made_by_name(tiny_model: Path) -> None:
    for name, kind in {"hf": HFRollout, "native": NativeRollout}.items():
        assert type(make_engine(EngineSettings(name, str(tiny_model), device="cpu"))) is kind


def test_an_unknown_engine_is_told_the_known_ones(tiny_model: Path) -> None:
    with pytest.raises(RolloutError, match=r"no engine 'hff'; there are native, hf, vllm, openai"):
        make_engine(EngineSettings("hff", str(tiny_model)))


class Own(HFRollout):
    """As one would write it in a file of its own."""


def test_a_new_engine_is_its_class_and_an_entry(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "own", Engine(f"{__name__}:Own", serves=True, waiting_share=0.5))
    assert type(make_engine(EngineSettings("own", str(tiny_model), device="cpu"))) is Own
    assert window(RolloutConfig.model_construct(engine="own", max_batch=8)) == 12
    service_of(str(tiny_model), engine="own", device="cpu", dtype="float32", max_batch=4)


class Missing:
    @staticmethod
    def of(settings: EngineSettings) -> Any:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm.engine")


def test_a_package_that_is_missing_is_named_with_what_brings_it(tiny_model: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(ENGINES, "vllm", replace(ENGINES["vllm"], cls=f"{__name__}:Missing"))
    with pytest.raises(RolloutError, match=r"rollout.engine=vllm needs the package 'vllm.engine'.*practicum\[vllm\]"):
        make_engine(EngineSettings("vllm", str(tiny_model)))


@pytest.mark.skipif("vllm" in sys.modules, reason="vLLM is here")
def test_vllm_says_what_to_install_where_it_is_not(tiny_model: Path) -> None:
    with pytest.raises(PracticumError, match="vllm"):
        make_engine(EngineSettings("vllm", str(tiny_model), device="cpu"))


def test_an_openai_server_that_is_not_there_is_an_error_with_its_address(tiny_model: Path) -> None:
    config = RolloutConfig.model_validate(
        {"engine": "openai", "placement": "standalone", "openai": {"servers": ["http://127.0.0.1:9"]}}
    )
    engine = make_engine(EngineSettings.of(config, str(tiny_model), device="cpu", timeout_s=2.0))
    with pytest.raises(RolloutError, match=r"http://127\.0\.0\.1:9"):
        run(engine.resume())
    run(engine.close())


def test_settings_are_those_of_the_section(tiny_model: Path) -> None:
    config = RolloutConfig(engine="native", max_batch=7, cache_gb=0.5)
    settings = EngineSettings.of(config, "there", dtype="bfloat16")
    assert (settings.engine, settings.max_batch, settings.cache_gb) == ("native", 7, 0.5)
    assert (settings.model_path, settings.dtype) == ("there", "bfloat16")


def test_the_package_gives_every_name_it_exports() -> None:
    assert {getattr(practicum.rollout, name).__name__ for name in practicum.rollout.__all__} >= {
        "BaseRollout", "HFRollout", "NativeRollout", "VllmRollout", "OpenAIRollout",
        "RolloutReplica", "RolloutManager", "RolloutWorker", "check_tokenizer",
    }  # fmt: skip
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        practicum.rollout.nothing  # noqa: B018


def test_importing_the_package_imports_no_torch() -> None:
    check = "import sys, practicum.rollout; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_the_packages_example(tiny_model: Path) -> None:
    engine = practicum.rollout.NativeRollout(
        str(tiny_model), device=torch.device("cpu"), dtype=torch.float32, max_batch=64
    )
    run_sync(engine.resume())
    ids = np.array([5, 9, 2], np.int32)
    group = PromptGroup("q1", Prompt("q1", text="1"), ids, SamplingParams(6, num_answers=8), seed=1)
    assert engine.generate_all([group]) == [group] and group.is_finished
    assert [len(trajectory.samples) for trajectory in group.trajectories] == [1] * 8
    run_sync(engine.close())
