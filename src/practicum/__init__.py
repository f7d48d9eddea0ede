"""Practicum: reinforcement-learning post-training for language models, from a laptop to a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from practicum.errors import ToolError
from practicum.types import Message, Prompt, Sample, SamplingParams, Score

if TYPE_CHECKING:
    from practicum.config import Config
    from practicum.loop.trainer import Trainer

__all__ = ["Config", "Message", "Prompt", "Sample", "SamplingParams", "Score", "ToolError", "Trainer"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Config and Trainer pull in pydantic and Ray: only for those who ask, so that a reward file imports quickly.
    if name == "Config":
        from practicum.config import Config

        return Config
    if name == "Trainer":
        from practicum.loop.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'practicum' has no attribute {name!r}")
