"""The engine `vllm`: vLLM's own server as a child process, in whatever environment it is installed in; or vLLM here.

    this process ── completions by token ids ─▶ vLLM's HTTP server ─▶ its workers, with `vllm/worker.py` mixed in
                 ── weights: a folder of safetensors, and a call that has the workers load it
                 ── or adapters alone: a folder of them, and requests that name them
                 ── sleep and wake (on GPUs; on the CPU vLLM has nothing to give back)

vLLM needs a torch of its own choosing, hence the other process and the other Python: Practicum is not installed there.
Where both are installed together, `in_process` does without server and HTTP: see local.py. Nothing else differs.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from practicum.adapters import LoneAdapters, find_targets
from practicum.controller.host import free_port
from practicum.errors import RolloutError
from practicum.models import (
    DTYPES,
    absolute,
    count_weights,
    empty_model,
    load_config,
    plain_path,
    resolve_device,
    save_merged,
)
from practicum.replay import RouterShape, router_shape
from practicum.rollout.engine.sequence import Sequence
from practicum.rollout.engine.sleep import free_bytes, gigabytes
from practicum.rollout.engines import EngineSettings
from practicum.rollout.remote.capabilities import probe
from practicum.rollout.remote.client import CompletionsClient, ServerFailure
from practicum.rollout.remote.engine import CONTROL_TIMEOUT_S, Answer, RemoteRollout
from practicum.rollout.vllm import worker
from practicum.rollout.vllm.local import LocalVllm, Vllm
from practicum.rollout.vllm.process import ChildServer
from practicum.types import RoutedExperts

log = logging.getLogger("practicum.rollout")
_MODULE = "practicum_vllm_worker"
_CACHE_SHARE = 1 / 3  # of what is free beside the weights, as with the native engine
_START_SHARE = 0.9  # of what is free on a card: what vLLM may ask for
_HOST_CACHE = "VLLM_CPU_KVCACHE_SPACE"  # in whole GiB
_FIND_S = 60.0
_POLL_S = 0.25
_HEALTH_S = 5.0
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks of adapters that vLLM can have room for."""


class VllmRollout(RemoteRollout):
    """`python` is the Python of the environment with vLLM in it, None this one; `options` are vLLM's engine options.
    With `in_process` vLLM runs in this very process.

    Options are written as on its command line, with underscores: `{"gpu_memory_utilization": 0.5}`. `keep_routes` has
    it return the experts each token was sent to; answers then come whole, so nothing is left of one that is aborted.
    With `adapters` it has the model that they belong to, and computes with both side by side.

    Without `cache_gb` keys and values get a third of the memory that is free beside the weights; on CPUs that third is
    shared by `num_on_machine` engines. What `options` say of memory comes first.

    It starts at once, which takes a while, and is probed when it is resumed first. What the server prints is kept in a
    file in `log_dir`, if there is one.
    """

    def __init__(
        self,
        model_path: str,
        *,
        python: str | None = None,
        in_process: bool = False,
        options: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        tensor_parallel: int = 1,
        max_batch: int = 512,
        cache_gb: float | None = None,
        keep_routes: bool = False,
        adapters: LoneAdapters | None = None,
        timeout_s: float = 300.0,
        start_timeout_s: float = 900.0,
        exchange_dir: str | None = None,
        log_dir: str | None = None,
        num_on_machine: int = 1,
    ) -> None:
        assert not (in_process and python), "in_process is about the Python we run in"
        check_installed(python, in_process=in_process)
        self._folder = Path(tempfile.mkdtemp(prefix="practicum-vllm-"))
        path = absolute(model_path if adapters is None else adapters.base)
        self._first_adapters = None if path == absolute(model_path) else model_path  # that have been learnt before
        if plain_path(path) != path:
            save_merged(path, self._folder / "model", dtype)
            path = str(self._folder / "model")
        self._can_sleep = device is not None and device.type == "cuda"
        self._routers = router_shape(empty_model(load_config(path))) if keep_routes else None
        self._path, self._adapters = path, adapters
        self._served_model = f"practicum-{uuid.uuid4().hex}"  # a server that others start here knows no such model
        options = options or {}
        settings, environment = self._settings(dtype, tensor_parallel, max_batch), self._environment()
        # An option counts more than a share; in the environment on CPUs a share would count more than any option.
        is_told = "gpu_memory_utilization" in options or (not self._can_sleep and "kv_cache_memory_bytes" in options)
        if cache_gb is not None or not is_told:
            size = count_weights(load_config(path), classifier=False) * dtype.itemsize / tensor_parallel
            if self._can_sleep:
                settings |= _card_memory(python or sys.executable, cache_gb, size)
            else:
                environment |= _host_memory(cache_gb, size, num_on_machine)
        settings |= options
        if log_dir is not None:
            try:
                Path(log_dir).mkdir(parents=True, exist_ok=True)
            except OSError as error:  # this machine has no such place
                log.warning("what vLLM prints is not kept: %s cannot be written on this machine: %s", log_dir, error)
                log_dir = None
        # Workers of several machines may share the folder.
        name = f"vllm-{socket.gethostname()}-{os.getpid()}.log"
        self._log = (self._folder if log_dir is None else Path(log_dir)) / name
        self._keeps_log = log_dir is not None
        self._server: ChildServer | None = None
        client: LocalVllm | CompletionsClient
        if in_process:
            self._url = "in this process"
            client = LocalVllm(Vllm(arguments(settings), environment), model=self._served_model, timeout_s=timeout_s)
        else:
            self._url = f"http://127.0.0.1:{free_port()}"
            client = CompletionsClient(timeout_s=timeout_s)
        super().__init__(client, model_path=path, max_batch=max_batch, adapters=adapters, exchange_dir=exchange_dir)
        self._reads_routes = keep_routes
        self._is_asleep = False
        self._num_loads = 0  # of adapters
        try:
            if isinstance(client, LocalVllm):
                client.start(start_timeout_s)
            else:
                self._server = self._start_server(python or sys.executable, settings, environment)
                self._wait_until_healthy(self._server, start_timeout_s)
        except BaseException:
            self._stop()
            raise

    @classmethod
    def of(cls, settings: EngineSettings) -> VllmRollout:
        return cls(
            settings.model_path,
            python=settings.vllm.python,
            in_process=settings.vllm.in_process,
            options=settings.vllm.options,
            device=resolve_device(settings.device),
            dtype=DTYPES[settings.dtype],
            tensor_parallel=settings.vllm.tensor_parallel,
            max_batch=settings.max_batch,
            cache_gb=settings.cache_gb,
            keep_routes=settings.keep_routes,
            adapters=settings.adapters,
            timeout_s=settings.timeout_s,
            start_timeout_s=settings.start_timeout_s,
            exchange_dir=settings.exchange_dir,
            log_dir=settings.log_dir,
            num_on_machine=settings.num_on_machine,
        )

    async def resume(self) -> None:
        if self._is_asleep:
            await self._call("/wake_up")
            self._is_asleep = False
        if self._capabilities is None:
            await self._call("/collective_rpc", {"method": "practicum_prepare"})
            try:
                self._capabilities = await probe(self._client, self._url, self._served_model, self._tokenizer)
            except RolloutError as error:
                raise RolloutError(f"{error}{self._output}") from error
            if self._first_adapters is not None:
                await self._load_adapters(self._first_adapters)
        self.is_awake = True

    async def release(self) -> None:
        if self._can_sleep and not self._is_asleep:
            await self._call("/sleep?level=1")  # weights go to the host's memory, the cache is dropped
            self._is_asleep = True
        self.is_awake = False

    async def _load(self, folder: str, version: int) -> None:
        if self._adapters is None:
            await self._load_model(folder)
        else:
            await self._load_adapters(folder)
        # Keys and values of the old weights would be taken for those of the new ones.
        if not (await self._call("/reset_prefix_cache")).get("success"):
            raise RolloutError(f"{self._name} still writes, so its cache cannot be emptied for new weights.")

    async def _load_model(self, folder: str) -> None:
        await self._call("/collective_rpc", {"method": "practicum_load", "args": [folder]})

    async def _load_adapters(self, folder: str) -> None:
        """Have all requests from now on answered by the model with these adapters.

        vLLM has room for one: they take the room of those before, which no request names any more.
        """
        self._num_loads += 1
        name = f"{self._served_model}-{self._num_loads}"  # one that failed may be there all the same
        await self._call("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        self._capabilities = replace(self._known, model=name)

    async def close(self) -> None:
        """End it. A server also ends with this process, however that comes."""
        await super().close()
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        if self._server is not None:
            self._server.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _address(self) -> str:
        return self._url

    @property
    def _name(self) -> str:
        return f"{self._url} (vLLM, {self._path})"

    def _settings(self, dtype: torch.dtype, tensor_parallel: int, max_batch: int) -> dict[str, Any]:
        """Return vLLM's options, but for those of its server and of memory."""
        settings: dict[str, Any] = {
            "model": self._path,
            "served_model_name": self._served_model,
            "dtype": str(dtype).removeprefix("torch."),
            "tensor_parallel_size": tensor_parallel,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": f"{worker.__name__}.{worker.PracticumWorker.__name__}",
            "generation_config": "vllm",  # none of the model's own settings: what is asked for counts
            "max_num_seqs": max_batch,
        }
        if self._can_sleep:
            settings["enable_sleep_mode"] = True
        if self._routers is not None:
            settings["enable_return_routed_experts"] = True
        if self._adapters is not None:
            settings |= _lora_settings(self._adapters)
        return settings

    def _environment(self) -> dict[str, str]:
        ours = {"VLLM_NO_USAGE_STATS": "1"}
        if self._adapters is not None:
            ours["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        return ours

    def _start_server(self, python: str, settings: dict[str, Any], environment: dict[str, str]) -> ChildServer:
        shutil.copyfile(worker.__file__, self._folder / f"{_MODULE}.py")
        # Our worker goes by another name there, where Practicum is not installed.
        extension = {"worker_extension_cls": f"{_MODULE}.{worker.PracticumWorker.__name__}"}
        server = {"host": "127.0.0.1", "port": int(self._url.rsplit(":", 1)[1])}
        flags = arguments(settings | server | extension)
        paths = [str(self._folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        more = {
            "PYTHONPATH": os.pathsep.join(paths),
            "VLLM_SERVER_DEV_MODE": "1",  # for sleep and new weights; the server listens to this machine only
        }
        return ChildServer(
            [python, "-m", "vllm.entrypoints.openai.api_server", *flags],
            log=self._log,
            environment=dict(os.environ) | environment | more,
        )

    @property
    def _output(self) -> str:
        """Return what its server printed of a failure; within this process it prints to our own log."""
        if self._server is None:
            return ""
        kept = f" All that vLLM printed is in {self._log}." if self._keeps_log else ""
        return f"{kept} {self._server.last_output}"

    def _wait_until_healthy(self, server: ChildServer, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while True:
            if server.exit_code is not None:
                raise RolloutError(f"vLLM ended with exit code {server.exit_code} before it was ready.{self._output}")
            try:
                with opener.open(f"{self._url}/health", timeout=_HEALTH_S):
                    server.mark_ready()
                    return
            except urllib.error.HTTPError as error:
                if error.code < 500:
                    raise RolloutError(
                        f"vLLM did not start. It answered /health with {error}.{self._output}"
                    ) from error
            except OSError:
                pass  # it does not listen yet
            if time.monotonic() > deadline:
                raise RolloutError(f"vLLM was not ready within {timeout_s:g} s.{self._output}")
            time.sleep(_POLL_S)

    async def _call(self, path: str, body: Any = None) -> Any:
        try:
            return await self._client.call(self._url, "POST", path, body or {}, CONTROL_TIMEOUT_S) or {}
        except ServerFailure as failure:
            raise RolloutError(f"{failure}.{self._output}") from failure

    def _error(self, sequence: Sequence, error: BaseException) -> Exception:
        own = super()._error(sequence, error)
        if isinstance(own, RolloutError) and self._server is not None and self._server.exit_code is not None:
            return RolloutError(f"vLLM has ended. {own}{self._output}")
        return own

    def _routes(self, answer: Answer, choice: Mapping[str, Any]) -> RoutedExperts | None:
        if self._routers is None:
            return None
        packed = choice.get("routed_experts")
        if packed is None:
            raise RolloutError(f"{self._name} returned no routed experts, though it was started to.")
        return decode_routes(packed, self._routers, answer.sequence.num_tokens)


def _host_memory(cache_gb: float | None, size: float, num_on_machine: int) -> dict[str, str]:
    """Return the environment for a cache of so many GB, or of a share of what is free beside weights of `size` bytes.

    vLLM's own default is nearly all memory of the machine, also of what others there have.
    """
    if cache_gb is None:
        if _HOST_CACHE in os.environ:
            return {}
        free = free_bytes(torch.device("cpu"))
        cache_gb = max(0.0, free / num_on_machine - size) * _CACHE_SHARE / 2**30
        log.info("vLLM gets %.3g GiB for keys and values, of %s that are free", max(1, int(cache_gb)), gigabytes(free))
        return {_HOST_CACHE: str(max(1, int(cache_gb)))}
    return {_HOST_CACHE: str(max(1, round(cache_gb)))}


def _card_memory(python: str, cache_gb: float | None, size: float) -> dict[str, Any]:
    """Return vLLM's options for a cache of so many GB, or of a share of what is free beside weights of `size` bytes.

    vLLM refuses to start where less is free than `gpu_memory_utilization` asks for, even if it is told how large the
    cache is to be. Its default asks for nearly all of the card.
    """
    own = {} if cache_gb is None else {"kv_cache_memory_bytes": int(cache_gb * 1e9)}
    memory = _card_bytes(python)
    if memory is None:
        return own
    free, total = memory
    if cache_gb is None:
        own["kv_cache_memory_bytes"] = int(max(0.0, free - size) * _CACHE_SHARE)
    return own | {"gpu_memory_utilization": math.floor(_START_SHARE * free / total * 100) / 100}


def _card_bytes(python: str) -> tuple[int, int] | None:
    """Return the free and all memory of the first card, None if this cannot be found out.

    Another process asks: whoever asks keeps some hundreds of MB of the card for as long as it lives.
    """
    ask = "import torch; print(*torch.cuda.mem_get_info())"
    try:
        found = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=_FIND_S, check=True)
        free, total = map(int, found.stdout.split()[-2:])
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        log.warning(
            "how much memory the card has free cannot be found out, so vLLM decides how much it takes: %s", error
        )
        return None
    return free, total


def _lora_settings(adapters: LoneAdapters) -> dict[str, Any]:
    room = next((most for most in LORA_RANKS if most >= adapters.settings.rank), LORA_RANKS[-1])
    targets = find_targets(empty_model(load_config(adapters.base)), adapters.settings)
    # Else all layers are made ready for adapters, also those that have none.
    names = sorted({name.rpartition(".")[2] for name in targets})
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room, "lora_target_modules": names}


def decode_routes(packed: str | NDArray[Any], routers: RouterShape, num_tokens: int) -> RoutedExperts:
    """Return the routes in vLLM's rows for all layers, one for each token that a next one was drawn after."""
    rows = np.load(io.BytesIO(base64.b64decode(packed)), allow_pickle=False) if isinstance(packed, str) else packed
    num_known = min(len(rows), num_tokens)
    if num_known < num_tokens - 1 or rows.shape[1] <= routers.layers[-1] or rows.shape[2] != routers.k:
        raise RolloutError(f"vLLM returned routed experts of shape {rows.shape} for {num_tokens} tokens.")
    known = np.sort(rows[:num_known, routers.layers], axis=-1)
    if (known[..., -1] >= routers.num_experts).any() or (known[..., 1:] == known[..., :-1]).any():
        raise RolloutError(f"vLLM returned rows that are not {routers.k} of {routers.num_experts} experts.")
    experts = np.zeros((num_tokens, len(routers.layers), routers.k), routers.dtype)
    experts[:num_known] = known
    return RoutedExperts(experts, routers.layers, np.arange(num_tokens) < num_known, routers.num_experts)


def arguments(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as they are written on vLLM's command line."""
    flags: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if value is True or value is False:
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, Mapping):
            flags += [f"--{flag}", json.dumps(dict(value))]
        elif isinstance(value, list | tuple):
            flags += [f"--{flag}", *map(str, value)]
        elif value is not None:
            flags += [f"--{flag}", str(value)]
    return flags


def check_installed(python: str | None, *, in_process: bool = False) -> None:
    """Raise `RolloutError` where there is no vLLM in this Python; None is the one we run in."""
    find = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('vllm') else 3)"
    try:
        found = subprocess.run([python or sys.executable, "-c", find], timeout=_FIND_S, check=False)
        code: int | str = found.returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        code = str(error)
    if code != 0:
        where = f"of rollout.vllm.python={python}" if python is not None else "Practicum runs in"
        wanted = ", as rollout.vllm.in_process wants it" if in_process else ""
        other = ", leave rollout.vllm.in_process at false" if in_process else ""
        raise RolloutError(
            f"vLLM is not installed in the Python {where}{wanted} ({'no module vllm' if code == 3 else code}). Either "
            f"pip install 'practicum[vllm]', or install vLLM into an environment of its own{other} and set "
            "rollout.vllm.python to its Python."
        )
