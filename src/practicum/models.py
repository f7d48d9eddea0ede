"""Models and tokenizers from a local folder or the hub: the one place that calls transformers' loaders."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from practicum.adapters import base_of, copied_to_cpu, holds_adapters, merge_into
from practicum.control_tokens import ControlTokens
from practicum.errors import DataError, ModelError
from practicum.types import Prompt

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_device(name: str) -> torch.device:
    """Return the device of that name; `auto` is the GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "device cuda was asked for, but PyTorch sees no CUDA device here. Use trainer.device=cpu or auto, and with "
            "serve --device cpu or auto."
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def absolute(path: str) -> str:
    """Return a local folder as every process can find it; a hub name as it is."""
    return str(Path(path).resolve()) if Path(path).is_dir() else path


def plain_path(path: str) -> str:
    """Return the path of a whole model: for a folder of adapters, that of the model they belong to."""
    return plain_path(base_of(path)) if holds_adapters(path) else path


FUSED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")
"""The model families that the CUDA kernels of engine and trainer compute: each is tested."""
_HEAD_WIDTHS = (16, 32, 64, 128, 256)
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")  # that depend on nothing but the position


def unfused_reason(config: Any) -> str:
    """Return why the CUDA kernels cannot compute the layers of a model with this config; empty if they can."""
    config = config.get_text_config()
    if config.model_type not in FUSED_FAMILIES:
        return f"the family {config.model_type!r} is not one of {', '.join(FUSED_FAMILIES)}"
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if width not in _HEAD_WIDTHS:
        return f"its heads have {width} numbers, not {', '.join(map(str, _HEAD_WIDTHS[:-1]))} or {_HEAD_WIDTHS[-1]}"
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotation not in _FIXED_ROTATIONS:
        return f"its positions are rotated in the way {rotation!r}"
    return "" if config.hidden_act == "silu" else f"its MLPs use {config.hidden_act!r}"


def load_any_config(path: str) -> Any:
    """Return the transformers config of a model of any kind."""
    from transformers import AutoConfig

    path = plain_path(path)
    return _loaded("config.json", path, lambda: AutoConfig.from_pretrained(path))


def load_config(path: str) -> Any:
    """Return the transformers config of a causal language model."""
    from transformers import AutoModelForCausalLM

    return _config_for(AutoModelForCausalLM, "causal LM", path)


def _config_for(kind: Any, what: str, path: str) -> Any:
    config = load_any_config(path)
    if type(config) not in kind._model_mapping:
        raise ModelError(f"model {path!r} is of type {config.model_type!r}, which transformers has no {what} for.")
    return config


def load_classifier_config(path: str) -> Any:
    """Return the transformers config of a sequence classifier with one output."""
    from transformers import AutoModelForSequenceClassification

    config = _config_for(AutoModelForSequenceClassification, "sequence classifier", path)
    named = config.architectures or []
    if named and not any(name.endswith("ForSequenceClassification") for name in named):
        raise ModelError(
            f"model {path!r} is no sequence classifier: its config.json says {', '.join(named)}, so a classification "
            "head is missing. A causal model can judge in words instead: kind=generative."
        )
    if config.num_labels != 1:
        raise ModelError(
            f"model {path!r} classifies into {config.num_labels} labels (num_labels or id2label in its config.json); "
            "a reward is one number, so it needs exactly 1."
        )
    return config


def load_model(path: str, dtype: torch.dtype = torch.float32) -> Any:
    """Load a causal language model with its weights on the CPU, without dropout.

    With dropout the learner's probabilities would differ from those of the engine for the same weights, and from its
    own a moment later: the ratio of the two would measure noise. Adapters in the folder are merged into their model, in
    float32.
    """
    from transformers import AutoModelForCausalLM

    if holds_adapters(path):
        return merge_into(load_model(base_of(path)), path).to(dtype)
    return _with_weights(AutoModelForCausalLM, path, load_config(path), dtype)


def load_classifier(path: str, dtype: torch.dtype = torch.float32) -> Any:
    """Load a sequence classifier with one output on the CPU, without dropout."""
    from transformers import AutoModelForSequenceClassification

    return _with_weights(AutoModelForSequenceClassification, path, load_classifier_config(path), dtype)


def count_weights(config: Any, *, classifier: bool) -> int:
    """Return the number of parameters of the model a config describes. Nothing is loaded or allocated."""
    return sum(shape.numel() for shape in weight_shapes(config, classifier=classifier).values())


def weight_shapes(config: Any, *, classifier: bool = False) -> dict[str, torch.Size]:
    """Return the shapes of the parameters of the model a config describes. Nothing is loaded or allocated."""
    model = empty_model(config, classifier=classifier)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def empty_model(config: Any, *, classifier: bool = False) -> Any:
    """Return the model that a config describes, without memory for its weights."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(config)


def _with_weights(kind: Any, path: str, config: Any, dtype: torch.dtype) -> Any:
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        _switch_off_dropout(part)
    _no_progress_bars()
    options = {"config": config, "dtype": dtype, "output_loading_info": True}
    model, found = _loaded("weights", path, lambda: kind.from_pretrained(path, **options))
    if found["missing_keys"]:
        missing = sorted(found["missing_keys"])
        raise ModelError(
            f"model {path!r}: {len(missing)} of its weights are not in its files and would be random, "
            f"the first is {missing[0]}. Is the folder complete, and the config the right one?"
        )
    return model


def _switch_off_dropout(config: Any) -> None:
    for name, value in config.to_dict().items():
        if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop") or name == "router_jitter_noise"):
            setattr(config, name, 0.0)


def save_model(model: Any, tokenizer: Any, folder: Path, tensors: dict[str, torch.Tensor] | None = None) -> None:
    """Write a folder that `load_model` and `from_pretrained` read; `tensors` stand for the model's own weights."""
    _no_progress_bars()
    model.save_pretrained(folder, state_dict=tensors)
    tokenizer.save_pretrained(folder)


def export_model(folder: Path, model_path: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Write a folder like the model's with other weights, under the names that checkpoints have.

    Each tensor is copied before the next one is asked for. Return what the files hold, on the meta device.
    """
    from transformers.core_model_loading import revert_weight_conversion

    model = empty_model(load_config(model_path))
    found = {name: copied_to_cpu(tensor) for name, tensor in tensors}
    expected = dict(model.named_parameters())
    wrong = [name for name in {**expected, **found} if _shape_in(found, name) != _shape_in(expected, name)]
    if wrong:
        named = ", ".join(
            f"{name} ({_shape_in(found, name)}, expected {_shape_in(expected, name)})" for name in wrong[:5]
        )
        raise ModelError(
            f"weights for model {model_path!r}: {len(wrong)} tensors are missing, not the model's or of another shape, "
            f"the first are {named}. Send all of them again."
        )
    found |= _constants(model, plain_path(model_path))
    # `save_pretrained` undoes what transformers did to the names and shapes when it read the checkpoint, as this does.
    ignored = model._keys_to_ignore_on_save or ()
    saved = {name: torch.empty_like(tensor, device="meta") for name, tensor in found.items() if name not in ignored}
    written: dict[str, torch.Tensor] = revert_weight_conversion(model, saved)
    save_model(model, load_tokenizer(model_path), folder, found)
    settings = Path(plain_path(model_path)) / "generation_config.json"
    if settings.exists():
        shutil.copyfile(settings, folder / settings.name)
    return written


def _constants(model: Any, path: str) -> dict[str, torch.Tensor]:
    """Return the tensors that are saved with a model but never learnt, from the files at `path`."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.utils.hub import cached_file

    saved = model.state_dict().keys()
    named: dict[str, str] = {}  # by the names in the files
    for name, buffer in model.named_buffers():
        if name in saved:
            named |= dict.fromkeys(revert_weight_conversion(model, {name: buffer}), name)
    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(str(cached_file(path, "config.json"))).parent.glob("*.safetensors")) if named else ():
        with safe_open(file, framework="pt") as opened:
            found |= {named[name]: opened.get_tensor(name) for name in named.keys() & opened.keys()}
    if missing := sorted(set(named.values()) - found.keys()):
        raise ModelError(
            f"model {path!r}: {len(missing)} tensors that are saved with it but never learnt are in none of its "
            f"safetensors files, the first is {missing[0]}. Save it anew with save_pretrained."
        )
    return found


def _shape_in(tensors: Mapping[str, torch.Tensor], name: str) -> str:
    return str(list(tensors[name].shape)) if name in tensors else "absent"


def eos_ids(settings: Any, tokenizer: Any) -> list[int]:
    """Return all tokens that end a text, by generation settings and tokenizer of a model."""
    declared = settings.eos_token_id
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    return sorted({int(tokenizer.eos_token_id), *map(int, declared)})


def eos_ids_of(path: str) -> list[int]:
    """Return all tokens that end a text for a model that is not loaded."""
    from transformers import GenerationConfig

    try:
        settings = GenerationConfig.from_pretrained(plain_path(path))
    except OSError:  # it has none of its own
        settings = GenerationConfig.from_model_config(load_config(path))
    return eos_ids(settings, load_tokenizer(path))


def save_merged(path: str, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the whole model that adapters and the model they belong to make together."""
    if not holds_adapters(path):
        if not Path(path).is_dir():
            raise ModelError(f"model folder {path!r} does not exist (looked from {Path.cwd()}).")
        raise ModelError(f"model folder {path!r} holds no adapters (adapter_config.json): there is nothing to merge.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} is there already: name a folder that is new or empty.")
    save_model(load_model(path, dtype), load_tokenizer(path), folder)


def _no_progress_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def load_tokenizer(path: str, *, for_writing: bool = True) -> Any:
    """Load the tokenizer of a model, ready to pad. A model that only reads needs no end-of-text token."""
    from transformers import AutoTokenizer

    if _lacks_tokenizer(path):
        if holds_adapters(path):
            return load_tokenizer(base_of(path), for_writing=for_writing)
        raise ModelError(
            f"model folder {path!r} has no tokenizer (looked for {', '.join(_TOKENIZER_FILES)}): "
            "save one there with tokenizer.save_pretrained(folder)."
        )
    tokenizer = _loaded("tokenizer", path, lambda: AutoTokenizer.from_pretrained(path))
    if tokenizer.eos_token_id is None and for_writing:
        raise ModelError(f"the tokenizer of {path!r} has no end-of-text token, so no answer could ever end.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def _lacks_tokenizer(path: str) -> bool:
    return Path(path).is_dir() and not any((Path(path) / name).exists() for name in _TOKENIZER_FILES)


def vocabulary_conflicts(tokenizer: Any, path: str) -> dict[int, tuple[str, str]]:
    """Return the token ids that this tokenizer and that of a model read as different text, with both texts. Empty where
    the model comes without a tokenizer."""
    if _lacks_tokenizer(plain_path(path)):
        return {}
    own, other = _vocabulary(tokenizer), _vocabulary(load_tokenizer(path, for_writing=False))
    return {i: (own[i], other[i]) for i in own.keys() & other.keys() if own[i] != other[i]}


def _vocabulary(tokenizer: Any) -> dict[int, str]:
    """Return token texts by id, without added tokens: those may get another name after training."""
    added = tokenizer.get_added_vocab()
    return {i: text for text, i in tokenizer.get_vocab().items() if text not in added}


def _loaded(what: str, path: str, load: Any) -> Any:
    if _looks_local(path) and not Path(path).is_dir():
        raise ModelError(f"model folder {path!r} does not exist (looked from {Path.cwd()}).")
    try:
        return load()
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        kind = "folder" if Path(path).is_dir() else "hub name (there is no such folder)"
        raise ModelError(f"model {kind} {path!r}: its {what} cannot be loaded: {error}") from error


def _looks_local(path: str) -> bool:
    """Return whether a path is none of a hub: hub names have the form `name` or `owner/name`."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def encode_prompts(
    tokenizer: Any,
    prompts: Sequence[Prompt],
    tools: Sequence[Mapping[str, Any]] = (),
    control_tokens: ControlTokens | None = None,
) -> list[NDArray[np.int32]]:
    """Return the token ids of each prompt: plain text as it is, special tokens included, and messages through the chat
    template, ready for the answer; control tokens in messages are plain text.

    `tools` are schemas that the chat template shows to the model, where it does that. `control_tokens` are those of
    the tokenizer, where they are known already.
    """
    control = control_tokens or ControlTokens(tokenizer)
    plain = [prompt for prompt in prompts if prompt.messages is None]
    chats = [prompt for prompt in prompts if prompt.messages is not None]
    shown = control.mark(tools) or None if chats else None
    texts = []
    for prompt in chats:
        if tokenizer.chat_template is None:
            raise ModelError(f"prompt {prompt.id} has chat messages, but the model's tokenizer has no chat template.")
        messages = [{"role": message.role, "content": message.content} for message in prompt.messages or ()]
        try:
            opened = {"add_generation_prompt": True, "tokenize": False}
            texts.append(tokenizer.apply_chat_template(control.mark(messages), tools=shown, **opened))
        except TemplateError as error:
            raise DataError(f"prompt {prompt.id}: the model's chat template refuses its messages: {error}.") from error
    # A chat template writes its own special tokens; plain text gets the tokenizer's.
    rows = tokenizer([prompt.text or "" for prompt in plain], add_special_tokens=True)["input_ids"] if plain else []
    of_plain, of_chats = iter(rows), iter(control.encode_all(texts))
    encoded = [np.array(next(of_plain if p.messages is None else of_chats), dtype=np.int32) for p in prompts]
    empty = next((prompt for prompt, ids in zip(prompts, encoded, strict=True) if len(ids) == 0), None)
    if empty is not None:
        raise DataError(f"prompt {empty.id} has no tokens under the model's tokenizer.")
    return encoded
