"""The `critic` section: the model that says what an answer is going to be worth while it is being written."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from practicum.config.base import Section


class CriticConfig(Section):
    path: str | None = Field(default=None, min_length=1)
    """The model whose body the critic starts from, a folder or a hub name. None: model.path."""
    placement: Literal["hybrid", "colocated", "standalone"] = "hybrid"
    """hybrid: in the actor's processes. colocated: in processes of its own on the same places.
    standalone: on places of its own, as many as trainer.num_workers."""
    lr: float = Field(default=1e-5, gt=0)
    """AdamW's learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """A longer gradient is scaled down to this norm."""
    value_clip: float = Field(default=0.2, gt=0)
    """A value that moves further than this in one step has no gradient."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps of the run in which the critic alone learns, and the actor waits for it to know something."""
