"""The native engine on a CUDA device: pages of keys and values, steps as graphs, the host one step behind the device.

    inbox ─▶ pending ─ a slot and pages are free ─▶ prompts: one pass, the first token of each answer is drawn ──┐
                                                                                                               │
          ┌──▶ launch: a graph draws one more token for each row; the token stays on the device, and goes on ──┤
          │                                                                                                    ▼
          └── land: what was drawn one launch before has come to the host: rows end, are told, leave their slots

The device never waits for the host: while a step runs, the host reads what the step before has drawn. A row that ended
there has one more token drawn for it, which is thrown away. Where pages run out, the youngest row gives its own back
and is read again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from practicum.errors import ResourceError, RolloutError, TrainingError
from practicum.rollout.answers import most_positions
from practicum.rollout.continuous import ContinuousRollout
from practicum.rollout.cuda.arena import Arena
from practicum.rollout.cuda.attention import block_of
from practicum.rollout.cuda.drawing import draw
from practicum.rollout.cuda.flights import Flights
from practicum.rollout.cuda.graphs import StepGraphs, num_splits, rung
from practicum.rollout.cuda.pages import PAGE, num_pages
from practicum.rollout.cuda.reading import READ_TOKENS, Reader
from practicum.rollout.cuda.slots import Seats, SlotRow
from practicum.rollout.cuda.step import LeanModel, Rows
from practicum.rollout.cuda.weights import ArenaWeights, copy_weights
from practicum.rollout.inbox import Inbox
from practicum.rollout.sleeping import free_bytes, gigabytes, give_back_memory
from practicum.types import FinishReason, RolloutRequest
from practicum.weights import WeightUpdate

_CACHE_SHARE, _MOST_SHARE = 1 / 3, 0.9  # of what is free: unless another is asked for, and in any case
_FEWEST_PAGES = 3
_AGREES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


class CudaRollout(ContinuousRollout):
    """`cache_gb` bounds the memory for keys and values; None: a third of what is free when it is first resumed.

    `beside_trainer`: one computes in this process while it sleeps, and gets by torch what memory torch has kept.
    """

    def __init__(
        self,
        model_path: str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_batch: int,
        cache_gb: float | None = None,
        keep_routes: bool = False,
        beside_trainer: bool = False,
    ) -> None:
        if device.index not in (None, torch.cuda.current_device()):
            raise RolloutError(f"{device} is not the device of this process: choose it by CUDA_VISIBLE_DEVICES.")
        super().__init__(model_path, device=device, dtype=dtype, max_batch=max_batch, keep_routes=keep_routes)
        self._cache_gb = cache_gb
        self._beside_trainer = beside_trainer
        self._lean = LeanModel(self._model)
        self._weights = ArenaWeights(self._model, device)
        self._page_bytes = self._lean.numbers_per_token * PAGE * dtype.itemsize
        self._cache: Arena | None = None  # what comes with it is there as well
        self._put_off: deque[SlotRow] = deque()  # to be read again when there is room
        self._active: list[SlotRow] = []  # the rows of the last launch

    # Clocking in and out

    def resume(self) -> None:
        if self._awake:
            return
        try:
            self._weights.map()
            if self._cache is None:
                self._weights.fill()  # it is tried out with them
                self._open()
            else:
                self._map(self._cache, min(self._cache_bytes, self._room()))
        except BaseException:
            self.release()
            raise
        self._awake = True

    def release(self) -> None:
        self._awake = False
        if self._cache is not None:
            self._cache.unmap()
        self._weights.sleep()
        if not self._beside_trainer:
            give_back_memory(self._device)

    def update_weights(self, update: WeightUpdate) -> None:
        self._weights.map()
        if not update.is_whole:
            self._weights.fill()
        copy_weights(self._model, update)
        self._weights.changed()
        self._is_updated = True
        self._version = update.version

    def close(self) -> None:
        if self._cache is not None:
            torch.cuda.synchronize(self._device)
            self._graphs.clear()
            self._cache.close()
        self._weights.close()
        super().close()

    def check(self, request: RolloutRequest) -> None:
        super().check(request)
        if self._cache is not None:
            needed = num_pages(len(request.prompt_ids) + request.params.max_new_tokens)
            self._check_room(f"prompt {request.prompt.id} and its answer", needed)

    def _check_room(self, what: str, needed: int) -> None:
        there = self._seats.pool.num
        if needed > there:
            raise self._too_large(what, needed * self._page_bytes, there * self._page_bytes / 1e9)

    @property
    def held_bytes(self) -> int:
        """Of the device, awake: weights and cache."""
        return self._weights.num_bytes + (self._cache.num_mapped if self._cache is not None else 0)

    def _room(self) -> int:
        """Bytes for the cache: what was asked for, as far as it is there, or a share of what there is."""
        free = free_bytes(self._device) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        share = free * _CACHE_SHARE if self._cache_gb is None else min(self._cache_gb * 1e9, free * _MOST_SHARE)
        return int(share)

    def _open(self) -> None:
        """What is made once: addresses for the cache, what the device knows of rows, graphs; and a trial of it all."""
        self._cache_bytes = self._room()
        cache = Arena(self._cache_bytes, self._device)
        try:
            longest, most = most_positions(self._model.config) or 1 << 20, rung(self._max_batch)
            shape = None if self._recorder is None else self._recorder.shape
            self._seats = Seats(self._max_batch, longest, self._device)
            self._flights = Flights(most, shape, self._device)
            self._graphs = StepGraphs(self._step, self._max_batch, self._max_batch, self._device)
            self._num_processors = torch.cuda.get_device_properties(self._device).multi_processor_count
            self._map(cache, self._cache_bytes)
            num, lean = self._cache_bytes // self._page_bytes, self._lean
            numbers = cache.tensor()[: num * self._page_bytes].view(self._model.dtype)
            self._pages = numbers.view(num, lean.num_layers, 2, lean.kv_heads, PAGE, lean.width)
            lean.bind()
            lean.turn(longest)
            self._reader = Reader(lean, self._seats, self._flights, self._pages)
            self._try_out()
        except BaseException:
            cache.close()
            raise
        self._cache = cache

    def _map(self, cache: Arena, room: int) -> None:
        try:
            num = _num_pages_in(room, self._page_bytes)
            cache.map(num * self._page_bytes)
        except ResourceError:  # what torch has kept is in pieces, or for graphs
            torch.cuda.empty_cache()
            num = _num_pages_in(min(room, int(free_bytes(self._device) * _MOST_SHARE)), self._page_bytes)
            cache.map(num * self._page_bytes)
        self._seats.begin_anew(num)

    def _try_out(self) -> None:
        """Refuse a model of which another is computed here than by transformers."""
        from triton.runtime.errors import OutOfResources

        try:
            difference = self._reader.trial(self._model)
        except OutOfResources as error:
            raise self._unsupported(f"its heads are too large for the kernels on this device: {error}") from error
        if self._recorder is not None:
            self._recorder.take()
        if not difference < _AGREES[self._model.dtype]:
            raise self._unsupported(f"its log-probs come out different, by {difference:.2g}")

    # Writing

    def write(self, inbox: Inbox) -> None:
        assert self._awake, "generate before resume"
        self._weights.fill()
        try:
            with torch.inference_mode():
                while not inbox.is_over or self._pending or self._put_off or self._rows:
                    self._take_in(inbox)
                    self._break_off(inbox)
                    self._admit()
                    is_under_way = self._launch()
                    while len(self._flights) > is_under_way:
                        self._land()
        finally:
            torch.cuda.synchronize(self._device)
            self._flights.clear()
            self._rows.clear()
            self._put_off.clear()
            self._pending.clear()
            self._active = []
            self._seats.begin_anew(self._seats.pool.num + 1)

    @property
    def _num_waiting_rows(self) -> int:
        return len(self._put_off)

    def _break_off(self, inbox: Inbox) -> None:
        super()._break_off(inbox)
        for row in [row for row in self._put_off if inbox.is_aborted or row.ticket.is_cancelled]:
            self._put_off.remove(row)
            self._tell(row, "abort")

    def _admit(self) -> None:
        """Answers that find a slot and pages: so many tokens between two steps of those under way."""
        groups: list[list[SlotRow]] = []  # of answers to one prompt
        num_tokens = 0
        room = self._seats.pool.num_free - len(self._rows)  # a page each for those under way
        num_slots = self._seats.num_free
        while self._put_off and num_slots:
            row = self._put_off[0]
            needed = num_pages(row.length + 1)
            if needed > room or (groups and num_tokens + row.length > READ_TOKENS):
                break
            groups.append([self._put_off.popleft()])
            room, num_slots, num_tokens = room - needed, num_slots - 1, num_tokens + row.length
        while self._pending and not self._put_off:
            pending = self._pending[0]
            shared, of_each = divmod(pending.num_tokens, PAGE)
            own = num_pages(of_each + 1)
            num = min(pending.num_left, num_slots, (room - shared) // own)
            if num < 1 or (groups and num_tokens + pending.num_tokens > READ_TOKENS):
                break
            first = pending.next_answer
            groups.append([SlotRow(pending, answer) for answer in range(first, first + num)])
            pending.next_answer += num
            room, num_slots, num_tokens = room - shared - num * own, num_slots - num, num_tokens + pending.num_tokens
            if pending.num_left:
                break
            self._pending.popleft()
        if groups:
            self._read(groups)
        elif (self._pending or self._put_off) and not self._rows:  # there has become less since the check
            first = self._put_off[0].length if self._put_off else self._pending[0].num_tokens
            self._check_room("what was let in when there was more room", num_pages(first + 1))

    def _read(self, groups: list[list[SlotRow]]) -> None:
        """One pass over what each group of rows begins with, and a token for each row."""
        self._seats.seat(groups)
        ids = [rows[0].ids() for rows in groups]
        logits, routes = self._reader.read(ids, [rows[0].slot for rows in groups])
        for own in groups:
            self._reader.share(own)
        rows = [row for group in groups for row in group]
        each = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        on_device = self._seats.slots.on_device
        self._draw(
            logits[on_device(each, np.int64)], on_device([row.slot for row in rows], np.int32), _is_narrow(rows)
        )  # fmt: skip
        ends = [0, *accumulate(len(one) for one in ids)]
        self._flights.take_off(rows, routes, [(ends[i], ends[i + 1]) for i in each])
        self._rows += rows
        self._active = []  # the next launch is of other rows

    def _launch(self) -> bool:
        """One more token for every row that may have one; whether there are such rows."""
        active = self._going_on()
        while active and not self._seats.grow(active):
            self._make_room()
            active = self._going_on()
        if not active:
            return False
        if active != self._active:
            self._graphs.choose(self._seats.slots.on_device([row.slot for row in active], np.int32))
            self._active = active
        blocks = -(-max(row.num_tokens for row in active) // block_of(len(active)))
        splits = num_splits(rung(len(active)) * self._lean.kv_heads, blocks, self._num_processors)
        self._graphs.run(len(active), splits, _is_narrow(active))
        routes = self._flights.routes
        self._flights.take_off(active, None if routes is None else routes[: len(active)])
        return True

    def _going_on(self) -> list[SlotRow]:
        return [row for row in self._rows if isinstance(row, SlotRow) and not row.is_at_end]

    def _make_room(self) -> None:
        """Rows may have ended that we have not heard of; otherwise the youngest gives way."""
        if len(self._flights):
            while len(self._flights):
                self._land()
            return
        row = self._rows.pop()
        assert isinstance(row, SlotRow)
        self._seats.leave(row)
        self._put_off.appendleft(row)

    def _step(self, slots: Tensor, splits: int, narrows: bool) -> None:
        """What is recorded: everything it needs and leaves is at addresses that stay."""
        own = self._seats.slots
        rows = Rows(slots, own.positions, own.tables, splits, self._flights.routes)
        self._draw(self._lean.logits_of_rows(own.tokens, rows, self._pages), slots, narrows)

    def _draw(self, logits: Tensor, slots: Tensor, narrows: bool) -> None:
        own, out = self._seats.slots, self._flights
        draw(
            logits, slots, own.num, own.temperatures, own.top_ks, own.top_ps, own.seeds, own.answers, own.prompts,
            own.positions, own.tokens, out.tokens, out.log_probs, narrows=narrows,
        )  # fmt: skip

    def _land(self) -> None:
        for row, token, log_prob in self._flights.land():
            if log_prob != log_prob:
                raise TrainingError(
                    "the model's logits are no longer numbers: its weights are spoilt. Go back to a checkpoint from "
                    "before and lower actor.lr."
                )
            reason = row.push(token, log_prob)
            if reason is not None:
                self._end(self._rows.index(row), reason)

    def _end(self, index: int, reason: FinishReason) -> None:
        row = self._rows.pop(index)
        assert isinstance(row, SlotRow)
        self._seats.leave(row)
        row.has_ended = True
        self._tell(row, reason)

    # Checks

    def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        self._weights.fill()
        return super().log_probs(sequences)

    @torch.inference_mode()
    def _logits(self, tokens: Tensor) -> Tensor:
        return self._reader.look(tokens.cpu().numpy().astype(np.int32))


def _num_pages_in(room: int, page_bytes: int) -> int:
    num = room // page_bytes
    if num < _FEWEST_PAGES:
        raise RolloutError(
            f"{gigabytes(room)} of the device are left for keys and values, less than {_FEWEST_PAGES} pages of {PAGE} "
            f"tokens ({gigabytes(_FEWEST_PAGES * page_bytes)}): raise rollout.cache_gb, or leave it more memory."
        )
    return num


def _is_narrow(rows: Sequence[SlotRow]) -> bool:
    params = [row.ticket.request.params for row in rows]
    return any(own.temperature > 0 and (own.top_k > 0 or own.top_p < 1) for own in params)
