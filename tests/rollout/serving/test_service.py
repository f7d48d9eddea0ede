from __future__ import annotations

import asyncio

import pytest

from practicum.rollout.serving.refusals import BadRequest, NoSuchModel
from tests.rollout.serving.fakes import FakeClassifier


def test_only_its_own_names_are_answered_to() -> None:
    service = FakeClassifier().service(names=frozenset({"fake", "default"}))
    for name in ("fake", "default"):
        asyncio.run(service.tokenize(b'{"prompt": "1", "model": "%s"}' % name.encode()))
    asyncio.run(service.tokenize(b'{"prompt": "1"}'))
    with pytest.raises(NoSuchModel, match="there is no model 'other' here; this is 'fake'"):
        asyncio.run(service.tokenize(b'{"prompt": "1", "model": "other"}'))
    anybody = FakeClassifier().service()
    asyncio.run(anybody.tokenize(b'{"prompt": "1", "model": "other"}'))


def test_text_to_tokens_and_back() -> None:
    service = FakeClassifier().service()
    told = asyncio.run(service.tokenize(b'{"prompt": "<user>1"}'))
    assert told == {"tokens": [2, 5], "count": 2, "max_model_len": 7}
    assert asyncio.run(service.detokenize(b'{"tokens": [2, 5]}')) == {"prompt": "<user>1"}
    with pytest.raises(BadRequest):
        asyncio.run(service.detokenize(b'{"tokens": []}'))
