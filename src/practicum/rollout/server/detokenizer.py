"""The text of an answer while its tokens come: nothing that later tokens can change, and nothing of a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from practicum.rollout.server.encoder import Encoder

_HALF = "\N{REPLACEMENT CHARACTER}"  # a character whose last bytes have not come


class IncrementalDetokenizer:
    """Turns tokens into text as they come. The parts joined are the text that `finish` alone would give."""

    def __init__(
        self,
        encoder: Encoder,
        stops: Sequence[str],
        *,
        keeps_stop: bool = False,
        skip_special_tokens: bool = True,
        keeps: frozenset[int] = frozenset(),
    ) -> None:
        """`keeps` are special tokens that are not skipped."""
        self._encoder = encoder
        self._stops = stops
        self._keeps_stop = keeps_stop
        self._skip_special_tokens = skip_special_tokens
        self._keeps = keeps
        self._ids: list[int] = []
        self._settled = self._read = 0  # tokens before these give text that stays, and text that was taken
        self._text = ""
        self._num_returned = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """Take more tokens; return the text that is certain now and was not returned before."""
        self._ids.extend(token_ids)
        # A token may be spelled differently after others (a space before a word): it is decoded with some before it.
        before = self._decode(self._ids[self._settled : self._read])
        now = self._decode(self._ids[self._settled :])
        if len(now) > len(before) and not now.endswith(_HALF):
            self._text += now[len(before) :]
            self._settled, self._read = self._read, len(self._ids)
        text, is_stopped = self._cut(self._text)
        return self._new(text if is_stopped else text[: len(text) - num_doubtful(text, self._stops)])

    def finish(self, token_ids: Sequence[int]) -> str:
        """Return the rest of the text, when these are all tokens of the answer."""
        return self._new(self._cut(self._decode(token_ids))[0])

    def _new(self, text: str) -> str:
        part = text[self._num_returned :]
        self._num_returned += len(part)
        return part

    def _cut(self, text: str) -> tuple[str, bool]:
        """Cut before the stop text that is complete first, or after it if that is kept."""
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if not found:
            return text, False
        end, at = min(found)
        return text[: end if self._keeps_stop else at], True

    def _decode(self, token_ids: Sequence[int]) -> str:
        if not len(token_ids):
            return ""
        return self._encoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens, keeps=self._keeps)


def num_doubtful(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end may become one of the marks."""
    ends = (n for mark in marks for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n]))
    return max(ends, default=0)
