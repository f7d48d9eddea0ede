"""What the engines behind a completions server have in common: requests out, tokens and log-probs in.

    write ── a job for each ticket ─▶ the loop's thread: one request for all its answers, or one for each
      ▲                                     │ tokens as they come; the end is looked for here, whatever the server does
      └───────────── news ──────────────────┘

An answer that fails is asked for again, from its beginning and with its seed, unless somebody was told of its tokens.
"""

from __future__ import annotations

import asyncio
import queue
from abc import abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.errors import RolloutError
from practicum.rollout.answers import Ending, check_length, sample_of, untouched, written_ids
from practicum.rollout.base import BaseRollout
from practicum.rollout.inbox import Inbox, Ticket
from practicum.rollout.remote.completions import (
    LoopThread,
    ServerFailure,
    Transport,
    chosen_log_probs,
)
from practicum.rollout.remote.dialect import Dialect, TokenReader, extras, find_filtered, has_filters
from practicum.types import FinishReason, RolloutRequest, RoutedExperts, Sample

_TICK_S = 0.02
_WAIT_S = 0.5
_RETRIES = 3
_PAUSE_S = 0.25


@dataclass(slots=True)
class Answer:
    number: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)
    """None where the server has not told yet."""
    routes: RoutedExperts | None = None
    reason: FinishReason | None = None
    is_over: bool = False
    """The server is done with it too."""

    def restart(self) -> None:
        self.tokens, self.log_probs, self.versions = [], [], []


@dataclass(frozen=True, slots=True)
class _News:
    job: Job
    answer: Answer | None = None
    """It is done, or broken off."""
    tokens: tuple[int, list[int], list[float]] | None = None
    error: Exception | None = None


class Job:
    """A ticket under way. Lives in the loop's thread, but for its making."""

    def __init__(self, ticket: Ticket, ending: Ending, news: queue.SimpleQueue[_News]) -> None:
        self.ticket = ticket
        self.ending = ending
        self.answers = [Answer(number) for number in range(ticket.request.params.num_answers)]
        self.prompt: list[int] = written_ids(ticket.request).tolist()
        self.is_broken_off = False
        self._news = news
        self._task: asyncio.Task[None] | None = None

    @property
    def num_before(self) -> int:
        return len(self.prompt) - len(self.ticket.request.prompt_ids)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(self._over)

    def break_off(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def done(self, answer: Answer) -> None:
        self._news.put(_News(self, answer=answer))

    def told(self, answer: Answer, num: int) -> None:
        """Of its last tokens."""
        if num and self.ticket.on_tokens is not None:
            self._news.put(_News(self, tokens=(answer.number, answer.tokens[-num:], answer.log_probs[-num:])))

    def _over(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._news.put(_News(self, error=error if isinstance(error, Exception) else RuntimeError(repr(error))))
            return
        for answer in self.answers:
            if answer.reason is None:
                answer.reason = "abort"
                self.done(answer)


class RemoteRollout(BaseRollout):
    """`eos_ids` are the tokens that end a text; an answer ends with them, whatever the server believes."""

    takes_adapters = True

    def __init__(self, client: Transport, *, tokenizer: Any, eos_ids: Sequence[int], max_batch: int) -> None:
        self._tokenizer = tokenizer
        self.eos_ids = list(eos_ids)
        self._max_batch = max_batch
        self._thread = LoopThread("practicum-completions")
        self._client = client
        self._dialect: Dialect | None = None
        self._reader: TokenReader | None = None
        self._reads_routes = False
        self._awake = False
        self._version = 0

    @abstractmethod
    def _address(self) -> str:
        """Where the next request goes."""

    @property
    @abstractmethod
    def _name(self) -> str:
        """Who answers, for messages."""

    def close(self) -> None:
        """Let go of the connections."""
        if not self._thread.loop.is_closed():
            self._thread.run(self._client.close())
            self._thread.close()  # and whatever is under way in it

    def check(self, request: RolloutRequest) -> None:
        check_length(request, self._known.most_tokens, self._known.model)
        if has_filters(request.params) and self._known.is_filtered is None:
            asking = find_filtered(self._client, self._address(), self._known, self._tokenizer)
            self._dialect = replace(self._known, is_filtered=self._thread.run(asking))
        self._known.check(request.params, self._name)

    def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        assert self._awake, "log_probs before resume"
        return self._thread.run(self._score(sequences))

    def write(self, inbox: Inbox) -> None:
        assert self._awake, "generate before resume"
        with self._watching():
            self._write(inbox)

    def _write(self, inbox: Inbox) -> None:
        news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        jobs: dict[Ticket, Job] = {}
        failure: Exception | None = None
        try:
            while jobs or not inbox.is_over:
                self._check_hope()
                num_open = sum(ticket.num_open for ticket in jobs)
                room = 0 if failure else max(0, self._max_batch - num_open)
                for ticket in inbox.take(room, 0.0 if jobs else _WAIT_S):
                    if ticket.is_cancelled or inbox.is_aborted:
                        for number in range(ticket.request.params.num_answers):
                            ticket.done(number, untouched(ticket.request))
                    else:
                        jobs[ticket] = self._begin(ticket, news)
                for ticket, job in jobs.items():
                    if (ticket.is_cancelled or inbox.is_aborted) and not job.is_broken_off:
                        job.is_broken_off = True
                        self._thread.loop.call_soon_threadsafe(job.break_off)
                failure = self._hear(news, jobs) or failure
                if failure and not jobs:  # what was under way beside it has been finished
                    raise failure
        finally:
            for job in jobs.values():
                self._thread.loop.call_soon_threadsafe(job.break_off)

    def _watching(self) -> AbstractContextManager[object]:
        """Looks after the servers while answers are written."""
        return nullcontext()

    def _check_hope(self) -> None:
        """Raise `RolloutError` where nobody is left to answer."""

    async def _after_failure(self) -> None:
        """Before somebody is asked again."""

    def _expects(self, version: int) -> bool:
        """Whether an answer may come from these weights."""
        return True

    @property
    def _known(self) -> Dialect:
        assert self._dialect is not None, "asked before resume"
        return self._dialect

    def _begin(self, ticket: Ticket, news: queue.SimpleQueue[_News]) -> Job:
        job = Job(ticket, Ending(ticket.request.params, self.eos_ids, self._tokenizer), news)
        self._thread.loop.call_soon_threadsafe(lambda: job.start(self._work(job)))
        return job

    def _hear(self, news: queue.SimpleQueue[_News], jobs: dict[Ticket, Job]) -> Exception | None:
        """Tell the tickets what there is to tell, and wait a little where there is nothing. What a job failed with."""
        failure: Exception | None = None
        wait_s = _TICK_S if jobs else 0.0
        while True:
            try:
                item = news.get(timeout=wait_s) if wait_s else news.get_nowait()
            except queue.Empty:
                return failure
            wait_s = 0.0
            ticket = item.job.ticket
            if item.error is not None and jobs.pop(ticket, None) is not None:  # else all its answers are there
                failure = failure or self._error(ticket.request, item.error)
            if item.tokens is not None:
                assert ticket.on_tokens is not None
                ticket.on_tokens(*item.tokens)
            if item.answer is not None:
                ticket.done(item.answer.number, self._sample(ticket.request, item.answer))
                if not ticket.num_open:
                    del jobs[ticket]

    def _sample(self, request: RolloutRequest, answer: Answer) -> Sample:
        assert answer.reason is not None
        if not answer.tokens:
            return untouched(request)
        versions = [self._version if version is None else int(version) for version in answer.versions]
        sample = sample_of(
            request,
            np.array(answer.tokens, np.int32),
            np.array(answer.log_probs, np.float32),
            versions[-1],
            answer.reason,
            self._tokenizer,
            answer.routes,
        )
        if len(set(versions)) > 1:  # the server took new weights meanwhile
            before = sample.versions[: len(sample.versions) - len(versions)]
            sample = replace(sample, versions=np.concatenate([before, np.array(versions, np.int32)]))
        return sample

    def _error(self, request: RolloutRequest, error: Exception) -> Exception:
        if isinstance(error, ServerFailure):
            return RolloutError(f"prompt {request.prompt.id}: {error}.").with_traceback(error.__traceback__)
        return error

    # In the loop's thread

    async def _work(self, job: Job) -> None:
        # vLLM refuses to give several answers without chance, though they are rightly asked for.
        together = self._known.can_number_answers and job.ticket.request.params.temperature > 0
        await self._all(job, [job.answers] if together else [[answer] for answer in job.answers], 0)

    async def _all(self, job: Job, groups: Sequence[list[Answer]], attempt: int) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for answers in groups:
                    tasks.create_task(self._ask(job, answers, attempt))
        except ExceptionGroup as several:
            raise several.exceptions[0] from None

    async def _ask(self, job: Job, answers: list[Answer], attempt: int) -> None:
        """One request, and again what came to nothing of it."""
        try:
            await self._once(job, answers)
        except ServerFailure as failure:
            rest = [answer for answer in answers if answer.reason is None]
            told = job.ticket.on_tokens is not None and any(answer.tokens for answer in rest)
            if not failure.may_pass or told or attempt >= _RETRIES:
                raise
            for answer in rest:
                answer.restart()
            await self._after_failure()
            await asyncio.sleep(_PAUSE_S * 2**attempt)
            # One by one: what has arrived need not be written again.
            await self._all(job, [[answer] for answer in rest], attempt + 1)

    async def _once(self, job: Job, answers: list[Answer]) -> None:
        server = self._address()
        request, first = job.ticket.request, answers[0].number
        body = self._known.body(request, first, len(answers), job.prompt, self.eos_ids)
        if self._reads_routes:  # servers tell them with whole answers only
            self._take(job, answers, await self._client.call(server, "POST", "/v1/completions", body), server)
        else:
            async with aclosing(self._client.stream(server, body)) as parts:
                async for part in parts:
                    self._take(job, answers, part, server)
                    if all(a.reason is not None for a in answers) and not all(a.is_over for a in answers):
                        return  # the server would go on: closing the connection tells it not to
        if any(answer.reason is None for answer in answers):
            raise ServerFailure(server, f"gave fewer than the {len(answers)} answers asked for", may_pass=False)

    def _take(self, job: Job, answers: list[Answer], part: Mapping[str, Any], server: str) -> None:
        for choice in part.get("choices") or []:
            answer = answers[int(choice.get("index") or 0)]
            finish = choice.get("finish_reason")
            answer.is_over = answer.is_over or finish is not None
            if answer.reason is not None:
                continue
            version = choice.get("weight_version", part.get("weight_version"))
            if version is not None and not self._expects(int(version)):
                what = f"answered with weights of version {version}, not {self._version}"
                raise ServerFailure(server, what, may_pass=True)
            num_new = self._append(job, answer, choice)
            if version is not None:
                answer.versions = [version if known is None else known for known in answer.versions]
            job.told(answer, num_new)
            if answer.reason is None and finish is not None:
                self._ended_too_soon(job, answer, str(finish), server)
            if answer.reason is not None:
                answer.routes = self._routes(job, answer, choice)
                job.done(answer)

    def _append(self, job: Job, answer: Answer, choice: Mapping[str, Any]) -> int:
        """Up to the end of the answer; how many tokens were new."""
        reader = self._reader = self._reader or TokenReader(self._tokenizer, self._name)
        ids = reader.ids(choice)
        log_probs = reader.log_probs(choice, len(ids)) if ids else []
        for number, (token, log_prob) in enumerate(zip(ids, log_probs, strict=True), 1):
            answer.tokens.append(token)
            answer.log_probs.append(log_prob)
            answer.versions.append(None)
            recent: list[int] = []
            if job.ending.reads_text:
                recent = job.prompt[len(job.prompt) - job.num_before :] + answer.tokens
            answer.reason = job.ending.of(token, job.num_before + len(answer.tokens), recent)
            if answer.reason is not None:
                return number
        return len(ids)

    def _ended_too_soon(self, job: Job, answer: Answer, finish: str, server: str) -> None:
        if finish not in ("stop", "length"):
            raise ServerFailure(server, f"broke off an answer ({finish})", may_pass=True)
        last = f"token {answer.tokens[-1]}" if answer.tokens else "no token"
        raise RolloutError(
            f"server {server} ended an answer to prompt {job.ticket.request.prompt.id} ({finish}) after "
            f"{len(answer.tokens)} tokens with {last}, which is no end that was asked for: it may leave out the "
            "end-of-text token (then its answers cannot be trained on), serve another model, have less room for the "
            "sequence, or not know ignore_eos."
        )

    def _routes(self, job: Job, answer: Answer, choice: Mapping[str, Any]) -> RoutedExperts | None:
        """Of prompt and answer, where this engine has them."""
        return None

    async def _score(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        return await asyncio.gather(*map(self._score_one, sequences))

    async def _score_one(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
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
            raise RolloutError(f"server {server} does not tell the log-probs of a prompt (echo with logprobs).")
        return np.array(found[1 : len(ids)], np.float32)
