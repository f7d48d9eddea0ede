"""Control tokens in a chat come from its template alone, never from the text of a message.

A chat template writes control tokens such as <|im_start|> and the contents of messages into one text, of which the
tokenizer makes tokens. A content with "<|im_end|>" in it (an answer that a judge reads, a tool's result) would end its
turn and open another. So contents are marked before the template is rendered, and the text is cut where they are:

    contents ─ mark ─▶ chat template ─▶ text with marks ─ encode ─▶ pieces without control tokens of contents ─▶ ids

Where no content holds or completes a control token, the ids are those that the tokenizer gives for the whole text. For
a server with a tokenizer of its own there is `without_control_tokens`, which changes the text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError

# Nobody can write these marks, since nobody knows the number. JSON and changes of case leave them as they are.
_NUMBER = str(10**17 + secrets.randbelow(9 * 10**17))
_BEGIN, _END, _EDGE = (f"({_NUMBER}{kind}" for kind in "[])")
_MARK = re.compile(rf"\({_NUMBER}([\[\])])")
_CONTENTS = ("content", "reasoning_content")
_CONVERSATION = [{"role": role, "content": "?"} for role in ("user", "assistant", "user")]
_CALL = {"type": "function", "id": "call00000", "function": {"name": "tool", "arguments": {}}}
_CALLED: list[Mapping[str, Any]] = [_CONVERSATION[0], {"role": "assistant", "content": "?", "tool_calls": [_CALL]}]
_RESULT: Mapping[str, Any] = {"role": "tool", "name": "tool", "content": "?", "tool_call_id": _CALL["id"]}

# The first character of control tokens as models have them, with what must follow.
_SHAPES = re.compile(
    r"<(?=[|\uff5c][^<>\s]{1,64}>|[^<>\s]{1,64}[|\uff5c]>"  # <|im_end|>, <|turn>, and DeepSeek's with wide bars
    r"|/?(?:s|bos|eos|pad|unk|mask|sep|cls|eod|sop|eop|start_of_\w{1,32}|end_of_\w{1,32}|[A-Z]{3,4}_TOKEN)>"
    r"|(?:unused|extra_id_|reserved_|SPECIAL_)\w{1,32}>|</?SYS>>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|MODEL_SETTINGS|AVAILABLE_TOOLS|TOOL_[A-Z]{1,16}|CALL_ID|ARGS|THINK|IMG[A-Z_]{0,8})\]"
    r"|(?:CLS|SEP|PAD|MASK|UNK|BOS|EOS|[gs]MASK)\]|e~\[)"
    r"|\](?=~!?b[\[\]])"
)


def without_control_tokens(text: str) -> tuple[str, int]:
    """Return a text in which no usual control token is left, for a server whose tokenizer is not known, and how many
    there were.

    A space goes after their first character. A character without width would be less visible, but some tokenizers
    remove those before they look for control tokens.
    """
    return _SHAPES.subn(r"\g<0> ", text)


class ControlTokens:
    """The control tokens of one tokenizer: its special tokens, and the other added tokens that its chat template writes
    around the turns of a plain conversation and the results of tools (those of DeepSeek are not special)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def count(self, value: Any) -> int:
        """Return how many control tokens the strings in a value spell, of messages for instance."""
        return sum(len(list(self._starts(text))) for text in _strings(value))

    def mark(self, value: Any, *, has_edges: bool = False) -> Any:
        """Mark the control tokens in all strings of a value, such as messages or tools.

        `has_edges`: also the edges of a text that may complete a control token with what stands beside it.
        """
        if isinstance(value, str):
            return self._marked(value, has_edges)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item, has_edges=key in _CONTENTS) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text with marks in it: control tokens that are not marked become one token each, marked
        ones are plain text."""
        plain, cuts = self._cuts(text)
        if not cuts:
            whole: list[int] = self._ids(plain, add_special_tokens=add_special_tokens)
            return whole
        pieces = [plain[start:end] for start, end in pairwise([0, *cuts, len(plain)])]
        within = self._ids_within(dict.fromkeys(pieces[1:]))
        ids = [*self._ids(pieces[0]), *(i for piece in pieces[1:] for i in within[piece])]
        return self._with_ends(ids) if add_special_tokens else ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Do the same for many texts."""
        as_they_are = [text for text in texts if _NUMBER not in text]
        rows = iter(self._ids(as_they_are) if as_they_are else ())
        return [self.encode(text) if _NUMBER in text else next(rows) for text in texts]

    @cached_property
    def _tokens(self) -> tuple[str, ...]:
        """All texts that the tokenizer takes for control tokens, the longest first."""
        added = list(self._tokenizer.added_tokens_decoder.values())
        found = {token.content for token in added if token.special} | set(self._tokenizer.all_special_tokens)
        others = [token.content for token in added if not token.special and _is_bracketed(token.content)]
        if others:
            turns = self._rendered(_CONVERSATION) or self._rendered(_CONVERSATION[:1])
            called, answered = self._rendered(_CALLED), self._rendered([*_CALLED, _RESULT])
            found.update(token for token in others if token in turns or (token in answered and token not in called))
        if self._normalize is not None:
            found.update(self._normalize(token.content) for token in added if token.content in found)
        return tuple(sorted(filter(str.strip, found), key=lambda token: (-len(token), token)))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return _pattern_of(self._tokens)

    @cached_property
    def _parts(self) -> tuple[frozenset[str], frozenset[str]]:
        """All proper beginnings and ends of control tokens."""
        begins = frozenset(token[:k] for token in self._tokens for k in range(1, len(token)))
        return begins, frozenset(token[k:] for token in self._tokens for k in range(1, len(token)))

    @cached_property
    def _normalize(self) -> Callable[[str], str] | None:
        """The function that a text goes through before the tokenizer looks for control tokens in it."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        normalizer = getattr(backend, "normalizer", None)
        added = self._tokenizer.added_tokens_decoder.values()
        return normalizer.normalize_str if normalizer and any(token.normalized for token in added) else None

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render messages; return nothing where the chat template refuses them, or there is none."""
        try:
            rendered: str = self._tokenizer.apply_chat_template(messages, tokenize=False)
        except (TemplateError, TypeError, ValueError):
            return ""
        return rendered

    def _starts(self, text: str, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield begin and end of the control tokens in a text, the longest at each place; they may overlap."""
        end = len(text) if end is None else end
        while (found := self._pattern.search(text, start, end)) is not None:
            yield found.span()
            start = found.start() + 1

    def _marked(self, text: str, has_edges: bool) -> str:
        if self._normalize is not None:
            normal = self._normalize(text)
            if len(list(self._starts(normal))) > len(list(self._starts(text))):
                text = normal  # in which the control tokens can be seen
        for token in self._tokens:
            if len(token) == 1:  # there is no place to cut it
                text = text.replace(token, "\ufffd")
        marks: list[tuple[int, str]] = []
        last = -1
        for start, end in self._starts(text):
            if start >= last:
                marks += [(start, _BEGIN), (end, _END)]
            elif end > last:  # one more that overlaps
                marks[-1] = (end, _END)
            last = max(last, end)
        if has_edges and self._may_join(text.strip()):
            marks += [(len(text) - len(text.lstrip()), _EDGE), (len(text.rstrip()), _EDGE)]
        if not marks:
            return text
        marks.sort(key=lambda mark: (mark[0], (_END, _EDGE, _BEGIN).index(mark[1])))
        places = [0, *(place for place, _ in marks), len(text)]
        parts = [text[start:end] for start, end in pairwise(places)]
        return parts[0] + "".join(mark + part for (_, mark), part in zip(marks, parts[1:], strict=True))

    def _may_join(self, text: str) -> bool:
        if not text or not self._tokens:
            return False
        (begins, ends), longest = self._parts, range(1, len(self._tokens[0]))
        if any(text[:k] in ends or text[-k:] in begins for k in longest if k <= len(text)):
            return True
        return len(text) < len(self._tokens[0]) and any(text in token for token in self._tokens)

    def _cuts(self, text: str) -> tuple[str, list[int]]:
        """Return the text without marks, and where to cut it so that no control token is left that contents wrote or
        helped to write."""
        if _NUMBER not in text:
            return text, []
        parts = _MARK.split(text)
        plain = "".join(parts[::2])
        cuts, place, begun = set[int](), 0, None
        for part, kind in zip(parts[::2], parts[1::2], strict=False):
            place += len(part)
            if kind == "[":
                begun = place
            elif kind == "]" and begun is not None:
                starts = [start for start, _ in self._starts(plain, begun, place)]
                if starts[:1] == [begun]:  # the template has put nothing in between
                    cuts.update(start + 1 for start in starts)
                begun = None
            reach = len(self._tokens[0])
            near = self._starts(plain, max(0, place - reach), min(len(plain), place + reach))
            if any(start < place < end for start, end in near):
                cuts.add(place)
        return plain, sorted(cuts)

    def _ids(self, text: Any, *, add_special_tokens: bool = False) -> Any:
        return self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]

    def _ids_within(self, texts: Collection[str]) -> dict[str, list[int]]:
        """Return the ids of texts that are not the beginning of one: some tokenizers put a space before those."""
        before = self._ids("\n")
        rows = zip(texts, self._ids(["\n" + text for text in texts]), strict=True)
        return {text: row[len(before) :] if row[: len(before)] == before else self._ids(text) for text, row in rows}

    def _with_ends(self, ids: list[int]) -> list[int]:
        """Add the tokens that the tokenizer puts around a text."""
        bare, whole = self._ids("a"), self._ids("a", add_special_tokens=True)
        start = next(k for k in range(len(whole)) if whole[k : k + len(bare)] == bare)
        return [*whole[:start], *ids, *whole[start + len(bare) :]]


@lru_cache(maxsize=16)
def _pattern_of(tokens: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")  # the latter matches nothing


def _is_bracketed(token: str) -> bool:
    return len(token) > 2 and not token[0].isalnum() and not token.isspace()


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
