"""The models of the `replay` benchmark: random weights, enlarged so that it matters where a token goes.

As transformers makes them, layers hardly add to what passes through them, and any expert does as well as another. Here
experts add as much as there is. Gates are flat (all chosen experts have about the same weight, and the next one missed
its place by little) or spread (the first few count, the last hardly).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.grpo_work import VOCABULARY, make_word_tokenizer
from bench.rollout_checks import FAMILIES as ALL_FAMILIES
from bench.rollout_checks import SIZES
from practicum.demo.arithmetic import make_tokenizer

_LOST = 1.7  # what a gated activation takes from the size of random numbers, once on each side of it
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: shape for name, shape in ALL_FAMILIES.items() if "num_experts_per_tok" in shape},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
                "max_position_embeddings": 131_072},  # what its positions are made for
}  # fmt: skip


def save_family(family: str, folder: Path) -> Path:
    """A tiny model of the family in `folder`, with the demo's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer()
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    options = {**SIZES, "num_hidden_layers": 3, **FAMILIES[family], **special, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    _save(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options)), tokenizer, folder)
    return folder


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Qwen3 mixture of experts, and how far its weights are enlarged."""

    num_layers: int
    hidden: int
    expert: int
    num_experts: int
    k: int
    gates: float  # standard deviation of a gate's logits, about
    experts: float  # size of what the experts of a layer add, about, where what passes through it has size 1
    vocabulary: int = VOCABULARY
    heads: int = 4
    head_dim: int = 32
    attention: float = 0.5


def save_plain(shape: Shape, folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Path:
    """Such a model in `folder` with weights as transformers makes them, and a tokenizer of made-up words."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=4 * shape.hidden,
        moe_intermediate_size=shape.expert,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=max(1, shape.heads // 2),
        head_dim=shape.head_dim,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.k,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3MoeForCausalLM(config).to(dtype)
    _save(model, make_word_tokenizer(), folder)
    return folder


@torch.no_grad()
def enlarge(model: Any, shape: Shape) -> None:
    """Draw its weights anew."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        spread = _spread(name, parameter, shape)
        if spread is not None:
            parameter.normal_(0.0, spread)


def _spread(name: str, parameter: Tensor, shape: Shape) -> float | None:
    """Standard deviation of the weights; None for those that stay as they are."""
    narrow = float(parameter.shape[-1]) ** -0.5  # keeps the size of what passes through
    if "norm" in name:
        return None
    if name.endswith("embed_tokens.weight"):
        return 1.0
    if name.endswith("gate.weight"):
        return shape.gates * narrow
    if ".experts." in name:
        return _LOST * shape.experts**0.5 * narrow
    if name.endswith(("o_proj.weight", "v_proj.weight")):
        return shape.attention**0.5 * narrow
    return narrow


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    from practicum.models import save_model

    save_model(model, tokenizer, folder)
