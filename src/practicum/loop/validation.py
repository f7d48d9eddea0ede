"""The figures of held-out prompts: pure functions of their scores.

Of n graded answers to a prompt, c of them right, each figure is the mean over all ways to draw k of them, exactly:

    mean@n   mean score; drawing fewer changes nothing in it, so it is reported once
    pass@k   whether one of the k is right: 1 - C(n - c, k) / C(n, k)   (Chen et al. 2021, arXiv 2107.03374)
    maj@k    whether the result that most of the k state is right; a tie is shared evenly (Wang et al. 2022, 2203.11171)

and then the mean over prompts. Answers that could not be graded are not among the n. A prompt left with fewer than k
has no figure at k; the share of such prompts is reported as `too_few@k`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from practicum.config import Config
from practicum.errors import ConfigError
from practicum.types import PromptGroup, Trajectory

UNNAMED = "other"  # prompts without a data source, where others have one


@dataclass(frozen=True, slots=True)
class GradedAnswer:
    """An answer that could be graded. `vote` is equal for answers that state the same result."""

    score: float
    is_right: bool
    vote: str


def graded_answer(trajectory: Trajectory, right_above: float) -> GradedAnswer | None:
    """Return None for an answer that could not be graded."""
    score = trajectory.score
    if score is None or score.value is None:
        return None
    # The result that an answer states: what its grader read, or else its text after any thinking.
    stated = trajectory.last.text.rpartition("</think>")[2] if score.answer is None else score.answer
    return GradedAnswer(score.value, score.value > right_above, " ".join(stated.split()))


def ks_up_to(num_answers: int) -> list[int]:
    """Return the powers of two up to the number of answers, and that number itself."""
    powers = [1 << i for i in range(num_answers.bit_length())]
    return sorted({*powers, num_answers})


def pass_at_k(num: int, num_right: int, k: int) -> float:
    """Return the chance that of k answers, drawn from `num` without replacement, one is right."""
    return 1.0 - math.comb(num - num_right, k) / math.comb(num, k)


def majority_at_k(answers: Sequence[GradedAnswer], k: int) -> float:
    """Return the chance that the result stated most often among k answers, drawn without replacement, is right.

    Of results stated equally often any is taken, each with the same chance. Where answers with the same vote differ in
    being right, as with a judge, their share counts.
    """
    votes: dict[str, list[bool]] = defaultdict(list)
    for answer in answers:
        votes[answer.vote].append(answer.is_right)
    chances = _chances_to_win(tuple(sorted(len(found) for found in votes.values())), k)
    return sum(chances[len(found)] * sum(found) / len(found) for found in votes.values())


@lru_cache(maxsize=4096)  # most prompts are answered in one of few patterns
def _chances_to_win(counts: tuple[int, ...], k: int) -> dict[int, float]:
    """Return, for results stated so many times each, the chance of each such number to win among k answers."""
    num = sum(counts)
    if k == num:
        return {own: (own == max(counts)) / counts.count(max(counts)) for own in set(counts)}
    chances = {}
    for own in set(counts):
        others = list(counts)
        others.remove(own)
        found = 0.0
        for drawn in range(1, min(own, k) + 1):
            tied = _chances_of_ties(others, drawn, k - drawn, k / num)
            found += _binomial(own, drawn, k / num) * float(tied @ (1.0 / np.arange(1, len(tied) + 1)))
        chances[own] = found / _binomial(num, k, k / num)
    return chances


def _chances_of_ties(counts: Sequence[int], most: int, total: int, p: float) -> NDArray[np.float64]:
    """Return [ties]: if each answer is drawn with chance p, the chance that `total` are, no result more than `most`
    times, by how many results reach `most`. Chances and not numbers of ways, which are too large for floats."""
    chances = np.zeros((total + 1, total // most + 1))
    chances[0, 0] = 1.0
    for count in counts:
        longer = _binomial(count, 0, p) * chances
        for drawn in range(1, min(count, most, total) + 1):
            added = _binomial(count, drawn, p) * chances[: total + 1 - drawn]
            if drawn == most:
                longer[drawn:, 1:] += added[:, :-1]
            else:
                longer[drawn:] += added
        chances = longer
    found: NDArray[np.float64] = chances[total]
    return found


@lru_cache(maxsize=4096)
def _binomial(num: int, drawn: int, p: float) -> float:
    """Return the chance that of `num` answers, each drawn with chance p (neither 0 nor 1), so many are."""
    ways = math.lgamma(num + 1) - math.lgamma(drawn + 1) - math.lgamma(num - drawn + 1)
    return math.exp(ways + drawn * math.log(p) + (num - drawn) * math.log1p(-p))


def validation_metrics(groups: Sequence[PromptGroup], right_above: float) -> dict[str, float]:
    """Return the figures of graded groups, by data source too if there are several."""
    num_answers = groups[0].params.num_answers
    prompts: dict[str, list[list[GradedAnswer | None]]] = defaultdict(list)
    for group in groups:
        answers = [graded_answer(trajectory, right_above) for trajectory in group.trajectories]
        prompts[group.prompt.data_source or UNNAMED].append(answers)
    metrics = _metrics([prompt for found in prompts.values() for prompt in found], num_answers, "validation/")
    if len(prompts) > 1:
        for source, found in prompts.items():
            metrics |= _metrics(found, num_answers, f"validation/{source}/")
    return metrics


def validation_names(sources: Sequence[str], num_answers: int) -> list[str]:
    """Return the names of all figures that validations of such prompts have and that say how good a model is."""
    names = ["accuracy", f"mean@{num_answers}"]
    names += [f"pass@{k}" for k in ks_up_to(num_answers)] + [f"maj@{k}" for k in ks_up_to(num_answers)[1:]]
    known = sorted({source or UNNAMED for source in sources})
    sections = ["", *(f"{source}/" for source in known if len(known) > 1)]
    return [f"validation/{section}{name}" for section in sections for name in names]


def check_keep_best(config: Config, sources: Sequence[str]) -> None:
    """Refuse a figure that the validation of prompts from these sources will never have."""
    wanted = config.trainer.keep_best
    known = validation_names(sources, config.validation.answers_per_prompt) if sources else []
    if wanted is not None and wanted not in known:
        there = f"there are {', '.join(known)}" if known else "a run repeated from a recording validates nothing"
        raise ConfigError(f"trainer.keep_best={wanted} is no figure of this validation: {there}.")


def _metrics(prompts: Sequence[Sequence[GradedAnswer | None]], num_answers: int, prefix: str) -> dict[str, float]:
    graded = [[answer for answer in answers if answer is not None] for answers in prompts]
    values = [answer.score for answers in graded for answer in answers]
    metrics = {"failed_share": 1 - len(values) / (len(prompts) * num_answers)}
    if values:
        metrics["accuracy"] = float(np.mean(values))
        metrics[f"mean@{num_answers}"] = _mean([_mean([a.score for a in answers]) for answers in graded if answers])
    for k in ks_up_to(num_answers):
        enough = [answers for answers in graded if len(answers) >= k]
        if len(enough) < len(graded):
            metrics[f"too_few@{k}"] = 1 - len(enough) / len(graded)
        if not enough:
            continue
        metrics[f"pass@{k}"] = _mean([pass_at_k(len(a), sum(one.is_right for one in a), k) for a in enough])
        if k > 1:  # a single vote is its own majority: pass@1
            metrics[f"maj@{k}"] = _mean([majority_at_k(answers, k) for answers in enough])
    return {prefix + name: value for name, value in metrics.items()}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
