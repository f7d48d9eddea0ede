"""A rollout worker: holds one engine, writes what it is handed, and hands out answers as they come.

    begin (requests) ─▶ the engine's thread ─▶ collect: what has been finished since the last time
    update_weights   ─▶ between two answers, from the trainer beside it or by a channel

One call is served at a time, and none takes longer than it is told to wait: the engine writes on behind it.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from practicum.config import AgentConfig
from practicum.controller import Worker
from practicum.errors import ConversationError, RolloutError, TrainingError
from practicum.models import DTYPES, load_tokenizer, resolve_device
from practicum.replay import coded
from practicum.rollout.agent.driver import ConversationDriver
from practicum.rollout.engines import ENGINES, EngineSettings, make_engine
from practicum.rollout.merging import AdapterMerger
from practicum.rollout.runner import EngineRunner, Order
from practicum.types import PackedSamples, RolloutRequest, RoutedExperts, Sample
from practicum.weights import Place, WeightReceiver, WeightSource, channel_timeout_s
from practicum.weights import Ticket as WeightTicket

__all__ = ["ENGINES", "Batch", "RolloutWorker", "Written"]

# An answer is often followed by others: so long they are waited for, to be handed out together.
_LINGER_S = 0.1
_ABORT_S = 30.0
_FEW = 128  # samples


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests of one round with their places in it."""

    round: int
    places: Sequence[int]
    requests: Sequence[RolloutRequest]

    def __reduce__(self) -> Any:
        # As one piece: Ray has its own work with every array.
        return _whole_batch, (self.round, self.places, pickle.dumps(list(self.requests), protocol=5))


def _whole_batch(number: int, places: Sequence[int], packed: bytes) -> Batch:
    return Batch(number, places, pickle.loads(packed))


@dataclass(frozen=True, slots=True)
class Written:
    """What a worker has finished: the places of requests, the numbers of their answers, the answers."""

    round: int
    places: Sequence[int]
    answers: Sequence[int]
    samples: Sequence[Sample]
    num_left: int
    """Answers that are still to come."""
    failure: str = ""
    """Why the engine gave up; what was left is lost."""

    def __reduce__(self) -> Any:
        packed: PackedSamples | bytes | None = _packed(self.samples) if self.samples else None
        if len(self.samples) < _FEW:
            packed = pickle.dumps(packed, protocol=5)
        return _whole_written, (self.round, self.places, self.answers, packed, self.num_left, self.failure)


def _packed(samples: Sequence[Sample]) -> PackedSamples:
    """With routes coded, which the trainer alone reads."""
    there = [sample.routes for sample in samples if sample.routes is not None]
    codes = iter(coded([one for one in there if isinstance(one, RoutedExperts)]))
    routes = [next(codes) if isinstance(one, RoutedExperts) else one for one in (s.routes for s in samples)]
    return PackedSamples.of(samples, routes)


def _whole_written(
    number: int,
    places: Sequence[int],
    answers: Sequence[int],
    packed: PackedSamples | bytes | None,
    num_left: int,
    failure: str,
) -> Written:
    if isinstance(packed, bytes):
        packed = pickle.loads(packed)
    assert not isinstance(packed, bytes)
    return Written(number, places, answers, packed.unpack() if packed else [], num_left, failure)


class RolloutWorker(Worker):
    """One engine. In hybrid placement it is fused with the worker under the role `weights_from` and takes its weights.

    `agent` lets the model talk with tools or an environment between its turns. `threads` is how many the engine
    computes with; None leaves it as it is in this process. With `is_partial` answers are broken off for new weights and
    gone on with under them. It is asleep until `resume`.
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
        self._receiver = WeightReceiver(channel_timeout_s(timeout_s), is_whole=settings.adapters is None)
        self._timeout_s = timeout_s
        self._news = threading.Condition()
        self._round = -1
        self._finished: list[tuple[int, int, Sample]] = []
        self._num_left = 0
        self._failure: Exception | None = None
        self._is_awake = False
        if threads is not None:
            torch.set_num_threads(threads)
        self._engine = make_engine(settings)
        self._merger: AdapterMerger | None = None
        if settings.adapters is not None and not self._engine.takes_adapters:
            device, dtype = resolve_device(settings.device), DTYPES[settings.dtype]
            self._merger = AdapterMerger(settings.adapters, device, dtype)
        runner = EngineRunner(self._engine, is_partial=is_partial)
        self._desk: EngineRunner | ConversationDriver = runner
        try:
            if agent is not None and agent.is_set:
                tokenizer = load_tokenizer(settings.model_path)
                self._desk = ConversationDriver(runner, tokenizer, agent, is_partial=is_partial)
            # How many threads torch computes with is a thread's own matter: the engine's is to do as this one.
            runner.between(lambda: torch.set_num_threads(torch.get_num_threads()), timeout_s)
        except BaseException:
            runner.close()
            self._engine.close()
            raise

    # Writing

    def begin(self, batch: Batch, wait_s: float) -> Written:
        """Take requests on, and hand out what is finished within `wait_s`."""
        if batch.round != self._round:
            self.abort()
            self._round = batch.round
        if batch.requests:
            orders = [self._order(place, request) for place, request in zip(batch.places, batch.requests, strict=True)]
            num_answers = sum(request.params.num_answers for request in batch.requests)
            with self._news:
                self._num_left += num_answers
            try:
                self._desk.submit(*orders)
            except RolloutError:
                with self._news:
                    self._num_left -= num_answers
                raise
        return self.collect(wait_s)

    def collect(self, wait_s: float) -> Written:
        """What has been finished since the last time; waits up to `wait_s` for the first of it, and a little for more.

        A failure of the engine is told when all that was finished before it has been handed out.
        """
        deadline = time.monotonic() + wait_s
        with self._news:
            self._news.wait_for(lambda: self._finished or not self._num_left or self._failure, wait_s)
            linger_s = min(_LINGER_S, deadline - time.monotonic())
            self._news.wait_for(lambda: not self._num_left or self._failure, max(0.0, linger_s))
            finished, self._finished = self._finished, []
            number, error = self._round, None
            if self._failure is not None and not finished:
                error, self._failure, self._num_left, self._round = self._failure, None, 0, -1
            places, answers, samples = zip(*finished, strict=True) if finished else ((), (), ())
            num_left = self._num_left
        if error is not None:
            self._desk.abort()  # what it had not begun
        if isinstance(error, TrainingError | ConversationError):  # not of this engine: nobody could do better
            raise error
        failure = "" if error is None else f"{type(error).__name__}: {error}"
        return Written(number, places, answers, samples, num_left, failure)

    def abort(self) -> None:
        """Break off what is left of the round; its answers are not wanted any more."""
        self._desk.abort()
        with self._news:
            ended = self._news.wait_for(lambda: not self._num_left or self._failure, _ABORT_S)
            num_left, self._round, self._finished = self._num_left, -1, []
            self._num_left, self._failure = 0, None
        if not ended:
            raise TimeoutError(f"the engine did not break off {num_left} answers within {_ABORT_S:g} s")

    def take_counts(self) -> dict[str, int]:
        """Of conversations, since the last time; none where the model talks with nobody."""
        return self._desk.take_counts() if isinstance(self._desk, ConversationDriver) else {}

    # Weights, sleep

    def update_weights(self, version: int, ticket: WeightTicket | None = None) -> None:
        """Take the weights that the ticket is for; without one those of the sibling, as they are now, for which all
        ranks must be called. Answers under way are finished first, or broken off and gone on with. It is awake after.
        """
        self._desk.between(partial(self._take_weights, version, ticket), self._timeout_s)

    def resume(self) -> None:
        """Does nothing while it is awake."""
        self._desk.between(self._wake, self._timeout_s)

    def release(self) -> None:
        """Does nothing while it is asleep."""
        self._desk.between(self._fall_asleep, self._timeout_s)

    def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """Of each token but the first, by this engine with its weights, at temperature 1."""
        return self._desk.between(lambda: self._engine.log_probs(sequences), self._timeout_s)

    def where(self) -> Place:
        return Place.here()

    def close(self) -> None:
        self._desk.close()
        self._receiver.close()
        self._engine.close()

    # In the engine's thread

    def _take_weights(self, version: int, ticket: WeightTicket | None) -> None:
        self._wake()
        if ticket is not None:
            update = self._receiver.receive(ticket)
        else:
            assert self._weights_from is not None, "a ticket is needed where there is no sibling"
            update = cast(WeightSource, self.siblings[self._weights_from]).publish(version)
        self._engine.update_weights(update if self._merger is None else self._merger.merged(update))

    def _wake(self) -> None:
        if not self._is_awake:
            self._engine.resume()
            self._is_awake = True

    def _fall_asleep(self) -> None:
        if self._is_awake:
            self._engine.release()
            self._is_awake = False

    def _order(self, place: int, request: RolloutRequest) -> Order:
        number = self._round

        def on_sample(answer: int, sample: Sample) -> None:
            with self._news:
                if number == self._round:
                    self._finished.append((place, answer, sample))
                    self._num_left -= 1
                    self._news.notify_all()

        def on_failure(error: Exception) -> None:
            with self._news:
                if number == self._round:
                    self._failure = self._failure or error
                    self._news.notify_all()

        return Order(request, on_sample, on_failure)
