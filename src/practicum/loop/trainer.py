"""The loop: the only place that knows the order of things.

    prompts ─▶ rollout ─▶ reward ─▶ a look by frozen models ─▶ advantages ─▶ update ─▶ weights, version + 1
                 samples     scores     reference, critic            on the driver   all ranks together

Answers are graded as they are written; every other stage waits for all of the one before it. Who writes them is the
rollout manager's matter: the learners' own processes (hybrid placement), others on the same places, or on places of
their own. Reward workers and replicas of a reward model share the pool in processes of their own.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.config import Config
from practicum.controller import open_controller
from practicum.data import ShuffledStream, read_prompts
from practicum.errors import ConfigError, DataError, ModelError
from practicum.loop.advantages import graded_batch, share_with_signal, with_advantages
from practicum.loop.learners import Learners
from practicum.loop.metrics import StepReport, Stopwatch, conversation_metrics, rollout_metrics
from practicum.loop.recordings import check_going_on, check_recordings
from practicum.loop.resampling import Practice, num_renewed
from practicum.loop.run_folder import RunFolder, RunState
from practicum.loop.trackers import check_trackers, open_trackers
from practicum.loop.validation import check_keep_best, validation_metrics
from practicum.loop.writers import check_lora, check_writers, open_actors, open_learners
from practicum.models import absolute, encode_prompts, load_config, load_tokenizer
from practicum.replay import Recording
from practicum.reward import GradingRound, Progress, check_reward, open_reward_centre
from practicum.rollout.agent.tools import describe_tools
from practicum.types import Prompt, RolloutRequest, Sample, SamplingParams, TrainingSample

EncodedPrompt = tuple[Prompt, NDArray[np.int32]]
_log = logging.getLogger("practicum")
_SHOWN_ANSWERS = 8
_NUM_GROUPS = (
    3  # that may share the pool: learners, graders, replicas of a reward model; other colocated ones come on top
)
_PROGRESS_EVERY_S = 10.0
_TRAINING, _VALIDATION, _BASELINES = range(3)  # streams of random numbers


class Trainer:
    """`for step in Trainer(config).steps(): ...`. All processes are started by the loop and end with it."""

    def __init__(
        self, config: Config, notify: Callable[[str], None] = _log.warning, *, checks_writers: bool = True
    ) -> None:
        """`notify` is told, in a sentence, what a person should know but need not act on. `checks_writers`: whether
        what would keep the rollout from starting is an error now."""
        self.config = config
        self._notify = notify
        self._said_at_s = 0.0
        self.rubric = check_reward(config.reward)
        _check_models(config, load_config(config.model.path))
        tokenizer = load_tokenizer(config.model.path)
        self._tools = [tool.schema for tool in describe_tools(config.rollout.agent.tools)]
        check_recordings(config, tokenizer)
        self._repeats = config.actor.router_replay.replay_file
        self._train_prompts = self._read(config.data.train, tokenizer)
        self._validation_prompts: list[EncodedPrompt] = []
        if config.data.validation is not None and self._repeats is not None:
            notify("a recording is learnt from and nobody writes answers: nothing is validated")
        elif config.data.validation is not None:
            self._validation_prompts = self._read(config.data.validation, tokenizer)[: config.validation.max_prompts]

        self._name_unused_sources()
        check_trackers(config)
        check_keep_best(config, [prompt.data_source for prompt, _ in self._validation_prompts])
        if checks_writers:
            check_writers(config)

    def _name_unused_sources(self) -> None:
        there = {prompt.data_source for prompt, _ in (*self._train_prompts, *self._validation_prompts)}
        unused = [source for source in self.config.reward.sources if source not in there]
        if unused:
            known = ", ".join(map(repr, sorted(there)))
            self._notify(f"reward.sources: no prompt has data_source {', '.join(map(repr, unused))}; there are {known}")

    def steps(self) -> Iterator[StepReport]:
        """Run the training, one report a step. Leaving the loop early ends all processes."""
        with ExitStack() as stack:
            folder = RunFolder(self.config)
            stack.callback(folder.close)
            resumed = folder.checkpoint
            first = resumed.state.step + 1 if resumed else 1
            if first > self.config.trainer.steps:
                self._notify(f"nothing is left to do: {first - 1} steps are done")
                return
            if resumed:
                check_going_on(self.config)
                self._notify("; ".join([f"going on after step {first - 1}", *folder.changes]))
            trackers = open_trackers(folder, first, self.config)
            for tracker in trackers:
                stack.callback(tracker.close)
            self._start(stack, folder)
            if not resumed and self._validation_prompts:
                before = self._validate(0, Stopwatch())
                for tracker in trackers:
                    tracker.log(0, before)
            self._learners.begin_at(first)
            step = self._step if self._repeats is None else self._repeated_step
            for number in range(first, self.config.trainer.steps + 1):
                report = StepReport(number, self.config.trainer.steps, step(number))
                for tracker in trackers:
                    tracker.log(number, report.metrics)
                if self._due(number, self.config.trainer.checkpoint_every) or folder.is_best(report.metrics):
                    self._checkpoint(number, report.metrics)
                yield report

    def _step(self, number: int) -> dict[str, float]:
        watch = Stopwatch()
        first = practice = self._practise(self.config.data.prompts_per_step, number, 0, watch)
        written = [*first.samples]
        for attempt in range(1, self.config.algorithm.resampling_rounds + 1):
            if stale := practice.stale():
                more = self._practise(len(stale), number, attempt, watch)
                practice = practice.renewed(more)
                written += more.samples
        prompts, samples, graded = practice.prompts, practice.samples, practice.graded
        groups = np.arange(len(samples)) // practice.per_prompt
        with watch.phase("rollout"):
            baselines = self._baselines(prompts, number)
        batch = graded_batch(number, samples, graded)
        with watch.phase("looking"):
            batch = self._learners.look(batch, groups)
        batch = with_advantages(batch, groups, self.config.algorithm, self._learners.kl_coefficient, baselines)
        with watch.phase("update"):
            learnt = self._learners.learn(number, batch, groups)
        with watch.phase("weights"):
            self._rollout.update_weights(number)
        if number % self.config.trainer.log_answers_every == 0 or number == 1:
            shown = slice(None, None, max(1, len(samples) // _SHOWN_ANSWERS))  # of different prompts
            self._folder.write_answers(number, samples[shown], graded.scores[shown])
        # Of the prompts as they came: those that took their places were chosen.
        metrics = rollout_metrics(first.samples, first.graded.scores) | learnt | graded.report.metrics()
        metrics |= {"reward/groups_with_signal": share_with_signal(batch, groups)}
        if self.config.algorithm.resampling_rounds:
            metrics |= {"rollout/renewed_prompts": float(num_renewed(first.prompts, prompts))}
        if self._rollout.num_restarts:  # not the same in a run that was resumed, so it stands beside the times
            metrics |= {"time/replica_restarts": float(self._rollout.num_restarts)}
        if self.config.rollout.agent.is_set:
            metrics |= conversation_metrics(self._rollout.take_counts())
        metrics |= watch.metrics(sum(int(sample.loss_mask.sum()) for sample in written))
        if self._validation_prompts and self._due(number, self.config.validation.every):
            metrics |= self._validate(number, watch)
        return metrics

    def _repeated_step(self, number: int) -> dict[str, float]:
        """From a recording: what was written and graded then is learnt from again, by the same experts."""
        watch = Stopwatch()
        with watch.phase("reading"):
            recorded = self._recording.trainings(number)
        batch: list[TrainingSample | None] = [None] * self.config.samples_per_step
        for item in recorded:
            batch[item.place] = item
        groups = np.arange(len(batch)) // self.config.rollout.answers_per_prompt
        with watch.phase("update"):
            learnt = self._learners.learn(number, self._learners.look(batch, groups), groups)
        samples = [item.sample for item in recorded]
        metrics = rollout_metrics(samples, [item.score for item in recorded if item.score]) | learnt
        metrics |= {"reward/groups_with_signal": share_with_signal(batch, groups)}
        return metrics | watch.metrics(sum(int(sample.loss_mask.sum()) for sample in samples))

    def _practise(self, num_prompts: int, number: int, attempt: int, watch: Stopwatch) -> Practice[EncodedPrompt]:
        """The next prompts, answered and graded."""
        prompts = self._stream.take(num_prompts)
        groups = np.repeat(np.arange(num_prompts), self.config.rollout.answers_per_prompt)
        with self._reward.round() as grading:
            with watch.phase("rollout"):
                requests = self._requests(prompts, self.config.rollout.sampling, _TRAINING, number, attempt)
                samples, order = self._written(requests, grading)
            with watch.phase("reward"):
                graded = grading.result(groups[order].tolist()).in_places(order)
        return Practice(prompts, samples, graded)

    def _written(self, requests: Sequence[RolloutRequest], grading: GradingRound) -> tuple[list[Sample], list[int]]:
        """The answers to all requests in their order; and their places in the order in which they were finished and
        handed over for grading."""
        ends = list(itertools.accumulate(request.params.num_answers for request in requests))
        samples: dict[int, Sample] = {}
        with closing(self._rollout.write(requests)) as writing:
            for answers in writing:
                grading.add([answer.sample for answer in answers])
                samples |= {
                    ends[answer.request] - requests[answer.request].params.num_answers + answer.number: answer.sample
                    for answer in answers
                }
        assert len(samples) == ends[-1]
        return [samples[place] for place in range(len(samples))], list(samples)

    def _baselines(self, prompts: Sequence[EncodedPrompt], number: int) -> list[float | None] | None:
        """The reward of a greedy answer to each prompt, None where it could not be graded; where one is wanted."""
        if self.config.algorithm.advantage != "remax":
            return None
        params = replace(self.config.rollout.sampling, temperature=0.0, num_answers=1)
        with self._reward.round() as grading:
            _, order = self._written(self._requests(prompts, params, _BASELINES, number), grading)
            return [score.value for score in grading.result().in_places(order).scores]

    def _validate(self, number: int, watch: Stopwatch) -> dict[str, float]:
        params = self.config.validation_sampling
        with watch.phase("validation"):
            requests = self._requests(self._validation_prompts, params, _VALIDATION, 0)
            with self._reward.round() as grading:
                samples, order = self._written(requests, grading)
                scores = grading.result().in_places(order).scores
        if self.config.rollout.agent.is_set:
            self._rollout.take_counts()  # a step's are those of its training alone
        right_above = self.config.validation.right_above
        shown = slice(None, None, params.num_answers)  # the first answer to each prompt
        self._folder.write_validation(number, samples[shown], scores[shown], right_above)
        metrics = validation_metrics(samples, scores, params.num_answers, right_above)
        return metrics | {"time/validation_s": watch.seconds["validation"]}

    def _requests(
        self, prompts: Sequence[EncodedPrompt], params: SamplingParams, stream: int, step: int, attempt: int = 0
    ) -> list[RolloutRequest]:
        entropy = [self.config.trainer.seed, stream, step, *([attempt] if attempt else [])]
        seeds = np.random.SeedSequence(entropy).generate_state(len(prompts), np.uint64)
        return [
            RolloutRequest(prompt, ids, params, int(seed)) for (prompt, ids), seed in zip(prompts, seeds, strict=True)
        ]

    def _due(self, number: int, every: int) -> bool:
        return number == self.config.trainer.steps or (every > 0 and number % every == 0)

    def _checkpoint(self, number: int, metrics: Mapping[str, float]) -> None:
        state = RunState(number, self._stream.position, self._learners.kl_coefficient)
        self._folder.save_checkpoint(state, self._learners.save, metrics)

    def _start(self, stack: ExitStack, folder: RunFolder) -> None:
        config, resumed = self.config, folder.checkpoint
        self._folder = folder
        self._stream = ShuffledStream(
            self._train_prompts, seed=config.trainer.seed, position=resumed.state.data_position if resumed else 0
        )
        controller = stack.enter_context(
            open_controller(
                config.controller.backend,
                num_workers=config.trainer.num_workers,
                use_gpu={"cpu": False, "cuda": True, "auto": None}[config.trainer.device],
                max_colocate_count=_NUM_GROUPS
                + (config.rollout.placement == "colocated")
                + (config.critic.placement == "colocated"),
                address=config.controller.address,
                start_timeout_s=config.controller.start_timeout_s,
                call_timeout_s=config.controller.call_timeout_s,
            )
        )
        model_path = absolute(resumed.model_path if resumed else config.model.path)
        if self._repeats is not None:
            self._recording = stack.enter_context(Recording(self._repeats))
            self._learners = Learners(config, open_actors(config, controller, model_path))
        else:
            opened = open_learners(config, controller, model_path)
            actors, critics, self._rollout = stack.enter_context(opened)
            self._learners = Learners(config, actors, critics)
        if not self._learners.share_rows:
            self._notify("this model cannot keep samples in one row apart: each gets a row of its own, with padding")
        if resumed:
            self._learners.load(resumed.folder, resumed.state.kl_coefficient)
        if self._repeats is not None:
            return
        self._reward = stack.enter_context(
            open_reward_centre(config.reward, controller, on_progress=self._say_progress)
        )
        self._rollout.update_weights(resumed.state.step if resumed else 0)

    def _say_progress(self, progress: Progress) -> None:
        if progress.seconds < self._said_at_s:  # of the round before
            self._said_at_s = 0.0
        if progress.seconds - self._said_at_s >= _PROGRESS_EVERY_S:
            self._said_at_s = progress.seconds
            self._notify(str(progress))

    def _read(self, path: str, tokenizer: object) -> list[EncodedPrompt]:
        data = self.config.data
        keys = {"prompt_key": data.prompt_key, "answer_key": data.answer_key}
        prompts = read_prompts(path, **keys, check=self.rubric.check)
        encoded = list(zip(prompts, encode_prompts(tokenizer, prompts, self._tools), strict=True))
        short = [(prompt, ids) for prompt, ids in encoded if len(ids) <= data.max_prompt_tokens]
        if len(short) == len(encoded):
            return short
        first = next(prompt for prompt, ids in encoded if len(ids) > data.max_prompt_tokens)
        dropped = len(encoded) - len(short)
        what = f"{dropped} of {len(encoded)} prompts in {path} have more than {data.max_prompt_tokens} tokens"
        if data.overlong == "error" or not short:
            raise DataError(f"{what}, the first is {first.id}: raise data.max_prompt_tokens or set data.overlong=drop.")
        self._notify(f"{what}; they are left out")
        return short


def _check_models(config: Config, model_config: Any) -> None:
    check_lora(config, model_config)
    for key, path in (("algorithm.kl.reference", config.algorithm.kl.reference), ("critic.path", config.critic.path)):
        if path is not None:
            try:
                own, other = (c.get_text_config().vocab_size for c in (model_config, load_config(path)))
            except ModelError as error:
                raise ModelError(f"{key}={path}: {error}") from error
            if own != other:
                raise ConfigError(
                    f"{key}={path} has {other} words, but model {config.model.path!r} has {own}: they must read the "
                    "same tokens."
                )
    longest = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if longest and config.max_sequence_tokens > longest:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_new_tokens = {config.data.max_prompt_tokens} + "
            f"{config.rollout.max_new_tokens} = {config.max_sequence_tokens} tokens, "
            f"but model {config.model.path!r} has positions for {longest}."
        )
