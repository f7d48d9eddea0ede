"""The `rollout` section: the engine that generates, its placement, and tools or an environment."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from practicum.config.base import Section
from practicum.config.engines import ENGINES, EngineName
from practicum.types import SamplingParams


class VllmConfig(Section):
    python: str | None = Field(default=None, min_length=1)
    """The Python of the environment in which vLLM is installed. None: this one."""
    in_process: bool = False
    """Run vLLM in the rollout worker's own process, which needs one environment for both. Otherwise the worker starts a
    server."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that share one copy of the model."""
    options: dict[str, Any] = Field(default={})
    """Further engine options of vLLM, by the names of its command line with underscores."""

    @model_validator(mode="after")
    def _one_process(self) -> Self:
        if self.in_process and self.python is not None:
            raise ValueError(
                "rollout.vllm: set python or in_process, not both: a process has one Python, the one Practicum runs in"
            )
        if self.in_process and self.tensor_parallel > 1:
            raise ValueError(
                f"rollout.vllm.tensor_parallel={self.tensor_parallel} takes several processes: leave "
                "rollout.vllm.in_process at false"
            )
        return self


class OpenAIConfig(Section):
    servers: tuple[str, ...] = ()
    """Addresses such as http://host:8000 of servers that answer /v1/completions; a router stands before several."""
    model: str | None = Field(default=None, min_length=1)
    """The name the servers know the model by. None: the first they list."""
    api_key_env: str | None = Field(default=None, min_length=1)
    """The environment variable that holds the bearer token. None: no token is sent."""


class AgentConfig(Section):
    tools: tuple[str, ...] = ()
    """Functions the model may call between turns: path/to/file.py:name or package.module:name."""
    environment: str | None = Field(default=None, min_length=1)
    """A class of yours that answers the model's turns: path/to/file.py:Name or package.module:Name."""
    call_format: Literal["hermes", "plain"] = "hermes"
    """The format in which the model calls a tool. hermes: <tool_call>{"name": "add", "arguments": {"a":
    1}}</tool_call>. plain: [add: 1, 2], the name left out where there is only one tool."""
    max_turns: int = Field(default=8, ge=1)
    """Turns of the model in one conversation."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Longest turn of the model. None: only rollout.max_new_tokens counts, for the conversation as a whole."""
    tool_timeout_s: float = Field(default=10.0, gt=0)
    """The time a call to a tool or an environment may take; a conversation in which one takes longer has no score."""

    @property
    def is_set(self) -> bool:
        return bool(self.tools) or self.environment is not None

    @model_validator(mode="after")
    def _one_partner(self) -> Self:
        if self.tools and self.environment is not None:
            raise ValueError("rollout.agent: set tools or environment, not both: an environment answers every turn")
        return self


class RolloutConfig(Section):
    engine: EngineName = "native"
    """native: Practicum's own, with continuous batching. hf: transformers' generate. vllm: vLLM. openai: any server
    that speaks the completions protocol."""
    placement: Literal["hybrid", "colocated", "standalone"] = "hybrid"
    """hybrid: in the trainer's processes, with its weights. colocated: on the trainer's devices in processes of its
    own, taking turns. standalone: on devices of its own."""
    replicas: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Copies of the engine outside of hybrid placement. auto: as many as the devices hold."""
    answers_per_prompt: int = Field(default=8, ge=1)
    """Answers sampled to each question; GRPO compares them with each other."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest answer; a longer one is truncated."""
    temperature: float = Field(default=1.0, gt=0)
    """Logits are divided by it, in rollout and training alike."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample only from the likeliest tokens that together reach this probability; 1 filters nothing."""
    top_k: int = Field(default=0, ge=0)
    """Sample only from so many likeliest tokens; 0 filters nothing."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer; they stay in it."""
    max_batch: int = Field(default=512, ge=1)
    """Answers that one worker generates at a time."""
    cache_gb: float | None = Field(default=None, gt=0)
    """Memory for keys and values of the engines native and vllm on each worker. None: a third of what is free."""
    partial: bool = False
    """Partial rollout: answers under way are aborted for new weights and resumed under them. Otherwise no answer mixes
    versions: new weights wait until answers under way are finished."""
    enable_rollout_routing_replay: bool | None = None
    """Whether the engine records where it sends tokens. True by itself means actor.router_replay.mode=R3. With mode R2
    training still replays the trainer's own choices, and replay/rollout_disagreement tells how often the engine chose
    otherwise. None: as the mode needs it."""
    agent: AgentConfig = AgentConfig()
    """Several turns with tools or an environment."""
    vllm: VllmConfig = VllmConfig()
    """Settings of the vllm engine."""
    openai: OpenAIConfig = OpenAIConfig()
    """Settings of the openai engine."""

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            self.max_new_tokens,
            self.temperature,
            self.top_p,
            self.top_k,
            num_answers=self.answers_per_prompt,
            stop=self.stop,
        )

    @model_validator(mode="after")
    def _engine_and_place(self) -> Self:
        if not all(self.stop):
            raise ValueError("rollout.stop: an empty text would end every answer at once")
        placements = ENGINES[self.engine].placements
        if self.placement not in placements:
            raise ValueError(
                f"rollout.engine={self.engine} cannot be {self.placement}: set rollout.placement="
                f"{' or '.join(placements)}"
            )
        if self.engine == "openai" and not self.openai.servers:
            raise ValueError("rollout.engine=openai needs rollout.openai.servers, a list of addresses")
        if self.engine == "openai" and self.replicas not in ("auto", 1):
            raise ValueError("rollout.engine=openai has one replica, which asks all rollout.openai.servers")
        if self.engine == "vllm" and self.vllm.tensor_parallel > 1 and self.placement != "standalone":
            raise ValueError(
                f"rollout.vllm.tensor_parallel={self.vllm.tensor_parallel} needs rollout.placement=standalone: a place "
                "of the trainer has one GPU"
            )
        if self.placement == "hybrid" and self.replicas != "auto":
            raise ValueError(
                "rollout.replicas is for colocated and standalone placement; hybrid has one per trainer worker"
            )
        return self
