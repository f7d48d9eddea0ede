"""What the learner writes into a checkpoint folder, and how it comes back.

    model/          weights in transformers' format and the tokenizer: `from_pretrained` loads it; where adapters are
                    learnt, those in peft's format, with the name of the model they belong to
    optimizer.pt    the whole optimizer state by parameter name, so that any number of ranks can take it up
    rng-<rank>.pt   random state of each rank
    critic/         the same of a critic, its weights as weights.pt

Several ranks gather together and rank 0 writes. Making the folder appear all at once is the run folder's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from practicum.adapters import adapters_of, save_adapters
from practicum.errors import CheckpointError
from practicum.models import save_model
from practicum.train.fsdp import whole


def save_whole_model(model: Any, tokenizer: Any, folder: Path, rank: int) -> None:
    tied = _tied(model)
    tensors = _whole_tensors({name: own for name, own in model.state_dict().items() if name not in tied}, rank)
    if rank == 0:
        # The same memory under both names, so that it is written once.
        tensors |= {name: tensors[first] for name, first in tied.items()}
        save_model(model, tokenizer, folder / "model", tensors)


def save_only_adapters(model: Any, tokenizer: Any, base: str, folder: Path, rank: int) -> None:
    """Write the adapters of a model; `base` is where the model is that they belong to."""
    tensors = _whole_tensors(adapters_of(model), rank)
    if rank == 0:
        save_adapters(model, base, folder / "model", tensors)
        tokenizer.save_pretrained(folder / "model")


def save_weights(model: nn.Module, folder: Path, rank: int) -> None:
    """Write the weights of a module that is no model to others."""
    tensors = _whole_tensors(model.state_dict(), rank)
    if rank == 0:
        torch.save(tensors, folder / "weights.pt")


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load weights into a sharded module, on any number of ranks."""
    tensors = _loaded(folder / "weights.pt")
    set_model_state_dict(model, tensors, options=StateDictOptions(full_state_dict=True))


def _tied(model: nn.Module) -> dict[str, str]:
    """Return the first name of a parameter by each further one."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first[id(own)] for name, own in named if first.setdefault(id(own), name) != name}


def _whole_tensors(shards: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in shards.items():
        gathered = whole(tensor)  # by all ranks together
        if rank == 0:
            tensors[name] = gathered.cpu()
    return tensors


def _loaded(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = torch.load(path, weights_only=True)
    except (OSError, RuntimeError, EOFError, IndexError, UnpicklingError) as error:
        raise CheckpointError(
            f"checkpoint {path.parent}: {path.name} cannot be read ({type(error).__name__}): delete that folder, "
            "and resume=auto goes on from an earlier one."
        ) from error
    return found


def save_rest(model: Any, tokenizer: Any, folder: Path) -> dict[str, Tensor]:
    """Write what makes weights a model: config and tokenizer. Returns the tensors that are saved but not learnt."""
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def save_training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, num_updates: int, folder: Path, rank: int
) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    if rank == 0:
        torch.save({"optimizer": state, "num_updates": num_updates}, folder / "optimizer.pt")
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    torch.save({"cpu": torch.get_rng_state(), "cuda": cuda}, folder / f"rng-{rank}.pt")


def load_training_state(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, rank: int) -> int:
    """Restore the optimizer and, where this rank wrote one, the random state; return the number of updates done."""
    saved = _loaded(folder / "optimizer.pt")
    set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=StateDictOptions(full_state_dict=True))
    random_state = folder / f"rng-{rank}.pt"
    if random_state.exists():
        state = _loaded(random_state)
        torch.set_rng_state(state["cpu"])
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
    return int(saved["num_updates"])
