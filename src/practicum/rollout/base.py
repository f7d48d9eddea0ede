"""What every engine does: generate answers, take new weights, give its memory back and have it again.

    generate, collect_samples ─▶ stream_samples ─▶ submit: all at once ─▶ sequence.done, as each ends ─▶ samples, groups
    exclusive()   nothing is generated in the block: what is begun is finished first, or aborted and continued after it
    generating()  whoever wants the engine exclusively waits for the whole block: for conversations of several turns

Contract, tested for every engine by tests/rollout/contract.py:
- Token in, token out. The answers to a prompt depend on the prompt, its sampling parameters, seed, the answer's number
  and the weights; never on what else is in the batch (up to floating-point order). Engines that draw by themselves
  (vllm, openai) repeat themselves for the same seed, but need not agree with the others.
- `log_probs` are those of the drawn tokens under `softmax(logits / temperature)`, before top-k and top-p; with
  temperature 0 the largest logit wins and log-probs are those of temperature 1.
- An answer ends with `stop` after an end-of-text token, one of `stop_token_ids`, or the token that completes one of the
  texts in `stop`, all of which stay in it; with `length` after `max_new_tokens`; with `abort` where it was aborted. One
  that continues an aborted sample ends as if it had never been aborted.
- `release` gives memory back; after `resume` the engine writes as before. All else needs a resumed engine.
- After `update_weights` every new token carries the new version. Like `release` it is called within `exclusive()`.
- Bad requests (too long for the model, say) raise `RolloutError` before anything is written.
- A failure of the engine fails the sequences that it had begun; those that wait are written, and it lives on.

All methods are called on one event loop, so none needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable
from collections.abc import Sequence as Items
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from practicum.controller.loop import run_sync
from practicum.rollout.engine.sequence import Request, Sequence
from practicum.types import PromptGroup, Sample, Trajectory
from practicum.weights import WeightUpdate

_LET_GO_TIMEOUT_S = 60.0
_MOST_NAMED = 5  # prompts in a message

log = logging.getLogger("practicum.rollout")


class BaseRollout(ABC):
    eos_ids: Items[int] = ()
    """The tokens that end a text."""
    takes_adapters: bool = False
    """Whether `update_weights` takes adapters that come alone, where it was made with them; or weights only."""
    is_awake: bool = False
    """Whether it has its memory; `resume` and `release` set it when they succeed."""
    wait_timeout_s: float = 1800.0
    """The deadline of waits for the engine to be free."""

    def __init__(self) -> None:
        self._open: dict[Sequence, None] = {}  # to be written, in the order of their coming
        self._under_way: dict[Sequence, None] = {}  # those that the engine has
        self._num_generating = 0
        self._turns: deque[_Turn] = deque()  # of those who want the engine exclusively
        self._watchers: list[asyncio.Future[None]] = []

    # What each engine does

    @abstractmethod
    def check(self, request: Request) -> None:
        """Raise `RolloutError` where it cannot be answered by this engine, whatever else it has to do."""

    @abstractmethod
    def submit(self, sequences: list[Sequence]) -> None:
        """Begin with all of them at once; return at once. They have been checked, and have a future `done`.

        Its result is the sample; an exception where the engine fails.
        """

    @abstractmethod
    def abort_submitted(self, sequences: list[Sequence]) -> None:
        """End submitted sequences where they are; return at once. Their samples have the finish reason "abort"."""

    def recall(self) -> None:  # noqa: B027
        """Abort the submitted sequences that are not begun, if any wait in the engine; return at once."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def release(self) -> None: ...

    @abstractmethod
    async def update_weights(self, update: WeightUpdate) -> None: ...

    @abstractmethod
    async def log_probs(self, sequences: Items[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """Return those of each token but the first given the ones before it, at temperature 1: what a fingerprint
        compares."""

    @property
    @abstractmethod
    def num_running(self) -> int:
        """The number of answers that are being written."""

    @property
    def num_waiting(self) -> int:
        """The number of answers that are not begun yet."""
        return max(0, len(self._open) - self.num_running)

    async def close(self) -> None:  # noqa: B027
        """Give back what outlives the object, such as a server it has started."""

    # What all share

    async def collect_samples(self, sequences: Items[Sequence]) -> list[Sample]:
        """Return the samples of all sequences, in their order. Cancelling it aborts them."""
        for sequence in sequences:
            self.check(sequence)
        samples: dict[Sequence, Sample] = {}
        async with aclosing(self.stream_samples(sequences)) as batches:
            async for some in batches:
                samples.update(some)
        return [samples[sequence] for sequence in sequences]

    def generate(self, groups: Items[PromptGroup]) -> AsyncGenerator[list[PromptGroup], None]:
        """Generate the trajectories that the groups lack; yield groups as they are finished. Leaving early aborts the
        rest. A group of which something was aborted comes too, with what there is. The call itself checks the groups.
        """
        for group in groups:
            self.check(group)
        return self._generate(groups)

    async def _generate(self, groups: Items[PromptGroup]) -> AsyncGenerator[list[PromptGroup], None]:
        owners: dict[Sequence, tuple[PromptGroup, Trajectory]] = {
            Sequence.of(group, trajectory): (group, trajectory)
            for group in groups
            for trajectory in group.trajectories
            if not trajectory.is_finished
        }
        num_open: dict[PromptGroup, int] = dict.fromkeys(groups, 0)
        for group, _ in owners.values():
            num_open[group] += 1
        if finished := [group for group, num in num_open.items() if not num]:
            yield finished
        async with aclosing(self.stream_samples(list(owners))) as batches:
            async for some in batches:
                finished = []
                for sequence, sample in some:
                    group, trajectory = owners[sequence]
                    trajectory.add(sample)
                    num_open[group] -= 1
                    if not num_open[group]:
                        finished.append(group)
                if finished:
                    yield finished

    def generate_all(self, groups: Items[PromptGroup]) -> list[PromptGroup]:
        """Generate all groups and return them in their order, for callers without an event loop."""

        async def generated() -> None:
            async for _ in self.generate(groups):
                pass

        run_sync(generated())
        return list(groups)

    def abort(self, sequences: Iterable[Sequence] | None = None) -> None:
        """End sequences where they are, all of them by default. Does nothing where they have ended."""
        chosen = [sequence for sequence in (self._open if sequences is None else sequences) if sequence in self._open]
        for sequence in chosen:
            sequence.is_aborted = True
        if submitted := [sequence for sequence in chosen if sequence in self._under_way]:
            self.abort_submitted(submitted)
        self._notify()

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """Keep those who want the engine exclusively waiting until the end of the block; wait for them to begin it.

        It is not entered twice by one task.
        """
        async with self._in_time():
            await self._until(lambda: not self._turns)
        self._num_generating += 1
        try:
            yield
        finally:
            self._num_generating -= 1
            self._notify()

    @asynccontextmanager
    async def exclusive(
        self, purpose: str = "another call", *, abort: bool = False, timeout_s: float | None = None
    ) -> AsyncIterator[None]:
        """Keep everybody from generating in the block, which begins when nothing is under way.

        Sequences and `generating()` blocks that are begun are finished first; others wait until after the block. With
        `abort` all sequences are aborted instead, and continued after it (partial rollout). The order of several such
        calls is kept. `purpose` is named to those who wait for it in vain.
        """
        turn = _Turn(purpose, abort)
        self._turns.append(turn)
        try:
            async with self._in_time(timeout_s, turn):
                await self._until(lambda: self._turns[0] is turn and self._holds_sequences)
                if abort and self._under_way:
                    self.abort_submitted(list(self._under_way))
                elif self._under_way:
                    self.recall()
                await self._until(lambda: not self._under_way)
            yield
        finally:
            self._turns.remove(turn)
            self._notify()

    async def stream_samples(self, sequences: Items[Sequence]) -> AsyncGenerator[list[tuple[Sequence, Sample]], None]:
        """Submit sequences that have been checked, all at once; yield them with their samples as they end.

        What was aborted or recalled for an exclusive block is submitted again after it. Those that are left when it is
        closed are aborted, and let go of by the engine. Where the engine fails, what has ended before is yielded first.
        """
        came: list[Sequence] = []
        arrived = asyncio.Event()

        def hear(sequence: Sequence) -> None:
            self._under_way.pop(sequence, None)
            if not sequence.done.cancelled():
                sequence.done.exception()  # so that asyncio does not report it where no caller is left
            came.append(sequence)
            arrived.set()
            self._notify()

        held = list(sequences)  # not submitted
        order = {sequence: number for number, sequence in enumerate(sequences)}

        def may_submit() -> bool:
            return not self._holds_sequences or any(one.is_aborted for one in held)

        def is_ready() -> bool:
            return bool(came) or may_submit()

        self._open.update(dict.fromkeys(held))
        try:
            while any(sequence in self._open for sequence in sequences):
                if held:
                    async with self._in_time():
                        await self._until(is_ready)
                elif not came:
                    await arrived.wait()  # the deadline is the caller's: the manager's `silence_s`, a client's own
                arrived.clear()
                if held and may_submit():
                    if aborted := [one for one in held if one.is_aborted]:
                        held = [one for one in held if not one.is_aborted]
                        for one in aborted:
                            del self._open[one]
                        yield [(one, one.to_sample(None, 0, "abort")) for one in aborted]  # as it was submitted
                        continue
                    for sequence in held:
                        sequence.done = asyncio.get_running_loop().create_future()
                        sequence.done.add_done_callback(lambda _, sequence=sequence: hear(sequence))  # type: ignore[misc]
                    self.submit(held)
                    self._under_way.update(dict.fromkeys(held))
                    held = []
                ended = []
                failure: BaseException | None = None
                for sequence in came:
                    if (failure := sequence.done.exception()) is not None:
                        break
                    sample = sequence.done.result()
                    if sample.finish_reason == "abort" and not sequence.is_aborted:  # for an exclusive block
                        sequence.continue_from(sample if len(sample.token_ids) else None)
                        held.append(sequence)
                    else:
                        del self._open[sequence]
                        ended.append((sequence, sample))
                came.clear()
                held.sort(key=order.__getitem__)
                if ended:
                    yield ended
                if failure is not None:
                    raise failure
        finally:
            left = [sequence for sequence in sequences if sequence in self._under_way]
            self.abort(left)
            for sequence in sequences:
                self._open.pop(sequence, None)
            if left:
                await asyncio.wait([sequence.done for sequence in left], timeout=_LET_GO_TIMEOUT_S)
                if late := [sequence for sequence in left if not sequence.done.done()]:
                    # Logged, not raised: that would replace what the caller was left by, such as its cancellation.
                    log.error("the engine has not let go of %s within %g s", _described(late), _LET_GO_TIMEOUT_S)

    @property
    def _holds_sequences(self) -> bool:
        """Tell whether nothing may be submitted. Turns of a conversation may, while others only wait for its end."""
        return bool(self._turns) and (self._turns[0].aborts or not self._num_generating)

    @asynccontextmanager
    async def _in_time(self, timeout_s: float | None = None, own: _Turn | None = None) -> AsyncIterator[None]:
        """Raise `TimeoutError` with what keeps the engine busy where the wait in the block takes too long."""
        timeout_s = self.wait_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            why = f"the engine was not free within {timeout_s:g} s"
            if self._turns and self._turns[0] is not own:
                why += f"; it is taken for {self._turns[0].purpose}"
            elif self._num_generating:
                why += f"; {self._num_generating} calls are generating"
            if self._under_way:
                why += f"; it has {_described(self._under_way)}"
            raise TimeoutError(why) from None

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watchers.append(watcher)
            await watcher

    def _notify(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)


def _described(sequences: Collection[Sequence]) -> str:
    first = [*{sequence.prompt.id: None for sequence in sequences}][:_MOST_NAMED]
    return f"{len(sequences)} unfinished answers, to prompt {', '.join(first)}"


@dataclass(slots=True, eq=False)
class _Turn:
    """The turn of a caller who wants the engine exclusively."""

    purpose: str
    aborts: bool
