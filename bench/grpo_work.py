"""The work both sides of the `grpo` benchmark do: one model folder, one prompt file, one reward, one set of numbers.

Imported in the environments of both; torch and transformers are needed only to make the model.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 2048
PROMPT_WORDS = (24, 40)  # fewest and most: about 32 tokens, of mixed length as real prompts are
SPECIAL_WORDS = ("<pad>", "<end>")


@dataclass(frozen=True, slots=True)
class Job:
    """All a contestant needs to know."""

    model: str
    prompts: str
    run_dir: str
    threads: int
    prompts_per_step: int
    answers_per_prompt: int
    max_new_tokens: int
    lr: float = 1e-6
    clip_low: float = 0.2
    clip_high: float = 0.28
    max_grad_norm: float = 1.0
    device: str = "cpu"
    dtype: str = "float32"
    max_prompt_tokens: int = 64
    micro_batch_tokens: int = 8192  # ours
    pass_answers: int | None = None  # the peer's, in one forward and backward pass; None: all
    replay: str = "disabled"

    @property
    def answers_per_step(self) -> int:
        return self.prompts_per_step * self.answers_per_prompt

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: str) -> Job:
        return cls(**json.loads(Path(path).read_text()))


def even_share(token_ids: Sequence[int]) -> float:
    """The reward: the share of even token ids. Costs next to nothing and differs between answers."""
    return sum(token % 2 == 0 for token in token_ids) / len(token_ids)


def words() -> list[str]:
    """As many made-up words as the vocabulary has entries, of three syllables each."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    made_up = (a + b + c for a in syllables for b in syllables for c in syllables)
    return [*SPECIAL_WORDS, *(next(made_up) for _ in range(VOCABULARY - len(SPECIAL_WORDS)))]


def write_prompts(path: Path, num_prompts: int = 256, seed: int = 0, num_words: tuple[int, int] = PROMPT_WORDS) -> None:
    chance = random.Random(seed)
    vocabulary = words()[len(SPECIAL_WORDS) :]
    with path.open("w") as file:
        for _ in range(num_prompts):
            text = " ".join(chance.choices(vocabulary, k=chance.randint(*num_words)))
            file.write(json.dumps({"prompt": text}) + "\n")


def read_prompts(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write_model(folder: Path, mixture_of_experts: bool, seed: int = 0) -> None:
    """A small Qwen3, dense or with 8 experts of which each token uses 2, with random weights, and a tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    model: Any
    if mixture_of_experts:
        # No balancing loss on either side: the peer would add one if the config named a coefficient.
        experts: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, norm_topk_prob=True, router_aux_loss_coef=0.0))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    model.save_pretrained(folder)
    make_word_tokenizer().save_pretrained(folder)


def make_word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, end = SPECIAL_WORDS
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words())}, unk_token=pad))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=end, unk_token=pad, clean_up_tokenization_spaces=False
    )
