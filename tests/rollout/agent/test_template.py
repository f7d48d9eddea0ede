from __future__ import annotations

from typing import Any

import pytest

from practicum.errors import ModelError
from practicum.rollout.agent.template import TurnTemplate
from tests.rollout.tokenizers import FORGETFUL, HERMES, STRICT, byte_tokenizer

TOOL = {"role": "tool", "content": "12"}


def ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


@pytest.mark.parametrize("template", [HERMES, FORGETFUL])
def test_appended_turns_are_what_the_template_would_have_written(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    turns = TurnTemplate(tokenizer)
    wrote = ids(tokenizer, "I add.")
    asked = [{"role": "user", "content": "?"}]
    for said in ([TOOL], [TOOL, {"role": "tool", "content": "3"}], [{"role": "user", "content": "go on"}]):
        whole = turns.render([*asked, {"role": "assistant", "content": "I add."}, *said], opens_turn=True)
        opened = ids(tokenizer, turns.render(asked, opens_turn=True))
        assert [*opened, *wrote, *turns.between(wrote, said)] == ids(tokenizer, whole)


def test_a_turn_is_closed_once_whether_or_not_the_model_did_it() -> None:
    tokenizer = byte_tokenizer()
    turns = TurnTemplate(tokenizer)
    closed = [*ids(tokenizer, "12"), tokenizer.eos_token_id]
    by_us, by_model = turns.between(closed[:-1], [TOOL]), turns.between(closed, [TOOL])
    assert [*closed[:-1], *by_us] == [*closed, *by_model]
    assert turns.between([*closed, *ids(tokenizer, "\n")], [TOOL]).tolist() == by_model[1:].tolist()


def test_a_template_that_takes_results_only_after_calls() -> None:
    tokenizer = byte_tokenizer(STRICT)
    told = tokenizer.decode(TurnTemplate(tokenizer).between(ids(tokenizer, "x"), [TOOL]))
    assert told == "[TOOL_RESULTS]call00000 12[/TOOL_RESULTS]|"


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (HERMES.replace("message['role'] == 'tool'", "false"), "refuses messages of role tool: no such role: tool"),
        ("{{ messages[0]['content'] }}", "leaves out what the assistant said"),
    ],
)
def test_templates_that_cannot_hold_turns_say_so(template: str, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        TurnTemplate(byte_tokenizer(template)).between([5], [TOOL])


def test_plain_text_goes_on_in_lines() -> None:
    tokenizer = byte_tokenizer(None)
    assert tokenizer.decode(TurnTemplate(tokenizer).in_text([TOOL, TOOL])) == "\n12\n12\n"
