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
    """Not for two calls at a time. `vocab_size` counts the tokens that all know; fingerprints are made of them."""

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
        culprits: list[RolloutReplica] = []
        others = list(replicas)
        while others:  # each time there are fewer: without a culprit nobody fails
            failed, in_vain = await self._send(others, version)
            culprits += [own for own in failed if own not in in_vain]
            others = in_vain
        # Where all meet, one that is gone is not to spoil it for the others again.
        lost: dict[RolloutReplica, str] = {}
        for some in [[own] for own in culprits] if self._ticket is None else [culprits]:
            if some:
                lost |= (await self._send(some, version))[0]
        return lost

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
        """Return the replicas that failed and why; and those of them that only waited for another one, in vain."""
        try:
            invitation = await self._weights.invite(version, len(replicas))
            ticket = self._ticket = None if invitation is not None else await self._weights.send(version)
        except WorkerError as error:
            raise _unwrapped(error) from error
        failed: dict[RolloutReplica, str] = {}
        in_vain: list[RolloutReplica] = []
        refusal: PracticumError | None = None
        is_off = False

        async def call_off() -> None:
            """Let nobody wait for whoever has failed."""
            nonlocal is_off
            is_off = True
            if invitation is not None:
                await asyncio.to_thread(invitation.call_off)

        async def give(replica: RolloutReplica) -> None:
            try:
                await self._give(replica, version, invitation or ticket)
            except PracticumError as error:
                failed[replica] = str(error)
                if invitation is not None and is_off:
                    in_vain.append(replica)
                await call_off()

        async def send() -> None:
            nonlocal refusal
            try:
                await self._weights.send(version)
            except PracticumError as error:
                refusal = None if is_off else _unwrapped(error)
                await call_off()

        await asyncio.gather(*([] if invitation is None else [send()]), *map(give, replicas))
        if refusal is None or len(in_vain) < len(failed):
            return failed, in_vain
        if not failed or isinstance(refusal, WeightsGone | WorkerDied):
            raise refusal
        return failed, []  # the trainer waited in vain

    async def _give(self, replica: RolloutReplica, version: int, ticket: Ticket | None) -> None:
        await replica.update_weights(version, ticket)
        found = await replica.log_probs(self._sequences)
        self._fingerprints[replica.number].compare(replica.name, version, self._expected, found)


def _unwrapped(error: PracticumError) -> PracticumError:
    """What the trainer says of its weights is no failure of the trainer's."""
    cause = error.cause if isinstance(error, WorkerError) else None
    return cause if isinstance(cause, WeightsGone) else error
