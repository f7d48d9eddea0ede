"""A rollout worker: one engine, which writes the groups it is sent and streams what it has finished.

    generate(groups)   ─▶ engine, or conversations over it ─▶ finished trajectories, in lists
    update_weights     ─▶ between two answers, or within them: from the trainer beside it or by a channel

It is an async worker: all calls run on the event loop of its process, and what computes has a thread of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from practicum.config import AgentConfig
from practicum.controller import Worker
from practicum.errors import ConversationError, TrainingError
from practicum.models import DTYPES, load_tokenizer, resolve_device
from practicum.replay import coded
from practicum.rollout.engine.merge import AdapterMerger
from practicum.rollout.engines import EngineSettings, make_engine
from practicum.types import PromptGroup, RoutedExperts, Trajectory
from practicum.weights import Place, Ticket, WeightReceiver, WeightSource, WeightUpdate, channel_timeout_s

T = TypeVar("T")
# A finished answer is often followed by others: so long they are waited for, to leave together.
_LINGER_S = 0.1


class RolloutWorker(Worker):
    """One engine. In hybrid placement it is fused with the worker under the role `weights_from` and takes its weights.

    `agent` lets the model talk with tools or an environment between its turns. `threads` is how many the engine
    computes with; None leaves it as it is in this process. With `is_partial` answers are aborted for new weights and
    continued under them. `timeout_s` is the deadline of calls. It is asleep until `resume`.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        weights_from: str | None = None,
        agent: AgentConfig | None = None,
        threads: int | None = None,
        is_partial: bool = False,
        timeout_s: float = 1800.0,
    ) -> None:
        self._weights_from = weights_from
        self._is_partial = is_partial
        self._keeps_aborted = is_partial and (agent is None or agent.environment is None)
        channel_s = channel_timeout_s(timeout_s)
        # A channel has its time after it, and the call's own deadline comes last, since it cannot say who was late.
        self._exclusive_s = timeout_s - 2 * channel_s
        self._receiver = WeightReceiver(channel_s, is_whole=settings.adapters is None)
        self._has_started = False
        if threads is not None:
            torch.set_num_threads(threads)
        self._engine = make_engine(settings)
        self._engine.wait_timeout_s = timeout_s
        self._merger: AdapterMerger | None = None
        if settings.adapters is not None and not self._engine.takes_adapters:
            device, dtype = resolve_device(settings.device), DTYPES[settings.dtype]
            self._merger = AdapterMerger(settings.adapters, device, dtype)
        self._conversations: Any = None
        if agent is not None and agent.is_set:
            from practicum.rollout.agent.conversation import Conversations

            tokenizer = load_tokenizer(settings.model_path)
            self._conversations = Conversations(self._engine, tokenizer, agent, is_partial=is_partial)

    async def generate(self, groups: list[PromptGroup]) -> AsyncGenerator[list[PromptGroup], None]:
        """Write the missing trajectories of all groups, and yield those that have been finished since the last time,
        each in a group with the id of its own. One that was aborted has its sample only where any worker may continue
        it: with `is_partial`, since there may be new weights, and without an environment, whose state is gone.

        A `RolloutError` is the request's, a `TrainingError` the weights', a `ConversationError` of what is said between
        turns: no other engine would do better. Any other error is a failure of this engine.
        """
        alone = [with_trajectories(group, [t]) for group in groups for t in group.trajectories if not t.is_finished]
        lists = (self._conversations or self._engine).generate(alone)  # checks them: an error here is the request's
        try:
            async with aclosing(_joined(lists, len(alone))) as generating:
                async for finished in generating:
                    if not self._keeps_aborted:
                        _drop_aborted(finished)
                    yield _to_send(finished)
        except (TrainingError, ConversationError, GeneratorExit, asyncio.CancelledError):
            raise
        except Exception as error:  # whatever a model or a server may raise
            raise RuntimeError(f"the engine failed: {type(error).__name__}: {error}") from error

    async def ping(self) -> None:
        """Answer, so that others see that this process is alive."""

    async def update_weights(self, version: int, ticket: Ticket | None = None) -> None:
        """Take the weights that the ticket is for; without one those of the sibling, as they are now, for which all
        ranks must be called. Answers that are begun are finished first, or aborted and continued. It is awake after.
        """
        async with self._exclusive(f"weights of version {version}"):
            await self._wake()
            await self._engine.update_weights(await self.on_device(self._take_weights, version, ticket))

    async def resume(self) -> None:
        """Wake the engine up. Does nothing while it is awake."""
        if not self._engine.is_awake:
            async with self._exclusive("waking up"):
                await self._wake()

    async def release(self) -> None:
        """Put the engine to sleep. Does nothing while it is asleep."""
        async with self._exclusive("falling asleep"):
            if self._engine.is_awake:
                await self._engine.release()

    async def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """Return the log-probs of each token but the first, by this engine with its weights, at temperature 1."""
        async with self._exclusive("log-probs"):
            return await self._engine.log_probs(sequences)

    async def where(self) -> Place:
        return Place.here()

    async def close(self) -> None:
        if self._conversations is not None:
            await self._conversations.close()
        await self._engine.close()

    def _exclusive(self, purpose: str) -> AbstractAsyncContextManager[None]:
        return self._engine.exclusive(purpose, abort=self._is_partial, timeout_s=self._exclusive_s)

    async def _wake(self) -> None:
        if not self._has_started and self._conversations is not None:
            await self._conversations.start()
        self._has_started = True
        if not self._engine.is_awake:
            await self._engine.resume()

    def _take_weights(self, version: int, ticket: Ticket | None) -> WeightUpdate:
        if ticket is not None:
            update = self._receiver.receive(ticket)
        else:
            assert self._weights_from is not None, "a ticket is needed where there is no sibling"
            update = cast(WeightSource, self.siblings[self._weights_from]).publish(version)
        return update if self._merger is None else self._merger.merged(update)


def with_trajectories(group: PromptGroup, trajectories: list[Trajectory]) -> PromptGroup:
    """Return a group with some of the trajectories."""
    params = replace(group.params, num_answers=len(trajectories))
    return replace(group, params=params, trajectories=trajectories)


async def _joined(lists: AsyncGenerator[list[T], None], num_left: int) -> AsyncGenerator[list[T], None]:
    """Join lists that follow each other closely. The last of `num_left` items leave at once."""
    loop = asyncio.get_running_loop()

    async def following() -> list[T] | None:
        return await anext(lists, None)

    async with aclosing(lists):
        awaited = asyncio.create_task(following())
        try:
            while (items := await awaited) is not None:
                items, ends_at = list(items), loop.time() + _LINGER_S
                awaited = asyncio.create_task(following())
                while len(items) < num_left:
                    await asyncio.wait([awaited], timeout=max(0.0, ends_at - loop.time()))
                    if not awaited.done() or awaited.exception() is not None or (more := awaited.result()) is None:
                        break
                    items += more
                    awaited = asyncio.create_task(following())
                num_left -= len(items)
                yield items
        finally:
            awaited.cancel()
            await asyncio.gather(awaited, return_exceptions=True)


def _drop_aborted(groups: Sequence[PromptGroup]) -> None:
    for group in groups:
        for trajectory in group.trajectories:
            if not trajectory.is_finished:
                trajectory.samples, trajectory.counts = [], {}


def _to_send(parts: Sequence[PromptGroup]) -> list[PromptGroup]:
    """Join what belongs to one group, with the routes of finished samples coded, which the trainer alone reads."""
    by_group: dict[str, list[PromptGroup]] = {}
    for part in parts:
        by_group.setdefault(part.id, []).append(part)
    groups = [with_trajectories(own[0], [part.trajectories[0] for part in own]) for own in by_group.values()]
    routed = [
        (sample, sample.routes)
        for group in groups
        for sample in group.samples
        if isinstance(sample.routes, RoutedExperts) and sample.finish_reason != "abort"
    ]
    for (sample, _), code in zip(routed, coded([routes for _, routes in routed]), strict=True):
        sample.routes = code
    return groups
