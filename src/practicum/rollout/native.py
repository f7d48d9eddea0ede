"""Practicum's own engine: a scheduler, and a model runner with keys and values in blocks, for CPU or for CUDA.

    waiting ─ admit: a slot and blocks are free ─▶ prefill: one pass for all answers to one prompt; each has a token
                                                     │
           ┌──▶ grow, decode: one token for each ──▶ collect ──▶ ended: the sample leaves, slot and blocks are free
           └───────────────────────────────────────────┘ between two steps: new sequences, aborts, other commands

Everything that depends on a sequence alone (random numbers, when it ends) is kept with it, so an answer does not change
with what else is in the batch. A device may be a step behind: then a sequence that has ended has one more token drawn,
which is thrown away.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from itertools import chain

import torch

from practicum.errors import RolloutError
from practicum.models import DTYPES, load_config, resolve_device
from practicum.rollout.engine.cpu.runner import CpuRunner
from practicum.rollout.engine.loop import LocalRollout
from practicum.rollout.engine.model import ModelRunner
from practicum.rollout.engine.scheduler import Scheduler
from practicum.rollout.engine.sequence import Sequence
from practicum.rollout.engines import EngineSettings

log = logging.getLogger("practicum.rollout")


class NativeRollout(LocalRollout):
    """`cache_gb` bounds the memory for keys and values; None takes a third of what is free on the first `resume`."""

    model: ModelRunner

    def __init__(
        self,
        model_path: str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_batch: int,
        cache_gb: float | None = None,
        keep_routes: bool = False,
        stays_loaded: bool = False,
        runner: type[ModelRunner] | None = None,
    ) -> None:
        open_runner = partial(runner or CpuRunner, model_path, device=device, dtype=dtype, max_batch=max_batch)
        super().__init__(partial(open_runner, cache_gb=cache_gb, keep_routes=keep_routes, stays_loaded=stays_loaded))
        self._scheduler = Scheduler(
            max_batch=max_batch,
            block_size=self.model.block_size,
            prefill_tokens=self.model.prefill_tokens,
            grow_blocks=self.model.grow_blocks,
        )

    @classmethod
    def of(cls, settings: EngineSettings) -> NativeRollout:
        device, runner = resolve_device(settings.device), None
        if device.type == "cuda":
            from practicum.rollout.engine.cuda import unavailable_reason

            if reason := unavailable_reason(load_config(settings.model_path)):
                slow = "rollout.engine=native cannot use its CUDA kernels on %s and is several times slower: %s"
                log.warning(slow, device, reason)
            else:
                from practicum.rollout.engine.cuda.runner import CudaRunner

                runner = CudaRunner
        return cls(
            settings.model_path,
            device=device,
            dtype=DTYPES[settings.dtype],
            max_batch=settings.max_batch,
            cache_gb=settings.cache_gb,
            keep_routes=settings.keep_routes,
            stays_loaded=settings.stays_loaded,
            runner=runner,
        )

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    # In the engine's thread

    def _wake(self) -> None:
        super()._wake()
        self._scheduler.reset(self.model.num_blocks or 0)

    @torch.inference_mode()
    def _step(self) -> None:
        scheduler, runner = self._scheduler, self.model
        is_alone = not scheduler.running
        while groups := scheduler.admit():
            runner.prefill(groups)
            for sequence in chain.from_iterable(groups):
                sequence.num_launched += 1
            self._collect(runner.num_behind)
            if not is_alone:  # those under way do not wait for more than one pass
                break
        if not scheduler.running and scheduler.waiting:
            first = scheduler.waiting[0]
            try:
                what = f"prompt {first.prompt.id} and its answer, let in when there was more memory,"
                runner.check_room(what, first.num_tokens + 1)
            except RolloutError as error:
                self._fail(scheduler.remove([first]), error)
        self._collect(runner.num_behind if self._decode() else 0)

    def _decode(self) -> bool:
        """Launch one more token for every sequence that may have one; return whether there are any."""
        scheduler, runner = self._scheduler, self.model
        while True:
            sequences = [one for one in scheduler.running if one.num_tokens + one.num_launched < one.max_tokens]
            if not sequences:
                return False
            grown = scheduler.grow(sequences)
            if grown is not None:
                break
            if runner.num_in_flight:  # sequences may have ended there
                self._collect(0)
            else:
                scheduler.preempt()
        runner.decode(sequences, grown)
        for sequence in sequences:
            sequence.num_launched += 1
        return True

    def _collect(self, num_in_flight: int) -> None:
        """Take in what was drawn, until no more than so many launches are in flight."""
        ended = []
        while self.model.num_in_flight > num_in_flight:
            for sequence, token, log_prob in self.model.collect():
                sequence.num_launched -= 1
                if sequence.finish_reason is None and self._push(sequence, token, log_prob):
                    ended.append(sequence)
        self._finish(self._scheduler.remove(ended))

    def _add(self, sequences: list[Sequence]) -> None:
        self._scheduler.add(sequences)

    def _remove(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        self._collect(0)  # what is in flight must not be taken for tokens of what may be submitted again
        return self._scheduler.remove(list(sequences))

    def _reset(self) -> None:
        self.model.reset()
        self._scheduler.reset(self.model.num_blocks or 0)

    @property
    def _has_work(self) -> bool:
        return self._scheduler.has_work  # a launch of none but ended sequences may be in flight
