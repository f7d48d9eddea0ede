"""What a replica can be asked: one kind of model behind one path."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from practicum.reward.serving.batching import Job
from practicum.reward.serving.texts import BadRequest, Encoder, Limit
from practicum.reward.serving.weights import SleepingWeights
from practicum.types import Message

Q = TypeVar("Q", bound="Body")
P = TypeVar("P")
R = TypeVar("R")


class Body(BaseModel):
    """What all requests may have. Fields that are not known are refused: the answer would not be the one asked for."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str | None = None  # there is only the one
    user: str | None = None


class Turn(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    role: str
    content: str


def messages_of(turns: Sequence[Turn]) -> list[Message]:
    return [Message(turn.role, turn.content) for turn in turns]


@dataclass(frozen=True, slots=True)
class Asked(Generic[Q, P]):
    body: Q
    jobs: list[Job[P]]


class Endpoint(ABC, Generic[Q, P, R]):
    """`read` and `reply` run one at a time in one thread, `compute` one at a time in another."""

    path: ClassVar[str]
    body_class: type[Q]
    encoder: Encoder
    limit: Limit
    weights: SleepingWeights

    @abstractmethod
    def jobs(self, body: Q) -> list[Job[P]]:
        """What is to be computed for a request. Raises `BadRequest` when it cannot be."""

    @abstractmethod
    def compute(self, payloads: Sequence[P]) -> Sequence[R | Exception]: ...

    @abstractmethod
    def reply(self, asked: Asked[Q, P], results: Sequence[R]) -> dict[str, Any]: ...

    def read(self, data: bytes) -> Asked[Q, P]:
        try:
            body = self.body_class.model_validate(json.loads(data))
        except ValidationError as error:
            raise BadRequest(_describe(error)) from None
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not JSON: {error}.") from None
        return Asked(body, self.jobs(body))

    def wake(self) -> None:
        self.weights.wake()

    def sleep(self) -> None:
        self.weights.sleep()


def _describe(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"{where} is not supported here."
    text = first["msg"].removeprefix("Value error, ")
    return f"{where}: {text}." if where else f"{text}."


def usage(num_prompt: int, num_written: int = 0) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_written,
        "total_tokens": num_prompt + num_written,
    }
