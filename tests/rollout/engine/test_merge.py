"""Engines that get adapters alone and compute with whole weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from practicum.adapters import LoneAdapters, LoraSettings, adapters_alone, adapters_of, merged_weights
from practicum.models import load_model
from practicum.rollout.engine.merge import AdapterMerger
from practicum.rollout.engines import EngineSettings, make_engine
from practicum.weights import WeightUpdate
from tests.rollout.contract import run
from tests.test_adapters import stirred

RANK4 = LoraSettings(4, 8)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("files", [torch.float32, torch.bfloat16])
def test_weights_are_those_that_the_trainer_would_have_sent(
    tiny_model: Path, tmp_path: Path, dtype: torch.dtype, files: torch.dtype
) -> None:
    model = load_model(str(tiny_model), files)
    model.save_pretrained(tmp_path)
    loaded: list[str] = []
    learner = stirred(tmp_path, RANK4)
    lone = LoneAdapters(str(tmp_path), RANK4)
    merger = AdapterMerger(lone, CPU, dtype, load=lambda path: loaded.append(path) or load_model(path))
    for version in (1, 2, 3):  # each from the same base
        for parameter in adapters_of(learner).values():
            torch.nn.init.normal_(parameter, std=0.1)
        sent = WeightUpdate(version, adapters_alone(learner, torch.Tensor.detach), shared=False, is_whole=False)
        update = merger.merged(sent)
        assert update.version == version and not update.is_whole and not update.shared
        expected = dict(merged_weights(learner, torch.Tensor.detach, dtype))
        found = {name: tensor.clone() for name, tensor in update.tensors}
        assert found and all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
        plain = dict(model.named_parameters())
        assert all(torch.equal(expected[name], plain[name].to(dtype)) for name in plain.keys() - found.keys())
    assert loaded == [str(tmp_path)]
    num_weights = sum(tensor.numel() for tensor in found.values())
    assert merger.num_bytes == files.itemsize * num_weights  # in float32 only where the files are


@pytest.mark.parametrize("engine", ["native", "hf"])
@pytest.mark.parametrize("stays_loaded", [False, True])
def test_an_engine_takes_them_awake_and_after_sleep(tiny_model: Path, engine: str, stays_loaded: bool) -> None:
    settings = EngineSettings(engine, str(tiny_model), device="cpu", stays_loaded=stays_loaded)
    writer, learner = make_engine(settings), stirred(tiny_model, RANK4)
    merger = AdapterMerger(LoneAdapters(str(tiny_model), RANK4), CPU, torch.float32)
    ids = torch.arange(2, 14)
    with torch.no_grad():
        for version in (1, 2):
            for parameter in adapters_of(learner).values():
                torch.nn.init.normal_(parameter, std=0.1)
            run(writer.resume())
            sent = adapters_alone(learner, torch.Tensor.detach)
            update = WeightUpdate(version, sent, shared=False, is_whole=False)
            run(writer.update_weights(merger.merged(update)))
            for _ in range(2):
                (found,) = run(writer.log_probs([ids.int().numpy()]))
                logits = learner(input_ids=ids[None]).logits[0, :-1]
                expected = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy()
                assert abs(found - expected).max() < 2e-5
                run(writer.release())
                run(writer.resume())
            run(writer.release())
    run(writer.close())
