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
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from practicum.errors import RolloutError, TrainingError
from practicum.rollout.answers import most_positions
from practicum.rollout.continuous import ContinuousRollout
from practicum.rollout.cuda.arena import Arena
from practicum.rollout.cuda.attention import block_of
from practicum.rollout.cuda.drawing import draw
from practicum.rollout.cuda.graphs import StepGraphs, num_splits, rung
from practicum.rollout.cuda.pages import PAGE, PagePool, num_pages
from practicum.rollout.cuda.slots import Beginning, Slots
from practicum.rollout.cuda.step import LeanModel, Prompts, Rows
from practicum.rollout.cuda.weights import ArenaWeights, copy_all
from practicum.rollout.inbox import Inbox
from practicum.rollout.rows import Pending, Row
from practicum.rollout.sleeping import free_bytes, gigabytes, give_back_memory
from practicum.types import FinishReason, RolloutRequest, SamplingParams
from practicum.weights import WeightUpdate

_READ_TOKENS = 16384  # in one pass
_CACHE_SHARE, _MOST_SHARE = 1 / 3, 0.9  # of what is free: unless another is asked for, and in any case
_PAGES_AT_A_TIME = 4
_DEPTH = 4  # launches that the host has room for
_AGREES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
_TRIED = PAGE + 6


class SlotRow(Row):
    """One that has a slot and pages."""

    __slots__ = ("has_ended", "num_launched", "num_routed", "pages", "slot")

    def __init__(self, pending: Pending, answer: int) -> None:
        super().__init__(pending.ticket, answer, pending.ending, pending.num_tokens)
        self.slot = -1
        self.pages: list[int] = []
        self.num_launched = 0  # tokens that the device has been asked for and we have not read
        self.num_routed = 0  # tokens whose experts are known
        self.has_ended = False

    @property
    def is_at_end(self) -> bool:
        """All it may have is on its way."""
        return self.length + self.num_launched >= self.most_tokens


@dataclass(slots=True)
class _Flight:
    """A launch that has not been read yet."""

    rows: list[SlotRow]
    place: int  # among the host's buffers
    landed: torch.cuda.Event
    routes: Tensor | None  # of the tokens that were read, on their way to the host
    spans: Sequence[tuple[int, int]] | None  # where in `routes` each row's are; None: one for each


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
        super().__init__(model_path, device=device, dtype=dtype, max_batch=max_batch, keep_routes=keep_routes)
        self._cache_gb = cache_gb
        self._beside_trainer = beside_trainer
        self._lean = LeanModel(self._model)
        self._weights = ArenaWeights(self._model, device)
        self._page_bytes = self._lean.numbers_per_token * PAGE * dtype.itemsize
        self._cache: Arena | None = None
        self._pool = PagePool(1)
        self._put_off: deque[SlotRow] = deque()  # to be read again when there is room
        self._flights: deque[_Flight] = deque()
        self._num_flown = 0
        self._active: list[SlotRow] = []  # the rows of the last launch

    # Clocking in and out

    def resume(self) -> None:
        if self._awake:
            return
        is_first = self._cache is None
        self._weights.map()
        if is_first:
            self._open()
        assert self._cache is not None
        room = self._cache_bytes if is_first else min(self._cache_bytes, self._room())
        num = room // self._page_bytes
        if num < 3:
            raise RolloutError(
                f"{gigabytes(room)} of {self._device} are left for keys and values, less than three pages of {PAGE} "
                f"tokens ({gigabytes(3 * self._page_bytes)}): raise rollout.cache_gb, or leave it more memory."
            )
        self._cache.map(num * self._page_bytes)
        self._pool = PagePool(num)
        self._begin_anew()
        self._awake = True
        if is_first:
            self._prepare()

    def release(self) -> None:
        self._weights.sleep()
        if self._cache is not None:
            self._cache.unmap()
        if not self._beside_trainer:
            give_back_memory(self._device)
        self._awake = False

    def update_weights(self, update: WeightUpdate) -> None:
        self._weights.map()
        copy_all(self._model, update.tensors)
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
        needed = num_pages(len(request.prompt_ids) + request.params.max_new_tokens)
        if self._cache is not None and needed > self._pool.num:
            what, there = f"prompt {request.prompt.id} and its answer", self._pool.num * self._page_bytes
            raise self._too_large(what, needed * self._page_bytes, there / 1e9)

    @property
    def held_bytes(self) -> int:
        """Of the device, awake: weights and cache."""
        return self._weights.num_bytes + (self._cache.num_mapped if self._cache is not None else 0)

    def _open(self) -> None:
        """What is made once: addresses for the cache, what the device knows of rows, graphs."""
        self._cache_bytes = self._room()
        self._cache = Arena(self._cache_bytes, self._device)
        self._longest = most_positions(self._model.config) or 1 << 20
        self._slots = Slots(self._max_batch, num_pages(self._longest) + _PAGES_AT_A_TIME, self._device)
        most = rung(self._max_batch)
        self._out_tokens = torch.zeros(most, dtype=torch.int32, device=self._device)
        self._out_log_probs = torch.zeros(most, dtype=torch.float32, device=self._device)
        self._host_tokens = torch.zeros(_DEPTH, most, dtype=torch.int32, pin_memory=True)
        self._host_log_probs = torch.zeros(_DEPTH, most, dtype=torch.float32, pin_memory=True)
        self._out_routes = self._room_for_routes(most)
        self._graphs = StepGraphs(self._step, self._max_batch, self._max_batch, self._device)
        self._num_processors = torch.cuda.get_device_properties(self._device).multi_processor_count

    def _prepare(self) -> None:
        assert self._cache is not None
        numbers = self._cache.tensor()[: self._cache.num_bytes // self._page_bytes * self._page_bytes]
        own = numbers.view(self._model.dtype)
        lean = self._lean
        self._pages = own.view(-1, lean.num_layers, 2, lean.kv_heads, PAGE, lean.width)
        lean.bind()
        lean.turn(self._longest)
        self._try_out()

    def _room(self) -> int:
        """Bytes for the cache: what was asked for, as far as it is there, or a share of what there is."""
        free = free_bytes(self._device) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return (
            int(free * _CACHE_SHARE) if self._cache_gb is None else int(min(self._cache_gb * 1e9, free * _MOST_SHARE))
        )

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
            self._begin_anew()
            self._put_off.clear()
            self._pending.clear()
            self._active = []

    def _begin_anew(self) -> None:
        """Nobody has a slot or a page."""
        self._pool = PagePool(self._pool.num + 1)
        self._free_slots = list(range(self._max_batch - 1, -1, -1))

    def _held(self) -> list[SlotRow]:
        rows: list[SlotRow] = [row for row in self._rows if isinstance(row, SlotRow)]
        return rows

    def _break_off(self, inbox: Inbox) -> None:
        super()._break_off(inbox)
        for row in [row for row in self._put_off if inbox.is_aborted or row.ticket.is_cancelled]:
            self._put_off.remove(row)
            self._tell(row, "abort")

    def _admit(self) -> None:
        """Answers that find a slot and pages: so many tokens between two steps of those under way."""
        again: list[SlotRow] = []
        chosen: list[list[SlotRow]] = []  # answers to one prompt together
        num_tokens = 0
        room = self._pool.num_free - (len(self._rows) if self._rows else 0)  # a page each for those under way
        while self._put_off and len(self._free_slots) > len(again):
            row = self._put_off[0]
            needed = num_pages(row.length + 1)
            if needed > room or ((again or self._rows) and num_tokens + row.length > _READ_TOKENS):
                break
            again.append(self._put_off.popleft())
            room, num_tokens = room - needed, num_tokens + row.length
        num_slots = len(self._free_slots) - len(again)
        while self._pending and not self._put_off:
            pending = self._pending[0]
            shared, of_each = divmod(pending.num_tokens, PAGE)
            own = num_pages(of_each + 1)
            num = min(pending.num_left, num_slots, (room - shared) // own)
            if num < 1 or ((again or chosen) and num_tokens + pending.num_tokens > _READ_TOKENS):
                break
            first = pending.next_answer
            chosen.append([SlotRow(pending, answer) for answer in range(first, first + num)])
            pending.next_answer += num
            room, num_slots, num_tokens = room - shared - num * own, num_slots - num, num_tokens + pending.num_tokens
            if pending.num_left:
                break
            self._pending.popleft()
        if again or chosen:
            self._read([*([row] for row in again), *chosen])

    def _read(self, groups: list[list[SlotRow]]) -> None:
        """One pass over what each group of rows begins with, and a token for each row."""
        self._slots.begin([beginning for rows in groups for beginning in self._seat(rows)])
        firsts = [rows[0] for rows in groups]
        ids = [row.ids() for row in firsts]
        logits, routes = self._read_ids(ids, [row.slot for row in firsts])
        for rows in groups:
            self._share(rows)
        rows = [row for group in groups for row in group]
        each = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        slots = self._slots.on_device([row.slot for row in rows], np.int32)
        self._draw(logits[self._slots.on_device(each, np.int64)], slots, _is_narrow(rows))
        ends = [0, *accumulate(len(one) for one in ids)]
        self._take_off(rows, routes, [(ends[i], ends[i + 1]) for i in each])
        self._rows += rows
        self._active = []  # the next launch is of other rows

    def _seat(self, rows: list[SlotRow]) -> list[Beginning]:
        """A slot for each, and pages: those that the prompt fills are of all, the last one is each row's own."""
        length = rows[0].length
        whole = self._pool.take(length // PAGE)
        beginnings = []
        for number, row in enumerate(rows):
            if number:
                self._pool.share(whole)
            row.slot = self._free_slots.pop()
            row.pages = [*whole, *self._pool.take(num_pages(length + 1) - len(whole))]
            request = row.ticket.request
            seed, answer = row.seed
            beginnings.append(
                Beginning(row.slot, length - 1, len(request.prompt_ids), request.params, seed, answer, row.pages)
            )
        return beginnings

    def _share(self, rows: list[SlotRow]) -> None:
        """What the prompt has begun of its last page is copied to the other answers' own."""
        whole, begun = divmod(rows[0].length, PAGE)
        if begun and len(rows) > 1:
            to = self._slots.on_device([row.pages[whole] for row in rows[1:]], np.int64)
            self._pages[to] = self._pages[rows[0].pages[whole]].clone()

    def _read_ids(self, ids: list[NDArray[np.int32]], slots: list[int]) -> tuple[Tensor, Tensor | None]:
        """Logits after the last token of each sequence [sequences, vocabulary], and the routes of all tokens."""
        if sum(map(len, ids)) <= _READ_TOKENS or len(ids) > 1:
            return self._pass(ids, [0] * len(ids), slots)
        parts: list[Tensor] = []
        routes: list[Tensor | None] = []
        for start in range(0, len(ids[0]), _READ_TOKENS):
            logits, own = self._pass([ids[0][start : start + _READ_TOKENS]], [start], slots)
            parts, routes = [logits], [*routes, own]
        known = [own for own in routes if own is not None]
        return parts[-1], torch.cat(known) if known else None

    def _pass(
        self, ids: list[NDArray[np.int32]], starts: list[int], slots: list[int] | None
    ) -> tuple[Tensor, Tensor | None]:
        lengths = [len(one) for one in ids]
        positions = np.concatenate([start + np.arange(n) for start, n in zip(starts, lengths, strict=True)])
        prompts = Prompts(
            lengths,
            starts,
            self._slots.on_device(np.repeat(slots or [self._max_batch] * len(ids), lengths), np.int32),
            self._slots.on_device(positions, np.int32),
            None if slots is None else self._slots.tables,
            self._room_for_routes(len(positions)),
        )
        keep = None if slots is None else self._slots.on_device(np.cumsum(lengths) - 1, np.int64)
        tokens = self._slots.on_device(np.concatenate(ids), np.int64)
        logits = self._lean.logits_of_prompts(tokens, prompts, None if slots is None else self._pages, keep)
        return logits, prompts.routes

    def _room_for_routes(self, num_tokens: int) -> Tensor | None:
        if self._recorder is None:
            return None
        shape = self._recorder.shape
        kind = torch.uint8 if shape.dtype is np.uint8 else torch.int32
        return torch.zeros(num_tokens, len(shape.layers), shape.k, dtype=kind, device=self._device)

    def _launch(self) -> bool:
        """One more token for every row that may have one; whether there are such rows."""
        active = [row for row in self._held() if not row.is_at_end]
        if not active:
            return False
        if not self._have_pages(active):
            active = [row for row in self._held() if not row.is_at_end]
            if not active:
                return False
        if active != self._active:
            self._graphs.choose(self._slots.on_device([row.slot for row in active], np.int32))
            self._active = active
        longest = max(row.length + row.num_launched for row in active)
        blocks = -(-longest // block_of(len(active)))
        splits = num_splits(rung(len(active)) * self._lean.kv_heads, blocks, self._num_processors)
        self._graphs.run(len(active), splits, _is_narrow(active))
        routes = None if self._out_routes is None else self._out_routes[: len(active)]
        self._take_off(active, routes, None)
        return True

    def _have_pages(self, active: list[SlotRow]) -> bool:
        """For one more token of each row. False where some row had to give way."""
        wanted = [row for row in active if (row.length + row.num_launched) > len(row.pages) * PAGE]
        if not wanted:
            return True
        gave_way = False
        while self._pool.num_free < len(wanted):
            while self._flights:
                self._land()
            wanted = [row for row in wanted if not row.has_ended]
            if self._pool.num_free < len(wanted):
                self._put_off_youngest()
                gave_way = True
                wanted = [row for row in wanted if row.slot >= 0]
        if wanted:
            each = max(1, min(_PAGES_AT_A_TIME, self._pool.num_free // len(wanted)))
            news = []
            for row in wanted:
                most = num_pages(row.most_tokens) - len(row.pages)
                own = self._pool.take(min(each, max(1, most)))
                news.append((row.slot, len(row.pages), own))
                row.pages += own
            self._slots.have(news)
        return not gave_way and all(not row.has_ended for row in active)

    def _put_off_youngest(self) -> None:
        row = self._held()[-1]
        self._rows.remove(row)
        self._leave(row)
        self._put_off.appendleft(row)

    def _step(self, slots: Tensor, splits: int, narrows: bool) -> None:
        """What is recorded: everything it needs and leaves is at addresses that stay."""
        rows = Rows(slots, self._slots.positions, self._slots.tables, splits, self._out_routes)
        logits = self._lean.logits_of_rows(self._slots.tokens, rows, self._pages)
        self._draw(logits, slots, narrows)

    def _draw(self, logits: Tensor, slots: Tensor, narrows: bool) -> None:
        own = self._slots
        draw(
            logits, slots, own.num, own.temperatures, own.top_ks, own.top_ps, own.seeds, own.answers, own.prompts,
            own.positions, own.tokens, self._out_tokens, self._out_log_probs, narrows=narrows,
        )  # fmt: skip

    def _take_off(self, rows: list[SlotRow], routes: Tensor | None, spans: Sequence[tuple[int, int]] | None) -> None:
        """What was drawn for the rows goes to the host, which goes on meanwhile."""
        place = self._num_flown % _DEPTH
        self._num_flown += 1
        self._host_tokens[place, : len(rows)].copy_(self._out_tokens[: len(rows)], non_blocking=True)
        self._host_log_probs[place, : len(rows)].copy_(self._out_log_probs[: len(rows)], non_blocking=True)
        there = None
        if routes is not None:
            there = torch.empty(routes.shape, dtype=routes.dtype, pin_memory=True)
            there.copy_(routes, non_blocking=True)
        landed = torch.cuda.Event()
        landed.record()
        for row in rows:
            row.num_launched += 1
        self._flights.append(_Flight(rows, place, landed, there, spans))

    def _land(self) -> None:
        """Read what the oldest launch has drawn."""
        flight = self._flights.popleft()
        flight.landed.synchronize()
        num = len(flight.rows)
        tokens = self._host_tokens[flight.place, :num].tolist()
        log_probs = self._host_log_probs[flight.place, :num].tolist()
        routes = None if flight.routes is None else self._known(flight.routes)
        for number, (row, token, log_prob) in enumerate(zip(flight.rows, tokens, log_probs, strict=True)):
            row.num_launched -= 1
            if row.has_ended:
                continue
            if log_prob != log_prob:
                raise TrainingError(
                    "the model's logits are no longer numbers: its weights are spoilt. Go back to a checkpoint from "
                    "before and lower actor.lr."
                )
            if routes is not None:
                first, last = (number, number + 1) if flight.spans is None else flight.spans[number]
                own = routes[first:last]
                if flight.spans is not None:  # read again: what came before is known
                    own = own[row.num_routed :]
                row.routes.append(own.copy())
                row.num_routed += len(own)
            reason = row.push(token, log_prob)
            if reason is not None:
                self._end(self._rows.index(row), reason)

    def _known(self, routes: Tensor) -> NDArray[np.unsignedinteger[Any]]:
        assert self._recorder is not None
        return routes.numpy().astype(self._recorder.shape.dtype, copy=False)

    def _end(self, index: int, reason: FinishReason) -> None:
        row = self._rows.pop(index)
        assert isinstance(row, SlotRow)
        self._leave(row)
        row.has_ended = True
        self._tell(row, reason)

    def _leave(self, row: SlotRow) -> None:
        """Its slot and pages are free for whoever comes later on the device."""
        self._pool.give_back(row.pages)
        self._free_slots.append(row.slot)
        row.slot, row.pages = -1, []

    # Checks

    def log_probs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        self._weights.fill()
        return super().log_probs(sequences)

    @torch.inference_mode()
    def _logits(self, tokens: Tensor) -> Tensor:
        logits, _ = self._pass([tokens.cpu().numpy().astype(np.int32)], [0], None)
        return logits

    @torch.inference_mode()
    def _try_out(self) -> None:
        """Refuse a model of which another is computed here than by transformers: over its pages and without."""
        num = min(_TRIED, most_positions(self._model.config) or _TRIED)
        read = num - min(8, num // 2)
        ids = np.random.default_rng(0).integers(0, self._model.config.get_text_config().vocab_size, num, np.int32)
        expected = self._model(input_ids=torch.from_numpy(ids)[None].long().to(self._device), use_cache=False).logits
        pages = self._pool.take(num_pages(num))
        self._slots.begin([Beginning(0, 0, read, SamplingParams(1), 0, 0, pages)])
        parts = [self._pass([ids[:read]], [0], None)[0]]
        self._pass([ids[: read - 1]], [0], [0])
        self._pass([ids[read - 1 : read]], [read - 1], [0])
        for at in range(read, num):
            self._slots.tokens[0], self._slots.positions[0] = int(ids[at]), at
            slots = torch.zeros(1 + at % 2, dtype=torch.int32, device=self._device)
            rows = Rows(slots, self._slots.positions, self._slots.tables, num_splits=1 + at % 2)
            parts.append(self._lean.logits_of_rows(self._slots.tokens, rows, self._pages)[:1])
        self._pool.give_back(pages)
        got = torch.cat(parts)
        difference = float((got.float().log_softmax(-1) - expected[0].float().log_softmax(-1)).abs().mean())
        if not difference < _AGREES[self._model.dtype]:
            raise self._unsupported(f"its log-probs come out different, by {difference:.2g}")


def _is_narrow(rows: Sequence[SlotRow]) -> bool:
    params = [row.ticket.request.params for row in rows]
    return any(own.temperature > 0 and (own.top_k > 0 or own.top_p < 1) for own in params)
