"""Our own engine: transformers' modules, as the trainer has them, with our keys and values and continuous batching.

    inbox ─ take ─▶ pending ─ rows are free ─▶ prefill: prompts end to end in one pass, one pass for all answers to one
                                                  │      prompt; the first token of each is drawn
                                                  ▼
                      ┌──▶ decode: one token for every row ──▶ ended: told, and its row is free ──┐
                      └────────────────────── between two steps: new, cancelled, aborted ◀────────┘

Everything that depends on a row alone (random numbers, when it ends) is kept with the row, so an answer does not change
with what else is in the batch. In hybrid placement the modules' parameters are the trainer's own memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any
from weakref import WeakMethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from practicum.errors import RolloutError
from practicum.replay import RouteRecorder
from practicum.rollout.answers import Ending, sample_of, untouched, written_ids
from practicum.rollout.cpu import speed_up
from practicum.rollout.inbox import Inbox
from practicum.rollout.kernels import load_kernels
from practicum.rollout.kv_cache import Decode, KVCache, Prompts, rounded
from practicum.rollout.lean import LeanStep
from practicum.rollout.own_model import OwnModelRollout
from practicum.rollout.rows import Pending, Row
from practicum.rollout.sampling import draw_each
from practicum.rollout.sleeping import free_bytes, keep_freed_memory
from practicum.types import FinishReason, RolloutRequest, RoutedExperts
from practicum.weights import WeightUpdate

_WAIT_S = 0.5
_PREFILL_TOKENS = 8192  # in one pass, so that rows under way do not wait for long
_CACHE_SHARE = 1 / 3
_AGREES = {torch.float32: 1e-3, torch.bfloat16: 0.1}


class NativeRollout(OwnModelRollout):
    """`cache_gb` bounds the memory for keys and values; None: a third of what is free when it is first needed."""

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
    ) -> None:
        super().__init__(model_path, device=device, dtype=dtype, stays_loaded=stays_loaded)
        self._max_batch = max_batch
        self._cache_gb = cache_gb
        self._cache_bytes = None if cache_gb is None else int(cache_gb * 1e9)
        self._kernels = load_kernels() if device.type == "cpu" and dtype == torch.float32 else None
        self._cache = KVCache(self._kernels)
        self._lean: LeanStep | None = None
        if device.type == "cpu" and not stays_loaded:  # a trainer beside it has memory of its own to care for
            keep_freed_memory()
        self._pending: deque[Pending] = deque()
        self._rows: list[Row] = []  # row i of the cache belongs to row i here
        self._recorder: RouteRecorder | None = None
        if keep_routes:
            self._recorder = RouteRecorder(self._model)
        self._adopt()

    def release(self) -> None:
        self._cache.clear()
        super().release()

    def update_weights(self, update: WeightUpdate) -> None:
        self._cache.clear()  # of the old weights; spoilt ones may have left there what is no number
        super().update_weights(update)

    def close(self) -> None:
        self._cache.clear()
        if self._recorder is not None:
            self._recorder.close()
        super().close()

    def check(self, request: RolloutRequest) -> None:
        super().check(request)
        needed = (len(request.prompt_ids) + request.params.max_new_tokens) * self._bytes_per_token
        if self._cache_gb is not None and needed > self._cache_gb * 1e9:
            raise RolloutError(
                f"prompt {request.prompt.id} and its answer may take {needed / 1e9:.3g} GB of keys and values, more "
                f"than rollout.cache_gb={self._cache_gb:g}: raise it, or lower rollout.max_new_tokens."
            )

    def write(self, inbox: Inbox) -> None:
        assert self._awake, "generate before resume"
        try:
            with torch.inference_mode():
                while not inbox.is_over or self._pending or self._rows:
                    self._take_in(inbox)
                    self._break_off(inbox)
                    self._admit()
                    if self._rows:
                        self._decode()
        except BaseException:
            self._cache.clear()  # it may have grown by halves, or hold what is no number
            raise
        finally:
            self._pending.clear()
            self._rows.clear()

    # Steps

    def _take_in(self, inbox: Inbox) -> None:
        is_idle = not (self._rows or self._pending)
        room = self._max_batch - len(self._rows) - len(self._pending)
        if is_idle or room > 0:
            for ticket in inbox.take(max(1, room), _WAIT_S if is_idle else 0.0):
                self._pending.append(Pending(ticket, Ending(ticket.request.params, self.eos_ids, self._tokenizer)))

    def _break_off(self, inbox: Inbox) -> None:
        for index in reversed(range(len(self._rows))):
            if inbox.is_aborted or self._rows[index].ticket.is_cancelled:
                self._end(index, "abort")
        for pending in [p for p in self._pending if inbox.is_aborted or p.ticket.is_cancelled]:
            self._pending.remove(pending)
            for answer in range(pending.next_answer, pending.ticket.request.params.num_answers):
                pending.ticket.done(answer, untouched(pending.ticket.request))

    def _admit(self) -> None:
        """Prompts whose answers find room: so many tokens between two steps of those under way."""
        is_alone = not self._rows
        while self._pending:
            chosen: list[tuple[Pending, range]] = []
            num_tokens = 0
            num_rows, room = len(self._rows), self._longest()
            while self._pending:
                pending = self._pending[0]
                longest = max(room, pending.most_tokens)
                num = min(pending.num_left, self._most_rows(longest) - num_rows)
                if num < 1 or (chosen and num_tokens + pending.num_tokens > _PREFILL_TOKENS):
                    break
                chosen.append((pending, range(pending.next_answer, pending.next_answer + num)))
                num_rows, room, num_tokens = num_rows + num, longest, num_tokens + pending.num_tokens
                pending.next_answer += num
                if pending.num_left:
                    break
                self._pending.popleft()
            if not chosen:
                return
            self._cache.reserve(num_rows, room, self._most_rows(room))
            self._prefill(sorted(chosen, key=lambda one: one[0].num_tokens))
            if not is_alone:
                return

    def _prefill(self, chosen: Sequence[tuple[Pending, range]]) -> None:
        """One pass over the prompts; then each answer has a row of its own, and its first token."""
        first = len(self._rows)
        starts = [first]
        for _, answers in chosen:
            starts.append(starts[-1] + len(answers))
        ids = [written_ids(pending.ticket.request) for pending, _ in chosen]
        lengths = [len(one) for one in ids]
        step = Prompts(lengths, starts[:-1])
        last = np.cumsum(lengths) - 1
        logits = self._forward(
            np.concatenate(ids)[None], np.concatenate([np.arange(n) for n in lengths])[None], step, last
        )[0]
        routes = None if self._recorder is None else np.split(self._recorder.take(), np.cumsum(lengths)[:-1])
        for index, (pending, answers) in enumerate(chosen):
            for answer in answers:
                row = Row(pending.ticket, answer, pending.ending, lengths[index])
                if routes is not None:
                    row.routes.append(routes[index].copy())
                if len(self._rows) > starts[index]:
                    self._cache.copy(starts[index], len(self._rows), lengths[index])
                self._rows.append(row)
        each = np.repeat(np.arange(len(chosen)), [len(answers) for _, answers in chosen])
        self._push(logits[torch.from_numpy(each).to(logits.device)], first)

    def _decode(self) -> None:
        """One more token for every row."""
        tokens = np.fromiter((row.tokens[-1] for row in self._rows), np.int64, len(self._rows))
        positions = np.fromiter((row.length - 1 for row in self._rows), np.int64, len(self._rows))
        step = Decode(torch.from_numpy(positions).to(self._device), int(positions.max()) + 1)
        logits = self._forward(tokens[:, None], positions[:, None], step)[:, 0]
        if self._recorder is not None:
            for row, own in zip(self._rows, self._recorder.take(), strict=True):
                row.routes.append(own[None].copy())  # a view would keep those of all rows
        self._push(logits, 0)

    def _push(self, logits: Tensor, first: int) -> None:
        """Draw a token for each row from `first` on, and let those go that have ended."""
        rows = self._rows[first:]
        uniform = torch.from_numpy(np.fromiter((row.uniform() for row in rows), np.float32, len(rows)))
        tokens, log_probs = draw_each(logits, uniform.to(logits.device), [row.ticket.request.params for row in rows])
        ended = []
        for index, (row, token, log_prob) in enumerate(zip(rows, tokens, log_probs, strict=True), first):
            reason = row.push(token, log_prob)
            if reason is not None:
                ended.append((index, reason))
        for index, reason in reversed(ended):
            self._end(index, reason)

    def _end(self, index: int, reason: FinishReason) -> None:
        row, last = self._rows[index], self._rows.pop()
        if row is not last:
            self._cache.copy(len(self._rows), index, last.length)
            self._rows[index] = last
        row.ticket.done(
            row.answer,
            sample_of(
                row.ticket.request,
                np.array(row.tokens, np.int32),
                np.array(row.log_probs, np.float32),
                self._version,
                reason,
                self._tokenizer,
                self._routes_of(row),
            ),
        )

    def _routes_of(self, row: Row) -> RoutedExperts | None:
        if self._recorder is None:
            return None
        experts = np.concatenate(row.routes)
        known = np.ones(row.length, np.bool_)
        known[len(experts) :] = False  # the last token was drawn and has been through no layer
        blank = np.zeros((row.length - len(experts), *experts.shape[1:]), experts.dtype)
        shape = self._recorder.shape
        return RoutedExperts(np.concatenate([experts, blank]), shape.layers, known, shape.num_experts)

    def _forward(
        self,
        tokens: NDArray[np.integer[Any]],
        positions: NDArray[np.integer[Any]],
        step: Prompts | Decode,
        keep: NDArray[np.integer[Any]] | None = None,
    ) -> Tensor:
        """Logits [rows, tokens, vocabulary] of tokens [rows, tokens], or only those that `keep` names."""
        self._cache.step = step
        if self._lean is not None and isinstance(step, Decode):
            return self._lean(torch.from_numpy(tokens.astype(np.int64)), step)
        only = {} if keep is None else {"logits_to_keep": torch.from_numpy(keep).to(self._device)}
        logits: Tensor = self._model(
            input_ids=torch.from_numpy(tokens.astype(np.int64)).to(self._device),
            position_ids=torch.from_numpy(positions.astype(np.int64)).to(self._device),
            past_key_values=self._cache,
            use_cache=True,
            **only,
        ).logits
        return logits

    def _logits(self, tokens: Tensor) -> Tensor:
        ids = tokens.cpu().numpy()
        logits = self._forward(ids[None], np.arange(len(ids))[None], Prompts([len(ids)], None))[0]
        if self._recorder is not None:
            self._recorder.take()
        return logits

    # Room

    def _longest(self) -> int:
        return max((row.most_tokens for row in self._rows), default=1)

    def _most_rows(self, room: int) -> int:
        """Rows that the memory holds when each has room for so many tokens. One always fits, by `check`."""
        if self._cache_bytes is None:
            self._cache_bytes = int(free_bytes(self._device) * _CACHE_SHARE)
        return max(1, min(self._max_batch, self._cache_bytes // (rounded(room) * self._bytes_per_token)))

    # Which models

    def _adopt(self) -> None:
        """Make the model use our cache and attention; refuse one that does not compute the same with them."""
        from transformers import AttentionInterface, AttentionMaskInterface

        model = self._model
        ids = np.random.default_rng(0).integers(0, model.config.get_text_config().vocab_size, 9)
        with torch.inference_mode():
            expected = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].float().log_softmax(-1)
            name = f"practicum-{id(self)}"
            attend = WeakMethod(self._cache.attend)  # transformers' table outlives us
            AttentionInterface.register(name, lambda *args, **kwargs: attend()(*args, **kwargs))  # type: ignore[misc]
            AttentionMaskInterface.register(name, _no_mask)
            device, self._device = self._device, torch.device("cpu")  # where the model was loaded
            try:
                if device.type == "cpu":
                    speed_up(model, self._kernels)
                model.set_attn_implementation(name)
                got = self._trial(ids)
                difference = float((got - expected).abs().max())
                self._try_lean(ids, expected)
            except Exception as error:  # whatever a family that does other things may raise
                raise self._unsupported(f"{type(error).__name__}: {error}") from error
            finally:
                self._device = device
        self._bytes_per_token = self._cache.bytes_per_token
        self._cache.clear()
        if self._recorder is not None:
            self._recorder.take()
        if not difference < _AGREES[model.dtype]:
            raise self._unsupported(f"its log-probs come out different, by {difference:.2g}")
        self._check_windows(model.config.get_text_config())

    def _try_lean(self, ids: NDArray[np.int64], expected: Tensor) -> None:
        """From now on decode past transformers' forward, if the model computes the same so."""
        if self._kernels is not None:
            self._lean = LeanStep.of(self._model, self._kernels, self._cache)
        if self._lean is not None and not float((self._trial(ids) - expected).abs().max()) < _AGREES[torch.float32]:
            self._lean = None

    def _check_windows(self, config: Any) -> None:
        """A window that is longer than what was tried out must come to our attention, and not through a mask."""
        kinds = set(getattr(config, "layer_types", None) or ())
        if kinds - {"full_attention", "sliding_attention"}:
            raise self._unsupported(f"its layers attend in other ways: {', '.join(sorted(kinds))}")
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        has_window = "sliding_attention" in kinds if kinds else bool(window)
        if has_window and window not in self._cache.windows:
            raise self._unsupported(f"its sliding window of {window} is known to its masks alone")

    def _trial(self, ids: NDArray[np.int64]) -> Tensor:
        """Log-probs of a sequence of which the last tokens are decoded one by one, beside another row."""
        self._cache.reserve(2, len(ids), most_rows=2)
        short = np.concatenate([ids[:5], ids[:3]])[None], np.concatenate([np.arange(5), np.arange(3)])[None]
        parts = [self._forward(*short, Prompts([5, 3], [0, 1]))[0, :5]]
        for at in range(5, len(ids)):
            positions = np.array([at, at - 2])
            step = Decode(torch.from_numpy(positions), at + 1)
            parts.append(self._forward(ids[positions][:, None], positions[:, None], step)[0])
        return torch.cat(parts).float().log_softmax(-1)

    def _unsupported(self, why: str) -> RolloutError:
        family = self._model.config.model_type
        return RolloutError(
            f"the native engine does not support the model family {family!r} of {self._path!r} ({why}). "
            "Use the engine hf (rollout.engine=hf, or --engine hf), which runs every causal model of transformers."
        )


def _no_mask(*_: Any, **__: Any) -> None:
    """Attention knows by itself what a token may see."""
