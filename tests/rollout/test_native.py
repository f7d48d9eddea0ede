from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from practicum.errors import ReplayError, RolloutError
from practicum.models import load_model
from practicum.rollout.engine.cpu import modules
from practicum.rollout.engine.cpu.kernels import load_kernels
from practicum.rollout.engine.cpu.runner import CpuRunner
from practicum.rollout.engine.kv_cache import KVCache
from practicum.rollout.hf import HFRollout
from practicum.rollout.native import NativeRollout
from practicum.types import Prompt, PromptGroup, Sample, SamplingParams
from practicum.weights import WeightUpdate
from tests.models import DENSE, MIXED, UNSUPPORTED, save_family
from tests.rollout.contract import CLOSE, EngineContract, full_forward, group_of, run, sequences_of, tokens_of, written

CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[NativeRollout]:
    engine = NativeRollout(str(tiny_model), **CPU, max_batch=5)
    run(engine.resume())
    yield engine
    run(engine.close())


class TestContract(EngineContract):
    pass


def test_shared_weights_follow_the_trainers_without_a_copy(tiny_model: Path, tokenizer: Any) -> None:
    engine = NativeRollout(str(tiny_model), **CPU, max_batch=5)
    theirs = load_model(str(tiny_model)).eval()
    run(engine.update_weights(WeightUpdate(1, theirs.named_parameters(), shared=True)))
    run(engine.resume())
    for _ in range(2):
        with torch.no_grad():
            next(iter(theirs.parameters())).mul_(3.0)
        (sample,) = written(engine, [group_of(tokenizer, "1+2=", SamplingParams(8))])
        assert np.abs(sample.log_probs - full_forward(theirs, sample, 1.0)).max() < CLOSE


def cache_of(engine: NativeRollout) -> KVCache:
    assert isinstance(engine.model, CpuRunner)
    return engine.model._cache


def odd_groups(params: SamplingParams) -> list[PromptGroup]:
    random = np.random.default_rng(0)
    ids = [random.integers(1, 15, size).astype(np.int32) for size in (3, 9, 9, 17, 1, 30)]
    return [PromptGroup(str(i), Prompt(str(i), text="?"), one, params, i) for i, one in enumerate(ids)]


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
    monkeypatch.setattr(modules, "_LEAST_WEIGHTS", 1)  # as if they were large
    folder = str(save_family(family, tmp_path))
    engine = NativeRollout(folder, **CPU, max_batch=5, keep_routes=family in MIXED)
    theirs = HFRollout(folder, **CPU, max_batch=32)
    model = load_model(folder).eval()
    for each in (engine, theirs):
        run(each.resume())
    greedy = SamplingParams(20, temperature=0.0, ignore_eos=True)
    assert tokens_of(written(engine, odd_groups(greedy))) == tokens_of(written(theirs, odd_groups(greedy)))
    drawn = SamplingParams(20, 0.8, num_answers=3, ignore_eos=True)
    samples = written(engine, odd_groups(drawn))
    assert max(np.abs(sample.log_probs - full_forward(model, sample, 0.8)).max() for sample in samples) < CLOSE
    assert tokens_of(samples) == tokens_of(written(theirs, odd_groups(drawn)))
    for each in (engine, theirs):
        run(each.close())


@pytest.mark.parametrize("family", MIXED)
def test_kept_routes_are_those_of_a_full_forward(family: str, tmp_path: Path) -> None:
    from practicum.replay import RouteRecorder

    folder = str(save_family(family, tmp_path))
    engine = NativeRollout(folder, **CPU, max_batch=4, keep_routes=True)
    run(engine.resume())
    model = load_model(folder).eval()
    recorder = RouteRecorder(model)
    for sample in written(engine, odd_groups(SamplingParams(10, num_answers=2, ignore_eos=True))):
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
    run(engine.resume())
    seen: list[int] = []
    engine.model.module.get_input_embeddings().register_forward_hook(lambda _, args, __: seen.append(args[0].numel()))
    written(engine, odd_groups(SamplingParams(4, num_answers=8, ignore_eos=True)))
    assert seen == [3 + 9 + 9 + 17 + 1 + 30, 48, 48, 48]  # one pass over all prompts, then a token a row


def test_rows_of_answers_that_have_ended_are_taken_by_the_next(tiny_model: Path) -> None:
    engine = NativeRollout(str(tiny_model), **CPU, max_batch=4)
    run(engine.resume())
    seen: list[int] = []
    engine.model.module.get_input_embeddings().register_forward_hook(lambda _, args, __: seen.append(args[0].shape[0]))
    lengths = [1, 2, 3, 30, 5, 6, 7, 8]
    params = [SamplingParams(length, ignore_eos=True) for length in lengths]
    one = odd_groups(SamplingParams(1))[0]
    groups = [PromptGroup(str(seed), one.prompt, one.prompt_ids, own, seed) for seed, own in enumerate(params)]
    samples = written(engine, groups)
    assert [len(sample.token_ids) for sample in samples] == lengths
    assert max(seen) == 4
    assert len([rows for rows in seen if rows > 1]) < 20  # the long one does not hold up the others


def test_memory_bounds_the_rows_and_what_can_be_asked(tiny_model: Path) -> None:
    bytes_per_token = 2 * 2 * 64 * 4  # keys and values of two layers, 64 numbers of four bytes each
    engine = NativeRollout(str(tiny_model), **CPU, max_batch=64, cache_gb=1e-9 * 256 * bytes_per_token)
    run(engine.resume())
    widest: list[int] = []
    engine.model.module.get_input_embeddings().register_forward_hook(
        lambda _, args, __: widest.append(args[0].shape[0])
    )
    assert len(written(engine, odd_groups(SamplingParams(16, num_answers=4, ignore_eos=True)))) == 24
    assert max(widest) == 4
    assert engine.model.num_blocks == 4
    small = NativeRollout(str(tiny_model), **CPU, max_batch=64, cache_gb=1e-9 * 40 * bytes_per_token)
    with pytest.raises(RolloutError, match=r"prompt 0 .*GB of keys and values, more than rollout\.cache_gb"):
        run(small.collect_samples(sequences_of(odd_groups(SamplingParams(16)))))


def test_where_blocks_run_out_the_youngest_are_read_again_and_write_the_same(tmp_path: Path) -> None:
    folder = str(save_family("qwen3_moe", tmp_path))
    params = SamplingParams(120, num_answers=2, ignore_eos=True)

    def samples(blocks: int) -> list[Sample]:
        engine = NativeRollout(folder, **CPU, max_batch=12, cache_gb=1e-9 * 64 * blocks * BYTES, keep_routes=True)
        run(engine.resume())
        preempted, preempt = [], engine._scheduler.preempt
        engine._scheduler.preempt = lambda: preempted.append(preempt())  # type: ignore[assignment, func-returns-value]
        found = written(engine, odd_groups(params))
        assert bool(preempted) == (blocks == 7)
        run(engine.close())
        return found

    BYTES = 3 * 2 * 2 * 16 * 4
    few, many = samples(7), samples(40)
    assert tokens_of(few) == tokens_of(many)
    for one, other in zip(few, many, strict=True):
        assert np.abs(one.log_probs - other.log_probs).max() < CLOSE
        assert one.routes is not None and other.routes is not None
        assert np.array_equal(one.routes.known, other.routes.known)
        assert np.array_equal(one.routes.experts[:-1], other.routes.experts[:-1])


def test_releasing_gives_keys_and_values_back(tiny_model: Path) -> None:
    engine = NativeRollout(str(tiny_model), **CPU, max_batch=8)
    run(engine.resume())
    written(engine, odd_groups(SamplingParams(4)))
    assert cache_of(engine).bytes_per_token > 0
    run(engine.release())
    assert cache_of(engine).bytes_per_token == 0


def test_memory_that_cannot_be_had_costs_that_request_alone(tiny_model: Path) -> None:
    engine = NativeRollout(str(tiny_model), **CPU, max_batch=8)
    run(engine.resume())
    asked = SamplingParams(4)
    expected = tokens_of(written(engine, odd_groups(asked)[:1]))
    run(engine.release())
    run(engine.resume())
    empty, calls = cache_of(engine)._empty, []

    def scarce(like: torch.Tensor) -> torch.Tensor:
        calls.append(like)
        if len(calls) == 2:
            raise MemoryError
        return empty(like)

    cache_of(engine)._empty = scarce  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        written(engine, odd_groups(SamplingParams(30)))
    assert tokens_of(written(engine, odd_groups(asked)[:1])) == expected


def test_it_leaves_nothing_behind_when_it_goes(tiny_model: Path) -> None:
    engine = NativeRollout(str(tiny_model), **CPU, max_batch=8)
    cache = weakref.ref(cache_of(engine))
    run(engine.close())
    del engine
    gc.collect()
    assert cache() is None


def test_an_answer_that_is_continued_keeps_the_routes_it_was_written_with(tmp_path: Path) -> None:
    folder = str(save_family("qwen3_moe", tmp_path))
    engine = NativeRollout(folder, **CPU, max_batch=4, keep_routes=True)
    run(engine.resume())
    (begun,) = written(engine, odd_groups(SamplingParams(6, ignore_eos=True))[1:2])
    other = load_model(folder).requires_grad_(False)
    for parameter in other.parameters():
        parameter.mul_(1.7).add_(0.05)
    run(engine.update_weights(WeightUpdate(1, other.named_parameters(), shared=False)))
    begun.finish_reason = "abort"
    group = odd_groups(SamplingParams(12, ignore_eos=True))[1]
    group.trajectories[0].add(begun)
    (whole,) = written(engine, [group])
    assert begun.routes is not None and whole.routes is not None
    num = begun.num_tokens - 1
    assert np.array_equal(whole.routes.experts[:num], begun.routes.experts[:num])
    assert whole.routes.known.tolist() == [True] * (whole.num_tokens - 1) + [False]


def test_a_failing_step_leaves_the_engine_usable(tiny_model: Path) -> None:
    engine = NativeRollout(str(tiny_model), **CPU, max_batch=8)
    run(engine.resume())
    asked = SamplingParams(4)
    expected = tokens_of(written(engine, odd_groups(asked)))
    hook = engine.model.module.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        written(engine, odd_groups(asked))
    hook.remove()
    assert tokens_of(written(engine, odd_groups(asked))) == expected


def test_a_failure_is_of_those_that_were_begun_and_the_others_are_written(tiny_model: Path) -> None:
    engine = NativeRollout(str(tiny_model), **CPU, max_batch=2)
    run(engine.resume())
    params = SamplingParams(4, ignore_eos=True)
    expected = tokens_of(written(engine, odd_groups(params)))
    failures = [MemoryError("no room")]

    def fail(*_: Any) -> None:
        if failures:
            raise failures.pop()

    engine.model.module.register_forward_hook(fail)

    async def answered() -> list[Any]:
        writing = [engine.collect_samples(sequences_of([group])) for group in odd_groups(params)]
        return await asyncio.gather(*writing, return_exceptions=True)

    found = run(answered())
    begun = [index for index, one in enumerate(found) if isinstance(one, MemoryError)]
    assert 1 <= len(begun) <= 2
    for index, one in enumerate(found):
        if index not in begun:
            assert tokens_of(one) == [expected[index]]


def test_what_waits_is_aborted_untouched(tiny_model: Path) -> None:
    engine = NativeRollout(str(tiny_model), **CPU, max_batch=1)
    run(engine.resume())
    sequences = sequences_of(odd_groups(SamplingParams(30, num_answers=2, ignore_eos=True))[:2])
    sequences[0].on_tokens = lambda tokens, log_probs: engine.abort()
    samples = run(engine.collect_samples(sequences))
    assert {sample.finish_reason for sample in samples} == {"abort"}
    assert sorted(len(sample.token_ids) for sample in samples)[:3] == [0, 0, 0]


def test_closing_fails_what_is_under_way_and_nothing_is_begun_after_it(tiny_model: Path) -> None:
    engine = NativeRollout(str(tiny_model), **CPU, max_batch=1)
    run(engine.resume())

    async def closed() -> list[Any]:
        begun = asyncio.Event()
        sequences = sequences_of(odd_groups(SamplingParams(50, ignore_eos=True))[:2])
        sequences[0].on_tokens = lambda tokens, log_probs: begun.set()
        writing = asyncio.ensure_future(
            asyncio.gather(*(engine.collect_samples([one]) for one in sequences), return_exceptions=True)
        )
        await begun.wait()
        await engine.close()
        await engine.close()
        return await writing

    errors = run(closed())
    assert [(type(error), str(error)) for error in errors] == [(RolloutError, "the engine has been closed")] * 2
    with pytest.raises(RolloutError, match="closed"):
        written(engine, odd_groups(SamplingParams(2)))
    with pytest.raises(RolloutError, match="closed"):
        run(engine.resume())


def test_its_thread_ends_with_it(tiny_model: Path) -> None:
    before = set(threading.enumerate())
    engine = NativeRollout(str(tiny_model), **CPU, max_batch=1)
    (thread,) = set(threading.enumerate()) - before
    del engine
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
