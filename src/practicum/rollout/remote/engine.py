"""The part that all engines behind a completions server share: requests out, tokens and log-probs in.

    submit ─▶ requests: all new answers to a prompt in one, where the server can number them ─▶ a task each
                 ▲                                          │ tokens as they come; the end is looked for here,
                 └── again, after a failure that may pass ──┤ whatever the server does
                                                            └▶ sequence.done

An answer that fails is asked for again, from its beginning and with its seed, unless its tokens have been streamed.
"""

from __future__ import annotations

import asyncio
import tempfile
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Items
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from practicum.adapters import LoneAdapters, write_adapters
from practicum.controller.loop import for_future
from practicum.errors import RolloutError
from practicum.models import empty_model, eos_ids_of, export_model, load_config, load_tokenizer
from practicum.rollout.base import BaseRollout
from practicum.rollout.engine.sequence import Request, Sequence, check_length
from practicum.rollout.remote.capabilities import Capabilities, TokenReader, extras, has_filters, probe_filters
from practicum.rollout.remote.client import ServerFailure, Transport, chosen_log_probs
from practicum.types import FinishReason, RoutedExperts
from practicum.weights import WeightUpdate
from practicum.weights.disk import VersionFolders

CONTROL_TIMEOUT_S = 600.0  # servers may be slow to load, and to hand memory back
_RETRIES = 3
_PAUSE_S = 0.25


@dataclass(slots=True, eq=False)
class Answer:
    """A sequence that the engine has."""

    sequence: Sequence
    versions: list[int | None] = field(default_factory=list)
    """The version of each token; None where the server has not said yet."""
    is_over: bool = False
    """Whether the server is done with it too."""

    def restart(self) -> None:
        self.sequence.continue_from(self.sequence.written)
        self.versions = []


class RemoteRollout(BaseRollout):
    """An engine whose `eos_ids` end a text, whatever the server believes. New weights pass through `exchange_dir`."""

    takes_adapters = True

    def __init__(
        self,
        client: Transport,
        *,
        model_path: str,
        max_batch: int,
        adapters: LoneAdapters | None = None,
        exchange_dir: str | None = None,
    ) -> None:
        super().__init__()
        self._path = model_path
        self._tokenizer = load_tokenizer(model_path)
        self.eos_ids = eos_ids_of(model_path)
        self._max_batch = max_batch
        self._adapters = adapters
        self._exchange_dir = exchange_dir
        self._client = client
        self._capabilities: Capabilities | None = None
        self._probing: asyncio.Task[bool] | None = None
        self._reader: TokenReader | None = None
        self._reads_routes = False
        self._version = 0
        self._waiting: deque[list[Answer]] = deque()  # requests
        self._tasks: dict[Answer, asyncio.Task[None]] = {}  # of the answers that have been asked for and are open

    # What each engine does

    @abstractmethod
    def _address(self) -> str:
        """Return the address that the next request goes to."""

    @property
    @abstractmethod
    def _name(self) -> str:
        """The name of who answers, for messages."""

    @abstractmethod
    async def _load(self, folder: str, version: int) -> None:
        """Have the weights or adapters in a folder loaded."""

    async def _refresh(self) -> None:
        """Find out which servers are healthy, before one is asked again."""

    def _expects(self, version: int) -> bool:
        """Return whether an answer may come from these weights."""
        return True

    def _routes(self, answer: Answer, choice: Mapping[str, Any]) -> RoutedExperts | None:
        """Return the routes of prompt and answer, where this engine has them."""
        return None

    def _error(self, sequence: Sequence, error: BaseException) -> Exception:
        """Return the error that an answer fails with."""
        if isinstance(error, ServerFailure):
            return RolloutError(f"prompt {sequence.prompt.id}: {error}.").with_traceback(error.__traceback__)
        return error if isinstance(error, Exception) else RuntimeError(repr(error))

    # The contract of engines

    def check(self, request: Request) -> None:
        check_length(request, self._known.max_tokens, self._known.model)
        self._known.check(request.params, self._name)

    def submit(self, sequences: list[Sequence]) -> None:
        assert self.is_awake, "generate before resume"
        requests: list[list[Answer]] = []
        for sequence in sequences:
            sequence.begin(self.eos_ids, self._tokenizer)
            answer = Answer(sequence)
            if requests and self._follows(requests[-1][-1].sequence, sequence):
                requests[-1].append(answer)
            else:
                requests.append([answer])
        self._waiting.extend(requests)
        self._admit()

    def abort_submitted(self, sequences: list[Sequence]) -> None:
        aborted = set(sequences)
        for request in list(self._waiting):
            for answer in [answer for answer in request if answer.sequence in aborted]:
                request.remove(answer)
                self._finish(answer, "abort")
            if not request:
                self._waiting.remove(request)
        under_way = [answer for answer in self._tasks if answer.sequence in aborted]
        others = {task for answer, task in self._tasks.items() if answer.sequence not in aborted}
        for answer in under_way:
            if self._tasks[answer] in others:
                self._finish(answer, "abort")  # the server continues the others of its request
            else:
                self._tasks[answer].cancel()

    def recall(self) -> None:
        for answer in self._take_waiting():
            self._finish(answer, "abort")

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    async def log_probs(self, sequences: Items[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        assert self.is_awake, "log_probs before resume"
        return await asyncio.gather(*map(self._score, sequences))

    async def update_weights(self, update: WeightUpdate) -> None:
        assert self.is_awake, "update_weights before resume"
        with tempfile.TemporaryDirectory(prefix="practicum-model-", dir=self._exchange_dir) as folder:

            def write(place: Path) -> dict[str, Tensor]:
                if self._adapters is None:
                    return export_model(place, self._path, update.tensors)
                model = empty_model(load_config(self._adapters.base))
                return write_adapters(place, self._adapters, model, update.tensors)

            place = await asyncio.to_thread(VersionFolders(Path(folder), num_kept=1).add, update.version, write)
            await self._load(str(place), update.version)
        self._version = update.version

    async def close(self) -> None:
        """Let go of the connections. What is under way fails."""
        tasks = {task for task in self._tasks.values() if not task.done()}
        self._fail(RolloutError("the engine has been closed"))
        if tasks:
            await asyncio.wait(tasks)  # cancelled: they end at once
        await self._client.close()

    # Requests

    @property
    def _known(self) -> Capabilities:
        assert self._capabilities is not None, "asked before resume"
        return self._capabilities

    def _follows(self, last: Sequence, sequence: Sequence) -> bool:
        """Return whether a sequence can be asked for in one request with the last one before it."""
        # vLLM refuses to give several answers without chance, though they are rightly asked for.
        if not self._known.can_number_answers or sequence.params.temperature == 0:
            return False
        asked = (last.params, last.seed, last.number + 1) == (sequence.params, sequence.seed, sequence.number)
        return asked and sequence.shares_prompt(last)

    def _admit(self) -> None:
        while self._waiting and len(self._tasks) < self._max_batch:
            request = self._waiting.popleft()
            task = asyncio.get_running_loop().create_task(self._work(request))
            self._tasks.update(dict.fromkeys(request, task))
            task.add_done_callback(partial(self._ended, request))

    def _ended(self, request: list[Answer], task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        for answer in [answer for answer in request if answer in self._tasks]:
            if error is None:
                self._finish(answer, "abort")
            else:
                self._finish(answer, error=self._error(answer.sequence, error))

    def _finish(
        self,
        answer: Answer,
        reason: FinishReason | None = None,
        routes: RoutedExperts | None = None,
        error: Exception | None = None,
    ) -> None:
        self._tasks.pop(answer, None)
        done = answer.sequence.done
        if not done.done():
            if error is not None:
                done.set_exception(for_future(error))
            else:
                versions = [self._version if version is None else version for version in answer.versions]
                done.set_result(answer.sequence.to_sample(self._tokenizer, versions, reason, routes))
        self._admit()

    def _fail(self, error: Exception) -> None:
        """Fail everything that has been submitted."""
        waiting = self._take_waiting()
        for task in set(self._tasks.values()):
            task.cancel()
        for answer in [*waiting, *self._tasks]:
            self._finish(answer, error=error)

    def _take_waiting(self) -> list[Answer]:
        waiting = [answer for request in self._waiting for answer in request]
        self._waiting.clear()
        return waiting

    async def _work(self, request: list[Answer]) -> None:
        params = request[0].sequence.params
        if has_filters(params) and self._known.is_filtered is None:  # found out only where it is needed
            if self._probing is None or self._probing.done():
                asking = probe_filters(self._client, self._address(), self._known, self._tokenizer)
                self._probing = asyncio.get_running_loop().create_task(asking)
            is_filtered = await asyncio.shield(self._probing)
            self._capabilities = replace(self._known, is_filtered=is_filtered)
            self._known.check(params, self._name)
        await self._ask(request, attempt=0)

    async def _ask(self, answers: list[Answer], attempt: int) -> None:
        """Make one request, and again for what came to nothing of it."""
        try:
            await self._ask_once(answers)
        except ServerFailure as failure:
            rest = [answer for answer in answers if answer in self._tasks]
            is_streamed = any(answer.sequence.on_tokens and answer.sequence.token_ids for answer in rest)
            if not failure.is_transient or is_streamed or attempt >= _RETRIES:
                raise
            for answer in rest:
                answer.restart()
            await self._refresh()
            await asyncio.sleep(_PAUSE_S * 2**attempt)
            try:
                async with asyncio.TaskGroup() as tasks:  # one by one: what has arrived need not be written again
                    for answer in rest:
                        tasks.create_task(self._ask([answer], attempt + 1))
            except ExceptionGroup as several:
                raise several.exceptions[0] from None

    async def _ask_once(self, answers: list[Answer]) -> None:
        server = self._address()
        body = self._known.body(answers[0].sequence, len(answers), self.eos_ids)
        if self._reads_routes:  # servers return them with whole answers only
            self._take(answers, await self._client.call(server, "POST", "/v1/completions", body), server)
        else:
            async with aclosing(self._client.stream(server, body)) as parts:
                async for part in parts:
                    self._take(answers, part, server)
                    is_open = any(answer in self._tasks for answer in answers)
                    if not is_open and not all(answer.is_over for answer in answers):
                        return  # the server would continue: closing the connection ends it there
        if any(answer in self._tasks for answer in answers):
            reason = f"gave fewer than the {len(answers)} answers asked for"
            raise ServerFailure(server, reason, is_transient=False)

    def _take(self, answers: list[Answer], part: Mapping[str, Any], server: str) -> None:
        for choice in part.get("choices") or []:
            answer = answers[int(choice.get("index") or 0)]
            finish = choice.get("finish_reason")
            answer.is_over = answer.is_over or finish is not None
            if answer not in self._tasks:
                continue
            version = choice.get("weight_version", part.get("weight_version"))
            if version is not None and not self._expects(int(version)):
                reason = f"answered with weights of version {version}, not {self._version}"
                raise ServerFailure(server, reason, is_transient=True)
            self._append(answer, choice)
            if answer not in self._tasks:
                continue
            if version is not None:
                answer.versions = [int(version) if known is None else known for known in answer.versions]
            if answer.sequence.finish_reason is None and finish is not None:
                raise self._ended_too_soon(answer.sequence, str(finish), server)
            if answer.sequence.finish_reason is not None:
                self._finish(answer, routes=self._routes(answer, choice))

    def _append(self, answer: Answer, choice: Mapping[str, Any]) -> None:
        """Append the tokens of a choice, up to the end of the answer."""
        sequence = answer.sequence
        reader = self._reader = self._reader or TokenReader(self._tokenizer, self._name)
        ids = reader.ids(choice)
        log_probs = reader.log_probs(choice, len(ids)) if ids else []
        num = 0
        for token, log_prob in zip(ids, log_probs, strict=True):
            num += 1
            answer.versions.append(None)
            if sequence.push(token, log_prob) is not None:
                break
        if num and sequence.on_tokens is not None:
            try:
                sequence.on_tokens(ids[:num], log_probs[:num])
            except Exception as error:  # the caller's own: it ends this answer, and no other
                self._finish(answer, error=error)

    def _ended_too_soon(self, sequence: Sequence, finish: str, server: str) -> Exception:
        if finish not in ("stop", "length"):
            return ServerFailure(server, f"broke off an answer ({finish})", is_transient=True)
        last = f"token {sequence.token_ids[-1]}" if sequence.token_ids else "no token"
        return RolloutError(
            f"server {server} ended an answer to prompt {sequence.prompt.id} ({finish}) after "
            f"{len(sequence.token_ids)} tokens with {last}, which is no end that was asked for: it may leave out the "
            "end-of-text token (then its answers cannot be trained on), serve another model, have less room for the "
            "sequence, or not know ignore_eos."
        )

    async def _score(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        server = self._address()
        # The protocol's way: have the prompt echoed with its log-probs. One token more must be written, and is dropped.
        body = {"model": self._known.model, "prompt": ids.tolist(), "max_tokens": 1, "temperature": 1.0, "seed": 0}
        body |= {"echo": True, "logprobs": extras(self._known.owner, True)["logprobs"]}
        try:
            reply = await self._client.call(server, "POST", "/v1/completions", body)
        except ServerFailure as failure:
            raise RolloutError(f"{failure}.") from failure
        choices = reply.get("choices") or [{}]
        found = chosen_log_probs(choices[0]) if choices[0].get("logprobs") else []
        if len(found) < len(ids):
            raise RolloutError(f"server {server} does not return the log-probs of a prompt (echo with logprobs).")
        return np.array(found[1 : len(ids)], np.float32)
