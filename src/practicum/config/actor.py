"""The `actor` section: how the model learns."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from practicum.config.base import Section
from practicum.config.engines import ENGINES


class RouterReplayConfig(Section):
    mode: Literal["disabled", "R2", "R3"] = "disabled"
    """Router replay for a mixture of experts: training repeats earlier routing decisions. R2 repeats those of the
    trainer before the first update of a step, recorded on disk. R3 repeats those of the rollout engine, handed over in
    memory."""
    record_file: str | None = Field(default=None, min_length=1)
    """The file that records routed experts together with the samples; each further worker writes a file beside it.
    None: with R2 routes.rec in the run folder, with R3 no file."""
    replay_file: str | None = Field(default=None, min_length=1)
    """A recording to learn from again, step by step: nothing is generated or graded. Needs mode R2."""
    compare_every: int = Field(default=20, ge=0)
    """Steps between comparisons of KL(rollout‖trainer) with and without replay, on one micro-batch; 0: never."""

    def captures_routes(self, asked: bool | None) -> bool:
        """Return whether the rollout engine records where it sends tokens; `asked` is its own key."""
        return self.mode == "R3" or bool(asked)

    def check_engine(self, engine: str, asked: bool | None) -> None:
        """Check against the `rollout` section: its engine, and whether that is to record routes."""
        key = "rollout.enable_rollout_routing_replay"
        if asked is False and self.mode == "R3":
            raise ValueError(
                f"{key}=false contradicts actor.router_replay.mode=R3, which replays what the engine records: leave it "
                "out, or set the mode to R2 or disabled"
            )
        if asked and self.mode == "disabled":
            raise ValueError(
                f"{key}=true has the engine record routes, and with actor.router_replay.mode=disabled nothing reads "
                "them: leave the mode out or set it to R3 to replay them, or to R2 to compare them with the trainer's"
            )
        if asked and self.replay_file is not None:
            raise ValueError(
                f"{key}=true has the engine record routes, and with actor.router_replay.replay_file nothing is "
                "generated: leave one of them out"
            )
        if self.captures_routes(asked) and not ENGINES[engine].records_routes:
            able = [name for name, own in ENGINES.items() if own.records_routes]
            instead = "or the mode to R2" if self.mode == "R3" else f"or leave {key} out"
            raise ValueError(
                f"{'actor.router_replay.mode=R3' if self.mode == 'R3' else f'{key}=true'} needs an engine that records "
                f"where it sends tokens, and rollout.engine={engine} does not: set it to {' or '.join(able)}, {instead}"
            )

    def check_staleness(self, staleness: int) -> None:
        """Check against the `trainer` section: how far rollout may run ahead."""
        if self.replay_file is not None:
            raise ValueError(
                f"trainer.staleness={staleness} has rollout run ahead, and with actor.router_replay.replay_file there "
                "is no rollout: leave one of them out"
            )

    @model_validator(mode="after")
    def _files_and_mode(self) -> Self:
        if self.mode == "disabled" and (self.record_file or self.replay_file):
            raise ValueError("actor.router_replay: record_file and replay_file need a mode, R2 or R3")
        if self.replay_file is not None and self.mode != "R2":
            raise ValueError("actor.router_replay.replay_file needs mode R2: with R3 the rollout engine says where to")
        if self.replay_file is not None and self.record_file is not None:
            raise ValueError("actor.router_replay: a recording is replayed or made, not both: leave out record_file")
        return self


class LoraConfig(Section):
    rank: int = Field(ge=1)
    """The rank of the adapters' matrices: it bounds what they can express, and their size."""
    alpha: int | None = Field(default=None, ge=1)
    """The output of adapters is scaled by alpha / rank. None: twice the rank."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """The linear layers that get adapters, by the last parts of their names, such as [q_proj, v_proj]. all-linear: all
    but the output layer and those that choose among experts. Experts whose weights are one tensor cannot have any."""

    send: Literal["merged", "adapters"] = "merged"
    """The weights sent to engines in processes of their own. merged: whole weights. adapters: the adapters alone, a
    few MB. native and hf merge them with the files at model.path, vLLM computes with them beside the model."""

    @property
    def scale_by(self) -> int:
        """Alpha, or its default."""
        return 2 * self.rank if self.alpha is None else self.alpha

    def check_placement(self, rollout: str) -> None:
        if self.send == "adapters" and rollout == "hybrid":
            raise ValueError(
                "actor.lora.send=adapters is for engines that weights are sent to, and with rollout.placement=hybrid "
                "they are in the engine's process already: leave it at merged, or set another rollout.placement"
            )

    @field_validator("targets", mode="before")
    @classmethod
    def _in_brackets(cls, targets: object) -> object:
        if isinstance(targets, str) and targets != "all-linear":
            raise ValueError(f"write a list, actor.lora.targets=[{targets}], or all-linear")
        return targets

    @model_validator(mode="after")
    def _some_targets(self) -> Self:
        if self.targets != "all-linear" and not all(self.targets or [""]):
            raise ValueError("actor.lora.targets is empty: name layers, or leave it at all-linear")
        return self


class ActorConfig(Section):
    lr: float = Field(default=1e-6, gt=0)
    """AdamW's learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The schedule by which the learning rate falls over the run, to zero at its end."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises to its full value."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """A longer gradient is scaled down to this norm."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer updates in one pass over a step; its prompts are divided evenly among them."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the answers of a step. All are compared with the policy from before the first update."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Tokens in one forward and backward pass on one worker. Changes memory, never the gradient."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights; needs the extra practicum[peft]. None: all weights."""
    router_replay: RouterReplayConfig = RouterReplayConfig()
    """The same experts in rollout and training, or in all updates of a step."""
