"""The demonstration's world: two-digit sums, a tokenizer of single characters, a tiny mixture of experts.

prompt  <user>03+14=<bot>        answer  17<end>
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PAD, END, USER, BOT = "<pad>", "<end>", "<user>", "<bot>"
_CHARACTERS = [PAD, END, USER, BOT, *"0123456789+=- "]
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<user>' if message['role'] == 'user' else '<bot>' }}{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Problem:
    left: int
    right: int
    digits: int = 2

    @property
    def question(self) -> str:
        return f"{self.left:0{self.digits}d}+{self.right:0{self.digits}d}="

    @property
    def answer(self) -> str:
        return str(self.left + self.right)


def all_problems(seed: int, num_held_out: int) -> tuple[list[Problem], list[Problem]]:
    """All sums of two numbers from 00 to 99, shuffled: those to train on and those held out."""
    problems = [Problem(left, right) for left in range(100) for right in range(100)]
    order = np.random.default_rng(seed).permutation(len(problems))
    shuffled = [problems[i] for i in order]
    return shuffled[num_held_out:], shuffled[:num_held_out]


def write_problems(path: Path, problems: Sequence[Problem]) -> None:
    """Write a prompt file, the same as anyone's own."""
    with path.open("w") as file:
        for problem in problems:
            message = {"role": "user", "content": problem.question}
            file.write(json.dumps({"prompt": [message], "answer": problem.answer, "data_source": "sums"}) + "\n")


def make_tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: index for index, character in enumerate(_CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=PAD,
        additional_special_tokens=[USER, BOT],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    return wrapped


def make_model(seed: int, **changed: int) -> Any:
    """A Qwen3-MoE of half a million parameters: 2 layers, 8 experts of which each token uses 2. `changed` are other
    sizes."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": len(_CHARACTERS),
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        **changed,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape))
