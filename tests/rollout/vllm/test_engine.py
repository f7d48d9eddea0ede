"""The engine `vllm`. What needs vLLM itself runs where PRACTICUM_VLLM_PYTHON names a Python that has it."""

from __future__ import annotations

import base64
import io
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest
import torch

from practicum.adapters import LoneAdapters, LoraSettings
from practicum.config import RolloutConfig
from practicum.controller import Controller
from practicum.errors import ReplayError, RolloutError
from practicum.replay import RouterShape
from practicum.rollout.engines import EngineSettings
from practicum.rollout.vllm.engine import VllmRollout, arguments, decode_routes
from practicum.types import SamplingParams
from tests.rollout.asking import run, written
from tests.rollout.vllm.checks import (
    VllmChecks,
    VllmContract,
    ask,
    check_adapters,
    check_routes,
    gap,
    reload_as_vllm_does,
    save_model,
    started,
)
from tests.test_adapters import save, save_adapted, stirred

PYTHON = os.environ.get("PRACTICUM_VLLM_PYTHON")
needs_vllm = pytest.mark.skipif(PYTHON is None, reason="PRACTICUM_VLLM_PYTHON names no Python with vLLM")


def test_options_are_written_as_on_the_command_line() -> None:
    settings = {"max_model_len": 64, "enforce_eager": True, "async_scheduling": False, "seed": None}
    assert arguments(settings) == ["--max-model-len", "64", "--enforce-eager", "--no-async-scheduling"]
    nested = {"compilation_config": {"level": 0}, "served_model_name": ["a", "b"]}
    assert arguments(nested) == ["--compilation-config", '{"level": 0}', "--served-model-name", "a", "b"]


ROUTERS = RouterShape(np.array([0, 2], np.int32), 24, 2)


def packed(rows: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, rows)
    return base64.b64encode(file.getvalue()).decode()


def test_routes_are_those_of_the_layers_that_route_and_the_last_token_has_none() -> None:
    rows = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)
    routes = decode_routes(packed(rows), ROUTERS, 5)
    assert routes.experts.shape == (5, 2, 2) and routes.experts.dtype == np.uint8
    assert routes.known.tolist() == [True] * 4 + [False]
    assert np.array_equal(routes.experts[:4], rows[:, [0, 2]])
    with pytest.raises(RolloutError, match="for 7 tokens"):
        decode_routes(packed(rows), ROUTERS, 7)
    with pytest.raises(RolloutError, match="shape"):
        decode_routes(packed(rows), RouterShape(np.array([0, 3], np.int32), 8, 2), 5)


def test_a_python_without_vllm_says_how_to_get_it(tiny_model: Path) -> None:
    for python in ("/not/there/python", sys.executable):
        with pytest.raises(RolloutError, match=r"rollout\.vllm\.python=.*pip install 'practicum\[vllm\]'"):
            VllmRollout(str(tiny_model), python=python)


def fake_vllm(folder: Path, program: str) -> str:
    """A Python that has a module vllm, which runs this program for a server."""
    package = folder / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for level in (package, package.parent, package.parent.parent):
        (level / "__init__.py").touch()
    (package / "api_server.py").write_text(program)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_a_server_that_does_not_start_is_an_error_with_its_last_output(tiny_model: Path, tmp_path: Path) -> None:
    python = fake_vllm(tmp_path, "raise SystemExit('there is no such option')")
    with pytest.raises(RolloutError, match=r"exit code 1 before it was ready.*(?s:.*)there is no such option"):
        VllmRollout(str(tiny_model), python=python)


def test_a_server_that_is_never_ready_is_ended_at_its_deadline(tiny_model: Path, tmp_path: Path) -> None:
    tell = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    python = fake_vllm(tmp_path, f"import os, time; {tell}; print('loading', flush=True); time.sleep(600)")
    with pytest.raises(RolloutError, match=r"not ready within 4 s(?s:.*)loading"):
        VllmRollout(str(tiny_model), python=python, start_timeout_s=4)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


GIB = 2**30
TELL = "import os, sys; raise SystemExit(f\"{os.environ.get('VLLM_CPU_KVCACHE_SPACE')} GiB; {' '.join(sys.argv)}\")"


def test_on_cpus_it_takes_a_third_of_what_is_free_beside_the_others(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("practicum.rollout.vllm.engine.free_bytes", lambda device: 61 * GIB)
    python = fake_vllm(tmp_path, TELL)

    def told(**settings: Any) -> str:
        with pytest.raises(RolloutError) as caught:
            VllmRollout(str(tiny_model), python=python, **settings)
        return str(caught.value)

    assert "\n20 GiB" in told()
    assert "\n10 GiB" in told(num_on_machine=2)
    assert "\n1 GiB" in told(num_on_machine=100)
    assert "\n5 GiB" in told(cache_gb=5.0)
    for option in ({"gpu_memory_utilization": 0.5}, {"kv_cache_memory_bytes": GIB}):
        assert "\nNone GiB" in told(options=option)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    assert "\n7 GiB" in told()


def test_on_a_card_it_asks_for_no_more_than_is_free(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("practicum.rollout.vllm.engine._card_bytes", lambda python: (30 * GIB, 100 * GIB))
    python = fake_vllm(tmp_path, TELL)

    def told(**settings: Any) -> str:
        with pytest.raises(RolloutError) as caught:
            VllmRollout(str(tiny_model), python=python, device=torch.device("cuda"), **settings)
        return str(caught.value)

    own = told()
    cache = re.search(r"--kv-cache-memory-bytes (\d+)", own)
    assert cache is not None and 9.9 * GIB < int(cache[1]) < 10 * GIB
    assert "--gpu-memory-utilization 0.27" in own
    explicit = told(cache_gb=2.0, options={"gpu_memory_utilization": 0.1})
    assert "--kv-cache-memory-bytes 2000000000" in explicit and "--gpu-memory-utilization 0.1" in explicit
    assert "--kv-cache-memory-bytes" not in told(options={"gpu_memory_utilization": 0.5})
    monkeypatch.setattr("practicum.rollout.vllm.engine._card_bytes", lambda python: None)
    assert "--gpu-memory-utilization" not in told()


def test_the_first_error_is_shown_and_all_that_it_printed_is_kept(tiny_model: Path, tmp_path: Path) -> None:
    program = """
print("(EngineCore pid=7) ERROR 11-20 00:52:07 [core.py:700] EngineCore failed to start.")
print("(EngineCore pid=7) ERROR 11-20 00:52:07 [core.py:701] ValueError: Available memory is less than desired.")
for number in range(3000):
    print(f"(APIServer pid=1) line {number} of what follows")
raise RuntimeError("Engine core initialization failed. See root cause above.")
"""
    python, logs = fake_vllm(tmp_path, program), tmp_path / "run" / "logs"
    with pytest.raises(RolloutError, match=r"exit code 1 before it was ready") as caught:
        VllmRollout(str(tiny_model), python=python, log_dir=str(logs))
    (log,) = logs.iterdir()
    message = str(caught.value)
    assert f"is in {log}." in message
    assert "failed to start.\n" in message and "ValueError: Available memory is less than desired.\n" in message
    assert "line 2999 of what follows" in message and "line 1500 " not in message
    assert "line 1500 of what follows" in log.read_text()


def test_adapters_are_merged_for_it(tiny_model: Path, tmp_path: Path) -> None:
    folder = save_adapted(tiny_model, tmp_path / "adapters")
    python = fake_vllm(tmp_path, "import os, sys; raise SystemExit(sorted(os.listdir(sys.argv[2])))")
    with pytest.raises(RolloutError, match=r"before it was ready.*(?s:.*)'config.json'.*'model.safetensors'"):
        VllmRollout(str(folder), python=python)


def test_it_has_room_for_adapters(tiny_model: Path, tmp_path: Path) -> None:
    python = fake_vllm(tmp_path, "import sys; raise SystemExit(' '.join(sys.argv))")
    for rank, room in ((4, 8), (16, 16), (300, 320)):
        with pytest.raises(RolloutError, match=rf"--enable-lora --max-loras 1 --max-lora-rank {room}"):
            VllmRollout(str(tiny_model), python=python, adapters=LoneAdapters(str(tiny_model), LoraSettings(rank, 8)))


def test_routes_of_a_model_that_does_not_route_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    python = fake_vllm(tmp_path, "")
    folder = save_model(tmp_path, "llama")
    with pytest.raises(ReplayError, match="is dense"):
        VllmRollout(str(folder), python=python, keep_routes=True)


# With vLLM itself


@needs_vllm
@pytest.mark.slow
class TestContract(VllmContract):
    where: ClassVar = {"python": PYTHON}


@needs_vllm
@pytest.mark.slow
class TestFamilies(VllmChecks):
    where: ClassVar = {"python": PYTHON}


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_routed_experts_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # On the CPU only vLLM's second model runner knows them, whose kernels Triton must interpret there. vLLM would not
    # have a Triton without a compiler for CPUs, though to interpret takes none.
    (tmp_path / "sitecustomize.py").write_text(
        "from triton.backends import backends\nbackends['cpu'] = backends['nvidia']\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    check_routes(save_model(tmp_path, "qwen3_moe"), python=PYTHON)


@needs_vllm
@pytest.mark.slow
def test_adapters_alone_are_computed_with(tmp_path: Path) -> None:
    check_adapters(save_model(tmp_path, "llama"), tmp_path / "adapters", python=PYTHON)


@needs_vllm
@pytest.mark.slow
def test_a_run_goes_on_with_adapters_that_are_merged_for_it(tmp_path: Path) -> None:
    path = save_model(tmp_path, "qwen3_moe")
    learner = stirred(path)
    engine = started(save(learner, path, tmp_path / "adapters"), python=PYTHON)
    try:
        assert gap(engine, learner) < 5e-5
    finally:
        run(engine.close())


@needs_vllm
@pytest.mark.slow
def test_a_server_that_is_killed_is_an_error_that_says_so(tmp_path: Path) -> None:
    engine = started(save_model(tmp_path, "llama"), python=PYTHON)
    assert engine._server is not None
    below = psutil.Process(engine._server._supervisor.pid).children(recursive=True)
    for process in below:
        process.send_signal(signal.SIGKILL)
    with pytest.raises(RolloutError, match=r"vLLM has ended|server http"):
        written(engine, ask(SamplingParams(4)))
    run(engine.close())


class VllmsOwnReload(VllmRollout):
    async def _load_model(self, folder: str) -> None:
        await reload_as_vllm_does(self, folder)


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_replica_whose_new_weights_are_wrong_never_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_model(tmp_path, "qwen3_moe")

    def make(settings: EngineSettings) -> VllmRollout:
        options = {"enforce_eager": True}
        return VllmsOwnReload(settings.model_path, python=PYTHON, options=options, cache_gb=1, start_timeout_s=280)

    monkeypatch.setattr(VllmRollout, "of", make)
    config = RolloutConfig(engine="vllm", placement="standalone")
    settings = EngineSettings("vllm", str(path), device="cpu")

    async def work() -> None:
        from practicum.rollout.placement import open_replicas
        from tests.rollout.replicas import ModelWeights

        controller = Controller(None, 300.0, 300.0)
        async with open_replicas(config, controller, settings, ModelWeights(path)) as manager:
            with pytest.raises(RolloutError, match=r"no replica can write.*is not the model that the trainer has"):
                await manager.update_weights(1)

    run(work())
