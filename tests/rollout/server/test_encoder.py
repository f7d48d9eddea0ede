from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from practicum.demo.arithmetic import make_tokenizer
from practicum.rollout.server.encoder import Encoder, Limit
from practicum.rollout.server.errors import BadRequest

CHAT = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer()


def test_a_chat_goes_through_the_template(tokenizer: Any) -> None:
    encoder = Encoder(tokenizer)
    assert tokenizer.decode(encoder.chat(CHAT, opens_turn=False)) == "<user>1+2=<bot>3"
    assert tokenizer.decode(encoder.chat(CHAT[:1], opens_turn=True)) == "<user>1+2=<bot>"


def test_without_a_template_the_contents_are_joined(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    encoder = Encoder(tokenizer)
    assert encoder.chat(CHAT, opens_turn=False).tolist() == encoder.text("1+2=\n3").tolist()


def test_special_tokens_are_the_tokenizers_for_text_and_the_templates_for_chats(tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer._tokenizer.post_processor = TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 1)])
    encoder = Encoder(tokenizer)
    assert tokenizer.decode(encoder.text("1")) == "1<end>"
    assert tokenizer.decode(encoder.chat(CHAT[:1], opens_turn=False)) == "<user>1+2="


def test_what_cannot_be_encoded_says_why(tokenizer: Any) -> None:
    with pytest.raises(BadRequest, match="no tokens"):
        Encoder(tokenizer).text("")
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(BadRequest, match="chat template refuses these messages: System role not supported"):
        Encoder(tokenizer).chat(CHAT, opens_turn=True)


def test_tools_need_a_template_that_writes_them(tokenizer: Any) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    with pytest.raises(BadRequest, match="no place for tools"):
        Encoder(tokenizer).chat(CHAT, opens_turn=True, tools=tools)
    tokenizer.chat_template = "{% for tool in tools %}{{ tool.function.name | length }}{% endfor %}{{ sign }}"
    ids = Encoder(tokenizer).chat(CHAT, opens_turn=True, tools=tools, options={"sign": "+"})
    assert tokenizer.decode(ids) == "3+"


def test_token_ids_are_those_of_the_model(tokenizer: Any) -> None:
    encoder = Encoder(tokenizer, vocab_size=20)
    assert encoder.checked([0, 19]).tolist() == [0, 19]
    assert encoder.decode([1, 5], skip_special_tokens=True) == "1" and encoder.token_text(1) == "<end>"
    for wrong in ([20], [5, -1]):
        with pytest.raises(BadRequest, match=r"token id (20|-1) is not one of this model's, which go from 0 to 19"):
            encoder.checked(wrong)
    with pytest.raises(BadRequest, match="no tokens"):
        encoder.checked([])


@pytest.mark.parametrize(
    ("positions", "tokenizer_length", "batch", "expected", "reason"),
    [
        (512, 10**30, 1000, 512, "max_position_embeddings"),
        (514, 512, 1000, 512, "model_max_length"),
        (512, 10**30, 100, 100, "max_batch_tokens"),
        (None, 10**30, 100, 100, "max_batch_tokens"),
    ],
)
def test_the_limit_is_the_smallest_of_those_that_are_known(
    positions: int | None, tokenizer_length: int, batch: int, expected: int, reason: str
) -> None:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=positions))
    limit = Limit.of(config, SimpleNamespace(model_max_length=tokenizer_length), Limit(batch, "max_batch_tokens"))
    assert limit.num_tokens == expected
    limit.check(expected, "it has")
    with pytest.raises(BadRequest, match=rf"it has {expected + 1} tokens; this model takes {expected} \({reason}"):
        limit.check(expected + 1, "it has")
