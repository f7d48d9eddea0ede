from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from practicum.errors import RewardError
from practicum.reward.graders.probe import probe_function
from tests.reward.builders import function


def test_the_shape_is_learnt_without_importing_the_file_here(tmp_path: Path) -> None:
    file = tmp_path / "elsewhere.py"
    file.write_text("import sys\nprint('noise')\nasync def grade(samples: list): return []\n")
    shape = probe_function(f"{file}:grade")
    assert (shape.is_async, shape.takes_list, shape.fields) == (True, True, ())
    assert not any("elsewhere" in name for name in sys.modules)


@pytest.mark.usefixtures("many_descriptors")
def test_it_is_learnt_by_a_process_with_many_open_files_too(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def grade(sample): return 1.0\n")
    assert not probe_function(f"{file}:grade").is_async


def test_a_changed_file_is_looked_at_again(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def grade(sample): return 1.0\n")
    first = probe_function(f"{file}:grade")
    assert probe_function(f"{file}:grade") is first
    file.write_text("async def grade(sample): return 1.0\n")
    second = probe_function(f"{file}:grade")
    assert second.is_async and second.source != first.source


def test_functions_written_for_verl_take_what_they_name() -> None:
    assert set(probe_function(function("compute_score")).fields) >= {"solution_str", "ground_truth"}


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os._exit(7)", "ended with exit code 7"),
        ("import ctypes; ctypes.string_at(0)", "ended with signal 11"),
        ("import sys; sys.exit(3)", "raised SystemExit: 3"),
        ("1/0", "raised ZeroDivisionError"),
        ("def other(sample): ...", "has no function 'grade'; it defines other"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_by_name(tmp_path: Path, code: str, why: str) -> None:
    file = tmp_path / "bad.py"
    file.write_text(code)
    with pytest.raises(RewardError, match=why) as caught:
        probe_function(f"{file}:grade")
    assert f"reward.function='{file}:grade'" in str(caught.value)


def test_an_import_that_hangs_has_a_deadline(tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text("import time; time.sleep(1000)")
    start = time.monotonic()
    with pytest.raises(RewardError, match="took longer than 1 s"):
        probe_function(f"{file}:grade", timeout_s=1.0)
    assert time.monotonic() - start < 30
