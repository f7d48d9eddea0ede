"""A model's weights that can leave the device and come back, bit for bit.

    CUDA   asleep: in pinned host memory, copied there again only if they have changed; awake: one block on the device
    CPU    asleep: nowhere, since a host copy would release nothing; awake: as the model's files say
           asleep, once they have changed: in a temporary file without a name, which goes with the process

On the CPU a fingerprint tells whether the model's files still hold the same weights when they are read again.
"""

from __future__ import annotations

import ctypes
import gc
import tempfile
from collections.abc import Callable, Mapping
from typing import IO

import torch
from torch import Tensor, nn

from practicum.errors import ModelError, ResourceError

_ALIGNMENT = 256
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
# torch rounds each pinned block up to a power of two: a model in one block could take nearly twice its size.
_CHUNK_BYTES = 1 << 28
_Fill = Callable[[Mapping[str, Tensor]], None]  # gives a module's tensors, by name, their memory back


class SleepingWeights:
    """Parameters and buffers of a module. `load` reads the same module again, if they are still as it would load them.

    The module stays the same object; only the memory of its tensors goes and comes. A failed `wake` leaves it asleep, a
    failed `sleep` awake. Not for use from two threads at a time.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, load: Callable[[], nn.Module], *, is_as_loaded: bool = True
    ) -> None:
        self._tensors = _tensors_of(module)
        self._device = device
        self._load = load
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors.values())
        self.is_awake = True
        self._is_as_loaded = is_as_loaded
        self._fill: _Fill | None = None  # brings the weights back on waking; None: not kept anywhere yet
        if device.type == "cuda":
            self.sleep()

    def changed(self) -> None:
        """While awake: the module has other weights now than its files, and wakes with these."""
        assert self.is_awake, "changed while asleep"
        self._fill, self._is_as_loaded = None, False

    def wake(self) -> None:
        """Bring the weights back; when this returns the device has them. Does nothing when they are there."""
        if self.is_awake:
            return
        assert self._fill is not None
        try:
            self._fill(self._tensors)
        except BaseException as error:
            self._drop()
            if isinstance(error, torch.OutOfMemoryError | MemoryError):
                raise ResourceError(
                    f"the model cannot wake up: its weights take {gigabytes(self.num_bytes)} of {self._device}, where "
                    f"{gigabytes(free_bytes(self._device))} are free. It stays asleep."
                ) from error
            raise
        self.is_awake = True

    def sleep(self) -> None:
        """Give the memory back to the device. Does nothing when they are asleep."""
        if not self.is_awake:
            return
        if self._fill is None:
            self._fill = self._kept()
        self.is_awake = False
        self._drop()

    def _kept(self) -> _Fill:
        if self._device.type == "cuda":
            return _pinned_copy(self._tensors, self._device)
        return _files(self._tensors, self._load) if self._is_as_loaded else _own_file(self._tensors)

    def _drop(self) -> None:
        for tensor in self._tensors.values():
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=self._device)
        give_back_memory(self._device)


class PinnedBytes:
    """Host memory that a device reads and writes at full speed."""

    def __init__(self, num_bytes: int) -> None:
        sizes = [min(_CHUNK_BYTES, num_bytes - start) for start in range(0, num_bytes, _CHUNK_BYTES)]
        self._chunks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
        self.num_bytes = num_bytes

    def write(self, start: int, data: Tensor) -> None:
        """Bytes from anywhere to here; when this returns they are here."""
        while len(data):
            chunk, at = divmod(start, _CHUNK_BYTES)
            piece = data[: _CHUNK_BYTES - at]
            self._chunks[chunk][at : at + len(piece)] = piece
            start, data = start + len(piece), data[len(piece) :]

    def fill(self, block: Tensor) -> None:
        """So many bytes of a device; when this returns they are there."""
        for part, chunk in zip(block[: self.num_bytes].split(_CHUNK_BYTES), self._chunks, strict=True):
            part.copy_(chunk, non_blocking=True)
        torch.cuda.synchronize(block.device)


def _pinned_copy(tensors: Mapping[str, Tensor], device: torch.device) -> _Fill:
    starts: dict[str, int] = {}
    size = 0
    for name, tensor in tensors.items():
        starts[name] = size
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    kept = PinnedBytes(size)
    for name, tensor in tensors.items():
        kept.write(starts[name], tensor.detach().contiguous().flatten().view(torch.uint8))
    shapes = _shapes_of(tensors)

    def fill(tensors: Mapping[str, Tensor]) -> None:
        block = torch.empty(kept.num_bytes, dtype=torch.uint8, device=device)
        kept.fill(block)
        for name, tensor in tensors.items():
            own = block[starts[name] : starts[name] + tensor.dtype.itemsize * shapes[name].numel()]
            tensor.data = own.view(tensor.dtype).view(shapes[name])

    return fill


def _files(tensors: Mapping[str, Tensor], load: Callable[[], nn.Module]) -> _Fill:
    prints = {name: _fingerprint(tensor) for name, tensor in tensors.items()}

    def fill(tensors: Mapping[str, Tensor]) -> None:
        read = _tensors_of(load())
        if read.keys() != tensors.keys():
            raise ModelError("the model's files describe another model than before it fell asleep; it stays asleep.")
        for name, tensor in tensors.items():
            if _fingerprint(read[name]) != prints[name]:
                raise ModelError(
                    f"the model's files have changed while it was asleep, first in {name}: scores before and after "
                    "would not be of one model. Put the files back, or start again with the new ones."
                )
            tensor.data = read[name].data

    return fill


def _own_file(tensors: Mapping[str, Tensor]) -> _Fill:
    file: IO[bytes] = tempfile.TemporaryFile(prefix="practicum-asleep-")  # noqa: SIM115 (open while asleep)
    try:
        for tensor in tensors.values():
            file.write(_bytes_of(tensor.detach().contiguous()))
        file.flush()
    except OSError as error:
        file.close()
        size = gigabytes(sum(tensor.nbytes for tensor in tensors.values()))
        raise ResourceError(
            f"the model cannot fall asleep: its weights, {size}, cannot be written to {tempfile.gettempdir()}: "
            f"{error}. Make room there or set TMPDIR to another folder."
        ) from error
    shapes = _shapes_of(tensors)

    def fill(tensors: Mapping[str, Tensor]) -> None:
        file.seek(0)
        for name, tensor in tensors.items():
            read = torch.empty(shapes[name], dtype=tensor.dtype)
            if file.readinto(_bytes_of(read)) != read.nbytes:  # type: ignore[attr-defined]
                raise ModelError("the file that kept the model's weights while it was asleep is incomplete.")
            tensor.data = read

    return fill


def _shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _bytes_of(tensor: Tensor) -> memoryview:
    """Its memory, not a copy."""
    return tensor.flatten().view(torch.uint8).numpy().data


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """All that is not shared with another name, which then is the same tensor and goes with it."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _fingerprint(tensor: Tensor) -> tuple[torch.Size, int]:
    return tensor.shape, int(torch.hash_tensor(tensor.detach()).view(torch.int64))


def keep_freed_memory() -> None:
    """Have the C library keep what this process frees, where it is glibc.

    By default it gives a few megabytes back at once, and every large tensor then begins with page faults: a norm over
    2048 x 1024 numbers takes 10 ms, and 1.8 ms in memory that is there already. This holds for the whole process from
    now on; `give_back_memory` gives back what there is.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that it takes
        set_option(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def give_back_memory(device: torch.device) -> None:
    """What nobody refers to any more goes back: to the device, or to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # where the C library is glibc
    if trim is not None:
        trim(0)


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available)


def total_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    import psutil

    return int(psutil.virtual_memory().total)


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
