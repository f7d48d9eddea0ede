"""The reward centre as the config describes it, in this process and on Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from practicum.config import RewardConfig
from practicum.controller import Controller, open_controller
from practicum.controller.host import free_port
from practicum.controller.loop import run_sync
from practicum.errors import RewardError, WorkerError
from practicum.reward import check_reward, open_reward_centre
from practicum.reward.manager import RewardLoopManager
from practicum.reward.report import GradingReport, Progress
from practicum.types import PromptGroup, Score
from tests.models import save_classifier
from tests.reward.builders import function, groups_for, groups_of, samples_of, scores_of
from tests.reward.fakes import DEADLINE_S, FakeService, hang, saying
from tests.rewards import most_at_a_time
from tests.rollout.server.client import ask

WAIT_S = 20.0


@pytest.fixture(scope="module")
def here() -> Iterator[Controller]:
    with open_controller("local", num_workers=1, use_gpu=False, max_colocate_count=3) as controller:
        yield controller


@pytest.fixture(scope="module")
def on_ray(ray_session: None) -> Iterator[Controller]:
    with open_controller("ray", num_workers=2, use_gpu=False, max_colocate_count=3) as controller:
        yield controller


def config(**keys: Any) -> RewardConfig:
    return RewardConfig.model_validate({"max_failure_share": 0.99, **keys})


def with_centre(
    controller: Controller, test: Callable[[RewardLoopManager], Awaitable[None]], reward: RewardConfig, **options: Any
) -> None:
    async def within() -> None:
        async with asyncio.timeout(DEADLINE_S), open_reward_centre(reward, controller, **options) as manager:
            await test(manager)

    run_sync(within())  # on the driver's loop, on which a group in this process is closed


def graded(
    controller: Controller, groups: Sequence[PromptGroup], reward: RewardConfig, **options: Any
) -> GradingReport:
    reports: list[GradingReport] = []

    async def test(manager: RewardLoopManager) -> None:
        reports.append(await manager.grade(groups))

    with_centre(controller, test, reward, **options)
    return reports[0]


def scores(controller: Controller, samples: Any, **keys: Any) -> list[Score]:
    groups = groups_of(samples)
    graded(controller, groups, config(**keys))
    return scores_of(groups)


def values(made: list[Score]) -> list[float | None]:
    return [score.value for score in made]


def test_rules_functions_and_endpoints_give_the_same_scores_here_and_on_ray(
    here: Controller, on_ray: Controller
) -> None:
    samples = [*samples_of("4", "5", truth="4"), *samples_of("1", "22", source="long"), *samples_of("x", source="far")]
    with FakeService({"score": 0.25, "parts": {"style": 1}}) as one, FakeService(0.25) as two:
        keys: dict[str, Any] = {
            "grader": "exact",
            "sources": {
                "long": [{"function": function("length")}, {"function": function("patient"), "weight": 0.1}],
                "far": [{"grader": "endpoint", "options": {"urls": [one.url + "/score", two.url + "/score"]}}],
            },
        }
        local, ray = scores(here, samples, **keys), scores(on_ray, samples, **keys)
    assert values(local) == values(ray) == pytest.approx([1.0, 0.0, 1.1, 4.2, 0.25])
    assert len(one.asked) + len(two.asked) == 2


def test_limits_hold_over_all_workers_together(on_ray: Controller, tmp_path: Path) -> None:
    file = tmp_path / "overlap"
    keys: dict[str, Any] = {
        "function": function("records_overlap_async"),
        "sources": {"sync": [{"function": function("records_overlap")}]},
        "limits": {"concurrency": 3},
        "processes": 8,
    }
    groups = [
        *groups_for(*"a" * 60, file=str(file)),
        *groups_for(*"b" * 20, source="sync", file=str(file)),
    ]
    report = graded(on_ray, groups, config(**keys))
    assert values(scores_of(groups)) == [1.0] * 80
    assert most_at_a_time(file) == 3
    assert report.longest_wait_s > 0


def test_requests_per_minute_are_shared_by_the_workers(on_ray: Controller, tmp_path: Path) -> None:
    file = tmp_path / "calls"
    keys = {"function": function("counts_calls"), "limits": {"requests_per_minute": 5}}

    async def test(manager: RewardLoopManager) -> None:
        async with manager.round() as grading:
            grading.add(groups_for(*"a" * 20, file=str(file)))
            deadline = time.monotonic() + WAIT_S
            while not file.exists() or len(file.read_text().split()) < 5:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)

    with_centre(on_ray, test, config(**keys))
    assert len(file.read_text().split()) == 5  # with the round left, the others never begin


def test_there_are_as_many_processes_as_the_config_says(here: Controller, tmp_path: Path) -> None:
    file = tmp_path / "overlap"
    samples = samples_of(*"a" * 24, file=str(file))
    assert values(scores(here, samples, function=function("records_overlap"), processes=3)) == [1.0] * 24
    assert most_at_a_time(file) == 3


def test_memory_timeouts_and_retries_are_those_of_the_config(here: Controller, tmp_path: Path) -> None:
    (hungry, fine) = scores(here, samples_of("allocate", "fine"), function=function("misbehaves"), memory_mb=64)
    assert (hungry.status, fine.value) == ("invalid", 1.0) and "MemoryError" in hungry.reason
    keys: dict[str, Any] = {"function": function("hangs_on_one"), "timeout_s": 0.3}
    assert [score.status for score in scores(here, samples_of("0", "1"), **keys)] == ["ok", "timeout"]
    again = samples_of("x", file=str(tmp_path / "late"))
    keys = {"function": function("hangs_the_first_time"), "timeout_s": 0.7, "retries": 1, "max_failure_share": 0.0}
    assert values(scores(here, again, **keys)) == [1.0]


def test_kept_scores_are_counted(here: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    samples = samples_of("a", "bb", file=str(tmp_path / "calls"))
    keys = {"function": function("counts_calls"), "cache": {"folder": "scores"}}
    hits = []
    for version in ("", "", "2"):
        keys["cache"] = {"folder": "scores", "version": version}
        groups = groups_of(samples)
        hits.append(graded(here, groups, config(**keys)).num_cache_hits)
        assert values(scores_of(groups)) == [1.0, 2.0]
    assert hits == [0, 2, 0]
    assert (tmp_path / "scores").is_dir()


def test_a_server_that_is_down_is_made_up_for_by_another(here: Controller) -> None:
    with FakeService(0.5) as service:
        urls = [f"http://127.0.0.1:{free_port()}/score", f"{service.url}/score"]
        made = scores(here, samples_of(*"a" * 20), grader="endpoint", options={"urls": urls})
    assert values(made) == [0.5] * 20


@pytest.mark.parametrize(
    ("reply", "status"), [(saying(400, "what?"), "invalid"), (saying(500, "down"), "infra_error"), (hang, "timeout")]
)
def test_what_a_service_does_wrong_is_a_status(here: Controller, reply: Any, status: str) -> None:
    with FakeService(reply) as service:
        keys = {"grader": "endpoint", "options": {"urls": service.url}, "timeout_s": 1.0}
        exact = {"sources": {"rule": [{"grader": "exact"}]}}
        samples = [*samples_of("a"), *samples_of("4", truth="4", source="rule")]
        far, rule = scores(here, samples, **keys, **exact)
    assert (far.status, far.value, rule.value) == (status, None, 1.0)
    assert far.reason


def test_progress_reaches_the_caller(here: Controller) -> None:
    told: list[Progress] = []
    keys = config(function=function("naps"), processes=2)
    graded(here, groups_for(*["0.3"] * 20), keys, on_progress=told.append)
    assert told and told[0].num_samples == 20


def test_nothing_is_left_of_a_centre(here: Controller) -> None:
    before = set(psutil.Process().children(recursive=True))
    with FakeService(1.0) as service:
        terms = [{"function": function("length")}, {"grader": "endpoint", "options": {"urls": service.url}}]
        started: set[psutil.Process] = set()

        async def test(manager: RewardLoopManager) -> None:
            await manager.grade(groups_for("a", "b"))
            started.update(set(psutil.Process().children(recursive=True)) - before)

        with_centre(here, test, config(terms=terms, limits={"concurrency": 2}))
    assert len(started) >= 3  # a router, a fork server and its process
    assert not psutil.wait_procs(started, timeout=10)[1]


def test_a_key_that_workers_do_not_have_is_named(here: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    options = {"urls": "http://127.0.0.1:1", "api_key_env": "NO_SUCH_KEY"}
    with pytest.raises(WorkerError, match="NO_SUCH_KEY"):
        graded(here, [], config(grader="endpoint", options=options))


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"grader": "exakt"}, "there is no grader 'exakt'; did you mean 'exact'?.*the graders are: exact"),
        ({"function": "nowhere.py:grade"}, "nowhere.py does not exist"),
        ({"grader": "classifier"}, "asks a model"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(keys: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RewardError, match=complaint):
        check_reward(config(**keys))


def test_a_colocated_model_is_awake_for_its_own_samples_and_asleep_after_a_failure(
    here: Controller, tmp_path: Path
) -> None:
    model = save_classifier(tmp_path / "rm")
    told: list[str] = []
    keys: dict[str, Any] = {
        "sources": {"chat": [{"grader": "classifier"}], "sums": [{"grader": "exact"}]},
        "terms": [{"grader": "classifier"}, {"function": function("always_raises")}],
        "model": {"path": str(model)},
    }

    async def test(manager: RewardLoopManager) -> None:
        models = manager.models
        assert models is not None and models.sleeps

        async def health() -> str:
            (worker,) = models.router.workers()
            return str((await asyncio.to_thread(ask, worker["url"], "/health", method="GET"))[1]["status"])

        assert await health() == "asleep"
        groups = [*groups_for("1", truth="1", source="sums"), *groups_for("1+2=3", source="chat")]
        async with manager.round() as grading:
            grading.add(groups)  # the first needs no model, and does not wait for one
            while groups[0].trajectories[0].score is None:
                await asyncio.sleep(0.01)
            assert await health() == "asleep"
            await grading.result()
            told.append(await health())
        sums, chat = scores_of(groups)
        assert sums == Score(1.0) and chat.status == "ok"
        assert told == ["awake"] and await health() == "asleep"
        with pytest.raises(RewardError, match="the grader is on strike"):
            await manager.grade(groups_for("1", "2"))
        assert await health() == "asleep"

    with_centre(here, test, RewardConfig.model_validate(keys))
