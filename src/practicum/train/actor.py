"""The learner: one rank of a model sharded with FSDP2.

    MiniBatch ─ pack ─▶ forward ─ log-probs ─▶ clipped loss ─ backward ─▶ (next micro-batch)
                                                                            └▶ clip gradient ─▶ AdamW ─▶ version + 1

With router replay the forward passes are made inside a pass of its session, see replay/session.py.

Ranks run the same number of micro-batches, so their collectives pair up. The loss of each micro-batch is divided by
the tokens of the whole mini-batch over all ranks, so the gradient does not depend on how the samples are split.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from practicum.algo import clipped_policy_loss, k3
from practicum.controller import Worker
from practicum.data import MicroBatch, pack
from practicum.errors import TrainingError, WeightsGone
from practicum.models import DTYPES, load_model, load_tokenizer, resolve_device
from practicum.replay import Placed, ReplaySession, ReplaySettings, ReplayStats
from practicum.train.checkpoint import load_training_state, save_rest, save_training_state, save_whole_model
from practicum.train.fsdp import join_ranks, shard, whole
from practicum.train.model import LogProbModel, keeps_samples_apart
from practicum.train.schedule import lr_factor
from practicum.types import TrainingSample
from practicum.weights import ChannelSettings, Place, Sender, Ticket, WeightUpdate, open_sender


@dataclass(frozen=True, slots=True)
class ActorSettings:
    """What an `ActorWorker` needs to know; see the config for what each means."""

    model_path: str
    device: str
    compute_dtype: str
    threads: int
    seed: int
    lr: float
    lr_schedule: str
    num_updates: int
    num_warmup: int
    weight_decay: float
    max_grad_norm: float
    clip_low: float
    clip_high: float
    temperature: float
    gradient_checkpointing: bool
    collective_timeout_s: float
    replay: ReplaySettings | None = None


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One rank's part of one optimizer update."""

    micro_batches: list[list[TrainingSample]]
    num_tokens: int  # learnt tokens over all ranks

    def __reduce__(self) -> Any:
        # As one piece: Ray has its own work with every array.
        return _whole_mini_batch, (pickle.dumps(self.micro_batches, protocol=5), self.num_tokens)


def _whole_mini_batch(packed: bytes, num_tokens: int) -> MiniBatch:
    return MiniBatch(pickle.loads(packed), num_tokens)


@dataclass(slots=True)
class _Micro:
    """A micro-batch as it is worked on."""

    packed: MicroBatch
    placed: Placed
    old_log_probs: Tensor | None = None  # None: those of the update itself


@dataclass(slots=True)
class UpdateStats:
    """Sums over the learnt tokens of a step on one rank, except where it says otherwise."""

    num_tokens: int = 0
    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    rollout_kl: float = 0.0  # KL(rollout || trainer), before the first update of the step
    rollout_gap: float = 0.0  # largest |log-prob difference| between rollout and trainer
    grad_norm: float = 0.0  # mean over the updates, the same on all ranks
    lr: float = 0.0  # of the last update
    replay: ReplayStats | None = None

    @classmethod
    def combined(cls, ranks: Sequence[UpdateStats]) -> UpdateStats:
        """Over all ranks."""
        return cls(
            num_tokens=sum(stats.num_tokens for stats in ranks),
            loss=sum(stats.loss for stats in ranks),
            entropy=sum(stats.entropy for stats in ranks),
            clipped=sum(stats.clipped for stats in ranks),
            rollout_kl=sum(stats.rollout_kl for stats in ranks),
            rollout_gap=max(stats.rollout_gap for stats in ranks),
            grad_norm=ranks[0].grad_norm,
            lr=ranks[0].lr,
            replay=ReplayStats.combined([stats.replay for stats in ranks if stats.replay]) if ranks[0].replay else None,
        )


class ActorWorker(Worker):
    def __init__(self, settings: ActorSettings) -> None:
        torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed + self.rank)
        self._settings = settings
        self._sender: Sender[Any] | None = None  # of weights, on rank 0
        self._device = resolve_device(settings.device)
        self._tokenizer = load_tokenizer(settings.model_path)
        model = load_model(settings.model_path).train()  # checkpointing looks at the mode; there is no dropout
        self._shares_rows = keeps_samples_apart(model)
        self._replay = self._open_replay(model)
        if settings.gradient_checkpointing:
            contexts = {"context_fn": self._replay.checkpoint_contexts} if self._replay else {}
            model.gradient_checkpointing_enable({"use_reentrant": False, **contexts})
        self._model = LogProbModel(model)
        mesh = join_ranks(self.context, self._device, settings.collective_timeout_s)
        try:
            shard(self._model, model, mesh, DTYPES[settings.compute_dtype])
        except BaseException:
            self.close()
            raise
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay
        )
        self._num_updates = 0
        self._sent = (-1, 0)  # the version that was sent last, and after how many updates

    def close(self) -> None:
        self.close_channel()
        if self._replay is not None:
            self._replay.close()
        dist.destroy_process_group()

    def shares_rows(self) -> bool:
        """Whether the model can take several samples in one row; micro-batches are planned accordingly."""
        return self._shares_rows

    def update(self, mini_batches: Sequence[MiniBatch], step: int = 1) -> UpdateStats:
        """Learn from the samples of a step, one optimizer update per mini-batch."""
        stats = UpdateStats()
        work = [[self._laid_out(micro) for micro in batch.micro_batches] for batch in mini_batches]
        if self._replay is not None:
            self._replay.begin_step([item for micros in work for micro in micros for item in micro.placed.samples])
        # With a single update the old log-probs are the current ones.
        if len(mini_batches) > 1 or (self._replay is not None and self._replay.records):
            for micro in (micro for micros in work for micro in micros):
                self._compute_old_log_probs(micro)
        if self._replay is not None:
            self._look_at_replay(self._replay, work[0][0], step)
        for batch, micros in zip(mini_batches, work, strict=True):
            for micro in micros:
                self._accumulate(micro, batch.num_tokens, stats)
            self._step(stats)
        stats.grad_norm /= len(mini_batches)
        stats.replay = None if self._replay is None else self._replay.take_stats()
        return stats

    def publish(self, version: int, dtype: str | None = None) -> WeightUpdate:
        """The current weights under the names of the unsharded model, in `dtype` if one is given.

        All ranks must call it, and ask for all tensors: they are gathered as they are asked for.
        """
        wanted = None if dtype is None else DTYPES[dtype]
        tensors = (
            (name, whole(parameter if wanted is None else parameter.detach().to(wanted)))  # fewer bytes to gather
            for name, parameter in self._model.model.named_parameters()
        )
        is_own = all(parameter.dtype == wanted for parameter in self._model.parameters()) or wanted is None
        return WeightUpdate(version, tensors, shared=self.world_size == 1 and is_own)

    def place(self) -> Place:
        """Where this rank is: by that a channel is chosen."""
        return Place.here()

    def address(self) -> str:
        """Of the machine of rank 0, as others know it."""
        return self.context.master_address

    def open_channel(self, channel: str, settings: ChannelSettings) -> None:
        """Make ready to send weights that way. Rank 0 sends."""
        self.close_channel()
        if self.rank == 0:
            self._sender = open_sender(channel, settings, self._save_rest)

    def close_channel(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def invite(self, version: int, num_receivers: int | None = None) -> Ticket | None:
        """What receivers need before `send`, where they must meet the sender; rank 0 knows."""
        self._check_not_gone(version)
        return None if self._sender is None else self._sender.invite(version, num_receivers)

    def send(self, version: int, dtype: str | None = None) -> Ticket | None:
        """Send the current weights. All ranks must call it; rank 0 returns the ticket that receivers need. A version
        can be sent again, but not with what has been learnt since: that is `WeightsGone`."""
        self._check_not_gone(version)
        self._sent = (version, self._num_updates)
        tensors = iter(self.publish(version, dtype).tensors)
        try:
            return None if self._sender is None else self._sender.send(version, tensors)
        finally:
            for _ in tensors:  # the other ranks gather too; and if the sender gives up, they are not left waiting
                pass

    def _check_not_gone(self, version: int) -> None:
        sent, num_updates = self._sent
        if version == sent and num_updates != self._num_updates:
            raise WeightsGone(
                f"weights of version {version} cannot be sent again: there have been {self._num_updates - num_updates} "
                "updates since. They come with the next version."
            )

    @torch.no_grad()
    def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """Of each token but the first given those before it, at temperature 1. All ranks must call it, alike."""
        found = []
        for ids in sequences:
            tokens = torch.from_numpy(ids.astype(np.int64)).to(self._device)
            at = torch.arange(len(tokens), device=self._device)
            own, _ = self._model(tokens[None], at[None], at[:-1], tokens[1:], 1.0)
            found.append(own.cpu().numpy())
        # Without a backward pass what the root has gathered would stay, and be published in place of the shards.
        cast(FSDPModule, self._model).reshard()
        return found

    def save(self, folder: str) -> None:
        """Write model, optimizer and random state into `folder`; rank 0 writes what all ranks share."""
        save_whole_model(self._model.model, self._tokenizer, Path(folder), self.rank)
        save_training_state(self._model, self._optimizer, self._num_updates, Path(folder), self.rank)

    def load(self, folder: str) -> None:
        """Restore what `save` wrote, the model apart: that is loaded by giving its folder as `model_path`."""
        self._num_updates = load_training_state(self._model, self._optimizer, Path(folder), self.rank)

    def _save_rest(self, folder: Path) -> dict[str, Tensor]:
        """What besides weights makes a model that can be loaded; tensors that nobody learns are returned."""
        return save_rest(self._model.model, self._tokenizer, folder)

    def _open_replay(self, model: Any) -> ReplaySession | None:
        settings = self._settings.replay
        if settings is None:
            return None
        ranks = {"rank": self.rank, "num_ranks": self.world_size}
        return ReplaySession(model, self._tokenizer, settings, device=self._device, **ranks)

    def _laid_out(self, samples: list[TrainingSample]) -> _Micro:
        packed = pack(samples, self._shares_rows)
        label = f"rank {self.rank}, {f'from sample {samples[0].id} on' if samples else 'without samples'}"
        return _Micro(packed, Placed(samples, packed.starts, packed.input_ids.size, label))

    @torch.no_grad()
    def _compute_old_log_probs(self, micro: _Micro) -> None:
        replayed = nullcontext() if self._replay is None else self._replay.old_pass(micro.placed)
        micro.old_log_probs, _ = self._forward(micro.packed, replayed)

    @torch.no_grad()
    def _look_at_replay(self, replay: ReplaySession, micro: _Micro, step: int) -> None:
        """Now and then: how far the trainer is from the rollout with replay, and how far it would be without."""
        replay.sync()
        every = replay.settings.compare_every
        if not every or (step - 1) % every:
            return
        written = torch.from_numpy(micro.packed.rollout_log_probs).to(self._device).double()
        found, live = (
            self._forward(micro.packed, replayed)[0].double()
            for replayed in (replay.compared_pass(micro.placed), nullcontext())
        )
        replay.count_compared(k3(written, found).sum().item(), k3(written, live).sum().item(), len(written))

    def _forward(self, micro: MicroBatch, replayed: AbstractContextManager[Any]) -> tuple[Tensor, Tensor]:
        with replayed:
            log_probs, entropy = self._model(
                *(torch.from_numpy(array).to(self._device) for array in _model_inputs(micro)),
                self._settings.temperature,
            )
        return log_probs, entropy

    def _accumulate(self, work: _Micro, num_tokens: int, stats: UpdateStats) -> None:
        micro = work.packed
        replayed = nullcontext() if self._replay is None else self._replay.update_pass(work.placed)
        log_probs, entropy = self._forward(micro, replayed)
        old = log_probs.detach() if work.old_log_probs is None else work.old_log_probs
        advantages = torch.from_numpy(micro.advantages).to(self._device)
        losses, clipped = clipped_policy_loss(
            log_probs, old, advantages, self._settings.clip_low, self._settings.clip_high
        )
        # FSDP averages gradients over ranks; the loss is a sum over all of them.
        (losses.sum() * (self.world_size / num_tokens)).backward()

        written = torch.from_numpy(micro.rollout_log_probs).to(self._device).double()
        stats.num_tokens += len(losses)
        stats.loss += losses.detach().sum().item()
        stats.entropy += entropy.sum().item()
        stats.clipped += clipped.sum().item()
        stats.rollout_kl += k3(written, old.double()).sum().item()
        if len(losses):
            stats.rollout_gap = max(stats.rollout_gap, (written - old.double()).abs().max().item())

    def _step(self, stats: UpdateStats) -> None:
        settings = self._settings
        factor = lr_factor(settings.lr_schedule, self._num_updates, settings.num_updates, settings.num_warmup)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.lr * factor
        norm = whole(torch.nn.utils.clip_grad_norm_(self._model.parameters(), settings.max_grad_norm))
        if not norm.isfinite():  # the same on all ranks
            raise TrainingError(
                f"the gradient of update {self._num_updates + 1} is {norm.item()}: nothing was changed. The last "
                "checkpoint is from before; try a lower actor.lr, and look for rewards or log-probs out of all measure."
            )
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._num_updates += 1
        stats.grad_norm += norm.item()
        stats.lr = settings.lr * factor


def _model_inputs(micro: MicroBatch) -> tuple[np.ndarray, ...]:
    return micro.input_ids, micro.position_ids, micro.predict_at, micro.targets
