"""The kernels of kernels.c: built with the machine's C compiler when they are first wanted, in less than a second.

    linear, gated, experts   products of few rows with weights as they lie: nothing is copied, prepared or kept
    keep, attend             a new token's keys and values to their place; attention, for each row as far as it reaches
    rms_norm                 one pass where PyTorch makes six

On two cores of an EPYC, 16 rows by 256 x 1024 run at 61 GFLOP/s in oneDNN and at 130 here, 64 rows by 256 x 256 at 103
and 164. What is built is kept in the user's cache folder, by source and machine. Where there is no compiler, or none
that will do, the engine goes without: slower, with the same results but for rounding.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

_SOURCE = Path(__file__).with_name("kernels.c")
_OPTIONS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC")
_BUILD_S = 60.0
_log = logging.getLogger(__name__)

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_ARGUMENTS = {
    "linear": [_POINTER] * 4 + [_LONG] * 3 + [_INT],
    "gated": [_POINTER] * 4 + [_LONG] * 3 + [_INT],
    "experts": [_POINTER] * 9 + [_LONG] * 5 + [_INT],
    "rms_norm": [_POINTER] * 3 + [_LONG] * 2 + [_FLOAT, _INT],
    "keep": [_POINTER] * 3 + [_LONG] * 4,
    "attend": [_POINTER] * 6 + [_LONG] * 11 + [_FLOAT, _INT],
}


class Kernels:
    """For float32 on a CPU, and not for training. Tensors that are not contiguous are copied."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        self._library = library

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., num] from x [..., width] and a weight [num, width]."""
        x, weight = x.contiguous(), weight.contiguous()
        num, width = weight.shape
        out = x.new_empty(*x.shape[:-1], num)
        at = 0 if bias is None else bias.data_ptr()
        self._library.linear(
            x.data_ptr(), weight.data_ptr(), at, out.data_ptr(), x.numel() // width, width, num, torch.get_num_threads()
        )
        return out

    def gated(self, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        """silu(x by gate) * (x by up), [..., inner] from x [..., width] and weights [inner, width]."""
        x, gate, up = x.contiguous(), gate.contiguous(), up.contiguous()
        inner, width = gate.shape
        out = x.new_empty(*x.shape[:-1], inner)
        self._library.gated(
            x.data_ptr(), gate.data_ptr(), up.data_ptr(), out.data_ptr(), x.numel() // width, width, inner,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def experts(self, x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """[tokens, width] from as much: each token by the experts [tokens, k] that were chosen for it and their shares.

        gate_up is [experts, 2 * inner, width], gates first, and down [experts, width, inner].
        """
        x, gate_up, down, shares = x.contiguous(), gate_up.contiguous(), down.contiguous(), shares.contiguous()
        chosen = chosen.to(torch.int64).contiguous()
        tokens, each = chosen.shape
        num, width, inner = down.shape
        order = chosen.new_empty(tokens * each + num + 1)
        hidden, parts, out = x.new_empty(tokens * each, inner), x.new_empty(tokens * each, width), torch.empty_like(x)
        pointers = (one.data_ptr() for one in (x, chosen, shares, gate_up, down, order, hidden, parts, out))
        self._library.experts(*pointers, tokens, each, num, width, inner, torch.get_num_threads())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, width = torch.empty_like(x), x.shape[-1]
        self._library.rms_norm(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps, torch.get_num_threads()
        )
        return out

    def keep(self, given: Tensor, positions: Tensor, kept: Tensor) -> None:
        """The new keys or values [rows, heads, 1, width] at each row's position in `kept` [*, heads, room, width]."""
        given = given.contiguous()
        rows, heads, _, width = given.shape
        self._library.keep(given.data_ptr(), positions.data_ptr(), kept.data_ptr(), rows, heads, width, kept.shape[2])

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        window: int | None,
        scaling: float,
    ) -> Tensor:
        """[rows, heads, width] of one token a row, from a query [rows, heads, 1, width], to all up to its position.

        Keys and values are [rows, key_heads, tokens, width], of which rows and heads may lie apart.
        """
        query, key, value = query.contiguous(), _dense_within(key), _dense_within(value)
        rows, heads, _, width = query.shape
        key_heads, longest, value_width, threads = *key.shape[1:3], value.shape[-1], torch.get_num_threads()
        out = query.new_empty(rows, heads, value_width)
        scores = query.new_empty(threads * (heads // key_heads) * longest)
        self._library.attend(
            *(one.data_ptr() for one in (query, key, value, positions, scores, out)),
            rows, heads, key_heads, width, value_width, *key.stride()[:2], *value.stride()[:2],
            longest, window or 0, scaling, threads,
        )  # fmt: skip
        return out


def _dense_within(part: Tensor) -> Tensor:
    """The tokens of a head must lie one after the other."""
    return part if part.stride()[2:] == (part.shape[3], 1) else part.contiguous()


@cache
def load_kernels() -> Kernels | None:
    """None where they cannot be built: the log says why."""
    try:
        kernels = Kernels(ctypes.CDLL(str(_built())))
    except (OSError, AttributeError, _CannotBuild) as error:
        _log.info("the native engine goes without kernels of its own, and is slower: %s", error)
        return None
    x, weight = torch.randn(5, 37), torch.randn(7, 37)
    if not torch.allclose(kernels.linear(x, weight), linear(x, weight), atol=1e-4):
        _log.warning("kernels built by this machine's compiler compute wrongly and are not used")
        return None
    return kernels


class _CannotBuild(Exception):
    """Why."""


def _built() -> Path:
    """The library, built unless it is there already."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise _CannotBuild("there is no C compiler")
    runtime = _threads_of_torch()
    made_of = (_SOURCE.read_text(), compiler, runtime, *_OPTIONS, _processor())
    name = f"kernels-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "practicum"
    if not (folder / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:  # others may build the same at the same time
            compiled, linked = f"{own}/kernels.o", f"{own}/{name}"
            _call(compiler, *_OPTIONS, "-c", str(_SOURCE), "-o", compiled)
            _call(compiler, "-shared", compiled, runtime, "-lm", "-o", linked)
            os.replace(linked, folder / name)
    return folder / name


def _threads_of_torch() -> str:
    """The OpenMP library that torch has loaded: with another one there would be twice as many threads as cores."""
    try:
        loaded = Path("/proc/self/maps").read_text()
    except OSError:
        raise _CannotBuild("this system does not say which OpenMP library torch uses") from None
    found = re.search(r"/\S*/lib(?:gomp|iomp5|omp)\b\S*", loaded)
    if found is None:
        raise _CannotBuild("torch has loaded no OpenMP library")
    return found.group()


def _processor() -> str:
    """What `-march=native` depends on; a cache folder may be shared between machines."""
    found = re.findall(r"^(?:model name|flags|Features)\s*:.*", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{platform.machine()} {sorted(set(found))}"


def _call(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_S)
    except subprocess.CalledProcessError as error:
        raise _CannotBuild(f"{' '.join(command)} failed: {error.stderr[-500:]}") from None
    except subprocess.TimeoutExpired:
        raise _CannotBuild(f"{' '.join(command)} took longer than {_BUILD_S:g} s") from None
