"""The engine `vllm`: vLLM's own server as a child process, in whatever environment it is installed in; or vLLM here.

    this process ── completions by token ids ─▶ vLLM's HTTP server ─▶ its workers, with our `vllm_worker` mixed in
                 ── weights: a folder of safetensors, and a call that has the workers load it
                 ── or adapters alone: a folder of them, and requests that name them
                 ── sleep and wake (on GPUs; on the CPU vLLM has nothing to give back)

vLLM needs a torch of its own choosing, hence the other process and the other Python: Practicum is not installed there.
Where both are installed together, `in_process` does without server and HTTP: see `vllm_local`. Nothing else differs.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from practicum.adapters import LoneAdapters, find_targets, write_adapters
from practicum.errors import RolloutError
from practicum.models import absolute, empty_model, load_config, load_tokenizer, plain_path, save_merged
from practicum.replay import RouterShape, router_shape
from practicum.rollout.remote import vllm_worker
from practicum.rollout.remote.completions import CompletionsClient, ServerFailure, Transport
from practicum.rollout.remote.dialect import Dialect, shake_hands
from practicum.rollout.remote.engine import Answer, Job, RemoteRollout
from practicum.rollout.remote.folders import eos_ids_of, write_folder
from practicum.rollout.remote.guarded import GuardedServer
from practicum.rollout.remote.vllm_local import LocalVllm, Vllm
from practicum.types import RoutedExperts
from practicum.weights import WeightUpdate

_MODULE = "practicum_vllm_worker"
_LOOK_S = 60.0
_POLL_S = 0.25
_HEALTH_S = 5.0
_CONTROL_S = 600.0
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Of adapters that vLLM may be told to have room for."""


class VllmRollout(RemoteRollout):
    """`python` is the Python of the environment with vLLM in it, None this one; `options` are vLLM's engine options.
    With `in_process` vLLM runs in this very process.

    Options are written as on its command line, with underscores: `{"gpu_memory_utilization": 0.5}`. `keep_routes` has
    it return the experts each token was sent to; answers then come whole, so nothing is left of one that is broken off.
    With `adapters` it has the model that they belong to, and computes with both side by side.
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
    ) -> None:
        assert not (in_process and python), "in_process is about the Python we run in"
        check_installed(python, in_process=in_process)
        self._adapters = adapters
        self._path = absolute(model_path if adapters is None else adapters.base)
        goes_on = self._path != absolute(model_path)  # with adapters that have been learnt before
        self._can_sleep = device is not None and device.type == "cuda"
        self._exchange_dir = exchange_dir
        self._routers = router_shape(empty_model(load_config(self._path))) if keep_routes else None
        tokenizer, eos_ids = load_tokenizer(self._path), eos_ids_of(self._path)
        self._folder = Path(tempfile.mkdtemp(prefix="practicum-vllm-"))
        self._path = self._whole(dtype)
        self._model = f"practicum-{uuid.uuid4().hex}"  # a server that others start at this address knows no such one
        settings = self._settings(dtype, tensor_parallel, max_batch, cache_gb) | dict(options or {})
        environment = self._environment(cache_gb)
        self._server: GuardedServer | None = None
        client: Transport
        if in_process:
            self._url = "in this process"
            client = LocalVllm(Vllm(arguments(settings), environment), model=self._model, timeout_s=timeout_s)
        else:
            self._url = f"http://127.0.0.1:{_free_port()}"
            self._server = self._start_server(python or sys.executable, settings, environment)
            client = CompletionsClient(timeout_s=timeout_s)
        super().__init__(client, tokenizer=tokenizer, eos_ids=eos_ids, max_batch=max_batch)
        self._reads_routes = keep_routes
        self._is_asleep = False
        self._num_loads = 0  # of adapters
        try:
            self._wait_until_healthy(start_timeout_s)
            self._call("/collective_rpc", {"method": "practicum_prepare"})
            self._dialect = self._shake_hands()
            if goes_on:
                self._load_adapters(model_path)
        except BaseException:
            self.close()
            raise

    def _whole(self, dtype: torch.dtype) -> str:
        """Where its model is; adapters are merged first."""
        if plain_path(self._path) == self._path:
            return self._path
        save_merged(self._path, self._folder / "model", dtype)
        return str(self._folder / "model")

    def resume(self) -> None:
        if self._is_asleep:
            self._call("/wake_up")
            self._is_asleep = False
        self._awake = True

    def release(self) -> None:
        self._awake = False
        if self._can_sleep and not self._is_asleep:
            self._call("/sleep?level=1")  # weights go to the host's memory, the cache is dropped
            self._is_asleep = True

    def update_weights(self, update: WeightUpdate) -> None:
        assert not self._is_asleep, "update_weights before resume"
        if self._adapters is None:
            with tempfile.TemporaryDirectory(prefix="weights-", dir=self._exchange_dir) as folder:
                write_folder(Path(folder), self._path, update.tensors)
                self._load(folder)
        else:
            with tempfile.TemporaryDirectory(prefix="adapters-", dir=self._folder) as folder:
                write_adapters(Path(folder), self._adapters, update.tensors)
                self._load_adapters(folder)
        # Keys and values of the old weights would be taken for those of the new ones.
        if not self._call("/reset_prefix_cache").get("success"):
            raise RolloutError(f"{self._name} still writes, so its cache cannot be emptied for new weights.")
        self._version = update.version

    def _load(self, folder: str) -> None:
        self._call("/collective_rpc", {"method": "practicum_load", "args": [folder]})

    def _load_adapters(self, folder: str) -> None:
        """From now on the model of all requests is the one with these. vLLM has room for one: they take that of those
        before, and nobody asks for these any more."""
        self._num_loads += 1
        name = f"{self._model}-{self._num_loads}"  # one that failed may be there all the same
        self._call("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        self._dialect = replace(self._known, model=name)

    def close(self) -> None:
        """End it. A server also ends with this process, however that comes."""
        if self._server is not None:
            self._server.stop()
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _address(self) -> str:
        return self._url

    @property
    def _name(self) -> str:
        return f"{self._url} (vLLM, {self._path})"

    def _settings(
        self, dtype: torch.dtype, tensor_parallel: int, max_batch: int, cache_gb: float | None
    ) -> dict[str, Any]:
        """vLLM's options, but for those of its server."""
        settings: dict[str, Any] = {
            "model": self._path,
            "served_model_name": self._model,
            "dtype": str(dtype).removeprefix("torch."),
            "tensor_parallel_size": tensor_parallel,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": f"{vllm_worker.__name__}.{vllm_worker.PracticumWorker.__name__}",
            "generation_config": "vllm",  # none of the model's own settings: what is asked for counts
            "max_num_seqs": max_batch,
        }
        if self._can_sleep:
            settings["enable_sleep_mode"] = True
            if cache_gb is not None:
                settings["kv_cache_memory_bytes"] = int(cache_gb * 1e9)
        if self._routers is not None:
            settings["enable_return_routed_experts"] = True
        if self._adapters is not None:
            settings |= _lora_settings(self._adapters)
        return settings

    def _environment(self, cache_gb: float | None) -> dict[str, str]:
        ours = {"VLLM_NO_USAGE_STATS": "1"}
        if self._adapters is not None:
            ours["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if not self._can_sleep and cache_gb is not None:
            ours["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(cache_gb)))
        return ours

    def _start_server(self, python: str, settings: dict[str, Any], environment: dict[str, str]) -> GuardedServer:
        shutil.copyfile(vllm_worker.__file__, self._folder / f"{_MODULE}.py")
        # Our worker goes by another name there, where Practicum is not installed.
        worker = {"worker_extension_cls": f"{_MODULE}.{vllm_worker.PracticumWorker.__name__}"}
        server = {"host": "127.0.0.1", "port": int(self._url.rsplit(":", 1)[1])}
        words = arguments(settings | server | worker)
        paths = [str(self._folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        more = {
            "PYTHONPATH": os.pathsep.join(paths),
            "VLLM_SERVER_DEV_MODE": "1",  # for sleep and new weights; the server listens to this machine only
        }
        return GuardedServer(
            [python, "-m", "vllm.entrypoints.openai.api_server", *words],
            log=self._folder / "vllm.log",
            environment=dict(os.environ) | environment | more,
        )

    @property
    def _said(self) -> str:
        """The end of what its server printed; within this process it prints to our own log."""
        return "" if self._server is None else f" The end of what vLLM said:\n{self._server.last_words}"

    def _wait_until_healthy(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            if self._server is not None and self._server.exit_code is not None:
                raise RolloutError(
                    f"vLLM ended with exit code {self._server.exit_code} before it was ready.{self._said}"
                )
            wait_s = timeout_s if self._server is None else _HEALTH_S
            try:
                self._thread.run(self._client.call(self._url, "GET", "/health", timeout_s=wait_s))
                return
            except ServerFailure as failure:
                if not failure.may_pass:
                    raise RolloutError(f"vLLM did not start. {failure}.{self._said}") from failure
                if time.monotonic() > deadline:
                    raise RolloutError(f"vLLM was not ready within {timeout_s:g} s.{self._said}") from None
            time.sleep(_POLL_S)

    def _shake_hands(self) -> Dialect:
        try:
            return self._thread.run(shake_hands(self._client, self._url, self._model, self._tokenizer))
        except RolloutError as error:
            raise RolloutError(f"{error}{self._said}") from error

    def _call(self, path: str, body: Any = None) -> Any:
        try:
            return self._thread.run(self._client.call(self._url, "POST", path, body or {}, _CONTROL_S)) or {}
        except ServerFailure as failure:
            raise RolloutError(f"{failure}.{self._said}") from failure

    def _error(self, request: Any, error: Exception) -> Exception:
        told = super()._error(request, error)
        if isinstance(told, RolloutError) and self._server is not None and self._server.exit_code is not None:
            return RolloutError(f"vLLM has ended. {told}{self._said}")
        return told

    def _routes(self, job: Job, answer: Answer, choice: Mapping[str, Any]) -> RoutedExperts | None:
        if self._routers is None:
            return None
        packed = choice.get("routed_experts")
        if packed is None:
            raise RolloutError(f"{self._name} returned no routed experts, though it was started to.")
        return decode_routes(packed, self._routers, len(job.prompt) + len(answer.tokens))


def _lora_settings(adapters: LoneAdapters) -> dict[str, Any]:
    room = next((most for most in LORA_RANKS if most >= adapters.settings.rank), LORA_RANKS[-1])
    targets = find_targets(empty_model(load_config(adapters.base)), adapters.settings)
    # Else all layers are made ready for adapters, also those that have none.
    names = sorted({name.rpartition(".")[2] for name in targets})
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room, "lora_target_modules": names}


def decode_routes(packed: str | NDArray[Any], routers: RouterShape, num_tokens: int) -> RoutedExperts:
    """From vLLM's rows for all layers, one for each token that a next one was drawn after: not for the last."""
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
    """As on vLLM's command line."""
    words: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if value is True or value is False:
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, Mapping):
            words += [f"--{flag}", json.dumps(dict(value))]
        elif isinstance(value, list | tuple):
            words += [f"--{flag}", *map(str, value)]
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words


def check_installed(python: str | None, *, in_process: bool = False) -> None:
    """Raise `RolloutError` where there is no vLLM in this Python; None: the one we run in."""
    look = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('vllm') else 3)"
    try:
        looked = subprocess.run([python or sys.executable, "-c", look], timeout=_LOOK_S, check=False)
        code: int | str = looked.returncode
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
