"""Many conversations at once over one engine. Whoever holds an `EngineRunner` can hold a `ConversationDriver` instead.

    submit(order) ─▶ a conversation for each answer, in an event loop of its own
                       turn ─▶ EngineRunner ─▶ tools or environment ─▶ turn ─▶ ... ─▶ on_sample, one Sample each
    between(function): no conversation begins, those under way are finished, then the function has the engine to itself

The first turn of all answers to a prompt is one request, so that an engine can read the prompt once for all of them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from practicum.config import AgentConfig
from practicum.errors import ConversationError, RolloutError
from practicum.processes import JobFailed
from practicum.rollout.agent.async_engine import AsyncEngine, Writing
from practicum.rollout.agent.conversation import Conversation, EngineFailed, TurnLimits
from practicum.rollout.agent.partners import Partner, partner_of
from practicum.rollout.agent.turns import TurnTemplate
from practicum.rollout.base import BaseRollout
from practicum.rollout.runner import EngineRunner, Order
from practicum.rollout.tokenizer import check_tokenizer
from practicum.types import RolloutRequest

T = TypeVar("T")
log = logging.getLogger("practicum.rollout")
_START_S = 300.0
_STOP_S = 30.0


@dataclass(slots=True, eq=False)
class _Running:
    """An order under way."""

    order: Order
    conversations: list[Conversation] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    has_failed: bool = False


class ConversationDriver:
    """`submit`, `cancel`, `abort`, `between` and `close` are those of `EngineRunner`, and may be called in any thread.

    An order's samples are whole conversations: see `practicum.types.Sample`. `is_partial`: conversations may go on
    under new weights; otherwise all turns of one are written with the same.
    """

    def __init__(self, runner: EngineRunner, tokenizer: Any, agent: AgentConfig, *, is_partial: bool = False) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._partner: Partner = partner_of(agent)
        self._limits = TurnLimits(agent.max_turns, agent.max_turn_tokens)
        self._is_partial = is_partial
        self._news = threading.Condition()
        self._running: dict[int, _Running] = {}  # by the identity of the order
        self._held: list[Order] = []
        self._num_holding = 0
        self._is_closed = False
        self._counts: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="practicum-conversations", daemon=True)
        self._thread.start()
        try:
            self._in_loop(self._partner.start(), _START_S, "the processes of rollout.agent were not up")
            _check(tokenizer, self._partner)
        except BaseException:
            self._stop_loop()
            raise
        self._template = TurnTemplate(tokenizer, self._partner.schemas)
        self._eos_ids = runner.engine.eos_ids
        self._engine = AsyncEngine(runner)

    @property
    def engine(self) -> BaseRollout:
        return self._runner.engine

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """Of the tools, as a chat template takes them."""
        return [dict(schema) for schema in self._partner.schemas]

    def take_counts(self) -> dict[str, int]:
        """Since the last time: conversations, turns, and calls (or steps of environments) by what came of them."""
        return self._in_loop(self._taken_counts(), _STOP_S, "the loop of conversations did not tell its counts")

    def submit(self, *orders: Order) -> None:
        """Raises `RolloutError` where the engine cannot answer one of them: then none is begun."""
        for order in orders:
            if order.request.written is not None and self._partner.speaks_first:
                raise RolloutError(
                    f"prompt {order.request.prompt.id}: a conversation with an environment cannot be gone on with, "
                    "since what the environment knew is gone. Ask for it anew."
                )
            self._runner.engine.check(order.request)
        with self._news:
            if self._is_closed:
                raise RolloutError("the engine has been closed")
            if self._num_holding:
                self._held += orders
            else:
                self._start(orders)

    @property
    def num_waiting(self) -> int:
        """Turns the engine has not taken up yet."""
        return self._runner.num_waiting

    @property
    def num_running(self) -> int:
        """Requests with conversations under way."""
        with self._news:
            return len(self._running)

    def cancel(self, order: Order) -> None:
        """What there is of its answers is told soon, with finish reason `abort`."""
        with self._news:
            order.is_cancelled = True
            if id(order) in self._running:
                self._loop.call_soon_threadsafe(self._cancel, self._running[id(order)])
            elif order in self._held:
                self._held.remove(order)
                self._start([order])  # nothing is written for it, only told

    def abort(self) -> None:
        """Cancel everything."""
        with self._news:
            orders = [*(running.order for running in self._running.values()), *self._held]
        for order in orders:
            self.cancel(order)

    def between(self, function: Callable[[], T], timeout_s: float, *, break_off: bool | None = None) -> T:
        """Run a function in the engine's thread while nothing is written.

        `break_off` says whether turns under way are broken off and conversations gone on with after it; None: as the
        driver is set up. Otherwise conversations under way are finished first.
        """
        if self._is_partial if break_off is None else break_off:
            return self._runner.between(function, timeout_s, break_off=True)
        deadline = time.monotonic() + timeout_s
        with self._news:
            self._num_holding += 1
        try:
            with self._news:
                if not self._news.wait_for(lambda: not self._running, timeout_s):
                    raise TimeoutError(
                        f"{len(self._running)} requests with conversations were not finished within {timeout_s:g} s"
                    )
            return self._runner.between(function, max(0.0, deadline - time.monotonic()), break_off=False)
        finally:
            with self._news:
                self._num_holding -= 1
                if not self._num_holding:
                    held, self._held = self._held, []
                    self._start(held)

    def close(self) -> None:
        """Break everything off, end the processes of tools, close the runner."""
        with self._news:
            if self._is_closed:
                return
            self._is_closed = True
        self.abort()
        with self._news:
            self._news.wait_for(lambda: not self._running, _STOP_S)
        self._runner.close()
        self._in_loop(self._partner.close(), _STOP_S, "the processes of rollout.agent had not ended")
        self._stop_loop()

    # In any thread, with the lock

    def _start(self, orders: Sequence[Order]) -> None:
        begun = [_Running(order) for order in orders]
        self._running.update({id(running.order): running for running in begun})
        self._loop.call_soon_threadsafe(self._begin, begun)

    # In the event loop

    def _begin(self, begun: Sequence[_Running]) -> None:
        openings = {id(running): self._opening(running.order) for running in begun}
        asked = [(request, running) for running in begun if (request := openings[id(running)]) is not None]
        try:
            writings = self._engine.begin_all([(request, running.order.on_tokens) for request, running in asked])
        except Exception as error:  # told to who asked, as what an engine raises is
            for running in begun:
                self._fail(running, error)
                self._finished(running, None)
            return
        first = {id(running): writing for (_, running), writing in zip(asked, writings, strict=True)}
        for running in begun:
            self._converse(running, first.get(id(running)))

    def _opening(self, order: Order) -> RolloutRequest | None:
        """The first turn of all its answers; None where each is begun by itself."""
        request = _in_session(order.request)
        if order.is_cancelled or request.written is not None or self._partner.speaks_first:
            return None
        most = self._limits.of_turn(request.params.max_new_tokens)
        return replace(request, params=replace(request.params, max_new_tokens=most))

    def _converse(self, running: _Running, first: Writing | None) -> None:
        for answer in range(running.order.request.params.num_answers):
            conversation = self._conversation(running.order, answer, first)
            running.conversations.append(conversation)
            task = self._loop.create_task(self._run(running, answer, conversation))
            running.tasks.add(task)
            task.add_done_callback(lambda task: self._finished(running, task))
        if running.order.is_cancelled:
            self._cancel(running)

    def _conversation(self, order: Order, answer: int, first: Writing | None) -> Conversation:
        request = _in_session(order.request)
        params, number = replace(request.params, num_answers=1), request.first_answer + answer
        own = replace(request, params=params, first_answer=number)
        told = order.on_tokens
        return Conversation(
            own,
            talk=self._partner.talk(),
            template=self._template,
            tokenizer=self._tokenizer,
            eos_ids=self._eos_ids,
            limits=self._limits,
            begin=lambda turn: self._engine.begin(turn, told and (lambda _, ids, probs: told(answer, ids, probs))),
            first=None if first is None else (first, first.answers[answer]),
            on_said=lambda ids: told(answer, ids, [float("nan")] * len(ids)) if told else None,
        )

    async def _run(self, running: _Running, answer: int, conversation: Conversation) -> None:
        try:
            sample = await conversation.run()
            self._counts["conversations"] += 1
            self._counts["turns"] += conversation.num_turns
            if not running.has_failed:
                running.order.on_sample(answer, sample)
        except EngineFailed as failure:
            assert isinstance(failure.__cause__, Exception)
            self._fail(running, failure.__cause__)
        except RolloutError as error:
            is_ours = isinstance(error.__cause__, JobFailed) and error.__cause__.kind == "lost"
            self._fail(running, error if is_ours else ConversationError(str(error)))
        except Exception as error:  # ours, or of a chat template: who asked is told, the others go on
            log.exception("a conversation failed")
            what = f"prompt {running.order.request.prompt.id}: its conversation failed: {type(error).__name__}: {error}"
            self._fail(running, ConversationError(what))

    def _fail(self, running: _Running, error: Exception) -> None:
        """Once for each order; what is left of it is broken off and not told."""
        if not running.has_failed:
            running.has_failed = True
            self._cancel(running)
            running.order.on_failure(error)

    def _cancel(self, running: _Running) -> None:
        for conversation in running.conversations:
            conversation.cancel()

    def _finished(self, running: _Running, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            running.tasks.discard(task)
        if not running.tasks:
            with self._news:
                self._running.pop(id(running.order), None)
                self._news.notify_all()

    async def _taken_counts(self) -> dict[str, int]:
        calls = {f"calls_{status}": num for status, num in self._partner.counts.items()}
        taken = {**self._counts, **calls}
        self._counts.clear()
        self._partner.counts.clear()
        return taken

    # The event loop

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _in_loop(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, late: str) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise TimeoutError(f"{late} within {timeout_s:g} s") from None

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)


def _in_session(request: RolloutRequest) -> RolloutRequest:
    """All turns of all answers to a prompt begin with the same tokens: one engine has them at hand."""
    return request if request.session else replace(request, session=f"{request.prompt.id}#{request.seed:x}")


def _check(tokenizer: Any, partner: Partner) -> None:
    """Refuse a chat template that cannot hold the turns. Prompts of plain text need none."""
    if tokenizer.chat_template is None:
        return
    report = check_tokenizer(tokenizer)
    needed = ("turns join", "tool messages") if partner.role == "tool" else ("turns join",)
    if not all(report.holds(name) for name in needed):
        raise RolloutError(f"rollout.agent: the model's chat template cannot hold several turns:\n{report}")
