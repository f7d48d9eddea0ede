"""The native engine on a CUDA device with the runner for models that the one for CUDA does not support."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from practicum.models import load_model
from practicum.rollout.hf import HFRollout
from practicum.rollout.native import NativeRollout
from practicum.types import SamplingParams
from tests.models import DENSE, MIXED, save_family
from tests.rollout.contract import CLOSE, EngineContract, full_forward, run, tokens_of, written
from tests.rollout.test_native import odd_groups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[NativeRollout]:
    engine = NativeRollout(str(tiny_model), device=torch.device("cuda"), dtype=torch.float32, max_batch=5)
    run(engine.resume())
    yield engine
    run(engine.close())


class TestContract(EngineContract):
    pass


@pytest.mark.parametrize("family", [*DENSE, *MIXED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_family_writes_as_generate_does(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = str(save_family(family, tmp_path))
    settings: dict[str, Any] = {"device": torch.device("cuda"), "dtype": dtype, "max_batch": 32}
    engine = NativeRollout(folder, **settings, keep_routes=family in MIXED)
    theirs = HFRollout(folder, **settings)
    for each in (engine, theirs):
        run(each.resume())
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


def test_asleep_it_holds_no_memory_of_the_device(tiny_model: Path) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    engine = NativeRollout(str(tiny_model), device=torch.device("cuda"), dtype=torch.float32, max_batch=64)
    run(engine.resume())
    params = SamplingParams(20, num_answers=4)
    expected = tokens_of(written(engine, odd_groups(params)))
    awake = torch.cuda.memory_allocated()
    run(engine.release())
    assert torch.cuda.memory_allocated() - before < 0.05 * (awake - before)
    run(engine.resume())
    assert tokens_of(written(engine, odd_groups(params))) == expected
    run(engine.close())
