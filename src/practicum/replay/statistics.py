"""What recordings hold, how they differ and whether they are whole: the numbers behind `practicum routes`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.errors import ReplayError
from practicum.replay.format import Chunk, ChunkFile, Damaged, LostBytes, RecordingHeader
from practicum.replay.records import OpenChunk
from practicum.replay.store import Recording, rank_path


@dataclass(frozen=True, slots=True)
class Size:
    """The bytes per token of the routes alone, as they could be and as they are written."""

    int32: float
    array: float  # in the dtype of the number of experts
    bound: float  # log2 C(E, k) bits a row: no code for random routing takes less
    routes: float
    everything: float  # the whole files


@dataclass(frozen=True, slots=True)
class Statistics:
    """The statistics of a recording. Counts are of samples as they stand: replaced ones are only part of the bytes."""

    num_steps: int
    num_samples: int
    num_replaced: int  # records that a later one with the same id has replaced
    num_tokens: int
    num_unknown: int  # tokens without a record
    num_chunks: int
    num_bytes: int
    num_lost_bytes: int
    size: Size
    load: NDArray[np.int64]  # [layers, experts], how many tokens were sent there


def statistics(recording: Recording) -> Statistics:
    """Read every route and return the statistics. Raises `ReplayError` at the first that is damaged."""
    header = recording.header
    load = np.zeros((len(header.layers), header.num_experts), np.int64)
    firsts = (np.arange(len(header.layers)) * header.num_experts)[:, None]
    num_tokens = num_unknown = 0
    for id in recording.ids_on_disk:
        (routes,) = recording.routes([id])
        num_tokens += len(routes)
        num_unknown += int((~routes.known).sum())
        cells = (routes.experts[routes.known] + firsts).ravel()
        load += np.bincount(cells, minlength=load.size).reshape(load.shape)
    chunks = [chunk for file in recording.files for chunk in file.chunks]
    return Statistics(
        num_steps=len(recording.steps),
        num_samples=len(recording),
        num_replaced=sum(len(chunk.samples) for chunk in chunks) - len(recording),
        num_tokens=num_tokens,
        num_unknown=num_unknown,
        num_chunks=len(chunks),
        num_bytes=sum(file.end for file in recording.files),
        num_lost_bytes=recording.num_lost_bytes,
        size=_size(recording, chunks),
        load=load,
    )


def _size(recording: Recording, chunks: list[Chunk]) -> Size:
    header = recording.header
    recorded = max(1, sum(chunk.num_tokens for chunk in chunks))  # with those that were replaced
    rows = len(header.layers)
    return Size(
        int32=4.0 * header.k * rows,
        array=float(np.dtype(header.dtype).itemsize * header.k * rows),
        bound=math.log2(math.comb(header.num_experts, header.k)) / 8 * rows,
        routes=sum(chunk.sections["routes"].size for chunk in chunks if "routes" in chunk.sections) / recorded,
        everything=sum(file.end for file in recording.files) / recorded,
    )


@dataclass(frozen=True, slots=True)
class Balance:
    """The balance of a layer: how evenly its experts are used."""

    imbalance: float  # the busiest expert's load over the mean
    entropy: float  # as a share of that of an even load
    num_dead: int  # experts that got nothing


def balance(load: NDArray[np.int64]) -> Balance:
    """Return the balance of the experts of one layer."""
    total = int(load.sum())
    if total == 0:
        return Balance(1.0, 1.0, len(load))
    shares = load[load > 0] / total
    entropy = float(-(shares * np.log2(shares)).sum()) / math.log2(len(load)) if len(load) > 1 else 1.0
    return Balance(float(load.max() / load.mean()), entropy, int((load == 0).sum()))


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The place where two recordings of a sample begin to differ."""

    id: str
    position: int  # of the token in prompt and answer
    layer: int  # by its index in the whole model


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two recordings, over the tokens that samples with the same id begin with in both."""

    only_in_first: list[str]
    only_in_second: list[str]
    num_common: int  # samples in both
    with_other_tokens: list[str]  # samples whose tokens are not the same: compared up to there
    num_tokens: int  # compared: recorded in both
    differing: NDArray[np.int64]  # [layers], tokens sent to other experts
    differing_experts: NDArray[np.int64]  # [layers], how many experts of theirs are others, in all
    first: list[FirstDifference]  # of each sample that differs


def difference(one: Recording, other: Recording) -> Difference:
    """Return the difference of two recordings. Raises `ReplayError` for recordings of different models."""
    differences = one.header.differences(other.header)
    if differences:
        raise ReplayError(
            f"{one.path} and {other.path} cannot be compared: the first was made with {'; '.join(differences)}."
        )
    num_layers = len(one.header.layers)
    differing, experts = np.zeros(num_layers, np.int64), np.zeros(num_layers, np.int64)
    common = [id for id in one.ids_on_disk if id in other]
    num_tokens = 0
    others: list[str] = []
    first: list[FirstDifference] = []
    for id in common:
        a, b = one.record(id), other.record(id)
        tokens = [np.concatenate([r.sample.prompt_ids, r.sample.token_ids]) for r in (a, b)]
        shared = _shared(tokens[0], tokens[1])
        if shared < max(map(len, tokens)):
            others.append(id)
        known = a.routes.known[:shared] & b.routes.known[:shared]
        missing = _num_missing(a.routes.experts[:shared], b.routes.experts[:shared]) * known[:, None]
        num_tokens += int(known.sum())
        differing += (missing > 0).sum(0)
        experts += missing.sum(0)
        if missing.any():
            position, place = np.unravel_index(int((missing > 0).argmax()), missing.shape)
            first.append(FirstDifference(id, int(position), one.header.layers[int(place)]))
    return Difference(
        only_in_first=[id for id in one.ids if id not in other],
        only_in_second=[id for id in other.ids if id not in one],
        num_common=len(common),
        with_other_tokens=others,
        num_tokens=num_tokens,
        differing=differing,
        differing_experts=experts,
        first=first,
    )


def _shared(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Return the number of tokens that both begin with."""
    length = min(len(one), len(other))
    unlike = one[:length] != other[:length]
    return int(unlike.argmax()) if unlike.any() else length


def _num_missing(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.int64]:
    """Return how many experts of one set are not in the other, [tokens, layers]."""
    missing = [(one[:, :, place, None] != other).all(-1) for place in range(one.shape[2])]
    found: NDArray[np.int64] = np.sum(missing, axis=0, dtype=np.int64)
    return found


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one file."""

    path: Path
    num_chunks: int  # that are whole
    num_samples: int  # records in them
    num_bytes: int  # of the file
    problems: list[LostBytes]
    unfinished: int  # bytes of a chunk that was being written

    @property
    def is_whole(self) -> bool:
        return not self.problems


def verify(path: str | Path) -> Iterator[Verdict]:
    """Read all of a recording, and of its other ranks when it is that of rank 0. Damaged files are no errors here."""
    verdict, header = _verify_file(Path(path))
    yield verdict
    if header is not None and header.rank == 0:
        for rank in range(1, header.num_ranks):
            yield _verify_file(rank_path(path, rank))[0]


def _verify_file(path: Path) -> tuple[Verdict, RecordingHeader | None]:
    try:
        size = path.stat().st_size
        with closing(ChunkFile(path)) as file:
            return _verify_chunks(file, size), file.header
    except OSError as error:
        size, reason = 0, f"it cannot be read: {error.strerror}"
    except ReplayError as error:
        reason = str(error.__cause__ or error)
    return Verdict(path, 0, 0, size, [LostBytes(0, size, reason)], 0), None


def _verify_chunks(file: ChunkFile, size: int) -> Verdict:
    problems = [*file.lost]
    num_chunks = num_samples = 0
    for chunk in file.chunks:
        content = OpenChunk(file, chunk)
        try:
            for i in range(len(chunk.samples)):
                content.record(i)
        except (Damaged, ReplayError) as error:
            samples = f"{len(chunk.samples)} samples, {chunk.samples[0].id} to {chunk.samples[-1].id}"
            reason = f"chunk {chunk.head.number} ({samples}): {error}"
            problems.append(LostBytes(chunk.head.offset, chunk.head.size, reason))
            continue
        num_chunks += 1
        num_samples += len(chunk.samples)
    rest = file.unfinished
    if rest is not None and rest.reason:
        problems.append(rest)
    problems.sort(key=lambda problem: problem.offset)
    unfinished = rest.size if rest is not None and not rest.reason else 0
    return Verdict(file.path, num_chunks, num_samples, size, problems, unfinished)
