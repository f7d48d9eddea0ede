"""The contract of a tokenizer that models are trained with, and a check that says in words what a given one does.

`print(check_tokenizer(tokenizer))` shows what holds, what does not, and what that means for a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from jinja2 import TemplateError

from practicum.errors import ModelError
from practicum.rollout.agent.interaction import ChatMessage
from practicum.rollout.agent.template import TurnTemplate


class Tokenizer(Protocol):
    """A tokenizer as transformers has them. Token ids are exact; text is only read, never tokenised a second time."""

    eos_token_id: int | None
    pad_token_id: int | None
    chat_template: Any  # None where there is none
    all_special_ids: Sequence[int]

    def __call__(self, text: Any, *, add_special_tokens: bool = True) -> Any: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(
        self, conversation: Any, *, tools: Any = None, add_generation_prompt: bool = False, tokenize: bool = True
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    holds: bool
    detail: str  # of what was seen
    means: str  # the consequence for training, where it does not hold


@dataclass(frozen=True, slots=True)
class TokenizerReport:
    findings: tuple[Finding, ...]

    def holds(self, name: str) -> bool:
        return next(finding.holds for finding in self.findings if finding.name == name)

    @property
    def is_usable(self) -> bool:
        """Whether it serves for questions and answers."""
        return self.holds("end of text")

    @property
    def holds_turns(self) -> bool:
        """Whether it serves for several turns with tools."""
        return self.is_usable and all(self.holds(name) for name in ("chat template", "turns join", "tool messages"))

    def __str__(self) -> str:
        lines = []
        for finding in self.findings:
            lines.append(f"{'yes' if finding.holds else 'NO ':3}  {finding.name}: {finding.detail}")
            if not finding.holds:
                lines.append(f"     -> {finding.means}")
        can = ["questions and answers"] * self.is_usable + ["several turns with tools"] * self.holds_turns
        lines.append(f"usable for: {' and '.join(can) or 'nothing'}")
        return "\n".join(lines)


TEXTS = (
    "What is 12 + 34?",
    "  two spaces, a tab\tand\n\nlines ",
    'def f(x):\n    return {"a": [1, 2.5, null]}',
    "Gr\u00fc\u00dfe, \u4f60\u597d, \U0001f642",
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
_CONVERSATION: tuple[ChatMessage, ...] = (
    {"role": "user", "content": "1+2="},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "3+4="},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "7+8="},
    {"role": "assistant", "content": "15"},
)


def check_tokenizer(tokenizer: Any, texts: Sequence[str] = TEXTS) -> TokenizerReport:
    """Check a tokenizer. `texts` go through it and back; give some of your own if it knows few characters."""
    checks: list[Callable[[], Finding]] = [
        lambda: _end_of_text(tokenizer),
        lambda: _round_trip(tokenizer, texts),
        lambda: _special_tokens(tokenizer),
        lambda: _chat_template(tokenizer),
    ]
    findings = [check() for check in checks]
    if findings[-1].holds:
        findings += [_prefixes(tokenizer), _turns_join(tokenizer), _tool_messages(tokenizer), _tools_shown(tokenizer)]
    else:
        means = "there is no chat template to hold turns"
        names = ("stable prefixes", "turns join", "tool messages", "tools shown")
        findings += [Finding(name, False, "not looked at", means) for name in names]
    return TokenizerReport(tuple(findings))


def _end_of_text(tokenizer: Any) -> Finding:
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    detail = "none" if end is None else f"token {end} ({tokenizer.decode([end])!r}), padding {pad}"
    return Finding("end of text", end is not None, detail, "no answer could ever end: set tokenizer.eos_token")


def _round_trip(tokenizer: Any, texts: Sequence[str]) -> Finding:
    lost = [text for text in texts if tokenizer.decode(_ids(tokenizer, text), skip_special_tokens=True) != text]
    detail = f"{len(texts) - len(lost)} of {len(texts)} texts come back as they were"
    if lost:
        back = tokenizer.decode(_ids(tokenizer, lost[0]), skip_special_tokens=True)
        detail += f"; {lost[0]!r} comes back as {back!r}"
    means = "graders and tools may read other text than was meant; give check_tokenizer texts like your own"
    return Finding("round trip", not lost, detail, means)


def _special_tokens(tokenizer: Any) -> Finding:
    split = [i for i in tokenizer.all_special_ids if _ids(tokenizer, tokenizer.decode([i])) != [i]]
    shown = ", ".join(repr(tokenizer.decode([i])) for i in split)
    detail = f"{len(tokenizer.all_special_ids)} known, " + (f"{shown} are cut to pieces" if split else "each one token")
    return Finding("special tokens", not split, detail, "the marks of a chat template do not reach the model as such")


def _chat_template(tokenizer: Any) -> Finding:
    means = "only prompts that are plain text can be used: give the tokenizer a chat_template"
    if tokenizer.chat_template is None:
        return Finding("chat template", False, "none", means)
    try:
        asked = TurnTemplate(tokenizer).render(_CONVERSATION[:1], opens_turn=True)
        closed = TurnTemplate(tokenizer).render(_CONVERSATION[:1])
    except (TemplateError, ModelError) as error:
        return Finding("chat template", False, f"refuses a question: {error}", means)
    if not asked.startswith(closed):
        means = "the model cannot be shown that it is its turn"
        return Finding("chat template", False, "add_generation_prompt changes the question", means)
    opens = asked[len(closed) :]
    detail = f"opens a turn with {opens!r}" if opens else f"a question ends with {asked[-12:]!r}, which opens a turn"
    return Finding("chat template", True, detail, means)


def _prefixes(tokenizer: Any) -> Finding:
    """Check that a conversation with more turns begins with the tokens of the one with fewer."""
    means = (
        "a conversation that is rendered again has other tokens than the model saw; rollout never does that, "
        "but prompts with earlier turns of the model in them differ from what it wrote then"
    )
    thinking = [_CONVERSATION[0], {"role": "assistant", "content": "<think>\n1\n</think>\n\n3"}, *_CONVERSATION[2:]]
    for name, messages in (("", _CONVERSATION), (" with thoughts", thinking)):
        rendered = [TurnTemplate(tokenizer).render(messages[:end]) for end in range(2, len(messages) + 1)]
        for end, (fewer, more) in enumerate(pairwise(rendered), start=2):
            first, both = _ids(tokenizer, fewer), _ids(tokenizer, more)
            if both[: len(first)] != first:
                what = f"message {end + 1} changes what is before it" if not more.startswith(fewer) else "tokens merge"
                return Finding("stable prefixes", False, f"not{name}: {what}", means)
    return Finding(
        "stable prefixes", True, f"{len(_CONVERSATION)} messages, each beginning with those before it", means
    )


def _turns_join(tokenizer: Any) -> Finding:
    """Check that appending tokens, as conversations do, gives what rendering the whole gives."""
    turns, means = (
        TurnTemplate(tokenizer),
        "the template cannot be appended to, so conversations of several turns cannot use it",
    )
    try:
        opened = _ids(tokenizer, turns.render(_CONVERSATION[:1], opens_turn=True))
        wrote = _ids(tokenizer, "3")
        appended = [*opened, *wrote, *turns.between(wrote, [_CONVERSATION[2]]).tolist()]
    except (TemplateError, ModelError) as error:
        return Finding("turns join", False, str(error), means)
    is_same = appended == _ids(tokenizer, turns.render(_CONVERSATION[:3], opens_turn=True))
    detail = "appended turns equal rendered ones" if is_same else "work, though a rendered conversation differs"
    return Finding("turns join", True, detail, means)


def _tool_messages(tokenizer: Any) -> Finding:
    means = "the model cannot read what a tool said: use an environment, which speaks as the user, or add the role"
    turns = TurnTemplate(tokenizer, [_TOOL])
    try:
        tool, assistant = (
            _text(tokenizer, turns.between([], [{"role": role, "name": "add", "content": "3"}]))
            for role in ("tool", "assistant")
        )
    except (TemplateError, ModelError) as error:
        return Finding("tool messages", False, f"refused: {error}", means)
    if "3" not in tool:
        return Finding("tool messages", False, "what a tool says is left out", means)
    if tool == assistant:
        return Finding("tool messages", False, "look like the model's own", means)
    return Finding("tool messages", True, f"look like {tool!r}", means)


def _tools_shown(tokenizer: Any) -> Finding:
    means = "the model is not shown which tools there are: it must know them from training or from the prompt"
    try:
        shown = TurnTemplate(tokenizer, [_TOOL]).render(_CONVERSATION[:1])
    except (TemplateError, ModelError) as error:
        return Finding("tools shown", False, f"refused: {error}", means)
    is_shown = shown != TurnTemplate(tokenizer).render(_CONVERSATION[:1])
    return Finding("tools shown", is_shown, "in the prompt" if is_shown else "the template takes no notice", means)


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _text(tokenizer: Any, ids: Any) -> str:
    text: str = tokenizer.decode(ids)
    return text
