from __future__ import annotations

from practicum.rollout import ENGINES, BaseRollout
from practicum.rollout.hf import HFRollout


def test_engines_do_what_the_base_asks() -> None:
    assert BaseRollout.__abstractmethods__ == {"resume", "generate", "release", "update_weights"}
    assert not HFRollout.__abstractmethods__
    assert set(ENGINES) == {"hf"}
