"""The model runner for a CPU: transformers' modules, as the trainer has them, with our keys and values in blocks.

    prefill   prompts end to end in one pass, one pass for all answers to one prompt; then each has a token
    decode    one token for every sequence: past transformers' forward, through kernels in C, where the model allows it

It runs on other devices too, without the kernels: there it is the slow way, for models that have no other. In hybrid
placement the modules' parameters are the trainer's own memory.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any
from weakref import WeakMethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from practicum.rollout.engine.cpu.fused_decode import FusedDecode
from practicum.rollout.engine.cpu.kernels import BLOCK, load_kernels
from practicum.rollout.engine.cpu.modules import speed_up
from practicum.rollout.engine.kv_cache import Decode, KVCache, Prefill
from practicum.rollout.engine.model import ModelRunner, max_positions
from practicum.rollout.engine.sampling import draw_each
from practicum.rollout.engine.scheduler import in_order
from practicum.rollout.engine.sequence import Sequence
from practicum.rollout.engine.sleep import free_bytes, keep_freed_memory
from practicum.weights import WeightUpdate

_CACHE_SHARE = 1 / 3
AGREES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


class CpuRunner(ModelRunner):
    block_size = BLOCK
    prefill_tokens = 8192

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(path, **options)
        on_cpu = self.device.type == "cpu"
        self._kernels = load_kernels() if on_cpu and self.module.dtype == torch.float32 else None
        self._cache = KVCache(self._kernels)
        self._fused: FusedDecode | None = None
        self._tables = np.zeros((self.max_batch, 1), np.int64)  # the blocks of each slot
        self._drawn: deque[list[tuple[Sequence, int, float]]] = deque()
        if on_cpu and not self._stays_loaded:  # a trainer beside it has memory of its own to care for
            keep_freed_memory()
        self._adopt()
        if self.cache_gb is not None:
            self._reserve(int(self.cache_gb * 1e9))

    def wake(self) -> None:
        super().wake()
        if self.num_blocks is None:
            self._reserve(int(free_bytes(self.device) * _CACHE_SHARE))

    def sleep(self) -> None:
        self._cache.clear()
        super().sleep()

    def load_weights(self, update: WeightUpdate) -> None:
        self._cache.clear()  # of the old weights; spoilt ones may have left there what is no number
        super().load_weights(update)

    def close(self) -> None:
        self._cache.clear()
        super().close()

    def reset(self) -> None:
        self._cache.clear()  # it may hold what is no number
        self._drawn.clear()

    # Steps

    def prefill(self, groups: list[list[Sequence]]) -> None:
        groups = sorted(groups, key=lambda group: group[0].num_tokens)  # those of one length are attended together
        firsts = [group[0] for group in groups]
        lengths = [first.num_tokens for first in firsts]
        ends = np.cumsum(lengths)
        for sequence in in_order(groups):
            self._set_table(sequence)
        positions = np.concatenate([np.arange(length) for length in lengths])
        slots = np.repeat([first.slot for first in firsts], lengths)
        places = self._tables[slots, positions // BLOCK] * BLOCK + positions % BLOCK
        step = Prefill(lengths, self._on_device(places))
        ids = np.concatenate([first.ids for first in firsts])
        logits = self._forward(ids[None], positions[None], step, ends - 1)[0]
        routes = None if self.recorder is None else np.split(self.recorder.take(), ends[:-1])
        blocks: list[int] = []
        copies: list[int] = []
        for index, group in enumerate(groups):
            whole, begun = divmod(lengths[index], BLOCK)
            if begun and len(group) > 1:
                blocks += [group[0].blocks[whole]] * (len(group) - 1)
                copies += [sequence.blocks[whole] for sequence in group[1:]]
            if routes is not None:
                for sequence in group:
                    sequence.routes.append(routes[index][sequence.num_routed :].copy())
        if copies:
            self._cache.copy(blocks, copies)
        each = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        self._draw(list(in_order(groups)), logits[self._on_device(each)])

    def decode(self, sequences: list[Sequence], grown: list[Sequence]) -> None:
        for sequence in grown:
            self._set_table(sequence)
        num = len(sequences)
        tokens = np.fromiter((sequence.token_ids[-1] for sequence in sequences), np.int64, num)
        positions = np.fromiter((sequence.num_tokens - 1 for sequence in sequences), np.int64, num)
        slots = np.fromiter((sequence.slot for sequence in sequences), np.int64, num)
        tables = self._tables[slots, : int(positions.max()) // BLOCK + 1]
        step = Decode.of(self._on_device(tables), self._on_device(positions), int(positions.max()) + 1)
        logits = self._forward(tokens[:, None], positions[:, None], step)[:, 0]
        if self.recorder is not None:
            for sequence, own in zip(sequences, self.recorder.take(), strict=True):
                sequence.routes.append(own[None].copy())  # a view would keep those of all rows
        self._draw(sequences, logits)

    def collect(self) -> list[tuple[Sequence, int, float]]:
        return self._drawn.popleft()

    @property
    def num_in_flight(self) -> int:
        return len(self._drawn)

    def logits(self, tokens: Tensor) -> Tensor:
        ids = tokens.cpu().numpy()
        logits = self._forward(ids[None], np.arange(len(ids))[None], Prefill([len(ids)], None))[0]
        if self.recorder is not None:
            self.recorder.take()
        return logits

    def _draw(self, sequences: list[Sequence], logits: Tensor) -> None:
        uniforms = np.fromiter((sequence.uniform() for sequence in sequences), np.float32, len(sequences))
        params = [sequence.params for sequence in sequences]
        tokens, log_probs = draw_each(logits, self._on_device(uniforms), params)
        self._drawn.append(list(zip(sequences, tokens, log_probs, strict=True)))

    def _forward(
        self,
        tokens: NDArray[np.integer[Any]],
        positions: NDArray[np.integer[Any]],
        step: Prefill | Decode,
        keep: NDArray[np.integer[Any]] | None = None,
    ) -> Tensor:
        """Logits [rows, tokens, vocabulary] of tokens [rows, tokens], or only those that `keep` names."""
        self._cache.step = step
        ids = self._on_device(tokens.astype(np.int64, copy=False))
        if self._fused is not None and isinstance(step, Decode):
            return self._fused(ids, step)
        only = {} if keep is None else {"logits_to_keep": self._on_device(keep)}
        logits: Tensor = self.module(
            input_ids=ids,
            position_ids=self._on_device(positions.astype(np.int64, copy=False)),
            past_key_values=self._cache,
            use_cache=True,
            **only,
        ).logits
        return logits

    def _on_device(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    # Blocks

    def _reserve(self, num_bytes: int) -> None:
        """Have as many blocks as the memory holds, no more than a full batch of the longest sequences takes."""
        longest = max_positions(self.module.config)
        most = num_bytes // self.block_bytes
        self.num_blocks = most if longest is None else min(most, self.max_batch * -(-longest // BLOCK))
        self._cache.num_blocks = self.num_blocks

    def _set_table(self, sequence: Sequence) -> None:
        num = len(sequence.blocks)
        if num > self._tables.shape[1]:
            self._tables = np.pad(self._tables, ((0, 0), (0, max(num - self._tables.shape[1], self._tables.shape[1]))))
        self._tables[sequence.slot, :num] = sequence.blocks

    # Which models

    def _adopt(self) -> None:
        """Make the model use our cache and attention; refuse one that does not compute the same with them."""
        from transformers import AttentionInterface, AttentionMaskInterface

        model = self.module
        ids = np.random.default_rng(0).integers(0, model.config.get_text_config().vocab_size, 9)
        with torch.inference_mode():
            expected = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].float().log_softmax(-1)
            name = f"practicum-{id(self)}"
            attend = WeakMethod(self._cache.attend)  # transformers' table outlives us
            AttentionInterface.register(name, lambda *args, **kwargs: attend()(*args, **kwargs))  # type: ignore[misc]
            AttentionMaskInterface.register(name, _no_mask)
            device, self.device = self.device, torch.device("cpu")  # where the model was loaded
            self._cache.num_blocks = 2
            try:
                if device.type == "cpu":
                    speed_up(model, self._kernels)
                model.set_attn_implementation(name)
                difference = self._try_out(ids, expected)
                self._try_fused(ids, expected)
            except Exception as error:  # whatever a family that does other things may raise
                raise self.unsupported(f"{type(error).__name__}: {error}") from error
            finally:
                self.device = device
        self.block_bytes = BLOCK * self._cache.bytes_per_token
        self._cache.clear()
        if self.recorder is not None:
            self.recorder.take()
        if not difference < AGREES[model.dtype]:
            raise self.unsupported(f"its log-probs come out different, by {difference:.2g}")
        self._check_windows(model.config.get_text_config())

    def _try_out(self, ids: NDArray[np.int64], expected: Tensor) -> float:
        """Return how far log-probs are from those expected."""
        if not self._cache.gathers:
            with suppress(Exception):
                if (difference := self._difference(ids, expected)) < AGREES[torch.float32]:
                    return difference
            # Some families unpack keys and values, so they must be there as transformers has them.
            self._cache.gathers = True
            self._cache.clear()
        return self._difference(ids, expected)

    def _difference(self, ids: NDArray[np.int64], expected: Tensor) -> float:
        return float((self._trial(ids) - expected).abs().max())

    def _try_fused(self, ids: NDArray[np.int64], expected: Tensor) -> None:
        """From now on decode past transformers' forward, if the model computes the same so."""
        if self._kernels is not None:
            self._fused = FusedDecode.of(self.module, self._kernels, self._cache)
        if self._fused is not None and not self._difference(ids, expected) < AGREES[torch.float32]:
            self._fused = None

    def _check_windows(self, config: Any) -> None:
        """Refuse a window that is longer than what was tried out unless it comes to our attention, and not through a
        mask."""
        kinds = set(getattr(config, "layer_types", None) or ())
        if kinds - {"full_attention", "sliding_attention"}:
            raise self.unsupported(f"its layers attend in other ways: {', '.join(sorted(kinds))}")
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        has_window = "sliding_attention" in kinds if kinds else bool(window)
        if has_window and window not in self._cache.windows:
            raise self.unsupported(f"its sliding window of {window} is known to its masks alone")

    def _trial(self, ids: NDArray[np.int64]) -> Tensor:
        """Log-probs of a sequence of which the last tokens are decoded one by one, beside another row."""
        short = np.concatenate([ids[:5], ids[:3]])[None], np.concatenate([np.arange(5), np.arange(3)])[None]
        places = torch.cat([BLOCK + torch.arange(5), 2 * BLOCK + torch.arange(3)])
        parts = [self._forward(*short, Prefill([5, 3], places))[0, :5]]
        for at in range(5, len(ids)):
            positions = np.array([at, at - 2])
            step = Decode.of(torch.tensor([[1], [2]]), torch.from_numpy(positions), at + 1)
            parts.append(self._forward(ids[positions][:, None], positions[:, None], step)[0])
        return torch.cat(parts).float().log_softmax(-1)


def _no_mask(*_: Any, **__: Any) -> None:
    """Attention knows by itself what a token may see."""
