"""The engine `vllm`: vLLM's own server as a child process, in whatever environment it is installed in.

    this process ── completions by token ids ─▶ vLLM's HTTP server ─▶ its workers, with our `vllm_worker` mixed in
                 ── weights: a folder of safetensors, and a call that has the workers load it
                 ── sleep and wake (on GPUs; on the CPU vLLM has nothing to give back)

vLLM needs a torch of its own choosing, hence the other process and the other Python: Practicum is not installed there.
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
from pathlib import Path
from typing import Any

import numpy as np
import torch

from practicum.errors import RolloutError
from practicum.models import absolute, empty_model, load_config, load_tokenizer, plain_path, save_merged
from practicum.replay import RouterShape, router_shape
from practicum.rollout.remote import vllm_worker
from practicum.rollout.remote.completions import ServerFailure
from practicum.rollout.remote.dialect import Dialect, shake_hands
from practicum.rollout.remote.engine import Answer, Job, RemoteRollout
from practicum.rollout.remote.folders import eos_ids_of, write_folder
from practicum.rollout.remote.guarded import GuardedServer
from practicum.types import RoutedExperts
from practicum.weights import WeightUpdate

_MODULE = "practicum_vllm_worker"
_LOOK_S = 60.0
_POLL_S = 0.25
_HEALTH_S = 5.0
_CONTROL_S = 600.0


class VllmRollout(RemoteRollout):
    """`python` is the Python of the environment with vLLM in it, None this one; `options` are vLLM's engine options.

    Options are written as on its command line, with underscores: `{"gpu_memory_utilization": 0.5}`. `keep_routes` has
    it return the experts each token was sent to; answers then come whole, so nothing is left of one that is broken off.
    """

    def __init__(
        self,
        model_path: str,
        *,
        python: str | None = None,
        options: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        tensor_parallel: int = 1,
        max_batch: int = 512,
        cache_gb: float | None = None,
        keep_routes: bool = False,
        timeout_s: float = 300.0,
        start_timeout_s: float = 900.0,
        exchange_dir: str | None = None,
    ) -> None:
        self._python = python or sys.executable
        check_installed(python)
        self._path = absolute(model_path)
        self._can_sleep = device is not None and device.type == "cuda"
        self._exchange_dir = exchange_dir
        self._routers = router_shape(empty_model(load_config(self._path))) if keep_routes else None
        tokenizer, eos_ids = load_tokenizer(self._path), eos_ids_of(self._path)
        super().__init__(tokenizer=tokenizer, eos_ids=eos_ids, max_batch=max_batch, timeout_s=timeout_s)
        self._reads_routes = keep_routes
        self._is_asleep = False
        self._folder = Path(tempfile.mkdtemp(prefix="practicum-vllm-"))
        shutil.copyfile(vllm_worker.__file__, self._folder / f"{_MODULE}.py")
        self._path = self._whole(dtype)
        self._url = f"http://127.0.0.1:{_free_port()}"
        self._model = f"practicum-{uuid.uuid4().hex}"  # a server that others start at this address knows no such one
        settings = {
            "model": self._path,
            "served_model_name": self._model,
            "host": "127.0.0.1",
            "port": int(self._url.rsplit(":", 1)[1]),
            "dtype": str(dtype).removeprefix("torch."),
            "tensor_parallel_size": tensor_parallel,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": f"{_MODULE}.{vllm_worker.PracticumWorker.__name__}",
            "generation_config": "vllm",  # none of the model's own settings: what is asked for counts
            "max_num_seqs": max_batch,
        }
        if self._can_sleep:
            settings["enable_sleep_mode"] = True
            if cache_gb is not None:
                settings["kv_cache_memory_bytes"] = int(cache_gb * 1e9)
        if keep_routes:
            settings["enable_return_routed_experts"] = True
        command = [self._python, "-m", "vllm.entrypoints.openai.api_server", *arguments(settings | dict(options or {}))]
        environment = self._environment(cache_gb)
        self._server = GuardedServer(command, log=self._folder / "vllm.log", environment=environment)
        try:
            self._wait_until_healthy(start_timeout_s)
            self._call("/collective_rpc", {"method": "practicum_prepare"})
            self._dialect = self._shake_hands()
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
        with tempfile.TemporaryDirectory(prefix="weights-", dir=self._exchange_dir) as folder:
            write_folder(Path(folder), self._path, update.tensors)
            self._call("/collective_rpc", {"method": "practicum_load", "args": [folder]})
        # Keys and values of the old weights would be taken for those of the new ones.
        if not self._call("/reset_prefix_cache").get("success"):
            raise RolloutError(f"{self._name} still writes, so its cache cannot be emptied for new weights.")
        self._version = update.version

    def close(self) -> None:
        """End the server. It also ends with this process, however that comes."""
        self._server.stop()
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _address(self) -> str:
        return self._url

    @property
    def _name(self) -> str:
        return f"{self._url} (vLLM, {self._path})"

    def _environment(self, cache_gb: float | None) -> dict[str, str]:
        paths = [str(self._folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        ours = {
            "PYTHONPATH": os.pathsep.join(paths),
            "VLLM_SERVER_DEV_MODE": "1",  # for sleep and new weights; the server listens to this machine only
            "VLLM_NO_USAGE_STATS": "1",
        }
        if not self._can_sleep and cache_gb is not None:
            ours["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(cache_gb)))
        return dict(os.environ) | ours

    def _wait_until_healthy(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            if self._server.exit_code is not None:
                raise RolloutError(
                    f"vLLM ended with exit code {self._server.exit_code} before it was ready. The end of what it "
                    f"said:\n{self._server.last_words}"
                )
            try:
                self._thread.run(self._client.call(self._url, "GET", "/health", timeout_s=_HEALTH_S))
                return
            except ServerFailure:
                if time.monotonic() > deadline:
                    raise RolloutError(
                        f"vLLM was not ready within {timeout_s:g} s. The end of what it said:\n"
                        f"{self._server.last_words}"
                    ) from None
            time.sleep(_POLL_S)

    def _shake_hands(self) -> Dialect:
        try:
            return self._thread.run(shake_hands(self._client, self._url, self._model, self._tokenizer))
        except RolloutError as error:
            raise RolloutError(f"{error} The end of what vLLM said:\n{self._server.last_words}") from error

    def _call(self, path: str, body: Any = None) -> Any:
        try:
            return self._thread.run(self._client.call(self._url, "POST", path, body or {}, _CONTROL_S)) or {}
        except ServerFailure as failure:
            raise RolloutError(f"{failure}. The end of what vLLM said:\n{self._server.last_words}") from failure

    def _error(self, request: Any, error: Exception) -> Exception:
        told = super()._error(request, error)
        if isinstance(told, RolloutError) and self._server.exit_code is not None:
            return RolloutError(f"vLLM has ended. {told} The end of what it said:\n{self._server.last_words}")
        return told

    def _routes(self, job: Job, answer: Answer, choice: Mapping[str, Any]) -> RoutedExperts | None:
        if self._routers is None:
            return None
        packed = choice.get("routed_experts")
        if packed is None:
            raise RolloutError(f"{self._name} returned no routed experts, though it was started to.")
        return decode_routes(packed, self._routers, len(job.prompt) + len(answer.tokens))


def decode_routes(packed: str, routers: RouterShape, num_tokens: int) -> RoutedExperts:
    """From vLLM's rows for all layers, one for each token that a next one was drawn after: not for the last."""
    rows = np.load(io.BytesIO(base64.b64decode(packed)), allow_pickle=False)
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


def check_installed(python: str | None) -> None:
    """Raise `RolloutError` where there is no vLLM in this Python; None: the one we run in."""
    look = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('vllm') else 3)"
    try:
        looked = subprocess.run([python or sys.executable, "-c", look], timeout=_LOOK_S, check=False)
        code: int | str = looked.returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        code = str(error)
    if code != 0:
        where = f"of rollout.vllm.python={python}" if python is not None else "Practicum runs in"
        raise RolloutError(
            f"vLLM is not installed in the Python {where} ({'no module vllm' if code == 3 else code}). Either "
            "pip install 'practicum[vllm]', or install vLLM into an environment of its own and set "
            "rollout.vllm.python to its Python."
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
