from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from practicum.errors import RolloutError
from practicum.models import load_model
from practicum.weights import TIGHTEST, Bound, Fingerprint
from practicum.weights.fingerprint import make_sequences, measure
from tests.models import save_small

BOUNDS = {"float32": TIGHTEST, "bfloat16": Bound(mean=0.05, largest=0.5)}


def told(model: Any, sequences: Sequence[NDArray[np.int32]], attention: str = "sdpa") -> list[NDArray[np.float32]]:
    model.set_attn_implementation(attention)
    found = []
    with torch.no_grad():
        for ids in sequences:
            tokens = torch.from_numpy(ids.astype(np.int64))
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
            found.append(logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].numpy())
    return found


def test_sequences_are_the_same_for_everybody() -> None:
    first, second = make_sequences(50), make_sequences(50)
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert all(ids.min() >= 0 and ids.max() < 50 and len(ids) > 1 for ids in first)
    assert any((a != b).any() for a, b in zip(first, make_sequences(50, seed=1), strict=True))


def test_a_gap_says_where_the_largest_is() -> None:
    expected = [np.array([-1.0, -3.0], np.float32), np.array([-2.0, -4.0, -1.0], np.float32)]
    found = [own.copy() for own in expected]
    found[1][1] += 0.5
    gap = measure(expected, found)
    assert gap is not None
    assert (gap.sequence, gap.token, gap.trainer, gap.engine) == (1, 2, -4.0, -3.5)
    spread = np.concatenate(expected).std()
    assert gap.largest == pytest.approx(0.5 / spread) and gap.mean == pytest.approx(0.1 / spread)


@pytest.mark.parametrize("spoil", [lambda own: own[:-1], lambda own: own * np.nan])
def test_what_cannot_be_compared_is_an_error(spoil: Any) -> None:
    fingerprint = Fingerprint(50)
    expected = [np.linspace(-5, -1, len(ids) - 1, dtype=np.float32) for ids in fingerprint.sequences]
    fingerprint.compare("one", 1, expected, expected)
    with pytest.raises(RolloutError, match="weights of version 1: its log-probs are of other lengths"):
        fingerprint.compare("one", 1, expected, [*expected[:-1], spoil(expected[-1])])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_passes_and_misplaced_weights_do_not(family: str, dtype: str, tmp_path: Path) -> None:
    folder = str(save_small(family, tmp_path))
    torch_dtype = getattr(torch, dtype)
    trainer, engine = load_model(folder, torch_dtype).eval(), load_model(folder, torch_dtype).eval()
    fingerprint = Fingerprint(18, BOUNDS[dtype])
    expected = told(trainer, fingerprint.sequences, "eager")
    gap = fingerprint.calibrate("one", 0, expected, told(engine, fingerprint.sequences))
    assert gap.is_within(BOUNDS[dtype])
    changed = 0
    for name, parameter in engine.named_parameters():
        if "experts.gate_up_proj" in name or name.endswith("mlp.gate_proj.weight"):
            parameter.data.copy_(parameter.roll(1, 0))
            changed += 1
    assert changed
    with pytest.raises(RolloutError, match=r"engine .one. with .* version 3 is not the model .* does not serve"):
        fingerprint.compare("one", 3, expected, told(engine, fingerprint.sequences))


def test_calibration_does_not_hide_an_engine_that_is_wrong_from_the_start() -> None:
    fingerprint = Fingerprint(50, BOUNDS["bfloat16"])
    random = np.random.default_rng(0)
    expected = [random.normal(-5, 1, len(ids) - 1).astype(np.float32) for ids in fingerprint.sequences]
    with pytest.raises(RolloutError, match="is not the model"):
        fingerprint.calibrate("one", 0, expected, [own[::-1].copy() for own in expected])
    assert fingerprint.bound == BOUNDS["bfloat16"]
    fingerprint.calibrate("one", 0, expected, expected)
    assert fingerprint.bound == BOUNDS["float32"]  # as tight as it gets
    fingerprint.calibrate("one", 0, expected, [own + np.float32(0.01) for own in expected])
    assert BOUNDS["float32"].mean < fingerprint.bound.mean < 0.1
