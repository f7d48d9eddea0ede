"""What an answer is graded by: a weighted sum of graders, chosen by where its prompt comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from practicum.config import RewardConfig, TermConfig
from practicum.errors import RewardError
from practicum.reward.graders import make_grader
from practicum.reward.graders.base import Grader, Rule
from practicum.reward.graders.function import UserFunction
from practicum.reward.graders.probe import probe_function
from practicum.reward.graders.remote import OWN_MODEL, RemoteGrader
from practicum.types import FLOAT32_MAX, Prompt, Sample, Score


@dataclass(frozen=True, slots=True)
class Term:
    """One grader and how much it counts. `name` is what its part of the score is called."""

    name: str
    weight: float
    grader: Grader

    @property
    def identity(self) -> str:
        """All that decides the score of a sample."""
        options = self.grader.model_dump(mode="json")
        return json.dumps([type(self.grader).__name__, self.grader.version, options], sort_keys=True)


@dataclass(frozen=True, slots=True)
class Rubric:
    """Terms by data source; `default` are those of any other. Checked and complete once it is made."""

    default: tuple[Term, ...]
    by_source: Mapping[str, tuple[Term, ...]]

    @classmethod
    def make(cls, config: RewardConfig) -> Rubric:
        """Make it from the config. Raises RewardError that names the term, the grader or the option."""
        default = _terms(config.all_terms, "reward.terms" if config.terms else "reward")
        by_source = {name: _terms(terms, f"reward.sources.{name}") for name, terms in config.sources.items()}
        rubric = cls(default, by_source)
        rubric._check_model(config)
        rubric._check_time(config)
        return rubric

    @property
    def terms(self) -> list[Term]:
        """All of them, each once."""
        return [term for terms in (self.default, *self.by_source.values()) for term in terms]

    @property
    def is_by_rule(self) -> bool:
        """True if it takes neither processes nor questions to others."""
        return all(isinstance(term.grader, Rule) for term in self.terms)

    @property
    def asks(self) -> list[RemoteGrader]:
        return [term.grader for term in self.terms if isinstance(term.grader, RemoteGrader)]

    def of(self, prompt: Prompt) -> tuple[Term, ...]:
        return self.by_source.get(prompt.data_source, self.default)

    def asks_model(self, prompt: Prompt) -> bool:
        """Return whether an answer to it is judged by `reward.model`."""
        graders = [term.grader for term in self.of(prompt)]
        return any(isinstance(grader, RemoteGrader) and grader.target == OWN_MODEL for grader in graders)

    def check(self, prompt: Prompt) -> None:
        """Raise ValueError if answers to the prompt could not be graded."""
        of = f"data_source {prompt.data_source!r}" if prompt.data_source else "no data_source"
        terms = self.of(prompt)
        if not terms:
            known = ", ".join(self.by_source)
            raise ValueError(f"{of}: reward.sources has only {known}, and no grader for others is set")
        for term in terms:
            try:
                term.grader.check(prompt)
            except ValueError as error:
                raise ValueError(f"{of}, grader {term.name}: {error}") from error

    def grade_by_rule(self, sample: Sample) -> Score:
        terms = self.of(sample.prompt)
        return combined(terms, [graded_by_rule(term.grader, sample) for term in terms])

    def __str__(self) -> str:
        """Write it as a person would."""
        rows = [f"{source}: {_sum(terms)}" for source, terms in self.by_source.items()]
        return "\n".join([*rows, f"others: {_sum(self.default)}"] if rows else [_sum(self.default)])

    def _check_time(self, config: RewardConfig) -> None:
        for term in self.terms:
            longest_s = term.grader.longest_s()
            if longest_s is not None and longest_s > config.timeout_s:
                raise RewardError(
                    f"grader {term.name} may take {longest_s:g} s by its own options, longer than "
                    f"reward.timeout_s={config.timeout_s:g}: what is merely slow would lose the tests it has passed. "
                    "Raise reward.timeout_s or lower the grader's limits."
                )

    def _check_model(self, config: RewardConfig) -> None:
        for term in self.terms:
            if not isinstance(term.grader, RemoteGrader) or term.grader.urls:
                continue
            if config.model is None:
                raise RewardError(
                    f"grader {term.name} asks a model: describe it under reward.model, or name servers in option urls."
                )
            kind = term.grader.model_kind
            if config.model.kind != kind:
                raise RewardError(f"grader {term.name} needs reward.model.kind={kind}, not {config.model.kind}.")
        if config.model is not None and not any(grader.target == OWN_MODEL for grader in self.asks):
            raise RewardError("reward.model is described, but no grader asks it: set grader classifier or judge.")


def _sum(terms: Sequence[Term]) -> str:
    shown = [term.name if term.weight == 1.0 else f"{term.weight:g} x {term.name}" for term in terms]
    return " + ".join(shown) or "an error"


def _terms(configs: Sequence[TermConfig], where: str) -> tuple[Term, ...]:
    places = ["reward"] if where == "reward" else [f"{where}[{index}]" for index in range(len(configs))]
    terms = tuple(_term(config, place) for config, place in zip(configs, places, strict=False))
    names = [term.name for term in terms]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RewardError(f"{where}: two terms are called {twice!r}; give one of them another `name`.")
    return terms


def _term(config: TermConfig, where: str) -> Term:
    if config.function is not None:
        place, _, function = config.function.rpartition(":")
        # Workers may start in another folder.
        spec = f"{Path(place).resolve()}:{function}" if place.endswith(".py") else config.function
        grader = UserFunction(function=spec, shape=probe_function(config.function))
        return Term(config.name or function, config.weight, grader)
    assert config.grader is not None
    return Term(config.name or config.grader, config.weight, make_grader(config.grader, config.options, where))


def graded_by_rule(grader: Grader, sample: Sample) -> Score:
    assert isinstance(grader, Rule)
    try:
        return grader.grade(sample)
    except Exception as error:
        return Score.failed("invalid", f"raised {type(error).__name__}: {error}")


def combined(terms: Sequence[Term], scores: Sequence[Score]) -> Score:
    """Return the weighted sum. If one term could not be graded, neither can the sample."""
    if not terms:
        return Score.failed("invalid", "reward.sources has no grader for the data_source of this prompt")
    for term, score in zip(terms, scores, strict=True):
        if score.status != "ok":
            return Score.failed(score.status, f"{term.name}: {score.reason}")
    if len(terms) == 1 and terms[0].weight == 1.0:
        return scores[0]
    parts: dict[str, float] = {}
    total = 0.0
    for term, score in zip(terms, scores, strict=True):
        assert score.value is not None
        total += term.weight * score.value
        parts[term.name] = score.value
        parts.update({f"{term.name}/{name}": value for name, value in score.parts.items()})
    if not abs(total) <= FLOAT32_MAX:
        return Score.failed("invalid", f"the weighted sum of {parts} is {total}")
    return Score(total, parts=parts, answer=next((score.answer for score in scores if score.answer), None))
