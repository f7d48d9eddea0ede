"""What goes over the wire: requests and results of a rollout in JSON, and the way to and from `practicum.types`.

    RolloutCall  messages or text or token ids, tools, sampling, seed, session   ─▶ RolloutRequest
    RolloutReply one answer, per token: id, log-prob, whether it is learnt, weight version  ◀─ Sample

Messages are written as OpenAI's API has them. Unknown fields are refused. Where a number is absent it is null: JSON has
no NaN, and a version of -1 is none.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from practicum.replay import decoded
from practicum.types import (
    FinishReason,
    Message,
    Prompt,
    RolloutRequest,
    RoutedExperts,
    Sample,
    SamplingParams,
    route_dtype,
)

_SHOWN = 40  # of the address of an image, which may be all of it

Role = Literal["system", "developer", "user", "assistant", "tool"]


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TextPart(Wire):
    type: Literal["text"] = "text"
    text: str


class ImageUrl(Wire):
    url: str = Field(pattern=r"^(https?://|data:image/[\w.+-]+;base64,)")
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(Wire):
    """A picture by its address, or in the message itself as data:image/png;base64,..."""

    type: Literal["image_url"] = "image_url"
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class CalledFunction(Wire):
    name: str = Field(min_length=1)
    arguments: str = "{}"
    """A JSON object, as text."""

    @field_validator("arguments", mode="before")
    @classmethod
    def _as_text(cls, given: Any) -> Any:
        return json.dumps(given) if isinstance(given, dict) else given

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, text: str) -> str:
        try:
            is_object = isinstance(json.loads(text), dict)
        except ValueError as error:
            raise ValueError(f"arguments are not valid JSON: {error}") from None
        if not is_object:
            raise ValueError("arguments must be a JSON object")
        return text


class ToolCall(Wire):
    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolResult(Wire):
    tool_call_id: str = Field(min_length=1)
    content: str
    status: Literal["ok", "unknown", "malformed", "raised", "timeout", "lost"] = "ok"

    def to_message(self) -> WireMessage:
        return WireMessage(role="tool", content=self.content, tool_call_id=self.tool_call_id)


class WireMessage(Wire):
    role: Role
    content: str | tuple[Part, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs content, or tool_calls where the assistant calls tools")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} cannot have tool_calls: only the assistant calls tools")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError(f"a message of role {self.role} cannot have a tool_call_id: only tools answer calls")
        return self

    def to_message(self, engine: str) -> Message:
        """Raises ValueError for what that engine cannot take: pictures (none can), and calls outside the text."""
        for number, part in enumerate(() if isinstance(self.content, str) else self.content or (), 1):
            if isinstance(part, ImagePart):
                raise ValueError(
                    f"rollout.engine={engine} reads text only: part {number} of the {self.role}'s message is an image "
                    f"({part.type} {part.image_url.url[:_SHOWN]!r})"
                )
        if self.tool_calls:
            raise ValueError("tool_calls of an earlier turn must be in its text, as the model wrote them")
        parts = (self.content,) if isinstance(self.content, str) else (self.content or ())
        return Message(self.role, "".join(part if isinstance(part, str) else _text_of(part) for part in parts))

    @classmethod
    def of(cls, message: Message) -> Self:
        return cls.model_validate({"role": message.role, "content": message.content})


def _text_of(part: TextPart | ImagePart) -> str:
    assert isinstance(part, TextPart)
    return part.text


class FunctionSchema(Wire):
    name: str = Field(min_length=1)
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})


class ToolSchema(Wire):
    type: Literal["function"] = "function"
    function: FunctionSchema


class Sampling(Wire):
    """See `practicum.types.SamplingParams`."""

    max_new_tokens: int = Field(ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    num_answers: int = Field(default=1, ge=1)
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def to_params(self) -> SamplingParams:
        return SamplingParams(**dict(self))

    @classmethod
    def of(cls, params: SamplingParams) -> Self:
        return cls(**{name: getattr(params, name) for name in cls.model_fields})


class RolloutCall(Wire):
    """Exactly one of `messages`, `text` and `prompt_ids` says what is asked; token ids are used as they are."""

    id: str = Field(min_length=1)
    messages: tuple[WireMessage, ...] | None = None
    text: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    tools: tuple[ToolSchema, ...] = ()
    sampling: Sampling
    seed: int = Field(default=0, ge=0)
    first_answer: int = Field(default=0, ge=0)
    session: str | None = None
    """Requests with the same one belong to one conversation, and are best sent to one engine."""
    answer: Any = None
    data_source: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_question(self) -> Self:
        given = [name for name in ("messages", "text", "prompt_ids") if getattr(self, name)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"request {self.id}: give exactly one of messages, text and prompt_ids, not {found}")
        return self

    def to_request(self, encode: Callable[[Prompt], NDArray[np.int32]], engine: str) -> RolloutRequest:
        """For that `rollout.engine`. Raises ValueError, with the request's id, for what it cannot take.

        `encode` is the tokenizer's, with the chat template; it is not asked where there are token ids.
        """
        try:
            messages = None if self.messages is None else tuple(said.to_message(engine) for said in self.messages)
        except ValueError as error:
            raise ValueError(f"request {self.id}: {error}") from None
        text = self.text if self.prompt_ids is None else f"{len(self.prompt_ids)} tokens"
        prompt = Prompt(self.id, messages, text, self.answer, self.data_source, self.metadata)
        ids = encode(prompt) if self.prompt_ids is None else np.array(self.prompt_ids, np.int32)
        params = self.sampling.to_params()
        return RolloutRequest(prompt, ids, params, self.seed, self.first_answer, session=self.session)

    @classmethod
    def of(cls, request: RolloutRequest) -> Self:
        """By token ids, so that nobody tokenises the prompt a second time. What was written before is left out."""
        prompt = request.prompt
        return cls(
            id=prompt.id,
            prompt_ids=tuple(request.prompt_ids.tolist()),
            sampling=Sampling.of(request.params),
            seed=request.seed,
            first_answer=request.first_answer,
            session=request.session,
            answer=prompt.answer,
            data_source=prompt.data_source,
            metadata=dict(prompt.metadata),
        )


class WireRoutes(Wire):
    """`practicum.types.RoutedExperts`: base64 of the bytes of `experts` [tokens, layers, k] and `known` [tokens]."""

    shape: tuple[int, int, int]
    num_experts: int = Field(ge=1, le=1 << 16)
    layers: tuple[int, ...]
    experts: str
    known: str

    def to_routes(self) -> RoutedExperts:
        experts = np.frombuffer(base64.b64decode(self.experts), route_dtype(self.num_experts)).reshape(self.shape)
        known = np.frombuffer(base64.b64decode(self.known), np.bool_)
        return RoutedExperts(experts, np.array(self.layers, np.int32), known, self.num_experts)

    @classmethod
    def of(cls, routes: RoutedExperts) -> Self:
        return cls.model_validate(
            {
                "shape": routes.experts.shape,
                "num_experts": routes.num_experts,
                "layers": tuple(routes.layers.tolist()),
                "experts": base64.b64encode(np.ascontiguousarray(routes.experts).tobytes()).decode(),
                "known": base64.b64encode(np.ascontiguousarray(routes.known).tobytes()).decode(),
            }
        )


class RolloutReply(Wire):
    """One answer. The lists are as long as `token_ids`."""

    id: str
    answer_number: int = Field(default=0, ge=0)
    prompt_ids: tuple[int, ...] = Field(min_length=1)
    token_ids: tuple[int, ...]
    log_probs: tuple[float | None, ...]
    loss_mask: tuple[bool, ...]
    """False where the model did not write the token: what tools and users said."""
    versions: tuple[int | None, ...]
    text: str
    finish_reason: FinishReason
    routes: WireRoutes | None = None

    @model_validator(mode="after")
    def _one_entry_per_token(self) -> Self:
        for name in ("log_probs", "loss_mask", "versions"):
            if len(getattr(self, name)) != len(self.token_ids):
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {len(self.token_ids)} tokens")
        return self

    def to_sample(self, prompt: Prompt) -> Sample:
        return Sample(
            prompt=prompt,
            prompt_ids=np.array(self.prompt_ids, np.int32),
            token_ids=np.array(self.token_ids, np.int32),
            log_probs=np.array([np.nan if value is None else value for value in self.log_probs], np.float32),
            loss_mask=np.array(self.loss_mask, np.bool_),
            versions=np.array([-1 if version is None else version for version in self.versions], np.int32),
            text=self.text,
            finish_reason=self.finish_reason,
            routes=None if self.routes is None else self.routes.to_routes(),
        )

    @classmethod
    def of(cls, sample: Sample, answer_number: int = 0) -> Self:
        return cls(
            id=sample.prompt.id,
            answer_number=answer_number,
            prompt_ids=tuple(sample.prompt_ids.tolist()),
            token_ids=tuple(sample.token_ids.tolist()),
            log_probs=tuple(None if np.isnan(value) else value for value in sample.log_probs.tolist()),
            loss_mask=tuple(sample.loss_mask.tolist()),
            versions=tuple(None if version == -1 else version for version in sample.versions.tolist()),
            text=sample.text,
            finish_reason=sample.finish_reason,
            routes=None if sample.routes is None else WireRoutes.of(decoded([sample.routes])[0]),
        )
