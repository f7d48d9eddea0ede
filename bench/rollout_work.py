"""The work of all sides of the `rollout` benchmark. Imported in the environments of all: standard library only."""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from bench.contestant import Argument, Line, step

DENSE, MOE = "dense", "moe"
FIRST_WORD = 2  # the tokens before it are special
Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Case:
    """`num_answers` to each prompt, of as many tokens as `new_tokens` says for that prompt."""

    model: str  # DENSE or MOE
    prompt_lengths: list[int]
    new_tokens: list[int]
    num_answers: int = 1

    def lengths(self) -> list[int]:
        """Return that of every answer, the answers to one prompt after each other."""
        return [length for length in self.new_tokens for _ in range(self.num_answers)]

    def prompts(self, seed: int, vocabulary: int) -> Prompts:
        """Return new ones for every step: some engines remember what they have read."""
        chance = random.Random(seed)
        return [[chance.randrange(FIRST_WORD, vocabulary) for _ in range(length)] for length in self.prompt_lengths]


@dataclass(frozen=True)
class Job(Argument):
    models: Mapping[str, str]  # DENSE, MOE -> folder
    cases: Mapping[str, Case]
    threads: int
    vocabulary: int
    quick: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        fields = json.loads(text)
        return cls(**{**fields, "cases": {name: Case(**case) for name, case in fields["cases"].items()}})

    def models_used(self) -> list[str]:
        """Return a mixture of experts first: vLLM makes its groups of processes with the first model, and only such a
        one has all of them."""
        return sorted({case.model for case in self.cases.values()}, key=lambda name: name != MOE)


def make_cases(num_prompts: int, num_new: int) -> dict[str, Case]:
    """Return the cases by name. 64 and 64 is the full work; everything else follows from these two."""
    chance = random.Random(0)
    # From an eighth of the usual length to four times it, each factor as likely as another.
    very = [round(num_new * math.exp(chance.uniform(math.log(1 / 8), math.log(4)))) for _ in range(num_prompts)]
    mixed = [chance.randint(num_new // 8, 2 * num_new) for _ in range(num_prompts)]
    same = [num_new] * num_prompts
    half = num_prompts // 2
    shapes = {
        "equal": (same, same, 1),
        "mixed": (mixed, same, 1),
        "different": (same, very, 1),
        "shared": ([4 * num_new] * half, same[:half], 8),
    }
    dense = {name: Case(DENSE, *shape) for name, shape in shapes.items()}
    return dense | {f"{name} moe": Case(MOE, *shape) for name, shape in shapes.items()}


# What a contestant does

Answer = tuple[Sequence[int], Sequence[float]]  # tokens and their log-probs
Others = Callable[[Job, str], dict[str, Any]]
Writer = Callable[[Case, Prompts], Callable[[], list[Answer]]]
"""One engine with one model: writes all answers with the log-probs of their tokens, which is timed, and returns what
tells them in plain form, in the order of `Case.lengths`."""


def take_steps(packages: Iterable[str], make: Callable[[Job, str], Writer], others: Others | None = None) -> None:
    """Be a contestant with the writers that `make` makes of a model. `others` takes the steps of no case."""
    import torch  # all sides have it

    line, job = Line(), Job.parse(sys.argv[1])
    torch.set_num_threads(job.threads)
    writers = {model: make(job, model) for model in job.models_used()}
    seeds = itertools.count()

    def take_step(name: str) -> dict[str, Any]:
        if others is not None and name not in job.cases:
            return others(job, name)
        case = job.cases[name]
        return one_step(case, writers[case.model], case.prompts(next(seeds), job.vocabulary))

    line.serve(packages, take_step)


def one_step(case: Case, write: Writer, prompts: Prompts) -> dict[str, Any]:
    """Raise an error for an engine that writes less than it was asked to: it must not look fast."""
    began = time.perf_counter()
    written = write(case, prompts)
    seconds, answers = time.perf_counter() - began, written()
    lengths = [len(tokens) for tokens, _ in answers]
    if lengths != case.lengths():
        raise RuntimeError(f"answers of {lengths} tokens where {case.lengths()} were due")
    for tokens, log_probs in answers:
        if len(log_probs) != len(tokens) or not all(math.isfinite(value) and value <= 0 for value in log_probs):
            raise RuntimeError(f"{len(tokens)} tokens with log-probs {list(log_probs)[:8]}...")
    return step(seconds, sum(lengths))


def cut(case: Case, tokens: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> list[Answer]:
    """Return the answers of engines that end all rows together."""
    return [(tokens[i][:length], log_probs[i][:length]) for i, length in enumerate(case.lengths())]
