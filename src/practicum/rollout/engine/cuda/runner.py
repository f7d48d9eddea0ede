"""The model runner of the native engine on a CUDA device: blocks of keys and values, steps as graphs.

    prefill ─▶ one pass over the prompts; the first token of each sequence is drawn ──────────────────────────────┐
    decode  ─▶ a graph draws one more token for each sequence; the token stays on the device, and is read next ───┤
                                                                                                                  ▼
    collect ◀─ what was drawn one launch before has come to the host, which then ends sequences and launches again

The device never waits for the host: while a step runs, the host reads what the step before has drawn. A sequence that
has ended there has one more token drawn for it, which is thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from practicum.errors import ResourceError, RolloutError
from practicum.rollout.engine.cuda.attention import BLOCK_SIZE, tile_size
from practicum.rollout.engine.cuda.device_state import DeviceState, InFlight
from practicum.rollout.engine.cuda.fused_model import DecodeBatch, FusedModel, PrefillBatch
from practicum.rollout.engine.cuda.graphs import DecodeGraphs, graph_size, num_splits
from practicum.rollout.engine.cuda.sampling import sample
from practicum.rollout.engine.cuda.virtual_memory import VirtualMemory
from practicum.rollout.engine.cuda.weights import DeviceWeights
from practicum.rollout.engine.model import AGREES, ModelRunner, max_positions
from practicum.rollout.engine.sequence import Sequence
from practicum.rollout.engine.sleep import free_bytes, gigabytes, give_back_memory
from practicum.types import Prompt, SamplingParams
from practicum.weights import WeightUpdate

_CACHE_SHARE, _MAX_SHARE = 1 / 3, 0.9  # of what is free: unless another size is asked for, and in any case
_MIN_BLOCKS = 3
_TRIAL_TOKENS = BLOCK_SIZE + 6
Ids = NDArray[np.int32]


class CudaRunner(ModelRunner):
    """The model runner for a CUDA device.

    With `stays_loaded` a trainer computes in this process while the engine sleeps: the memory that torch has cached,
    which it uses, is not given back.
    """

    block_size = BLOCK_SIZE
    prefill_tokens = 16384
    grow_blocks = 4
    num_behind = 1

    def __init__(self, path: str, *, device: torch.device, **options: Any) -> None:
        if device.index not in (None, torch.cuda.current_device()):
            raise RolloutError(f"{device} is not the device of this process: choose it by CUDA_VISIBLE_DEVICES.")
        super().__init__(path, device=device, **options)
        self._fused = FusedModel(self.module)
        self._weights = DeviceWeights(self.module, self.device)
        self.block_bytes = self._fused.values_per_token * BLOCK_SIZE * self.module.dtype.itemsize
        self._cache: VirtualMemory | None = None  # all that `_open` makes is there with it
        self._is_awake = False
        self._last: Items[Sequence] = []  # the sequences of the last launch, if that decoded
        self._filters = False  # some of them have top-k or top-p

    # Sleep and weights

    def wake(self) -> None:
        if self._is_awake:
            return
        try:
            self._weights.map()
            if self._cache is None:
                self._weights.fill()  # the trial needs them
                self._open()
            else:
                self._map(self._cache, min(self._cache_bytes, self._room()))
        except BaseException:
            self.sleep()
            raise
        self._is_awake = True

    def sleep(self) -> None:
        self._is_awake = False
        if self._cache is not None:
            self._cache.unmap()
        self._weights.sleep()
        if not self._stays_loaded:
            give_back_memory(self.device)

    def load_weights(self, update: WeightUpdate) -> None:
        self._weights.map()
        if not update.is_whole:
            self._weights.fill()
        super().load_weights(replace(update, shared=False))
        self._weights.changed()

    def close(self) -> None:
        if self._cache is not None:
            torch.cuda.synchronize(self.device)
            self._graphs.clear()
            self._cache.close()
        self._weights.close()
        super().close()

    @property
    def held_bytes(self) -> int:
        """The memory of the device that weights and cache take while it is awake."""
        return self._weights.num_bytes + (self._cache.num_mapped if self._cache is not None else 0)

    def _room(self) -> int:
        """Return the bytes for the cache: what was asked for, as far as it is there, or a share of what is free."""
        free = free_bytes(self.device) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(free * _CACHE_SHARE if self.cache_gb is None else min(self.cache_gb * 1e9, free * _MAX_SHARE))

    def _open(self) -> None:
        """Make what stays: addresses for the cache, the state of sequences on the device, graphs; and try it all."""
        self._cache_bytes = self._room()
        cache, fused = VirtualMemory(self._cache_bytes, self.device), self._fused
        try:
            longest = max_positions(self.module.config) or 1 << 20
            max_blocks = -(-longest // BLOCK_SIZE) + self.grow_blocks
            self._state = DeviceState(self.max_batch, max_blocks, self.device)
            self._in_flight = InFlight(graph_size(self.max_batch), self.router_shape, self.device)
            self._graphs = DecodeGraphs(self._step, self.max_batch, self.max_batch, self.device)
            self._num_processors = torch.cuda.get_device_properties(self.device).multi_processor_count
            self._map(cache, self._cache_bytes)
            num = self._cache_bytes // self.block_bytes
            values = cache.tensor()[: num * self.block_bytes].view(self.module.dtype)
            self._blocks = values.view(num, fused.num_layers, 2, fused.kv_heads, BLOCK_SIZE, fused.width)
            fused.bind()
            fused.prepare_rotations(longest)
            self._check_agreement()
        except BaseException:
            cache.close()
            raise
        self._cache = cache

    def _map(self, cache: VirtualMemory, room: int) -> None:
        try:
            num = self._blocks_in(room)
            cache.map(num * self.block_bytes)
        except ResourceError:  # what torch has cached is in pieces, or for graphs
            torch.cuda.empty_cache()
            num = self._blocks_in(min(room, int(free_bytes(self.device) * _MAX_SHARE)))
            cache.map(num * self.block_bytes)
        self.num_blocks = num - 1  # block 0 is written by padding

    def _blocks_in(self, room: int) -> int:
        num = room // self.block_bytes
        if num < _MIN_BLOCKS:
            raise RolloutError(
                f"{gigabytes(room)} of the device are left for keys and values, less than {_MIN_BLOCKS} blocks of "
                f"{BLOCK_SIZE} tokens ({gigabytes(_MIN_BLOCKS * self.block_bytes)}): raise rollout.cache_gb, or leave "
                "it more memory."
            )
        return num

    def _check_agreement(self) -> None:
        """Refuse a model for which transformers computes something else."""
        from triton.runtime.errors import OutOfResources

        try:
            difference = self.trial()
        except OutOfResources as error:
            raise self.unsupported(f"its heads are too large for the kernels on this device: {error}") from error
        if self.recorder is not None:
            self.recorder.take()
        if not difference < AGREES[self.module.dtype]:
            raise self.unsupported(f"its log-probs come out different, by {difference:.2g}")

    # Steps

    def prefill(self, groups: list[list[Sequence]]) -> None:
        """Read what the sequences of each group have in common, in one pass, and draw a token for each sequence."""
        self._weights.fill()
        sequences = [sequence for group in groups for sequence in group]
        ids = [group[0].ids for group in groups]
        each = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        ends = [0, *accumulate(len(one) for one in ids)]
        on_device = self._state.on_device
        self._state.begin(sequences)
        logits, routes = self._read(ids, [group[0].slot for group in groups])
        for group in groups:
            self._copy_begun_block(group)
        slots = on_device([sequence.slot for sequence in sequences], np.int32)
        self._sample(logits[on_device(each, np.int64)], slots, _has_filters(sequences))
        self._in_flight.add(sequences, routes, [(ends[i], ends[i + 1]) for i in each])
        self._last = []  # the next launch is of other sequences

    def decode(self, sequences: list[Sequence], grown: list[Sequence]) -> None:
        """Draw the next token of each sequence by a graph."""
        num = len(sequences)
        if grown:
            self._state.extend(grown)
        if sequences != self._last:
            slots = [sequence.slot for sequence in sequences]
            self._graphs.choose(self._state.on_device(slots, np.int32))
            self._last, self._filters = sequences, _has_filters(sequences)
        tiles = -(-max(one.num_tokens + one.num_launched for one in sequences) // tile_size(num))
        splits = num_splits(graph_size(num) * self._fused.kv_heads, tiles, self._num_processors)
        self._graphs.run(num, splits, self._filters)
        routes = self._in_flight.routes
        self._in_flight.add(self._last, None if routes is None else routes[:num])

    def collect(self) -> list[tuple[Sequence, int, float]]:
        """Return what the oldest launch has drawn; wait for it."""
        return self._in_flight.collect()

    def gather_routes(self) -> None:
        self._in_flight.gather_routes()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight) if self._cache is not None else 0

    def reset(self) -> None:
        """Forget what is in flight, after a failure."""
        if self._cache is not None:
            self._in_flight.clear()
            self._last = []

    def _step(self, slots: Tensor, splits: int, filters: bool) -> None:
        """Decode once; this is recorded, so all that it reads and writes is at addresses that stay."""
        state = self._state
        batch = DecodeBatch(slots, state.positions, state.tables, splits, self._in_flight.routes)
        self._sample(self._fused.decode(state.tokens, batch, self._blocks), slots, filters)

    def _sample(self, logits: Tensor, slots: Tensor, filters: bool) -> None:
        state, out = self._state, self._in_flight
        sample(logits, slots, state, out.tokens, out.log_probs, filters=filters)

    def _read(self, ids: Items[Ids], slots: Items[int]) -> tuple[Tensor, Tensor | None]:
        """Return the logits [sequences, vocabulary] after the last tokens of sequences, and the routes of all tokens.

        Keys and values are stored in the blocks of the sequences. A single long sequence is read in parts.
        """
        if len(ids) > 1 or len(ids[0]) <= self.prefill_tokens:
            return self._pass(ids, [0] * len(ids), slots)
        routes: list[Tensor] = []
        for start in range(0, len(ids[0]), self.prefill_tokens):
            logits, own = self._pass([ids[0][start : start + self.prefill_tokens]], [start], slots)
            routes += [] if own is None else [own]
        return logits, torch.cat(routes) if routes else None

    def _pass(self, ids: Items[Ids], starts: Items[int], slots: Items[int] | None) -> tuple[Tensor, Tensor | None]:
        """Read tokens of sequences from their starts on; without slots store nothing and return all logits."""
        lengths, state, on_device = [len(one) for one in ids], self._state, self._state.on_device
        positions = np.concatenate([start + np.arange(n) for start, n in zip(starts, lengths, strict=True)])
        new, all_tokens = np.cumsum([0, *lengths]), np.cumsum([0, *np.add(lengths, starts)])
        owners = np.repeat([state.num_slots] * len(ids) if slots is None else slots, lengths)
        batch = PrefillBatch(
            lengths, starts, on_device(new, np.int32), on_device(all_tokens, np.int32), on_device(owners, np.int32),
            on_device(positions, np.int32), None if slots is None else state.tables,
            self._in_flight.empty_routes(len(positions)),
        )  # fmt: skip
        keep = None if slots is None else on_device(new[1:] - 1, np.int64)
        tokens = on_device(np.concatenate(ids), np.int64)
        return self._fused.prefill(tokens, batch, None if slots is None else self._blocks, keep), batch.routes

    def _copy_begun_block(self, group: Items[Sequence]) -> None:
        """Copy the block that the prompt has begun from the first sequence of a group to the others."""
        whole, begun = divmod(group[0].num_tokens, BLOCK_SIZE)
        if begun and len(group) > 1:
            to = self._state.on_device([sequence.blocks[whole] for sequence in group[1:]], np.int64)
            self._blocks[to] = self._blocks[group[0].blocks[whole]].clone()

    # Log-probs of given tokens

    def log_probs(self, sequences: Items[Ids]) -> list[NDArray[np.float32]]:
        self._weights.fill()
        return super().log_probs(sequences)

    @torch.inference_mode()
    def logits(self, tokens: Tensor) -> Tensor:
        return self._pass([tokens.cpu().numpy().astype(np.int32)], [0], None)[0]

    @torch.inference_mode()
    def trial(self) -> float:
        """Return the mean difference to transformers' log-probs: of a sequence that is read without being stored, then
        read in two parts, and then decoded by steps of one row and of two."""
        model, state = self.module, self._state
        num = min(_TRIAL_TOKENS, max_positions(model.config) or _TRIAL_TOKENS)
        read = num - min(8, num // 2)
        ids = np.random.default_rng(0).integers(0, model.config.get_text_config().vocab_size, num, np.int32)
        on_device = torch.from_numpy(ids)[None].long().to(self.device)
        expected = model(input_ids=on_device, use_cache=False).logits
        sequence = Sequence(Prompt("trial", text="?"), ids[:read], SamplingParams(1), 0)
        sequence.slot, sequence.blocks = 0, list(range(1, -(-num // BLOCK_SIZE) + 1))
        state.begin([sequence])
        parts = [self._pass([ids[:read]], [0], None)[0]]
        self._pass([ids[: read - 1]], [0], [0])
        self._pass([ids[read - 1 : read]], [read - 1], [0])
        for at in range(read, num):
            state.tokens[0], state.positions[0] = int(ids[at]), at
            slots = torch.zeros(1 + at % 2, dtype=torch.int32, device=self.device)
            batch = DecodeBatch(slots, state.positions, state.tables, num_splits=1 + at % 2)
            parts.append(self._fused.decode(state.tokens, batch, self._blocks)[:1])
        gap = torch.cat(parts).float().log_softmax(-1) - expected[0].float().log_softmax(-1)
        return float(gap.abs().mean())


def _has_filters(sequences: Items[Sequence]) -> bool:
    params = [sequence.params for sequence in sequences]
    return any(own.temperature > 0 and (own.top_k > 0 or own.top_p < 1) for own in params)
