"""Prompts, answered and graded: all of a step that comes before learning.

    begin(number)   the prompts of the batch are drawn, here and now
         └▶ written, graded; where prompts teach nothing others are drawn, written, graded ─▶ Practised

The same for batches that are made one after another and for several at a time, in threads of their own.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from practicum.config import Config
from practicum.data import ShuffledStream
from practicum.loop.metrics import Stopwatch
from practicum.loop.overlap import FIRST, Turns
from practicum.loop.resampling import Practice
from practicum.reward import GradingRound, RewardLoopManager
from practicum.rollout.manager import RolloutManager
from practicum.types import Prompt, RolloutRequest, Sample, SamplingParams, Score

EncodedPrompt = tuple[Prompt, NDArray[np.int32]]
_TRAINING, _VALIDATION, _BASELINES = range(3)  # streams of random numbers


@dataclass(frozen=True, slots=True)
class Practised:
    """What a step learns from."""

    practice: Practice[EncodedPrompt]
    first: Practice[EncodedPrompt]
    """The prompts as they came: those that took their places were chosen."""
    num_tokens: int
    """Of all answers that were written to be learnt from."""
    baselines: list[float | None] | None
    """The reward of a greedy answer to each prompt, None where it could not be graded; where one is wanted."""
    counts: Mapping[str, int]
    """Of conversations, turns, and calls of tools."""

    @property
    def groups(self) -> NDArray[np.int64]:
        """[samples], which prompt each answers."""
        return np.arange(len(self.practice.samples)) // self.practice.per_prompt


class Prompts:
    """The stream of prompts, and which of them are in which batch. For any thread."""

    def __init__(self, stream: ShuffledStream[EncodedPrompt]) -> None:
        self._stream = stream
        self._drawn: dict[int, list[int]] = {}  # positions in the stream, by batch
        self._lock = threading.Lock()

    def draw(self, num: int, batch: int) -> list[EncodedPrompt]:
        with self._lock:
            positions = self._stream.draw(num)
            self._drawn.setdefault(batch, []).extend(positions)
            return self._stream.at(positions)

    def forget(self, learnt: int) -> None:
        """All batches up to this one."""
        with self._lock:
            self._drawn = {batch: own for batch, own in self._drawn.items() if batch > learnt}

    def after(self, learnt: int) -> tuple[int, tuple[int, ...]]:
        """Where the stream stands once all batches up to `learnt` are learnt from: its position, and what before that
        is to come again, since it is in batches that are not."""
        with self._lock:
            ahead = (own for batch, own in self._drawn.items() if batch > learnt)
            again = sorted(itertools.chain(self._stream.again, *ahead))
            position = self._stream.position
        while again and again[-1] == position - 1:
            position = again.pop()
        return position, tuple(again)


class Practising:
    def __init__(
        self, config: Config, prompts: Prompts, rollout: RolloutManager, reward: RewardLoopManager, turns: Turns
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._rollout = rollout
        self._reward = reward
        self._turns = turns

    def begin(self, number: int) -> Callable[[Stopwatch], Practised]:
        """What makes batch `number`. Its prompts come after those of the batches that were begun before."""
        self._prompts.forget(number - 1 - self._config.trainer.staleness)
        return partial(self._practise, number, self._prompts.draw(self._config.data.prompts_per_step, number))

    def break_off(self) -> None:
        """All that is being written or graded, in whichever thread, ends soon and with an error."""
        self._turns.end()
        self._rollout.break_off()
        self._reward.break_off()

    def answered(self, prompts: Sequence[EncodedPrompt], params: SamplingParams) -> tuple[list[Sample], list[Score]]:
        """Held-out prompts, before anything else that waits to be written."""
        counts = Counter[str]()  # a step's are those of its training alone
        with ExitStack() as turn, self._reward.round() as grading:
            requests = self._requests(prompts, params, _VALIDATION, 0)
            samples, order = self._written(FIRST, requests, grading, counts, Stopwatch())
            turn.enter_context(self._turns.grading(FIRST))
            return samples, grading.result().in_places(order).scores

    def _practise(self, number: int, prompts: list[EncodedPrompt], watch: Stopwatch) -> Practised:
        counts = Counter[str]()
        first = practice = self._round(number, 0, prompts, counts, watch)
        written = [first]
        for attempt in range(1, self._config.algorithm.resampling_rounds + 1):
            if stale := practice.stale():
                others = self._prompts.draw(len(stale), number)
                written.append(self._round(number, attempt, others, counts, watch))
                practice = practice.renewed(written[-1])
        baselines = self._baselines(number, practice.prompts, counts, watch)
        num_tokens = sum(int(sample.loss_mask.sum()) for one in written for sample in one.samples)
        return Practised(practice, first, num_tokens, baselines, counts)

    def _round(
        self, number: int, attempt: int, prompts: list[EncodedPrompt], counts: Counter[str], watch: Stopwatch
    ) -> Practice[EncodedPrompt]:
        """The prompts, answered and graded."""
        groups = np.repeat(np.arange(len(prompts)), self._config.rollout.answers_per_prompt)
        requests = self._requests(prompts, self._config.rollout.sampling, _TRAINING, number, attempt)
        with ExitStack() as turn, self._reward.round() as grading:
            samples, order = self._written(number, requests, grading, counts, watch)
            turn.enter_context(self._turns.grading(number))  # until models sleep again, when the round is over
            with watch.phase("reward"):
                graded = grading.result(groups[order].tolist()).in_places(order)
        return Practice(prompts, samples, graded)

    def _baselines(
        self, number: int, prompts: Sequence[EncodedPrompt], counts: Counter[str], watch: Stopwatch
    ) -> list[float | None] | None:
        if self._config.algorithm.advantage != "remax":
            return None
        params = replace(self._config.rollout.sampling, temperature=0.0, num_answers=1)
        requests = self._requests(prompts, params, _BASELINES, number)
        with ExitStack() as turn, self._reward.round() as grading:
            _, order = self._written(number, requests, grading, counts, watch)
            turn.enter_context(self._turns.grading(number))
            with watch.phase("rollout"):
                return [score.value for score in grading.result().in_places(order).scores]

    def _written(
        self,
        rank: int,
        requests: Sequence[RolloutRequest],
        grading: GradingRound,
        counts: Counter[str],
        watch: Stopwatch,
    ) -> tuple[list[Sample], list[int]]:
        """The answers to all requests in their order; and their places in the order in which they were finished and
        handed over for grading."""
        ends = list(itertools.accumulate(request.params.num_answers for request in requests))
        samples: dict[int, Sample] = {}
        with self._turns.writing(rank, watch), watch.phase("rollout"):
            with closing(self._rollout.write(requests)) as writing:
                for answers in writing:
                    grading.add([answer.sample for answer in answers])
                    samples |= {
                        ends[answer.request] - requests[answer.request].params.num_answers + answer.number: (
                            answer.sample
                        )
                        for answer in answers
                    }
            if self._config.rollout.agent.is_set:  # of this writing alone: nobody else writes yet
                counts.update(self._rollout.take_counts())
        assert len(samples) == ends[-1]
        return [samples[place] for place in range(len(samples))], list(samples)

    def _requests(
        self, prompts: Iterable[EncodedPrompt], params: SamplingParams, stream: int, step: int, attempt: int = 0
    ) -> list[RolloutRequest]:
        prompts = list(prompts)
        entropy = [self._config.trainer.seed, stream, step, *([attempt] if attempt else [])]
        seeds = np.random.SeedSequence(entropy).generate_state(len(prompts), np.uint64)
        return [
            RolloutRequest(prompt, ids, params, int(seed)) for (prompt, ids), seed in zip(prompts, seeds, strict=True)
        ]
