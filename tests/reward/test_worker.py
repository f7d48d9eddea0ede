from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from practicum import Sample
from practicum.controller.host import free_port
from practicum.errors import RewardError
from practicum.reward.executors import Graded
from practicum.reward.graders.base import Rule
from practicum.reward.graders.remote import OWN_MODEL
from practicum.reward.rubric import Rubric, Term
from practicum.reward.worker import RewardLoopWorker, RewardSettings
from practicum.types import Score
from tests.reward.builders import function, graded_by, graded_by_worker, reward_settings, samples_of, target
from tests.reward.fakes import FakeService, hang, run


@asynccontextmanager
async def open_worker(config: dict[str, Any], **settings: Any) -> AsyncIterator[RewardLoopWorker]:
    worker = RewardLoopWorker(reward_settings(config, **settings))
    try:
        yield worker
    finally:
        await worker.close()


def run_with(config: dict[str, Any], test: Callable[[RewardLoopWorker], Awaitable[None]], **settings: Any) -> None:
    async def within() -> None:
        async with open_worker(config, **settings) as worker:
            await test(worker)

    run(within)


def values(graded: list[Graded]) -> list[float | None]:
    return [one.score.value for one in graded]


def test_rules_are_graded_at_once_and_without_processes() -> None:
    async def test(worker: RewardLoopWorker) -> None:
        before = psutil.Process().children()
        assert values(await graded_by(worker, samples_of("4", "5", truth="4"))) == [1.0, 0.0]
        assert psutil.Process().children() == before

    run_with({"grader": "exact"}, test)


@pytest.mark.parametrize("config", [{"function": function("naps")}, {"grader": "exact"}])
def test_no_samples_are_no_scores(config: dict[str, Any]) -> None:
    assert graded_by_worker(config, []) == []


def test_scores_come_as_they_are_finished() -> None:
    async def test(worker: RewardLoopWorker) -> None:
        reports = []
        async with aclosing(worker.grade(samples_of("60", *["0"] * 20))) as stream:
            async for finished in stream:
                reports.append(dict(finished))
                if sum(map(len, reports)) == 20:
                    break
        assert all(0 not in report for report in reports)

    run_with({"function": function("naps")}, test)


def test_a_worker_that_is_busy_says_so() -> None:
    async def test(worker: RewardLoopWorker) -> None:
        async with aclosing(worker.grade(samples_of("60"))) as stream:
            assert [await anext(stream) for _ in range(2)] == [[], []]

    run_with({"function": function("naps")}, test)


def test_what_is_left_of_a_closed_stream_stops_at_once_and_other_streams_go_on() -> None:
    async def test(worker: RewardLoopWorker) -> None:
        other = asyncio.create_task(graded_by(worker, samples_of("0.2", "0.3")))
        async with aclosing(worker.grade(samples_of(*["60"] * 700))) as stream:  # many of them have not begun
            await anext(stream)
        assert values(await other) == [1.0, 1.0]
        assert values(await graded_by(worker, samples_of("0"))) == [1.0]

    run_with({"function": function("naps")}, test)


def test_far_more_samples_than_are_under_way_at_a_time_are_all_graded() -> None:
    assert values(graded_by_worker({"function": function("naps")}, samples_of(*["0"] * 700))) == [1.0] * 700


def test_a_function_of_a_list_sees_many_at_once() -> None:
    assert values(graded_by_worker({"function": function("how_many_at_once")}, samples_of(*"x" * 20))) == [20.0] * 20


def test_terms_of_every_kind_are_graded_side_by_side() -> None:
    with FakeService({"data": [{"probs": [0.5]}]}) as service:
        config = {
            "terms": [
                {"grader": "exact"},
                {"function": function("length"), "weight": 0.1},
                {"function": function("patient")},
                {"grader": "math", "weight": 2.0},
                {"grader": "classifier", "name": "rm"},
                {"function": function("how_many_at_once"), "weight": 10.0, "name": "bulk"},
            ],
            "model": {"path": "m"},
        }
        samples = samples_of("4", "5", truth="4")
        one, two = graded_by_worker(config, samples, targets={OWN_MODEL: target(service.url)})
    assert one.score.value == pytest.approx(1 + 0.1 + 4 + 2 + 0.5 + 20)
    assert one.score.parts == {
        "exact": 1,
        "length": 1,
        "patient": 4,
        "math": 1,
        "math/found": 1,
        "rm": 0.5,
        "bulk": 2,
    }
    assert two.score.value == pytest.approx(0 + 0.1 + 5 + 0 + 0.5 + 20)


def test_the_data_source_chooses_the_graders() -> None:
    config = {"grader": "exact", "sources": {"long": [{"function": function("length")}]}}
    samples = [*samples_of("abc", truth="abc"), *samples_of("abc", source="long")]
    assert values(graded_by_worker(config, samples)) == [1.0, 3.0]


def test_a_source_without_a_grader_is_invalid() -> None:
    config = {"sources": {"long": [{"function": function("length")}]}}
    (one,) = graded_by_worker(config, samples_of("abc"))
    assert (one.score.status, one.score.value) == ("invalid", None)


def test_one_term_that_fails_names_itself() -> None:
    config = {"terms": [{"grader": "exact"}, {"function": function("hangs_on_one")}]}
    good, bad = graded_by_worker(config, samples_of("4", "1", truth="4"), timeout_s=0.3)
    assert good.score == Score(2.0, parts={"exact": 1.0, "hangs_on_one": 1.0})
    assert bad.score.status == "timeout" and bad.score.reason.startswith("hangs_on_one: took longer")


def test_cached_scores_are_counted_and_everything_else_is_a_miss(tmp_path: Path) -> None:
    file = tmp_path / "calls"
    config: dict[str, Any] = {"function": function("counts_calls")}
    samples = samples_of("a", "bb", file=str(file))

    def hits(**settings: Any) -> int:
        graded = graded_by_worker(config, samples, cache_folder=str(tmp_path / "cache"), **settings)
        assert values(graded) == [1.0, 2.0]
        return sum(one.cache_hits for one in graded)

    assert [hits(), hits(), hits(cache_version="2"), hits(cache_version="2")] == [0, 2, 0, 2]
    assert len(file.read_text().split()) == 4


def test_a_cached_rule_is_looked_up_too(tmp_path: Path) -> None:
    config = {"terms": [{"grader": "exact"}, {"grader": "numeric"}]}
    samples = samples_of("4", truth="4")
    first, second = (graded_by_worker(config, samples, cache_folder=str(tmp_path)) for _ in range(2))
    assert (first[0].cache_hits, second[0].cache_hits) == (0, 2)
    assert first[0].score == second[0].score


def test_failures_are_not_kept(tmp_path: Path) -> None:
    samples = samples_of("x", file=str(tmp_path / "late"))
    settings = {"timeout_s": 0.5, "cache_folder": str(tmp_path / "cache")}
    config = {"function": function("hangs_the_first_time")}
    (late,), (in_time,) = (graded_by_worker(config, samples, **settings) for _ in range(2))
    assert (late.score.status, in_time.score.value, in_time.cache_hits) == ("timeout", 1.0, 0)


def test_a_model_that_hangs_costs_its_own_deadline() -> None:
    with FakeService(hang) as service:
        config = {"grader": "classifier", "model": {"path": "m"}}
        graded = graded_by_worker(config, samples_of(*"abc"), targets={OWN_MODEL: target(service.url, timeout_s=0.3)})
        assert [one.score.status for one in graded] == ["timeout"] * 3


def test_a_failure_of_the_worker_itself_leaves_nobody_waiting(tmp_path: Path) -> None:
    (sample,) = samples_of("a")
    object.__setattr__(sample.prompt, "metadata", {1: "keys that", "cannot be": "sorted"})
    (graded,) = graded_by_worker({"function": function("length")}, [sample], cache_folder=str(tmp_path / "cache"))
    assert graded.score.status == "infra_error" and "the reward worker failed" in graded.score.reason


class NoScore(Rule):
    def grade(self, sample: Sample) -> Score:
        return cast(Score, None)


class CancelsItself(Rule):
    def grade(self, sample: Sample) -> Score:
        if sample.text == "1":
            raise asyncio.CancelledError("by no wish of ours")
        return Score(1.0)


async def graded_beside_a_function(rule: Rule, samples: list[Sample]) -> list[Graded]:
    settings = reward_settings({"function": function("length")})
    terms = (Term("odd", 1.0, rule), *settings.rubric.terms)
    worker = RewardLoopWorker(replace(settings, rubric=Rubric(terms, {})))
    try:
        return await graded_by(worker, samples)
    finally:
        await worker.close()


def test_a_rule_that_returns_no_score_leaves_nobody_waiting() -> None:
    async def test() -> None:
        (graded,) = await graded_beside_a_function(NoScore(), samples_of("a"))
        assert graded.score.status == "infra_error" and "the reward worker failed" in graded.score.reason

    run(test)


def test_a_sample_that_is_lost_ends_the_stream_with_an_error() -> None:
    async def test() -> None:
        with pytest.raises(RewardError, match=r"without a score: CancelledError"):
            await graded_beside_a_function(CancelsItself(), samples_of("0", "1", "2"))

    run(test)


class Slow(Rule):
    def grade(self, sample: Sample) -> Score:
        time.sleep(0.06)
        return Score(1.0)


def test_slow_rules_do_not_keep_whoever_asks_waiting() -> None:
    async def test() -> None:
        worker = RewardLoopWorker(RewardSettings(Rubric((Term("slow", 1.0, Slow()),), {}), timeout_s=1.0))
        lengths = [len(finished) async for finished in worker.grade(samples_of(*"abcdef"))]
        assert sum(lengths) == 6 and max(lengths) == 1

    run(test)


@pytest.mark.parametrize(
    ("config", "settings", "complaint"),
    [
        (
            {"function": function("length")},
            {"limits_at": ("127.0.0.1", 1)},
            "keeper of reward.limits at 127.0.0.1:1 does not answer",
        ),
        ({"grader": "exact"}, {"cache_folder": "/proc/nowhere"}, "reward.cache.folder='/proc/nowhere' cannot be made"),
    ],
)
def test_what_cannot_work_at_all_is_told_at_the_start_and_leaves_nothing(
    config: dict[str, Any], settings: dict[str, Any], complaint: str
) -> None:
    children, threads = set(psutil.Process().children()), threading.active_count()
    with pytest.raises(RewardError, match=complaint):
        graded_by_worker(config, samples_of("a"), **settings)
    assert set(psutil.Process().children()) <= children
    assert threading.active_count() <= threads


def test_a_key_that_is_missing_is_told_at_the_start_and_its_processes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    url = f"http://127.0.0.1:{free_port()}"
    endpoint = {"grader": "endpoint", "options": {"urls": url, "api_key_env": "NO_SUCH_KEY"}}
    config = {"terms": [{"function": function("length")}, endpoint]}
    before = set(psutil.Process().children())
    with pytest.raises(ValueError, match="NO_SUCH_KEY"):
        graded_by_worker(config, samples_of("a"), targets={url: target(url)})
    assert set(psutil.Process().children()) <= before


def test_closing_ends_all_processes_also_in_the_middle() -> None:
    async def test(worker: RewardLoopWorker) -> None:
        before = set(psutil.Process().children(recursive=True))
        assert values(await graded_by(worker, samples_of("0", "0", "0"))) == [2.0] * 3
        stream = worker.grade(samples_of(*["60"] * 4))
        await anext(stream)
        started = set(psutil.Process().children(recursive=True)) - before
        assert len(started) >= 5  # two servers, two processes and one for coroutines
        await worker.close()
        await worker.close()
        assert not psutil.wait_procs(started, timeout=10)[1]
        await stream.aclose()

    terms = [{"function": function("naps")}, {"function": function("async_naps")}]
    run_with({"terms": terms}, test)


def test_what_was_graded_travels_whole() -> None:
    graded = [(3, Graded(Score(0.5, {"a": 1.0}), 0.1, 0.2, 1)), (1, Graded(Score.failed("timeout", "late")))]
    assert pickle.loads(pickle.dumps(graded)) == graded


def judged(*said: str, **settings: Any) -> Graded:
    """What a judge with a pattern of its own makes of what it says, a text for each vote."""
    options = {"pattern": r"^(?:\w+\s?)*: (\d)$", "votes": len(said), "temperature": 1.0}
    config = {"grader": "judge", "options": options, "model": {"path": "judge", "kind": "generative"}}
    reply = {"choices": [{"message": {"content": text}} for text in said]}
    with FakeService(reply) as service:
        (graded,) = graded_by_worker(config, samples_of("x"), targets={OWN_MODEL: target(service.url)}, **settings)
    return graded


def test_a_pattern_that_never_ends_on_what_the_judge_said_costs_a_vote() -> None:
    never = "aaaa " * 8 + "!"
    assert judged("fine: 5").score.value == 0.5
    assert judged(never, "fine: 5", timeout_s=5.0).score == Score(0.5, {"votes": 1.0, "spread": 0.0})
    score = judged(never, never, timeout_s=0.5).score
    assert score.status == "invalid" and "0 of 2 answers" in score.reason
    assert r"The pattern '^(?:\\w+\\s?)*: (\\d)$' took longer than 0.5 s" in score.reason
