from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from practicum.errors import ReplayError
from practicum.models import empty_model, load_model
from practicum.replay import RouteRecorder, RouteReplayer, check_replayable, find_routers, router_shape
from tests.models import DENSE, MIXED, UNSUPPORTED, save_family

FAMILIES = [*MIXED, "gpt_oss"]
assert {"qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss"} <= set(FAMILIES)
TOKENS = torch.from_numpy(np.random.default_rng(0).integers(0, 15, (2, 6)))


def loaded(family: str, folder: Path) -> Any:
    return load_model(str(save_family(family, folder))).train()


def recorded(model: Any) -> np.ndarray:
    recorder = RouteRecorder(model)
    with torch.no_grad():
        model(input_ids=TOKENS, use_cache=False)
    recorder.close()
    return recorder.take()


def perturb(model: Any, by: float = 0.3) -> None:
    """So that the live routers choose other experts than they did."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * parameter.std() * torch.randn_like(parameter)


def by_layer(routes: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(routes.transpose(1, 0, 2)))


def everything(num: int = TOKENS.numel()) -> Tensor:
    return torch.ones(num, dtype=torch.bool)


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def learn(model: Any, tokens: Tensor = TOKENS) -> None:
    logits = model(input_ids=tokens, use_cache=False).logits
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()


@pytest.mark.parametrize(("family", "layers"), [(name, [1, 2] if name in ("deepseek_v3", "glm4_moe") else [0, 1, 2])
                                                for name in FAMILIES])  # fmt: skip
def test_routers_are_found_by_layer_and_their_choice_is_kept(family: str, layers: list[int], tmp_path: Path) -> None:
    model = loaded(family, tmp_path)
    assert list(find_routers(model)) == layers
    for known in (model, empty_model(model.config)):  # without weights too
        assert router_shape(known).layers.tolist() == layers
    recorder = RouteRecorder(model)
    with torch.no_grad():
        model(input_ids=TOKENS)
    chosen = recorder.take()
    assert chosen.shape == (12, len(layers), 2)
    assert chosen.dtype == np.uint8
    assert (chosen[..., 0] < chosen[..., 1]).all()  # two different experts, in ascending order
    recorder.close()
    with torch.no_grad():
        model(input_ids=TOKENS)
    with pytest.raises(AssertionError, match="routed nothing"):
        recorder.take()


@pytest.mark.parametrize("family", FAMILIES)
def test_after_the_weights_have_changed_every_token_goes_where_it_went(family: str, tmp_path: Path) -> None:
    model = loaded(family, tmp_path)
    check_replayable(model)
    before = recorded(model)
    perturb(model)
    assert (recorded(model) != before).any(), "the weights were not changed enough to tell"
    replayer = RouteReplayer(model)
    recorder = RouteRecorder(model)
    with replayer.replaying(by_layer(before), everything()) as seen:
        learn(model)
    assert np.array_equal(recorder.take(), before)
    assert sum(int(num) for num in seen.differing.values()) > 0
    grads = gradients(model)
    gates = [name for name in grads if ".gate.weight" in name or ".router.weight" in name]
    assert len(gates) == len(router_shape(model).layers)
    assert all(grads[name].abs().max() > 0 for name in gates)
    replayer.close()
    recorder.close()
    assert (recorded(model) != before).any(), "the routers are not free again"


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_what_the_live_router_chooses_changes_nothing(family: str, tmp_path: Path) -> None:
    model = loaded(family, tmp_path)
    chosen = recorded(model)
    learn(model)
    plain = gradients(model)
    replayer = RouteReplayer(model)
    with replayer.replaying(by_layer(chosen), everything()) as seen:
        learn(model)
    replayed = gradients(model)
    assert not any(int(num) for num in seen.differing.values())
    for name in plain:  # to the last bit, whatever the order in which a router names its experts
        assert torch.equal(plain[name], replayed[name]), name


def test_nor_with_many_experts_a_token() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 18, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    many = {"num_experts": 300, "num_experts_per_tok": 8, "moe_intermediate_size": 16, "initializer_range": 0.2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **many))
    assert router_shape(model).dtype is np.uint16
    routes = recorded(model)
    with torch.no_grad():
        plain = model(input_ids=TOKENS, use_cache=False).logits
        replayer = RouteReplayer(model)
        with replayer.replaying(by_layer(routes.astype(np.int32)), everything()):
            assert torch.equal(model(input_ids=TOKENS, use_cache=False).logits, plain)
        perturb(model)
        recorder = RouteRecorder(model)
        with replayer.replaying(by_layer(routes.astype(np.int32)), everything()) as seen:
            model(input_ids=TOKENS, use_cache=False)
    assert np.array_equal(recorder.take(), routes) and sum(map(int, seen.differing.values())) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_recomputed_layers_are_the_plain_ones(family: str, tmp_path: Path) -> None:
    model = loaded(family, tmp_path)
    routes = by_layer(recorded(model))
    perturb(model)
    replayer = RouteReplayer(model)
    with replayer.replaying(routes, everything()):
        learn(model)
    plain = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": replayer.checkpoint_contexts})
    with replayer.replaying(routes, everything()):
        logits = model(input_ids=TOKENS, use_cache=False).logits
    # The backward pass comes when another pass is open, or none: recomputed layers still get their own record.
    other = routes.flip(1)
    with replayer.replaying(other, everything()), torch.no_grad():
        model(input_ids=TOKENS, use_cache=False)
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    saving = gradients(model)
    for name in plain:
        assert torch.allclose(plain[name], saving[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_tokens_without_a_record_are_decided_by_the_live_router(family: str, tmp_path: Path) -> None:
    model = loaded(family, tmp_path)
    before = recorded(model)
    perturb(model)
    live = recorded(model)
    known = torch.arange(len(before)) % 3 != 0
    damaged = np.where(known.numpy()[:, None, None], before, 0)
    replayer, recorder = RouteReplayer(model), RouteRecorder(model)
    with replayer.replaying(by_layer(damaged), known) as seen, torch.no_grad():
        model(input_ids=TOKENS, use_cache=False)
    got = recorder.take()
    assert np.array_equal(got[known.numpy()], before[known.numpy()])
    first = known.logical_not().nonzero()[0].item()
    assert np.array_equal(got[first, 0], live[first, 0])  # in the first layer nothing else has changed yet
    assert all(int(num) <= int(known.sum()) for num in seen.differing.values())


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_compiled_layers_replay_without_a_break_in_their_graph(family: str, tmp_path: Path) -> None:
    model = loaded(family, tmp_path).eval()
    routes = by_layer(recorded(model))
    perturb(model)
    replayer = RouteReplayer(model)
    with replayer.replaying(routes, everything()), torch.no_grad():
        plain = model(input_ids=TOKENS, use_cache=False).logits
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    recorder = RouteRecorder(model)
    with replayer.replaying(routes, everything()), torch.no_grad():
        compiled = model(input_ids=TOKENS, use_cache=False).logits
    assert torch.allclose(plain, compiled, atol=1e-5)
    assert np.array_equal(by_layer(recorder.take()), routes)


def test_each_record_is_used_exactly_once_in_a_pass(tmp_path: Path) -> None:
    model = loaded("qwen3_moe", tmp_path)
    routes = by_layer(recorded(model))
    replayer = RouteReplayer(model)
    asked_twice = pytest.raises(ReplayError, match="update 3, batch 1: the router of layer 0 was asked twice")
    with asked_twice, replayer.replaying(routes, everything(), "update 3, batch 1"):
        model(input_ids=TOKENS)
        model(input_ids=TOKENS)
    left_out = pytest.raises(ReplayError, match="batch 2: the router of layer 1 was not asked")
    with left_out, replayer.replaying(routes, everything(), "batch 2"):
        find_routers(model)[0](torch.randn(12, 64))
    other_size = pytest.raises(ReplayError, match="batch 3: the router of layer 0 was given 4 tokens where 12 were")
    with other_size, replayer.replaying(routes, everything(), "batch 3"):
        model(input_ids=TOKENS[:, :2])
    with replayer.replaying(routes, everything()):  # after all that it works as before
        model(input_ids=TOKENS)


def test_two_models_have_records_of_their_own(tmp_path: Path) -> None:
    model, other = loaded("qwen3_moe", tmp_path), load_model(str(tmp_path)).train()
    routes = by_layer(recorded(model)).flip(1)
    replayer, recorder = RouteReplayer(model), RouteRecorder(other)
    with replayer.replaying(routes, everything()):
        model(input_ids=TOKENS)
        other(input_ids=TOKENS)
    assert np.array_equal(by_layer(recorder.take()), routes.flip(1))


@pytest.mark.parametrize("family", DENSE)
def test_dense_models_have_none(family: str, tmp_path: Path) -> None:
    model = load_model(str(save_family(family, tmp_path)))
    assert find_routers(model) == {}
    with pytest.raises(ReplayError, match=rf"'{family}'\) is dense.*router_replay\.mode=disabled"):
        router_shape(model)


@pytest.mark.parametrize("family", [name for name in UNSUPPORTED if name not in ("gpt_oss", "mamba")])
def test_routers_of_another_kind_are_refused_by_name(family: str, tmp_path: Path) -> None:
    model = load_model(str(save_family(family, tmp_path)))
    with pytest.raises(ReplayError, match=r"router|experts"):
        check_replayable(model)


class Stubborn(nn.Module):
    """A router that sends tokens elsewhere than its first top-k says."""

    def __init__(self, of: nn.Module, forward: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.top_k, self.num_experts, self.weight = of.top_k, of.num_experts, of.weight
        self._forward = forward

    def forward(self, hidden: Tensor) -> Any:
        return self._forward(hidden)


@pytest.mark.parametrize(
    "forward",
    [
        lambda hidden: (hidden[:, :8], torch.ones(len(hidden), 2), torch.arange(2).expand(len(hidden), 2)),
        lambda hidden: (hidden[:, :8], *torch.topk(torch.topk(hidden[:, :8], 2)[0].repeat(1, 4), 2)),
    ],
    ids=["no top-k", "two of them"],
)
def test_a_router_that_chooses_otherwise_is_found_out(forward: Callable[[Tensor], Any], tmp_path: Path) -> None:
    model = loaded("qwen3_moe", tmp_path)
    mlp = model.model.layers[1].mlp
    mlp.gate = Stubborn(mlp.gate, forward)
    with pytest.raises(ReplayError, match=r"router of layer 1 \(Stubborn\) does not choose by one top-k"):
        check_replayable(model)


def test_layers_in_between_may_have_no_router() -> None:
    from transformers import Qwen3MoeConfig

    shape: dict[str, Any] = {"vocab_size": 18, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    mixed = Qwen3MoeConfig(**shape, mlp_only_layers=[1], decoder_sparse_step=1)
    assert router_shape(empty_model(mixed)).layers.tolist() == [0, 2]
