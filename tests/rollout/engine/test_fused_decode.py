from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from practicum.models import load_model
from practicum.rollout.engine.cpu.kernels import load_kernels
from practicum.rollout.native import NativeRollout
from practicum.types import Prompt, PromptGroup, SamplingParams
from tests import models
from tests.models import DENSE, MIXED, save_family
from tests.rollout.contract import CLOSE, full_forward, run, written

CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
OTHERWISE = {"olmoe", "deepseek_v3"}  # norms over all heads at once; keys and values that are unpacked
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def goes_past_forward(engine: NativeRollout) -> tuple[bool, float]:
    """Whether it decodes so, and how far its log-probs are from those of a full forward pass."""
    ids = np.random.default_rng(0).integers(1, 15, 11).astype(np.int32)
    run(engine.resume())
    whole: list[int] = []
    hook = engine.model.module.register_forward_pre_hook(lambda *_: whole.append(1))
    group = PromptGroup("1", Prompt("1", text="?"), ids, SamplingParams(20, ignore_eos=True), 0)
    (sample,) = written(engine, [group])
    hook.remove()
    model = load_model(engine.model.path).eval()
    return len(whole) == 1, float(np.abs(sample.log_probs - full_forward(model, sample, 1.0)).max())


@pytest.mark.parametrize("family", [*DENSE, *MIXED])
def test_most_families_decode_past_transformers_forward(family: str, tmp_path: Path) -> None:
    if load_kernels() is None:
        pytest.skip("this machine's compiler will not do")
    is_past, difference = goes_past_forward(NativeRollout(str(save_family(family, tmp_path)), **CPU, max_batch=4))
    assert is_past == (family not in OTHERWISE)
    assert difference < CLOSE


def test_a_model_of_the_usual_parts_that_computes_otherwise_goes_the_usual_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(models.DENSE, "granite", {"residual_multiplier": 0.5, "attention_multiplier": 0.3})
    is_past, difference = goes_past_forward(NativeRollout(str(save_family("granite", tmp_path)), **CPU, max_batch=4))
    assert not is_past
    assert difference < CLOSE
