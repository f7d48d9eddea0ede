"""Makes this recipe's files: problems, a tiny model that practises sums, and another that judges them.

    <user>35+77=<bot>112<end>                the pupil
    <user>112 35+77=<bot>112 1<end>          the judge: works the sum out, then says whether the answer is right
    <user>102 35+77=<bot>112 0<end>

The judge is taught with half of the problems and the pupil practises on the other half, so nobody ever told the judge
the results that it judges. A third part is held out from both. The pupil is warmed up on worked sums, two in five of
them wrong, from both halves.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from practicum.demo.arithmetic import BOT, END, USER, Problem, all_problems, make_tokenizer
from practicum.demo.run import NUM_HELD_OUT, WARM_UP_ACCURACY, WRONG_SHARE
from practicum.demo.warmup import warm_up
from practicum.models import save_model

TEMPLATE = "{answer} {question}"  # as in train.yaml
NONSENSE = "0123456789+=-"
SUMS_SHARE = 0.35  # of the judge's lessons: the first are sums alone
RIGHT_SHARE = 0.3  # of the answers that it is shown after that


@dataclass(frozen=True, slots=True)
class Problems:
    """Three parts that have no problem in common."""

    of_pupil: list[Problem]
    of_judge: list[Problem]
    held_out: list[Problem]


def three_parts(seed: int) -> Problems:
    rest, held_out = all_problems(seed, NUM_HELD_OUT)
    half = len(rest) // 2
    return Problems(rest[:half], rest[half:], held_out)


def write_problems(path: Path, problems: Sequence[Problem], source: str) -> None:
    with path.open("w") as file:
        for problem in problems:
            message = {"role": "user", "content": problem.question}
            file.write(json.dumps({"prompt": [message], "answer": problem.answer, "data_source": source}) + "\n")


def wrong_answer(problem: Problem, random: np.random.Generator) -> str:
    """As a pupil gets it wrong: by a digit, by a carry; now and then nonsense, lest nonsense please the judge."""
    kind = random.random()
    if kind < 0.1:
        answer = "".join(random.choice(list(NONSENSE), random.integers(1, 7)))
    elif kind < 0.5:
        answer = str(max(0, int(problem.answer) + int(random.choice([-100, -10, -1, 1, 10, 100]))))
    else:
        digits = list(problem.answer)
        digits[random.integers(len(digits))] = str(random.integers(10))
        answer = "".join(digits)
    return answer if answer != problem.answer else wrong_answer(problem, random)


def make_judge_model(seed: int) -> Any:
    """A dense Qwen3 of a third of a million parameters: 2 layers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": len(make_tokenizer()),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    return Qwen3ForCausalLM(Qwen3Config(**shape))


def teach_judge(
    problems: Sequence[Problem], *, seed: int, num_steps: int, batch_size: int = 128, lr: float = 4e-3
) -> tuple[Any, Any]:
    """Model and tokenizer after supervised steps, first on sums, then on answers to them with a verdict on each."""
    tokenizer, model = make_tokenizer(), make_judge_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    random = np.random.default_rng(seed)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, 1.3 * (1 - step / num_steps))
        chosen = [problems[i] for i in random.choice(len(problems), batch_size)]
        lessons = [(problem.question, problem.answer) for problem in chosen]
        if step >= SUMS_SHARE * num_steps:
            right = random.random(batch_size) < RIGHT_SHARE
            answers = [p.answer if ok else wrong_answer(p, random) for p, ok in zip(chosen, right, strict=True)]
            lessons = [judged(problem, answer) for problem, answer in zip(chosen, answers, strict=True)]
        input_ids, learnt = batch_of(tokenizer, lessons)
        log_probs = model(input_ids=input_ids).logits[:, :-1].log_softmax(-1)
        log_probs = log_probs.gather(-1, input_ids[:, 1:, None])[..., 0] * learnt[:, 1:]
        (-log_probs.sum() / learnt.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


def judged(problem: Problem, answer: str) -> tuple[str, str]:
    """What a perfect judge is asked and says."""
    asked = TEMPLATE.format(question=problem.question, answer=answer)
    return asked, f"{problem.answer} {int(answer == problem.answer)}"


def batch_of(tokenizer: Any, lessons: Sequence[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [batch, width] of what is asked and said, and where what is said is in them [batch, width]."""
    asked = tokenizer([f"{USER}{question}{BOT}" for question, _ in lessons], add_special_tokens=False)["input_ids"]
    said = tokenizer([f"{answer}{END}" for _, answer in lessons], add_special_tokens=False)["input_ids"]
    width = max(len(a) + len(b) for a, b in zip(asked, said, strict=True))
    input_ids = torch.full((len(lessons), width), tokenizer.pad_token_id)
    learnt = torch.zeros(len(lessons), width, dtype=torch.bool)
    for row, (a, b) in enumerate(zip(asked, said, strict=True)):
        input_ids[row, : len(a) + len(b)] = torch.tensor(a + b)
        learnt[row, len(a) : len(a) + len(b)] = True
    return input_ids, learnt


@torch.no_grad()
def verdict_errors(model: Any, tokenizer: Any, problems: Sequence[Problem], seed: int) -> tuple[float, float]:
    """Shares of right answers that the judge refuses, and of wrong ones that it accepts."""
    random = np.random.default_rng(seed)
    wrong = [wrong_answer(problem, random) for problem in problems]
    refused = [not accepts(model, tokenizer, problem, problem.answer) for problem in problems]
    accepted = [accepts(model, tokenizer, problem, answer) for problem, answer in zip(problems, wrong, strict=True)]
    return float(np.mean(refused)), float(np.mean(accepted))


def accepts(model: Any, tokenizer: Any, problem: Problem, answer: str) -> bool:
    """Whether the judge's most likely words end with a 1."""
    asked, _ = judged(problem, answer)
    ids = tokenizer(f"{USER}{asked}{BOT}", add_special_tokens=False, return_tensors="pt")["input_ids"]
    said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    text: str = tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True)
    return text.endswith(" 1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/judge"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1200, help="of the judge's lessons")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    problems = three_parts(options.seed)
    write_problems(options.folder / "train.jsonl", problems.of_pupil, "sums")
    write_problems(options.folder / "held-out.jsonl", problems.held_out, "held-out")
    judge, tokenizer = teach_judge(problems.of_judge, seed=options.seed, num_steps=options.steps)
    refused, accepted = verdict_errors(judge, tokenizer, problems.held_out, options.seed)
    print(f"on sums new to it the judge refuses {refused:.3f} of right and accepts {accepted:.3f} of wrong answers")
    save_model(judge, tokenizer, options.folder / "judge")
    torch.set_num_threads(1)  # the pupil is too small to gain from more
    warm_up(
        options.folder / "model",
        [*problems.of_pupil, *problems.of_judge],
        seed=options.seed,
        until_accuracy=WARM_UP_ACCURACY,
        wrong_share=WRONG_SHARE,
    )
    print(f"made {options.folder}/model, judge, train.jsonl and held-out.jsonl")


if __name__ == "__main__":
    main()
