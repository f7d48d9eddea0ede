"""The loop of an engine in this process: one thread that writes, one queue of commands to it, one stream of results.

event loop                        the engine's thread
submit, abort, resume, … ──────▶ queue ─▶ between two steps
                                    step: schedule ─▶ run ─▶ finish
futures, on_tokens ◀── one call_soon_threadsafe for all that a step has brought
"""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from practicum.controller.loop import for_future
from practicum.errors import RolloutError
from practicum.rollout.base import BaseRollout
from practicum.rollout.engine.model import EngineModel
from practicum.rollout.engine.sequence import Request, Sequence
from practicum.types import FinishReason, Sample
from practicum.weights import WeightUpdate

T = TypeVar("T")
_Command = Callable[[], None]
_Result = tuple[Sequence, "asyncio.Future[Sample]", "Sample | BaseException | tuple[list[int], list[float]]"]


class LocalRollout(BaseRollout):
    """An engine that writes with a model in this process, on a thread of its own: it ends with the object.

    The model is opened there too. Each thread that computes has OpenMP threads of its own, and where there are more of
    them than cores, as after a trial of the model in another thread, each step waits for them to be woken.
    """

    def __init__(self, open_model: Callable[[], EngineModel]) -> None:
        super().__init__()
        self._is_closed = False
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._results: list[_Result] = []
        self._unanswered: dict[Sequence, None] = {}  # that the thread was given and has neither sample nor error for
        self._refusals: dict[Sequence, Exception] = {}  # of `on_tokens`, until the engine has let go of the sequence
        opened: Future[EngineModel] = Future()
        weakref.finalize(self, self._commands.put, None)
        work = weakref.ref(self), self._commands, open_model, opened
        threading.Thread(target=_run, args=work, name="practicum-engine", daemon=True).start()
        self.model = opened.result()  # the start of the worker has a deadline
        self.eos_ids = self.model.eos_ids

    # On the event loop

    def check(self, request: Request) -> None:
        self.model.check(request)

    def submit(self, sequences: list[Sequence]) -> None:
        if self._is_closed:
            raise RolloutError("the engine has been closed")
        assert self.is_awake, "generate before resume"
        self._commands.put(partial(self._begin, sequences))

    def abort_submitted(self, sequences: list[Sequence]) -> None:
        self._commands.put(partial(self._abort, sequences))

    def recall(self) -> None:
        self._commands.put(lambda: self._abort([one for one in self._unanswered if not one.is_begun]))

    async def resume(self) -> None:
        if not self.is_awake:
            await self._call(self._wake)
            self.is_awake = True

    async def release(self) -> None:
        await self._call(self._sleep)
        self.is_awake = False

    async def update_weights(self, update: WeightUpdate) -> None:
        await self._call(partial(self._load, update))

    async def log_probs(self, sequences: Items[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        assert self.is_awake, "log_probs before resume"
        return await self._call(partial(self.model.log_probs, sequences))

    async def close(self) -> None:
        """Give all memory back. What is under way fails."""
        if not self._is_closed:
            shut = self._call(self._shut)
            self._is_closed, self.is_awake = True, False
            await shut
            self._commands.put(None)

    def _call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run it in the engine's thread, between two steps. Whoever waits for it has a deadline for the whole call."""
        if self._is_closed:
            raise RolloutError("the engine has been closed")
        result: Future[T] = Future()
        result.set_running_or_notify_cancel()  # it is done even if nobody waits for it any more

        def command() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(for_future(error))

        self._commands.put(command)
        return asyncio.wrap_future(result)

    # In the engine's thread

    def _work(self, command: _Command) -> None:
        """Do what a command asks for, and write until there is nothing to write."""
        try:
            command()
        except Exception as error:  # of any kind: it fails what was begun, and the engine lives on
            self._recover(error)
        self._deliver()
        while self._has_work:
            try:
                self._poll()
                self._step()
            except Exception as error:
                self._recover(error)
            self._deliver()

    def _recover(self, error: Exception) -> None:
        """Fail what was begun, and what the error came upon half way out; what waits, waits on."""
        self._reset()
        waiting = self._remove(list(self._unanswered))
        self._add(waiting)
        kept = set(waiting)
        self._fail([sequence for sequence in self._unanswered if sequence not in kept], error)

    def _poll(self) -> None:
        """Do what was asked for since the last step."""
        while not self._commands.empty():
            command = self._commands.get()
            if command is None:  # closed: for the thread to see when it has nothing to do
                self._commands.put(None)
                return
            command()

    def _begin(self, sequences: list[Sequence]) -> None:
        self._unanswered.update(dict.fromkeys(sequences))
        for sequence in sequences:
            sequence.begin(self.eos_ids, self.model.tokenizer)
        self._add(sequences)

    def _abort(self, sequences: list[Sequence]) -> None:
        try:
            stopped = self._remove(sequences)
        except Exception as error:
            self._recover(error)
            stopped = self._remove(sequences)  # those that waited
        self._finish(stopped, "abort")

    def _wake(self) -> None:
        self.model.wake()

    def _sleep(self) -> None:
        assert not self._has_work, "release while answers are written"
        self.model.sleep()

    def _load(self, update: WeightUpdate) -> None:
        assert not self._has_work, "update_weights while answers are written"
        self.model.load_weights(update)

    def _shut(self) -> None:
        self._reset()
        self._remove(list(self._unanswered))
        self._fail(list(self._unanswered), RolloutError("the engine has been closed"))
        self.model.close()
        self._deliver()

    @abstractmethod
    def _add(self, sequences: list[Sequence]) -> None:
        """Queue sequences that are to be begun."""

    @abstractmethod
    def _remove(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Stop writing them where they are; return those that were written or waiting."""

    @abstractmethod
    def _step(self) -> None:
        """Bring everything under way a token or more forward."""

    @abstractmethod
    def _reset(self) -> None:
        """Forget what was begun, after a failure; what waits, waits on."""

    @property
    @abstractmethod
    def _has_work(self) -> bool: ...

    def _push(self, sequence: Sequence, token: int, log_prob: float) -> bool:
        """Append a token; return whether the answer ends with it."""
        ends = sequence.push(token, log_prob) is not None
        if sequence.on_tokens is not None:
            self._results.append((sequence, sequence.done, ([token], [log_prob])))
        return ends

    def _finish(self, sequences: Iterable[Sequence], reason: FinishReason | None = None) -> None:
        shape = self.model.router_shape
        if shape is not None and (sequences := list(sequences)):
            self.model.gather_routes()
        for sequence in sequences:
            routes = None if shape is None else sequence.routed_experts(shape)
            sample = sequence.to_sample(self.model.tokenizer, self.model.version, reason, routes)
            sequence.finish_reason = sample.finish_reason
            self._answer(sequence, sample)

    def _fail(self, sequences: Iterable[Sequence], error: BaseException) -> None:
        for sequence in sequences:
            self._answer(sequence, error)

    def _answer(self, sequence: Sequence, result: Sample | BaseException) -> None:
        self._unanswered.pop(sequence, None)
        self._results.append((sequence, sequence.done, result))

    def _deliver(self) -> None:
        """Send results to the event loop."""
        if not self._results:
            return
        results, self._results = self._results, []
        loops = {done.get_loop() for _, done, _ in results}
        for loop in loops:
            own = results if len(loops) == 1 else [result for result in results if result[1].get_loop() is loop]
            _call_soon(loop, self._resolve, own)

    # On the event loop again

    def _resolve(self, results: list[_Result]) -> None:
        for sequence, done, result in results:
            if isinstance(result, tuple):
                if done.done() or sequence in self._refusals:
                    continue
                assert sequence.on_tokens is not None
                try:
                    sequence.on_tokens(*result)
                except Exception as error:  # the caller's own: it fails this sequence alone, written no more
                    self._refusals[sequence] = error
                    self.abort_submitted([sequence])
                continue
            result = self._refusals.pop(sequence, result)
            if done.done():
                continue
            if isinstance(result, Sample):
                done.set_result(result)
            else:
                done.set_exception(for_future(result))


def _run(
    engine: weakref.ref[LocalRollout],
    commands: queue.SimpleQueue[_Command | None],
    open_model: Callable[[], EngineModel],
    opened: Future[EngineModel],
) -> None:
    """Run the engine's thread. It holds no reference to the engine while there is nothing to do."""
    try:
        opened.set_result(open_model())
    except BaseException as error:
        opened.set_exception(error)
        return
    del open_model, opened
    while (command := commands.get()) is not None:
        own = engine()
        if own is None:
            return
        try:
            own._work(command)
        except BaseException as error:  # it could not recover: nobody is to wait for what may never come
            left = list(own._unanswered)
            own._fail(left, error)
            own._deliver()
            with suppress(Exception):  # the reason has been told; what comes next fails with its own
                own._reset()
                own._remove(left)
        del own, command


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise  # otherwise no caller is left
