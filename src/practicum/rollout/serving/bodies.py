"""What can be asked, as it comes over the wire: checked once, here."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from practicum.rollout.schemas import ToolCall, ToolSchema
from practicum.rollout.serving.refusals import BadRequest
from practicum.types import SamplingParams

B = TypeVar("B", bound="Body")


class Body(BaseModel):
    """What all requests may have. Fields that are not known are refused: the answer would not be the one asked for.

    Those in `refused` are known, and may come with the value that changes nothing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: str | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_what_changes_nothing(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        kept = {}
        for name, value in fields.items():
            if name in cls.refused:
                if value is not None and value not in cls.refused[name]:
                    others = " or ".join(json.dumps(other) for other in cls.refused[name])
                    raise ValueError(f"{name}={json.dumps(value)} is not supported here: leave it out, or say {others}")
                if name not in cls.model_fields:
                    continue
            if value is not None:  # null is as if it were not there, for OpenAI's clients
                kept[name] = value
        return kept


class Turn(BaseModel):
    """One message of a chat, as the chat template reads it. Fields that are null are as if they were not there: a
    message that OpenAI's client returned can be sent back."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: str
    content: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}

    @field_validator("tool_calls", mode="before")
    @classmethod
    def _from_a_stream(cls, calls: Any) -> Any:
        """Put together from pieces, they still have their numbers."""
        if not isinstance(calls, list):
            return calls
        return [
            {name: value for name, value in call.items() if name != "index"} if isinstance(call, dict) else call
            for call in calls
        ]

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: Any, info: ValidationInfo) -> Any:
        """Parts of text are joined by line breaks."""
        if not isinstance(content, list):
            return content
        texts = []
        for number, part in enumerate(content, 1):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                reader = (info.context or {}).get("reader", "this model")
                raise ValueError(f"{reader} reads text only, and part {number} is of type {kind!r}: send type 'text'")
            texts.append(part["text"])
        return "\n".join(texts)

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} cannot have tool_calls: only the assistant calls tools")
        return self

    def as_template_reads(self) -> dict[str, Any]:
        told = self.model_dump(exclude_none=True)
        told.setdefault("content", "")
        for call in told.get("tool_calls", ()):  # arguments travel as JSON text; templates write objects
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return told


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    include_usage: bool = False
    include_obfuscation: bool = False  # OpenAI's padding against those who count bytes: there is none here


_REFUSED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
}


class WritingBody(Body):
    """How answers are drawn and told, whatever they are answers to."""

    n: int = Field(default=1, ge=1, le=1024)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    """0 and -1: all tokens."""
    stop: str | list[str] = []
    """Answers end with the first of these, which is not part of the text (but of `token_ids`)."""
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    """The same seed, prompt and parameters give the same answers, whatever else is asked at the time. Of several
    answers the second is the one of the next seed, and so on."""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    """Whether the prompt's token ids are told too; those of the answer always are."""

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop) if stop)

    @property
    def length(self) -> int | None:
        return self.max_tokens

    @property
    def wants_log_probs(self) -> bool:
        raise NotImplementedError

    def params(self, max_new_tokens: int) -> SamplingParams:
        return SamplingParams(
            max_new_tokens,
            self.temperature,
            self.top_p,
            max(0, self.top_k),
            num_answers=self.n,
            stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )

    def drawn_seed(self) -> int:
        """Any integer is a seed for OpenAI's clients. Ours count from 0, with room for those of further answers."""
        return secrets.randbits(63) if self.seed is None else self.seed % 2**63


class CompletionBody(WritingBody):
    refused = _REFUSED | {"echo": (False,), "suffix": ("",)}

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0)
    add_special_tokens: bool = True
    """Whether a prompt given as text gets those that the tokenizer adds by itself."""

    @field_validator("prompt", mode="plain")
    @classmethod
    def _one_kind(cls, prompt: Any) -> Any:
        if isinstance(prompt, str):
            return prompt
        kinds = (_are_texts, _are_ids, lambda many: all(map(_are_ids, many)))
        if isinstance(prompt, list) and prompt and any(is_kind(prompt) for is_kind in kinds):
            return prompt
        raise ValueError("is neither a text, nor a list of texts, nor token ids, nor a list of lists of token ids")

    @field_validator("logprobs")
    @classmethod
    def _of_what_was_written(cls, num: int | None) -> int | None:
        return _no_others(num)

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt  # type: ignore[list-item, return-value]

    @property
    def length(self) -> int:
        return self.max_tokens or 16  # as OpenAI's

    @property
    def wants_log_probs(self) -> bool:
        return self.logprobs is not None


class ChatBody(WritingBody):
    refused = _REFUSED | {
        "tool_choice": ("auto", "none"),
        "store": (False,),
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
        "functions": ([],),
    }

    messages: list[Turn] = Field(min_length=1)
    tools: list[dict[str, Any]] = []
    """Go to the model's chat template as they are; with `tool_choice` none they do not."""
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    """False: an answer ends with its first call."""
    chat_template_kwargs: dict[str, Any] = {}
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Without it and without `max_tokens`: 512, or what the model's length leaves."""
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens mean the same: give one of them")
        return self

    @field_validator("tools")
    @classmethod
    def _are_functions(cls, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for number, tool in enumerate(tools):
            try:
                ToolSchema.model_validate(_without_strict(tool))
            except ValidationError as error:
                raise ValueError(f"number {number}: {_describe(error).removesuffix('.')}") from None
        return tools

    @field_validator("top_logprobs")
    @classmethod
    def _of_what_was_written(cls, num: int | None) -> int | None:
        return _no_others(num)

    @property
    def calls_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice == "auto"

    @property
    def length(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_log_probs(self) -> bool:
        return self.logprobs


class TokenizeBody(Body):
    """Exactly one of `prompt` and `messages`."""

    prompt: str | None = None
    messages: list[Turn] | None = None
    tools: list[dict[str, Any]] = []
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give either prompt or messages, not both and not neither")
        return self


class DetokenizeBody(Body):
    tokens: list[int]


class UpdateBody(Body):
    path: str = Field(min_length=1)
    """A folder with a model of the same shape, as `save_pretrained` writes it; on the server's machine."""
    version: int | None = Field(default=None, ge=0, lt=2**31)
    """None: one more than the last."""


class LogProbsBody(Body):
    token_ids: list[list[int]] = Field(min_length=1)
    """Sequences of at least two tokens each."""


def turns_of(messages: Sequence[Turn]) -> list[dict[str, Any]]:
    return [turn.as_template_reads() for turn in messages]


def parse(kind: type[B], data: bytes, reader: str = "this model") -> B:
    """`reader` is told as who cannot read what is no text."""
    try:
        return kind.model_validate(json.loads(data), context={"reader": reader})
    except ValidationError as error:
        raise BadRequest(_describe(error)) from None
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}.") from None


def _describe(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"{where} is not supported here."
    text = first["msg"].removeprefix("Value error, ")
    return f"{where}: {text}." if where else f"{text}."


def _without_strict(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Where it says that nothing is promised: arguments are as the model writes them."""
    function = tool.get("function")
    if isinstance(function, dict) and not function.get("strict"):
        function = {name: value for name, value in function.items() if name != "strict" and value is not None}
    return {**tool, "function": function}


def _are_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(text, str) for text in values)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in value)


def _no_others(num: int | None) -> int | None:
    if num is not None and num > 1:
        raise ValueError("log-probs are told of the tokens that were written, not of others: at most 1")
    return num
