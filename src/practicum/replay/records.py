"""Samples as the sections of a chunk, and back. Arrays of all samples stand end to end, words are JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from practicum.errors import ReplayError
from practicum.replay.codec import decode_routes, encode_routes
from practicum.replay.combinations import Ids
from practicum.replay.format import (
    CODED_ROUTES,
    Chunk,
    ChunkFile,
    Damaged,
    RecordingHeader,
    SampleEntry,
    section_bytes,
    section_content,
)
from practicum.types import Message, Prompt, RoutedExperts, Sample, Score

# Per-token arrays: how they are written, whether for the answer alone, and whether compressing them pays.
_ARRAYS: dict[str, tuple[str, bool, bool]] = {
    "prompt_ids": ("<i4", False, True),
    "token_ids": ("<i4", True, True),
    "log_probs": ("<f4", True, False),
    "loss_mask": ("?", True, True),
    "versions": ("<i4", True, True),
    "advantages": ("<f4", True, True),
}


_NOT_GRADED = Score.failed("invalid", "it was not graded")


@dataclass(frozen=True, slots=True)
class RecordedSample:
    """A sample with all that training on it needs to be repeated without a rollout engine.

    `routes` are those that were, or are to be, replayed. When it is read back, `sample.routes` is None.
    """

    step: int
    place: int  # in the batch of the step, see `place_of`
    sample: Sample  # a later record of a sample with the same id replaces an earlier one
    routes: RoutedExperts  # of prompt and answer
    step_size: int = 0  # samples of the step, over all ranks; 0 where that is not known

    @property
    def id(self) -> str:
        return self.sample.id

    @property
    def score(self) -> Score:
        return self.sample.score or _NOT_GRADED

    @property
    def entry(self) -> SampleEntry:
        lengths = len(self.sample.prompt_ids), len(self.sample.token_ids)
        return SampleEntry(self.id, self.step, self.place, *lengths, self.step_size)


def place_of(id: str, otherwise: int) -> int:
    """Return the number after the step in an id such as STEP/GROUP/NUMBER, or `otherwise` where there is none.

    Samples of one place are read back in the order of the further numbers of their ids, see `order_of`.
    """
    match id.split("/"):
        case [_, place, *_] if place.isdecimal():
            return int(place)
    return otherwise


def order_of(entry: SampleEntry) -> tuple[Any, ...]:
    """Return what samples are sorted by: step, place, and then the numbers in the id, as numbers."""
    parts = [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in entry.id.split("/")]
    return entry.step, entry.place, parts


def check_routes(record: RecordedSample, header: RecordingHeader) -> None:
    routes = record.routes
    if len(routes) != record.entry.num_tokens:
        raise ReplayError(f"sample {record.id}: routes of {len(routes)} tokens for {record.entry.num_tokens}.")
    shape = (tuple(routes.layers.tolist()), routes.num_experts, routes.experts.shape[2])
    if shape != (header.layers, header.num_experts, header.k):
        raise ReplayError(
            f"sample {record.id}: routes of {shape[2]} of {shape[1]} experts in {len(shape[0])} layers; the recording "
            f"is of {header.k} of {header.num_experts} in {len(header.layers)}, {list(header.layers)}."
        )


def sections_of(records: Sequence[RecordedSample], header: RecordingHeader) -> list[tuple[str, int, int, bytes]]:
    """Return name, coding, size before coding and coded bytes of each section."""
    sections: list[tuple[str, int, int, bytes]] = []

    def add(name: str, raw: bytes, compress: bool) -> None:
        sections.append((name, *section_bytes(raw, compress)))

    for name, (kind, _, compress) in _ARRAYS.items():
        joined = np.concatenate([_array(record.sample, name) for record in records])
        add(name, np.packbits(joined).tobytes() if kind == "?" else joined.astype(kind, copy=False).tobytes(), compress)
    known = np.concatenate([record.routes.known for record in records])
    add("known", np.packbits(known).tobytes(), compress=True)
    experts = np.concatenate([record.routes.experts for record in records])
    if not known.all():
        # What stands where nothing is known need not be a combination: it is made one.
        experts = np.where(known[:, None, None], experts, np.arange(header.k).astype(experts.dtype))
    sections.append(("routes", CODED_ROUTES, experts.nbytes, encode_routes(experts, header.num_experts)))
    add("words", json.dumps(_words_of(records), separators=(",", ":")).encode(), compress=True)
    return sections


class OpenChunk:
    """The samples of a chunk. Its sections are read and decoded when first needed, and kept."""

    def __init__(self, file: ChunkFile, chunk: Chunk) -> None:
        self._file = file
        self._chunk = chunk
        self._prompt_ends = [0, *accumulate(entry.num_prompt for entry in chunk.samples)]
        self._answer_ends = [0, *accumulate(entry.num_answer for entry in chunk.samples)]
        self._arrays: dict[str, NDArray[Any]] = {}

    def record(self, i: int) -> RecordedSample:
        """Return the i-th of the chunk. `Damaged` if what was written cannot be that of a sample."""
        entry = self._chunk.samples[i]
        return RecordedSample(entry.step, entry.place, self.sample(i), self.routes(i), entry.step_size)

    def sample(self, i: int) -> Sample:
        """Return the same without its routes, which take the longest."""
        entry = self._chunk.samples[i]
        arrays: dict[str, Any] = {name: self._own(name, i) for name in _ARRAYS}
        words = self._words
        try:
            own = words["samples"][i]
            prompt = _prompt_from(words["prompts"][own["prompt"]])
            fields = {"text": own["text"], "finish_reason": own["finish_reason"], "score": Score(**own["score"])}
            return Sample(prompt, id=entry.id, **fields, **arrays)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise Damaged(f"sample {entry.id} makes no sense ({error})") from error

    def routes(self, i: int) -> RoutedExperts:
        header = self._file.header
        start = self._prompt_ends[i] + self._answer_ends[i]
        tokens = slice(start, start + self._chunk.samples[i].num_tokens)
        known = self._array("known", "?", self._chunk.num_tokens)[tokens].copy()
        return RoutedExperts(self._experts[tokens].copy(), np.array(header.layers, np.int32), known, header.num_experts)

    def _own(self, name: str, i: int) -> NDArray[Any]:
        """Return a copy, so that what is kept of a chunk is not held, or changed, by whom it was given to."""
        kind, of_answer, _ = _ARRAYS[name]
        ends = self._answer_ends if of_answer else self._prompt_ends
        return self._array(name, kind, ends[-1])[ends[i] : ends[i + 1]].copy()

    def _array(self, name: str, kind: str, num: int) -> NDArray[Any]:
        if name not in self._arrays:
            raw = np.frombuffer(self._content(name), np.uint8)
            size = -(-num // 8) if kind == "?" else num * np.dtype(kind).itemsize
            if len(raw) != size:
                raise Damaged(f"the section {name!r} has {len(raw)} bytes instead of {size}")
            whole = np.unpackbits(raw, count=num).view(np.bool_) if kind == "?" else raw.view(kind)
            self._arrays[name] = whole.astype(whole.dtype.newbyteorder("="), copy=False)
        return self._arrays[name]

    @cached_property
    def _experts(self) -> Ids:
        coded = self._file.section(self._chunk, "routes")
        coding, header = self._chunk.sections["routes"].coding, self._file.header
        if coding != CODED_ROUTES:
            raise Damaged(f"its routes have the coding {coding}, which is unknown")
        try:
            return decode_routes(coded, self._chunk.num_tokens, len(header.layers), header.k, header.num_experts)
        except ValueError as error:
            raise Damaged(str(error)) from error

    @cached_property
    def _words(self) -> Any:
        content = self._content("words")
        try:
            return json.loads(content)
        except ValueError as error:
            raise Damaged(f"its words are no JSON ({error})") from error

    def _content(self, name: str) -> bytes:
        coded = self._file.section(self._chunk, name)
        return section_content(self._chunk.sections[name], coded)


def _array(sample: Sample, name: str) -> NDArray[Any]:
    array: NDArray[Any] | None = getattr(sample, name)
    return np.full(len(sample.token_ids), np.nan, np.float32) if array is None else array


def _words_of(records: Sequence[RecordedSample]) -> dict[str, Any]:
    prompts: dict[int, int] = {}  # one that several answers share is written once
    written: list[dict[str, Any]] = []
    samples = []
    for record in records:
        sample, score = record.sample, record.score
        if id(sample.prompt) not in prompts:
            prompts[id(sample.prompt)] = len(written)
            written.append(_words_of_prompt(sample.prompt))
        value = None if score.value is None else float(score.value)
        parts = {name: float(part) for name, part in score.parts.items()}
        grade = {"value": value, "parts": parts, "status": score.status, "reason": score.reason}
        own = {"prompt": prompts[id(sample.prompt)], "text": sample.text}
        samples.append(own | {"finish_reason": sample.finish_reason, "score": grade})
    return {"prompts": written, "samples": samples}


def _words_of_prompt(prompt: Prompt) -> dict[str, Any]:
    words: dict[str, Any] = {"id": prompt.id, "text": prompt.text, "data_source": prompt.data_source}
    if prompt.messages is not None:
        words["messages"] = [[message.role, message.content] for message in prompt.messages]
    try:
        json.dumps(prompt.answer)
        words["answer"] = prompt.answer
    except (TypeError, ValueError, RecursionError):
        pass  # no JSON can be made of it: then there is none, as the docs say
    return words


def _prompt_from(words: dict[str, Any]) -> Prompt:
    messages = words.get("messages")
    return Prompt(
        id=words["id"],
        messages=None if messages is None else tuple(Message(role, content) for role, content in messages),
        text=words["text"],
        answer=words.get("answer"),
        data_source=words["data_source"],
    )
