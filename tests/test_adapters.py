"""Adapters by themselves: which layers get them, what they are in a folder, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from practicum.adapters import (
    LoneAdapters,
    LoraSettings,
    adapters_alone,
    adapters_of,
    add_adapters,
    count_learnt,
    find_targets,
    load_adapters,
    merged_weight,
    merged_weights,
    paired,
    save_adapters,
    without_adapters,
    write_adapters,
)
from practicum.errors import ModelError
from practicum.models import DTYPES, empty_model, load_config, load_model, load_tokenizer, plain_path, save_merged
from tests.models import save_small

RANK4 = LoraSettings(4, 8)
IDS = torch.arange(12)[None]


def stirred(path: Path, settings: LoraSettings = RANK4) -> Any:
    """A model with adapters that do something."""
    model = load_model(str(path))
    add_adapters(model, settings, seed=0)
    torch.manual_seed(1)
    for parameter in adapters_of(model).values():
        torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits[0]


def save(model: Any, base: Path, folder: Path) -> Path:
    save_adapters(model, str(base), folder, {name: tensor.detach() for name, tensor in adapters_of(model).items()})
    return folder


def save_adapted(base: Path, folder: Path) -> Path:
    """A folder of adapters that do something."""
    return save(stirred(base), base, folder)


def test_only_adapters_learn_and_at_first_they_change_nothing(tiny_model: Path) -> None:
    model = load_model(str(tiny_model))
    before = logits(model)
    add_adapters(model, RANK4, seed=0)
    learns = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learns == set(adapters_of(model)) and all(".lora_" in name for name in learns)
    assert torch.equal(logits(model), before)
    assert sum(p.numel() for p in adapters_of(model).values()) == count_learnt(load_model(str(tiny_model)), RANK4)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("qwen3_moe", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("mixtral", {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_all_linear_leaves_out_the_output_layer_routers_and_experts(
    family: str, targets: set[str], tmp_path: Path
) -> None:
    config = load_config(str(save_small(family, tmp_path)))
    found = find_targets(empty_model(config), RANK4)
    assert {name.rpartition(".")[2] for name in found} == targets


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_moe, tied", "mixtral", "deepseek_v3", "gpt2"])
def test_merged_weights_make_the_plain_model_that_does_the_same(family: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    if family == "gpt2":  # its linear layers are the other way round
        from tests.train.test_model import tiny

        tiny(family).save_pretrained(path)
    else:
        save_small(family, path)
    model = stirred(path)
    plain = load_model(str(path)).eval()
    assert (logits(plain) - logits(model)).abs().max() > 1e-2
    with without_adapters(model):
        assert torch.equal(logits(plain), logits(model))
    parameters = dict(plain.named_parameters())
    merged = {name: tensor.clone() for name, tensor in merged_weights(model, torch.Tensor.detach)}
    assert list(merged) == list(parameters)
    for name, parameter in parameters.items():
        parameter.data.copy_(merged[name])
    assert (logits(plain) - logits(model)).abs().max() < 2e-5
    loaded = load_model(str(save(model, path, tmp_path / "adapters")))
    assert type(loaded) is type(plain) and not hasattr(loaded, "peft_config")
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, merged[name]), name


@pytest.mark.parametrize("family", ["llama", "qwen3_moe, tied", "gpt2"])
def test_adapters_alone_make_the_same_model(family: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    if family == "gpt2":
        from tests.train.test_model import tiny

        tiny(family).save_pretrained(path)
    else:
        save_small(family, path)
    settings = LoraSettings(4, 6)  # a scale that rounds
    model, plain = stirred(path, settings), load_model(str(path))
    merged = {name: tensor.clone() for name, tensor in merged_weights(model, torch.Tensor.detach)}
    alone = list(adapters_alone(model, torch.Tensor.detach))
    weights = {
        f"{name}.weight": merged_weight(plain.get_submodule(name), down, up, settings.scaling)
        for name, down, up in paired(reversed(alone))  # in whatever order they come
    }
    assert weights.keys() == {f"{name}.weight" for name in find_targets(plain, settings)}
    for name, weight in weights.items():
        assert torch.equal(weight, merged[name]), name
    with pytest.raises(ModelError, match=f"1 tensors are missing .* {alone[0][0]} .missing"):
        write_adapters(tmp_path / "adapters", LoneAdapters(str(path), settings), plain, alone[1:])
    write_adapters(tmp_path / "adapters", LoneAdapters(str(path), settings), plain, alone)
    loaded = load_model(str(tmp_path / "adapters"))
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, merged[name]), name
    with pytest.raises(AssertionError, match="left out half of"):
        list(paired(alone[:-1]))


def test_adapters_come_back_from_their_folder_to_the_last_bit(tiny_model: Path, tmp_path: Path) -> None:
    model = stirred(tiny_model)
    folder = save(model, tiny_model, tmp_path / "adapters")
    assert sum(path.stat().st_size for path in folder.iterdir()) < (tiny_model / "model.safetensors").stat().st_size / 4
    again = load_model(str(tiny_model))
    add_adapters(again, RANK4, seed=5)
    load_adapters(again, str(folder))
    for name, parameter in adapters_of(again).items():
        assert torch.equal(parameter, adapters_of(model)[name])
    other = load_model(str(tiny_model))
    add_adapters(other, LoraSettings(2, 4), seed=0)
    with pytest.raises(ModelError, match=r"not those of actor.lora.*lora_A"):
        load_adapters(other, str(folder))


def test_others_read_the_folder_too(tiny_model: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = stirred(tiny_model)
    folder = save(model, tiny_model, tmp_path / "adapters")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), folder)
    assert torch.equal(logits(theirs.eval()), logits(model))


def test_a_whole_model_is_made_of_them(tiny_model: Path, tmp_path: Path) -> None:
    folder = save(stirred(tiny_model), tiny_model, tmp_path / "adapters")
    assert plain_path(str(folder)) == str(tiny_model)
    assert len(load_tokenizer(str(folder))) == 18  # that of the model, where the folder has none
    save_merged(str(folder), tmp_path / "whole", DTYPES["bfloat16"])
    whole, merged = load_model(str(tmp_path / "whole")), load_model(str(folder))
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, merged.get_parameter(name).bfloat16().float())
    with pytest.raises(ModelError, match="is there already"):
        save_merged(str(folder), tmp_path / "whole")
    with pytest.raises(ModelError, match="holds no adapters"):
        save_merged(str(tiny_model), tmp_path / "other")


def test_adapters_on_adapters(tiny_model: Path, tmp_path: Path) -> None:
    first = save(stirred(tiny_model), tiny_model, tmp_path / "first")
    model = stirred(first, LoraSettings(2, 4, ("q_proj",)))
    second = save(model, first, tmp_path / "second")
    assert plain_path(str(second)) == str(tiny_model)
    assert (logits(load_model(str(second))) - logits(model)).abs().max() < 2e-5


def test_a_base_that_is_gone_is_named(tiny_model: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(tiny_model, moved)
    folder = save(stirred(tiny_model), moved, tmp_path / "adapters")
    shutil.rmtree(moved)
    with pytest.raises(ModelError, match=r"adapters of the model '.*moved', which is not there.*adapter_config.json"):
        load_model(str(folder))
    with pytest.raises(ModelError, match="which is not there"):
        load_config(str(folder))
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"adapter_config.json cannot be read"):
        load_model(str(folder))


def test_adapters_of_another_model_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    other = save_small("qwen3_moe", tmp_path / "other")
    folder = save(stirred(other), other, tmp_path / "adapters")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(tiny_model)}))
    with pytest.raises(ModelError, match="do not fit"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("family", "target", "reason"),
    [
        ("qwen3_moe", "qproj", "has no layer 'qproj'. Linear are q_proj, k_proj, v_proj, o_proj, lm_head. Its experts"),
        ("qwen3_moe", "gate_up_proj", "'gate_up_proj' of Qwen3MoeForCausalLM is no linear layer"),
        ("qwen3_moe", "gate", "'gate' of Qwen3MoeForCausalLM is no linear layer"),
        ("llama", "lm_head", "has the same weights as the embedding"),
        ("llama", "embed_tokens", "is no linear layer"),
        ("deepseek_v3", "down_proj", "peft takes 'down_proj' of DeepseekV3ForCausalLM for the weights of its experts"),
    ],
)
def test_what_cannot_have_an_adapter_is_said(family: str, target: str, reason: str, tmp_path: Path) -> None:
    model = empty_model(load_config(str(save_small(family, tmp_path))))
    with pytest.raises(ModelError) as refused:
        find_targets(model, LoraSettings(4, 8, (target,)))
    assert reason in str(refused.value)


def test_without_peft_the_extra_is_named(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(stirred(tiny_model), tiny_model, tmp_path / "adapters")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"actor.lora needs .*pip install 'practicum\[peft\]'"):
        find_targets(load_model(str(tiny_model)), RANK4)
    with pytest.raises(ModelError, match=r"practicum\[peft\]"):
        load_model(str(folder))
