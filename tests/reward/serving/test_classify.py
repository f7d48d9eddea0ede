from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from practicum.reward.serving.classifier import Classifier
from practicum.reward.serving.classify import ClassifyEndpoint
from practicum.reward.serving.texts import BadRequest

CHAT = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]


@pytest.fixture(scope="module")
def endpoint(classifier_folder: Path) -> ClassifyEndpoint:
    classifier = Classifier(
        str(classifier_folder), device=torch.device("cpu"), dtype=torch.float32, max_batch_tokens=4096
    )
    return ClassifyEndpoint("judge", classifier)


def answer(endpoint: ClassifyEndpoint, **body: Any) -> dict[str, Any]:
    asked = endpoint.read(json.dumps(body).encode())
    results = endpoint.compute([job.payload for job in asked.jobs])
    assert not any(isinstance(result, Exception) for result in results)
    return endpoint.reply(asked, results)  # type: ignore[arg-type]


def probs(endpoint: ClassifyEndpoint, **body: Any) -> list[float]:
    return [entry["probs"][0] for entry in answer(endpoint, **body)["data"]]


def test_the_reply_has_the_shape_of_vllms(endpoint: ClassifyEndpoint) -> None:
    reply = answer(endpoint, input=["1+2=", "3"])
    assert reply["object"] == "list"
    assert reply["model"] == "judge"
    assert [set(entry) for entry in reply["data"]] == [{"index", "label", "probs", "num_classes"}] * 2
    assert [(entry["index"], entry["label"], entry["num_classes"]) for entry in reply["data"]] == [
        (0, "LABEL_0", 1),
        (1, "LABEL_0", 1),
    ]
    assert reply["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}


def test_texts_and_chats_alone_and_in_lists(endpoint: ClassifyEndpoint) -> None:
    (plain,) = probs(endpoint, input="<user>1+2=<bot>3")
    assert probs(endpoint, messages=CHAT) == [plain]
    assert probs(endpoint, messages=[CHAT, CHAT[:1]])[0] == pytest.approx(plain, abs=1e-5)
    assert probs(endpoint, input=["<user>1+2=<bot>3", "<user>1+2="]) == probs(endpoint, messages=[CHAT, CHAT[:1]])


def test_outputs_are_raw_unless_the_activation_is_asked_for(endpoint: ClassifyEndpoint) -> None:
    for text in ("1+2=", "7", "99"):
        (raw,), (active,) = probs(endpoint, input=text), probs(endpoint, input=text, use_activation=True)
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
        ({"messages": [{"role": "user"}]}, r"messages\..*content: Field required"),
        ({"input": "1" * 257}, r"the input has 257 tokens; this model takes 256 \(max_position_embeddings"),
        ({"input": ["1", "1" * 257]}, r"input 1 has 257 tokens; this model takes 256"),
    ],
)
def test_bad_requests_say_what_is_wrong(endpoint: ClassifyEndpoint, body: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        answer(endpoint, **body)
