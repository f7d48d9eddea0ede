from __future__ import annotations

from pathlib import Path

from practicum.data import read_prompts
from practicum.demo.arithmetic import Problem, all_problems, make_model, make_tokenizer, write_problems
from practicum.models import encode_prompts


def test_held_out_problems_are_never_trained_on() -> None:
    train, held_out = all_problems(seed=3, num_held_out=400)
    assert (len(train), len(held_out)) == (9600, 400)
    assert not set(train) & set(held_out)
    assert all_problems(seed=3, num_held_out=400)[1] == held_out


def test_problems_become_chat_prompts(tmp_path: Path) -> None:
    write_problems(tmp_path / "sums.jsonl", [Problem(3, 14)])
    (prompt,) = read_prompts(tmp_path / "sums.jsonl")
    assert prompt.answer == "17"
    tokenizer = make_tokenizer()
    (ids,) = encode_prompts(tokenizer, [prompt])
    assert tokenizer.decode(ids) == "<user>03+14=<bot>"
    assert tokenizer.decode(tokenizer("199<end>")["input_ids"], skip_special_tokens=True) == "199"


def test_the_model_is_a_tiny_mixture_of_experts() -> None:
    model = make_model(seed=0)
    assert model.config.num_experts == 8
    assert sum(p.numel() for p in model.parameters()) < 600_000
