"""Low-rank adapters (LoRA): the one file that knows peft.

    y = W x + (alpha / rank) B A x        W is frozen, A and B are learnt; B begins with zeros, so y with W x

They stand inside the transformers model itself: `q_proj` becomes a module with `base_layer`, `lora_A` and `lora_B`. For
engines W + (alpha / rank) B A is made anew each time, in memory of its own: W never changes, so nothing drifts. Or they
get B and A alone, and have W from the model's files.

In a folder they are what peft calls an adapter: adapter_model.safetensors, and adapter_config.json, which names the
model they belong to.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from practicum.errors import ModelError

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = "default"  # of the one adapter that a layer has
_PREFIX = "base_model.model."  # before all names in a file
_GATES = {"gate", "router", "shared_expert_gate"}
"""Parts of the names of layers that send tokens to experts: they are left alone unless they are named."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """See the config for what each means."""

    rank: int
    alpha: int
    targets: tuple[str, ...] | None = None  # None: all linear layers

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class LoneAdapters:
    """The description of adapters for an engine that gets them alone."""

    base: str
    """The model they belong to; it may be in a folder of adapters itself."""
    settings: LoraSettings


def check_installed(what: str) -> None:
    """Raise where peft is not installed; `what` needs it."""
    if importlib.util.find_spec("peft") is None:
        raise ModelError(
            f"{what} needs the package 'peft', which is not installed here: pip install 'practicum[peft]'."
        )


# Which layers


def find_targets(model: Any, settings: LoraSettings) -> dict[str, nn.Module]:
    """Return the linear layers that get adapters, by name; a model on the meta device will do. Raises `ModelError`
    where a target is no such layer."""
    check_installed("actor.lora")
    linear = {name: module for name, module in model.named_modules() if _is_linear(module)}
    if settings.targets is None:
        head = model.get_output_embeddings()
        chosen = {
            name: module
            for name, module in linear.items()
            if module is not head and not _GATES & set(name.split(".")) and not _stands_for_experts(model, name)
        }
        if not chosen:
            raise ModelError(f"actor.lora: {type(model).__name__} has no linear layer that could have an adapter.")
        return chosen
    chosen = {}
    for target in settings.targets:
        found = {name: module for name, module in linear.items() if _ends(name, target)}
        if not found:
            raise ModelError(f"actor.lora.targets: {_why_none(model, linear, target)}")
        for name in found:
            _check_target(model, name)
        chosen |= found
    return chosen


def count_learnt(model: Any, settings: LoraSettings) -> int:
    """Return the number of parameters of the adapters that a model would get."""
    return sum(settings.rank * sum(_weight(layer).shape) for layer in find_targets(model, settings).values())


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _check_target(model: Any, name: str) -> None:
    is_head = model.get_submodule(name) is model.get_output_embeddings()
    if is_head and model.config.get_text_config().tie_word_embeddings:
        raise ModelError(
            f"actor.lora.targets: {name} of {type(model).__name__} has the same weights as the embedding, so it "
            "cannot have an adapter of its own: leave it out."
        )
    if _stands_for_experts(model, name):
        raise ModelError(
            f"actor.lora.targets: peft takes {name.rpartition('.')[2]!r} of {type(model).__name__} for the weights of "
            f"its experts, which cannot have adapters here: leave it out. {_experts_stay(model)}"
        )


def _stands_for_experts(model: Any, name: str) -> bool:
    """Return whether peft, here and wherever the adapter is loaded, would read the name as one from before
    transformers 5, when each expert had layers of its own."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # it is one of two layers that have become one
        return True
    return bool(config.target_parameters)


def _why_none(model: Any, linear: Mapping[str, nn.Module], target: str) -> str:
    family = type(model).__name__
    known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    names = [name for name, _ in model.named_parameters()]
    if any(_ends(name, target) or _ends(name.removesuffix(".weight"), target) for name in names):
        return (
            f"{target!r} of {family} is no linear layer (experts in one tensor, routers, norms and embeddings are "
            f"none), so it cannot have an adapter. Linear are {known}."
        )
    return f"{family} has no layer {target!r}. Linear are {known}. {_experts_stay(model)}".rstrip()


def _experts_stay(model: Any) -> str:
    stacked = {name.rpartition(".")[2] for name, parameter in model.named_parameters() if parameter.dim() == 3}
    if not stacked:
        return ""
    return f"Its experts are in {', '.join(sorted(stacked))}, one tensor for all of them, and stay as they are."


# Learning


def add_adapters(model: Any, settings: LoraSettings, seed: int) -> None:
    """Put adapters into a model. Nothing else of it learns from now on."""
    from peft import inject_adapter_in_model

    chosen = find_targets(model, settings)
    config = _peft_config(model, settings, chosen)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # the same on all ranks, however many there are
            inject_adapter_in_model(config, model, _NAME)
    except ValueError as error:
        raise ModelError(f"actor.lora: {type(model).__name__} cannot have these adapters: {error}") from error
    assert {name for name, _ in _layers(model)} == chosen.keys(), "peft took other layers than those it was given"


def _peft_config(model: Any, settings: LoraSettings, chosen: Mapping[str, nn.Module]) -> Any:
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    short = {name.rpartition(".")[2] for name in chosen}
    meant = [name for name, module in model.named_modules() if _is_linear(module) and name.rpartition(".")[2] in short]
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,  # the learner's probabilities must be those of the engine
        target_modules=sorted(short) if set(meant) == chosen.keys() else sorted(chosen),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in chosen.values()),
        task_type="CAUSAL_LM",
    )


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import Linear

    return ((name, module) for name, module in model.named_modules() if isinstance(module, Linear))


def adapters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the adapters by name."""
    return {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Switch the adapters off within the block, for passes without gradients."""
    for _, layer in _layers(model):
        layer.enable_adapters(False)
    for parameter in adapters_of(model).values():
        parameter.requires_grad_(True)  # FSDP looks once, in the first pass, at what learns
    try:
        yield
    finally:
        for _, layer in _layers(model):
            layer.enable_adapters(True)


def merged_weights(
    model: nn.Module, gather: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the plain model that computes the same, under its names. `gather` makes shards whole."""
    layers = {f"{name}.base_layer.weight": layer for name, layer in _layers(model)}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        if name not in layers:
            yield plain, gather(parameter if dtype is None else parameter.detach().to(dtype))
            continue
        layer = layers[name]
        down, up = (gather(side[_NAME].weight) for side in (layer.lora_A, layer.lora_B))
        delta = up @ down
        merged = gather(parameter) + (delta.T if layer.fan_in_fan_out else delta) * layer.scaling[_NAME]
        yield plain, merged if dtype is None else merged.to(dtype)  # rounded once


def adapters_alone(model: nn.Module, gather: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters alone, as they are named in a folder."""
    return ((_in_folder(name), gather(parameter)) for name, parameter in adapters_of(model).items())


def paired(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each layer's name, A and B of `adapters_alone`, once both are there. What is kept is copied."""
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        layer, _, side = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".lora_")
        assert side in ("A", "B"), f"{name} is no adapter"
        own = halves.setdefault(layer, {})
        own[side] = tensor.clone()
        if len(own) == 2:
            yield layer, own["A"], own["B"]
            del halves[layer]
    assert not halves, f"the update left out half of {', '.join(halves)}"


@torch.no_grad()
def merged_weight(layer: nn.Module, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """Return the merged weight of one layer of the plain model, in float32 on the device of its adapter."""
    from transformers.pytorch_utils import Conv1D

    delta = up @ down
    weight = _weight(layer).to(down.device, torch.float32)
    return weight + (delta.T if isinstance(layer, Conv1D) else delta) * scaling


# In folders


def _in_folder(name: str) -> str:
    return _PREFIX + name.replace(f".{_NAME}.", ".")


def holds_adapters(path: str) -> bool:
    """Return whether a local folder holds adapters, and no model of its own."""
    return (Path(path) / _CONFIG).is_file()


def base_of(path: str) -> str:
    """Return the path of the model that the adapters in a folder belong to."""
    try:
        base = json.loads((Path(path) / _CONFIG).read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"model folder {path!r}: its {_CONFIG} cannot be read: {error!r}.") from error
    is_folder = isinstance(base, str) and (base.startswith((".", "/", "~")) or base.count("/") > 1)
    if not isinstance(base, str) or (is_folder and not Path(base).is_dir()):
        raise ModelError(
            f"model folder {path!r} holds adapters of the model {base!r}, which is not there: put it there, or write "
            f"where it is into base_model_name_or_path of {Path(path) / _CONFIG}."
        )
    return base


def save_adapters(model: Any, base: str, folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a folder of adapters. `tensors` are the whole ones of `adapters_of`."""
    config = replace(model.peft_config[_NAME], base_model_name_or_path=base, inference_mode=True)
    _write(folder, config, {_in_folder(name): tensor.contiguous() for name, tensor in tensors.items()})


def write_adapters(
    folder: Path, lone: LoneAdapters, model: Any, tensors: Iterable[tuple[str, Tensor]]
) -> dict[str, Tensor]:
    """Write a folder of adapters from `adapters_alone`, where no model has them; `model` may be on the meta device.

    Each tensor is copied before the next one is asked for. Return what the file holds, on the meta device.
    """
    from peft import LoraConfig

    named = {name: copied_to_cpu(tensor) for name, tensor in tensors}
    expected = {
        f"{_PREFIX}{name}.lora_{side}.weight" for name in find_targets(model, lone.settings) for side in ("A", "B")
    }
    if wrong := sorted(expected ^ named.keys()):
        raise ModelError(
            f"adapters of {lone.base!r}: {len(wrong)} tensors are missing or not the model's, the first is {wrong[0]} "
            f"({'missing' if wrong[0] in expected else 'not expected'}). Send all of them again."
        )
    config = LoraConfig(
        r=lone.settings.rank,
        lora_alpha=lone.settings.alpha,
        target_modules=sorted({name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in named}),
        task_type="CAUSAL_LM",
        base_model_name_or_path=lone.base,
        inference_mode=True,
    )
    _write(folder, config, named)
    return {name: tensor.to("meta") for name, tensor in named.items()}


def copied_to_cpu(tensor: Tensor) -> Tensor:
    """Return a copy with memory of its own: a sender may use the tensor's for the next one."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _write(folder: Path, config: Any, tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})


def load_adapters(model: Any, path: str) -> None:
    """Load what `save_adapters` wrote into a model that has adapters, before it is sharded."""
    try:
        found = load_file(Path(path) / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"model folder {path!r}: its {_WEIGHTS} cannot be read: {error}") from error
    own = {_in_folder(name): tensor for name, tensor in adapters_of(model).items()}
    wrong = [name for name in own.keys() | found.keys() if name not in own or name not in found]
    wrong += [name for name in own.keys() & found.keys() if own[name].shape != found[name].shape]
    if wrong:
        raise ModelError(
            f"model folder {path!r}: its adapters are not those of actor.lora, the first that differs is "
            f"{min(wrong)}. Go on with the rank and the targets that they were made with."
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(found[name])


def merge_into(model: Any, path: str) -> Any:
    """Return the plain model that computes what `model` does with the adapters in a folder."""
    check_installed(f"model folder {path!r}, which holds adapters,")
    from peft import PeftModel

    try:
        merged: Any = PeftModel.from_pretrained(model, path).merge_and_unload()
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError, TypeError, SafetensorError) as error:
        raise ModelError(f"model folder {path!r}: its adapters do not fit {base_of(path)!r}: {error}") from error
    if hasattr(merged, "peft_config"):
        del merged.peft_config  # it has none any more
    return merged.requires_grad_(True)  # as it was before peft froze it
