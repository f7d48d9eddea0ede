"""Advantages, losses, KL: pure functions on tensors that know no config.

Each choice is a table from name to function: `ADVANTAGES`, `LOSSES`, `AGGREGATIONS`, `KL_ESTIMATORS`, and `LEVELS` with
`CORRECTIONS`. `Objective` puts a loss together from them. A function's keyword-only parameters are its options.
"""

from practicum.algo.advantages import (
    ADVANTAGES,
    Estimator,
    dr_grpo,
    gae,
    grpo,
    pass_at_k,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    whiten,
)
from practicum.algo.aggregation import AGGREGATIONS, Totals
from practicum.algo.correction import CORRECTIONS, LEVELS, CorrectionFigures
from practicum.algo.kl import KL_ESTIMATORS, AdaptiveKL, k1, k2, k3
from practicum.algo.losses import LOSSES, cispo, clipped_policy_loss, gmpo, gspo, gspo_token, ppo, sapo
from practicum.algo.objective import Losses, Objective, Tokens
from practicum.algo.outcomes import Outcomes
from practicum.algo.staleness import StalenessFigures, combined_figures, figures_by_staleness
from practicum.algo.values import clipped_value_loss, explained_variance

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CORRECTIONS",
    "KL_ESTIMATORS",
    "LEVELS",
    "LOSSES",
    "AdaptiveKL",
    "CorrectionFigures",
    "Estimator",
    "Losses",
    "Objective",
    "Outcomes",
    "StalenessFigures",
    "Tokens",
    "Totals",
    "cispo",
    "clipped_policy_loss",
    "clipped_value_loss",
    "combined_figures",
    "dr_grpo",
    "explained_variance",
    "figures_by_staleness",
    "gae",
    "gmpo",
    "grpo",
    "gspo",
    "gspo_token",
    "k1",
    "k2",
    "k3",
    "pass_at_k",
    "ppo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "sapo",
    "whiten",
]
