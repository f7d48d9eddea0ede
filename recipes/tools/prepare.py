"""Makes this recipe's files: data, and a tiny mixture of experts that has seen how products are asked and answered.

    <user>47*68=<bot>[47*68]<end><tool>3196<bot>3196<end>      with the calculator
    <user>47*68=<bot>3196<end>                                 in the head

In the examples it is warmed up with, three out of four pupils work in their heads. The model learns to do as they do,
which it is too small to do well; that asking the calculator pays, it has to find out by practice.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from practicum.demo.arithmetic import make_model
from practicum.models import save_model

CHARACTERS = [
    "<pad>",
    "<end>",
    "<user>",
    "<bot>",
    "<tool>",
    *"0123456789*=[] ",
    *"abcdefghijklmnopqrstuvwxyz",
    *":',().EV",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ {'user': '<user>', 'tool': '<tool>', 'assistant': '<bot>'}[message['role']] }}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<end>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
NUM_HELD_OUT = 400
Problem = tuple[int, int]


def all_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """All products of two numbers from 32 to 99, which have four digits; shuffled: to train on, and held out."""
    problems = [(left, right) for left in range(32, 100) for right in range(32, 100)]
    order = np.random.default_rng(seed).permutation(len(problems))
    shuffled = [problems[i] for i in order]
    return shuffled[NUM_HELD_OUT:], shuffled[:NUM_HELD_OUT]


def write_problems(path: Path, problems: Sequence[Problem]) -> None:
    with path.open("w") as file:
        for left, right in problems:
            message = {"role": "user", "content": f"{left}*{right}="}
            record = {"prompt": [message], "answer": str(left * right), "data_source": "products"}
            file.write(json.dumps(record) + "\n")


def make_tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: index for index, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<pad>",
        additional_special_tokens=["<user>", "<bot>", "<tool>"],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_calculator_model(seed: int) -> Any:
    """The demonstration's model, with more characters and room for an error message."""
    config = make_model(seed).config
    config.vocab_size, config.max_position_embeddings = len(CHARACTERS), 128
    torch.manual_seed(seed)
    return type(make_model(seed))(config)


def warm_up(
    problems: Sequence[Problem],
    *,
    seed: int,
    num_steps: int,
    asking_share: float,
    batch_size: int = 64,
    lr: float = 2e-3,
) -> tuple[Any, Any]:
    """Model and tokenizer after supervised steps on examples, a share of which asks the calculator."""
    tokenizer, model = make_tokenizer(), make_calculator_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    random = np.random.default_rng(seed)
    for _ in range(num_steps):
        chosen = [problems[i] for i in random.choice(len(problems), batch_size, replace=False)]
        input_ids, learnt = batch_of(tokenizer, chosen, random.random(batch_size) < asking_share)
        log_probs = model(input_ids=input_ids).logits[:, :-1].log_softmax(-1)
        log_probs = log_probs.gather(-1, input_ids[:, 1:, None])[..., 0] * learnt[:, 1:]
        (-log_probs.sum() / learnt.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


def batch_of(tokenizer: Any, problems: Sequence[Problem], asks: Sequence[bool]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [batch, width], and where the model's own words are in them [batch, width]."""
    rows = []
    for (left, right), asks_first in zip(problems, asks, strict=True):
        spans = [(f"<user>{left}*{right}=<bot>", False)]
        if asks_first:
            spans += [(f"[{left}*{right}]<end>", True), (f"<tool>{left * right}<bot>", False)]
        spans.append((f"{left * right}<end>", True))
        encoded = [(tokenizer(text, add_special_tokens=False)["input_ids"], own) for text, own in spans]
        rows.append([(token, own) for ids, own in encoded for token in ids])
    width = max(map(len, rows))
    padded = torch.tensor([[*row, *[(tokenizer.pad_token_id, False)] * (width - len(row))] for row in rows])
    return padded[..., 0], padded[..., 1].bool()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/tools"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300, help="of the warm-up")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small to gain from more
    options.folder.mkdir(parents=True, exist_ok=True)
    train, held_out = all_problems(options.seed)
    write_problems(options.folder / "train.jsonl", train)
    write_problems(options.folder / "held-out.jsonl", held_out)
    model, tokenizer = warm_up(train, seed=options.seed, num_steps=options.steps, asking_share=0.25)
    save_model(model, tokenizer, options.folder / "model")
    print(f"made {options.folder}/model, train.jsonl and held-out.jsonl")


if __name__ == "__main__":
    main()
