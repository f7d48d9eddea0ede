from __future__ import annotations

import re

import pytest

from practicum.demo.arithmetic import make_tokenizer
from practicum.rollout.tokenizer import check_tokenizer
from tests.rollout.tokenizers import FORGETFUL, HERMES, STRICT, byte_tokenizer


def test_a_good_tokenizer_passes_everything() -> None:
    report = check_tokenizer(byte_tokenizer())
    assert all(finding.holds for finding in report.findings) and report.is_usable and report.holds_turns
    assert str(report).splitlines()[-1] == "usable for: questions and answers and several turns with tools"
    assert "opens a turn with '<|im_start|>assistant\\n'" in str(report)


@pytest.mark.parametrize(
    ("template", "fails", "words"),
    [
        (FORGETFUL, {"stable prefixes"}, "message 3 changes what is before it"),
        (STRICT, {"tools shown"}, "the template takes no notice"),
        (HERMES.replace("message['role'] == 'tool'", "false"), {"tool messages"}, "refused: .*no such role: tool"),
        (
            "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}",
            {"tool messages", "tools shown"},
            "look like the model's own",
        ),
        (
            "{% for m in messages if m['role'] != 'assistant' %}{{ m['content'] }}{% endfor %}",
            {"turns join", "tool messages", "tools shown"},
            "leaves out what the assistant said",
        ),
        ("{{ raise_exception('never') }}", {"chat template"}, "refuses a question: never"),
        (None, {"chat template"}, "chat template: none"),
    ],
)
def test_what_a_chat_template_lacks_is_told(template: str | None, fails: set[str], words: str) -> None:
    report = check_tokenizer(byte_tokenizer(template))
    lacking = {finding.name for finding in report.findings if not finding.holds and finding.detail != "not looked at"}
    assert lacking == fails
    assert any(re.search(words, line) for line in str(report).splitlines())
    assert report.is_usable
    assert report.holds_turns == (not fails & {"chat template", "turns join", "tool messages"})


def test_a_tokenizer_of_few_characters_is_checked_with_texts_it_knows() -> None:
    report = check_tokenizer(make_tokenizer())
    assert not report.holds("round trip") and "comes back as '  12 + 34'" in str(report)
    assert check_tokenizer(make_tokenizer(), ["12+34=46"]).holds("round trip")
    assert not report.holds("tool messages")  # it would have the model's own mark


def test_without_an_end_nothing_can_be_used() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    report = check_tokenizer(tokenizer)
    assert not report.is_usable and "no answer could ever end" in str(report)
    assert str(report).endswith("usable for: nothing")
