from __future__ import annotations

from pathlib import Path

import pytest
import torch

from practicum.errors import CheckpointError
from practicum.models import load_model, load_tokenizer
from practicum.train.checkpoint import load_training_state, save_whole_model


def test_a_saved_model_loads_with_from_pretrained_as_it_was(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = load_model(str(tiny_model))
    save_whole_model(model, load_tokenizer(str(tiny_model)), tmp_path, rank=0)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert type(loaded) is type(model)
    for (name, saved), (_, again) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(saved, again), name
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template is not None


def test_only_rank_zero_writes_the_model(tiny_model: Path, tmp_path: Path) -> None:
    save_whole_model(load_model(str(tiny_model)), None, tmp_path, rank=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damaged", [b"", b"not a checkpoint"])
def test_a_damaged_optimizer_file_is_named(tmp_path: Path, damaged: bytes) -> None:
    layer = torch.nn.Linear(2, 2)
    (tmp_path / "optimizer.pt").write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"optimizer\.pt cannot be read .*delete that folder"):
        load_training_state(layer, torch.optim.AdamW(layer.parameters()), tmp_path, rank=0)
