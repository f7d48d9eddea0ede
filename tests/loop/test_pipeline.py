"""The pipeline: which prompts a step draws, when a batch may begin, who has the devices, and how it all ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from practicum import Config, Trainer
from practicum.data import ShuffledStream
from practicum.errors import ConfigError, RewardError
from practicum.loop.metrics import StepReport, Stopwatch
from practicum.loop.pipeline import (
    FIRST,
    DeviceLease,
    EncodedPrompt,
    GroupBuffer,
    Pipeline,
    PriorityLock,
    PromptSource,
    StepBatch,
)
from practicum.loop.run_folder import read_metrics
from practicum.reward.report import GradingReport
from practicum.types import Prompt, PromptGroup, SamplingParams, Score
from tests.rollout import talks
from tests.samples import make_sample

MakeConfig = Callable[..., Config]
WAIT_S = 20.0


def run_async(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def within() -> Any:
        async with asyncio.timeout(WAIT_S):
            return await coroutine

    return asyncio.run(within())


# Prompts


def prompts(position: int = 0, again: tuple[int, ...] = ()) -> PromptSource:
    items: list[EncodedPrompt] = [(Prompt(str(i), text="1"), np.array([1], np.int32)) for i in range(9)]
    return PromptSource(ShuffledStream(items, seed=1, position=position, again=again))


def ids(drawn: Sequence[EncodedPrompt]) -> list[str]:
    return [prompt.id for prompt, _ in drawn]


def test_of_steps_that_are_learnt_from_one_after_another_a_position_is_all_there_is() -> None:
    source = prompts()
    for step in range(1, 5):
        source.draw(3, step)
        source.draw(1, step)
        source.forget(step - 1)
        assert source.after(step) == (4 * step, ())


def test_what_was_drawn_ahead_comes_again() -> None:
    source = prompts()
    for step in (1, 2, 3):
        source.draw(4, step)
    assert source.after(0) == (0, ())
    assert source.after(1) == (4, ())
    assert source.after(3) == (12, ())
    source.draw(2, 2)  # prompts of the second step are resampled
    assert source.after(2) == (14, (8, 9, 10, 11))  # those of the third: the others were learnt from
    assert source.after(1) == (4, ())


@pytest.mark.parametrize("learnt", [0, 1, 2, 3])
def test_a_resumed_run_draws_exactly_what_was_not_learnt(learnt: int) -> None:
    first = prompts()
    steps = {1: ids(first.draw(4, 1)), 2: ids(first.draw(4, 2)), 3: ids(first.draw(4, 3))}
    steps[1] += ids(first.draw(3, 1))
    position, again = first.after(learnt)
    resumed = prompts(position, again)
    assert resumed.after(learnt) == (position, again)
    left = sum(len(steps[number]) for number in steps if number > learnt)
    drawn = ids(resumed.draw(left, 4)) if left else []
    assert sorted(drawn) == sorted(one for number in steps if number > learnt for one in steps[number])
    assert resumed.after(4)[1] == ()


# A batch


class ScriptedRollout:
    """Answers each prompt at once."""

    def __init__(self) -> None:
        self.asked: list[PromptGroup] = []

    async def generate(self, groups: Sequence[PromptGroup], *, priority: int = 0) -> AsyncIterator[list[PromptGroup]]:
        self.asked += groups
        for group in groups:
            for trajectory in group.trajectories:
                trajectory.add(make_sample(seed=trajectory.number))
            yield [group]


class ScriptedReward:
    """Grades by a function of the prompt and the number of the trajectory."""

    models_sleep = False

    def __init__(self, grade: Callable[[Prompt, int], float]) -> None:
        self._grade = grade

    @asynccontextmanager
    async def round(self) -> AsyncIterator[ScriptedReward]:
        yield self

    def add(self, groups: Sequence[PromptGroup]) -> None:
        for group in groups:
            for trajectory in group.trajectories:
                trajectory.score = Score(self._grade(group.prompt, trajectory.number))

    async def result(self) -> GradingReport:
        return GradingReport.of([], 0.0, 0, 0)


def make_batch(config: Config, grade: Callable[[Prompt, int], float]) -> tuple[StepBatch, ScriptedRollout]:
    rollout, reward = ScriptedRollout(), ScriptedReward(grade)
    lease = DeviceLease(config, models_sleep=False)
    pipeline = Pipeline(config, prompts(), rollout, reward, lease)  # type: ignore[arg-type]
    return run_async(pipeline.batch(1, Stopwatch())), rollout


def test_prompts_without_signal_give_way_to_others_that_have_some(make_config: MakeConfig) -> None:
    config = make_config("algorithm.resampling_rounds=9", "rollout.answers_per_prompt=2")
    batch, rollout = make_batch(config, lambda prompt, number: float(int(prompt.id) % 2 and number))
    assert all(int(group.prompt.id) % 2 for group in batch.groups)
    kept = [group for group in batch.drawn if int(group.prompt.id) % 2]
    assert batch.groups[: len(kept)] == kept
    assert batch.num_resampled == len(batch.drawn) - len(kept) > 0
    assert batch.written == rollout.asked and len({group.id for group in batch.written}) == len(batch.written)
    assert batch.num_tokens == 3 * 2 * len(batch.written)


def test_where_no_prompt_has_signal_resampling_ends(make_config: MakeConfig) -> None:
    config = make_config("algorithm.resampling_rounds=2", "rollout.answers_per_prompt=2")
    batch, rollout = make_batch(config, lambda prompt, number: 1.0)
    assert batch.groups == batch.drawn and len(rollout.asked) == 3 * len(batch.drawn)


def test_a_greedy_answer_is_the_baseline_of_its_group(make_config: MakeConfig) -> None:
    config = make_config("algorithm.advantage=remax", "rollout.answers_per_prompt=1", "data.prompts_per_step=8")
    batch, rollout = make_batch(config, lambda prompt, number: float(prompt.id))
    assert [group.baseline for group in batch.groups] == [float(group.prompt.id) for group in batch.groups]
    assert {group.params.temperature for group in rollout.asked[8:]} == {0.0}


# The buffer


class Scene:
    """Batches are made when they are let go."""

    def __init__(self, staleness: int, last: int = 100) -> None:
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.free: dict[int, asyncio.Event] = {}
        self.buffer = GroupBuffer(self.make, staleness=staleness, last=last)

    async def make(self, step: int, watch: Stopwatch) -> StepBatch:
        self.begun.append(step)
        try:
            await self.free.setdefault(step, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled.append(step)
            raise
        return batch_of(step)

    def let_go(self, *steps: int) -> None:
        for step in steps:
            self.free.setdefault(step, asyncio.Event()).set()


def batch_of(step: int) -> StepBatch:
    group = PromptGroup(f"{step}/0", Prompt("p", text="?"), np.array([1], np.int32), SamplingParams(1), 0)
    return StepBatch([group], [group], [group], GradingReport.of([], 0.0, 0, 0))


def test_without_staleness_a_batch_is_made_when_it_is_taken() -> None:
    async def check() -> None:
        scene = Scene(staleness=0)
        scene.let_go(5)
        scene.buffer.begin_at(5)
        await asyncio.sleep(0)
        assert scene.begun == []
        assert (await scene.buffer.take(5, Stopwatch())).groups[0].id == "5/0"
        scene.buffer.published(5)
        await asyncio.sleep(0)
        assert scene.begun == [5]

    run_async(check())


@pytest.mark.parametrize("staleness", [1, 3])
def test_no_batch_is_begun_before_its_weights_are_young_enough(staleness: int) -> None:
    async def check() -> None:
        scene = Scene(staleness)
        scene.let_go(*range(1, 20))  # whatever may be begun is done at once
        scene.buffer.begin_at(1)
        for step in range(1, 8):
            for _ in range(5):
                await asyncio.sleep(0)
            assert scene.begun == list(range(1, step + staleness + 1))  # and no further, however long the step takes
            assert (await scene.buffer.take(step, Stopwatch())).groups[0].id == f"{step}/0"
            scene.buffer.published(step)
        await scene.buffer.close()

    run_async(check())


def test_there_are_no_batches_beyond_the_last_step() -> None:
    async def check() -> None:
        scene = Scene(staleness=3, last=2)
        scene.let_go(1, 2)
        scene.buffer.begin_at(1)
        for step in (1, 2):
            await scene.buffer.take(step, Stopwatch())
            scene.buffer.published(step)
        assert scene.begun == [1, 2]
        await scene.buffer.close()

    run_async(check())


def test_batches_come_in_the_order_of_their_steps_whichever_is_done_first() -> None:
    async def check() -> None:
        scene = Scene(staleness=2)
        scene.buffer.begin_at(1)
        scene.let_go(3, 2)
        asyncio.get_running_loop().call_later(0.1, scene.let_go, 1)
        watch = Stopwatch()
        assert [(await scene.buffer.take(step, watch)).groups[0].id for step in (1, 2, 3)] == ["1/0", "2/0", "3/0"]
        assert watch.seconds["waiting"] > 0
        await scene.buffer.close()

    run_async(check())


def test_what_goes_wrong_with_a_batch_is_raised_where_it_is_taken() -> None:
    async def make(step: int, watch: Stopwatch) -> StepBatch:
        if step == 2:
            raise RewardError("the grader is on strike")
        return batch_of(step)

    async def check() -> None:
        buffer = GroupBuffer(make, staleness=2, last=9)
        buffer.begin_at(1)
        assert (await buffer.take(1, Stopwatch())).groups[0].id == "1/0"
        with pytest.raises(RewardError, match="on strike"):
            await buffer.take(2, Stopwatch())
        await buffer.close()

    run_async(check())


def test_closing_cancels_what_is_under_way() -> None:
    async def check() -> None:
        scene = Scene(staleness=2)
        scene.buffer.begin_at(1)
        await asyncio.sleep(0)
        await scene.buffer.close()
        assert scene.cancelled == [1, 2, 3]
        scene.buffer.published(7)
        await asyncio.sleep(0)
        assert scene.begun == [1, 2, 3]

    run_async(check())


# The lease


def test_the_lease_goes_to_the_lowest_priority() -> None:
    async def check() -> None:
        lock, order = PriorityLock(), []

        async def take(priority: int) -> None:
            async with lock.held(priority):
                order.append(priority)
                await asyncio.sleep(0)

        async with lock.held(1):
            tasks = [asyncio.create_task(take(priority)) for priority in (7, 5, FIRST, 6)]
            await asyncio.sleep(0)
            assert order == []
        await asyncio.gather(*tasks)
        assert order == [FIRST, 5, 6, 7]

    run_async(check())


def test_who_is_cancelled_while_it_waits_does_not_keep_the_lease() -> None:
    async def check() -> None:
        lock, order = PriorityLock(), []

        async def take(priority: int) -> None:
            async with lock.held(priority):
                order.append(priority)

        async with lock.held(0):
            waiting = [asyncio.create_task(take(priority)) for priority in (1, 2, 3)]
            await asyncio.sleep(0)
            waiting[0].cancel()
        waiting[1].cancel()  # it has been granted the lease and does not know yet
        await asyncio.gather(*waiting, return_exceptions=True)
        assert order == [3]
        async with lock.held(0):
            pass

    run_async(check())


def test_learners_get_the_devices_only_when_reward_models_sleep_again(make_config: MakeConfig) -> None:
    events: list[str] = []

    class SleepingReward(ScriptedReward):
        models_sleep = True

        @asynccontextmanager
        async def round(self) -> AsyncIterator[ScriptedReward]:
            yield self
            await asyncio.sleep(0)
            events.append("models sleep")

        async def result(self) -> GradingReport:
            self.learner = asyncio.create_task(self.learn())
            for _ in range(3):
                await asyncio.sleep(0)
            return await super().result()

        async def learn(self) -> None:
            async with lease.learning(Stopwatch()):
                events.append("learn")

    async def check() -> None:
        pipeline = Pipeline(config, prompts(), ScriptedRollout(), reward, lease)  # type: ignore[arg-type]
        await pipeline.batch(1, Stopwatch())
        await reward.learner

    config = make_config()
    reward, lease = SleepingReward(lambda prompt, number: 1.0), DeviceLease(config, models_sleep=True)
    run_async(check())
    assert events == ["models sleep", "learn"]


@pytest.mark.parametrize(("placement", "waits"), [("hybrid", True), ("colocated", True), ("standalone", False)])
def test_rollout_waits_for_the_learners_where_it_shares_their_devices(
    make_config: MakeConfig, placement: str, waits: bool
) -> None:
    async def check() -> None:
        lease = DeviceLease(make_config(f"rollout.placement={placement}"), models_sleep=False)
        began = asyncio.Event()

        async def generate() -> None:
            async with lease.generating(1, Stopwatch()):
                began.set()

        async with lease.learning(Stopwatch()):
            task = asyncio.create_task(generate())
            for _ in range(5):
                await asyncio.sleep(0)
            assert began.is_set() != waits
        await task

    run_async(check())


# Whole runs, in this process


AHEAD = ("trainer.staleness=1", "algorithm.correction.kind=truncated")


def run(config: Config) -> list[StepReport]:
    reports = list(Trainer(config).steps())
    return reports


@pytest.mark.parametrize("placement", ["hybrid", "colocated", "standalone"])
@pytest.mark.parametrize("staleness", [1, 3])
def test_no_token_is_older_than_it_may_be(make_config: MakeConfig, placement: str, staleness: int) -> None:
    config = make_config(
        f"trainer.staleness={staleness}", "algorithm.correction.kind=truncated", "trainer.steps=6",
        f"rollout.placement={placement}", "data.validation=null",
    )  # fmt: skip
    reports = run(config)
    oldest = [report.metrics["staleness/max"] for report in reports]
    assert oldest[0] == 0 and 1 <= max(oldest) <= staleness
    assert all(age <= number for number, age in enumerate(oldest))
    for report in reports:
        metrics = report.metrics
        shares = [value for name, value in metrics.items() if name.startswith("staleness/share_")]
        assert sum(shares) == pytest.approx(1)
        ages = [int(name.rpartition("_")[2]) for name in metrics if name.startswith("staleness/kl_")]
        kl = sum(metrics[f"staleness/share_{age}"] * metrics[f"staleness/kl_{age}"] for age in ages)
        assert kl == pytest.approx(metrics["rollout/kl"], abs=1e-9)
        assert metrics.get("staleness/kl_0", 0.0) < 1e-5
        assert metrics["time/ahead/ready"] <= staleness + 1
    assert reports[-1].metrics[f"staleness/kl_{int(oldest[-1])}"] > 0  # it has learnt since


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["hybrid", "standalone"])
def test_the_same_in_processes_of_their_own(make_config: MakeConfig, ray_session: None, placement: str) -> None:
    config = make_config(*AHEAD, "controller.backend=ray", f"rollout.placement={placement}", "trainer.steps=4")
    reports = run(config)
    assert [report.number for report in reports] == [1, 2, 3, 4]
    assert all(report.metrics["staleness/max"] <= 1 for report in reports)
    assert any("staleness/kl_1" in report.metrics for report in reports)
    assert all(report.metrics.get("staleness/kl_0", 0.0) < 1e-5 for report in reports)


def test_learning_goes_on_with_answers_of_older_weights(make_config: MakeConfig) -> None:
    sizes = ("trainer.steps=25", "data.prompts_per_step=8", "rollout.answers_per_prompt=8", "data.validation=null")
    rewards = [report.reward for report in run(make_config(*AHEAD, *sizes))]
    assert sum(rewards[-5:]) / 5 > 1.3 * sum(rewards[:5]) / 5


@pytest.mark.parametrize(
    ("placement", "overrides"),
    [
        ("hybrid", ("actor.router_replay.mode=R3", "actor.mini_batches=2")),
        ("standalone", ("actor.router_replay.mode=R3", "actor.router_replay.compare_every=1")),
        ("standalone", ("actor.router_replay.mode=R2", "actor.mini_batches=2")),
        ("standalone", ("algorithm.resampling_rounds=2", "reward.function=tests/rewards.py:odd_prompts_are_all_right")),
        ("hybrid", ("algorithm.advantage=remax", "rollout.answers_per_prompt=1", "data.prompts_per_step=8")),
        ("hybrid", ("algorithm.advantage=gae", "critic.lr=1e-3", "actor.epochs=2", "algorithm.kl.coefficient=0.1")),
        ("standalone", ("actor.lora.rank=2", "actor.lora.targets=[q_proj, v_proj]", "algorithm.kl.coefficient=0.1")),
        (
            "standalone",
            (f"rollout.agent.environment={talks.__file__}:Once", "rollout.agent.max_turns=2",
             "rollout.max_new_tokens=20"),
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else given[0].partition("=")[0],
)  # fmt: skip
def test_whatever_else_a_step_does_it_does_ahead_too(
    make_config: MakeConfig, placement: str, overrides: tuple[str, ...]
) -> None:
    config = make_config(*AHEAD, f"rollout.placement={placement}", "trainer.steps=3", "validation.every=2", *overrides)
    reports = run(config)
    assert [report.number for report in reports] == [1, 2, 3]
    assert [report.accuracy is not None for report in reports] == [False, True, True]
    for report in reports:
        assert report.metrics["actor/grad_norm"] > 0 and report.metrics["staleness/max"] <= 1
        assert ("agent/turns" in report.metrics) == config.rollout.agent.is_set


def test_a_reward_model_that_sleeps_takes_its_turn(make_config: MakeConfig, classifier_folder: Path) -> None:
    given = ("reward.grader=classifier", "reward.function=null", f"reward.model.path={classifier_folder}")
    for report in run(make_config(*AHEAD, *given, "trainer.steps=3")):
        assert report.metrics["reward/failed_share"] == 0 and report.metrics["staleness/max"] <= 1


def test_partial_answers_go_on_under_new_weights_in_the_midst_of_a_batch(make_config: MakeConfig) -> None:
    config = make_config(
        *AHEAD, "rollout.placement=standalone", "rollout.partial=true", "data.validation=null", "trainer.steps=20",
        "rollout.max_batch=1", "rollout.max_new_tokens=44", "actor.micro_batch_tokens=600",
        "rollout.answers_per_prompt=2",
    )  # fmt: skip
    steps = Trainer(config).steps()  # a batch takes far longer to be written than to be learnt from
    mixed = next(
        report.metrics for report in steps if "staleness/kl_0" in report.metrics and "staleness/kl_1" in report.metrics
    )
    steps.close()  # type: ignore[attr-defined]
    assert mixed["staleness/share_0"] + mixed["staleness/share_1"] == pytest.approx(1)
    assert mixed["staleness/kl_0"] < 1e-5 < mixed["staleness/kl_1"]


@pytest.mark.parametrize("more", [(), ("algorithm.resampling_rounds=2",)], ids=["as they come", "renewed"])
def test_a_run_that_was_left_and_resumed_loses_and_repeats_no_prompt(
    make_config: MakeConfig, more: tuple[str, ...]
) -> None:
    given = (
        "trainer.staleness=2", "algorithm.correction.kind=truncated", "trainer.steps=8", "trainer.checkpoint_every=1",
        "trainer.log_answers_every=1", "data.validation=null",
        "reward.function=tests/rewards.py:odd_prompts_are_all_right", *more,
    )  # fmt: skip
    config = make_config(*given, "resume=auto")
    for stop in (2, 5, 8):
        steps = Trainer(config, notify=lambda text: None).steps()
        for report in steps:
            if report.number == stop:
                steps.close()  # type: ignore[attr-defined]
    files = sorted((Path(config.trainer.run_dir) / "answers").iterdir())
    shown = [line for file in files for line in file.read_text().splitlines() if line.startswith("---")]
    learnt = shown[::2]  # two answers to each prompt
    assert len(files) == 8 and len(learnt) == len(set(learnt)) == 32
    if not more:
        whole = make_config(*given, f"trainer.run_dir={config.trainer.run_dir}-whole")
        run(whole)
        files = sorted((Path(whole.trainer.run_dir) / "answers").iterdir())
        assert shown[::2] == [line for f in files for line in f.read_text().splitlines() if line.startswith("---")][::2]


def test_a_failing_reward_is_raised_in_the_loop(make_config: MakeConfig) -> None:
    config = make_config(*AHEAD, "reward.function=tests/rewards.py:always_raises", "data.validation=null")
    with pytest.raises(RewardError, match=r"(\d+) of 16 samples could not be graded \(\1 invalid\).*on strike"):
        list(Trainer(config).steps())


def test_leaving_the_loop_early_ends_what_runs_ahead_even_in_the_middle(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    reward = tmp_path / "slow.py"
    mark = tmp_path / "now-slow"
    reward.write_text(
        "import asyncio, pathlib\n"
        "async def grade(sample):\n"
        f"    if pathlib.Path({str(mark)!r}).exists():\n"
        "        await asyncio.sleep(600)\n"
        "    return float(len(sample.text) % 2)\n"
    )
    config = make_config(
        *AHEAD, f"reward.function={reward}:grade", "reward.timeout_s=900", "trainer.steps=50", "data.validation=null"
    )
    steps = Trainer(config).steps()
    next(steps)
    mark.touch()
    next(steps)
    start = time.monotonic()
    steps.close()  # type: ignore[attr-defined]
    assert time.monotonic() - start < 60


def test_without_staleness_nothing_is_told_of_ages_and_nobody_waits(make_config: MakeConfig) -> None:
    config = make_config("algorithm.correction.kind=truncated")
    run(config)
    for row in read_metrics(Path(config.trainer.run_dir)):
        assert not [name for name in row if name.startswith(("staleness/", "time/ahead", "time/lease", "time/waiting"))]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), r"trainer\.staleness=1 .*algorithm\.correction\.kind=none .*truncated or masked"),
        (
            ("actor.router_replay.mode=R2", "actor.router_replay.replay_file=x.rec", AHEAD[1]),
            r"trainer\.staleness=1 .*actor\.router_replay\.replay_file",
        ),
    ],
)
def test_what_does_not_go_together_with_staleness_is_refused_at_load(
    make_config: MakeConfig, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(AHEAD[0], *overrides)
