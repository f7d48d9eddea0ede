"""Tiny models with random weights on disk, with the demo's tokenizer: of each family, tied ones, and classifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from practicum.demo.arithmetic import make_tokenizer

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # so that the next token is not a toss-up
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 8},
}
MIXED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen2_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                  "shared_expert_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": _MLA,
    "glm4_moe": {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                 "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
}  # fmt: skip
UNSUPPORTED: dict[str, dict[str, Any]] = {
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba": {},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "llama4_text": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96,
                    "attention_chunk_size": 16},
}  # fmt: skip


def save_family(family: str, folder: Path) -> Path:
    """Save a model of the family."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer()
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    options = {**_SIZES, **(DENSE | MIXED | UNSUPPORTED)[family], **special, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


SMALL: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen3_moe, tied": {
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "tie_word_embeddings": True,
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}


def save_small(family: str, folder: Path) -> Path:
    """Save a smaller model, for what takes weights apart and puts them together."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,  # so that log-probs are apart, and experts matter
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.partition(",")[0], **{**shape, **SMALL[family]})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_classifier(folder: Path, *, seed: int = 0, tokenizer: Any = None, **changes: Any) -> Path:
    """Save a Llama with a classification head; like many such models it names no padding token."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": 18,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "num_labels": 1,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 1,
        "initializer_range": 0.2,
    }
    LlamaForSequenceClassification(LlamaConfig(**(shape | changes))).save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return folder
