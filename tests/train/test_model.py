from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from practicum.data import pack
from practicum.models import load_model
from practicum.train.model import LogProbModel, ValueModel, entropies, supports_packing
from tests.samples import make_sample


def tiny(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if family != "falcon":  # derives it, and refuses to be told
        shape["head_dim"] = 8
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape)).eval()


# falcon, gpt_oss and mamba mix samples that share a row, each in its own way.
@pytest.mark.parametrize(
    ("family", "apart"),
    [("llama", True), ("mixtral", True), ("gpt2", True), ("gpt_oss", False), ("falcon", False), ("mamba", False)],
)
def test_models_that_mix_the_samples_of_a_row_are_recognised_and_still_right(family: str, apart: bool) -> None:
    model = tiny(family)
    assert supports_packing(model) is apart
    assert_packed_equals_alone(model, packing=apart)


# gemma2 caps its logits after the output layer, and alternates local and global attention.
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixtral", "gemma2"])
def test_packed_log_probs_equal_those_of_each_sample_alone(family: str) -> None:
    model = tiny(family)
    assert supports_packing(model)
    assert_packed_equals_alone(model, packing=True)


def assert_packed_equals_alone(model: Any, packing: bool) -> None:
    samples = [make_sample(p, a, seed=i) for i, (p, a) in enumerate([(3, 9), (2, 2), (5, 1), (1, 4), (4, 8)])]
    expected = []
    for item in samples:
        ids = torch.tensor([*item.prompt_ids, *item.token_ids])[None]
        with torch.no_grad():
            log_probs = (model(input_ids=ids).logits[0, :-1].float() / 0.7).log_softmax(-1)
        expected.append(log_probs.gather(-1, ids[0, 1:, None])[len(item.prompt_ids) - 1 :, 0])
    packed = pack(samples, packing)
    assert (packed.input_ids.shape[0] < len(samples)) == packing
    inputs = (packed.input_ids, packed.position_ids, packed.predict_at, packed.targets)
    with torch.no_grad():
        found, entropy = LogProbModel(model)(*map(torch.from_numpy, inputs), temperature=0.7)
    assert (found - torch.cat(expected)).abs().max() < 2e-5
    assert ((entropy > 0) & (entropy < torch.log(torch.tensor(32.0)))).all()


def test_the_model_is_as_before_outside_of_it(tiny_model: Path) -> None:
    model = load_model(str(tiny_model)).eval()
    ids = torch.tensor([[4, 5, 6]])
    before = model(input_ids=ids).logits
    LogProbModel(model)
    assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("num", [0, 1, 300])
def test_entropies_are_those_of_the_whole_however_many_there_are(num: int) -> None:
    log_probs = torch.randn(num, 4000).log_softmax(-1)  # more than are looked at together
    assert torch.allclose(entropies(log_probs), -(log_probs.exp() * log_probs).sum(-1), rtol=1e-6)


@pytest.mark.parametrize("learns", [False, True])
def test_entropy_has_a_gradient_only_where_it_is_learnt(learns: bool) -> None:
    ids = torch.arange(6)[None]
    found = LogProbModel(tiny("llama"), learns_entropy=learns)
    _, entropy = found(ids, ids, torch.tensor([2, 4]), torch.tensor([3, 5]), 1.0)
    assert entropy.requires_grad == learns
    if learns:
        entropy.sum().backward()
        assert any(p.grad is not None and p.grad.abs().max() > 0 for p in found.parameters())


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss", "mamba"])
def test_a_value_of_any_family_looks_back_and_not_ahead(family: str) -> None:
    model = ValueModel(tiny(family))
    ids = torch.arange(8)[None]
    assert model(ids, ids, torch.arange(8)).tolist() == [0.0] * 8  # nothing is expected at first
    torch.nn.init.normal_(model.head.weight)
    other = ids.clone()
    other[0, 5] = 20
    with torch.no_grad():
        before, after = (model(tokens, ids, torch.arange(8)) for tokens in (ids, other))
    assert before[:5] == pytest.approx(after[:5], abs=1e-5)
    assert (before[5:] - after[5:]).abs().max() > 1e-4
