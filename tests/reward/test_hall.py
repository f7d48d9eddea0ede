from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from practicum.controller.host import free_port
from practicum.errors import RewardError
from practicum.reward.graders.remote import OWN_MODEL
from practicum.reward.hall import GradingHall
from practicum.types import Score
from tests.reward.fakes import FakeService, hang, run
from tests.reward.halls import function, graded_in_hall, hall_settings, samples_of, target


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
        one, two = graded_in_hall(config, samples, targets={OWN_MODEL: target(service.url)})
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


def test_the_data_source_chooses_desks() -> None:
    config = {"grader": "exact", "sources": {"long": [{"function": function("length")}]}}
    samples = [*samples_of("abc", truth="abc"), *samples_of("abc", source="long")]
    assert [one.score.value for one in graded_in_hall(config, samples)] == [1.0, 3.0]


def test_a_source_without_a_grader_is_invalid() -> None:
    config = {"sources": {"long": [{"function": function("length")}]}}
    (one,) = graded_in_hall(config, samples_of("abc"))
    assert (one.score.status, one.score.value) == ("invalid", None)


def test_one_term_that_fails_names_itself() -> None:
    config = {"terms": [{"grader": "exact"}, {"function": function("hangs_on_one")}]}
    good, bad = graded_in_hall(config, samples_of("4", "1", truth="4"), timeout_s=0.3)
    assert good.score == Score(2.0, parts={"exact": 1.0, "hangs_on_one": 1.0})
    assert bad.score.status == "timeout" and bad.score.reason.startswith("hangs_on_one: took longer")


def test_cached_scores_are_counted_and_everything_else_is_a_miss(tmp_path: Path) -> None:
    file = tmp_path / "calls"
    config: dict[str, Any] = {"function": function("counts_calls")}
    samples = samples_of("a", "bb", file=str(file))

    def hits(**settings: Any) -> int:
        graded = graded_in_hall(config, samples, cache_folder=str(tmp_path / "cache"), **settings)
        assert [one.score.value for one in graded] == [1.0, 2.0]
        return sum(one.cache_hits for one in graded)

    assert [hits(), hits(), hits(cache_version="2"), hits(cache_version="2")] == [0, 2, 0, 2]
    assert len(file.read_text().split()) == 4


def test_a_cached_rule_is_looked_up_too(tmp_path: Path) -> None:
    config = {"terms": [{"grader": "exact"}, {"grader": "numeric"}]}
    samples = samples_of("4", truth="4")
    first, second = (graded_in_hall(config, samples, cache_folder=str(tmp_path)) for _ in range(2))
    assert (first[0].cache_hits, second[0].cache_hits) == (0, 2)
    assert first[0].score == second[0].score


def test_a_model_that_hangs_costs_its_own_deadline() -> None:
    with FakeService(hang) as service:
        start = time.monotonic()
        config = {"grader": "classifier", "model": {"path": "m"}}
        graded = graded_in_hall(config, samples_of(*"abc"), targets={OWN_MODEL: target(service.url, timeout_s=0.3)})
        assert [one.score.status for one in graded] == ["timeout"] * 3
        assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    ("config", "settings", "complaint"),
    [
        (
            {"grader": "exact"},
            {"limits_at": ("127.0.0.1", 1)},
            "keeper of reward.limits at 127.0.0.1:1 does not answer",
        ),
        ({"grader": "exact"}, {"cache_folder": "/proc/nowhere"}, "reward.cache.folder='/proc/nowhere' cannot be made"),
    ],
)
def test_what_cannot_work_at_all_is_told_at_the_start_and_leaves_nothing(
    config: dict[str, Any], settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(RewardError, match=complaint):
        graded_in_hall(config, samples_of("a"), **settings)


def test_a_key_that_is_missing_is_told_at_the_start_and_its_processes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    url = f"http://127.0.0.1:{free_port()}"
    endpoint = {"grader": "endpoint", "options": {"urls": url, "api_key_env": "NO_SUCH_KEY"}}
    config = {"terms": [{"function": function("length")}, endpoint]}
    before = set(psutil.Process().children())
    with pytest.raises(ValueError, match="NO_SUCH_KEY"):
        graded_in_hall(config, samples_of("a"), targets={url: target(url)})
    assert set(psutil.Process().children()) <= before


def test_a_hall_leaves_no_process() -> None:
    async def test() -> None:
        before = set(psutil.Process().children(recursive=True))
        terms = [{"function": function("length")}, {"function": function("patient")}]
        hall = GradingHall(hall_settings({"terms": terms}))
        await hall.start()
        await asyncio.gather(*(hall.grade(sample) for sample in samples_of("1", "2", "3")))
        started = set(psutil.Process().children(recursive=True)) - before
        assert len(started) >= 5  # two servers, two processes and one for coroutines
        await hall.close()
        assert not psutil.wait_procs(started, timeout=10)[1]

    run(test)
