"""Advantage estimators: pure functions from rewards to how much better than expected each answer was.

They look at different things. Some compare the answers to one prompt and give one number an answer, [samples]; some
follow rewards and values along the tokens and give one number a token, [tokens]. Each is a plain function of the
tensors in its formula, and its keyword-only parameters are its options. `ADVANTAGES` makes them alike:

    estimator = ADVANTAGES["gae"]
    estimator.needs                                       # {"values"}: what must be there; checked before a run starts
    estimator.advantages(outcomes, gamma=1.0, lam=0.95)   # [tokens], for any estimator

`Outcomes` holds all there is to know; each entry takes its part of it. A penalty for straying from a reference (KL in
the reward) needs no case of its own: estimators of answers see it summed over the answer, those of tokens where it
arose. `ADVANTAGES["grpo"](rewards, groups)` calls the bare function.

No estimator learns anything: hand in tensors without gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from practicum.algo.outcomes import Outcomes
from practicum.algo.segments import are_last, counts, discounted_sums, means, sums

Need = Literal["groups", "values", "baselines"]


@dataclass(frozen=True, slots=True)
class Estimator:
    """An entry of `ADVANTAGES`."""

    function: Callable[..., Tensor]  # the formula
    inputs: Callable[[Outcomes], tuple[Tensor | None, ...]]  # the tensors it takes, in its order
    needs: Set[Need] = frozenset()  # groups: several answers to each prompt; the others are fields of Outcomes
    per_token: bool = False  # gives [tokens], and not [samples]
    takes_penalties: bool = True  # False where a penalty in the reward would not be seen

    def __call__(self, *inputs: Tensor, **options: Any) -> Tensor:
        """The bare function."""
        return self.function(*inputs, **options)

    def advantages(self, outcomes: Outcomes, **options: Any) -> Tensor:
        """[tokens] for any estimator: one that gives a number an answer gives it to all its tokens."""
        if outcomes.penalties is not None and not self.takes_penalties:
            raise ValueError(f"{self.function.__name__} has no place for penalties in the reward: put them in the loss")
        result = self.function(*self.inputs(outcomes), **options)
        return result if self.per_token else result[outcomes.sequences]


def grpo(rewards: Tensor, groups: Tensor, *, eps: float = 1e-6, with_std: bool = True) -> Tensor:
    """Group-relative advantage (DeepSeekMath, arXiv 2402.03300, section 4.1.2): `(r_i - mean(r)) / (std(r) + eps)`.

    rewards [samples], groups [samples] with equal numbers for answers to the same prompt; returns [samples]. Mean and
    sample standard deviation (denominator n - 1) are taken over the group. A group of one, or one whose rewards are
    all equal, says nothing about what is better: its advantages are 0. Without `with_std` it is `r_i - mean(r)`.
    """
    centred = _centred(rewards, groups)
    if not with_std:
        return centred
    variance = sums(centred.square(), groups) / (counts(groups) - 1).clamp(min=1)
    return centred / (variance.sqrt() + eps)


def dr_grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Dr.GRPO (Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.2): `r_i - mean(r)`.

    Prompts that are nearly always or nearly never solved do not weigh more than others, as they do once divided by
    their small deviation. The other half of Dr.GRPO is the aggregation: `constant`.
    """
    return grpo(rewards, groups, with_std=False)


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """REINFORCE leave-one-out (Back to Basics, arXiv 2402.14740): `r_i - mean of r_j over j != i` in the group.

    That is `n / (n - 1) * (r_i - mean(r))`. rewards, groups and the result [samples]; a group of one gives 0.
    """
    size = counts(groups)
    return _centred(rewards, groups) * (size / (size - 1).clamp(min=1))


def remax(rewards: Tensor, baselines: Tensor) -> Tensor:
    """ReMax (arXiv 2310.10505, algorithm 1): `r_i - b`, b the reward of the greedy answer to the same prompt.

    rewards, baselines and the result [samples].
    """
    return rewards - baselines


def pass_at_k(rewards: Tensor, groups: Tensor, *, k: int = 4, right_above: float = 0.5) -> Tensor:
    """Advantage for pass@k, in closed form (Pass@k Training, arXiv 2508.10751, section 2.4).

    An answer is right where its reward is above `right_above`. Of a group of n answers, `wrong` of them wrong, the
    share of sets of k that hold no right one is `q = C(wrong, k) / C(n, k)`; a set's reward is 1 with probability
    `1 - q`, so that its deviation is `s = sqrt(q (1 - q))`. An answer's advantage is the mean over the sets it is in:

        right   (1 - (1 - q)) / s                                    = q / s
        wrong   (1 - (1 - q) - C(wrong-1, k-1) / C(n-1, k-1)) / s    = -q / s * right / wrong

    rewards, groups and the result [samples]. Right or wrong is all that counts, so there is no place for penalties in
    the reward. For k = 1 it is GRPO with the population's deviation. Where every set of k holds a right answer, or none
    does, nothing is better than anything else and all advantages are 0; so it is in a group of k answers or fewer.
    """
    is_right = rewards > right_above
    right = sums(is_right.double(), groups)
    wrong = counts(groups) - right
    has_signal = (right > 0) & (wrong >= k)
    wrong = torch.where(has_signal, wrong, k)  # any numbers that will do: they are not used
    size = torch.where(has_signal, wrong + right, k + 1)
    log_q = _log_choose(wrong, k) - _log_choose(size, k)
    advantage = (log_q.exp() / -log_q.expm1()).sqrt()  # q / s
    return torch.where(has_signal, torch.where(is_right, advantage, -advantage * right / wrong), 0.0).to(rewards)


def gae(
    rewards: Tensor,
    values: Tensor,
    sequences: Tensor,
    mask: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Tensor:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) along the tokens of each answer.

    `A_t = sum over l of (gamma * lam)^l * d_{t+l}` with `d_t = r_t + gamma * V_{t+1} - V_t`; after the last token V is
    0. What the critic should have said is `A_t + values`; `whiten` the advantages after that, where wanted.

    All tensors and the result [tokens], the tokens of a sequence together and in order. Where `mask` is False the
    token is not the model's own (a tool's output): it is no step in time, the next token of the model follows directly
    on the last one before the gap. Its advantage is 0, its value is not looked at, and its reward goes to the model's
    last token before it, which brought it about; a reward before the model's first token is nobody's.
    """
    if mask is not None:
        result = torch.zeros_like(values)
        kept = sequences[mask]
        earned = _earned(rewards, sequences, mask)
        result[mask] = gae(earned, values[mask], kept, gamma=gamma, lam=lam)
        return result
    following = torch.where(are_last(sequences), 0.0, values.roll(-1))
    return discounted_sums(rewards + gamma * following - values, sequences, gamma * lam)


def reinforce_plus_plus(rewards: Tensor, sequences: Tensor, *, gamma: float = 1.0, eps: float = 1e-6) -> Tensor:
    """REINFORCE++ (arXiv 2501.03262): the rewards still to come, whitened over all tokens of the step.

    `G_t = sum over l of gamma^l * r_{t+l}`, `A_t = (G_t - mean(G)) / (std(G) + eps)`. rewards (with the penalty for
    straying from a reference in them), sequences and the result [tokens].
    """
    return whiten(discounted_sums(rewards, sequences, gamma), eps=eps)


def reinforce_plus_plus_baseline(
    rewards: Tensor, groups: Tensor, sequences: Tensor, penalties: Tensor | None = None, *, eps: float = 1e-6
) -> Tensor:
    """REINFORCE++ with a baseline (arXiv 2501.03262): the group's mean is taken off, the step's deviation divided by.

    `G_t = r - mean of the group - penalties from t on`, `A_t = (G_t - mean(G)) / (std(G) + eps)` over all tokens of the
    step. rewards and groups [samples], sequences (indices of samples), penalties and the result [tokens].
    """
    still_to_come = _centred(rewards, groups)[sequences]
    if penalties is not None:
        still_to_come = still_to_come - discounted_sums(penalties.to(rewards), sequences, 1.0)
    return whiten(still_to_come, eps=eps)


def whiten(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """`(x - mean(x)) / (std(x) + eps)` over all elements, with the population's deviation. Equals give 0.

    Over the tokens of a whole step: over a micro-batch it would depend on how the step was split.
    """
    if len(x) == 0 or x.min() == x.max():
        return torch.zeros_like(x)
    centred = x - x.mean()
    return centred / (centred.square().mean().sqrt() + eps)


def _centred(rewards: Tensor, groups: Tensor) -> Tensor:
    """Less the mean of the group; exactly 0 where the rewards of a group are all equal."""
    values, index = torch.unique(groups, return_inverse=True)
    # Equal rewards can differ from their mean by rounding, which is no signal.
    low = rewards.new_full((len(values),), torch.inf).scatter_reduce(0, index, rewards, "amin")
    high = rewards.new_full((len(values),), -torch.inf).scatter_reduce(0, index, rewards, "amax")
    return torch.where((low < high)[index], rewards - means(rewards, groups), 0.0)


def _log_choose(n: Tensor, k: int) -> Tensor:
    # C(n, k) itself is beyond float64 from about a thousand on.
    return (n + 1).lgamma() - (n - k + 1).lgamma() - math.lgamma(k + 1)


def _earned(rewards: Tensor, sequences: Tensor, mask: Tensor) -> Tensor:
    """[kept tokens]: of each kept token, its own reward and those of the dropped tokens that follow it."""
    last_kept = mask.cumsum(0) - 1
    kept = sequences[mask]
    if len(kept) == 0:
        return rewards[mask]
    has_owner = (last_kept >= 0) & (kept[last_kept.clamp(min=0)] == sequences)
    return rewards.new_zeros(len(kept)).index_add(0, last_kept[has_owner], rewards[has_owner])


def _of_answers(outcomes: Outcomes) -> tuple[Tensor, Tensor]:
    return outcomes.whole_rewards, outcomes.groups


ADVANTAGES: dict[str, Estimator] = {
    "grpo": Estimator(grpo, _of_answers, {"groups"}),
    "dr_grpo": Estimator(dr_grpo, _of_answers, {"groups"}),
    "rloo": Estimator(rloo, _of_answers, {"groups"}),
    "pass_at_k": Estimator(pass_at_k, lambda o: (o.rewards, o.groups), {"groups"}, takes_penalties=False),
    "remax": Estimator(remax, lambda o: (o.whole_rewards, o.known_baselines), {"baselines"}),
    "gae": Estimator(gae, lambda o: (o.token_rewards, o.known_values, o.sequences), {"values"}, per_token=True),
    "reinforce_plus_plus": Estimator(
        reinforce_plus_plus, lambda o: (o.token_rewards, o.sequences), frozenset(), per_token=True
    ),
    "reinforce_plus_plus_baseline": Estimator(
        reinforce_plus_plus_baseline,
        lambda o: (o.rewards, o.groups, o.sequences, o.penalties),
        {"groups"},
        per_token=True,
    ),
}
