"""The work both sides of the `grpo` benchmark do. Imported in the environments of both: standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.contestant import Argument


@dataclass(frozen=True)
class Job(Argument):
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


def even_share(token_ids: Sequence[int]) -> float:
    """Return the reward: the share of even token ids. It costs next to nothing and differs between answers."""
    return sum(token % 2 == 0 for token in token_ids) / len(token_ids)
