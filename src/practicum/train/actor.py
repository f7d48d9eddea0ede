"""The actor: one rank of the policy, sharded with FSDP2.

    MiniBatch ─ pack ─▶ forward ─ log-probs ─▶ objective ─ backward ─▶ (next micro-batch)
                                                                         └▶ clip gradient ─▶ AdamW ─▶ version + 1

With router replay the forward passes are made inside a pass of its session, see replay/session.py. Where adapters are
learnt, see adapters.py, the model without them is a reference too.

Ranks run the same number of micro-batches, so their collectives pair up. The loss of a mini-batch is a sum over all
tokens of all ranks, weighed by counts over the whole, so the gradient does not depend on how the samples are split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from practicum.adapters import (
    LoraSettings,
    adapters_alone,
    add_adapters,
    load_adapters,
    merged_weights,
    without_adapters,
)
from practicum.algo import (
    CorrectionFigures,
    Losses,
    Objective,
    StalenessFigures,
    Tokens,
    Totals,
    combined_figures,
    figures_by_staleness,
    k3,
)
from practicum.data import MicroBatch, pack
from practicum.errors import WeightsGone
from practicum.models import DTYPES, load_model, load_tokenizer
from practicum.replay import Placed, ReplaySession, ReplaySettings, ReplayStats
from practicum.train.batch import MiniBatch, model_inputs, on_device, spans_of
from practicum.train.checkpoint import save_only_adapters, save_rest, save_whole_model
from practicum.train.cuda import speed_up
from practicum.train.fsdp import ModelWorker, reshard, whole
from practicum.train.learner import Learner, LearnerSettings
from practicum.train.model import LogProbModel, supports_packing
from practicum.train.reference import log_probs_by_id
from practicum.types import Sample
from practicum.weights import ChannelSettings, Place, Sender, Ticket, WeightUpdate, open_sender


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSettings(LearnerSettings):
    """The settings of an `ActorWorker`; see the config for what each means."""

    temperature: float
    objective: Objective = field(default_factory=Objective)
    lora: LoraSettings | None = None  # None: all weights learn
    sends_adapters: bool = False  # to engines, alone; or else merged weights
    adapters_path: str | None = None  # to go on with, of the model at `model_path`
    replay: ReplaySettings | None = None
    measures_staleness: bool = False  # whether figures are given by the staleness of tokens too


@dataclass(slots=True)
class _Micro:
    """A micro-batch that is being worked on."""

    packed: MicroBatch
    placed: Placed
    old_log_probs: Tensor | None = None  # None: those of the update itself


@dataclass(slots=True)
class UpdateStats:
    """The sums over the learnt tokens of a step on one rank, except where it says otherwise."""

    num_tokens: int = 0
    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    rollout_kl: float = 0.0  # KL(rollout || trainer), before the first update of the step
    rollout_gap: float = 0.0  # largest |log-prob difference| between rollout and trainer
    reference_kl: float | None = None  # KL(trainer || reference), likewise; None without a reference
    correction: CorrectionFigures | None = None
    grad_norm: float = 0.0  # mean over the updates, the same on all ranks
    lr: float = 0.0  # of the last update; 0 where there was none
    update_ratio: float = 0.0  # largest of the updates: their change over the weights, in norms
    replay: ReplayStats | None = None
    by_staleness: Mapping[int, StalenessFigures] = field(default_factory=dict)

    def add(self, tokens: Tokens, losses: Losses) -> None:
        """Add the sums of a micro-batch."""
        written, old = tokens.rollout_log_probs.double(), tokens.old_log_probs.double()
        self.num_tokens += len(old)
        self.loss += losses.of_tokens.sum().item()
        self.entropy += tokens.entropy.detach().sum().item()
        self.clipped += losses.clipped.sum().item()
        self.rollout_kl += k3(written, old).sum().item()
        if len(old):
            self.rollout_gap = max(self.rollout_gap, (written - old).abs().max().item())
        if tokens.reference_log_probs is not None and len(old):
            kl = k3(old, tokens.reference_log_probs.double()).sum().item()
            self.reference_kl = kl + (self.reference_kl or 0.0)
        if tokens.staleness is not None:
            own = figures_by_staleness(tokens.staleness, old, written)
            self.by_staleness = combined_figures([self.by_staleness, own])
        if losses.correction is not None:
            before = [] if self.correction is None else [self.correction]
            self.correction = CorrectionFigures.combined([*before, losses.correction])

    @classmethod
    def combined(cls, ranks: Sequence[UpdateStats]) -> UpdateStats:
        """Return the sums over all ranks."""
        kls = [stats.reference_kl for stats in ranks if stats.reference_kl is not None]
        figures = [stats.correction for stats in ranks if stats.correction is not None]
        return cls(
            num_tokens=sum(stats.num_tokens for stats in ranks),
            loss=sum(stats.loss for stats in ranks),
            entropy=sum(stats.entropy for stats in ranks),
            clipped=sum(stats.clipped for stats in ranks),
            rollout_kl=sum(stats.rollout_kl for stats in ranks),
            rollout_gap=max(stats.rollout_gap for stats in ranks),
            reference_kl=sum(kls) if kls else None,
            correction=CorrectionFigures.combined(figures) if figures else None,
            grad_norm=ranks[0].grad_norm,
            lr=ranks[0].lr,
            update_ratio=ranks[0].update_ratio,
            replay=ReplayStats.combined([stats.replay for stats in ranks if stats.replay]) if ranks[0].replay else None,
            by_staleness=combined_figures(stats.by_staleness for stats in ranks),
        )


class ActorWorker(ModelWorker):
    def __init__(self, settings: ActorSettings) -> None:
        super().__init__(settings)
        torch.manual_seed(settings.seed + self.rank)
        self._settings = settings
        self._sender: Sender | None = None  # of weights, on rank 0
        self._tokenizer = load_tokenizer(settings.model_path)
        model = load_model(settings.model_path).train()  # checkpointing looks at the mode; there is no dropout
        self._packing = supports_packing(model)
        if settings.lora is not None:
            add_adapters(model, settings.lora, settings.seed)
            if settings.adapters_path is not None:
                load_adapters(model, settings.adapters_path)
        self._replay: ReplaySession | None = None
        if settings.replay is not None:
            ranks = {"rank": self.rank, "num_ranks": self.world_size}
            self._replay = ReplaySession(model, self._tokenizer, settings.replay, device=self._device, **ranks)
        try:
            if settings.gradient_checkpointing:
                contexts = {"context_fn": self._replay.checkpoint_contexts} if self._replay else {}
                model.gradient_checkpointing_enable({"use_reentrant": False, **contexts})
            self._model = LogProbModel(model, learns_entropy=settings.objective.entropy_bonus > 0)
            self.mesh = self.join()
            self._model.is_fast = speed_up(model, self._device, DTYPES[settings.compute_dtype])
            self._learner = Learner("actor", self._model, model, self.mesh, settings)
        except BaseException:
            self.close()
            raise
        self._sent = (-1, 0)  # the version that was sent last, and after how many updates

    def close(self) -> None:
        try:
            self.close_channel()
            if self._replay is not None:
                self._replay.close()
        finally:
            super().close()

    def begin_at(self, step: int) -> None:
        """Begin with a step: the first of this run, or of what is left of it."""
        if self._replay is not None:
            self._replay.begin_at(step)

    def base_log_probs(self, mini_batches: Sequence[MiniBatch]) -> dict[str, NDArray[np.float32]]:
        """Return the log-probs that the model without its adapters gives the answers of a step, by the ids of the
        samples. Its routers choose for themselves."""
        assert self._settings.lora is not None
        with without_adapters(self._model):
            return log_probs_by_id(self._model, mini_batches, self._settings.temperature, self._device, self._packing)

    def update(
        self, mini_batches: Sequence[MiniBatch], step: int = 1, kl_coefficient: float = 0.0, learns: bool = True
    ) -> UpdateStats:
        """Learn from the samples of a step, one optimizer update per mini-batch and epoch.

        Unless it `learns`, all is computed and nothing changed: while a critic warms up.
        """
        stats = UpdateStats()
        work = [[self._packed(micro, step) for micro in batch.micro_batches] for batch in mini_batches]
        num_updates = len(mini_batches) * self._settings.epochs if learns else 0
        if self._replay is not None:
            samples = [sample for batch in mini_batches for micro in batch.micro_batches for sample in micro]
            self._replay.begin_step(step, samples, mini_batches[0].step_size if mini_batches else 0)
        self._compute_old_log_probs([micro for micros in work for micro in micros], step, num_updates)
        with torch.set_grad_enabled(learns):
            for _ in range(self._settings.epochs if learns else 1):
                for batch, micros in zip(mini_batches, work, strict=True):
                    for micro in micros:
                        tokens, losses = self._losses(micro, batch.totals, kl_coefficient)
                        if learns:
                            (losses.total * self.world_size).backward()  # FSDP averages gradients over ranks
                        stats.add(tokens, losses)  # waits for the device, so not before it has all to do
                    if learns:
                        size = self._learner.step(step)
                        stats.grad_norm += size.grad_norm / num_updates
                        stats.lr, stats.update_ratio = size.lr, max(size.ratio, stats.update_ratio)
        if not learns:
            reshard(self._model)
        stats.replay = None if self._replay is None else self._replay.take_stats()
        return stats

    def publish(self, version: int, dtype: str | None = None) -> WeightUpdate:
        """Return the current weights under the names of the unsharded model, in `dtype` if one is given.

        Adapters are merged, or sent alone and as they are.

        All ranks must call it, and ask for all tensors: they are gathered as they are asked for.
        """
        if self._settings.sends_adapters:
            return WeightUpdate(version, adapters_alone(self._model.model, whole), shared=False, is_whole=False)
        wanted = None if dtype is None else DTYPES[dtype]
        if self._settings.lora is not None:
            return WeightUpdate(version, merged_weights(self._model.model, whole, wanted), shared=False)
        tensors = (
            (name, whole(parameter if wanted is None else parameter.detach().to(wanted)))  # fewer bytes to gather
            for name, parameter in self._model.model.named_parameters()
        )
        is_own = all(parameter.dtype == wanted for parameter in self._model.parameters()) or wanted is None
        return WeightUpdate(version, tensors, shared=self.world_size == 1 and is_own)

    def place(self) -> Place:
        """Return where this rank is: a channel is chosen by that."""
        return Place.here()

    def address(self) -> str:
        """Return the address of the machine of rank 0, as others know it."""
        return self.context.master_address

    def open_channel(self, channel: str, settings: ChannelSettings) -> None:
        """Make ready to send weights that way. Rank 0 sends."""
        self.close_channel()
        if self.rank == 0:
            # Adapters alone are no model, whatever is put beside them.
            rest = None if self._settings.sends_adapters else partial(save_rest, self._model.model, self._tokenizer)
            self._sender = open_sender(channel, settings, rest)

    def close_channel(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def invite(self, version: int, num_receivers: int | None = None) -> Ticket | None:
        """Return what receivers need before `send`, where they must meet the sender; rank 0 knows."""
        self._check_not_gone(version)
        return None if self._sender is None else self._sender.invite(version, num_receivers)

    def send(self, version: int, dtype: str | None = None) -> Ticket | None:
        """Send the current weights. All ranks must call it; rank 0 returns the ticket that receivers need. A version
        can be sent again, but not with what has been learnt since: that is `WeightsGone`."""
        self._check_not_gone(version)
        self._sent = (version, self._learner.num_updates)
        tensors = iter(self.publish(version, dtype).tensors)
        try:
            return None if self._sender is None else self._sender.send(version, tensors)
        finally:
            for _ in tensors:  # the other ranks gather too; and if the sender gives up, they are not left waiting
                pass

    def _check_not_gone(self, version: int) -> None:
        sent, num_updates = self._sent
        num_since = self._learner.num_updates - num_updates
        if version == sent and num_since:
            raise WeightsGone(
                f"weights of version {version} cannot be sent again: there have been {num_since} updates since. They "
                "come with the next version."
            )

    @torch.no_grad()
    def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """Return those of each token but the first given those before it, at temperature 1. All ranks call it."""
        found = []
        for ids in sequences:
            tokens = torch.from_numpy(ids.astype(np.int64)).to(self._device)
            at = torch.arange(len(tokens), device=self._device)
            spans = self._spans(np.arange(len(ids)))
            own, _ = self._model(tokens[None], at[None], at[:-1], tokens[1:], 1.0, **spans)
            found.append(own.cpu().numpy())
        reshard(self._model)
        return found

    def save(self, folder: str) -> None:
        """Write model, optimizer and random state into `folder`; rank 0 writes what all ranks share. Of a model with
        adapters, only those."""
        model = self._model.model
        if self._settings.lora is None:
            save_whole_model(model, self._tokenizer, Path(folder), self.rank)
        else:
            save_only_adapters(model, self._tokenizer, self._settings.model_path, Path(folder), self.rank)
        self._learner.save(Path(folder), self.rank)

    def load(self, folder: str) -> None:
        """Restore what `save` wrote, the model apart: that is loaded by giving its folder as `model_path`, and adapters
        as `adapters_path`."""
        self._learner.load(Path(folder), self.rank)

    def _packed(self, samples: list[Sample], step: int) -> _Micro:
        packed = pack(samples, self._packing, step=step if self._settings.measures_staleness else None)
        label = f"rank {self.rank}, {f'from sample {samples[0].id} on' if samples else 'without samples'}"
        return _Micro(packed, Placed(samples, packed.starts, packed.input_ids.size, label))

    @torch.no_grad()
    def _compute_old_log_probs(self, work: list[_Micro], step: int, num_updates: int) -> None:
        """Compute them before the first update. A single update computes its own, unless routers are to be recorded."""
        replay = self._replay
        if num_updates > 1 or (replay is not None and replay.records):
            for micro in work:
                replayed = nullcontext() if replay is None else replay.old_pass(micro.placed)
                micro.old_log_probs, _ = self._forward(micro.packed, replayed)
        if replay is not None:
            replay.sync()
            if replay.compares_at(step):
                self._compare_replay(replay, work[0])

    @torch.no_grad()
    def _compare_replay(self, replay: ReplaySession, micro: _Micro) -> None:
        """Measure how far the trainer is from the rollout with replay, and how far it would be without."""
        written = torch.from_numpy(micro.packed.rollout_log_probs).to(self._device).double()
        found, live = (
            self._forward(micro.packed, replayed)[0].double()
            for replayed in (replay.replaying(micro.placed), nullcontext())
        )
        replay.count_compared(k3(written, found).sum().item(), k3(written, live).sum().item(), len(written))

    def _forward(self, micro: MicroBatch, replayed: AbstractContextManager[Any]) -> tuple[Tensor, Tensor]:
        inputs, spans = model_inputs(micro, self._device), self._spans(micro.position_ids)
        with replayed:
            log_probs, entropy = self._model(*inputs, self._settings.temperature, **spans)
        return log_probs, entropy

    def _spans(self, position_ids: NDArray[np.int64]) -> dict[str, Any]:
        return spans_of(position_ids, self._device) if self._model.is_fast else {}

    def _losses(self, work: _Micro, totals: Totals, kl_coefficient: float) -> tuple[Tokens, Losses]:
        """Return this micro-batch's part of the loss of its mini-batch."""
        micro = work.packed
        replayed = nullcontext() if self._replay is None else self._replay.update_pass(work.placed)
        log_probs, entropy = self._forward(micro, replayed)
        tokens = Tokens(
            log_probs=log_probs,
            entropy=entropy,
            old_log_probs=log_probs.detach() if work.old_log_probs is None else work.old_log_probs,
            rollout_log_probs=on_device(micro.rollout_log_probs, self._device),
            advantages=on_device(micro.advantages, self._device),
            sequences=on_device(micro.sequences, self._device),
            reference_log_probs=on_device(micro.reference_log_probs, self._device),
            staleness=on_device(micro.staleness, self._device),
        )
        return tokens, self._settings.objective(tokens, totals, kl_coefficient)
