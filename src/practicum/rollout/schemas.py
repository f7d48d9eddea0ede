"""The schemas of rollout over HTTP: what a model server is asked, and what it answers, in OpenAI's shapes.

    CompletionRequest, ChatRequest ─ to_groups ─▶ PromptGroup ─ engine ─▶ Sample ─▶ Choice, Reply
    TokenizeRequest, DetokenizeRequest, LogProbsRequest, UpdateWeightsRequest, ClassifyRequest

Fields that are not known are refused: the answer would not be the one asked for. Fields that are null are as if they
were not there. Messages may hold pictures; an engine that reads text only refuses them by the part that they are in.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from practicum.types import Message, Prompt, PromptGroup, SamplingParams, Trajectory

_SHOWN = 40  # characters of the address of a picture, which may be all of it


class Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


# Messages


class TextPart(Schema):
    type: Literal["text"] = "text"
    text: str


class ImageUrl(Schema):
    url: str = Field(pattern=r"^(https?://|data:image/[\w.+-]+;base64,)")
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(Schema):
    """A picture by its address, or in the message itself as data:image/png;base64,..."""

    type: Literal["image_url"] = "image_url"
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]
Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[tuple[Part, ...], Tag("parts")],
    Discriminator(lambda content: "text" if isinstance(content, str) else "parts"),
]


class CalledFunction(Schema):
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


class ToolCall(Schema):
    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Schema):
    """One message of a chat. A message that a server or OpenAI's client has returned can be sent back."""

    role: str = Field(min_length=1)
    content: Content | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, fields: Any) -> Any:
        return _without_null(fields)

    @field_validator("tool_calls", mode="before")
    @classmethod
    def _from_stream(cls, calls: Any) -> Any:
        """Drop the numbers of calls that were put together from the chunks of a stream."""
        if not isinstance(calls, list):
            return calls
        return [{k: v for k, v in call.items() if k != "index"} if isinstance(call, dict) else call for call in calls]

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs content, or tool_calls where the assistant calls tools")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} cannot have tool_calls: only the assistant calls tools")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError(f"a message of role {self.role} cannot have a tool_call_id: only tools answer calls")
        return self

    def text(self, reader: str) -> str:
        """Return the text, parts joined by line breaks. Raise ValueError for a picture, which `reader` cannot read."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        texts = []
        for number, part in enumerate(self.content, 1):
            if isinstance(part, ImagePart):
                raise ValueError(
                    f"{reader} reads text only, and part {number} of the {self.role}'s message is of type 'image_url' "
                    f"({part.image_url.url[:_SHOWN]!r}): send type 'text'"
                )
            texts.append(part.text)
        return "\n".join(texts)

    def for_template(self, reader: str) -> dict[str, Any]:
        """Return the message as chat templates read it: arguments travel as JSON text; templates write objects."""
        message = self.model_dump(exclude_defaults=True) | {"content": self.text(reader)}
        for call in message.get("tool_calls", ()):
            call["type"] = "function"
            call["function"]["arguments"] = json.loads(call["function"].get("arguments", "{}"))
        return message


class FunctionSchema(Schema):
    name: str = Field(min_length=1)
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})


class ToolSchema(Schema):
    type: Literal["function"] = "function"
    function: FunctionSchema


# Requests


class Request(Schema):
    """The fields that all requests have. Those in `refused` may come with a value that changes nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: str | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_changes_nothing(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        fields = _without_null(fields)
        for name, values in cls.refused.items():
            if name in fields and fields[name] not in values:
                others = " or ".join(json.dumps(value) for value in values)
                raise ValueError(
                    f"{name}={json.dumps(fields[name])} is not supported here: leave it out, or say {others}"
                )
        return {k: v for k, v in fields.items() if k not in cls.refused or k in cls.model_fields}


class StreamOptions(Schema):
    include_usage: bool = False
    include_obfuscation: bool = False  # OpenAI's padding against those who count bytes: there is none here


def _at_most_one(num: int | None) -> int | None:
    if num is not None and num > 1:
        raise ValueError("log-probs are those of the tokens that were written, not of others: at most 1")
    return num


NumLogProbs = Annotated[int | None, Field(ge=0), AfterValidator(_at_most_one)]

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


class GenerationRequest(Request):
    """The fields that say how answers are drawn and returned, whatever they are answers to."""

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
    """Whether the prompt's token ids are returned too; those of the answer always are."""

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop) if stop)

    @property
    def length(self) -> int | None:
        """The longest answer; None: as long as the model's length leaves."""
        return self.max_tokens

    @property
    def wants_log_probs(self) -> bool:
        raise NotImplementedError

    def prompts(self, reader: str) -> list[Prompt]:
        """Return the prompts. Raise ValueError for what `reader` cannot read."""
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

    def to_groups(
        self, prompts: Sequence[Prompt], prompt_ids: Sequence[NDArray[np.int32]], params: SamplingParams
    ) -> list[PromptGroup]:
        """Return a group for each prompt. The seed counts as the number of the first answer, so that clients can ask
        for any part of a row of answers. Any integer is a seed for OpenAI's clients; ours count from 0."""
        first = secrets.randbits(63) if self.seed is None else self.seed % 2**63
        return [
            PromptGroup(
                prompt.id,
                prompt,
                ids,
                params,
                seed=0,
                trajectories=[Trajectory(f"{prompt.id}/{n}", first + n) for n in range(self.n)],
            )
            for prompt, ids in zip(prompts, prompt_ids, strict=True)
        ]


class CompletionRequest(GenerationRequest):
    refused = _REFUSED | {"echo": (False,), "suffix": ("",)}

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: NumLogProbs = None
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

    @property
    def inputs(self) -> Sequence[str | list[int]]:
        """The prompts as they came: each a text, or token ids."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt  # type: ignore[list-item, return-value]

    @property
    def length(self) -> int:
        return self.max_tokens or 16  # as OpenAI's

    @property
    def wants_log_probs(self) -> bool:
        return self.logprobs is not None

    def prompts(self, reader: str) -> list[Prompt]:
        texts = [given if isinstance(given, str) else f"{len(given)} tokens" for given in self.inputs]
        return [Prompt(str(index), text=text or "(empty)") for index, text in enumerate(texts)]


class ChatRequest(GenerationRequest):
    refused = _REFUSED | {
        "tool_choice": ("auto", "none"),
        "store": (False,),
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
        "functions": ([],),
    }

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] = []
    """Go to the model's chat template as they are; with `tool_choice` none they do not."""
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    """False: an answer ends with its first call."""
    chat_template_kwargs: dict[str, Any] = {}
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Without it and without `max_tokens`: 512, or what the model's length leaves."""
    logprobs: bool = False
    top_logprobs: NumLogProbs = None

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
                raise ValueError(f"number {number}: {describe(error).removesuffix('.')}") from None
        return tools

    @property
    def calls_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice == "auto"

    @property
    def length(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_log_probs(self) -> bool:
        return self.logprobs

    def prompts(self, reader: str) -> list[Prompt]:
        return [Prompt("0", messages=tuple(Message(said.role, said.text(reader)) for said in self.messages))]


class TokenizeRequest(Request):
    """Exactly one of `prompt` and `messages`."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
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


class DetokenizeRequest(Request):
    tokens: list[int]


class UpdateWeightsRequest(Request):
    path: str = Field(min_length=1)
    """A folder with a model of the same shape, as `save_pretrained` writes it; on the server's machine."""
    version: int | None = Field(default=None, ge=0, lt=2**31)
    """None: one more than the last."""


class LogProbsRequest(Request):
    token_ids: list[list[int]] = Field(min_length=1)
    """Sequences of at least two tokens each."""


class ClassifyRequest(Request):
    """Exactly one of `input` (taken as it is) and `messages` (through the chat template); either may be a list."""

    input: str | list[str] | None = None
    answer: str = ""
    """What stands after one `input` that is a text. Control tokens in it are plain text; those in `input` are not."""
    messages: list[ChatMessage] | list[list[ChatMessage]] | None = None
    use_activation: bool = Field(default=False, strict=True)
    """Whether a sigmoid goes over the output. Unlike vLLM's, off unless asked for: rewards are raw outputs."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise ValueError("give either input or messages, not both and not neither")
        if self.input == [] or self.messages == [] or any(chat == [] for chat in self.messages or ()):
            raise ValueError(f"{'messages' if self.input is None else 'input'} is empty")
        if self.answer and not isinstance(self.input, str):
            raise ValueError("answer stands after a single input: leave it out, or make input a text")
        return self

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input or []

    @property
    def chats(self) -> list[list[ChatMessage]]:
        chats: Any = self.messages or []
        return [chats] if chats and isinstance(chats[0], ChatMessage) else chats


# Replies


class Usage(Schema):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, num_prompt: int, num_written: int = 0) -> Self:
        return cls(prompt_tokens=num_prompt, completion_tokens=num_written, total_tokens=num_prompt + num_written)


class ReplyToolCall(ToolCall):
    index: int | None = None
    """The number of the call in the answer; in streams only."""


class ReplyMessage(Schema):
    """A whole message or, in a stream, what has come of it since the last chunk."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: None = None
    tool_calls: list[ReplyToolCall] | None = None


class Choice(Schema):
    """One answer or, in a stream, what has come of it since the last chunk. OpenAI's replies have no token ids and no
    version of the weights."""

    index: int
    text: str = ""
    """The text of a completion; chats have `message`, or `delta` in a stream."""
    message: ReplyMessage | None = None
    delta: ReplyMessage | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    """None: there is more to come."""
    logprobs: dict[str, Any] | None = None
    token_ids: list[int]
    weight_version: int | None = None
    """The version of the weights that wrote the end of the answer; there when it is finished."""
    prompt_token_ids: list[int] | None = None


class Reply(Schema):
    """The answers to one request, or a chunk of a stream. Fields that were not set do not go over the wire."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    weight_version: int | None = None

    def with_choices(self, choices: list[Choice], **fields: Any) -> bytes:
        """Return it as JSON with these choices."""
        return self.model_copy(update={"choices": choices, **fields}).model_dump_json(exclude_unset=True).encode()


def describe(error: ValidationError) -> str:
    """Return the first mistake in words, with the field that it is in."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"{where} is not supported here."
    text = first["msg"].removeprefix("Value error, ")
    return f"{where}: {text}." if where else f"{text}."


def _without_null(fields: Any) -> Any:
    return {k: v for k, v in fields.items() if v is not None} if isinstance(fields, dict) else fields


def _without_strict(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Drop `strict` where it promises nothing: arguments are as the model writes them."""
    function = tool.get("function")
    if isinstance(function, dict) and not function.get("strict"):
        function = {name: value for name, value in function.items() if name != "strict" and value is not None}
    return {**tool, "function": function}


def _are_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(text, str) for text in values)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
