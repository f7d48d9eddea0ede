"""vLLM inside this process: it answers as its server would, without a server.

    event loop ── commands: a request, an abort, new weights ─▶ vLLM's thread ── step ─▶ outputs, to each request

All of vLLM runs in the one thread that has made it: a thread's device and its number of cores are its own matter.
Requests and answers are those of the completions protocol, so a client of a server can use this instead.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from practicum.controller.loop import for_future
from practicum.errors import RolloutError
from practicum.rollout.remote.client import ServerFailure

_STOP_S = 60.0
# Fields of a request beside the parameters of sampling. Tokens are named by their ids here in any case.
_NOT_SAMPLING = ("model", "prompt", "echo", "return_token_ids", "return_tokens_as_token_ids")

Command = Callable[[Any], Any]  # is called with the engine


class Vllm:
    """The vLLM that is installed. `arguments` are its options, as on its command line. All methods are called in vLLM's
    thread."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._arguments = list(arguments)
        self._environment = dict(environment)

    def start(self) -> Any:
        """Return vLLM's `LLMEngine`, with all of it in this process."""
        os.environ.update(self._environment)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else its core would be a process of its own
        from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found,unused-ignore]
        from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found,unused-ignore]
        from vllm.v1.engine.llm_engine import LLMEngine  # type: ignore[import-not-found,unused-ignore]

        try:
            options = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(self._arguments)
        except SystemExit:
            raise ValueError(
                f"vLLM does not understand its options (rollout.vllm.options): {self._arguments}"
            ) from None
        return LLMEngine.from_engine_args(EngineArgs.from_cli_args(options))

    def params(self, fields: Mapping[str, Any], *, is_streamed: bool) -> Any:
        """Return its `SamplingParams`."""
        from vllm import SamplingParams  # type: ignore[import-not-found,unused-ignore]
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found,unused-ignore]

        kind = RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY
        return SamplingParams(**fields, output_kind=kind)

    def adapters(self, name: str, number: int, folder: str) -> Any:
        """Return its `LoRARequest`."""
        from vllm.lora.request import LoRARequest  # type: ignore[import-not-found,unused-ignore]

        return LoRARequest(name, number, folder)

    def stop(self, engine: Any) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory  # type: ignore[import-not-found,unused-ignore]

        engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()  # nothing else in a rollout worker has torch's default group


class LocalVllm:
    """A `Transport` to vLLM in this process, whatever address is asked."""

    def __init__(self, library: Vllm, *, model: str, timeout_s: float = 300.0) -> None:
        self.timeout_s = timeout_s
        self._library = library
        self._model = model
        self._commands: queue.SimpleQueue[tuple[Command, Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="practicum-vllm", daemon=True)
        # For vLLM's thread:
        self._sinks: dict[str, Callable[[Any], None]] = {}  # by request
        self._adapters: dict[str, Any] = {}  # by the name of the model with them: the newest
        self._num_loads = 0

    def start(self, timeout_s: float) -> None:
        """Start vLLM and wait until it is ready."""
        self._thread.start()
        try:
            self._put(lambda engine: None).result(timeout_s)
        except TimeoutError:
            raise RolloutError(f"vLLM was not ready within {timeout_s:g} s.") from None
        except Exception as error:
            raise RolloutError(f"vLLM did not start. It failed: {error!r}.") from error

    async def call(
        self, server: str, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        timeout_s = timeout_s or self.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                if path == "/v1/completions":
                    return await self._whole(server, body or {})
                if path == "/v1/load_lora_adapter":
                    return await self._do(server, partial(self._load_adapters, **(body or {})))
                if path not in _CONTROLS:
                    raise ServerFailure(server, f"does not know {path}", is_transient=False, status=404)
                return await self._do(server, lambda engine: _CONTROLS[path](engine, self._model, body or {}))
        except TimeoutError:
            raise ServerFailure(server, f"did not answer {path} within {timeout_s:g} s", is_transient=True) from None

    async def stream(self, server: str, body: Mapping[str, Any]) -> AsyncGenerator[Any]:
        """Yield the parts of a completion. Leaving it early ends the request."""
        async with aclosing(self._outputs(server, body, is_streamed=True)) as outputs:
            async for output in outputs:
                yield {"choices": [_choice(one) for one in output.outputs]}

    async def close(self) -> None:
        """End vLLM, and all requests with an error."""
        self._commands.put(None)
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
            with suppress(RuntimeError):  # the loop has been closed
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
            await self._in_time(server, self._do(server, begin))
            while not is_over:
                output = await self._in_time(server, found.get())
                if isinstance(output, BaseException):
                    is_over = True
                    raise ServerFailure(server, f"failed: {output!r}", is_transient=False) from output
                is_over = output.finished
                yield output
        finally:
            if not is_over:
                self._put(lambda engine: self._drop(engine, name))

    async def _in_time(self, server: str, awaited: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await awaited
        except TimeoutError:
            raise ServerFailure(server, f"let an answer wait for {self.timeout_s:g} s", is_transient=True) from None

    async def _do(self, server: str, command: Command) -> Any:
        try:
            return await asyncio.wrap_future(self._put(command))
        except Exception as error:
            raise ServerFailure(server, f"failed: {error!r}", is_transient=False) from error

    def _put(self, command: Command) -> Future[Any]:
        future: Future[Any] = Future()
        self._commands.put((command, future))
        return future

    # In vLLM's thread

    def _run(self) -> None:
        is_closed = False
        try:
            engine = self._library.start()
            try:
                while self._do_commands(engine):
                    for output in engine.step() if engine.has_unfinished_requests() else ():
                        self._deliver(output)
            finally:
                self._library.stop(engine)
            is_closed = True
            ended: BaseException = RuntimeError("it was closed")
        except BaseException as error:
            ended = error
        for sink in self._sinks.values():
            sink(ended)
        while not (is_closed and self._commands.empty()):  # later commands fail too, until it is closed
            waiting = self._commands.get()
            if waiting is None:
                is_closed = True
            elif waiting[1].set_running_or_notify_cancel():
                waiting[1].set_exception(RuntimeError(f"vLLM has ended: {ended!r}"))

    def _do_commands(self, engine: Any) -> bool:
        """Do what was asked for, and wait where there is nothing to write either. Return whether to continue."""
        is_idle = not engine.has_unfinished_requests()
        while is_idle or not self._commands.empty():
            waiting = self._commands.get()
            is_idle = False
            if waiting is None:
                return False
            command, future = waiting
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(command(engine))
            except Exception as error:
                future.set_exception(for_future(error))
        return True

    def _deliver(self, output: Any) -> None:
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
    """Return a choice as the server writes it, but for routed experts, which are not packed."""
    tokens = list(one.token_ids)
    choice = {"index": one.index, "token_ids": tokens, "finish_reason": one.finish_reason}
    choice["logprobs"] = _log_probs(tokens, one.logprobs or [])
    if one.routed_experts is not None:
        choice["routed_experts"] = one.routed_experts
    return choice


def _echoed(choice: dict[str, Any], output: Any) -> dict[str, Any]:
    """Return a choice with the prompt before it."""
    before = _log_probs(output.prompt_token_ids, output.prompt_logprobs or [])
    after = choice["logprobs"]
    return choice | {"logprobs": {key: before[key] + after[key] for key in after}}


def _log_probs(tokens: Sequence[int], steps: Sequence[Mapping[int, Any] | None]) -> dict[str, list[Any]]:
    """Return the log-probs of tokens as the server writes them.

    `steps` have those of a few tokens each, the written one among them; a prompt's first token has none.
    """
    pairs = list(zip(tokens, steps, strict=False))
    return {
        "tokens": [f"token_id:{token}" for token, _ in pairs],
        "token_logprobs": [None if step is None else step[token].logprob for token, step in pairs],
        "top_logprobs": [
            None if step is None else {f"token_id:{token}": own.logprob for token, own in step.items()}
            for _, step in pairs
        ],
    }
