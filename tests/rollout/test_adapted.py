"""Engines that get adapters alone and compute with whole weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from practicum.adapters import Adapted, LoraSettings, adapters_of, lone_adapters, merged_weights
from practicum.models import load_model
from practicum.rollout import adapted as adapted_module
from practicum.rollout.adapted import AdapterMerger
from practicum.weights import WeightUpdate
from tests.test_adapters import stirred

RANK4 = LoraSettings(4, 8)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("files", [torch.float32, torch.bfloat16])
def test_weights_are_those_that_the_trainer_would_have_sent(
    tiny_model: Path, tmp_path: Path, dtype: torch.dtype, files: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(str(tiny_model), files)
    model.save_pretrained(tmp_path)
    loaded: list[str] = []
    monkeypatch.setattr(adapted_module, "load_model", lambda path: loaded.append(path) or load_model(path))
    learner = stirred(tmp_path, RANK4)
    merger = AdapterMerger(Adapted(str(tmp_path), RANK4), CPU, dtype)
    for version in (1, 2, 3):  # each from the same base
        for parameter in adapters_of(learner).values():
            torch.nn.init.normal_(parameter, std=0.1)
        update = merger.merged(WeightUpdate(version, lone_adapters(learner, torch.Tensor.detach), shared=False))
        assert update.version == version and not update.is_whole and not update.shared
        expected = dict(merged_weights(learner, torch.Tensor.detach, dtype))
        found = {name: tensor.clone() for name, tensor in update.tensors}
        assert found and all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
        plain = dict(model.named_parameters())
        assert all(torch.equal(expected[name], plain[name].to(dtype)) for name in plain.keys() - found.keys())
    assert loaded == [str(tmp_path)]
    kept = {layer.weight.dtype for layer in merger._base.values()}
    assert kept == {files}


def test_adapters_that_broke_off_do_not_spoil_the_next_ones(tiny_model: Path) -> None:
    learner = stirred(tiny_model, RANK4)
    merger = AdapterMerger(Adapted(str(tiny_model), RANK4), CPU, torch.float32)
    next(iter(merger.merged(WeightUpdate(1, lone_adapters(learner, torch.Tensor.detach), shared=False)).tensors))
    update = merger.merged(WeightUpdate(1, lone_adapters(learner, torch.Tensor.detach), shared=False))
    expected = dict(merged_weights(learner, torch.Tensor.detach))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in update.tensors)
