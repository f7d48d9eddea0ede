"""The models of the benchmarks on a CUDA device: random weights, in the shapes that results are compared by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bench.models import make_word_tokenizer

VOCABULARY = 151_936
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {  # 0.6 billion
        "model_type": "qwen3", "num_hidden_layers": 28, "num_key_value_heads": 8, "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "moe": {  # 1.6 billion
        "model_type": "qwen3_moe", "num_hidden_layers": 16, "num_key_value_heads": 4, "intermediate_size": 3072,
        "moe_intermediate_size": 384, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


def save_shape(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **changed: Any) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    from practicum.models import save_model

    shape = {**_COMMON, **SHAPES[name], **changed}
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config).to(dtype)
    save_model(model.cpu(), make_word_tokenizer(), folder)
    return folder


def step_bytes(config: Any, num_rows: int, context: int, itemsize: int = 2) -> float:
    """What a decoding step must read: all weights that it uses, and the keys and values of all rows."""
    config = config.get_text_config()
    width, layers = config.hidden_size, config.num_hidden_layers
    heads = config.num_attention_heads, config.num_key_value_heads
    attention = width * config.head_dim * (2 * heads[0] + 2 * heads[1])
    experts = getattr(config, "num_experts", None)
    if experts:
        k = config.num_experts_per_tok
        used = experts * (1 - (1 - k / experts) ** num_rows)  # of which some token is sent to, by even chances
        mlp = 3 * width * config.moe_intermediate_size * used + experts * width
    else:
        mlp = 3 * width * config.intermediate_size
    weights = layers * (attention + mlp) + config.vocab_size * width
    kept = num_rows * context * layers * 2 * heads[1] * config.head_dim
    return float(itemsize * (weights + kept))
