"""Model folders for engines that live in other processes: what is in one, and how weights are written to one."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

from torch import Tensor

from practicum.models import empty_model, load_config, load_tokenizer, plain_path, save_model
from practicum.rollout.answers import eos_ids


def eos_ids_of(path: str) -> list[int]:
    """All tokens that end a text, by the generation settings and the tokenizer of a model that is not loaded."""
    from transformers import GenerationConfig

    try:
        settings = GenerationConfig.from_pretrained(plain_path(path))
    except OSError:  # it has none of its own
        settings = GenerationConfig.from_model_config(load_config(path))
    return eos_ids(SimpleNamespace(generation_config=settings), load_tokenizer(path))


def write_folder(folder: Path, model_path: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """A folder like the model's with other weights, under the names that checkpoints have."""
    model = empty_model(load_config(model_path))
    # `save_pretrained` undoes what transformers did to the names and shapes when it read the checkpoint.
    found = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
    missing = [name for name, _ in model.named_parameters() if name not in found]
    assert not missing, f"the update left out {', '.join(missing)}"
    save_model(model, load_tokenizer(model_path), folder, found)
    for name in ("generation_config.json",):
        if (Path(plain_path(model_path)) / name).exists():
            shutil.copyfile(Path(plain_path(model_path)) / name, folder / name)
