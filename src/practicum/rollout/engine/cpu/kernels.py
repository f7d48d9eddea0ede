"""The kernels of kernels.c: built with the machine's C compiler when they are first wanted, in less than a second.

    linear, gated, experts   products of few rows with weights as they lie: nothing is copied, prepared or kept
    keep, attend             a new token's keys and values to their place; attention, for each row as far as it reaches
    project                  all that a layer does before it attends: queries, keys and values, normed and rotated
    rms_norm                 one pass where PyTorch makes six

On two cores of an EPYC, 16 rows by 512 x 256 run at 77 GFLOP/s in oneDNN and at 130 here, 64 rows by 256 x 256 at 103
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
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

BLOCK = 64  # tokens, as in kernels.c
_SOURCES = [Path(__file__).with_name(name) for name in ("kernels.c", "tile.h")]
_OPTIONS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC")
_BUILD_S = 60.0
_log = logging.getLogger(__name__)

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_ARGUMENTS = {
    "linear": [_POINTER] * 4 + [_LONG] * 3 + [_INT],
    "gated": [_POINTER] * 4 + [_LONG] * 3 + [_INT],
    "experts": [_POINTER] * 9 + [_LONG] * 5 + [_INT],
    "rms_norm": [_POINTER] * 3 + [_LONG] * 2 + [_FLOAT, _INT],
    "project": [_POINTER] * 9 + [_LONG] * 4 + [_FLOAT, _INT],
    "keep": [_POINTER] * 3 + [_LONG] * 3,
    "attend": [_POINTER] * 7 + [_LONG] * 8 + [_FLOAT, _INT],
}


class Projection(ctypes.Structure):
    """The addresses of the weights of queries, keys or values, which must outlive it."""

    _fields_ = (("weight", _POINTER), ("bias", _POINTER), ("norm", _POINTER), ("heads", _LONG))

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, norm: Tensor | None, width: int) -> Projection:
        """Make one of tensors; `width` is that of each head."""
        assert weight.is_contiguous()
        others = (None if one is None else one.data_ptr() for one in (bias, norm))
        return cls(weight.data_ptr(), *others, weight.shape[0] // width)


class Kernels:
    """The kernels for float32 on a CPU, not for training. Tensors that are not contiguous are copied."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        self._library = library

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return [..., num] from x [..., width] and a weight [num, width]."""
        x, weight = x.contiguous(), weight.contiguous()
        num, width = weight.shape
        out = x.new_empty(*x.shape[:-1], num)
        at = 0 if bias is None else bias.data_ptr()
        self._library.linear(
            x.data_ptr(), weight.data_ptr(), at, out.data_ptr(), x.numel() // width, width, num, torch.get_num_threads()
        )
        return out

    def gated(self, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(x by gate) * (x by up), [..., inner] from x [..., width] and weights [inner, width]."""
        x, gate, up = x.contiguous(), gate.contiguous(), up.contiguous()
        inner, width = gate.shape
        out = x.new_empty(*x.shape[:-1], inner)
        self._library.gated(
            x.data_ptr(), gate.data_ptr(), up.data_ptr(), out.data_ptr(), x.numel() // width, width, inner,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def experts(self, x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Return [tokens, width] from x of that shape: each token by its chosen experts and their shares [tokens, k].

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

    def project(
        self,
        x: Tensor,
        projections: Sequence[Projection],
        eps: float,
        angles: tuple[Tensor, Tensor],
        places: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Return queries [rows, heads, 1, width] of x [rows, hidden], normed and rotated; store keys and values at
        their places [rows] in blocks [*, heads, BLOCK, width].

        `projections` are those of queries, keys and values, `angles` cosines and sines [1, rows, turned].
        """
        rows, hidden = x.shape
        cosines, sines = (one.contiguous() for one in angles)
        _, key_heads, _, width = keys.shape
        query = x.new_empty(rows, projections[0].heads, 1, width)
        between = x.new_empty(2 * key_heads * rows * width)
        self._library.project(
            x.data_ptr(), (Projection * 3)(*projections),
            *(one.data_ptr() for one in (cosines, sines, places, query, keys, values, between)),
            rows, hidden, width, cosines.shape[-1], eps, torch.get_num_threads(),
        )  # fmt: skip
        return query

    def keep(self, given: Tensor, places: Tensor, kept: Tensor) -> None:
        """Store new keys or values [rows, heads, width] at their places [rows] in blocks [*, heads, BLOCK, width]."""
        given = given.contiguous()
        rows, heads, width = given.shape
        self._library.keep(given.data_ptr(), places.data_ptr(), kept.data_ptr(), rows, heads, width)

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        positions: Tensor,
        window: int | None,
        scaling: float,
    ) -> Tensor:
        """Return the attention [rows, heads, width] of one token a row [rows, heads, 1, width] up to its position.

        Keys and values are blocks [*, key_heads, BLOCK, width]; the tables [rows, *] say which are of a row.
        """
        query = query.contiguous()
        rows, heads, _, width = query.shape
        key_heads, value_width, threads = keys.shape[1], values.shape[-1], torch.get_num_threads()
        longest = tables.shape[1] * BLOCK
        out = query.new_empty(rows, heads, value_width)
        scores = query.new_empty(threads * (heads // key_heads) * longest)
        self._library.attend(
            *(one.data_ptr() for one in (query, keys, values, tables, positions, scores, out)),
            rows, heads, key_heads, width, value_width, tables.shape[1], longest, window or 0, scaling, threads,
        )  # fmt: skip
        return out


@cache
def load_kernels() -> Kernels | None:
    """Return None where they cannot be built: the log says why."""
    try:
        kernels = Kernels(ctypes.CDLL(str(_built())))
    except (OSError, AttributeError, CannotBuild) as error:
        _log.info("the native engine goes without kernels of its own, and is slower: %s", error)
        return None
    x, weight = torch.randn(5, 37), torch.randn(7, 37)
    if not torch.allclose(kernels.linear(x, weight), linear(x, weight), atol=1e-4):
        _log.warning("kernels built by this machine's compiler compute wrongly and are not used")
        return None
    return kernels


class CannotBuild(Exception):
    """The kernels cannot be built here; the message says why."""


def _built() -> Path:
    """Return the library, built unless it is there already."""
    made_of = (*(source.read_text() for source in _SOURCES), _compiler(), _threads_of_torch(), *_OPTIONS, _processor())
    name = f"kernels-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "practicum"
    if not (folder / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:  # others may build the same at the same time
            os.replace(build(Path(own)), folder / name)
    return folder / name


def build(folder: Path, machine: str = "native") -> Path:
    """Build them into a folder, for this machine or another that the compiler knows by name."""
    compiled, linked = f"{folder}/kernels.o", f"{folder}/kernels.so"
    _call(_compiler(), *_OPTIONS, f"-march={machine}", "-c", str(_SOURCES[0]), "-o", compiled)
    _call(_compiler(), "-shared", compiled, _threads_of_torch(), "-lm", "-o", linked)
    return Path(linked)


def _compiler() -> str:
    found = shutil.which(os.environ.get("CC", "cc"))
    if found is None:
        raise CannotBuild("there is no C compiler")
    return found


def _threads_of_torch() -> str:
    """Return the OpenMP library that torch has loaded: another one would add as many threads again."""
    try:
        loaded = Path("/proc/self/maps").read_text()
    except OSError:
        raise CannotBuild("this system does not say which OpenMP library torch uses") from None
    found = re.search(r"/\S*/lib(?:gomp|iomp5|omp)\b\S*", loaded)
    if found is None:
        raise CannotBuild("torch has loaded no OpenMP library")
    return found.group()


def _processor() -> str:
    """Return what `-march=native` depends on; a cache folder may be shared between machines."""
    found = re.findall(r"^(?:model name|flags|Features)\s*:.*", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{platform.machine()} {sorted(set(found))}"


def _call(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_S)
    except subprocess.CalledProcessError as error:
        raise CannotBuild(f"{' '.join(command)} failed: {error.stderr[-500:]}") from None
    except subprocess.TimeoutExpired:
        raise CannotBuild(f"{' '.join(command)} took longer than {_BUILD_S:g} s") from None
