"""The proof that an engine has the trainer's weights: both compute the log-probs of the same few sequences.

    trainer  log_probs(fingerprint.sequences) ─▶ expected ─┐
    engine   new weights ─▶ log_probs ─────────────────────┴▶ compare ─▶ serves, or RolloutError and does not

Weights in the wrong place (experts or gate and up in another order, a layer left out, an old version) shift nearly all
log-probs; rounding shifts most a little and, where a mixture of experts sends a token elsewhere, a few a lot. So the
mean is held to a tight bound and the largest to a loose one. Both grow with how far apart the log-probs are in
themselves: a model that is nearly indifferent shows small differences only, and a sharp one rounds coarsely. Hence
bounds are in units of the spread (standard deviation) of the trainer's log-probs.

Measured on random models of three families, in that unit: the same weights in another implementation differ by 1e-6 in
float32 and by 0.01 to 0.02 in bfloat16 on average (a mixture with flat gates: 0.17), experts in the wrong order by
0.04 to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from practicum.errors import RolloutError

LogProbs = Sequence[NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Bound:
    """The largest distance that log-probs may have, in units of their spread."""

    mean: float
    largest: float


TIGHTEST = Bound(mean=1e-4, largest=1e-3)  # for any pair
_WIDEST = Bound(mean=0.25, largest=5.0)  # no rounding explains more
_MARGIN = 5.0  # over what was measured when both had the same files
_LEAST_SPREAD = 0.1


@dataclass(frozen=True, slots=True)
class Gap:
    """The distance of trainer and engine, in units of the spread."""

    mean: float
    largest: float
    sequence: int  # where the largest is
    token: int
    trainer: float  # the log-probs there
    engine: float

    def is_within(self, bound: Bound) -> bool:
        return self.mean <= bound.mean and self.largest <= bound.largest


def make_sequences(vocab_size: int, seed: int = 0) -> list[NDArray[np.int32]]:
    """Return a few short sequences of different lengths, the same for the same arguments."""
    random = np.random.default_rng(seed)
    return [random.integers(0, vocab_size, length).astype(np.int32) for length in (3, 9, 17, 26, 33, 48)]


class Fingerprint:
    """`vocab_size` counts tokens that every engine accepts: those of the tokenizer. The bound is set by `calibrate`."""

    def __init__(self, vocab_size: int, bound: Bound = TIGHTEST, seed: int = 0) -> None:
        self.sequences = make_sequences(vocab_size, seed)
        self.bound = bound

    def calibrate(self, engine: str, version: int, expected: LogProbs, found: LogProbs) -> Gap:
        """Set the bound by what is measured while both have loaded the same files and nothing has travelled yet.

        So a pair that agrees closely is held to it, and one that rounds coarsely is not suspected for it.
        """
        gap = self.compare(engine, version, expected, found, _WIDEST)
        self.bound = Bound(max(TIGHTEST.mean, _MARGIN * gap.mean), max(TIGHTEST.largest, _MARGIN * gap.largest))
        return gap

    def compare(
        self, engine: str, version: int, expected: LogProbs, found: LogProbs, bound: Bound | None = None
    ) -> Gap:
        """Return how far apart they are. Raises `RolloutError` where that is further than the bound."""
        bound = self.bound if bound is None else bound
        gap = measure(expected, found)
        if gap is None:
            raise RolloutError(
                f"engine {engine!r} with weights of version {version}: its log-probs are of other lengths than the "
                "trainer's, or are no numbers. It does not serve. Restart it from the model's files."
            )
        if not gap.is_within(bound):
            raise RolloutError(
                f"engine {engine!r} with weights of version {version} is not the model that the trainer has: log-probs "
                f"are apart by {gap.mean:.2g} on average and by {gap.largest:.2g} at most, in units of their spread, "
                f"where {bound.mean:.2g} and {bound.largest:.2g} are allowed; token {gap.token} of sequence "
                f"{gap.sequence} has {gap.trainer:.5g} in the trainer and {gap.engine:.5g} in the engine. It does not "
                "serve. Send the weights again; if it stays so, the engine puts them in the wrong place: restart it, "
                "or choose another channel or rollout.engine."
            )
        return gap


def measure(expected: LogProbs, found: LogProbs) -> Gap | None:
    """Return how far apart they are; None where they cannot be compared."""
    if [len(own) for own in expected] != [len(own) for own in found]:
        return None
    trainer = np.concatenate([np.asarray(own, np.float64) for own in expected])
    engine = np.concatenate([np.asarray(own, np.float64) for own in found])
    if not (np.isfinite(trainer).all() and np.isfinite(engine).all()):
        return None
    apart = np.abs(trainer - engine)
    spread = max(float(trainer.std()), _LEAST_SPREAD)
    at = int(apart.argmax())
    starts = np.cumsum([0, *(len(own) for own in expected)])
    sequence = int(np.searchsorted(starts, at, side="right")) - 1
    token = at - int(starts[sequence]) + 1  # the first has no log-prob
    return Gap(
        float(apart.mean()) / spread, float(apart[at]) / spread, sequence, token, float(trainer[at]), float(engine[at])
    )
