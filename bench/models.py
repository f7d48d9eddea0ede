"""The models and prompts of the benchmarks: random weights in several shapes, a tokenizer of made-up words."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

VOCABULARY, LARGE_VOCABULARY = 2048, 151_936
PROMPT_WORDS = (24, 40)  # fewest and most: about 32 tokens, of mixed length as real prompts are
SPECIAL_WORDS = ("<pad>", "<end>")
_SPECIAL_IDS: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}


def words() -> list[str]:
    """Return as many made-up words as the vocabulary has entries, of three syllables each."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    made_up = (a + b + c for a in syllables for b in syllables for c in syllables)
    return [*SPECIAL_WORDS, *(next(made_up) for _ in range(VOCABULARY - len(SPECIAL_WORDS)))]


def write_prompts(path: Path, num_prompts: int = 256, seed: int = 0, num_words: tuple[int, int] = PROMPT_WORDS) -> None:
    chance = random.Random(seed)
    vocabulary = words()[len(SPECIAL_WORDS) :]
    texts = (" ".join(chance.choices(vocabulary, k=chance.randint(*num_words))) for _ in range(num_prompts))
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def make_word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, end = SPECIAL_WORDS
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words())}, unk_token=pad))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=end, unk_token=pad, clean_up_tokenization_spaces=False
    )


def save_random(
    folder: Path, model_type: str, tokenizer: Any = None, *, seed: int = 0, device: str = "cpu", dtype: str = "float32",
    **shape: Any,
) -> Any:  # fmt: skip
    """Write a model with random weights; return it. The tokenizer is one of made-up words unless one is given."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = tokenizer or make_word_tokenizer()
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**_SPECIAL_IDS, **shape}))
    model = model.to(getattr(torch, dtype)).cpu().eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def write_model(folder: Path, mixture_of_experts: bool, **changed: Any) -> None:
    """Write a small Qwen3, dense or with 8 experts of which each token uses 2."""
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }  # fmt: skip
    # No balancing loss on either side: a peer would add one if the config named a coefficient.
    experts = {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "norm_topk_prob": True,
        "router_aux_loss_coef": 0.0,
    }  # fmt: skip
    if mixture_of_experts:
        save_random(folder, "qwen3_moe", **shape, **experts, **changed)
    else:
        save_random(folder, "qwen3", **{**shape, **changed})


# Tiny models of many families

_TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
    "initializer_range": 0.2,  # so that the next token is not a toss-up
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 8},
    "qwen3_moe": {"head_dim": 16, **_EXPERTS},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": _EXPERTS,
    "deepseek_v3": {**_ROUTED, **_LATENT, "n_group": 2, "topk_group": 1},
    "glm4_moe": {**_ROUTED, "head_dim": 16, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
}
MIXTURES: dict[str, dict[str, Any]] = {
    **{name: shape for name, shape in FAMILIES.items() if "num_experts_per_tok" in shape},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
                "max_position_embeddings": 131_072},  # what its positions are made for
}  # fmt: skip


def save_family(family: str, folder: Path, num_layers: int = 3) -> Path:
    """Write a tiny model of the family with the demo's tokenizer."""
    from practicum.demo.arithmetic import make_tokenizer

    tokenizer = make_tokenizer()
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    shape = {**_TINY, "num_hidden_layers": num_layers, **(FAMILIES | MIXTURES)[family], **special}
    save_random(folder, family, tokenizer, vocab_size=len(tokenizer), **shape)
    return folder


# A Qwen3 mixture of experts whose weights are enlarged so that it matters where a token goes

_LOST = 1.7  # what a gated activation takes from the size of random numbers, once on each side of it


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3 mixture of experts, and how far its weights are enlarged.

    As transformers makes them, layers hardly add to what passes through them, and any expert does as well as another.
    Enlarged, experts add as much as there is. Gates are flat (all chosen experts have about the same weight, and the
    next one missed its place by little) or spread (the first few count, the last hardly).
    """

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

    def save(self, folder: Path, device: str = "cpu", dtype: str = "float32") -> Path:
        """Write the model with weights as transformers makes them."""
        save_random(
            folder, "qwen3_moe", device=device, dtype=dtype, vocab_size=self.vocabulary, hidden_size=self.hidden,
            intermediate_size=4 * self.hidden, moe_intermediate_size=self.expert, num_hidden_layers=self.num_layers,
            num_attention_heads=self.heads, num_key_value_heads=max(1, self.heads // 2), head_dim=self.head_dim,
            num_experts=self.num_experts, num_experts_per_tok=self.k, norm_topk_prob=True,
            max_position_embeddings=1024, tie_word_embeddings=False,
        )  # fmt: skip
        return folder

    def enlarge(self, model: Any) -> None:
        """Draw the model's weights anew."""
        import torch

        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                spread = self._spread(name, parameter)
                if spread is not None:
                    parameter.normal_(0.0, spread)

    def _spread(self, name: str, parameter: Tensor) -> float | None:
        """Return the standard deviation of the weights; None for those that stay as they are."""
        narrow = float(parameter.shape[-1]) ** -0.5  # keeps the size of what passes through
        if "norm" in name:
            return None
        if name.endswith("embed_tokens.weight"):
            return 1.0
        if name.endswith("gate.weight"):
            return self.gates * narrow
        if ".experts." in name:
            return _LOST * self.experts**0.5 * narrow
        if name.endswith(("o_proj.weight", "v_proj.weight")):
            return self.attention**0.5 * narrow
        return narrow


# The models of the benchmarks on a CUDA device

_LARGE: dict[str, Any] = {
    "vocab_size": LARGE_VOCABULARY, "hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128,
    "max_position_embeddings": 40_960, "intermediate_size": 3072,
}  # fmt: skip
SMALL_CHANGES = {"num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 4096, "intermediate_size": 512}
_LARGE_SHAPES: dict[str, dict[str, Any]] = {
    "dense": {  # 0.6 billion
        "model_type": "qwen3", "num_hidden_layers": 28, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "moe": {  # 1.6 billion
        "model_type": "qwen3_moe", "num_hidden_layers": 16, "num_key_value_heads": 4, "moe_intermediate_size": 384,
        "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False,
    },
}  # fmt: skip


def save_large(name: str, folder: Path, *, quick: bool = False) -> Path:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = {**_LARGE, **_LARGE_SHAPES[name], **(SMALL_CHANGES if quick else {})}
    save_random(folder, shape.pop("model_type"), device=device, dtype="bfloat16", **shape)
    return folder


def step_bytes(config: Any, num_rows: int, context: int, itemsize: int = 2) -> float:
    """Return what a decoding step must read: all weights that it uses, and the keys and values of all rows."""
    config = config.get_text_config()
    width, layers = config.hidden_size, config.num_hidden_layers
    heads = config.num_attention_heads, config.num_key_value_heads
    attention = width * config.head_dim * (2 * heads[0] + 2 * heads[1])
    experts = getattr(config, "num_experts", None)
    if experts:
        k = config.num_experts_per_tok
        used = experts * (1 - (1 - k / experts) ** num_rows)  # to which some token is sent, by even chances
        mlp = 3 * width * config.moe_intermediate_size * used + experts * width
    else:
        mlp = 3 * width * config.intermediate_size
    weights = layers * (attention + mlp) + config.vocab_size * width
    kept = num_rows * context * layers * 2 * heads[1] * config.head_dim
    return float(itemsize * (weights + kept))
