"""vLLM inside this process: what its server would answer, without a server.

    the client's loop ── orders: a request, an abort, new weights ─▶ vLLM's thread ── step ─▶ tokens, to who asked

All of vLLM runs in the one thread that has made it: a thread's device and its number of cores are its own matter.
Requests and answers are those of the completions protocol, so whoever talks to a server can talk to this instead.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Protocol

from practicum.rollout.remote.completions import ServerFailure

_STOP_S = 60.0
# What a server is told beside the parameters of sampling. Tokens are named by their ids here in any case.
_NOT_SAMPLING = ("model", "prompt", "echo", "return_token_ids", "return_tokens_as_token_ids")

Order = Callable[[Any], Any]  # what to do with the engine


class Library(Protocol):
    """vLLM, as far as it is used here. All of it is called in vLLM's thread."""

    def start(self) -> Any:
        """vLLM's `LLMEngine`, with all of it in this process."""

    def params(self, fields: Mapping[str, Any], *, is_streamed: bool) -> Any:
        """Its `SamplingParams`."""

    def adapters(self, name: str, number: int, folder: str) -> Any:
        """Its `LoRARequest`."""

    def stop(self, engine: Any) -> None: ...


class Vllm:
    """The one that is installed. `words` are its options, as on its command line."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self._words = list(words)
        self._environment = dict(environment)

    def start(self) -> Any:
        os.environ.update(self._environment)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else its core would be a process of its own
        from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found,unused-ignore]
        from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found,unused-ignore]
        from vllm.v1.engine.llm_engine import LLMEngine  # type: ignore[import-not-found,unused-ignore]

        try:
            options = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(self._words)
        except SystemExit:
            raise ValueError(f"vLLM does not understand its options (rollout.vllm.options): {self._words}") from None
        return LLMEngine.from_engine_args(EngineArgs.from_cli_args(options))

    def params(self, fields: Mapping[str, Any], *, is_streamed: bool) -> Any:
        from vllm import SamplingParams  # type: ignore[import-not-found,unused-ignore]
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found,unused-ignore]

        kind = RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY
        return SamplingParams(**fields, output_kind=kind)

    def adapters(self, name: str, number: int, folder: str) -> Any:
        from vllm.lora.request import LoRARequest  # type: ignore[import-not-found,unused-ignore]

        return LoRARequest(name, number, folder)

    def stop(self, engine: Any) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory  # type: ignore[import-not-found,unused-ignore]

        engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()  # nothing else in a rollout worker has torch's default group


class LocalVllm:
    """A `Transport` to vLLM in this process, whatever address it is asked at. It starts at once; `/health` waits."""

    def __init__(self, library: Library, *, model: str, timeout_s: float = 300.0) -> None:
        self.timeout_s = timeout_s
        self._library = library
        self._model = model
        self._orders: queue.SimpleQueue[tuple[Order, Future[Any]] | None] = queue.SimpleQueue()
        self._sinks: dict[str, Callable[[Any], None]] = {}  # by request; for vLLM's thread
        self._adapters: dict[str, Any] = {}  # by the name of the model with them: the newest; likewise
        self._num_loads = 0
        self._lock = threading.Lock()
        self._ended: BaseException | None = None  # no orders are taken any more
        self._thread = threading.Thread(target=self._run, name="practicum-vllm", daemon=True)
        self._thread.start()

    async def call(
        self, server: str, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        timeout_s = timeout_s or self.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                if path == "/v1/completions":
                    return await self._whole(server, body or {})
                if path == "/v1/load_lora_adapter":
                    return await self._order(server, partial(self._load_adapters, **(body or {})))
                if path not in _CONTROLS:
                    raise ServerFailure(server, f"does not know {path}", may_pass=False, status=404)
                return await self._order(server, lambda engine: _CONTROLS[path](engine, self._model, body or {}))
        except TimeoutError:
            raise ServerFailure(server, f"did not answer {path} within {timeout_s:g} s", may_pass=True) from None

    async def stream(self, server: str, body: Mapping[str, Any]) -> AsyncGenerator[Any]:
        """Leaving it early ends the request."""
        async with aclosing(self._outputs(server, body, is_streamed=True)) as outputs:
            async for output in outputs:
                yield {"choices": [_choice(one) for one in output.outputs]}

    async def close(self) -> None:
        with self._lock:
            self._orders.put(None)
        await asyncio.to_thread(self._thread.join, _STOP_S)

    async def _whole(self, server: str, body: Mapping[str, Any]) -> Any:
        choices: dict[int, dict[str, Any]] = {}
        async for output in self._outputs(server, body, is_streamed=False):
            for one in output.outputs:
                choices[one.index] = _choice(one)
                if body.get("echo"):
                    choices[one.index] = _echoed(choices[one.index], output)
        return {"choices": [choices[index] for index in sorted(choices)]}

    async def _outputs(self, server: str, body: Mapping[str, Any], *, is_streamed: bool) -> AsyncGenerator[Any]:
        name = uuid.uuid4().hex
        loop, found = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def sink(output: Any) -> None:
            with suppress(RuntimeError):  # the loop has been closed: nobody listens
                loop.call_soon_threadsafe(found.put_nowait, output)

        def begin(engine: Any) -> None:
            fields = {key: value for key, value in body.items() if key not in _NOT_SAMPLING}
            if body.get("echo"):
                fields["prompt_logprobs"] = body.get("logprobs")
            params = self._library.params(fields, is_streamed=is_streamed)
            adapters = None if body["model"] == self._model else self._adapters[body["model"]]
            engine.add_request(name, {"prompt_token_ids": list(body["prompt"])}, params, lora_request=adapters)
            self._sinks[name] = sink

        is_over = False
        try:
            await self._order(server, begin)
            while not is_over:
                output = await self._next(server, found) if is_streamed else await found.get()
                if isinstance(output, BaseException):
                    is_over = True
                    raise ServerFailure(server, f"failed: {output!r}", may_pass=False) from output
                is_over = output.finished
                yield output
        finally:
            if not is_over:
                self._put(lambda engine: self._drop(engine, name))

    async def _next(self, server: str, found: asyncio.Queue[Any]) -> Any:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await found.get()
        except TimeoutError:
            raise ServerFailure(server, f"let an answer wait for {self.timeout_s:g} s", may_pass=True) from None

    async def _order(self, server: str, order: Order) -> Any:
        try:
            return await asyncio.wrap_future(self._put(order))
        except Exception as error:
            raise ServerFailure(server, f"failed: {error!r}", may_pass=False) from error

    def _put(self, order: Order) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._ended is not None:
                future.set_exception(RuntimeError(f"vLLM has ended: {self._ended!r}"))
            else:
                self._orders.put((order, future))
        return future

    # In vLLM's thread

    def _run(self) -> None:
        ended: BaseException = RuntimeError("it was closed")
        try:
            engine = self._library.start()
            try:
                while self._take_orders(engine):
                    for output in engine.step() if engine.has_unfinished_requests() else ():
                        self._tell(output)
            finally:
                self._library.stop(engine)
        except BaseException as error:  # whoever waits is told
            ended = error
        with self._lock:
            self._ended = ended
        for sink in self._sinks.values():
            sink(ended)
        while not self._orders.empty():
            if (waiting := self._orders.get()) is not None and waiting[1].set_running_or_notify_cancel():
                waiting[1].set_exception(ended if isinstance(ended, Exception) else RuntimeError(repr(ended)))

    def _take_orders(self, engine: Any) -> bool:
        """Carry out what there is, and wait where there is nothing to write either. Whether to go on."""
        is_idle = not engine.has_unfinished_requests()
        while is_idle or not self._orders.empty():
            waiting = self._orders.get()
            is_idle = False
            if waiting is None:
                return False
            order, future = waiting
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(order(engine))
            except Exception as error:
                future.set_exception(error)
        return True

    def _tell(self, output: Any) -> None:
        sink = self._sinks.get(output.request_id)
        if sink is not None:
            sink(output)
        if output.finished:
            self._sinks.pop(output.request_id, None)

    def _load_adapters(self, engine: Any, *, lora_name: str, lora_path: str) -> None:
        self._num_loads += 1
        adapters = self._library.adapters(lora_name, self._num_loads, lora_path)
        engine.add_lora(adapters)
        self._adapters = {lora_name: adapters}

    def _drop(self, engine: Any, name: str) -> None:
        if self._sinks.pop(name, None) is not None:
            engine.abort_request([name])


def _models(engine: Any, model: str, body: Mapping[str, Any]) -> Any:
    return {"data": [{"id": model, "owned_by": "vllm", "max_model_len": engine.model_config.max_model_len}]}


def _rpc(engine: Any, model: str, body: Mapping[str, Any]) -> Any:
    return {"results": engine.collective_rpc(body["method"], None, tuple(body.get("args", ())), body.get("kwargs"))}


_CONTROLS: dict[str, Callable[[Any, str, Mapping[str, Any]], Any]] = {
    "/health": lambda engine, model, body: {},
    "/v1/models": _models,
    "/collective_rpc": _rpc,
    "/reset_prefix_cache": lambda engine, model, body: {"success": engine.reset_prefix_cache()},
    "/sleep?level=1": lambda engine, model, body: engine.sleep(1),
    "/wake_up": lambda engine, model, body: engine.wake_up(),
}


def _choice(one: Any) -> dict[str, Any]:
    """As the server writes it, but for routed experts, which are not packed."""
    tokens = list(one.token_ids)
    choice = {"index": one.index, "token_ids": tokens, "finish_reason": one.finish_reason}
    choice["logprobs"] = _log_probs(tokens, one.logprobs or [])
    if one.routed_experts is not None:
        choice["routed_experts"] = one.routed_experts
    return choice


def _echoed(choice: dict[str, Any], output: Any) -> dict[str, Any]:
    """With the prompt before it."""
    before = _log_probs(output.prompt_token_ids, output.prompt_logprobs or [])
    after = choice["logprobs"]
    return choice | {"logprobs": {key: before[key] + after[key] for key in after}}


def _log_probs(tokens: Sequence[int], steps: Sequence[Mapping[int, Any] | None]) -> dict[str, list[Any]]:
    """`steps` have the log-probs of a few tokens each, the written one among them; a prompt's first token has none."""
    pairs = list(zip(tokens, steps, strict=False))
    return {
        "tokens": [f"token_id:{token}" for token, _ in pairs],
        "token_logprobs": [None if step is None else step[token].logprob for token, step in pairs],
        "top_logprobs": [
            None if step is None else {f"token_id:{token}": told.logprob for token, told in step.items()}
            for _, step in pairs
        ],
    }
