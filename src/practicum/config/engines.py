"""The engines by name, and what is known of each without importing it: what one needs, the others can do without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine, by facts that others ask for."""

    cls: str
    """Its class, as module:name. `cls.of(settings)` makes one from the `EngineSettings`."""
    placements: tuple[str, ...] = ("hybrid", "colocated", "standalone")
    extra: str | None = None
    """The extra of practicum that brings its packages. None: they come with practicum itself."""
    serves: bool = False
    """Whether `practicum serve` takes it; others have servers of their own."""
    records_routes: bool = False
    """Whether it can tell which experts it sent tokens to."""
    waiting_share: float = 0.125
    """The answers that wait at a worker beyond what it generates at a time, as a share of that."""


ENGINES = {
    "native": Engine("practicum.rollout.native:NativeRollout", serves=True, records_routes=True),
    # It begins a batch only when the one before is done: another whole one has to be there by then.
    "hf": Engine("practicum.rollout.hf:HFRollout", serves=True, waiting_share=1.0),
    "vllm": Engine(
        "practicum.rollout.vllm.engine:VllmRollout",
        placements=("colocated", "standalone"),
        extra="vllm",
        records_routes=True,
    ),
    "openai": Engine("practicum.rollout.openai:OpenAIRollout", placements=("standalone",)),
}

if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[tuple(ENGINES)]
