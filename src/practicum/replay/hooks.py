"""Hooks on the routers of transformers' mixture-of-experts models: record what they choose, or have them choose again.

A router is a module with `top_k` and `num_experts` whose forward returns (logits, weights, indices [tokens, k]); it
stands in a layer whose number is part of its name. Its choice is one `torch.topk` over [tokens, num_experts]. In replay
that one call is answered with the recorded experts and their live scores; all that the family makes of the scores comes
after it, so weights and gradients are those of the live router for the recorded experts. Each model has its own hooks
and its own records, and classes stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from practicum.errors import ReplayError
from practicum.replay.combinations import combinations_of
from practicum.types import route_dtype

_COUNTS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class RouterShape:
    """The shape of the records of a model."""

    layers: NDArray[np.int32]  # that route, by their indices in the whole model
    num_experts: int  # of each
    k: int

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        return route_dtype(self.num_experts)


def find_routers(model: nn.Module) -> dict[int, nn.Module]:
    """Return the routers by the index of their layer in the whole model; none in a dense model."""
    routers: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "top_k", None), int) and isinstance(getattr(module, "num_experts", None), int):
            layer = re.search(r"layers\.(\d+)\.", name)
            if layer is not None and hasattr(module, "weight"):
                routers[int(layer.group(1))] = module
    return dict(sorted(routers.items()))


def router_shape(model: Any) -> RouterShape:
    """Return the shape of the records of a model, which may be on the meta device.

    Raises `ReplayError` for one without routers, or with experts that are not chosen by routers we know.
    """
    routers = find_routers(model)
    config = model.config.get_text_config()
    family = f"{type(model).__name__} (model type {config.model_type!r})"
    if not routers:
        if any((getattr(config, name, None) or 0) > 1 for name in _COUNTS_OF_EXPERTS):
            raise ReplayError(f"{family} has experts, but none of the routers that can be replayed. {_TURN_OFF}")
        raise ReplayError(f"{family} is dense: it has no routers whose choice could be replayed. {_TURN_OFF}")
    with_experts = {
        int(found.group(1))
        for name, _ in model.named_modules()
        if (found := re.search(r"layers\.(\d+)\.(?:.*\.)?experts$", name))
    }
    if left := sorted(with_experts - set(routers)):
        raise ReplayError(f"{family}: the router of layer {left[0]} is of a kind that cannot be replayed. {_TURN_OFF}")
    shapes = {(int(router.num_experts), int(router.top_k)) for router in routers.values()}  # type: ignore[arg-type]
    if len(shapes) > 1:
        raise ReplayError(f"{family}: its layers have different numbers of experts, {sorted(shapes)}. {_TURN_OFF}")
    num_experts, k = shapes.pop()
    try:
        combinations_of(num_experts, k)
    except ValueError as error:
        raise ReplayError(f"{family}: {error}. {_TURN_OFF}") from error
    return RouterShape(np.array(list(routers), np.int32), num_experts, k)


_TURN_OFF = "Set actor.router_replay.mode=disabled."


class RouteRecorder:
    """Keeps the choice of every router in the last forward pass of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.shape = router_shape(model)
        self._chosen: dict[int, Tensor] = {}
        self._hooks = [
            router.register_forward_hook(partial(self._keep, layer)) for layer, router in find_routers(model).items()
        ]

    def take(self) -> NDArray[np.unsignedinteger[Any]]:
        """Return [tokens, layers, k] of the forward pass that has just ended, ascending in each row."""
        missing = [layer for layer in self.shape.layers.tolist() if layer not in self._chosen]
        assert not missing, f"layers {missing} routed nothing"
        taken = torch.stack([self._chosen[layer] for layer in self.shape.layers.tolist()], dim=1)
        self._chosen.clear()
        small = taken.to(torch.uint8 if self.shape.dtype is np.uint8 else torch.int32)  # before it leaves the device
        experts: NDArray[np.unsignedinteger[Any]] = small.cpu().numpy().astype(self.shape.dtype)
        experts.sort(axis=-1)
        return experts

    def discard(self) -> None:
        """Forget what was chosen since the last `take`, if anything was."""
        self._chosen.clear()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, layer: int, _: nn.Module, __: Any, output: tuple[Tensor, ...]) -> None:
        indices = output[2]
        self._chosen[layer] = indices.reshape(-1, indices.shape[-1])


@dataclass(slots=True)
class ReplayPass:
    """A forward pass over recorded tokens, and what was counted in it."""

    experts: Tensor  # [layers, tokens, k] integers, ascending in each row
    known: Tensor  # [tokens], False where the live router decides
    label: str = ""  # which one, for messages
    differing: dict[int, Tensor] = field(default_factory=dict)
    """How many known tokens the live router would have sent elsewhere, by layer."""


class RouteReplayer:
    """Makes the routers of a model choose what was recorded, while a pass is open. Otherwise they choose as ever."""

    def __init__(self, model: Any) -> None:
        self.shape = router_shape(model)
        self._pass: ReplayPass | None = None
        self._routers = find_routers(model)
        for place, (layer, router) in enumerate(self._routers.items()):
            router.forward = partial(self._route, place, layer, router.forward)

    def close(self) -> None:
        for router in self._routers.values():
            del router.forward  # what the class says holds again

    @contextmanager
    def replaying(self, experts: Tensor, known: Tensor, label: str = "") -> Iterator[ReplayPass]:
        """Replay in one forward pass inside the block. Unless each router takes its record once, it is a `ReplayError`.

        The backward pass may come later: recomputed layers are given the same record by `checkpoint_contexts`.
        """
        assert self._pass is None, "one pass at a time"
        self._pass = current = ReplayPass(experts, known, label)
        try:
            yield current
        finally:
            self._pass = None
        left = [layer for layer in self._routers if layer not in current.differing]
        if left:
            raise ReplayError(f"{label}: the router of layer {left[0]} was not asked, though there is a record for it.")

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return what torch's checkpoints take as `context_fn`: a layer is recomputed in the same pass."""
        return nullcontext(), nullcontext() if self._pass is None else self._again(self._pass)

    @contextmanager
    def _again(self, before: ReplayPass) -> Iterator[None]:
        outer, self._pass = self._pass, ReplayPass(before.experts, before.known, before.label)
        try:
            yield
        finally:
            self._pass = outer

    def _route(self, place: int, layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        current = self._pass
        if current is None:
            return forward(*args, **kwargs)
        if layer in current.differing:
            raise ReplayError(f"{current.label}: the router of layer {layer} was asked twice, but has one record.")
        choice = _Choice(current, place, layer, self.shape)
        with choice:
            output = forward(*args, **kwargs)
        if choice.num_seen != 1 or not isinstance(output, tuple) or len(output) != 3:
            raise ReplayError(
                f"{current.label}: the router of layer {layer} ({type(self._routers[layer]).__name__}) does not choose "
                f"by one top-k of {self.shape.k} among {self.shape.num_experts}: it cannot be replayed. {_TURN_OFF}"
            )
        assert choice.differing is not None
        current.differing[layer] = choice.differing
        return output


class _Choice(TorchFunctionMode):
    """Answers a router's one top-k with the experts of a record, and counts where the live one differs."""

    def __init__(self, current: ReplayPass, place: int, layer: int, shape: RouterShape) -> None:
        super().__init__()
        self._experts = current.experts[place]
        self._known = current.known
        self._label = current.label
        self._layer = layer
        self._shape = shape
        self.num_seen = 0
        self.differing: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is not torch.topk and func is not Tensor.topk:
            return result
        scores = args[0] if args else kwargs["input"]
        k = args[1] if len(args) > 1 else kwargs["k"]
        if scores.dim() != 2 or scores.shape[1] != self._shape.num_experts or k != self._shape.k:
            return result  # such as a choice among groups of experts
        if len(scores) != len(self._known):
            where, there = f"{self._label}: the router of layer {self._layer}", f"{len(self._known)} were recorded"
            raise ReplayError(f"{where} was given {len(scores)} tokens where {there}.")
        self.num_seen += 1
        live = result[1]
        recorded = self._experts.to(live.dtype)
        elsewhere = (live.sort(-1).values != recorded).any(-1) & self._known
        self.differing = elsewhere.sum()
        # Where both name the same experts, the live order stays: sums come out the same to the last bit.
        chosen = torch.where(elsewhere[:, None], recorded, live)
        return scores.gather(1, chosen), chosen


@torch.no_grad()
def check_replayable(model: Any) -> None:
    """Try out on a few tokens that every router can be made to choose; `ReplayError` names the one that cannot."""
    replayer = RouteReplayer(model)
    recorder = RouteRecorder(model)
    shape = replayer.shape
    try:
        random = np.random.default_rng(0)
        tokens = torch.from_numpy(random.integers(0, model.config.get_text_config().vocab_size, (1, 5)))
        wanted = np.argsort(random.random((5, len(shape.layers), shape.num_experts)))[..., : shape.k]
        wanted.sort(axis=-1)
        experts = torch.from_numpy(np.ascontiguousarray(wanted.transpose(1, 0, 2)))
        known = torch.tensor([True] * 4 + [False])
        device = model.device
        with replayer.replaying(experts.to(device), known.to(device), "trying out replay"):
            model(input_ids=tokens.to(device), use_cache=False)
        if not np.array_equal(recorder.take()[:4], wanted[:4]):
            raise ReplayError(f"{type(model).__name__} does not send tokens where its routers say. {_TURN_OFF}")
    finally:
        recorder.close()
        replayer.close()
