"""What a person should know about a run and no error says: what the model is not shown, and steps that teach little."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from practicum.config import Config
from practicum.data import picture_fields
from practicum.models import encode_prompts
from practicum.reward.graders.function import UserFunction
from practicum.reward.report import GradingReport
from practicum.reward.rubric import Rubric
from practicum.types import Prompt

_STEPS_WITHOUT_SIGNAL = 3  # in a row
_LARGEST_RATIO = 1.0  # of an update to the weights, in norms: sound ones are below 0.01


def unseen(
    config: Config, tokenizer: Any, prompts: Sequence[Prompt], tools: Sequence[Mapping[str, Any]], rubric: Rubric
) -> Iterator[str]:
    """Say what looks as if models or graders were shown it, and they are not: pictures, a ground truth, tools."""
    data = config.data
    for key, num in picture_fields(prompts).items():
        yield (
            f"data.train={data.train}: the field {key!r} of {num} records holds pictures, video or audio. Every "
            "rollout.engine reads text only, so the model learns from the text alone"
        )
    fields = dict.fromkeys(key for prompt in prompts for key in prompt.metadata)
    has_function = any(isinstance(term.grader, UserFunction) for term in rubric.terms)
    if has_function and fields and all(prompt.answer is None for prompt in prompts):
        yield (
            f"data.train={data.train}: no record has the field {data.answer_key!r} (data.answer_key), so reward "
            f"functions get None as the ground truth. Other fields are {', '.join(fields)}"
        )
    if tools and _are_same(encode_prompts(tokenizer, prompts[:1], shown) for shown in (tools, ())):
        why = (
            "a prompt of plain text goes past the chat template"
            if prompts[0].messages is None
            else f"the chat template of model.path={config.model.path} leaves them out"
        )
        yield (
            f"rollout.agent.tools are not shown to the model: {why}. It can only call what it knows from its training "
            "or from the words of the prompts"
        )


def _are_same(encoded: Iterator[Any]) -> bool:
    first, second = encoded
    return bool(first[0].tolist() == second[0].tolist())


class StepNotices:
    """Notices about the steps of a run, few enough to be read."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._num_with_failures = 0
        self._num_without_signal = 0  # in a row
        self._num_too_large: Counter[str] = Counter()  # updates, by role

    def of_update(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        """Return what is to be said about updates that change weights by more than their own size: in the first,
        second, fourth such step, and so on."""
        for role, lr in (("actor", self._config.actor.lr), ("critic", self._config.critic.lr)):
            ratio = metrics.get(f"{role}/update_ratio", 0.0)
            if ratio > _LARGEST_RATIO:
                self._num_too_large[role] += 1
                if self._num_too_large[role].bit_count() == 1:
                    yield (
                        f"step {step}: an update has changed the weights of the {role} by {ratio:.3g} times their size "
                        f"({role}/update_ratio), so that hardly anything is left of what they were. Stop, lower "
                        f"{role}.lr={lr:g}, delete checkpoints of this step and later, and go on with resume=auto"
                    )

    def of(self, step: int, metrics: Mapping[str, float], report: GradingReport) -> Iterator[str]:
        """Return what is to be said about a step: why samples could not be graded, in the first, second, fourth step
        with such, and so on; and once, that no answer has taught anything for some steps."""
        if report.failures:
            self._num_with_failures += 1
            if self._num_with_failures.bit_count() == 1:
                left_out = {"mask": "They are", "drop_group": "All answers to their prompts are"}
                policy = self._config.reward.on_failure
                yield f"step {step}: {report}. {left_out[policy]} left out (reward.on_failure={policy})"
        teaches = metrics["reward/groups_with_signal"] > 0 and metrics["reward/std"] > 0
        self._num_without_signal = 0 if teaches else self._num_without_signal + 1
        if self._num_without_signal == _STEPS_WITHOUT_SIGNAL:
            self._num_without_signal = -self._config.trainer.steps  # once is enough
            yield (
                f"step {step}: for {_STEPS_WITHOUT_SIGNAL} steps all answers to each prompt have had the same score, "
                f"{metrics['reward/mean']:.3f} on average, and the model learns nothing (reward/groups_with_signal). "
                f"Where no answer is right, look at {Path(self._config.trainer.run_dir) / 'answers'}, at reward and "
                f"data.answer_key, and at rollout.max_new_tokens: {metrics['rollout/truncated_share']:.0%} of the "
                "answers are cut off. Where all are right, the prompts are too easy. In either case see "
                "rollout.answers_per_prompt and rollout.temperature"
            )
