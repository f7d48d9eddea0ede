"""A completions server in this process over a table of logits, where the next token depends on the last one alone, or
over whatever else tells the logits of a sequence.

It speaks vLLM's dialect, ours and the bare protocol, and fails on demand.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

VOCABULARY = 18
EOS = 1


def make_table(seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY)) * scale).astype(np.float64)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


@dataclass(eq=False)
class FakeServer:
    dialect: str = "vllm"  # vllm | practicum | plain: refuses what it does not know | texts: ignores it
    log_probs: str = "tempered"  # raw | tempered | processed
    owner: str | None = None
    token: str | None = None
    tokenizer: Any = None  # for texts
    delay_s: float = 0.0  # before each token
    max_tokens: int | None = 64
    leaves_out_eos: bool = False
    names_tokens: bool = True
    tells_log_probs: bool = True
    version: int | None = None
    table: np.ndarray = field(default_factory=make_table)
    logits: Callable[[list[int]], np.ndarray] | None = None  # of what follows a sequence; None: by the table
    on_update: Callable[[dict[str, Any]], None] | None = None
    faults: list[str] = field(default_factory=list)  # for the next completions: 500 | hang | break | 400 | cut | error
    requests: list[dict[str, Any]] = field(default_factory=list)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    router_tokens: set[str | None] = field(default_factory=set)  # that requests carried
    num_left: int = 0  # requests whose clients went away
    port: int = 0  # a free one; entered again after it was left, it is at the same address

    def __enter__(self) -> FakeServer:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(20)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    async def _start(self) -> str:
        app = web.Application(middlewares=[self._check_token])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        if self.dialect in ("vllm", "practicum"):
            for path in ("/sleep", "/wake_up", "/update_weights"):
                app.router.add_post(path, self._control)
        if self.dialect == "practicum":
            app.router.add_post("/log_probs", self._score)
            app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        host, self.port = self._runner.addresses[0][:2]
        return f"http://{host}:{self.port}"

    @web.middleware
    async def _check_token(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.router_tokens.add(request.headers.get("x-practicum-token"))
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "no such token"}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _models(self, request: web.Request) -> web.Response:
        owner = self.owner or {"vllm": "vllm", "practicum": "practicum"}.get(self.dialect, "somebody")
        entry = {"id": "table", "object": "model", "owned_by": owner}
        if self.max_tokens is not None:
            entry["max_model_len"] = self.max_tokens
        return web.json_response({"object": "list", "data": [entry]})

    async def _control(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append((request.path, body))
        if request.path == "/update_weights" and self.on_update is not None:
            self.on_update(body)
        return web.json_response({"version": body.get("version")})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "awake", "weight_version": self.version})

    async def _score(self, request: web.Request) -> web.Response:
        rows = []
        for ids in (await request.json())["token_ids"]:
            follows = [self.logits(ids[:at]) if self.logits else self.table[ids[at - 1]] for at in range(1, len(ids))]
            rows.append([float(log_softmax(one)[token]) for one, token in zip(follows, ids[1:], strict=True)])
        return web.json_response({"log_probs": rows, "weight_version": self.version})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        fault = self.faults.pop(0) if self.faults else ""
        if fault in ("500", "400"):
            return web.json_response({"error": {"message": f"made up {fault}"}}, status=int(fault))
        if fault == "hang":
            await asyncio.sleep(3600)
        known = {"model", "prompt", "max_tokens", "temperature", "top_p", "n", "seed", "logprobs", "stream", "echo"}
        if self.dialect == "plain" and set(body) - known:
            return web.json_response({"error": f"unknown {sorted(set(body) - known)}"}, status=400)
        if self.dialect == "practicum" and "return_tokens_as_token_ids" in body:
            return web.json_response({"error": "unknown return_tokens_as_token_ids"}, status=400)
        if body.get("echo"):
            return web.json_response({"choices": [self._echo(body)]})
        answers = [self._write(body, index) for index in range(body.get("n", 1))]
        if body.get("stream"):
            return await self._stream(request, body, answers, fault)
        choices = [self._whole(body, index, list(answer)) for index, answer in enumerate(answers)]
        return web.json_response({"choices": choices} | self._versioned())

    async def _stream(
        self, request: web.Request, body: dict[str, Any], answers: list[Iterator[Any]], fault: str
    ) -> Any:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        at, open_answers = 0, dict(enumerate(answers))
        try:
            while open_answers:
                await asyncio.sleep(self.delay_s)
                if fault in ("break", "cut", "error") and at == 2:
                    if fault == "break":
                        assert request.transport is not None
                        request.transport.close()
                    elif fault == "error":
                        await reply.write(b'data: {"error": {"message": "made up"}}\n\n')
                    return reply
                for index, answer in list(open_answers.items()):
                    tokens, log_probs, why = next(answer)
                    choice = self._choice(body, index, tokens, log_probs, why)
                    if why is not None:
                        del open_answers[index]
                    part = {"choices": [choice]} | ({} if why is None else self._versioned())
                    await reply.write(f"data: {json.dumps(part)}\n\n".encode())
                at += 1
            await reply.write(b"data: [DONE]\n\n")
        except (ConnectionResetError, asyncio.CancelledError):
            self.num_left += 1
            raise
        return reply

    def _whole(self, body: dict[str, Any], index: int, steps: list[Any]) -> dict[str, Any]:
        tokens = [token for step in steps for token in step[0]]
        return self._choice(body, index, tokens, [value for step in steps for value in step[1]], steps[-1][2])

    def _versioned(self) -> dict[str, Any]:
        return {} if self.version is None else {"weight_version": self.version}

    def _after(self, ids: list[int]) -> np.ndarray:
        return self.table[ids[-1]] if self.logits is None else self.logits(ids)

    def _write(self, body: dict[str, Any], index: int) -> Iterator[tuple[list[int], list[float], str | None]]:
        """Token by token: which, its log-prob, and why it is the last one."""
        rng = np.random.default_rng(body["seed"] + index)
        ids = list(body["prompt"])
        temperature = body["temperature"]
        stop_ids = set() if body.get("ignore_eos") else {EOS}
        stop_ids |= set(body.get("stop_token_ids") or ())
        for left in reversed(range(body["max_tokens"])):
            logits = self._after(ids)
            tempered = log_softmax(logits / (temperature or 1.0))
            kept = tempered.copy()
            if body.get("top_k", 0) > 0:
                kept[np.argsort(-kept)[body["top_k"] :]] = -np.inf
            order = np.argsort(-kept)
            before = np.cumsum(np.exp(kept[order])) - np.exp(kept[order])
            kept[order[before >= body["top_p"]]] = -np.inf
            processed = log_softmax(kept)
            token = int(tempered.argmax()) if temperature == 0 else int(rng.choice(VOCABULARY, p=np.exp(processed)))
            shown = {"raw": log_softmax(logits), "tempered": tempered, "processed": processed}[self.log_probs]
            self._largest = float(shown.max())
            if token in stop_ids and self.leaves_out_eos:
                yield [], [], "stop"
                return
            ids.append(token)
            yield [token], [float(shown[token])], "stop" if token in stop_ids else None if left else "length"
            if token in stop_ids:
                return

    def _choice(
        self, body: dict[str, Any], index: int, tokens: list[int], log_probs: list[float], why: str | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "text": "", "finish_reason": why, "logprobs": None}
        if self.tells_log_probs and body.get("logprobs") is not None:
            choice["logprobs"] = {"tokens": None, "token_logprobs": log_probs, "top_logprobs": None}
            if self.names_tokens:
                choice["logprobs"]["tokens"] = [self._name(body, token) for token in tokens]
            if body["logprobs"] > 0:
                choice["logprobs"]["top_logprobs"] = [{"?": self._largest} for _ in tokens]
        if self.dialect == "practicum" or (self.dialect == "vllm" and body.get("return_token_ids")):
            choice["token_ids"] = tokens
        return choice

    def _name(self, body: dict[str, Any], token: int) -> str:
        if self.dialect == "vllm" and body.get("return_tokens_as_token_ids"):
            return f"token_id:{token}"
        return str(self.tokenizer.decode([token])) if self.tokenizer is not None else "?"

    def _echo(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = body["prompt"]
        found = [float(log_softmax(self._after(ids[:at]))[ids[at]]) for at in range(1, len(ids))]
        return {"index": 0, "logprobs": {"tokens": [], "token_logprobs": [None, *found, -1.0]}}
