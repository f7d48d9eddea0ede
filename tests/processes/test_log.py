from __future__ import annotations

from pathlib import Path

import pytest

from practicum.processes.log import excerpt


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: too little",
        "torch.OutOfMemoryError: CUDA out of memory",
        "(EngineCore pid=7) ERROR 11-20 00:52:07 [core.py:701] ValueError: too little",
        "(EngineCore pid=7)   | pydantic_core._pydantic_core.ValidationError: 1 validation error",
        "KeyboardInterrupt",
        "api_server.py: error: unrecognized arguments: --other",
        "Segmentation fault (core dumped)",
    ],
)
def test_the_first_error_is_found_with_the_lines_around_it(line: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    before, after = ([f"INFO {word} line {n}" for n in range(2000)] for word in ("early", "late"))
    log.write_text("\n".join([*before, line, *after, "RuntimeError: it failed, see above" * ("Error:" in line)]))
    found = excerpt(log)
    assert f"early line 1999\n{line}\nINFO late line 0" in found and "early line 1900" not in found
    assert "late line 1999" in found.partition("The end of its log:")[2]


def test_an_exception_says_more_than_a_remark_before_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ERROR something failed\n" + "x\n" * 4000 + "OSError: no room\n" + "x\n" * 4000)
    assert "OSError: no room" in excerpt(log) and "something failed" not in excerpt(log)


def test_only_what_was_printed_since_then_counts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("OSError: long ago\n" + "x" * 5000 + "\n")
    assert excerpt(log, log.stat().st_size).startswith("The end of its log:")
    log.write_text("")
    assert excerpt(log) == "It printed nothing."
    assert "cannot be read" in excerpt(tmp_path / "other")
