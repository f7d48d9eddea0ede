"""The loop: the only place that knows the order of things.

    prompts ─▶ rollout ─▶ reward ─▶ a look by frozen models ─▶ advantages ─▶ update ─▶ weights, version + 1
                 samples     scores     reference, critic            on the driver   all ranks together

Answers are graded as they are written; every other stage waits for all of the one before it. Where `trainer.staleness`
allows it the batches of the next steps are written and graded meanwhile, see overlap.py. Who writes them is the rollout
manager's matter: the learners' own processes (hybrid placement), others on the same places, or on places of their own.
Reward workers and replicas of a reward model share the pool in processes of their own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from practicum.config import Config
from practicum.controller import open_controller
from practicum.data import ShuffledStream, read_prompts
from practicum.errors import ConfigError, DataError, ModelError
from practicum.loop.advantages import graded_batch, share_with_signal, with_advantages
from practicum.loop.learners import Learners
from practicum.loop.metrics import StepReport, Stopwatch, age_metrics, conversation_metrics, rollout_metrics
from practicum.loop.overlap import Buffer, Turns
from practicum.loop.practising import EncodedPrompt, Practised, Practising, Prompts
from practicum.loop.recordings import check_going_on, check_recordings
from practicum.loop.resampling import num_renewed
from practicum.loop.run_folder import RunFolder, RunState
from practicum.loop.settings import check_lora
from practicum.loop.trackers import check_trackers, open_trackers
from practicum.loop.validation import check_keep_best, validation_metrics
from practicum.loop.writers import check_writers, open_learners, open_only_learners
from practicum.models import absolute, encode_prompts, load_config, load_tokenizer, other_words
from practicum.replay import Recording
from practicum.reward import Progress, check_reward, open_reward_centre
from practicum.rollout.agent.tools import describe_tools
from practicum.types import TrainingSample

_log = logging.getLogger("practicum")
_SHOWN_ANSWERS = 8
_NUM_GROUPS = (
    3  # that may share the pool: learners, graders, replicas of a reward model; other colocated ones come on top
)
_PROGRESS_EVERY_S = 10.0


class Trainer:
    """`for step in Trainer(config).steps(): ...`. All processes are started by the loop and end with it."""

    def __init__(
        self, config: Config, notify: Callable[[str], None] = _log.warning, *, checks_writers: bool = True
    ) -> None:
        """`notify` is told, in a sentence, what a person should know but need not act on. `checks_writers`: whether
        what would keep the rollout from starting is an error now."""
        self.config = config
        self._notify = notify
        self._said_at_s = -_PROGRESS_EVERY_S
        self.rubric = check_reward(config.reward)
        tokenizer = load_tokenizer(config.model.path)
        _check_models(config, load_config(config.model.path), tokenizer)
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
            step = self._repeated_step
            if self._repeats is None:
                step = self._step
                self._batches.begin_at(first)
            for number in range(first, self.config.trainer.steps + 1):
                report = StepReport(number, self.config.trainer.steps, step(number))
                for tracker in trackers:
                    tracker.log(number, report.metrics)
                if self._due(number, self.config.trainer.checkpoint_every) or folder.is_best(report.metrics):
                    self._checkpoint(number, report.metrics)
                yield report

    def _step(self, number: int) -> dict[str, float]:
        watch = Stopwatch()
        made = self._batches.take(number, watch)
        samples, graded, groups = made.practice.samples, made.practice.graded, made.groups
        batch = graded_batch(number, samples, graded)
        with self._turns.learning(watch):
            with watch.phase("looking"):
                batch = self._learners.look(batch, groups)
            coefficient = self._learners.kl_coefficient
            batch = with_advantages(batch, groups, self.config.algorithm, coefficient, made.baselines)
            with watch.phase("update"):
                learnt = self._learners.learn(number, batch, groups)
            with watch.phase("weights"):
                # Whose turn comes next is not known where batches are made ahead.
                self._rollout.update_weights(number, stays_awake=not self.config.trainer.staleness)
        self._batches.published(number)
        if number % self.config.trainer.log_answers_every == 0 or number == 1:
            shown = slice(None, None, max(1, len(samples) // _SHOWN_ANSWERS))  # of different prompts
            self._folder.write_answers(number, samples[shown], graded.scores[shown])
        metrics = rollout_metrics(made.first.samples, made.first.graded.scores) | learnt | graded.report.metrics()
        metrics |= {"reward/groups_with_signal": share_with_signal(batch, groups)}
        if self.config.trainer.staleness:
            metrics |= age_metrics(batch)
        if self.config.algorithm.resampling_rounds:
            metrics |= {"rollout/renewed_prompts": float(num_renewed(made.first.prompts, made.practice.prompts))}
        if self._rollout.num_restarts:  # not the same in a run that was resumed, so it stands beside the times
            metrics |= {"time/replica_restarts": float(self._rollout.num_restarts)}
        if self.config.rollout.agent.is_set:
            metrics |= conversation_metrics(made.counts)
        metrics |= watch.metrics(made.num_tokens)
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

    def _validate(self, number: int, watch: Stopwatch) -> dict[str, float]:
        params = self.config.validation_sampling
        with watch.phase("validation"):
            samples, scores = self._practising.answered(self._validation_prompts, params)
        right_above = self.config.validation.right_above
        shown = slice(None, None, params.num_answers)  # the first answer to each prompt
        self._folder.write_validation(number, samples[shown], scores[shown], right_above)
        metrics = validation_metrics(samples, scores, params.num_answers, right_above)
        return metrics | {"time/validation_s": watch.seconds["validation"]}

    def _due(self, number: int, every: int) -> bool:
        return number == self.config.trainer.steps or (every > 0 and number % every == 0)

    def _checkpoint(self, number: int, metrics: Mapping[str, float]) -> None:
        position, again = self._prompts.after(number)
        state = RunState(
            number,
            position,
            kl_coefficient=self._learners.kl_coefficient,
            kl_began_at=self.config.algorithm.kl.coefficient,
            data_again=again,
        )
        with self._turns.learning(Stopwatch()):
            self._folder.save_checkpoint(state, self._learners.save, metrics)

    def _start(self, stack: ExitStack, folder: RunFolder) -> None:
        config, resumed = self.config, folder.checkpoint
        self._folder = folder
        self._prompts = Prompts(
            ShuffledStream(
                self._train_prompts,
                seed=config.trainer.seed,
                position=resumed.state.data_position if resumed else 0,
                again=resumed.state.data_again if resumed else (),
            )
        )
        controller = stack.enter_context(
            open_controller(
                config.controller.backend,
                num_workers=config.trainer.num_workers,
                use_gpu={"cpu": False, "cuda": True, "auto": None}[config.trainer.device],
                max_colocate_count=_NUM_GROUPS
                + [config.rollout.placement, *config.placements.values()].count("colocated"),
                address=config.controller.address,
                start_timeout_s=config.controller.start_timeout_s,
                call_timeout_s=config.controller.call_timeout_s,
            )
        )
        model_path = absolute(resumed.model_path if resumed else config.model.path)
        if self._repeats is not None:
            self._recording = stack.enter_context(Recording(self._repeats))
            groups = stack.enter_context(open_only_learners(config, controller, model_path))
        else:
            groups, self._rollout = stack.enter_context(open_learners(config, controller, model_path))
        self._learners = Learners(config, groups)
        if not self._learners.share_rows:
            self._notify("this model cannot keep samples in one row apart: each gets a row of its own, with padding")
        if resumed:
            state = resumed.state
            is_as_asked = state.kl_began_at in (None, config.algorithm.kl.coefficient)
            self._learners.load(resumed.folder, state.kl_coefficient if is_as_asked else None)
        if self._repeats is not None:
            self._turns = Turns(config, models_sleep=False)
            return
        staleness = config.trainer.staleness
        centre = open_reward_centre(
            config.reward, controller, side_by_side=staleness > 0, on_progress=self._say_progress
        )
        reward = stack.enter_context(centre)
        self._turns = Turns(config, models_sleep=reward.models_sleep)
        self._practising = Practising(config, self._prompts, self._rollout, reward, self._turns)
        self._batches: Buffer[Practised] = Buffer(
            self._practising.begin,
            staleness=staleness,
            last=config.trainer.steps,
            break_off=self._practising.break_off,
        )
        stack.callback(self._batches.close)  # before anything that its threads use
        self._rollout.update_weights(resumed.state.step if resumed else 0)

    def _say_progress(self, progress: Progress) -> None:
        """Of any of the rounds that are open."""
        now = time.monotonic()
        if progress.seconds >= _PROGRESS_EVERY_S <= now - self._said_at_s:
            self._said_at_s = now
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
        if data.overlong == "error":
            raise DataError(f"{what}, the first is {first.id}: raise data.max_prompt_tokens or set data.overlong=drop.")
        if not short:
            raise DataError(f"{what}, so none is left: raise data.max_prompt_tokens.")
        self._notify(f"{what}; they are left out")
        return short


def _check_models(config: Config, model_config: Any, tokenizer: Any) -> None:
    check_lora(config, model_config)
    for key, path in (("algorithm.kl.reference", config.algorithm.kl.reference), ("critic.path", config.critic.path)):
        if path is not None:
            try:
                own, other = (c.get_text_config().vocab_size for c in (model_config, load_config(path)))
                others = other_words(tokenizer, path)
            except ModelError as error:
                raise ModelError(f"{key}={path}: {error}") from error
            if own != other:
                raise ConfigError(
                    f"{key}={path} has {other} words, but model {config.model.path!r} has {own}: they must read the "
                    "same tokens."
                )
            if others:
                number, (ours, theirs) = min(others.items())
                raise ConfigError(
                    f"{key}={path} reads {len(others)} tokens as other words than model {config.model.path!r}: token "
                    f"{number} is {theirs!r} there and {ours!r} here. They must read the same tokens."
                )
    longest = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if longest and config.max_sequence_tokens > longest:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_new_tokens = {config.data.max_prompt_tokens} + "
            f"{config.rollout.max_new_tokens} = {config.max_sequence_tokens} tokens, "
            f"but model {config.model.path!r} has positions for {longest}."
        )
