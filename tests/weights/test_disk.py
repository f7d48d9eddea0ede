from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from practicum.errors import ConfigError, RolloutError
from practicum.models import load_model
from practicum.train.checkpoint import save_rest
from practicum.weights import ChannelSettings
from practicum.weights.disk import DiskSender, VersionFolders
from tests.weights.sending import assert_same, copied, random_tensors


@pytest.fixture
def sender(tmp_path: Path) -> DiskSender:
    return DiskSender(ChannelSettings(folder=str(tmp_path), file_bytes=10_000))


def test_old_versions_are_deleted(sender: DiskSender, tmp_path: Path) -> None:
    for version in (3, 9, 10, 11):
        ticket = sender.send(version, random_tensors(version))
    assert sorted(os.listdir(tmp_path)) == ["version-000010", "version-000011"]
    assert_same(copied(ticket.read(1.0)), random_tensors(11))
    with pytest.raises(RolloutError, match=r"version 9 by channel 'disk': .*only later versions are there"):
        copied(replace(ticket, version=9, path=str(tmp_path / "version-000009")).read(1.0))


def test_one_that_fails_leaves_nothing(sender: DiskSender, tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from random_tensors(1)
        assert len(os.listdir(tmp_path)) == 1  # under another name
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        sender.send(1, failing())
    assert os.listdir(tmp_path) == []


def test_a_folder_that_lacks_something_is_never_seen(tmp_path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in random_tensors(1)}

    def without_one(folder: Path) -> dict[str, torch.Tensor]:
        save_file({name: tensor for name, tensor in tensors.items() if name != "large"}, folder / "a.safetensors")
        return tensors

    def of_other_sorts(folder: Path) -> dict[str, torch.Tensor]:
        save_file(tensors | {"half": tensors["half"].float(), "scalar": torch.zeros(1)}, folder / "a.safetensors")
        return tensors

    def cut_off(folder: Path) -> dict[str, torch.Tensor]:
        save_file(tensors, folder / "a.safetensors")
        os.truncate(folder / "a.safetensors", 5000)
        return tensors

    folders = VersionFolders(tmp_path, num_kept=2)
    for write, problem in (
        (without_one, r"1 of 48 tensors differ, the first: large is missing, not float32\[257, 129\]"),
        (of_other_sorts, r"half is float32\[33, 3\], not bfloat16\[33, 3\]; scalar is float32\[1\], not float32\[\]"),
        (cut_off, r"a\.safetensors cannot be read"),
    ):
        with pytest.raises(RolloutError, match=rf"version 3 .*was not written whole: .*{problem}"):
            folders.add(3, write)
        assert os.listdir(tmp_path) == []


def test_a_torn_file_is_an_error(sender: DiskSender) -> None:
    ticket = sender.send(1, random_tensors(1))
    last = max(Path(ticket.path).glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(RolloutError, match=rf"version 1 by channel 'disk': .*{last.name} cannot be read"):
        copied(ticket.read(1.0))
    last.unlink()
    with pytest.raises(RolloutError, match="cannot be read"):
        copied(ticket.read(1.0))
    (Path(ticket.path) / "model.safetensors.index.json").write_text("{")
    with pytest.raises(RolloutError, match=r"index\.json cannot be read"):
        copied(ticket.read(1.0))


def test_files_of_another_version_are_not_taken(sender: DiskSender, tmp_path: Path) -> None:
    ticket = sender.send(1, random_tensors(1))
    with pytest.raises(RolloutError, match="holds version 1"):
        copied(replace(ticket, version=2).read(1.0))


def test_a_reader_waits_for_a_version_that_is_late_to_appear(sender: DiskSender, tmp_path: Path) -> None:
    ticket = sender.send(4, random_tensors(4))
    hidden = Path(ticket.path).rename(tmp_path / "hidden")
    with pytest.raises(RolloutError, match=r"did not appear within 0\.1 s"):
        copied(ticket.read(0.1))

    def appear() -> None:
        time.sleep(0.2)
        hidden.rename(ticket.path)

    thread = threading.Thread(target=appear)
    thread.start()
    assert_same(copied(ticket.read(30.0)), random_tensors(4))
    thread.join()


def test_a_folder_is_needed() -> None:
    with pytest.raises(ConfigError, match="channel 'disk' needs a folder"):
        DiskSender(ChannelSettings())


def test_a_version_can_be_loaded_as_a_model(tiny_model: Path, tmp_path: Path) -> None:
    from practicum.models import load_tokenizer

    model, tokenizer = load_model(str(tiny_model)), load_tokenizer(str(tiny_model))
    sender = DiskSender(ChannelSettings(folder=str(tmp_path)), lambda folder: save_rest(model, tokenizer, folder))
    ticket = sender.send(1, ((name, parameter * 2) for name, parameter in model.named_parameters()))
    loaded = load_model(ticket.path)
    for (name, found), parameter in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(found, parameter * 2), name
    assert load_tokenizer(ticket.path).get_vocab() == tokenizer.get_vocab()
    assert json.loads((Path(ticket.path) / "model.safetensors.index.json").read_text())["metadata"]["version"] == 1
