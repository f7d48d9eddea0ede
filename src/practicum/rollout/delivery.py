"""The trainer's weights on their way to replicas, and the proof that they arrived.

send(replicas, version)   invite, send, every replica takes them ─ same log-probs as the trainer's? ─▶ may write
send_again(replica)       to one that was started anew: what was sent last, if it is still there
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from practicum.errors import PracticumError, RolloutError, WeightsGone, WorkerDied, WorkerError
from practicum.rollout.replica import RolloutReplica
from practicum.weights import Fingerprint, Place, Ticket

log = logging.getLogger("practicum.rollout")


class TrainerWeights(Protocol):
    """The trainer, as far as replicas with weights of their own need it."""

    async def open(self, engines: Sequence[Place]) -> None:
        """Choose a channel that reaches all of them, and make ready to send."""

    async def invite(self, version: int, num_receivers: int) -> Ticket | None:
        """Return what replicas need to know before the weights are sent; None where they come after."""

    async def send(self, version: int) -> Ticket:
        """Send, and return when all is sent. `WeightsGone`, here or in `invite`, if this version has been sent before
        and the trainer has learnt since."""

    async def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """Return the log-probs of each token but the first, with the weights of now."""


class WeightDelivery:
    """Sends weights, one call at a time. Fingerprints are made of the `vocab_size` first tokens, which all know."""

    def __init__(self, weights: TrainerWeights, replicas: Sequence[RolloutReplica], *, vocab_size: int) -> None:
        self._weights = weights
        self._ticket: Ticket | None = None  # good for those who come later too
        self._fingerprints = {own.number: Fingerprint(vocab_size) for own in replicas}
        self._sequences = Fingerprint(vocab_size).sequences
        self._expected: list[NDArray[np.float32]] = []

    async def calibrate(self, replicas: Sequence[RolloutReplica]) -> None:
        """Wake the replicas and measure how far apart they and the trainer are now: all have just read the same files,
        so that is no fault of any channel."""
        self._expected = await self._weights.log_probs(self._sequences)

        async def compare(replica: RolloutReplica) -> None:
            await replica.wake_up()
            found = await replica.log_probs(self._sequences)
            self._fingerprints[replica.number].calibrate(replica.name, -1, self._expected, found)

        await asyncio.gather(*map(compare, replicas))

    async def send(self, replicas: Sequence[RolloutReplica], version: int) -> dict[RolloutReplica, str]:
        """Return the replicas that did not get the weights, and why; it is tried twice."""
        self._ticket = None
        self._expected = await self._weights.log_probs(self._sequences)
        faulty: list[RolloutReplica] = []
        others = list(replicas)
        while others:  # there are fewer each time: none is blocked unless another one is faulty
            failed, blocked = await self._send(others, version)
            faulty += [own for own in failed if own not in blocked]
            others = blocked
        # Where all receive together, one that is gone must not block the others again.
        problems: dict[RolloutReplica, str] = {}
        for some in [[own] for own in faulty] if self._ticket is None else [faulty]:
            if some:
                problems |= (await self._send(some, version))[0]
        return problems

    async def send_again(self, replica: RolloutReplica, version: int) -> None:
        """Give a replica the weights the others have, or raise `WeightsGone`. The trainer is not asked again if they
        are still there."""
        if self._ticket is not None:
            try:
                return await self._give(replica, version, self._ticket)
            except PracticumError as error:
                log.warning("%s needs its weights sent again: %s", replica.name, error)
        failed, _ = await self._send([replica], version)
        if failed:
            raise RolloutError(failed[replica])

    async def _send(
        self, replicas: Sequence[RolloutReplica], version: int
    ) -> tuple[dict[RolloutReplica, str], list[RolloutReplica]]:
        """Return the replicas that failed and why, and those of them that were only blocked by another one."""
        try:
            invitation = await self._weights.invite(version, len(replicas))
            ticket = self._ticket = None if invitation is not None else await self._weights.send(version)
        except WorkerError as error:
            raise _unwrapped(error) from error
        failed: dict[RolloutReplica, str] = {}
        blocked: list[RolloutReplica] = []
        trainer_error: PracticumError | None = None
        is_cancelled = False

        async def call_off() -> None:
            """End the waiting for a receiver that has failed."""
            nonlocal is_cancelled
            is_cancelled = True
            if invitation is not None:
                await asyncio.to_thread(invitation.call_off)

        async def give(replica: RolloutReplica) -> None:
            try:
                await self._give(replica, version, invitation or ticket)
            except PracticumError as error:
                failed[replica] = str(error)
                if invitation is not None and is_cancelled:
                    blocked.append(replica)
                await call_off()

        async def send() -> None:
            nonlocal trainer_error
            try:
                await self._weights.send(version)
            except PracticumError as error:
                trainer_error = None if is_cancelled else _unwrapped(error)
                await call_off()

        await asyncio.gather(*([] if invitation is None else [send()]), *map(give, replicas))
        if trainer_error is None or len(blocked) < len(failed):
            return failed, blocked
        if not failed or isinstance(trainer_error, WeightsGone | WorkerDied):
            raise trainer_error
        return failed, []  # the trainer only waited for them

    async def _give(self, replica: RolloutReplica, version: int, ticket: Ticket | None) -> None:
        await replica.update_weights(version, ticket)
        found = await replica.log_probs(self._sequences)
        self._fingerprints[replica.number].compare(replica.name, version, self._expected, found)


def _unwrapped(error: PracticumError) -> PracticumError:
    """Return the trainer's own error where it says that its weights are gone: that is no failure of the trainer."""
    cause = error.cause if isinstance(error, WorkerError) else None
    return cause if isinstance(cause, WeightsGone) else error
