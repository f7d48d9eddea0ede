from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from practicum.errors import ReplayError, RolloutError
from practicum.models import load_model
from practicum.rollout.engine.cpu.kernels import load_kernels
from practicum.rollout.hf import HFRollout
from practicum.rollout.native import NativeRollout
from practicum.types import Prompt, RolloutRequest, SamplingParams
from practicum.weights import WeightUpdate
from tests.rollout.contract import CLOSE, EngineContract, full_forward, request, tokens_of
from tests.rollout.families import DENSE, MIXED, UNSUPPORTED, save_family

CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[NativeRollout]:
    engine = NativeRollout(str(tiny_model), **CPU, max_batch=5)
    engine.resume()
    yield engine
    engine.release()


class TestContract(EngineContract):
    pass


def test_shared_weights_follow_the_trainers_without_a_copy(tiny_model: Path, tokenizer: Any) -> None:
    engine = NativeRollout(str(tiny_model), **CPU, max_batch=5)
    theirs = load_model(str(tiny_model)).eval()
    engine.update_weights(WeightUpdate(1, theirs.named_parameters(), shared=True))
    engine.resume()
    for _ in range(2):
        with torch.no_grad():
            next(iter(theirs.parameters())).mul_(3.0)
        (sample,) = engine.generate([request(tokenizer, "1+2=", SamplingParams(8))])
        assert np.abs(sample.log_probs - full_forward(theirs, sample, 1.0)).max() < CLOSE


def odd_requests(params: SamplingParams) -> list[RolloutRequest]:
    random = np.random.default_rng(0)
    ids = [random.integers(1, 15, size).astype(np.int32) for size in (3, 9, 9, 17, 1, 30)]
    return [RolloutRequest(Prompt(str(i), text="?"), one, params, seed=i) for i, one in enumerate(ids)]


@pytest.fixture(params=[True, False], ids=["kernels", "no compiler"])
def has_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    if not request.param:
        monkeypatch.setenv("CC", "no-such-compiler")
    load_kernels.cache_clear()
    yield request.param
    load_kernels.cache_clear()


@pytest.mark.usefixtures("has_compiler")
@pytest.mark.parametrize("family", [*DENSE, *MIXED])
def test_every_family_writes_as_generate_does(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_LEAST_WEIGHTS", 1)  # as if they were large
    folder = str(save_family(family, tmp_path))
    engine = NativeRollout(folder, **CPU, max_batch=5, keep_routes=family in MIXED)
    theirs = HFRollout(folder, **CPU, max_batch=32)
    model = load_model(folder).eval()
    for each in (engine, theirs):
        each.resume()
    greedy = odd_requests(SamplingParams(20, temperature=0.0, ignore_eos=True))
    assert tokens_of(engine.generate(greedy)) == tokens_of(theirs.generate(greedy))
    drawn = odd_requests(SamplingParams(20, 0.8, num_answers=3, ignore_eos=True))
    samples = engine.generate(drawn)
    assert max(np.abs(sample.log_probs - full_forward(model, sample, 0.8)).max() for sample in samples) < CLOSE
    assert tokens_of(samples) == tokens_of(theirs.generate(drawn))


@pytest.mark.parametrize("family", MIXED)
def test_kept_routes_are_those_of_a_full_forward(family: str, tmp_path: Path) -> None:
    from practicum.replay import RouteRecorder

    folder = str(save_family(family, tmp_path))
    engine = NativeRollout(folder, **CPU, max_batch=4, keep_routes=True)
    engine.resume()
    model = load_model(folder).eval()
    recorder = RouteRecorder(model)
    for sample in engine.generate(odd_requests(SamplingParams(10, num_answers=2, ignore_eos=True))):
        ids = np.concatenate([sample.prompt_ids, sample.token_ids]).astype(np.int64)
        with torch.no_grad():
            model(input_ids=torch.from_numpy(ids)[None])
        expected = recorder.take()
        assert sample.routes is not None
        assert sample.routes.known.tolist() == [True] * (len(ids) - 1) + [False]
        assert sample.routes.layers.tolist() == recorder.shape.layers.tolist()
        assert np.array_equal(np.sort(sample.routes.experts[:-1]), np.sort(expected[:-1]))


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_a_family_it_cannot_run_is_refused_at_load(family: str, tmp_path: Path) -> None:
    folder = str(save_family(family, tmp_path))
    with pytest.raises(RolloutError, match=rf"does not support the model family '{family}'.*rollout\.engine=hf"):
        NativeRollout(folder, **CPU, max_batch=4)


def test_routes_of_a_dense_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="is dense"):
        NativeRollout(str(save_family("llama", tmp_path)), **CPU, max_batch=4, keep_routes=True)


def test_prompts_are_read_once_for_all_their_answers(tiny_model: Path) -> None:
    engine = NativeRollout(str(tiny_model), **CPU, max_batch=64)
    engine.resume()
    seen: list[int] = []
    engine._model.get_input_embeddings().register_forward_hook(lambda _, args, __: seen.append(args[0].numel()))
    engine.generate(odd_requests(SamplingParams(4, num_answers=8, ignore_eos=True)))
    assert seen == [3 + 9 + 9 + 17 + 1 + 30, 48, 48, 48]  # one pass over all prompts, then a token a row


def test_rows_of_answers_that_have_ended_are_taken_by_the_next(tiny_model: Path) -> None:
    engine = NativeRollout(str(tiny_model), **CPU, max_batch=4)
    engine.resume()
    seen: list[int] = []
    engine._model.get_input_embeddings().register_forward_hook(lambda _, args, __: seen.append(args[0].shape[0]))
    lengths = [1, 2, 3, 30, 5, 6, 7, 8]
    params = [SamplingParams(length, ignore_eos=True) for length in lengths]
    one = odd_requests(SamplingParams(1))[0]
    asked = [RolloutRequest(one.prompt, one.prompt_ids, own, seed) for seed, own in enumerate(params)]
    samples = engine.generate(asked)
    assert [len(sample.token_ids) for sample in samples] == lengths
    assert max(seen) == 4
    assert len([rows for rows in seen if rows > 1]) < 20  # the long one does not hold up the others


def test_memory_bounds_the_rows_and_what_can_be_asked(tiny_model: Path) -> None:
    bytes_per_token = 2 * 2 * 64 * 4  # keys and values of two layers, 64 numbers of four bytes each
    engine = NativeRollout(str(tiny_model), **CPU, max_batch=64, cache_gb=1e-9 * 256 * bytes_per_token)
    engine.resume()
    widest: list[int] = []
    engine._model.get_input_embeddings().register_forward_hook(lambda _, args, __: widest.append(args[0].shape[0]))
    assert len(engine.generate(odd_requests(SamplingParams(16, num_answers=4, ignore_eos=True)))) == 24
    assert max(widest) == 4
    assert engine._cache.num_rows * engine._cache.room <= 256
    small = NativeRollout(str(tiny_model), **CPU, max_batch=64, cache_gb=1e-9 * 40 * bytes_per_token)
    with pytest.raises(RolloutError, match=r"prompt 5 .*GB of keys and values, more than rollout\.cache_gb"):
        small.generate(odd_requests(SamplingParams(16)))


def test_releasing_gives_keys_and_values_back(tiny_model: Path) -> None:
    engine = NativeRollout(str(tiny_model), **CPU, max_batch=8)
    engine.resume()
    engine.generate(odd_requests(SamplingParams(4)))
    assert engine._cache.num_rows > 0
    engine.release()
    assert engine._cache.num_rows == 0


def test_memory_that_cannot_be_had_costs_that_request_alone(tiny_model: Path) -> None:
    engine = NativeRollout(str(tiny_model), **CPU, max_batch=8)
    engine.resume()
    asked = odd_requests(SamplingParams(4))
    expected = tokens_of(engine.generate(asked[:1]))
    empty, calls = engine._cache._empty, []

    def scarce(like: torch.Tensor) -> torch.Tensor:
        calls.append(like)
        if len(calls) == 2:
            raise MemoryError
        return empty(like)

    engine._cache._empty = scarce  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        engine.generate(odd_requests(SamplingParams(30)))
    assert tokens_of(engine.generate(asked[:1])) == expected


def test_it_leaves_nothing_behind_when_it_goes(tiny_model: Path) -> None:
    engine = NativeRollout(str(tiny_model), **CPU, max_batch=8)
    cache = weakref.ref(engine._cache)
    engine.close()
    del engine
    gc.collect()
    assert cache() is None


def test_an_answer_that_is_gone_on_with_keeps_the_routes_it_was_written_with(tmp_path: Path) -> None:
    folder = str(save_family("qwen3_moe", tmp_path))
    engine = NativeRollout(folder, **CPU, max_batch=4, keep_routes=True)
    engine.resume()
    asked = odd_requests(SamplingParams(12, ignore_eos=True))[1]
    short = RolloutRequest(asked.prompt, asked.prompt_ids, SamplingParams(6, ignore_eos=True), asked.seed)
    (begun,) = engine.generate([short])
    other = load_model(folder).requires_grad_(False)
    for parameter in other.parameters():
        parameter.mul_(1.7).add_(0.05)
    engine.update_weights(WeightUpdate(1, other.named_parameters(), shared=False))
    (whole,) = engine.generate([asked.going_on(0, begun)])
    assert begun.routes is not None and whole.routes is not None
    num = begun.num_tokens - 1
    assert np.array_equal(whole.routes.experts[:num], begun.routes.experts[:num])
    assert whole.routes.known.tolist() == [True] * (whole.num_tokens - 1) + [False]


def test_a_failing_step_leaves_the_engine_usable(tiny_model: Path) -> None:
    engine = NativeRollout(str(tiny_model), **CPU, max_batch=8)
    engine.resume()
    asked = odd_requests(SamplingParams(4))
    expected = tokens_of(engine.generate(asked))
    hook = engine._model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate(asked)
    hook.remove()
    assert tokens_of(engine.generate(asked)) == expected
