from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from practicum.rollout.vllm.worker import PracticumWorker


class FakeFilters:
    """As vLLM's sampler: filters in place, draws the likeliest."""

    def forward(self, logits: Any, generators: Any, k: Any, p: Any) -> Any:
        if k is not None:
            logits[logits < logits.topk(k).values[:, -1:]] = float("-inf")
        return logits.argmax(-1), logits.log_softmax(-1)


class FakeMoe(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant_method = SimpleNamespace(moe_kernel="packed")


def worker(runner: Any) -> PracticumWorker:
    made = PracticumWorker()
    made.model_runner = runner
    return made


def test_log_probs_come_from_before_the_filters() -> None:
    runner = SimpleNamespace(
        sampler=SimpleNamespace(logprobs_mode="processed_logprobs", topk_topp_sampler=FakeFilters())
    )
    assert "between" in worker(runner).practicum_prepare()
    logits = torch.tensor([[1.0, 2.0, 0.5]])
    expected = logits.log_softmax(-1)
    for k in (None, 1):
        tokens, log_probs = runner.sampler.topk_topp_sampler.forward(logits.clone(), {}, k, None)
        assert tokens.tolist() == [1] and torch.equal(log_probs, expected)


@pytest.mark.parametrize(
    "sampler", [None, SimpleNamespace(logprobs_mode="raw_logprobs", topk_topp_sampler=FakeFilters())]
)
def test_another_sampler_is_left_alone(sampler: Any) -> None:
    assert "as vLLM has them" in worker(SimpleNamespace(sampler=sampler)).practicum_prepare()


@pytest.mark.parametrize("is_cpu", [True, False])
def test_experts_are_set_up_again_before_new_weights_on_the_cpu(monkeypatch: pytest.MonkeyPatch, is_cpu: bool) -> None:
    platforms: Any = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: is_cpu)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    model = torch.nn.Sequential(FakeMoe(), torch.nn.Linear(1, 1), FakeMoe())
    kernels: list[Any] = []

    def reload(weights_path: str) -> None:
        assert weights_path == "/new"
        kernels.extend(layer.quant_method.moe_kernel for layer in (model[0], model[2]))

    runner = SimpleNamespace(get_model=lambda: model, reload_weights=reload)
    assert f"{2 if is_cpu else 0} layers of experts and 0 heads" in worker(runner).practicum_load("/new")
    assert kernels == ([None, None] if is_cpu else ["packed", "packed"])


class FakeHead(torch.nn.Linear):
    """Keeps its weight and a packed copy of it, as vLLM's head does on the CPU."""

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)
        self.quant_method = SimpleNamespace(process_weights_after_loading=self.pack)
        self.pack(self)

    def pack(self, layer: Any) -> None:
        self.packed = self.weight.detach().clone()
        self.cpu_linear = lambda x: x @ self.packed


def test_a_head_packs_the_weights_it_shares_again(monkeypatch: pytest.MonkeyPatch) -> None:
    platforms: Any = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: True)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    head, emptied = FakeHead(), FakeHead()
    emptied.weight = torch.nn.Parameter(torch.empty(0))  # packed for good
    packed = emptied.packed

    def reload(weights_path: str) -> None:
        head.weight.data.fill_(3.0)

    runner = SimpleNamespace(get_model=lambda: torch.nn.Sequential(head, emptied), reload_weights=reload)
    assert "1 heads" in worker(runner).practicum_load("/new")
    assert torch.equal(head.packed, torch.full((2, 2), 3.0))
    assert emptied.packed is packed
