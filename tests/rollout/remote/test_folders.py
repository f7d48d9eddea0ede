from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from practicum.models import load_model, load_tokenizer
from practicum.rollout.remote.folders import eos_ids_of, write_folder


def test_a_written_folder_is_a_model_with_those_weights(tiny_model: Path, tmp_path: Path) -> None:
    model = load_model(str(tiny_model))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(0.01 * number)
    write_folder(tmp_path, str(tiny_model), model.named_parameters())
    again = dict(load_model(str(tmp_path)).named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(again[name], parameter), name
    # Other engines know experts by the names that checkpoints have, one by one.
    names = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in names
    assert load_tokenizer(str(tmp_path)).get_vocab() == load_tokenizer(str(tiny_model)).get_vocab()


def test_an_incomplete_update_is_not_written(tiny_model: Path, tmp_path: Path) -> None:
    some = list(load_model(str(tiny_model)).named_parameters())[1:]
    with pytest.raises(AssertionError, match="left out model"):
        write_folder(tmp_path, str(tiny_model), some)


def test_all_end_of_text_tokens_are_found(tiny_model: Path, tmp_path: Path) -> None:
    assert eos_ids_of(str(tiny_model)) == [1]
    model: Any = load_model(str(tiny_model))
    model.generation_config.eos_token_id = [1, 9]
    model.save_pretrained(tmp_path)
    load_tokenizer(str(tiny_model)).save_pretrained(tmp_path)
    assert eos_ids_of(str(tmp_path)) == [1, 9]
    (tmp_path / "generation_config.json").unlink()
    assert eos_ids_of(str(tmp_path)) == [1]
