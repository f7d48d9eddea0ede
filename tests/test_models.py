from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from practicum import Message, Prompt
from practicum.errors import DataError, ModelError
from practicum.models import (
    count_weights,
    encode_prompts,
    eos_ids_of,
    export_model,
    load_classifier,
    load_classifier_config,
    load_config,
    load_model,
    load_tokenizer,
    resolve_device,
)
from tests.models import save_classifier, save_family


def test_a_folder_loads_model_and_tokenizer(tiny_model: Path) -> None:
    assert type(load_model(str(tiny_model))).__name__ == "Qwen3MoeForCausalLM"
    assert load_tokenizer(str(tiny_model)).eos_token == "<end>"


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "one/two/three"])
def test_a_missing_folder_is_named(path: str) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load_config(path)


def test_a_folder_without_its_parts_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json cannot be loaded"):
        load_config(str(tmp_path))
    with pytest.raises(ModelError, match=r"has no tokenizer .*save_pretrained"):
        load_tokenizer(str(tmp_path))


def test_a_model_that_writes_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ModelError, match="'vit', which transformers has no causal LM for"):
        load_model(str(tmp_path))


def test_damaged_weights_are_named(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    with pytest.raises(ModelError, match="weights cannot be loaded"):
        load_model(str(tmp_path))


def test_weights_that_are_not_there_are_not_made_up(tiny_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in tensors if "q_proj" in name)
    save_file({k: v for k, v in tensors.items() if k != gone}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 of its weights are not in its files .* the first is .*q_proj"):
        load_model(str(tmp_path))


def test_a_classifier_has_one_output(tmp_path: Path) -> None:
    folder = str(save_classifier(tmp_path))
    model = load_classifier(folder)
    assert model(input_ids=torch.arange(2, 10)[None]).logits.shape == (1, 1)
    assert count_weights(load_classifier_config(folder), classifier=True) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_labels": 3}, r"classifies into 3 labels .* a reward is one number"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            r"no sequence classifier: .* says LlamaForCausalLM, .* head is missing",
        ),
        ({"model_type": "clvp"}, r"'clvp', which transformers has no sequence classifier for"),
    ],
)
def test_what_is_no_classifier_is_told_by_its_config(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"], "num_labels": 1} | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load_classifier_config(str(tmp_path))


def test_a_causal_model_is_not_given_a_random_head(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_labels": 1}))
    with pytest.raises(ModelError, match=r"would be random, the first is score\.weight"):
        load_classifier(str(tmp_path))


def test_weights_are_counted_without_loading_them(tiny_model: Path) -> None:
    expected = sum(parameter.numel() for parameter in load_model(str(tiny_model)).parameters())
    assert count_weights(load_config(str(tiny_model)), classifier=False) == expected


def test_a_model_that_only_reads_needs_no_end_of_text(tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no end-of-text token"):
        load_tokenizer(str(tmp_path))
    assert load_tokenizer(str(tmp_path), for_writing=False).eos_token is None


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_dropout_is_off_also_in_training_mode(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "ffn_dim": 32}
    more = {"word_embed_proj_dim": 16} if family == "opt" else {}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape, **more)).save_pretrained(tmp_path)
    model = load_model(str(tmp_path)).train()
    ids = torch.arange(2, 10)[None]
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_text_is_encoded_as_it_is_and_messages_by_the_template(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    prompts = [
        Prompt("a", text="1+2="),
        Prompt("b", messages=(Message("user", "1+2="),)),
        Prompt("c", text="<user>1+2=<bot>"),
    ]
    plain, chat, written_out = encode_prompts(tokenizer, prompts)
    assert tokenizer.decode(plain) == "1+2="
    assert chat.tolist() == written_out.tolist()
    assert len(chat) == len(plain) + 2
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(DataError, match="prompt b: the model's chat template refuses its messages: System role"):
        encode_prompts(tokenizer, prompts)
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match=r"prompt b has chat messages, but .* no chat template"):
        encode_prompts(tokenizer, prompts)


def test_a_prompt_without_tokens_is_refused() -> None:
    def drops_everything(texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[] for _ in texts]}

    with pytest.raises(DataError, match="prompt x has no tokens"):
        encode_prompts(drops_everything, [Prompt("x", text="~")])


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert resolve_device("auto").type == "cpu"
    with pytest.raises(ModelError, match=r"trainer\.device=cpu"):
        resolve_device("cuda")


def test_a_written_folder_is_a_model_with_those_weights(tiny_model: Path, tmp_path: Path) -> None:
    model = load_model(str(tiny_model))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(0.01 * number)
    export_model(tmp_path, str(tiny_model), model.named_parameters())
    again = dict(load_model(str(tmp_path)).named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(again[name], parameter), name
    # Other engines know experts by the names that checkpoints have, one by one.
    names = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in names
    assert load_tokenizer(str(tmp_path)).get_vocab() == load_tokenizer(str(tiny_model)).get_vocab()


def test_what_is_never_learnt_is_written_too(tmp_path: Path) -> None:
    path = save_family("deepseek_v3", tmp_path / "model")
    model = load_model(str(path))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_()
    model.save_pretrained(path)
    export_model(tmp_path / "written", str(path), model.named_parameters())
    again = load_model(str(tmp_path / "written")).state_dict()
    constants = model.state_dict().keys() - dict(model.named_parameters()).keys()
    assert any(name.endswith("e_score_correction_bias") for name in constants)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again[name], tensor), name


def test_an_incomplete_update_is_not_written(tiny_model: Path, tmp_path: Path) -> None:
    first, second, *rest = load_model(str(tiny_model)).named_parameters()
    for some, problem in (
        ([second, *rest], rf"1 tensors .* {first[0]} \(absent, expected \[.*\]\)"),
        ([(first[0], first[1][:2]), second, *rest], rf"1 tensors .* {first[0]} \(\[2, .*\], expected "),
        ([first, second, *rest, ("other", first[1])], r"1 tensors .* other \(\[.*\], expected absent\)"),
    ):
        with pytest.raises(ModelError, match=problem):
            export_model(tmp_path, str(tiny_model), some)
    assert not list(tmp_path.iterdir())


def test_all_end_of_text_tokens_are_found(tiny_model: Path, tmp_path: Path) -> None:
    assert eos_ids_of(str(tiny_model)) == [1]
    model: Any = load_model(str(tiny_model))
    model.generation_config.eos_token_id = [1, 9]
    model.save_pretrained(tmp_path)
    load_tokenizer(str(tiny_model)).save_pretrained(tmp_path)
    assert eos_ids_of(str(tmp_path)) == [1, 9]
    (tmp_path / "generation_config.json").unlink()
    assert eos_ids_of(str(tmp_path)) == [1]
