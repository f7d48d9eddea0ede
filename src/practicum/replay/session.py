"""Router replay in training: what one rank records, and what it has its routers choose again.

    R2   old log-probs ─ routers choose, recorded ─▶ file ─▶ every update of the step: they choose it again
         Where the rollout has recorded its own choice too, it is counted how often the two differ.
    R3   rollout ─ recorded in the samples ─▶ old log-probs and every update: they choose it again

A recording of an earlier run may take the place of what R2 records.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from practicum.errors import ReplayError
from practicum.replay.format import RecordingHeader
from practicum.replay.hooks import ReplayPass, RouteRecorder, RouteReplayer, RouterShape, check_replayable, router_shape
from practicum.replay.records import RecordedSample, place_of
from practicum.replay.routes import decoded
from practicum.replay.store import Recording, RouteWriter
from practicum.types import RoutedExperts, Sample

_IRRELEVANT = ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""The entries of a model's config that say nothing about where tokens go."""


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """The settings of router replay; see the config for what each means."""

    mode: Literal["R2", "R3"]
    record_file: str | None = None
    replay_file: str | None = None
    compare_every: int = 0
    made: Mapping[str, str] = field(default_factory=dict)
    """Facts for people, and for a run that repeats this one."""


_Replaying = AbstractContextManager[ReplayPass]


@dataclass(frozen=True, slots=True)
class Placed:
    """The samples of a micro-batch, with their places in its flattened rows."""

    samples: Sequence[Sample]
    starts: NDArray[np.int64]  # [samples], of their first tokens
    num_positions: int  # padding included
    label: str  # which micro-batch it is, for messages


@dataclass(slots=True)
class ReplayStats:
    """The counts of the updates of a step. A row is a token in one pass."""

    layers: Sequence[int] = ()
    differing: Sequence[float] = ()  # by layer, known rows that the live router would have sent elsewhere
    num_known: int = 0
    num_rows: int = 0
    num_bytes: int = 0  # of records, as they came
    num_recorded: int = 0  # tokens of those
    kl_with: float = 0.0  # sums over the tokens that were compared
    kl_without: float = 0.0
    num_compared: int = 0
    num_rollout_differing: int = 0  # token-layers that the rollout sent elsewhere than the trainer, with R2
    num_rollout_known: int = 0  # of so many of which both are known

    @classmethod
    def combined(cls, ranks: Sequence[ReplayStats]) -> ReplayStats:
        """Return the sums over all ranks."""
        differing = np.sum([stats.differing for stats in ranks], axis=0).tolist()
        sums = {name: sum(getattr(stats, name) for stats in ranks) for name in _SUMS}
        return cls(ranks[0].layers, differing, **sums)


_SUMS = [field.name for field in fields(ReplayStats) if field.name not in ("layers", "differing")]


def model_fingerprint(config: Any) -> str:
    """Return the fingerprint of a transformers config: equal for models in which the same records make sense."""
    relevant = {key: value for key, value in config.to_dict().items() if key not in _IRRELEVANT}
    return f"{config.model_type}-{_hash(relevant)}"


def tokenizer_fingerprint(tokenizer: Any) -> str:
    return _hash(sorted(tokenizer.get_vocab().items()))


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def recording_header(
    model: Any, tokenizer: Any, rank: int = 0, num_ranks: int = 1, made: Mapping[str, str] | None = None
) -> RecordingHeader:
    """Return the header that recordings of this model begin with."""
    shape = router_shape(model)
    return RecordingHeader(
        model=model_fingerprint(model.config),
        layers=tuple(shape.layers.tolist()),
        num_experts=shape.num_experts,
        k=shape.k,
        tokenizer=tokenizer_fingerprint(tokenizer),
        rank=rank,
        num_ranks=num_ranks,
        made=made or {},
    )


class ReplaySession:
    """Router replay on one rank. `model` is not sharded yet: it is tried out whether its routers can be replayed."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: ReplaySettings,
        *,
        device: torch.device,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        check_replayable(model)
        self.settings = settings
        self._model = model
        self._device = device
        self._replayer = RouteReplayer(model)
        self.shape = self._replayer.shape
        self.checkpoint_contexts = self._replayer.checkpoint_contexts
        """The contexts for torch's checkpoints: a layer is recomputed with the experts it was computed with."""
        self._stats = ReplayStats()
        self._passes: list[dict[int, Tensor]] = []
        self._step, self._step_size = 0, 0
        self._places: dict[str, int] = {}
        self._writer: RouteWriter | None = None
        self._reader: Recording | None = None
        self.records = settings.mode == "R2"
        """Whether old log-probs are computed for the sake of what the routers choose meanwhile."""
        self._records_passes = self.records and settings.replay_file is None
        key = "replay_file" if settings.record_file is None else "record_file"
        try:
            header = recording_header(model, tokenizer, rank, num_ranks, settings.made)
            if settings.record_file is not None:
                self._writer = RouteWriter(settings.record_file, header)
                self._reader = Recording(settings.record_file, rank)
            elif settings.replay_file is not None:
                self._reader = Recording(settings.replay_file)
                self._reader.check(header)
        except BaseException as error:
            self.close()
            if isinstance(error, ReplayError):
                raise ReplayError(f"actor.router_replay.{key}: {error}") from error
            raise

    def close(self) -> None:
        self._replayer.close()
        if self._writer is not None:
            self._writer.close()
        if self._reader is not None:
            self._reader.close()

    def begin_at(self, step: int) -> None:
        """Begin with a step: what was recorded of it and of later ones is redone."""
        if self._writer is not None:
            self._writer.begin_again(step)

    def old_pass(self, placed: Placed) -> AbstractContextManager[Any]:
        """Return the context for the forward pass that computes old log-probs."""
        return self._recording(placed) if self._records_passes else self.replaying(placed)

    @contextmanager
    def update_pass(self, placed: Placed) -> Iterator[None]:
        """Replay in a forward pass that is learnt from; its backward pass may come after the block."""
        routes = self._routes(placed)
        with self.replaying(placed, routes) as seen:
            yield
        self._passes.append(seen.differing)
        self._stats.num_known += sum(int(own.known.sum()) for own in routes if own is not None)
        self._stats.num_rows += sum(sample.num_tokens for sample in placed.samples)

    def compares_at(self, step: int) -> bool:
        """Return whether to measure the distance from the rollout. What R2 has just recorded changes nothing yet."""
        every = self.settings.compare_every
        return bool(every) and (step - 1) % every == 0 and not self._records_passes

    def replaying(self, placed: Placed, routes: Sequence[RoutedExperts | None] | None = None) -> _Replaying:
        """Return the context for a forward pass that only measures, or of which the caller counts what differs."""
        experts, known = laid_out(self._routes(placed) if routes is None else routes, placed, self.shape)
        return self._replayer.replaying(
            torch.from_numpy(experts).to(self._device), torch.from_numpy(known).to(self._device), placed.label
        )

    def begin_step(self, step: int, samples: Sequence[Sample], step_size: int = 0) -> None:
        """Begin the passes over these samples of a step, `step_size` of them over all ranks.

        With R3, what the samples bring along is written down if there is a file for it.
        """
        self._step, self._step_size = step, step_size
        self._places = {sample.id: place_of(sample.id, i) for i, sample in enumerate(samples)}
        if self.settings.mode != "R3":
            return
        there = [(sample, sample.routes) for sample in samples if sample.routes is not None]
        self._count(sum(routes.num_bytes for _, routes in there), [sample for sample, _ in there])
        if self._writer is not None and there:
            self._write([sample for sample, _ in there], decoded([routes for _, routes in there]))

    def sync(self) -> None:
        """Have what was recorded survive a power cut."""
        if self._writer is not None:
            self._writer.sync()

    def take_stats(self) -> ReplayStats:
        """Return the counts of the updates since the last time."""
        stats, self._stats = self._stats, ReplayStats()
        passes, self._passes = self._passes, []
        layers = self.shape.layers.tolist()
        sums = torch.zeros(len(layers), dtype=torch.int64, device=self._device)
        for differing in passes:
            sums += torch.stack([differing[layer] for layer in layers])
        stats.layers, stats.differing = layers, sums.tolist()
        return stats

    def count_compared(self, kl_with: float, kl_without: float, num_tokens: int) -> None:
        self._stats.kl_with += kl_with
        self._stats.kl_without += kl_without
        self._stats.num_compared += num_tokens

    def _count(self, num_bytes: int, samples: Sequence[Sample]) -> None:
        self._stats.num_bytes += num_bytes
        self._stats.num_recorded += sum(sample.num_tokens for sample in samples)

    @contextmanager
    def _recording(self, placed: Placed) -> Iterator[None]:
        recorder = RouteRecorder(self._model)
        try:
            yield
            experts = recorder.take()
        finally:
            recorder.close()
        shape, routes = self.shape, []
        for start, sample in zip(placed.starts.tolist(), placed.samples, strict=True):
            own = experts[start : start + sample.num_tokens]
            routes.append(RoutedExperts(own, shape.layers, np.ones(len(own), np.bool_), shape.num_experts))
        if routes:
            self._compare_with_rollout(placed.samples, routes)
            self._count(self._write(placed.samples, routes), placed.samples)

    def _compare_with_rollout(self, samples: Sequence[Sample], recorded: Sequence[RoutedExperts]) -> None:
        """Count how often the rollout chose other experts than were just recorded, where samples bring its choice."""
        for own, written in zip(recorded, self._routes_of_rollout(samples), strict=True):
            if written is not None:
                known = written.known
                differing = (written.experts[known] != own.experts[known]).any(axis=-1)
                self._stats.num_rollout_differing += int(differing.sum())
                self._stats.num_rollout_known += differing.size

    def _write(self, samples: Sequence[Sample], routes: Sequence[RoutedExperts]) -> int:
        assert self._writer is not None
        return self._writer.append(
            RecordedSample(self._step, self._places[sample.id], sample, own, self._step_size)
            for sample, own in zip(samples, routes, strict=True)
        )

    def _routes(self, placed: Placed) -> list[RoutedExperts | None]:
        if self.settings.mode == "R2":
            assert self._reader is not None
            self._reader.refresh()
            return list(self._reader.routes([sample.id for sample in placed.samples]))
        return self._routes_of_rollout(placed.samples)

    def _routes_of_rollout(self, samples: Sequence[Sample]) -> list[RoutedExperts | None]:
        """Return the routes that samples bring along."""
        there = iter(decoded([sample.routes for sample in samples if sample.routes is not None]))
        routes = [None if sample.routes is None else next(there) for sample in samples]
        expected = (self.shape.k, self.shape.num_experts, self.shape.layers.tolist())
        for sample, own in zip(samples, routes, strict=True):
            if own is None or (found := (own.experts.shape[2], own.num_experts, own.layers.tolist())) == expected:
                continue
            raise ReplayError(
                f"sample {sample.id}: the rollout recorded {found[0]} of {found[1]} experts in layers {found[2]}, but "
                f"the trainer's model routes to {expected[0]} of {expected[1]} in {expected[2]}."
            )
        return routes


def laid_out(
    routes: Sequence[RoutedExperts | None], placed: Placed, shape: RouterShape
) -> tuple[NDArray[np.integer[Any]], NDArray[np.bool_]]:
    """Return experts [layers, positions, k] and whether they are known [positions], in the order of the micro-batch."""
    dtype = np.uint8 if shape.dtype is np.uint8 else np.int32  # torch computes little with uint16
    experts = np.zeros((len(shape.layers), placed.num_positions, shape.k), dtype)
    known = np.zeros(placed.num_positions, np.bool_)
    for start, own in zip(placed.starts.tolist(), routes, strict=True):
        if own is not None:
            experts[:, start : start + len(own)] = own.experts.transpose(1, 0, 2)
            known[start : start + len(own)] = own.known
    return experts, known
