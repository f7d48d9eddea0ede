"""The models and prompts of the benchmarks: random weights in several shapes, a tokenizer of made-up words."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY, LARGE_VOCABULARY = 2048, 151_936
WORDS = ["<pad>", "<end>", *(f"w{number}" for number in range(2, VOCABULARY))]


def write_prompts(path: Path, num_words: tuple[int, int] = (24, 40)) -> None:
    """Write prompts of at least and at most so many words: of mixed length, as real ones are."""
    chance = random.Random(0)
    texts = (" ".join(chance.choices(WORDS[2:], k=chance.randint(*num_words))) for _ in range(256))
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def make_word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, end, *_ = WORDS
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token=pad))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=end, unk_token=pad, clean_up_tokenization_spaces=False
    )


def save_random(
    folder: Path, model_type: str, tokenizer: Any = None, *, seed: int = 0, device: str = "cpu", dtype: str = "float32",
    change: Callable[[Any], None] | None = None, **shape: Any,
) -> Path:  # fmt: skip
    """Write a model with random weights, which `change` may change first. The tokenizer is one of made-up words unless
    one is given."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    shape = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, **shape}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **shape))
    if change is not None:
        with torch.no_grad():
            change(model)
    model.to(getattr(torch, dtype)).cpu().eval().save_pretrained(folder)
    (tokenizer or make_word_tokenizer()).save_pretrained(folder)
    return folder


_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "norm_topk_prob": True,
    # No balancing loss on either side: a peer would add one if the config named a coefficient.
    "router_aux_loss_coef": 0.0,
}  # fmt: skip


def write_model(folder: Path, mixture_of_experts: bool, tokenizer: Any = None, **changed: Any) -> Path:
    """Write a small Qwen3, dense or with 8 experts of which each token uses 2."""
    family, experts = ("qwen3_moe", _EXPERTS) if mixture_of_experts else ("qwen3", {})
    return save_random(folder, family, tokenizer, **{**_SMALL, **experts, **changed})


_LOST = 1.7  # what a gated activation takes from the size of random numbers, once on each side of it


def write_enlarged(folder: Path, *, gates: float, experts: float, attention: float = 0.5, **shape: Any) -> Path:
    """Write a mixture of experts whose weights are enlarged, so that it matters where a token goes: as transformers
    makes them, any expert does as well as another. The experts of a layer add about `experts` where what passes through
    it has size 1. `gates` is about the standard deviation of a gate's logits: flat (all chosen experts have about the
    same weight) or spread (the first few count, the last hardly)."""

    def enlarge(model: Any) -> None:
        import torch

        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            narrow = float(parameter.shape[-1]) ** -0.5  # keeps the size of what passes through
            if name.endswith("embed_tokens.weight"):
                narrow = 1.0
            elif name.endswith("gate.weight"):
                narrow *= gates
            elif ".experts." in name:
                narrow *= _LOST * experts**0.5
            elif name.endswith(("o_proj.weight", "v_proj.weight")):
                narrow *= attention**0.5
            if "norm" not in name:
                parameter.normal_(0.0, narrow)

    return write_model(folder, True, change=enlarge, **{"head_dim": 32, "max_position_embeddings": 1024, **shape})


# The models of the benchmarks on a CUDA device

_LARGE: dict[str, Any] = {
    "vocab_size": LARGE_VOCABULARY, "hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128,
    "max_position_embeddings": 40_960, "intermediate_size": 3072,
}  # fmt: skip
LARGE_SHAPES: dict[str, dict[str, Any]] = {
    # 0.6 billion
    "dense": {**_LARGE, "num_hidden_layers": 28, "num_key_value_heads": 8, "tie_word_embeddings": True},
    # 1.6 billion
    "moe": {**_LARGE, "num_hidden_layers": 16, "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 8,
            "moe_intermediate_size": 384},
}  # fmt: skip
QUICK_SHAPE = {"num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 4096, "intermediate_size": 512}


# What models must read and compute


def layer_weights(config: Any, num_experts: float) -> float:
    """Return the weights of a layer that are used: attention, and the MLP or so many of the experts."""
    width = config.hidden_size
    attention = width * config.head_dim * 2 * (config.num_attention_heads + config.num_key_value_heads)
    if getattr(config, "num_experts", None):
        return float(attention + num_experts * 3 * width * config.moe_intermediate_size + config.num_experts * width)
    return float(attention + 3 * width * config.intermediate_size)


def step_bytes(config: Any, num_rows: int, context: int, itemsize: int = 2) -> float:
    """Return what a decoding step must read: all weights that it uses, and the keys and values of all rows."""
    used = 0.0
    if experts := getattr(config, "num_experts", None):
        used = experts * (1 - (1 - config.num_experts_per_tok / experts) ** num_rows)  # by even chances
    weights = config.num_hidden_layers * layer_weights(config, used) + config.vocab_size * config.hidden_size
    kept = num_rows * context * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim
    return float(itemsize * (weights + kept))
