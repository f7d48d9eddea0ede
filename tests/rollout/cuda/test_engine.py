"""The native engine's pages and graphs on a CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from practicum.errors import ResourceError, RolloutError
from practicum.models import load_model
from practicum.rollout.engines import EngineSettings, make_engine
from practicum.rollout.hf import HFRollout
from practicum.types import Prompt, RolloutRequest, RoutedExperts, SamplingParams
from practicum.weights import WeightUpdate
from tests.rollout.contract import CLOSE, EngineContract, full_forward, tokens_of
from tests.rollout.families import save_family
from tests.rollout.test_native import odd_requests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")
CUDA = torch.device("cuda")


def opened(model: Path | str, **changes: Any) -> Any:
    from practicum.rollout.cuda.engine import CudaRollout

    settings: dict[str, Any] = {"device": CUDA, "dtype": torch.float32, "max_batch": 32, "cache_gb": 0.05}
    engine = CudaRollout(str(model), **{**settings, **changes})
    engine.resume()
    return engine


def long_requests(num: int, prompt: int, new: int, vocabulary: int = 18, **params: Any) -> list[RolloutRequest]:
    random = np.random.default_rng(0)
    return [
        RolloutRequest(
            Prompt(str(i), text="?"),
            random.integers(4, vocabulary, prompt).astype(np.int32),
            SamplingParams(new, ignore_eos=True, **params),
            i,
        )
        for i in range(num)
    ]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Any:
    engine = opened(tiny_model, max_batch=5)
    yield engine
    engine.close()


class TestContract(EngineContract):
    pass


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_family_writes_as_generate_does(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = str(save_family(family, tmp_path))
    engine = opened(folder, dtype=dtype)
    theirs = HFRollout(folder, device=CUDA, dtype=dtype, max_batch=32)
    theirs.resume()
    samples = engine.generate(odd_requests(SamplingParams(20, 0.8, num_answers=3, ignore_eos=True)))
    if dtype == torch.float32:
        model = load_model(folder).eval()
        assert max(np.abs(sample.log_probs - full_forward(model, sample, 0.8)).max() for sample in samples) < 5 * CLOSE
        greedy = odd_requests(SamplingParams(20, temperature=0.0, ignore_eos=True))
        assert tokens_of(engine.generate(greedy)) == tokens_of(theirs.generate(greedy))
    else:
        whole = [np.concatenate([sample.prompt_ids, sample.token_ids]) for sample in samples]
        gaps = [np.abs(a - b) for a, b in zip(engine.log_probs(whole), theirs.log_probs(whole), strict=True)]
        assert float(np.mean(np.concatenate(gaps))) < 0.1
    engine.close()


def test_the_native_engine_is_this_one_where_it_can_be(tiny_model: Path, tmp_path: Path, caplog: Any) -> None:
    assert type(make_engine(EngineSettings("native", str(tiny_model), device="cuda"))).__name__ == "CudaRollout"
    other = save_family("deepseek_v3", tmp_path)
    assert type(make_engine(EngineSettings("native", str(other), device="cuda"))).__name__ == "NativeRollout"
    assert "deepseek_v3" in caplog.text


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen2_moe"])
def test_routes_are_those_that_the_model_chooses(family: str, tmp_path: Path) -> None:
    from practicum.replay import RouteRecorder

    folder = save_family(family, tmp_path)
    engine = opened(folder, keep_routes=True)
    samples = engine.generate(odd_requests(SamplingParams(20, num_answers=2, ignore_eos=True)))
    model = load_model(str(folder)).eval()
    recorder = RouteRecorder(model)
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.token_ids]).astype(np.int64))
        with torch.no_grad():
            model(input_ids=ids[None], use_cache=False)
        assert isinstance(sample.routes, RoutedExperts)
        assert sample.routes.known.tolist() == [True] * (len(ids) - 1) + [False]
        assert np.array_equal(sample.routes.experts[:-1], recorder.take()[:-1])
    engine.close()


@pytest.mark.parametrize("keep_routes", [False, True])
def test_rows_that_give_way_to_others_write_the_same(keep_routes: bool, tmp_path: Path) -> None:
    folder = save_family("qwen3_moe", tmp_path)
    asked = long_requests(12, 40, 160)
    roomy = opened(folder, keep_routes=keep_routes)
    page = roomy._page_bytes
    expected = roomy.generate(asked)
    roomy.close()
    tight = opened(folder, keep_routes=keep_routes, cache_gb=10.5 * page / 1e9)
    found = tight.generate(asked)
    assert tokens_of(found) == tokens_of(expected)
    if keep_routes:
        for one, other in zip(found, expected, strict=True):
            assert np.array_equal(one.routes.experts, other.routes.experts)
            assert one.routes.known.tolist() == other.routes.known.tolist()
    assert tight._seats.pool.num_free == tight._seats.pool.num
    tight.close()


def test_what_the_cache_has_no_room_for_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = save_family("llama", tmp_path)
    roomy = opened(folder)
    page = roomy._page_bytes
    roomy.close()
    engine = opened(folder, cache_gb=3.2 * page / 1e9)  # two pages of 64 tokens, and one that belongs to nobody
    assert len(engine.generate(long_requests(1, 100, 28))[0].token_ids) == 28
    with pytest.raises(RolloutError, match=r"prompt 0 and its answer .* more than rollout\.cache_gb=.*raise it"):
        engine.generate(long_requests(1, 100, 29))
    engine.close()


def test_prompts_of_many_lengths_and_long_ones_are_read_in_parts(tmp_path: Path, monkeypatch: Any) -> None:
    from practicum.rollout.cuda import engine as module
    from practicum.rollout.cuda import reading

    folder = save_family("mistral", tmp_path)
    asked = [*long_requests(3, 150, 20, num_answers=3), *long_requests(4, 7, 20, num_answers=2)]
    whole = opened(folder)
    expected = tokens_of(whole.generate(asked))
    whole.close()
    for one in (module, reading):  # which sequences are read together, and which in parts
        monkeypatch.setattr(one, "READ_TOKENS", 33)
    parts = opened(folder)
    assert tokens_of(parts.generate(asked)) == expected
    parts.close()


def test_ways_of_drawing_stand_side_by_side(tmp_path: Path) -> None:
    folder = save_family("llama", tmp_path)
    ways = [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.6}, {"temperature": 1.4, "top_k": 5, "top_p": 0.9}]
    asked = [one for way in ways for one in long_requests(3, 9, 30, **way)]
    engine, theirs = opened(folder), HFRollout(str(folder), device=CUDA, dtype=torch.float32, max_batch=32)
    theirs.resume()
    found, expected = engine.generate(asked), theirs.generate(asked)
    same = [a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(found, expected, strict=True)]
    assert sum(same) >= len(same) - 1  # a number on the edge of two tokens may fall to either
    engine.close()


def test_a_hundred_times_asleep_and_awake_nothing_grows_and_nothing_changes(tiny_model: Path) -> None:
    engine = opened(tiny_model, cache_gb=None)
    asked = odd_requests(SamplingParams(20, num_answers=4))
    expected = tokens_of(engine.generate(asked))
    engine.release()
    asleep = torch.cuda.mem_get_info()[0]
    for number in range(100):
        engine.resume()
        if number % 10 == 0:
            assert tokens_of(engine.generate(asked)) == expected
        engine.release()
    assert torch.cuda.mem_get_info()[0] >= asleep - (8 << 20)
    engine.resume()
    awake = torch.cuda.mem_get_info()[0]
    held = engine.held_bytes
    engine.release()
    assert torch.cuda.mem_get_info()[0] - awake >= 0.95 * held
    engine.close()


@pytest.mark.parametrize("is_whole", [True, False])
def test_weights_that_come_while_it_sleeps_are_those_it_wakes_with(tiny_model: Path, is_whole: bool) -> None:
    engine = opened(tiny_model)
    asked = odd_requests(SamplingParams(8, temperature=0.0))
    engine.generate(asked)
    engine.release()
    other = load_model(str(tiny_model)).eval()
    changed = {name: own for name, own in other.named_parameters() if is_whole or "self_attn" in name}
    with torch.no_grad():
        for parameter in changed.values():
            parameter.mul_(1.5)
    engine.update_weights(WeightUpdate(3, changed.items(), shared=False, is_whole=is_whole))
    engine.resume()
    for _ in range(2):
        samples = engine.generate(asked)
        assert {version for sample in samples for version in sample.versions.tolist()} == {3}
        assert max(np.abs(sample.log_probs - full_forward(other, sample, 1.0)).max() for sample in samples) < CLOSE
        engine.release()
        engine.resume()
    engine.close()


def test_awake_it_takes_what_memory_is_left(tiny_model: Path) -> None:
    engine = opened(tiny_model, cache_gb=None)
    asked = odd_requests(SamplingParams(8))
    expected = tokens_of(engine.generate(asked))
    num = engine._seats.pool.num
    engine.release()
    taken = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.8), dtype=torch.uint8, device=CUDA)
    engine.resume()
    assert engine._seats.pool.num < num / 2
    assert tokens_of(engine.generate(asked)) == expected
    del taken
    engine.close()


def test_a_cache_too_small_for_anything_is_refused(tiny_model: Path) -> None:
    with pytest.raises((RolloutError, ResourceError), match=r"pages of 64 tokens .*rollout\.cache_gb"):
        opened(tiny_model, cache_gb=1e-6)
