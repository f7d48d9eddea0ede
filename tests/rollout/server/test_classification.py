from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from practicum.rollout.serving.classifier import Classifier
from practicum.rollout.serving.classify import ClassifyService
from practicum.rollout.serving.server import ModelServer

from tests.rollout.server.models import ask

CHAT = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]


@pytest.fixture(scope="module")
def url(classifier_folder: Path) -> Iterator[str]:
    classifier = Classifier(
        str(classifier_folder), device=torch.device("cpu"), dtype=torch.float32, max_batch_tokens=4096
    )
    server = ModelServer(ClassifyService("judge", classifier, 4096), host="127.0.0.1")
    yield server.url
    server.close()


def answer(url: str, **body: Any) -> Any:
    status, told = ask(url, "/classify", body)
    assert status == 200, told
    return told


def probs(url: str, **body: Any) -> list[float]:
    return [entry["probs"][0] for entry in answer(url, **body)["data"]]


def test_the_reply_has_the_shape_of_vllms(url: str) -> None:
    reply = answer(url, input=["1+2=", "3"])
    assert reply["object"] == "list"
    assert reply["model"] == "judge"
    assert [set(entry) for entry in reply["data"]] == [{"index", "label", "probs", "num_classes"}] * 2
    assert [(entry["index"], entry["label"], entry["num_classes"]) for entry in reply["data"]] == [
        (0, "LABEL_0", 1),
        (1, "LABEL_0", 1),
    ]
    assert reply["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}


def test_texts_and_chats_alone_and_in_lists(url: str) -> None:
    (plain,) = probs(url, input="<user>1+2=<bot>3")
    assert probs(url, messages=CHAT) == [plain]
    assert probs(url, messages=[CHAT, CHAT[:1]])[0] == pytest.approx(plain, abs=1e-5)
    assert probs(url, input=["<user>1+2=<bot>3", "<user>1+2="]) == probs(url, messages=[CHAT, CHAT[:1]])


def test_outputs_are_raw_unless_the_activation_is_asked_for(url: str) -> None:
    for text in ("1+2=", "7", "99"):
        (raw,), (active,) = probs(url, input=text), probs(url, input=text, use_activation=True)
        assert active == pytest.approx(1 / (1 + math.exp(-raw)))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "give either input or messages, not both and not neither"),
        ({"input": "1", "messages": CHAT}, "give either input or messages"),
        ({"input": []}, "input is empty"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [CHAT, []]}, "messages is empty"),
        ({"input": ""}, "no tokens"),
        ({"input": "1", "use_activation": 1}, "use_activation: "),
        ({"input": "1", "softmax": True}, "softmax is not supported here"),
        ({"messages": [{"role": "user"}]}, "a message needs content"),
        ({"input": "1" * 257}, r"the input has 257 tokens; this model takes 256 \(max_position_embeddings"),
        ({"input": ["1", "1" * 257]}, r"input 1 has 257 tokens; this model takes 256"),
    ],
)
def test_bad_requests_say_what_is_wrong(url: str, body: Any, message: str) -> None:
    status, told = ask(url, "/classify", body)
    assert status == 400 and re.search(message, told["error"]["message"]), told
