"""The `reward` section: what grades the answers, where, and what becomes of those that cannot be graded."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from practicum.config.base import Section


class RewardModelConfig(Section):
    path: str = Field(min_length=1)
    """A local folder with a transformers model and its tokenizer, or a hub name."""
    kind: Literal["classifier", "generative"] = "classifier"
    """classifier: a sequence-classification model with one output. generative: a causal model that writes verdicts."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What it computes in."""
    placement: Literal["colocated", "standalone"] = "colocated"
    """colocated: on the trainer's places, asleep while it is not grading. standalone: on places of its own, awake."""
    replicas: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """How many copies of the model. auto: as many as the places hold."""
    max_batch_tokens: int = Field(default=16_384, ge=1)
    """Tokens in one forward pass of a replica, padding included."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """How long a replica may take to load, to fall asleep or to wake."""
    request_timeout_s: float = Field(default=60.0, gt=0)
    """How long a replica may take over one sample before another one is asked."""


class TermConfig(Section):
    grader: str | None = None
    """A built-in grader; docs/rewards.md lists them with their options."""
    function: str | None = None
    """A function of yours: path/to/file.py:name or package.module:name."""
    options: dict[str, Any] = Field(default={})
    """Of the grader."""
    weight: float = 1.0
    """What its value is multiplied by in the sum."""
    name: str | None = Field(default=None, min_length=1)
    """What its part of the score is called in the metrics. None: like the grader or the function."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.grader is None) == (self.function is None):
            raise ValueError("set exactly one of grader and function")
        if self.function is not None and self.options:
            raise ValueError("options are for graders; a function has none")
        return self


class LimitsConfig(Section):
    concurrency: int | None = Field(default=None, ge=1)
    """Samples that functions, judges and endpoints have at a time. None: no limit."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Samples that begin in any minute."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Their tokens in any minute: what the server says it used, and until then prompt and answer together."""

    @property
    def are_set(self) -> bool:
        return any(value is not None for value in self.model_dump().values())


class CacheConfig(Section):
    folder: str | None = Field(default=None, min_length=1)
    """Where scores are kept and looked up, under a hash of sample, grader, options and version. None: nowhere."""
    version: str = ""
    """Change it to forget the scores kept so far, for instance when a module that your function imports has changed."""


class RewardConfig(Section):
    grader: str | None = None
    """A built-in grader, such as exact, math or code; docs/rewards.md lists them."""
    function: str | None = None
    """A function of yours: path/to/file.py:name or package.module:name."""
    options: dict[str, Any] = Field(default={})
    """Of the grader."""
    terms: tuple[TermConfig, ...] = ()
    """Several graders instead of one: the value is the weighted sum of theirs."""
    sources: dict[str, tuple[TermConfig, ...]] = Field(default={})
    """Other terms for prompts with that `data_source`."""
    model: RewardModelConfig | None = None
    """The model that the graders classifier and judge ask."""
    timeout_s: float = Field(default=10.0, gt=0)
    """A sample that takes longer to grade gets the status `timeout`. A function of a list has that long for each."""
    processes: int | None = Field(default=None, ge=1)
    """Processes for functions and for graders that may hang, over all reward workers. None: as many as cores."""
    memory_mb: int = Field(default=2048, ge=64)
    """What such a process may allocate; beyond that the sample is `invalid`."""
    limits: LimitsConfig = LimitsConfig()
    """Of all reward workers together."""
    cache: CacheConfig = CacheConfig()
    """Scores that need not be computed twice."""
    retries: int = Field(default=0, ge=0)
    """How often a sample with status `timeout` or `infra_error` is graded again."""
    on_failure: Literal["mask", "drop_group"] = "mask"
    """What is left out of a step: samples that could not be graded, or all answers to their prompts too."""
    max_failure_share: float = Field(default=0.1, ge=0, lt=1)
    """A larger share of samples that could not be graded stops the run."""

    @property
    def all_terms(self) -> tuple[TermConfig, ...]:
        if self.grader is None and self.function is None:
            return self.terms
        return (TermConfig(grader=self.grader, function=self.function, options=self.options),)

    @model_validator(mode="after")
    def _one_way_to_grade(self) -> Self:
        ways = [name for name in ("grader", "function", "terms") if getattr(self, name)]
        if len(ways) > 1 or not (ways or self.sources):
            raise ValueError("set exactly one of reward.grader, reward.function and reward.terms")
        if self.options and self.grader is None:
            raise ValueError("reward.options are those of reward.grader; each of reward.terms has its own")
        return self
