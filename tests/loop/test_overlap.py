"""Batches made ahead: who may begin when, who writes when, and how it all ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from practicum import Config, Trainer
from practicum.errors import ConfigError, RewardError, RolloutError
from practicum.loop.metrics import StepReport, Stopwatch
from practicum.loop.overlap import FIRST, Buffer, Turn
from practicum.loop.run_folder import read_metrics
from tests.rollout import talks

MakeConfig = Callable[..., Config]
WAIT_S = 20.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.002)


def batch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("practicum-batch")]


class Scene:
    """Batches are made when they are let go."""

    def __init__(self, staleness: int, last: int = 100) -> None:
        self.begun: list[int] = []
        self.free: dict[int, threading.Event] = {}
        self.is_broken_off = False
        self.buffer: Buffer[str] = Buffer(self.begin, staleness=staleness, last=last, break_off=self.break_off)

    def begin(self, number: int) -> Callable[[Stopwatch], str]:
        self.begun.append(number)
        free = self.free.setdefault(number, threading.Event())

        def make(watch: Stopwatch) -> str:
            assert free.wait(WAIT_S)
            if self.is_broken_off:
                raise RolloutError("broken off")
            return f"batch {number}"

        return make

    def let_go(self, *numbers: int) -> None:
        for number in numbers:
            self.free.setdefault(number, threading.Event()).set()

    def break_off(self) -> None:
        self.is_broken_off = True
        self.let_go(*self.begun)


def test_without_staleness_a_batch_is_made_when_it_is_taken_in_this_thread() -> None:
    scene = Scene(staleness=0)
    scene.let_go(5)
    scene.buffer.begin_at(5)
    assert scene.begun == []
    assert scene.buffer.take(5, Stopwatch()) == "batch 5"
    scene.buffer.published(5)
    assert scene.begun == [5] and not batch_threads()


@pytest.mark.parametrize("staleness", [1, 3])
def test_no_batch_is_begun_before_its_weights_are_young_enough(staleness: int) -> None:
    scene = Scene(staleness)
    scene.let_go(*range(1, 20))  # whatever may be begun is done at once
    scene.buffer.begin_at(1)
    for step in range(1, 8):
        assert scene.begun == list(range(1, step + staleness + 1))  # and no further, however long the step takes
        assert scene.buffer.take(step, Stopwatch()) == f"batch {step}"
        scene.buffer.published(step)
    scene.buffer.close()


def test_there_are_no_batches_beyond_the_last_step() -> None:
    scene = Scene(staleness=3, last=2)
    scene.let_go(1, 2)
    scene.buffer.begin_at(1)
    for step in (1, 2):
        scene.buffer.take(step, Stopwatch())
        scene.buffer.published(step)
    assert scene.begun == [1, 2]
    scene.buffer.close()


def test_batches_come_in_the_order_of_their_steps_whichever_is_done_first() -> None:
    scene = Scene(staleness=2)
    scene.buffer.begin_at(1)
    scene.let_go(3, 2)
    timer = threading.Timer(0.1, scene.let_go, [1])
    timer.start()
    watch = Stopwatch()
    assert [scene.buffer.take(number, watch) for number in (1, 2, 3)] == ["batch 1", "batch 2", "batch 3"]
    assert watch.seconds["waiting"] > 0
    scene.buffer.close()


def test_what_goes_wrong_with_a_batch_is_raised_where_it_is_taken() -> None:
    def begin(number: int) -> Callable[[Stopwatch], int]:
        def make(watch: Stopwatch) -> int:
            if number == 2:
                raise RewardError("the grader is on strike")
            return number

        return make

    buffer = Buffer(begin, staleness=2, last=9)
    buffer.begin_at(1)
    assert buffer.take(1, Stopwatch()) == 1
    with pytest.raises(RewardError, match="on strike"):
        buffer.take(2, Stopwatch())
    buffer.close()
    assert not batch_threads()


def test_closing_breaks_off_what_is_under_way_and_leaves_no_thread() -> None:
    scene = Scene(staleness=2)
    scene.buffer.begin_at(1)
    assert len(batch_threads()) == 3
    scene.buffer.close()
    assert scene.is_broken_off and not batch_threads()
    scene.buffer.published(7)
    assert scene.begun == [1, 2, 3]


def test_the_turn_goes_to_whoever_has_the_lowest_rank() -> None:
    turn, order = Turn(), []
    with turn.held(1):
        waiting = []
        for rank in (7, 5, FIRST, 6):

            def take(rank: int = rank) -> None:
                with turn.held(rank):
                    order.append(rank)

            waiting.append(threading.Thread(target=take))
            waiting[-1].start()
        wait_until(lambda: len(turn._waiting) == 4, "all wait")
        assert order == []
    for thread in waiting:
        thread.join(WAIT_S)
    assert order == [FIRST, 5, 6, 7]


def test_a_turn_that_is_over_is_nobodys() -> None:
    turn, errors = Turn(), []

    def take() -> None:
        try:
            with turn.held(1):
                pass
        except RolloutError as error:
            errors.append(error)

    with turn.held(0):
        thread = threading.Thread(target=take)
        thread.start()
        wait_until(lambda: bool(turn._waiting), "it waits")
        turn.end()
        thread.join(WAIT_S)
    assert len(errors) == 1


# Whole runs, in this process


AHEAD = ("trainer.staleness=1", "algorithm.correction.kind=truncated")


def run(config: Config) -> list[StepReport]:
    reports = list(Trainer(config).steps())
    assert not batch_threads()
    return reports


@pytest.mark.parametrize("placement", ["hybrid", "colocated", "standalone"])
@pytest.mark.parametrize("staleness", [1, 3])
def test_no_token_is_older_than_it_may_be(make_config: MakeConfig, placement: str, staleness: int) -> None:
    config = make_config(
        f"trainer.staleness={staleness}", "algorithm.correction.kind=truncated", "trainer.steps=6",
        f"rollout.placement={placement}", "data.validation=null",
    )  # fmt: skip
    reports = run(config)
    oldest = [report.metrics["age/max"] for report in reports]
    assert oldest[0] == 0 and 1 <= max(oldest) <= staleness
    assert all(age <= number for number, age in enumerate(oldest))
    for report in reports:
        metrics = report.metrics
        shares = [value for name, value in metrics.items() if name.startswith("age/share_")]
        assert sum(shares) == pytest.approx(1)
        ages = [int(name.rpartition("_")[2]) for name in metrics if name.startswith("age/kl_")]
        kl = sum(metrics[f"age/share_{age}"] * metrics[f"age/kl_{age}"] for age in ages)
        assert kl == pytest.approx(metrics["rollout/kl"], abs=1e-9)
        assert metrics.get("age/kl_0", 0.0) < 1e-5
        assert metrics["time/ahead/ready"] <= staleness + 1
    assert reports[-1].metrics[f"age/kl_{int(oldest[-1])}"] > 0  # it has learnt since


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["hybrid", "standalone"])
def test_the_same_in_processes_of_their_own(make_config: MakeConfig, ray_session: None, placement: str) -> None:
    config = make_config(*AHEAD, "controller.backend=ray", f"rollout.placement={placement}", "trainer.steps=4")
    reports = run(config)
    assert [report.number for report in reports] == [1, 2, 3, 4]
    assert all(report.metrics["age/max"] <= 1 for report in reports)
    assert any("age/kl_1" in report.metrics for report in reports)
    assert all(report.metrics.get("age/kl_0", 0.0) < 1e-5 for report in reports)


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
        assert report.metrics["actor/grad_norm"] > 0 and report.metrics["age/max"] <= 1
        assert ("agent/turns" in report.metrics) == config.rollout.agent.is_set


def test_a_reward_model_that_sleeps_takes_its_turn(make_config: MakeConfig, classifier_folder: Path) -> None:
    given = ("reward.grader=classifier", "reward.function=null", f"reward.model.path={classifier_folder}")
    for report in run(make_config(*AHEAD, *given, "trainer.steps=3")):
        assert report.metrics["reward/failed_share"] == 0 and report.metrics["age/max"] <= 1


def test_partial_answers_go_on_under_new_weights_in_the_midst_of_a_batch(make_config: MakeConfig) -> None:
    config = make_config(
        *AHEAD, "rollout.placement=standalone", "rollout.partial=true", "data.validation=null", "trainer.steps=20",
        "rollout.max_batch=1", "rollout.max_new_tokens=44", "actor.micro_batch_tokens=600",
        "rollout.answers_per_prompt=2",
    )  # fmt: skip
    steps = Trainer(config).steps()  # a batch takes far longer to be written than to be learnt from
    mixed = next(report.metrics for report in steps if "age/kl_0" in report.metrics and "age/kl_1" in report.metrics)
    steps.close()  # type: ignore[attr-defined]
    assert mixed["age/share_0"] + mixed["age/share_1"] == pytest.approx(1)
    assert mixed["age/kl_0"] < 1e-5 < mixed["age/kl_1"]


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
        assert not batch_threads()
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
    with pytest.raises(RewardError, match=r"2 of 16 samples could not be graded \(2 invalid\).*on strike"):
        list(Trainer(config).steps())
    assert not batch_threads()


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
    assert not batch_threads() and time.monotonic() - start < WAIT_S


def test_without_staleness_nothing_is_told_of_ages_and_nobody_waits(make_config: MakeConfig) -> None:
    config = make_config("algorithm.correction.kind=truncated")
    run(config)
    for row in read_metrics(Path(config.trainer.run_dir)):
        assert not [name for name in row if name.startswith(("age/", "time/ahead", "time/turn", "time/waiting"))]


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
