"""Trackers of metrics beside the run folder."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from practicum.config.base import Section


class WandbConfig(Section):
    project: str = Field(min_length=1)
    """The W&B project that the run belongs to."""
    name: str | None = Field(default=None, min_length=1)
    """The name of the run there. None takes the name of the run folder."""
    mode: Literal["online", "offline"] = "online"
    """offline needs no network and no account: all is kept in the run folder, for `wandb sync` later."""
