from __future__ import annotations

import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from practicum.errors import ModelError, ResourceError
from practicum.models import load_classifier, load_model
from practicum.rollout.engine.sleep import SleepingWeights
from tests.models import save_classifier

CPU = torch.device("cpu")
IDS = torch.arange(2, 12)[None]


def output(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=IDS).logits
    return logits


def test_asleep_the_memory_is_the_systems_again(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path, hidden_size=1024, intermediate_size=4096, num_attention_heads=8)
    model = load_classifier(str(folder)).eval()
    weights = SleepingWeights(model, CPU, lambda: load_classifier(str(folder)))
    before = output(model)
    process, freed = psutil.Process(), []
    for _ in range(2):
        awake = process.memory_info().rss
        weights.sleep()
        freed.append(awake - process.memory_info().rss)
        weights.wake()
        assert torch.equal(output(model), before)
    assert weights.num_bytes > 100e6
    assert min(freed) >= 0.95 * weights.num_bytes


def test_twice_is_once(classifier_folder: Path) -> None:
    read = []

    def load() -> Any:
        read.append(1)
        return load_classifier(str(classifier_folder))

    model = load_classifier(str(classifier_folder)).eval()
    weights = SleepingWeights(model, CPU, load)
    before = output(model)
    weights.wake()
    weights.sleep()
    weights.sleep()
    assert not weights.is_awake
    weights.wake()
    weights.wake()
    assert weights.is_awake
    assert len(read) == 1
    assert torch.equal(output(model), before)


def test_shared_weights_stay_shared(tiny_model: Path) -> None:
    model = load_model(str(tiny_model)).eval()  # its embedding is its output layer too
    weights = SleepingWeights(model, CPU, lambda: load_model(str(tiny_model)))
    before = output(model)
    weights.sleep()
    weights.wake()
    assert torch.equal(output(model), before)
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_a_wake_up_that_fails_leaves_it_asleep_and_can_be_tried_again(classifier_folder: Path) -> None:
    errors: list[Exception] = [MemoryError(), RuntimeError("disk on fire")]

    def load() -> Any:
        if errors:
            raise errors.pop(0)
        return load_classifier(str(classifier_folder))

    model = load_classifier(str(classifier_folder)).eval()
    weights = SleepingWeights(model, CPU, load)
    before = output(model)
    weights.sleep()
    with pytest.raises(ResourceError, match=r"cannot wake up: its weights take .* GB of cpu, where .* GB are free"):
        weights.wake()
    with pytest.raises(RuntimeError, match="disk on fire"):
        weights.wake()
    assert not weights.is_awake
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    weights.wake()
    assert torch.equal(output(model), before)


def test_other_weights_in_the_files_are_not_taken_for_the_same(classifier_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(classifier_folder, folder)
    weights = SleepingWeights(load_classifier(str(folder)), CPU, lambda: load_classifier(str(folder)))
    weights.sleep()
    save_classifier(folder, seed=1)
    with pytest.raises(ModelError, match=r"files have changed while it was asleep, first in .*weight"):
        weights.wake()
    save_classifier(folder, num_hidden_layers=1)
    with pytest.raises(ModelError, match="another model"):
        weights.wake()
    assert not weights.is_awake
    save_classifier(folder)
    weights.wake()
    assert weights.is_awake


def test_weights_that_were_changed_come_back_changed(tiny_model: Path) -> None:
    """Not from the files any more; and unchanged since, they are not written again."""
    model = load_model(str(tiny_model), torch.bfloat16).eval().requires_grad_(False)
    weights = SleepingWeights(model, CPU, lambda: pytest.fail("the files are not these weights"))
    for factor in (1.5, 0.5):
        for parameter in model.parameters():
            parameter.mul_(factor)
        weights.changed()
        before = output(model)
        for _ in range(2):
            weights.sleep()
            assert all(parameter.numel() == 0 for parameter in model.parameters())
            weights.wake()
            assert torch.equal(output(model), before)
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_where_there_is_no_room_for_changed_weights_they_stay_awake(tiny_model: Path) -> None:
    model = load_model(str(tiny_model)).eval()
    weights = SleepingWeights(model, CPU, lambda: pytest.fail("the files are not these weights"), is_as_loaded=False)
    before = output(model)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(ResourceError, match=r"cannot fall asleep: .* GB, cannot be written to .*set TMPDIR"):
            weights.sleep()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert weights.is_awake
    assert torch.equal(output(model), before)
