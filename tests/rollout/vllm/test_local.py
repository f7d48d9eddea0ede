"""vLLM in this process. What needs vLLM itself runs in an environment that has Practicum and vLLM together."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from practicum.errors import RolloutError
from practicum.rollout.remote.client import ServerFailure
from practicum.rollout.vllm.engine import VllmRollout
from practicum.rollout.vllm.local import LocalVllm, Vllm
from practicum.types import SamplingParams
from tests.rollout.asking import run as run_alone
from tests.rollout.asking import written
from tests.rollout.vllm.checks import VllmChecks, VllmContract, ask, check_adapters, save_model, started

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed in this Python")


class FakeEngine:
    """As vLLM's `LLMEngine`: a token more for each answer with every step, counting up from its seed."""

    model_config = SimpleNamespace(max_model_len=64)

    def __init__(self) -> None:
        self.open: dict[str, tuple[list[int], Any, int]] = {}
        self.aborted: list[str] = []
        self.rpcs: list[Any] = []
        self.adapters: list[Any] = []  # of each request
        self.loaded: list[Any] = []
        self.is_asleep = False
        self.breaks_down = False

    def add_request(self, name: str, prompt: Any, params: Any, lora_request: Any) -> None:
        self.adapters.append(lora_request)
        if params.fields["max_tokens"] > 64:
            raise ValueError("max_tokens is too large")
        self.open[name] = (prompt["prompt_token_ids"], params, 0)

    def has_unfinished_requests(self) -> bool:
        return bool(self.open)

    def step(self) -> list[Any]:
        if self.breaks_down:
            raise OSError("the device is gone")
        time.sleep(0.001)
        found = []
        for name, (prompt, params, num) in list(self.open.items()):
            fields, is_over = params.fields, num + 1 == params.fields["max_tokens"]
            self.open[name] = (prompt, params, num + 1)
            if is_over:
                del self.open[name]
            if params.is_streamed or is_over:
                first = num if params.is_streamed else 0
                found.append(output(name, prompt, fields, range(first, num + 1), is_over))
        return found

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.open.pop(name, None)
        self.aborted += names

    def collective_rpc(self, method: str, timeout: float | None, args: tuple[Any, ...], kwargs: Any) -> list[str]:
        self.rpcs.append((method, args))
        return ["done"]

    def add_lora(self, adapters: Any) -> None:
        if "broken" in adapters:
            raise ValueError("no such file")
        self.loaded.append(adapters)

    def reset_prefix_cache(self) -> bool:
        return not self.open

    def sleep(self, level: int) -> None:
        self.is_asleep = True

    def wake_up(self) -> None:
        self.is_asleep = False


def output(name: str, prompt: list[int], fields: Mapping[str, Any], numbers: range, is_over: bool) -> Any:
    def told(tokens: list[int]) -> list[Any]:
        return [{token: SimpleNamespace(logprob=-token / 10)} for token in tokens]

    outputs = []
    for index in range(fields["n"]):
        tokens = [fields["seed"] + index + number for number in numbers]
        reason = "length" if is_over else None
        outputs.append(
            SimpleNamespace(
                index=index, token_ids=tokens, logprobs=told(tokens), finish_reason=reason, routed_experts=None
            )
        )
    before = [None, *told(prompt[1:])] if fields.get("prompt_logprobs") is not None else None
    return SimpleNamespace(
        request_id=name, prompt_token_ids=prompt, prompt_logprobs=before, outputs=outputs, finished=is_over
    )


class FakeLibrary(Vllm):
    def __init__(self, fails: Exception | None = None) -> None:
        self.engine = FakeEngine()
        self.fails = fails
        self.is_stopped = False

    def start(self) -> Any:
        if self.fails is not None:
            raise self.fails
        return self.engine

    def params(self, fields: Mapping[str, Any], *, is_streamed: bool) -> Any:
        assert not {"model", "prompt", "echo", "return_token_ids"} & set(fields)
        return SimpleNamespace(fields=fields, is_streamed=is_streamed)

    def adapters(self, name: str, number: int, folder: str) -> Any:
        return (name, number, folder)

    def stop(self, engine: Any) -> None:
        self.is_stopped = True


def run(library: FakeLibrary, work: Callable[[LocalVllm], Coroutine[Any, Any, Any]], timeout_s: float = 20) -> Any:
    async def whole() -> Any:
        client = LocalVllm(library, model="m", timeout_s=timeout_s)
        client.start(timeout_s)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(whole())


def body(num_tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": [3, 4, 5], "max_tokens": num_tokens, "n": 1, "seed": 7, "logprobs": 0} | more


async def completed(client: LocalVllm, asked: dict[str, Any]) -> Any:
    return await client.call("here", "POST", "/v1/completions", asked)


def test_answers_come_whole_or_as_they_are_written() -> None:
    async def work(client: LocalVllm) -> None:
        choices = (await completed(client, body(3, n=2)))["choices"]
        assert [choice["token_ids"] for choice in choices] == [[7, 8, 9], [8, 9, 10]]
        assert choices[0]["logprobs"]["token_logprobs"] == [-0.7, -0.8, -0.9]
        assert choices[1]["finish_reason"] == "length"
        parts = [part["choices"][0] async for part in client.stream("here", body(3))]
        assert [part["token_ids"] for part in parts] == [[7], [8], [9]]
        assert [part["finish_reason"] for part in parts] == [None, None, "length"]

    library = FakeLibrary()
    run(library, work)
    assert library.is_stopped and not library.engine.aborted


def test_a_prompt_is_echoed_with_its_log_probs() -> None:
    echoed = run(FakeLibrary(), lambda client: completed(client, body(1, echo=True)))
    assert echoed["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.4, -0.5, -0.7]


def test_what_nobody_waits_for_any_more_is_ended_in_vllm() -> None:
    library = FakeLibrary()

    async def work(client: LocalVllm) -> None:
        async with aclosing(client.stream("here", body(60))) as parts:
            async for _ in parts:
                break
        asking = asyncio.create_task(completed(client, body(60)))
        await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait([asking])
        await client.call("here", "GET", "/health")  # after the aborts
        assert not library.engine.open

    run(library, work)
    assert len(library.engine.aborted) == 2


def test_it_is_asked_for_all_that_a_server_is_asked_for() -> None:
    library = FakeLibrary()

    async def work(client: LocalVllm) -> None:
        models = await client.call("here", "GET", "/v1/models")
        assert models["data"] == [{"id": "m", "owned_by": "vllm", "max_model_len": 64}]
        await client.call("here", "POST", "/sleep?level=1", {})
        assert library.engine.is_asleep
        await client.call("here", "POST", "/wake_up", {})
        assert not library.engine.is_asleep
        await client.call("here", "POST", "/collective_rpc", {"method": "practicum_load", "args": ["/new"]})
        assert (await client.call("here", "POST", "/reset_prefix_cache", {}))["success"]
        with pytest.raises(ServerFailure, match="does not know /nowhere"):
            await client.call("here", "POST", "/nowhere", {})

    run(library, work)
    assert library.engine.rpcs == [("practicum_load", ("/new",))]


def test_requests_for_a_model_with_adapters_get_those() -> None:
    library = FakeLibrary()

    async def work(client: LocalVllm) -> None:
        async def load(**told: str) -> None:
            await client.call("here", "POST", "/v1/load_lora_adapter", told)

        await completed(client, body(2))
        for name in ("m-0", "m-1"):
            await load(lora_name=name, lora_path=f"/{name}")
            await completed(client, body(2) | {"model": name})
        with pytest.raises(ServerFailure, match="m-0"):  # its adapters have given way
            await completed(client, body(2) | {"model": "m-0"})
        with pytest.raises(ServerFailure, match="no such file"):
            await load(lora_name="m-2", lora_path="broken")

    run(library, work)
    assert library.engine.loaded == [("m-0", 1, "/m-0"), ("m-1", 2, "/m-1")]
    assert library.engine.adapters == [None, *library.engine.loaded]


def test_what_vllm_refuses_or_breaks_down_with_is_told_and_not_tried_again() -> None:
    library = FakeLibrary()

    async def work(client: LocalVllm) -> None:
        with pytest.raises(ServerFailure, match="max_tokens is too large") as refused:
            await completed(client, body(65))
        assert not refused.value.is_transient
        library.engine.breaks_down = True
        for _ in range(2):
            with pytest.raises(ServerFailure, match="the device is gone") as broken:
                await completed(client, body(5))
            assert not broken.value.is_transient

    run(library, work)
    assert library.is_stopped


def test_a_request_that_a_hanging_vllm_does_not_take_has_a_deadline() -> None:
    library, may_end = FakeLibrary(), threading.Event()

    async def work(client: LocalVllm) -> None:
        library.engine.sleep = lambda level: may_end.wait(20)  # type: ignore[method-assign, assignment, return-value]
        client.timeout_s = 0.05
        asleep = asyncio.create_task(client.call("here", "POST", "/sleep?level=1", timeout_s=20))
        try:
            await asyncio.sleep(0)
            with pytest.raises(ServerFailure, match=r"let an answer wait for 0\.05 s"):
                async for _ in client.stream("here", body(3)):
                    pytest.fail("it hangs")
        finally:
            may_end.set()
            await asleep

    run(library, work)


def test_a_vllm_that_does_not_start_says_why() -> None:
    with pytest.raises(RolloutError, match=r"vLLM did not start\..*no such model"):
        LocalVllm(FakeLibrary(fails=OSError("no such model")), model="m").start(20)


def test_a_vllm_that_starts_for_too_long_is_an_error_at_the_deadline() -> None:
    class Slow(FakeLibrary):
        def start(self) -> Any:
            time.sleep(1.0)
            return super().start()

    with pytest.raises(RolloutError, match=r"not ready within 0\.1 s"):
        LocalVllm(Slow(), model="m").start(0.1)


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is here")
def test_a_python_without_vllm_says_how_to_get_it_or_do_without(tiny_model: Path) -> None:
    words = r"as rollout\.vllm\.in_process wants it.*pip install 'practicum\[vllm\]'.*in_process at false"
    with pytest.raises(RolloutError, match=words):
        VllmRollout(str(tiny_model), in_process=True)


# With vLLM itself


@needs_vllm
@pytest.mark.slow
class TestContract(VllmContract):
    where: ClassVar = {"in_process": True}


@needs_vllm
@pytest.mark.slow
class TestFamilies(VllmChecks):
    where: ClassVar = {"in_process": True}


@needs_vllm
@pytest.mark.slow
def test_an_option_vllm_does_not_know_is_an_error(tiny_model: Path) -> None:
    with pytest.raises(RolloutError, match=r"did not start.*rollout\.vllm\.options"):
        VllmRollout(str(tiny_model), in_process=True, options={"no_such_option": 1})


@needs_vllm
@pytest.mark.slow
def test_it_is_all_in_this_process(tiny_model: Path) -> None:
    import psutil

    before = set(psutil.Process().children(recursive=True))
    engine = started(tiny_model, in_process=True)
    try:
        assert written(engine, ask(SamplingParams(4)))
        assert not set(psutil.Process().children(recursive=True)) - before
    finally:
        run_alone(engine.close())


@needs_vllm
@pytest.mark.slow
def test_adapters_alone_are_computed_with(tmp_path: Path) -> None:
    check_adapters(save_model(tmp_path, "llama"), tmp_path / "adapters", in_process=True)


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_routed_experts_are_those_of_transformers(tmp_path: Path) -> None:
    # As with the server: only vLLM's second model runner knows them on the CPU, with Triton's interpreter. Both are
    # chosen when vLLM is imported, so this takes a Python of its own.
    (tmp_path / "sitecustomize.py").write_text(
        "from triton.backends import backends\nbackends['cpu'] = backends['nvidia']\n"
    )
    program = (
        "from pathlib import Path; from tests.rollout.vllm.checks import check_routes, save_model; "
        f"check_routes(save_model(Path({str(tmp_path)!r}), 'qwen3_moe'), in_process=True)"
    )
    root = Path(__file__).parents[3]
    more = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(root), os.environ.get("PYTHONPATH", "")])}
    more |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | more, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
