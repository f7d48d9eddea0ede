"""A short supervised warm-up, so that the demonstration's model finds the right answer now and then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from practicum.demo.arithmetic import BOT, END, USER, Problem, make_model, make_tokenizer


def warm_up(
    folder: Path,
    problems: Sequence[Problem],
    *,
    seed: int,
    num_steps: int,
    batch_size: int = 64,
    lr: float = 2e-3,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train the tiny model on questions with their answers, then save it and its tokenizer into `folder`."""
    tokenizer, model = make_tokenizer(), make_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    random = np.random.default_rng(seed)
    for step in range(1, num_steps + 1):
        chosen = [problems[i] for i in random.choice(len(problems), batch_size, replace=False)]
        input_ids, labels = _batch(tokenizer, chosen)
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        on_step(step, loss.item())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _batch(tokenizer: Any, problems: Sequence[Problem]) -> tuple[torch.Tensor, torch.Tensor]:
    questions = [f"{USER}{problem.question}{BOT}" for problem in problems]
    width = len(tokenizer(questions[0])["input_ids"])
    texts = [f"{question}{problem.answer}{END}" for question, problem in zip(questions, problems, strict=True)]
    encoded = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    labels = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)
    labels[:, :width] = -100
    return encoded["input_ids"], labels
