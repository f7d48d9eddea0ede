"""The trainer's weights on their way to replicas, and the proof that they arrived.

send(replicas, version)   invite, send, every replica takes them ─ same log-probs as the trainer's? ─▶ may write
send_again(replica)       to one that was started anew: what was sent last, if it is still there
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from practicum.controller import side_by_side
from practicum.errors import PracticumError, RolloutError, WeightsGone, WorkerDied, WorkerError
from practicum.rollout.replica import RolloutReplica
from practicum.weights import CheckedEngine, Fingerprint
from practicum.weights import Ticket as WeightTicket

log = logging.getLogger("practicum.rollout")


@dataclass(frozen=True, slots=True)
class _Failure:
    reason: str
    is_own: bool
    """Or it only waited for another one, in vain."""


class WeightsOfTrainer(Protocol):
    """The trainer, as far as replicas with weights of their own need it."""

    def invite(self, version: int, num_receivers: int) -> WeightTicket | None:
        """What replicas need to know before the weights are sent; None where they come after."""

    def send(self, version: int) -> Callable[[], WeightTicket]:
        """Begin to send. What is returned waits for the end of it. `WeightsGone`, here or there, if this version has
        been sent before and the trainer has learnt since."""

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
        culprits: list[RolloutReplica] = []
        others = list(replicas)
        while others:  # each time there are fewer: without a culprit nobody fails
            failed = self._send(others, version)
            culprits += [own for own, failure in failed.items() if failure.is_own]
            others = [own for own, failure in failed.items() if not failure.is_own]
        # Where all meet, one that is gone is not to spoil it for the others again.
        again = [[own] for own in culprits] if self._ticket is None else [culprits]
        lost = {own: failure for some in again if some for own, failure in self._send(some, version).items()}
        return {own: failure.reason for own, failure in lost.items()}

    def send_again(self, replica: RolloutReplica, version: int) -> None:
        """The weights the others have, or `WeightsGone`. The trainer is not asked again if they are still there."""
        if self._ticket is not None:
            try:
                return self._give(replica, version, self._ticket)
            except PracticumError as error:
                log.warning("%s needs its weights sent again: %s", replica.name, error)
        failed = self._send([replica], version)
        if failed:
            raise RolloutError(failed[replica].reason)

    def _send(self, replicas: Sequence[RolloutReplica], version: int) -> dict[RolloutReplica, _Failure]:
        try:
            invitation = self._weights.invite(version, len(replicas))
            sending = self._weights.send(version)
            self._ticket = ticket = None if invitation is not None else sending()
        except WorkerError as error:
            raise _as_it_is(error) from error
        failed: dict[RolloutReplica, _Failure] = {}
        refusals: list[PracticumError] = []
        is_off = threading.Event()

        def call_off() -> None:
            """Nobody is to wait for whoever has failed."""
            is_off.set()
            if invitation is not None:
                invitation.call_off()

        def give(replica: RolloutReplica) -> None:
            try:
                self._give(replica, version, invitation or ticket)
            except PracticumError as error:
                failed[replica] = _Failure(str(error), is_own=invitation is None or not is_off.is_set())
                call_off()

        def finish() -> None:
            if invitation is None:
                return
            try:
                sending()
            except PracticumError as error:
                if not is_off.is_set():
                    refusals.append(_as_it_is(error))
                call_off()

        works: list[Callable[[], None]] = [finish, *(partial(give, replica) for replica in replicas)]
        side_by_side(lambda work: work(), works)
        if not refusals or any(failure.is_own for failure in failed.values()):
            return failed
        if not failed or isinstance(refusals[0], WeightsGone | WorkerDied):
            raise refusals[0]
        return {own: _Failure(failure.reason, is_own=True) for own, failure in failed.items()}  # it waited in vain

    def _give(self, replica: RolloutReplica, version: int, ticket: WeightTicket | None) -> None:
        check = self._checks[replica.number]
        check.update(version, lambda: replica.update_weights(version, ticket), self._expected)


def _as_it_is(error: PracticumError) -> PracticumError:
    """What the trainer says of its weights is no failure of the trainer's."""
    cause = error.cause if isinstance(error, WorkerError) else None
    return cause if isinstance(cause, WeightsGone) else error
