from __future__ import annotations

from practicum.demo.arithmetic import make_tokenizer
from practicum.rollout.serving.replies import ChatShape, CompletionShape, Piece, usage
from practicum.rollout.serving.texts import Encoder


def test_a_completion_with_log_probs() -> None:
    shape = CompletionShape("m", Encoder(make_tokenizer()))
    reply = shape.reply([Piece(0, "12", [5, 6, 1], [-1.0, -2.0, -0.5], "stop", 3, [7])], usage(1, 3))
    (choice,) = reply["choices"]
    assert (reply["object"], reply["model"], reply["weight_version"]) == ("text_completion", "m", 3)
    assert reply["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
    assert choice["logprobs"] == {
        "tokens": ["1", "2", "<end>"],
        "token_logprobs": [-1.0, -2.0, -0.5],
        "top_logprobs": None,
        "text_offset": [0, 1, 2],
    }
    assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == ("12", [5, 6, 1], [7])


def test_pieces_of_a_completion_count_on() -> None:
    shape = CompletionShape("m", Encoder(make_tokenizer()))
    parts = [shape.delta(Piece(index, "1", [5], [-1.0])) for index in (0, 1, 0)]
    assert [part["choices"][0]["logprobs"]["text_offset"] for part in parts] == [[0], [0], [1]]
    assert len({part["id"] for part in parts}) == 1
    assert "weight_version" not in parts[0]["choices"][0]


def test_a_chat_says_once_who_speaks() -> None:
    shape = ChatShape("m", Encoder(make_tokenizer()))
    parts = [shape.delta(Piece(index, "1", [5], None)) for index in (0, 1, 0)]
    assert [part["choices"][0]["delta"] for part in parts] == [
        {"role": "assistant", "content": "1"},
        {"role": "assistant", "content": "1"},
        {"content": "1"},
    ]
    whole = ChatShape("m", Encoder(make_tokenizer())).reply([Piece(0, "1", [5], [-1.0], "length", 0)], usage(1, 1))
    (choice,) = whole["choices"]
    assert choice["message"]["content"] == "1"
    assert choice["logprobs"]["content"] == [{"token": "1", "logprob": -1.0, "bytes": [49], "top_logprobs": []}]
    assert shape.last(usage(1, 2))["choices"] == []
