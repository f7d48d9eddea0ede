"""The contract of a tokenizer that models are trained with, and a check that says in words what a given one does.

`print(check_tokenizer(tokenizer))` shows what holds, what does not, and what that means for a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    all_special_tokens: Sequence[str]
    added_tokens_decoder: Mapping[int, Any]  # transformers' AddedToken by id

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
        """True if it serves for questions and answers."""
        return self.holds("end of text")

    @property
    def holds_turns(self) -> bool:
        """True if it serves for several turns with tools."""
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
    checks: tuple[tuple[str, Callable[[Any], tuple[bool, str]], str], ...] = (
        ("end of text", _end_of_text, "no answer could ever end: set tokenizer.eos_token"),
        (
            "round trip",
            lambda tokenizer: _round_trip(tokenizer, texts),
            "graders and tools may read other text than was meant; give check_tokenizer texts like your own",
        ),
        ("special tokens", _special_tokens, "the marks of a chat template do not reach the model as such"),
        (
            "chat template",
            _chat_template,
            "only prompts that are plain text can be used: give the tokenizer a chat_template that opens turns",
        ),
        (
            "stable prefixes",
            _prefixes,
            "a conversation that is rendered again has other tokens than the model saw; rollout never does that, but "
            "prompts with earlier turns of the model in them differ from what it wrote then",
        ),
        (
            "turns join",
            _turns_join,
            "the template cannot be appended to, so conversations of several turns cannot use it",
        ),
        (
            "tool messages",
            _tool_messages,
            "the model cannot read what a tool said: use an environment, which speaks as the user, or add the role",
        ),
        (
            "tools shown",
            _tools_shown,
            "the model is not shown which tools there are: it must know them from training or from the prompt",
        ),
    )
    found: dict[str, Finding] = {}
    for name, check, means in checks:
        if "chat template" in found and not found["chat template"].holds:
            found[name] = Finding(name, False, "not looked at", "there is no chat template to hold turns")
            continue
        try:
            holds, detail = check(tokenizer)
        except (TemplateError, ModelError) as error:
            holds, detail = False, f"refused: {error}"
        found[name] = Finding(name, holds, detail, means)
    return TokenizerReport(tuple(found.values()))


def _end_of_text(tokenizer: Any) -> tuple[bool, str]:
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    return end is not None, "none" if end is None else f"token {end} ({tokenizer.decode([end])!r}), padding {pad}"


def _round_trip(tokenizer: Any, texts: Sequence[str]) -> tuple[bool, str]:
    back = {text: tokenizer.decode(_ids(tokenizer, text), skip_special_tokens=True) for text in texts}
    lost = [text for text in texts if back[text] != text]
    detail = f"{len(texts) - len(lost)} of {len(texts)} texts come back as they were"
    return not lost, detail + (f"; {lost[0]!r} comes back as {back[lost[0]]!r}" if lost else "")


def _special_tokens(tokenizer: Any) -> tuple[bool, str]:
    split = [i for i in tokenizer.all_special_ids if _ids(tokenizer, tokenizer.decode([i])) != [i]]
    shown = ", ".join(repr(tokenizer.decode([i])) for i in split)
    num_known = len(tokenizer.all_special_ids)
    return not split, f"{num_known} known, " + (f"{shown} are cut to pieces" if split else "each one token")


def _chat_template(tokenizer: Any) -> tuple[bool, str]:
    if tokenizer.chat_template is None:
        return False, "none"
    try:
        asked = TurnTemplate(tokenizer).render(_CONVERSATION[:1], opens_turn=True)
        closed = TurnTemplate(tokenizer).render(_CONVERSATION[:1])
    except (TemplateError, ModelError) as error:
        return False, f"refuses a question: {error}"
    if not asked.startswith(closed):
        return False, "add_generation_prompt changes the question, so the model cannot be shown that it is its turn"
    opens = asked[len(closed) :]
    return (
        True,
        f"opens a turn with {opens!r}" if opens else f"a question ends with {asked[-12:]!r}, which opens a turn",
    )


def _prefixes(tokenizer: Any) -> tuple[bool, str]:
    """Check that a conversation with more turns begins with the tokens of the one with fewer."""
    thinking = [_CONVERSATION[0], {"role": "assistant", "content": "<think>\n1\n</think>\n\n3"}, *_CONVERSATION[2:]]
    for name, messages in (("", _CONVERSATION), (" with thoughts", thinking)):
        rendered = [TurnTemplate(tokenizer).render(messages[:end]) for end in range(2, len(messages) + 1)]
        for end, (fewer, more) in enumerate(pairwise(rendered), start=2):
            first, both = _ids(tokenizer, fewer), _ids(tokenizer, more)
            if both[: len(first)] != first:
                what = f"message {end + 1} changes what is before it" if not more.startswith(fewer) else "tokens merge"
                return False, f"not{name}: {what}"
    return True, f"{len(_CONVERSATION)} messages, each beginning with those before it"


def _turns_join(tokenizer: Any) -> tuple[bool, str]:
    """Check that appending tokens, as conversations do, gives what rendering the whole gives."""
    turns = TurnTemplate(tokenizer)
    opened = _ids(tokenizer, turns.render(_CONVERSATION[:1], opens_turn=True))
    wrote = _ids(tokenizer, "3")
    appended = [*opened, *wrote, *turns.between(wrote, [_CONVERSATION[2]]).tolist()]
    is_same = appended == _ids(tokenizer, turns.render(_CONVERSATION[:3], opens_turn=True))
    return True, "appended turns equal rendered ones" if is_same else "work, though a rendered conversation differs"


def _tool_messages(tokenizer: Any) -> tuple[bool, str]:
    turns = TurnTemplate(tokenizer, [_TOOL])
    tool, assistant = (
        str(tokenizer.decode(turns.between([], [{"role": role, "name": "add", "content": "3"}])))
        for role in ("tool", "assistant")
    )
    if "3" not in tool:
        return False, "what a tool says is left out"
    if tool == assistant:
        return False, "look like the model's own"
    return True, f"look like {tool!r}"


def _tools_shown(tokenizer: Any) -> tuple[bool, str]:
    shown = TurnTemplate(tokenizer, [_TOOL]).render(_CONVERSATION[:1])
    is_shown = shown != TurnTemplate(tokenizer).render(_CONVERSATION[:1])
    return is_shown, "in the prompt" if is_shown else "the template takes no notice"


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
