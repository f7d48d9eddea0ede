from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from practicum import Message, Prompt, Sample
from practicum.errors import RewardError
from practicum.reward.cache import ScoreCache, fingerprint
from practicum.types import Score
from tests.samples import make_sample

SAMPLE = make_sample(text="4", truth="4")


def test_a_kept_score_is_found_by_another_cache_on_the_same_folder(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path / "a" / "b")
    key = cache.key("exact", SAMPLE)
    assert cache.get(key) is None
    cache.put(key, Score(0.1, parts={"style": 0.3}))
    other = ScoreCache(str(tmp_path / "a" / "b"))
    assert other.get(other.key("exact", SAMPLE)) == Score(0.1, parts={"style": 0.3})


def test_failures_are_never_kept(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path)
    cache.put("ab" * 32, Score.failed("timeout", "late"))
    assert cache.get("ab" * 32) is None
    assert list(tmp_path.iterdir()) == []


def test_whatever_decides_the_score_makes_another_key(tmp_path: Path) -> None:
    prompt = SAMPLE.prompt
    others: list[Sample] = [
        replace(SAMPLE, text="5"),
        replace(SAMPLE, finish_reason="length"),
        replace(SAMPLE, token_ids=SAMPLE.token_ids + np.int32(1)),
        replace(SAMPLE, prompt=replace(prompt, answer=4)),
        replace(SAMPLE, prompt=replace(prompt, data_source="sums")),
        replace(SAMPLE, prompt=replace(prompt, metadata={"level": 1})),
        replace(SAMPLE, prompt=replace(prompt, text="!")),
        replace(SAMPLE, prompt=Prompt("p", messages=(Message("user", "?"),), answer="4")),
    ]
    cache = ScoreCache(tmp_path)
    keys = [cache.key("exact", sample) for sample in (SAMPLE, *others)]
    keys += [cache.key("numeric", SAMPLE), ScoreCache(tmp_path, version="2").key("exact", SAMPLE)]
    assert len(set(keys)) == len(keys)
    assert cache.key("exact", replace(SAMPLE, prompt=replace(prompt, id="elsewhere"))) == keys[0]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[1]", b"{}", b'{"value": "x", "parts": {}}', b'{"value": NaN, "parts": {}}']
)
def test_a_damaged_file_is_no_score_and_is_written_anew(tmp_path: Path, content: bytes) -> None:
    cache = ScoreCache(tmp_path)
    key = cache.key("exact", SAMPLE)
    cache.put(key, Score(1.0))
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    file.write_bytes(content)
    assert cache.get(key) is None
    cache.put(key, Score(1.0))
    assert cache.get(key) == Score(1.0)


def test_many_writers_of_one_score_leave_one_whole_file(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path)
    key = cache.key("exact", SAMPLE)
    score = Score(0.5, parts={f"part {i}": float(i) for i in range(200)})
    seen: list[Score | None] = []

    def write() -> None:
        for _ in range(50):
            cache.put(key, score)
            seen.append(cache.get(key))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == [score] * 200
    assert [json.loads(path.read_text())["value"] for path in tmp_path.rglob("*") if path.is_file()] == [0.5]


def test_a_score_that_cannot_be_kept_is_told_once_and_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ScoreCache(tmp_path / "scores")
    (tmp_path / "scores").rmdir()
    (tmp_path / "scores").write_text("in the way")
    for _ in range(3):
        cache.put(cache.key("exact", SAMPLE), Score(1.0))
    assert cache.get(cache.key("exact", SAMPLE)) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be kept in" in caplog.text


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RewardError, match=r"reward\.cache\.folder='.*file/scores' cannot be made: Not a directory"):
        ScoreCache(tmp_path / "file" / "scores")


def test_a_model_is_known_by_the_state_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    first = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == first
    (tmp_path / "weights").write_text("w")
    second = fingerprint(tmp_path)
    (tmp_path / "weights").write_text("ww")
    assert len({first, second, fingerprint(tmp_path)}) == 3


def test_what_the_grader_read_is_kept_too(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path)
    cache.put("ab" * 32, Score(1.0, answer="4"))
    found = cache.get("ab" * 32)
    assert found is not None and found.answer == "4"
