"""The one config tree: typed, frozen, unknown keys refused. A YAML file plus dotted `key=value` overrides.

`Config.load("train.yaml", ["actor.lr=5e-7"])` is what the command line does. Paths are relative to the current folder.
Ranges stand in the types, derived values are properties, rules across sections are checked in `Config._cross_check`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from practicum.config.actor import ActorConfig
from practicum.config.algorithm import AlgorithmConfig
from practicum.config.base import Section
from practicum.config.critic import CriticConfig
from practicum.config.reward import RewardConfig
from practicum.config.rollout import RolloutConfig
from practicum.config.tracking import WandbConfig
from practicum.errors import ConfigError
from practicum.types import SamplingParams


class ModelConfig(Section):
    path: str = Field(min_length=1)
    """A local folder with a transformers model and its tokenizer, or a hub name."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of forward passes, in rollout and training alike. Master weights are always float32."""


class DataConfig(Section):
    train: str = Field(min_length=1)
    """A .jsonl or .parquet file of prompts."""
    validation: str | None = None
    """The same, for held-out prompts. Without it nothing is validated."""
    prompts_per_step: int = Field(default=32, ge=1)
    """Prompts in each step."""
    prompt_key: str = "prompt"
    """Field with the question: a string, or a list of {role, content} messages. Within another field: a.b."""
    answer_key: str = "answer"
    """Field with the ground truth, such as reward_model.ground_truth. One other than `answer` must be there."""
    max_prompt_tokens: int = Field(default=512, ge=1)
    """Longest prompt, chat template included."""
    overlong: Literal["drop", "error"] = "drop"
    """drop: leave out longer prompts and count them. error: stop with an error that names the first."""


class ValidationConfig(Section):
    every: int = Field(default=0, ge=0)
    """Steps between validations; 0 validates only before the first and after the last step."""
    temperature: float = Field(default=1.0, ge=0)
    """The temperature of answers to held-out prompts; 0 is greedy."""
    answers_per_prompt: int = Field(default=1, ge=1)
    """Answers to each held-out prompt; the accuracy is their mean score. With several there are pass@k and maj@k for
    k = 1, 2, 4, ... up to this."""
    right_above: float = 0.5
    """An answer is right if its score is above this. pass@k and maj@k count right answers; the accuracy does not."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Use only the first so many held-out prompts. None uses all."""


class TrainerConfig(Section):
    steps: int = Field(default=100, ge=1)
    """Length of the run."""
    num_workers: int = Field(default=1, ge=1)
    """Processes that hold the model, sharded over them; in hybrid placement each generates its share of the answers."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU where there is one."""
    threads_per_worker: int | None = Field(default=None, ge=1)
    """CPU threads of each worker. None divides the machine's cores evenly."""
    staleness: int = Field(default=0, ge=0)
    """The number of weight versions that rollout may be behind: the batches of as many later steps are generated and
    graded while the learners learn. 0: a step learns only from answers of its own weights."""
    seed: int = Field(default=0, ge=0)
    """The seed of the order of prompts and of every sampled token."""
    run_dir: str = Field(default="runs/latest", min_length=1)
    """Folder for everything the run leaves behind."""
    checkpoint_every: int = Field(default=25, ge=0)
    """Steps between checkpoints; 0 writes one only after the last step."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Older checkpoints are deleted."""
    keep_best: str | None = Field(default=None, pattern="^validation/.")
    """A figure of held-out prompts, such as validation/accuracy or validation/pass@4. A step that is better by it than
    any before is checkpointed whenever it comes; that checkpoint is kept until a better one is, and best.json names it.
    None keeps none."""
    log_answers_every: int = Field(default=10, ge=1)
    """Steps between files of sampled answers in the run folder."""
    wandb: WandbConfig | None = None
    """Log to Weights & Biases too; needs the extra practicum[wandb]. A resumed run goes on in the same W&B run."""


class ControllerConfig(Section):
    backend: Literal["ray", "local"] = "ray"
    """local runs the one worker inside this process, for a debugger."""
    address: str | None = None
    """Address of a running Ray cluster. None takes RAY_ADDRESS, or else starts Ray on this machine for the run."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """The time the workers may take to start."""
    call_timeout_s: float = Field(default=1800.0, gt=0)
    """The time one call to the workers may take, such as the rollout of a step."""


class Config(Section):
    model: ModelConfig
    """The model to train."""
    data: DataConfig
    """The prompts."""
    reward: RewardConfig
    """The graders. Set exactly one of grader, function and terms."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation of answers."""
    validation: ValidationConfig = ValidationConfig()
    """Evaluation on held-out prompts."""
    actor: ActorConfig = ActorConfig()
    """The policy that learns."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The algorithm; docs/algorithms.md helps to choose."""
    critic: CriticConfig = CriticConfig()
    """The value model, with algorithm.advantage=gae."""
    trainer: TrainerConfig = TrainerConfig()
    """The run as a whole."""
    controller: ControllerConfig = ControllerConfig()
    """Ray or this process."""
    resume: Literal["never", "auto"] = "never"
    """auto continues from the newest checkpoint in the run folder; never refuses a folder that holds a run."""

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Read a YAML file, apply `key=value` overrides in order, check everything."""
        path = Path(path)
        try:
            tree = yaml.safe_load(path.read_text())
        except OSError as error:
            raise ConfigError(f"config file {path} cannot be read: {error.strerror or error}.") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"config file {path} is not valid YAML: {error}") from error
        if tree is None:
            tree = {}
        if not isinstance(tree, dict):
            raise ConfigError(f"config file {path} holds a {type(tree).__name__}; expected sections such as 'model:'.")
        return cls.from_tree(tree, overrides, source=str(path))

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any], overrides: Sequence[str] = (), source: str = "config") -> Self:
        """The same from a nested mapping."""
        merged = _with_overrides(tree, overrides)
        try:
            return cls.model_validate(merged)
        except ValidationError as error:
            raise ConfigError(_describe(error, source)) from None

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    @property
    def record_file(self) -> str | None:
        """The file that records routed experts, if any."""
        replay = self.actor.router_replay
        if replay.mode == "R2" and replay.replay_file is None:
            return replay.record_file or str(Path(self.trainer.run_dir) / "routes.rec")
        return replay.record_file

    @property
    def captures_routes(self) -> bool:
        """Tell whether the rollout engine records where it sends tokens."""
        return self.actor.router_replay.captures_routes(self.rollout.enable_rollout_routing_replay)

    @property
    def samples_per_step(self) -> int:
        return self.data.prompts_per_step * self.rollout.answers_per_prompt

    @property
    def samples_per_update(self) -> int:
        return self.samples_per_step // self.actor.mini_batches

    @property
    def num_updates(self) -> int:
        """The number of the actor's optimizer updates in the whole run."""
        return (self.trainer.steps - self.critic.warmup_steps) * self.actor.mini_batches * self.actor.epochs

    @property
    def max_sequence_tokens(self) -> int:
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def validation_sampling(self) -> SamplingParams:
        return SamplingParams(
            self.rollout.max_new_tokens,
            self.validation.temperature,
            num_answers=self.validation.answers_per_prompt,
            stop=self.rollout.stop,
        )

    @property
    def _take_all_that_is_free(self) -> bool:
        """Return whether two kinds of replicas would each take all free devices."""
        model, rollout = self.reward.model, self.rollout
        if model is None or not model.placement == rollout.placement == "standalone":
            return False
        return model.replicas == rollout.replicas == "auto" and rollout.engine != "openai"

    @property
    def placements(self) -> dict[str, str]:
        """The placement of the models beside the actor, by key; hybrid where there is no such model."""
        return {"critic.placement": self.critic.placement, "algorithm.kl.placement": self.algorithm.kl.placement}

    def changes_from(self, other: Config) -> list[str]:
        """`key: old -> new` for every value that differs."""
        mine, theirs = _leaves(self.model_dump()), _leaves(other.model_dump())
        keys = [*mine, *(key for key in theirs if key not in mine)]
        return [f"{key}: {theirs.get(key)} -> {mine.get(key)}" for key in keys if theirs.get(key) != mine.get(key)]

    def batch_algebra(self) -> str:
        """The numbers of one step, as a person would write them down."""
        prompts, answers, updates = self.data.prompts_per_step, self.rollout.answers_per_prompt, self.actor.mini_batches
        workers, budget, epochs = self.trainer.num_workers, self.actor.micro_batch_tokens, self.actor.epochs
        most_tokens = -(-self.samples_per_update // workers) * self.max_sequence_tokens
        return (
            f"{prompts} prompts x {answers} answers = {prompts * answers} samples a step"
            f"{f', learnt from {epochs} times' if epochs > 1 else ''}; "
            f"/ {updates} mini-batch{'es' if updates > 1 else ''} = {prompts * answers / updates:g} samples an update; "
            f"/ {workers} worker{'s' if workers > 1 else ''} = {prompts * answers / updates / workers:g} samples each, "
            f"at most {most_tokens:,} tokens in micro-batches of {budget:,}"
        )

    @model_validator(mode="before")
    @classmethod
    def _one_switch(cls, tree: Any) -> Any:
        """rollout.enable_rollout_routing_replay=true by itself means actor.router_replay.mode=R3."""
        if not isinstance(tree, dict) or not isinstance(rollout := tree.get("rollout"), dict):
            return tree
        actor = tree.get("actor", {})
        replay = actor.get("router_replay", {}) if isinstance(actor, dict) else None
        if rollout.get("enable_rollout_routing_replay") is not True or not isinstance(replay, dict) or "mode" in replay:
            return tree
        return {**tree, "actor": {**actor, "router_replay": {**replay, "mode": "R3"}}}

    def _check_critic(self) -> None:
        if not self.algorithm.needs_critic:
            if self.critic != CriticConfig():
                raise ValueError(
                    f"critic: algorithm.advantage={self.algorithm.advantage} has no use for a critic: leave the "
                    "section out, or set algorithm.advantage=gae"
                )
        elif self.actor.router_replay.replay_file is not None:
            raise ValueError(
                "actor.router_replay.replay_file: a recording holds no values for a critic to learn from, which "
                f"algorithm.advantage={self.algorithm.advantage} needs"
            )
        elif self.critic.warmup_steps >= self.trainer.steps:
            raise ValueError(
                f"critic.warmup_steps={self.critic.warmup_steps} leaves the actor nothing of "
                f"trainer.steps={self.trainer.steps} to learn in"
            )

    @model_validator(mode="after")
    def _cross_check(self) -> Self:
        self.actor.router_replay.check_engine(self.rollout.engine, self.rollout.enable_rollout_routing_replay)
        self.algorithm.check_answers(self.rollout.answers_per_prompt)
        if self.trainer.staleness:
            self.actor.router_replay.check_staleness(self.trainer.staleness)
            self.algorithm.check_staleness(self.trainer.staleness)
        self._check_critic()
        if self.actor.lora:
            self.actor.lora.check_placement(self.rollout.placement)
        for key, placement in self.placements.items():
            if placement != "hybrid" and self.controller.backend == "local":
                raise ValueError(
                    f"{key}={placement} needs processes of its own, and controller.backend=local has one for all: set "
                    "one of them otherwise"
                )
        if self.data.prompts_per_step % self.actor.mini_batches:
            raise ValueError(
                f"data.prompts_per_step={self.data.prompts_per_step} must be a multiple of "
                f"actor.mini_batches={self.actor.mini_batches} ({self.batch_algebra()})"
            )
        if self.data.prompts_per_step < self.trainer.num_workers or self.samples_per_update < self.trainer.num_workers:
            raise ValueError(
                f"trainer.num_workers={self.trainer.num_workers} workers would not all have a prompt and a sample: "
                f"raise data.prompts_per_step or lower actor.mini_batches ({self.batch_algebra()})"
            )
        if self.actor.micro_batch_tokens < self.max_sequence_tokens:
            raise ValueError(
                f"actor.micro_batch_tokens={self.actor.micro_batch_tokens} cannot hold the longest sequence, "
                f"data.max_prompt_tokens + rollout.max_new_tokens = {self.data.max_prompt_tokens} + "
                f"{self.rollout.max_new_tokens} = {self.max_sequence_tokens} tokens"
            )
        if self.controller.backend == "local" and self.trainer.num_workers != 1:
            raise ValueError(
                f"controller.backend=local runs one worker in this process, not {self.trainer.num_workers}: "
                "set trainer.num_workers=1 or controller.backend=ray"
            )
        if self.controller.backend == "local" and self.rollout.engine == "vllm" and self.rollout.vllm.in_process:
            raise ValueError(
                "rollout.vllm.in_process=true needs a process without a trainer, since vLLM ends torch's default "
                "process group with itself, and controller.backend=local has none: set controller.backend=ray or "
                "rollout.vllm.python"
            )
        if self._take_all_that_is_free:
            raise ValueError(
                "rollout.replicas and reward.model.replicas are both auto with placement standalone, and each takes "
                "all that is free: set one of them to a number"
            )
        if self.trainer.keep_best is not None and self.data.validation is None:
            raise ValueError(f"trainer.keep_best={self.trainer.keep_best} needs data.validation, a file of prompts")
        if self.validation.every and self.data.validation is None:
            raise ValueError(f"validation.every={self.validation.every} needs data.validation, a file of prompts")
        return self


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted path of the tree, sections included."""
    for name, field in model.model_fields.items():
        yield prefix + name
        section = section_of(field.annotation)
        if section is not None:
            yield from known_keys(section, f"{prefix}{name}.")


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, also one that may be left out."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _with_overrides(tree: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    merged = _copied(tree)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"override {override!r} is not of the form key=value, such as actor.lr=5e-7.")
        *sections, leaf = key.split(".")
        node = merged
        for section in sections:
            child = node.setdefault(section, {})
            if not isinstance(child, dict):
                raise ConfigError(f"override {override!r}: {section!r} is a value, not a section.{_nearest(key)}")
            node = child
        try:
            node[leaf] = text if _is_text(key) and text != "null" else yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"override {override!r}: the value is not valid YAML: {error}") from error
    return merged


def _is_text(key: str) -> bool:
    """Return whether the key holds a string, which an override gives as it is: `a #2` is no YAML comment there."""
    model: Any = Config
    for part in key.split("."):
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return False
        model = section_of(field.annotation) or field.annotation
    return model in (str, str | None)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        own = f"{prefix}{key}"
        leaves |= _leaves(value, f"{own}.") if isinstance(value, Mapping) and value else {own: value}
    return leaves


def _copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in tree.items()}


def _describe(error: ValidationError, source: str) -> str:
    lines = []
    for detail in error.errors():
        path = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            lines.append(f"unknown key {path!r}.{_nearest(path)}")
        elif detail["type"] == "missing":
            lines.append(f"{path} is missing and has no default.")
        elif detail["type"] == "value_error":
            said = f"{detail['ctx']['error']}."
            lines.append(said if path in said else f"{path}: {said}")
        elif detail["type"] == "model_type":
            keys = ", ".join(key for key in known_keys() if key.startswith(f"{path}."))
            lines.append(f"{path} = {detail['input']!r}: it is a section, of {keys}.")
        else:
            lines.append(f"{path} = {detail['input']!r}: {detail['msg'].replace('Input ', '')}.")
    joined = lines[0] if len(lines) == 1 else "\n".join([f"{len(lines)} mistakes", *(f"  - {line}" for line in lines)])
    return f"{source}: {joined}"


def _nearest(path: str) -> str:
    """` Did you mean …?` with the known key most like this one: of the same name in another section, or else alike."""
    keys = list(known_keys())
    section, _, leaf = path.rpartition(".")
    siblings = [key for key in keys if key.rpartition(".")[0] == section]
    near = [key for key in keys if key.rpartition(".")[2] == leaf]
    near = near or difflib.get_close_matches(path, siblings, n=1) or difflib.get_close_matches(path, keys, n=1)
    near = near or difflib.get_close_matches(leaf, [k.rpartition(".")[2] for k in keys], n=1)
    if near:
        return f" Did you mean {near[0]!r}?"
    return f" Known here: {', '.join(siblings)}." if siblings else ""
