"""The harness itself; what is done with it is in the tests of the code grader."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

from practicum.reward.sandbox import together


def proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, test: str) -> bytes:
    (tmp_path / "answer.py").write_text(answer)
    monkeypatch.chdir(tmp_path)
    request = json.dumps({"test": test, "proof": "proof"}).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(request)))
    reading, writing = os.pipe()
    kept = os.dup(1)
    os.dup2(writing, 1)
    os.close(writing)
    try:
        together.main()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.set_blocking(reading, False)
        try:
            written = os.read(reading, 100)
        except BlockingIOError:  # the harness keeps its own end open until its process ends
            written = b""
        os.close(reading)
    return written


def test_success_is_proven_after_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "class P: pass\nprint('noise')"
    assert proven(tmp_path, monkeypatch, answer, "assert isinstance(P(), P)") == b"proof"
    assert proven(tmp_path, monkeypatch, answer, "def test_it():\n    assert P") == b"proof"


def test_nothing_is_written_if_the_test_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError):
        proven(tmp_path, monkeypatch, "x = 1", "def test_it():\n    assert x == 2")
