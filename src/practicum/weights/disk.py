"""The channel through a folder that all can read: slow, but it needs nothing else, and what it leaves is a model.

    <folder>/version-000012/   model-00001.safetensors, ..., model.safetensors.index.json (which tensor is where);
                               with the model's config and tokenizer, from_pretrained and `practicum serve` read it;
                               constants.safetensors for what is saved with a model but never learnt

A version is written under another name and renamed when its files have been found to hold every tensor. Of older ones
a few are kept. The folder belongs to one sender.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from practicum.errors import ConfigError
from practicum.weights.channel import ChannelSettings, Complete, Deadline, Sender, Tensors, Ticket, not_arrived

_INDEX = "model.safetensors.index.json"
_CONSTANTS = "constants.safetensors"
_UNFINISHED = ".unfinished-"
_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class DiskTicket(Ticket):
    channel: ClassVar[str] = "disk"
    path: str

    def read(self, timeout_s: float) -> Iterator[tuple[str, Tensor]]:
        folder = Path(self.path)
        names: dict[str, list[str]] = {}
        for name, file in self._index(Deadline(timeout_s))["weight_map"].items():
            if file != _CONSTANTS:  # engines have them from the files they were started with
                names.setdefault(file, []).append(name)
        for file, own in names.items():
            try:
                with safe_open(folder / file, framework="pt") as opened:
                    found = (opened.metadata() or {}).get("version")
                    if found != str(self.version):
                        raise self.failure(f"{folder / file} holds version {found}. Send them again.")
                    for name in own:
                        yield name, opened.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise self.failure(
                    f"{folder / file} cannot be read: {error}. It may have been cut off, or deleted because later "
                    "versions were sent: send the newest again."
                ) from error

    def _index(self, deadline: Deadline) -> dict[str, dict[str, str]]:
        index = Path(self.path) / _INDEX
        while True:
            try:
                found: dict[str, dict[str, str]] = json.loads(index.read_text())
                return found
            except FileNotFoundError as error:
                # A network file system may show on one machine later what another has written.
                newer = [path for path in index.parent.parent.glob("version-*") if path.name > index.parent.name]
                if newer or deadline.is_over:
                    waited = f"it did not appear within {deadline.timeout_s:g} s"
                    why = "only later versions are there" if newer else waited
                    raise self.failure(
                        f"{index} is missing: {why}. Send the newest again, to a folder that this machine "
                        f"({os.uname().nodename}) can read."
                    ) from error
                time.sleep(_RETRY_S)
            except (OSError, ValueError) as error:
                raise self.failure(f"{index} cannot be read: {error}. Send them again.") from error


class VersionFolders:
    """The folders of some versions in `folder`, which belongs to this object: each is there whole or not at all."""

    def __init__(self, folder: Path, num_kept: int) -> None:
        self._folder = folder.resolve()
        self._num_kept = num_kept
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.glob(f"{_UNFINISHED}*"):  # by a process that was killed
            shutil.rmtree(left)

    def add(self, version: int, write: Callable[[Path], Mapping[str, Tensor]]) -> Path:
        """Have a version written, under another name until it is whole, and delete old ones. Return its folder.

        `write` returns the tensors that its files must hold; they may be on the meta device.
        """
        place = self._folder / f"version-{version:06d}"
        unfinished = self._folder / f"{_UNFINISHED}{place.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            unfinished.mkdir()
            expected = write(unfinished)
            if problem := _difference(unfinished, expected):
                raise not_arrived("disk", version, f"{unfinished} was not written whole: {problem}. Send them again.")
            self.remove(place)  # the same version, written before
            unfinished.rename(place)
        except BaseException as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            if isinstance(error, OSError):
                reason = f"{unfinished} cannot be written: {error}. Is there room?"
                raise not_arrived("disk", version, reason) from error
            raise
        for old in sorted(self._folder.glob("version-*"))[: -self._num_kept]:
            self.remove(old)
        return place

    def remove(self, place: Path) -> None:
        """Delete a folder in such a way that never half of it is seen under its name."""
        if place.exists():
            shutil.rmtree(place.rename(self._folder / f"{_UNFINISHED}{place.name}-old"))


def _difference(folder: Path, expected: Mapping[str, Tensor]) -> str:
    """Return how the tensors in a folder's files differ from those expected; an empty text where they do not."""
    found: dict[str, str] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:  # fails where bytes are missing
                for name in opened.keys():  # noqa: SIM118
                    part = opened.get_slice(name)
                    found[name] = _described(part[:0] if part.get_shape() else part[...], part.get_shape())
    except (OSError, SafetensorError) as error:
        return f"{file} cannot be read: {error}"
    wanted = {name: _described(tensor, tensor.shape) for name, tensor in expected.items()}
    wrong = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
    first = (f"{name} is {found.get(name, 'missing')}, not {wanted.get(name, 'expected')}" for name in wrong[:3])
    return f"{len(wrong)} of {len(wanted)} tensors differ, the first: {'; '.join(first)}" if wrong else ""


def _described(tensor: Tensor, shape: Sequence[int]) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(shape)}"


class DiskSender(Sender):
    def __init__(self, settings: ChannelSettings, complete: Complete | None = None) -> None:
        super().__init__(settings)
        if settings.folder is None:
            raise ConfigError("channel 'disk' needs a folder that the trainer and all engines can reach.")
        self._folders = VersionFolders(Path(settings.folder), settings.num_kept)
        self._complete = complete

    def _send(self, version: int, tensors: Tensors) -> DiskTicket:
        folder = self._folders.add(version, lambda folder: self._write(folder, version, tensors))
        return DiskTicket(version, str(folder))

    def _write(self, folder: Path, version: int, tensors: Tensors) -> dict[str, Tensor]:
        constants = {} if self._complete is None else self._complete(folder)
        files: dict[str, str] = dict.fromkeys(constants, _CONSTANTS)
        expected = {name: tensor.to("meta") for name, tensor in constants.items()}
        for part in _parts(constants.items(), 1 << 62):
            save_file(part, folder / _CONSTANTS, {"format": "pt"})
        total = 0
        for number, part in enumerate(_parts(tensors, self.settings.file_bytes), 1):
            name = f"model-{number:05d}.safetensors"
            save_file(part, folder / name, {"format": "pt", "version": str(version)})
            files |= dict.fromkeys(part, name)
            expected |= {name: tensor.to("meta") for name, tensor in part.items()}
            total += sum(tensor.nbytes for tensor in part.values())
        index = {"metadata": {"total_size": total, "version": version}, "weight_map": files}
        (folder / _INDEX).write_text(json.dumps(index))
        return expected

    def close(self) -> None:
        """Versions stay: they are models."""


def _parts(tensors: Tensors, most_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of one file after the other, each with memory of its own."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if part and size + tensor.nbytes > most_bytes:
            yield part
            part, size = {}, 0
        # It is kept while others are asked for, and safetensors refuses what might share memory.
        part[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        size += tensor.nbytes
    if part:
        yield part
