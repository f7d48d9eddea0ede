"""Device memory that is given back and taken again behind addresses that stay, so that CUDA graphs stay valid."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from practicum.errors import ResourceError
from practicum.rollout.engine.sleep import free_bytes, gigabytes

_PINNED, _DEVICE, _READ_WRITE, _OUT_OF_MEMORY = 1, 1, 3, 2  # of cuda.h


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class VirtualMemory:
    """A range of addresses of one device. It has memory between `map` and `unmap`, which forgets what it held."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # there must be a context
        self._device = device
        index = torch.cuda.current_device() if device.index is None else device.index
        self._location = _Location(_DEVICE, index)
        self._properties = _Properties(type=_PINNED, location=self._location)
        step = ctypes.c_size_t()
        _call("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(self._properties), ctypes.c_int(0))
        self._step = step.value
        self.num_bytes = -(-max(1, num_bytes) // self._step) * self._step
        address = ctypes.c_uint64()
        _call(
            "cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(self.num_bytes), ctypes.c_size_t(0),
            ctypes.c_uint64(0), ctypes.c_uint64(0),
        )  # fmt: skip
        self._address = address.value
        self._handle: ctypes.c_uint64 | None = None
        self.num_mapped = 0

    @property
    def is_mapped(self) -> bool:
        return self._handle is not None

    def map(self, num_bytes: int | None = None) -> None:
        """Take memory for the first `num_bytes`, or for all; do nothing where some is mapped.

        Raises `ResourceError` where the device has not enough.
        """
        if self._handle is not None:
            return
        wanted = self.num_bytes if num_bytes is None else -(-num_bytes // self._step) * self._step
        try:
            self._handle, self.num_mapped = self._mapped(wanted), wanted
        except MemoryError:
            raise ResourceError(
                f"{gigabytes(wanted)} of {self._device} are wanted, and {gigabytes(free_bytes(self._device))} are free."
            ) from None

    def _mapped(self, num_bytes: int) -> ctypes.c_uint64:
        """Return the handle of memory mapped to the first addresses. Raises `MemoryError` where there is not enough."""
        handle, size = ctypes.c_uint64(), ctypes.c_size_t(num_bytes)
        arguments = ctypes.byref(handle), size, ctypes.byref(self._properties), ctypes.c_uint64(0)
        try:
            _call("cuMemCreate", *arguments)
        except MemoryError:
            torch.cuda.empty_cache()  # what torch keeps for itself is not free
            _call("cuMemCreate", *arguments)
        address = ctypes.c_uint64(self._address)
        try:
            _call("cuMemMap", address, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
            access = _Access(self._location, _READ_WRITE)
            try:
                _call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
            except BaseException:
                _call("cuMemUnmap", address, size)
                raise
        except BaseException:
            _call("cuMemRelease", handle)
            raise
        return handle

    def unmap(self) -> None:
        """Give the memory back; do nothing where none is mapped."""
        if self._handle is None:
            return
        torch.cuda.synchronize(self._device)
        handle, self._handle = self._handle, None
        num_mapped, self.num_mapped = self.num_mapped, 0
        _call("cuMemUnmap", ctypes.c_uint64(self._address), ctypes.c_size_t(num_mapped))
        _call("cuMemRelease", handle)

    def close(self) -> None:
        """Give the addresses back too. No tensor on them may be used again."""
        self.unmap()
        if self._address:
            _call("cuMemAddressFree", ctypes.c_uint64(self._address), ctypes.c_size_t(self.num_bytes))
            self._address = 0

    def tensor(self) -> Tensor:
        """Return the whole range as bytes. It may be asked for, and used, only while memory is mapped."""
        assert self.is_mapped, "addresses without memory"
        return torch.as_tensor(_Bytes(self._address, self.num_bytes), device=self._device)


class _Bytes:
    """Memory that torch has not allocated, as torch takes it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None
        }  # fmt: skip


def _call(name: str, *arguments: Any) -> None:
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if code == _OUT_OF_MEMORY:
        raise MemoryError
    if code != 0:
        raise ResourceError(f"the CUDA driver refused {name} with error {code}.")
