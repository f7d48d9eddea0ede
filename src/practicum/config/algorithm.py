"""The `algorithm` section: how rewards become advantages, and advantages a loss. docs/algorithms.md helps to choose.

A key that only some choices read is None unless set, which leaves it to the choice, and refused with any other.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from practicum.config.base import Section

GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "pass_at_k", "reinforce_plus_plus_baseline")
"""Estimators that compare the answers to one prompt with each other."""

OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "advantage": {
        "grpo": ("with_std",),
        "pass_at_k": ("k", "right_above"),
        "gae": ("gamma", "lam"),
        "reinforce_plus_plus": ("gamma",),
    },
    "loss": {
        "ppo": ("clip_low", "clip_high", "dual_clip"),
        "gspo": ("clip_low", "clip_high"),
        "gspo_token": ("clip_low", "clip_high"),
        "gmpo": ("clip_low", "clip_high"),
        "cispo": ("clip_low", "clip_high"),
        "sapo": ("tau_positive", "tau_negative"),
    },
    "aggregation": {"constant": ("constant_tokens",)},
}
"""The keys that each choice alone reads, by the key of the choice."""


class KLConfig(Section):
    coefficient: float = Field(default=0.0, ge=0)
    """The weight of the KL divergence from the reference; 0: there is no reference."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """The estimator of a token's divergence: k1 for the reward, k2 or k3 for the loss."""
    place: Literal["reward", "loss"] = "loss"
    """reward: the divergence is subtracted from the reward. loss: it is added to the loss."""
    target: float | None = Field(default=None, gt=0)
    """A divergence per token to aim at: after each step the coefficient changes by up to 2 %. None: it is constant."""
    reference: str | None = Field(default=None, min_length=1)
    """The reference model, a folder or a hub name. None: the model that the run started from."""
    placement: Literal["hybrid", "colocated", "standalone"] = "hybrid"
    """The placement of the reference. hybrid: in the actor's processes. colocated: in processes of its own on the same
    devices. standalone: on devices of its own, as many as trainer.num_workers."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.coefficient == 0 and (self.target, self.reference, self.placement) != (None, None, "hybrid"):
            raise ValueError(
                "algorithm.kl: target, reference and placement do nothing while coefficient is 0: set it above"
            )
        if self.coefficient > 0 and self.place == "loss" and self.estimator == "k1":
            raise ValueError(
                "algorithm.kl.estimator=k1 holds nothing back in the loss, where its gradient is noise around 0: "
                "use k2 or k3 there, or set algorithm.kl.place=reward"
            )
        return self


class CorrectionConfig(Section):
    kind: Literal["none", "truncated", "masked"] = "none"
    """Importance weights on the loss for tokens whose log-probs differ between engine and trainer. truncated: held
    within bounds. masked: tokens outside the bounds are left out."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """The unit that is weighed: a token by itself, the answer as a whole, or the geometric mean over it."""
    low: float | None = Field(default=None, ge=0)
    """The lower bound. None: 0 where truncated, 0.5 where masked."""
    high: float | None = Field(default=None, gt=0)
    """The upper bound. None: 2 where truncated, 5 where masked."""

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds that are set."""
        return {name: bound for name, bound in (("low", self.low), ("high", self.high)) if bound is not None}

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.kind == "none" and (self.bounds or self.level != "token"):
            raise ValueError("algorithm.correction: level, low and high do nothing while kind is none: set it")
        own = {"low": 0.5, "high": 5.0} if self.kind == "masked" else {"low": 0.0, "high": 2.0}
        bounds = own | self.bounds
        if bounds["low"] >= bounds["high"]:
            raise ValueError("algorithm.correction: low={low:g} must be below high={high:g}".format(**bounds))
        return self


class AlgorithmConfig(Section):
    advantage: Literal[
        "grpo",
        "dr_grpo",
        "rloo",
        "pass_at_k",
        "remax",
        "gae",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
    ] = "grpo"
    """The estimator that makes advantages of rewards. gae needs a critic, see that section; remax generates a greedy
    answer to each prompt on top."""
    with_std: bool | None = None
    """grpo: divide by the standard deviation of the group. None: true."""
    k: int | None = Field(default=None, ge=1)
    """pass_at_k: the number of tries. None: 4."""
    right_above: float | None = None
    """pass_at_k: an answer with a higher reward is right. None: 0.5."""
    gamma: float | None = Field(default=None, gt=0, le=1)
    """gae, reinforce_plus_plus: the discount of a reward one token later. None: 1."""
    lam: float | None = Field(default=None, ge=0, le=1)
    """gae: 0 trusts the critic alone, 1 the rewards alone. None: 0.95."""
    whiten: bool | None = None
    """Scale advantages to mean 0 and standard deviation 1 over all tokens of a step. None: with gae alone."""
    resampling_rounds: int = Field(default=0, ge=0)
    """Dynamic sampling: how often in a step prompts whose answers all have the same reward are replaced by the next
    ones. Such prompts that are left after the last round stay."""
    loss: Literal["ppo", "gspo", "gspo_token", "gmpo", "cispo", "sapo"] = "ppo"
    """The policy loss."""
    clip_low: float | None = Field(default=None, gt=0, le=1)
    """The ratio of new to old probability is clipped this far below 1. None: the default of the loss, with ppo 0.2."""
    clip_high: float | None = Field(default=None, gt=0)
    """The ratio is clipped this far above 1; more room keeps rare good tokens alive. None: the loss's, with ppo
    0.28."""
    dual_clip: float | None = Field(default=None, gt=1)
    """ppo: a bad token's loss is at most so many times its advantage. None: there is no such bound."""
    tau_positive: float | None = Field(default=None, gt=0)
    """sapo: the temperature of the gate on good tokens. None: 1."""
    tau_negative: float | None = Field(default=None, gt=0)
    """sapo: the temperature of the gate on bad tokens. None: 1.05."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = "token_mean"
    """The way the losses of tokens are averaged."""
    constant_tokens: int | None = Field(default=None, ge=1)
    """constant: the number of tokens that every answer is divided by. None: rollout.max_new_tokens."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """The weight of the entropy bonus in the loss; 0: none."""
    kl: KLConfig = KLConfig()
    """KL divergence from a reference model."""
    correction: CorrectionConfig = CorrectionConfig()
    """Importance correction for answers of another policy: an older one, or an engine with other numerics."""

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def whitens(self) -> bool:
        return self.advantage == "gae" if self.whiten is None else self.whiten

    def options(self, choice: Literal["advantage", "loss"]) -> dict[str, Any]:
        """Return the options that are set for the chosen function."""
        names = OPTIONS[choice].get(getattr(self, choice), ())
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def check_answers(self, per_prompt: int) -> None:
        """Check against the `rollout` section: how many answers a prompt gets."""
        fewest = (self.k or 4) + 1 if self.advantage == "pass_at_k" else 2
        if self.advantage in GROUP_ESTIMATORS and per_prompt < fewest:
            more = f", and more of them than algorithm.k={fewest - 1}" if fewest > 2 else ""
            raise ValueError(
                f"algorithm.advantage={self.advantage} compares the answers to one prompt with each other{more}: "
                f"rollout.answers_per_prompt={per_prompt} must be at least {fewest}"
            )

    def check_staleness(self, staleness: int) -> None:
        """Check against the `trainer` section: how stale answers may be."""
        if self.correction.kind == "none":
            raise ValueError(
                f"trainer.staleness={staleness} has answers of older weights learnt from, and "
                "algorithm.correction.kind=none takes them for the policy's own: set it to truncated or masked, or "
                "trainer.staleness=0"
            )

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        for choice, tables in OPTIONS.items():
            chosen = getattr(self, choice)
            for name in dict.fromkeys(name for names in tables.values() for name in names):
                if getattr(self, name) is not None and name not in tables.get(chosen, ()):
                    readers = ", ".join(reader for reader, names in tables.items() if name in names)
                    raise ValueError(
                        f"algorithm.{name} is for algorithm.{choice}={readers}, and with {chosen} nothing reads it: "
                        "leave it out"
                    )
        if self.resampling_rounds and self.advantage not in GROUP_ESTIMATORS:
            raise ValueError(
                f"algorithm.resampling_rounds={self.resampling_rounds}: equal rewards of the answers to a prompt teach "
                f"algorithm.advantage={self.advantage} as much as others: leave it out"
            )
        if self.loss not in ("cispo", "gmpo") and self.clip_low == 1:
            raise ValueError(f"algorithm.clip_low=1 leaves {self.loss} no bound from below: set it lower")
        if self.advantage == "pass_at_k" and self.kl.coefficient > 0 and self.kl.place == "reward":
            raise ValueError(
                "algorithm.advantage=pass_at_k knows only right and wrong answers, so a divergence in the reward would "
                "not be seen: set algorithm.kl.place=loss"
            )
        return self
