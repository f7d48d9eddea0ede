"""Graders that ask over HTTP: whom they ask, and how; reward models with one output, and services of any kind."""

from __future__ import annotations

import json
import math
import os
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from practicum.control_tokens import without_control_tokens
from practicum.reward.graders.base import Grader
from practicum.reward.values import score_of
from practicum.types import Prompt, Sample, Score

if TYPE_CHECKING:
    from practicum.reward.client import RewardClient


OWN_MODEL = "model"
"""The name under which the client knows the replicas of `reward.model`."""


class RemoteGrader(Grader):
    model_kind: ClassVar[str | None] = None
    """Which kind of `reward.model` it can ask."""

    urls: tuple[str, ...] = ()
    """Who is asked, such as http://grader-1:9000/score; a router shares the work among several. None: reward.model."""
    api_key_env: str | None = Field(default=None, min_length=1)
    """The environment variable with the key that is sent as bearer token, on the machines of the reward workers."""

    @field_validator("urls", mode="before")
    @classmethod
    def _one_is_enough(cls, urls: Any) -> Any:
        return (urls,) if isinstance(urls, str) else urls

    @field_validator("urls")
    @classmethod
    def _same_path(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{url!r} is not a URL such as http://127.0.0.1:9000/score")
        if len({_path(url) for url in urls}) > 1:
            raise ValueError(f"they must differ in host and port only, not in the path: {', '.join(urls)}")
        return urls

    @property
    def target(self) -> str:
        """The name under which the client knows who is asked."""
        return " ".join(f"{urlsplit(url).scheme}://{urlsplit(url).netloc}" for url in self.urls) or OWN_MODEL

    @property
    def servers(self) -> tuple[str, ...]:
        """The same as addresses for a router."""
        return () if self.target == OWN_MODEL else tuple(self.target.split(" "))

    @property
    def path(self) -> str:
        return _path(self.urls[0]) if self.urls else ""

    def prepare(self) -> None:
        self.headers()

    @abstractmethod
    async def grade(self, sample: Sample, client: RewardClient) -> Score: ...

    def headers(self) -> dict[str, str]:
        # Services that go by the name they were asked under must hear their own, not the router's.
        headers = {"Host": urlsplit(self.urls[0]).netloc} if self.urls else {}
        if self.api_key_env is not None:
            key = os.environ.get(self.api_key_env)
            if not key:
                raise ValueError(f"the environment variable {self.api_key_env} (option api_key_env) is not set")
            headers["Authorization"] = f"Bearer {key}"
        return headers


def _path(url: str) -> str:
    """Return the path with the query, if there is one; nothing for the address of a whole server."""
    parts = urlsplit(url)
    path = "" if parts.path == "/" else parts.path
    return f"{path or '/'}?{parts.query}" if parts.query else path


def conversation(prompt: Prompt) -> list[dict[str, str]]:
    if prompt.messages is None:
        return [{"role": "user", "content": prompt.text or ""}]
    return [{"role": message.role, "content": message.content} for message in prompt.messages]


def question_text(sample: Sample) -> str:
    """Return what was asked, as plain text."""
    prompt = sample.prompt
    if prompt.messages is None:
        return prompt.text or ""
    if len(prompt.messages) == 1:
        return prompt.messages[0].content
    return "\n\n".join(f"{message.role}: {message.content}" for message in prompt.messages)


class Classifier(RemoteGrader):
    """The output of a reward model for question and answer, as it is: it need not lie between 0 and 1."""

    model_kind: ClassVar[str | None] = "classifier"

    model: str | None = None
    """The model's name, for servers that hold several."""

    async def grade(self, sample: Sample, client: RewardClient) -> Score:
        # Asked in the shape of vLLM's /classify; raw outputs, since a reward need not lie between 0 and 1.
        body: dict[str, Any] = {"use_activation": False, **({"model": self.model} if self.model else {})}
        # No text of a message or an answer may become a control token. Our replicas see to it, others may not.
        safe = (lambda text: without_control_tokens(text)[0]) if self.urls else str
        if sample.prompt.messages is not None:
            chat = [*conversation(sample.prompt), {"role": "assistant", "content": sample.text}]
            body["messages"] = [{**message, "content": safe(message["content"])} for message in chat]
        elif self.urls:
            body["input"] = f"{sample.prompt.text}{safe(sample.text)}"
        else:
            body |= {"input": sample.prompt.text, "answer": sample.text}
        reply = await client.post(self.target, self.path or "/classify", body, self.headers())
        try:
            (row,) = reply["data"]
            (value,) = row["probs"]
            value = float(value)
        except (KeyError, TypeError, ValueError):
            return Score.failed("invalid", f"the reward model answered without one number: {str(reply)[:200]}")
        if not math.isfinite(value):
            return Score.failed("invalid", f"the reward model answered {value}")
        return Score(value)


class Endpoint(RemoteGrader):
    """The answer of a service of yours: a number, or a mapping with `score`, and `parts` if it likes."""

    urls: tuple[str, ...] = Field(min_length=1)
    """Who is asked, such as http://grader-1:9000/score; a router shares the work among several."""

    def check(self, prompt: Prompt) -> None:
        try:
            json.dumps([prompt.answer, dict(prompt.metadata)])
        except (TypeError, ValueError) as error:
            raise ValueError(f"what the record holds cannot be sent as JSON: {error}") from error

    async def grade(self, sample: Sample, client: RewardClient) -> Score:
        prompt = sample.prompt
        body: dict[str, Any] = {
            "prompt": question_text(sample),
            "messages": conversation(prompt),
            "text": sample.text,
            "ground_truth": prompt.answer,
            "data_source": prompt.data_source,
            "metadata": dict(prompt.metadata),
            "finish_reason": sample.finish_reason,
        }
        return score_of(await client.post(self.target, self.path or "/", body, self.headers()))
