"""The trainer's weights on their way to replicas, and the proof that they arrived.

send(replicas, version)   invite, send, every replica takes them ─ same log-probs as the trainer's? ─▶ may write
send_again(replica)       to one that was started anew: what was sent last, if it is still there
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from practicum.controller import side_by_side
from practicum.errors import PracticumError, RolloutError
from practicum.rollout.replica import RolloutReplica
from practicum.weights import CheckedEngine, Fingerprint
from practicum.weights import Ticket as WeightTicket

log = logging.getLogger("practicum.rollout")
_MOST_SENDS = 2


class WeightsOfTrainer(Protocol):
    """The trainer, as far as replicas with weights of their own need it."""

    def invite(self, version: int, num_receivers: int) -> WeightTicket | None:
        """What replicas need to know before the weights are sent; None where they come after."""

    def send(self, version: int) -> Callable[[], WeightTicket]:
        """Begin to send. What is returned waits for the end of it."""

    def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """Of each token but the first, with the weights of now."""


class WeightDelivery:
    """Not for two threads at a time. `vocab_size` counts the tokens that all know; fingerprints are made of them."""

    def __init__(self, weights: WeightsOfTrainer, replicas: Sequence[RolloutReplica], *, vocab_size: int) -> None:
        """Trainer and replicas have just read the same files: how far apart they are now is no fault of any channel."""
        self._weights = weights
        self._ticket: WeightTicket | None = None  # good for those who come later too
        self._checks = {own.number: CheckedEngine(own.name, Fingerprint(vocab_size), own.log_probs) for own in replicas}
        self._sequences = next(iter(self._checks.values())).fingerprint.sequences
        self._expected = weights.log_probs(self._sequences)

        def compare(replica: RolloutReplica) -> None:
            replica.wake_up()
            self._checks[replica.number].start(-1, self._expected)

        side_by_side(compare, replicas)

    def send(self, replicas: Sequence[RolloutReplica], version: int) -> dict[RolloutReplica, str]:
        """Those that did not get them, and why; it is tried twice."""
        self._ticket = None
        self._expected = self._weights.log_probs(self._sequences)
        failed = dict.fromkeys(replicas, "")
        for _ in range(_MOST_SENDS):
            if failed:
                failed = self._send(list(failed), version)
        return failed

    def send_again(self, replica: RolloutReplica, version: int) -> None:
        """The weights the others have. Whoever sent them is not asked again if they are still there."""
        if self._ticket is not None:
            try:
                return self._give(replica, version, self._ticket)
            except PracticumError as error:
                log.warning("%s needs its weights sent again: %s", replica.name, error)
        failed = self._send([replica], version)
        if failed:
            raise RolloutError(failed[replica])

    def _send(self, replicas: Sequence[RolloutReplica], version: int) -> dict[RolloutReplica, str]:
        invitation = self._weights.invite(version, len(replicas))
        sending = self._weights.send(version)
        self._ticket = ticket = None if invitation is not None else sending()
        failed: dict[RolloutReplica, str] = {}

        def give(replica: RolloutReplica) -> None:
            try:
                self._give(replica, version, invitation or ticket)
            except PracticumError as error:
                failed[replica] = str(error)

        side_by_side(give, replicas)
        if invitation is not None:
            try:
                sending()
            except PracticumError:
                if not failed:
                    raise
        return failed

    def _give(self, replica: RolloutReplica, version: int, ticket: WeightTicket | None) -> None:
        check = self._checks[replica.number]
        check.update(version, lambda: replica.update_weights(version, ticket), self._expected)
