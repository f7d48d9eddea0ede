"""The loop: the only place that knows the order of things.

    prompts ─▶ generate ─▶ grade ─▶ resample ─▶ reference, critic ─▶ advantages ─▶ update ─▶ publish: version + 1
               └────────── pipeline.py ──────┘  └───────── learners.py, advantages.py ─────┘

Answers are graded as they are written; every other stage waits for all of the one before it. With `trainer.staleness`
the batches of the next steps are written and graded meanwhile. Rollout lives in the learners' own processes (hybrid
placement), in others on the same devices, or on devices of its own; graders share the pool in processes of their own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack
from typing import Any

from practicum.config import Config
from practicum.control_tokens import ControlTokens
from practicum.controller import Controller, open_controller
from practicum.controller.loop import iterate
from practicum.data import ShuffledStream, read_prompts
from practicum.errors import ConfigError, DataError, ModelError
from practicum.loop.advantages import add_advantages, learnable, share_with_signal
from practicum.loop.learners import Learners
from practicum.loop.metrics import StepReport, Stopwatch, conversation_metrics, rollout_metrics, staleness_metrics
from practicum.loop.notices import StepNotices, unseen
from practicum.loop.pipeline import DeviceLease, EncodedPrompt, GroupBuffer, Pipeline, PromptSource, trajectories_of
from practicum.loop.placement import check_rollout, log_dir, open_learners, open_only_learners
from practicum.loop.recordings import check_recordings, check_resumed, groups_of
from practicum.loop.run_folder import RunFolder, RunState, check_checkpoint_path
from practicum.loop.settings import check_lora
from practicum.loop.trackers import check_trackers, open_trackers
from practicum.loop.validation import check_keep_best, validation_metrics
from practicum.models import absolute, encode_prompts, load_config, load_tokenizer, vocabulary_conflicts
from practicum.replay import Recording
from practicum.reward.centre import check_reward, open_reward_centre
from practicum.reward.report import Progress
from practicum.rollout.agent.tools import describe_tools
from practicum.types import Trajectory

_log = logging.getLogger("practicum")
_SHOWN_ANSWERS = 8
_NUM_GROUPS = 3  # that may share the pool: learners, graders, replicas of a reward model; colocated ones come on top
_PROGRESS_EVERY_S = 10.0


class Trainer:
    """`for step in Trainer(config).steps(): ...`. All processes are started by the loop and end with it."""

    def __init__(
        self, config: Config, notify: Callable[[str], None] = _log.warning, *, checks_rollout: bool = True
    ) -> None:
        """`notify` gets, in a sentence, what a person should know but need not act on. `checks_rollout`: whether
        what would keep the rollout from starting is an error now."""
        self.config = config
        self._notify = notify
        self._notified_at_s = -_PROGRESS_EVERY_S
        self._notices = StepNotices(config)
        self.rubric = check_reward(config.reward)
        for key, path in _model_paths(config).items():
            check_checkpoint_path(key, path)
        tokenizer = self._tokenizer = load_tokenizer(config.model.path)
        _check_models(config, load_config(config.model.path), tokenizer)
        self._tools = [tool.schema for tool in describe_tools(config.rollout.agent.tools)]
        check_recordings(config, tokenizer)
        self._replay_file = config.actor.router_replay.replay_file
        self._train_prompts = self._read(config.data.train, tokenizer)
        self._validation_prompts: list[EncodedPrompt] = []
        if config.data.validation is not None and self._replay_file is not None:
            notify("a recording is learnt from and nobody writes answers: nothing is validated")
        elif config.data.validation is not None:
            self._validation_prompts = self._read(config.data.validation, tokenizer)[: config.validation.max_prompts]

        self._name_unused_sources()
        for text in unseen(config, tokenizer, [prompt for prompt, _ in self._train_prompts], self._tools, self.rubric):
            notify(text)
        check_trackers(config)
        check_keep_best(config, [prompt.data_source for prompt, _ in self._validation_prompts])
        if checks_rollout:
            check_rollout(config)

    def steps(self) -> Iterator[StepReport]:
        """Run the training, one report a step. Leaving the loop early ends all processes."""
        config = self.config
        with ExitStack() as stack:
            folder = RunFolder(config, check_resumed)
            stack.callback(folder.close)
            resumed = folder.checkpoint
            first = resumed.state.step + 1 if resumed else 1
            if first > config.trainer.steps:
                self._notify(f"nothing is left to do: {first - 1} steps are done")
                return
            for text in folder.passed_over:
                self._notify(text)
            if resumed:
                self._notify("; ".join([f"resuming after step {first - 1}", *folder.changes]))
            # In this thread: Ray replaces signal handlers, which others cannot, and Ctrl-C ends the wait for the pool.
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
            yield from iterate(self._steps(folder, first, controller))

    async def _steps(self, folder: RunFolder, first: int, controller: Controller) -> AsyncGenerator[StepReport, None]:
        async with AsyncExitStack() as stack:
            trackers = open_trackers(folder, first, self.config)
            for tracker in trackers:
                stack.callback(tracker.close)
            await self._start(stack, folder, controller)
            if first == 1 and self._validation_prompts:
                before = await self._validate(0, Stopwatch())
                for tracker in trackers:
                    tracker.log(0, before)
            await self._learners.begin_at(first)
            if self._replay_file is None:
                self._buffer.begin_at(first)
            for number in range(first, self.config.trainer.steps + 1):
                metrics = await (self._step(number) if self._replay_file is None else self._replayed_step(number))
                report = StepReport(number, self.config.trainer.steps, metrics)
                for tracker in trackers:
                    tracker.log(number, report.metrics)
                if self._due(number, self.config.trainer.checkpoint_every) or folder.is_best(report.metrics):
                    await self._checkpoint(number, report.metrics)
                yield report

    async def _step(self, number: int) -> dict[str, float]:
        config, watch = self.config, Stopwatch()
        batch = await self._buffer.take(number, watch)  # generate, grade, resample: Pipeline.batch
        remax = config.algorithm.advantage == "remax"
        learnt = learnable(batch.groups, config.reward.on_failure, needs_baseline=remax)
        async with self._lease.learning(watch):
            with watch.phase("reference"):
                await self._learners.add_reference_and_values(learnt)
            baselines = [group.baseline for group in batch.groups] if remax else None
            add_advantages(learnt, config.algorithm, self._learners.kl_coefficient, baselines)
            with watch.phase("update"):
                updated = await self._learners.update(number, learnt)
            for text in self._notices.of_update(number, updated):
                self._notify(text)
            with watch.phase("weights"):
                # Where batches are made ahead, it is not known who has the devices next.
                await self._rollout.update_weights(number, stays_awake=not config.trainer.staleness)
        self._buffer.published(number)
        if number % config.trainer.log_answers_every == 0 or number == 1:
            trajectories = trajectories_of(batch.groups)
            shown = trajectories[:: max(1, len(trajectories) // _SHOWN_ANSWERS)]
            self._folder.write_answers(number, shown, self._tokenizer.decode)
        metrics = rollout_metrics(trajectories_of(batch.drawn)) | updated | batch.report.metrics()
        metrics |= {"reward/groups_with_signal": share_with_signal(learnt)}
        for text in self._notices.of(number, metrics, batch.report):
            self._notify(text)
        if config.trainer.staleness:
            metrics |= staleness_metrics(number, learnt)
        if config.algorithm.resampling_rounds:
            metrics |= {"rollout/resampled_prompts": float(batch.num_resampled)}
        if self._rollout.num_restarts:  # not the same in a run that was resumed, so it stands beside the times
            metrics |= {"time/replica_restarts": float(self._rollout.num_restarts)}
        if config.rollout.agent.is_set:
            metrics |= conversation_metrics(trajectories_of(batch.written))
        metrics |= watch.metrics(batch.num_tokens)
        if self._validation_prompts and self._due(number, config.validation.every):
            metrics |= await self._validate(number, watch)
        return metrics

    async def _replayed_step(self, number: int) -> dict[str, float]:
        """Learn again from a recording: the same samples and scores, by the same experts."""
        watch = Stopwatch()
        with watch.phase("reading"):
            learnt = groups_of(self._recording.samples(number), self.config.rollout.answers_per_prompt)
        with watch.phase("update"):
            await self._learners.add_reference_and_values(learnt)
            updated = await self._learners.update(number, learnt)
        samples = [sample for own in learnt for sample in own]
        metrics = rollout_metrics([Trajectory(sample.id, 0, [sample], sample.score) for sample in samples]) | updated
        metrics |= {"reward/groups_with_signal": share_with_signal(learnt)}
        return metrics | watch.metrics(sum(sample.num_learnt for sample in samples))

    async def _validate(self, number: int, watch: Stopwatch) -> dict[str, float]:
        with watch.phase("validation"):
            groups = await self._pipeline.validation(self._validation_prompts, self.config.validation_sampling)
        right_above = self.config.validation.right_above
        self._folder.write_validation(number, [group.trajectories[0] for group in groups], right_above)
        return validation_metrics(groups, right_above) | {"time/validation_s": watch.seconds["validation"]}

    def _due(self, number: int, every: int) -> bool:
        return number == self.config.trainer.steps or (every > 0 and number % every == 0)

    async def _checkpoint(self, number: int, metrics: Mapping[str, float]) -> None:
        position, again = self._prompts.after(number)
        state = RunState(
            number,
            position,
            kl_coefficient=self._learners.kl_coefficient,
            kl_began_at=self.config.algorithm.kl.coefficient,
            data_again=again,
        )
        async with self._lease.learning(Stopwatch()):
            with self._folder.new_checkpoint(state, metrics) as folder:
                await self._learners.save(folder)

    async def _start(self, stack: AsyncExitStack, folder: RunFolder, controller: Controller) -> None:
        config, resumed = self.config, folder.checkpoint
        self._folder = folder
        self._prompts = PromptSource(
            ShuffledStream(
                self._train_prompts,
                seed=config.trainer.seed,
                position=resumed.state.data_position if resumed else 0,
                again=resumed.state.data_again if resumed else (),
            )
        )
        model_path = absolute(resumed.model_path if resumed else config.model.path)
        if self._replay_file is not None:
            self._recording = stack.enter_context(Recording(self._replay_file))
            groups = await stack.enter_async_context(open_only_learners(config, controller, model_path))
        else:
            groups, self._rollout = await stack.enter_async_context(open_learners(config, controller, model_path))
        self._learners = await Learners.of(config, groups)
        if not self._learners.support_packing:
            self._notify("this model cannot keep samples in one row apart: each gets a row of its own, with padding")
        if resumed:
            state = resumed.state
            is_as_asked = state.kl_began_at in (None, config.algorithm.kl.coefficient)
            await self._learners.load(resumed.folder, state.kl_coefficient if is_as_asked else None)
        if self._replay_file is not None:
            self._lease = DeviceLease(config, models_sleep=False)
            return
        reward = await stack.enter_async_context(
            open_reward_centre(config.reward, controller, on_progress=self._show_progress, log_dir=log_dir(config))
        )
        self._lease = DeviceLease(config, models_sleep=reward.models_sleep)
        self._pipeline = Pipeline(config, self._prompts, self._rollout, reward, self._lease)
        self._buffer = GroupBuffer(self._pipeline.batch, staleness=config.trainer.staleness, last=config.trainer.steps)
        stack.push_async_callback(self._buffer.close)  # before anything that its batches use
        await self._rollout.update_weights(resumed.state.step if resumed else 0)

    def _show_progress(self, progress: Progress) -> None:
        """Report how far one of the open grading rounds is, now and then."""
        now = time.monotonic()
        if progress.seconds >= _PROGRESS_EVERY_S <= now - self._notified_at_s:
            self._notified_at_s = now
            self._notify(str(progress))

    def _name_unused_sources(self) -> None:
        there = {prompt.data_source for prompt, _ in (*self._train_prompts, *self._validation_prompts)}
        unused = [source for source in self.config.reward.sources if source not in there]
        if unused:
            known = ", ".join(map(repr, sorted(there)))
            self._notify(f"reward.sources: no prompt has data_source {', '.join(map(repr, unused))}; there are {known}")

    def _read(self, path: str, tokenizer: object) -> list[EncodedPrompt]:
        data = self.config.data
        keys = {"prompt_key": data.prompt_key, "answer_key": data.answer_key}
        prompts = read_prompts(path, **keys, check=self.rubric.check)
        control_tokens = ControlTokens(tokenizer)
        encoded = list(zip(prompts, encode_prompts(tokenizer, prompts, self._tools, control_tokens), strict=True))
        spelled = [p for p in prompts if control_tokens.count([message.content for message in p.messages or ()])]
        if spelled:
            self._notify(
                f"{len(spelled)} of {len(prompts)} prompts in {path} have control tokens of the model in their "
                f"messages, the first is {spelled[0].id}: they are plain text there, and special only in prompts "
                "that are texts"
            )
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


def _model_paths(config: Config) -> dict[str, str]:
    paths = {
        "model.path": config.model.path,
        "algorithm.kl.reference": config.algorithm.kl.reference,
        "critic.path": config.critic.path,
    }
    return {key: path for key, path in paths.items() if path is not None}


def _check_models(config: Config, model_config: Any, tokenizer: Any) -> None:
    check_lora(config, model_config)
    for key, path in _model_paths(config).items():
        if key != "model.path":
            try:
                own, other = (c.get_text_config().vocab_size for c in (model_config, load_config(path)))
                others = vocabulary_conflicts(tokenizer, path)
            except ModelError as error:
                raise ModelError(f"{key}={path}: {error}") from error
            if own != other:
                raise ConfigError(
                    f"{key}={path} has a vocabulary of {other} tokens, but model {config.model.path!r} has {own}: they "
                    "must read the same tokens."
                )
            if others:
                number, (ours, theirs) = min(others.items())
                raise ConfigError(
                    f"{key}={path} reads {len(others)} tokens as other text than model {config.model.path!r}: token "
                    f"{number} is {theirs!r} there and {ours!r} here. They must read the same tokens."
                )
    longest = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if longest and config.max_sequence_tokens > longest:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_new_tokens = {config.data.max_prompt_tokens} + "
            f"{config.rollout.max_new_tokens} = {config.max_sequence_tokens} tokens, "
            f"but model {config.model.path!r} has positions for {longest}."
        )
