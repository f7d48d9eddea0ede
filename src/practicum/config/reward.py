"""The `reward` section: graders, where they run, and what happens to answers that cannot be graded."""

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
    """The dtype of its forward passes."""
    placement: Literal["colocated", "standalone"] = "colocated"
    """colocated: on the trainer's devices, asleep while it is not grading. standalone: on devices of its own, awake."""
    replicas: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Copies of the model. auto: as many as the devices hold."""
    max_batch_tokens: int = Field(default=16_384, ge=1)
    """Tokens in one forward pass of a replica, padding included."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """The time a replica may take to load, to fall asleep or to wake."""
    request_timeout_s: float = Field(default=60.0, gt=0)
    """The time a replica may take for one sample before another replica is asked."""


class TermConfig(Section):
    grader: str | None = None
    """A built-in grader; docs/rewards.md lists them with their options."""
    function: str | None = None
    """A function of yours: path/to/file.py:name or package.module:name."""
    options: dict[str, Any] = Field(default={})
    """Options of the grader."""
    weight: float = 1.0
    """The factor of its value in the sum."""
    name: str | None = Field(default=None, min_length=1)
    """The name of its part of the score in the metrics. None: the name of the grader or function."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.grader is None) == (self.function is None):
            raise ValueError("set exactly one of grader and function")
        if self.function is not None and self.options:
            raise ValueError("options are for graders; a function has none")
        return self


class LimitsConfig(Section):
    concurrency: int | None = Field(default=None, ge=1)
    """Samples that functions, judges and endpoints may have at a time. None: no limit."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Samples that begin in any minute."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens in any minute: what the server says it used, and until then prompt and answer together."""

    @property
    def are_set(self) -> bool:
        return any(value is not None for value in self.model_dump().values())


class CacheConfig(Section):
    folder: str | None = Field(default=None, min_length=1)
    """The folder of cached scores, keyed by a hash of sample, grader, options and version. None: no cache."""
    version: str = ""
    """Change it to forget the scores kept so far, for instance when a module that your function imports has changed."""


class RewardConfig(Section):
    grader: str | None = None
    """A built-in grader, such as exact, math or code; docs/rewards.md lists them."""
    function: str | None = None
    """A function of yours: path/to/file.py:name or package.module:name."""
    options: dict[str, Any] = Field(default={})
    """Options of the grader."""
    terms: tuple[TermConfig, ...] = ()
    """Several graders instead of one: the value is the weighted sum of theirs."""
    sources: dict[str, tuple[TermConfig, ...]] = Field(default={})
    """Other terms for prompts with that `data_source`."""
    model: RewardModelConfig | None = None
    """The model that the graders classifier and judge ask."""
    timeout_s: float = Field(default=10.0, gt=0)
    """A sample that takes longer to grade gets the status `timeout`. A function of a list has as long for each list."""
    processes: int | None = Field(default=None, ge=1)
    """Processes for functions and for graders that may hang, over all reward workers. None: as many as cores."""
    memory_mb: int = Field(default=2048, ge=64)
    """Memory that such a process may allocate; beyond it the sample is `invalid`."""
    limits: LimitsConfig = LimitsConfig()
    """Limits of all reward workers together."""
    cache: CacheConfig = CacheConfig()
    """A cache of scores on disk."""
    retries: int = Field(default=0, ge=0)
    """The number of times a sample with status `timeout` or `infra_error` is graded again."""
    on_failure: Literal["mask", "drop_group"] = "mask"
    """mask: leave out samples that could not be graded. drop_group: leave out all answers to their prompts."""
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
