from __future__ import annotations

from collections.abc import Callable

import pytest

from practicum.config import Config
from practicum.errors import ConfigError


def test_wandb_is_off_until_a_project_is_named(make_config: Callable[..., Config]) -> None:
    assert make_config().trainer.wandb is None
    section = make_config("trainer.wandb.project=sums").trainer.wandb
    assert section is not None and (section.project, section.name, section.mode) == ("sums", None, "online")
    with pytest.raises(ConfigError, match=r"trainer\.wandb\.project is missing"):
        make_config("trainer.wandb.mode=offline")
    with pytest.raises(ConfigError, match=r"trainer\.wandb\.mode = 'sometimes'"):
        make_config("trainer.wandb.project=sums", "trainer.wandb.mode=sometimes")
