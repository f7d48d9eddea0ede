from __future__ import annotations

from typing import Any

import pytest

from practicum.rollout import BaseRollout

DUTIES = ("resume", "release", "update_weights", "check", "write", "log_probs")


@pytest.mark.parametrize("missing", DUTIES)
def test_an_engine_must_do_the_whole_job(missing: str) -> None:
    jobs: dict[str, Any] = {name: lambda self: None for name in DUTIES}
    type("Complete", (BaseRollout,), jobs)()
    jobs.pop(missing)
    with pytest.raises(TypeError, match=missing):
        type("Incomplete", (BaseRollout,), jobs)()
