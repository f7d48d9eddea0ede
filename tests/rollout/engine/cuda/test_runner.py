"""The native engine with its runner for CUDA devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from practicum.errors import ResourceError, RolloutError
from practicum.models import load_model
from practicum.replay import RouteRecorder
from practicum.rollout.engines import EngineSettings, make_engine
from practicum.rollout.hf import HFRollout
from practicum.rollout.native import NativeRollout
from practicum.types import Prompt, PromptGroup, RoutedExperts, SamplingParams
from practicum.weights import WeightUpdate
from tests.models import save_family
from tests.rollout.contract import CLOSE, EngineContract, check_blocks, full_forward, run, tokens_of, written
from tests.rollout.engine.cuda.device import DEVICE, HAS_CUDA, HAS_KERNELS, emulate_cuda
from tests.rollout.test_native import odd_groups

if not HAS_KERNELS:
    pytest.skip("no CUDA device, or no Triton", allow_module_level=True)

from practicum.rollout.engine.cuda import runner as module
from practicum.rollout.engine.cuda.runner import CudaRunner

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")


def on_device(test: Any) -> Any:
    """Mark a test that the emulated device cannot run, or only in minutes."""
    return pytest.mark.gpu(pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")(test))


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_cuda(monkeypatch)


def opened(model: Path | str, **changes: Any) -> NativeRollout:
    settings = {"device": DEVICE, "dtype": torch.float32, "max_batch": 32, "cache_gb": 0.05, "runner": CudaRunner}
    engine = NativeRollout(str(model), **{**settings, **changes})
    run(engine.resume())
    return engine


def long_groups(num: int, prompt: int, new: int, **params: Any) -> list[PromptGroup]:
    random = np.random.default_rng(0)
    own = SamplingParams(new, ignore_eos=True, **params)
    ids = [random.integers(4, 18, prompt).astype(np.int32) for _ in range(num)]
    return [PromptGroup(str(i), Prompt(str(i), text="?"), one, own, i) for i, one in enumerate(ids)]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[NativeRollout]:
    engine = opened(tiny_model, max_batch=5)
    yield engine
    run(engine.close())


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
class TestContract(EngineContract):
    pass


@pytest.mark.parametrize("family", ["mistral", "qwen2_moe"])
def test_it_writes_what_the_runner_for_a_cpu_writes(family: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Even where blocks run out, and prompts are read in parts."""
    folder, has_routes = save_family(family, tmp_path), family.endswith("moe")
    theirs = opened(folder, device=torch.device("cpu"), runner=None, keep_routes=has_routes)
    asked = [*long_groups(2, 62, 5, num_answers=2), *long_groups(1, 3, 4, top_k=3)]
    expected = written(theirs, asked)
    ours = opened(folder, keep_routes=has_routes, max_batch=4)
    block = ours.model.block_bytes
    run(ours.close())
    monkeypatch.setattr(CudaRunner, "prefill_tokens", 40)
    ours = opened(folder, keep_routes=has_routes, max_batch=4, cache_gb=5.5 * block / 1e9)
    found = written(ours, [*long_groups(2, 62, 5, num_answers=2), *long_groups(1, 3, 4, top_k=3)])
    assert tokens_of(found) == tokens_of(expected)
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one.log_probs - other.log_probs).max() < 5 * CLOSE
        if has_routes:
            assert isinstance(one.routes, RoutedExperts) and isinstance(other.routes, RoutedExperts)
            assert np.array_equal(one.routes.experts[:-1], other.routes.experts[:-1])
            assert one.routes.known.tolist() == other.routes.known.tolist()
    check_blocks(ours._scheduler)
    run(ours.close())


@on_device
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_family_writes_as_generate_does(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = str(save_family(family, tmp_path))
    engine = opened(folder, dtype=dtype)
    theirs = HFRollout(folder, device=DEVICE, dtype=dtype, max_batch=32)
    run(theirs.resume())
    samples = written(engine, odd_groups(SamplingParams(20, 0.8, num_answers=3, ignore_eos=True)))
    if dtype == torch.float32:
        model = load_model(folder).eval()
        assert max(np.abs(sample.log_probs - full_forward(model, sample, 0.8)).max() for sample in samples) < 5 * CLOSE
        greedy = SamplingParams(20, temperature=0.0, ignore_eos=True)
        assert tokens_of(written(engine, odd_groups(greedy))) == tokens_of(written(theirs, odd_groups(greedy)))
    else:
        whole = [np.concatenate([sample.prompt_ids, sample.token_ids]) for sample in samples]
        both = [run(one.log_probs(whole)) for one in (engine, theirs)]
        gaps = [np.abs(a - b) for a, b in zip(*both, strict=True)]
        assert float(np.mean(np.concatenate(gaps))) < 0.1
    run(engine.close())


@on_device
def test_the_native_engine_has_this_runner_where_it_can(tiny_model: Path, tmp_path: Path, caplog: Any) -> None:
    engine: Any = make_engine(EngineSettings("native", str(tiny_model), device="cuda"))
    assert type(engine.model) is CudaRunner
    other = save_family("deepseek_v3", tmp_path)
    engine = make_engine(EngineSettings("native", str(other), device="cuda"))
    assert type(engine) is NativeRollout and type(engine.model) is not CudaRunner
    assert "cannot use its CUDA kernels" in caplog.text and "deepseek_v3" in caplog.text


@on_device
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen2_moe"])
def test_routes_are_those_that_the_model_chooses(family: str, tmp_path: Path) -> None:
    folder = save_family(family, tmp_path)
    engine = opened(folder, keep_routes=True)
    samples = written(engine, odd_groups(SamplingParams(20, num_answers=2, ignore_eos=True)))
    model = load_model(str(folder)).eval()
    recorder = RouteRecorder(model)
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.token_ids]).astype(np.int64))
        with torch.no_grad():
            model(input_ids=ids[None], use_cache=False)
        assert isinstance(sample.routes, RoutedExperts)
        assert sample.routes.known.tolist() == [True] * (len(ids) - 1) + [False]
        assert np.array_equal(sample.routes.experts[:-1], recorder.take()[:-1])
    run(engine.close())


@on_device
@pytest.mark.parametrize("keep_routes", [False, True])
def test_sequences_that_are_preempted_write_the_same(keep_routes: bool, tmp_path: Path) -> None:
    folder = save_family("qwen3_moe", tmp_path)
    roomy = opened(folder, keep_routes=keep_routes)
    block = roomy.model.block_bytes
    expected = written(roomy, long_groups(12, 40, 160))
    run(roomy.close())
    tight = opened(folder, keep_routes=keep_routes, cache_gb=10.5 * block / 1e9)
    found = written(tight, long_groups(12, 40, 160))
    assert tokens_of(found) == tokens_of(expected)
    for one, other in zip(found, expected, strict=True):
        if keep_routes:
            assert isinstance(one.routes, RoutedExperts) and isinstance(other.routes, RoutedExperts)
            assert np.array_equal(one.routes.experts, other.routes.experts)
            assert one.routes.known.tolist() == other.routes.known.tolist()
    assert tight._scheduler.num_free_blocks == tight._scheduler.num_blocks
    run(tight.close())


def test_what_the_cache_has_no_room_for_is_refused(tmp_path: Path) -> None:
    folder = save_family("llama", tmp_path)
    roomy = opened(folder)
    block = roomy.model.block_bytes
    run(roomy.close())
    engine = opened(folder, cache_gb=3.2 * block / 1e9)  # two blocks of 64 tokens, and the one for padding
    if HAS_CUDA:
        assert len(written(engine, long_groups(1, 100, 28))[0].token_ids) == 28
    with pytest.raises(RolloutError, match=r"prompt 0 and its answer .* more than rollout\.cache_gb=.*raise it"):
        written(engine, long_groups(1, 100, 29))
    run(engine.close())


@on_device
def test_prompts_of_many_lengths_and_long_ones_are_read_in_parts(tmp_path: Path, monkeypatch: Any) -> None:
    folder = save_family("mistral", tmp_path)

    def asked() -> list[PromptGroup]:
        return [*long_groups(3, 150, 20, num_answers=3), *long_groups(4, 7, 20, num_answers=2)]

    whole = opened(folder)
    expected = tokens_of(written(whole, asked()))
    run(whole.close())
    monkeypatch.setattr(CudaRunner, "prefill_tokens", 33)
    parts = opened(folder)
    assert tokens_of(written(parts, asked())) == expected
    run(parts.close())


@on_device
def test_sequences_of_different_parameters_are_in_one_batch(tmp_path: Path) -> None:
    folder = save_family("llama", tmp_path)
    ways: list[dict[str, Any]] = [
        {}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.6}, {"temperature": 1.4, "top_k": 5, "top_p": 0.9}
    ]  # fmt: skip
    engine, theirs = opened(folder), HFRollout(str(folder), device=DEVICE, dtype=torch.float32, max_batch=32)
    run(theirs.resume())
    found, expected = (
        written(one, [g for way in ways for g in long_groups(3, 9, 30, **way)]) for one in (engine, theirs)
    )
    same = [a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(found, expected, strict=True)]
    assert sum(same) >= len(same) - 1  # a number on the edge of two tokens may fall to either
    run(engine.close())


@on_device
def test_a_hundred_times_asleep_and_awake_nothing_grows_and_nothing_changes(tiny_model: Path) -> None:
    engine = opened(tiny_model, cache_gb=None)
    params = SamplingParams(20, num_answers=4)
    expected = tokens_of(written(engine, odd_groups(params)))
    run(engine.release())
    asleep = torch.cuda.mem_get_info()[0]
    for number in range(100):
        run(engine.resume())
        if number % 10 == 0:
            assert tokens_of(written(engine, odd_groups(params))) == expected
        run(engine.release())
    assert torch.cuda.mem_get_info()[0] >= asleep - (8 << 20)
    run(engine.resume())
    awake = torch.cuda.mem_get_info()[0]
    held: int = engine.model.held_bytes  # type: ignore[attr-defined]
    run(engine.release())
    assert torch.cuda.mem_get_info()[0] - awake >= 0.95 * held
    run(engine.close())


@pytest.mark.parametrize("is_whole", [True, False])
def test_weights_that_come_while_it_sleeps_are_those_it_wakes_with(tiny_model: Path, is_whole: bool) -> None:
    engine = opened(tiny_model)
    params = SamplingParams(8 if HAS_CUDA else 2, temperature=0.0)
    written(engine, odd_groups(params)[:2])
    run(engine.release())
    other = load_model(str(tiny_model)).eval()
    changed = {name: own for name, own in other.named_parameters() if is_whole or "self_attn" in name}
    with torch.no_grad():
        for parameter in changed.values():
            parameter.mul_(1.5)
    run(engine.update_weights(WeightUpdate(3, changed.items(), shared=False, is_whole=is_whole)))
    run(engine.resume())
    for _ in range(2):
        samples = written(engine, odd_groups(params)[:2])
        assert {version for sample in samples for version in sample.versions.tolist()} == {3}
        assert max(np.abs(sample.log_probs - full_forward(other, sample, 1.0)).max() for sample in samples) < CLOSE
        run(engine.release())
        run(engine.resume())
    run(engine.close())


@on_device
def test_awake_it_takes_what_memory_is_left(tiny_model: Path) -> None:
    engine = opened(tiny_model, cache_gb=None)
    expected = tokens_of(written(engine, odd_groups(SamplingParams(8))))
    num = engine.model.num_blocks
    run(engine.release())
    taken = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.8), dtype=torch.uint8, device=DEVICE)
    run(engine.resume())
    assert engine.model.num_blocks < num / 2
    assert tokens_of(written(engine, odd_groups(SamplingParams(8)))) == expected
    del taken
    run(engine.close())


def test_a_cache_too_small_for_anything_is_refused(tiny_model: Path) -> None:
    with pytest.raises((RolloutError, ResourceError), match=r"blocks of 64 tokens .*rollout\.cache_gb"):
        opened(tiny_model, cache_gb=1e-6)


def test_a_model_that_comes_out_different_is_refused_each_time(tmp_path: Path, monkeypatch: Any) -> None:
    folder = save_family("llama", tmp_path)
    monkeypatch.setitem(module.AGREES, torch.float32, 0.0)
    engine = NativeRollout(
        str(folder), device=DEVICE, dtype=torch.float32, max_batch=4, cache_gb=0.05, runner=CudaRunner
    )
    trial, filled = CudaRunner.trial, []

    def observed(self: Any) -> float:
        filled.append(self._weights.is_filled)
        return trial(self)

    monkeypatch.setattr(CudaRunner, "trial", observed)
    for _ in range(2):
        with pytest.raises(RolloutError, match="come out different"):
            run(engine.resume())
    monkeypatch.setitem(module.AGREES, torch.float32, 1e-3)
    run(engine.resume())
    assert filled == [True] * 3  # its weights were there each time
    assert engine.model.held_bytes > 0  # type: ignore[attr-defined]
    run(engine.close())


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_trial_agrees_in_every_way_of_computing(family: str, tmp_path: Path) -> None:
    engine: Any = opened(save_family(family, tmp_path))
    assert engine.model.trial() < 1e-5
    run(engine.close())
