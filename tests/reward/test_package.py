"""What the package offers, and the example on its page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import practicum.reward
from practicum.types import Score
from tests.reward.builders import groups_for, scores_of

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"


def test_every_name_leads_somewhere() -> None:
    for name in practicum.reward.__all__:
        assert getattr(practicum.reward, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        practicum.reward.Nothing  # noqa: B018


def test_a_router_or_a_grading_process_imports_neither_ray_nor_torch() -> None:
    code = "import sys, practicum.reward.graders, practicum.reward.router; print({'ray', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr


def test_the_example_on_its_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"All of it without a trainer:\n\n```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len([line for line in code.splitlines() if line]) <= 12
    groups = groups_for("4", "5", truth="4")
    exec(code, {"groups": groups})
    assert scores_of(groups) == [Score(1.0), Score(0.0)]
    assert "Score(value=1.0" in capsys.readouterr().out
