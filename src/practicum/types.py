"""The data that crosses the boundaries between the parts: small, slotted, self-checking, made of NumPy arrays.

    PromptGroup   a prompt and its trajectories: the unit that is written, graded, queued and learnt from
    Trajectory    one answer to it: a score, and one or more samples
    Sample        the tokens of one context: ids, log-probs, loss mask, weight versions, routed experts

One group goes round and is filled in: rollout adds samples, graders add scores, the loop adds advantages. A group, a
trajectory and a sample are known by their ids, wherever they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort", "error"]
ScoreStatus = Literal["ok", "invalid", "timeout", "infra_error"]
FLOAT32_MAX = 3.4028234663852886e38  # learners compute with float32, where what is larger is infinite
SCORE_STATUSES: tuple[ScoreStatus, ...] = ("ok", "invalid", "timeout", "infra_error")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question. Exactly one of `messages` (goes through the chat template) and `text` (used as it is) is set."""

    id: str
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    answer: Any = None  # the ground truth, as the data file has it
    data_source: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.text is None):
            raise ValueError(f"prompt {self.id}: give either messages or text, not both and not neither")
        if not (self.messages or self.text):
            raise ValueError(f"prompt {self.id}: is empty")

    def __reduce__(self) -> tuple[Any, ...]:
        # Here and below: what dataclasses do for pickling takes several times as long, for thousands of them a step.
        return Prompt, (self.id, self.messages, self.text, self.answer, self.data_source, self.metadata)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters, and when answers end. Temperature 0 is greedy; `top_k=0` and `top_p=1.0` filter nothing."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    num_answers: int = 1
    stop: tuple[str, ...] = ()  # an answer ends with the token that completes one of these texts
    stop_token_ids: tuple[int, ...] = ()  # or with one of these tokens, beside the model's own end-of-text tokens
    ignore_eos: bool = False  # the model's end-of-text tokens do not end it

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.num_answers < 1:
            raise ValueError("max_new_tokens and num_answers must be at least 1")
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError("temperature and top_k must not be negative, top_p must be in (0, 1]")
        if not all(self.stop):
            raise ValueError("an empty text in stop would end every answer at once")


def route_dtype(num_experts: int) -> type[np.unsignedinteger[Any]]:
    """Return the dtype that holds the indices of so many experts."""
    return np.uint8 if num_experts <= 256 else np.uint16


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts that each token of a sequence was sent to, in every layer that routes.

    The experts of a row are in ascending order: routing weights are no part of a record.
    """

    experts: NDArray[np.unsignedinteger[Any]]  # [tokens, layers, k]
    layers: NDArray[np.int32]  # [layers], their indices in the whole model
    known: NDArray[np.bool_]  # [tokens], False where nothing was recorded: what `experts` holds there means nothing
    num_experts: int  # of each layer

    def __post_init__(self) -> None:
        tokens, layers, k = self.experts.shape
        if tokens != len(self.known) or layers != len(self.layers):
            raise ValueError(f"routed experts of shape {self.experts.shape} for {len(self.known)} tokens")
        if not 1 <= k <= self.num_experts or self.experts.dtype != route_dtype(self.num_experts):
            raise ValueError(f"{k} of {self.num_experts} experts, written in {self.experts.dtype}")

    def __len__(self) -> int:
        return len(self.known)

    def __getitem__(self, tokens: slice) -> RoutedExperts:
        return RoutedExperts(self.experts[tokens], self.layers, self.known[tokens], self.num_experts)

    @classmethod
    def joined(cls, parts: Sequence[RoutedExperts]) -> RoutedExperts:
        """Return the routes of several sequences, or of the parts of one, end to end; at least one."""
        first = parts[0]
        for part in parts:
            if part.num_experts != first.num_experts or not np.array_equal(part.layers, first.layers):
                raise ValueError("routed experts of different models cannot be joined")
        experts = np.concatenate([part.experts for part in parts])
        return cls(experts, first.layers, np.concatenate([part.known for part in parts]), first.num_experts)

    def padded(self, num_tokens: int) -> RoutedExperts:
        """Return the same with rows for further tokens, of which nothing is known."""
        more = num_tokens - len(self.known)
        if more <= 0:
            return self
        experts = np.pad(self.experts, ((0, more), (0, 0), (0, 0)))
        return RoutedExperts(experts, self.layers, np.pad(self.known, (0, more)), self.num_experts)

    def grown(self, after: RoutedExperts) -> RoutedExperts:
        """Return the routes of a sequence that has grown: a token keeps the experts it had when it was first seen,
        which wrote the next one; the engine may have seen it again since."""
        before = self.padded(len(after.known))
        experts = np.where(before.known[:, None, None], before.experts, after.experts)
        return RoutedExperts(experts, self.layers, before.known | after.known, self.num_experts)

    @property
    def num_bytes(self) -> int:
        return self.experts.nbytes


@dataclass(frozen=True, slots=True)
class CodedRoutes:
    """`RoutedExperts` as they travel between processes; `practicum.replay` codes and reads them."""

    code: NDArray[np.uint8]
    layers: NDArray[np.int32]
    known: NDArray[np.bool_]  # [tokens]
    num_experts: int
    k: int

    def __len__(self) -> int:
        return len(self.known)

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = (self.code.tobytes(), self.layers.tobytes(), self.known.tobytes())
        return _coded_routes_from_bytes, (*arrays, self.num_experts, self.k)

    @property
    def num_bytes(self) -> int:
        return self.code.nbytes


def _coded_routes_from_bytes(code: bytes, layers: bytes, known: bytes, num_experts: int, k: int) -> CodedRoutes:
    arrays = np.frombuffer(code, np.uint8), np.frombuffer(layers, np.int32), np.frombuffer(known, np.bool_)
    return CodedRoutes(*arrays, num_experts, k)


@dataclass(slots=True, eq=False)
class Sample:
    """The tokens of one context. All per-token arrays are as long as `token_ids`.

    A conversation of several turns is one sample: what tools and users said in between is masked out. The loop fills in
    the fields from `score` on before the trainer sees the sample.
    """

    prompt: Prompt
    prompt_ids: NDArray[np.int32]  # [prompt]
    token_ids: NDArray[np.int32]  # [answer], end-of-text token included when it was written
    log_probs: NDArray[np.float32]  # [answer], of the engine that wrote it, after temperature; NaN where it did not
    loss_mask: NDArray[np.bool_]  # [answer], True where the model wrote the token and learns from it
    versions: NDArray[np.int32]  # [answer], weight version each token was written with; -1 where none was
    text: str
    finish_reason: FinishReason
    routes: RoutedExperts | CodedRoutes | None = None  # of prompt and answer, where the engine was told to keep them
    id: str = ""  # unique in a run once the sample belongs to a trajectory
    score: Score | None = None  # of its trajectory
    advantages: NDArray[np.float32] | None = None  # [answer], as are the next three
    reference_log_probs: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None  # what the critic expected before each token
    returns: NDArray[np.float32] | None = None  # what it should have expected

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        if not len(self.log_probs) == len(self.loss_mask) == len(self.versions) == length:
            raise ValueError(f"sample of prompt {self.prompt.id}: per-token arrays differ in length")
        if len(self.prompt_ids) == 0 or (length == 0 and self.finish_reason not in ("abort", "error")):
            raise ValueError(f"sample of prompt {self.prompt.id}: has no prompt or no answer tokens")
        if self.routes is not None and len(self.routes) != self.num_tokens:
            raise ValueError(f"sample of prompt {self.prompt.id}: routes and tokens differ in number")
        for name in ("advantages", "reference_log_probs", "values", "returns"):
            array = getattr(self, name)
            if array is not None and len(array) != length:
                raise ValueError(f"sample of prompt {self.prompt.id}: {name} and tokens differ in number")

    def __reduce__(self) -> tuple[Any, ...]:
        # As bytes: they pickle several times faster than small arrays, and Ray has its own work with every array.
        arrays = [
            None if (array := getattr(self, name)) is None else np.asarray(array, dtype).tobytes()
            for name, dtype in _SAMPLE_ARRAYS
        ]
        return _sample_from_bytes, (
            self.prompt,
            self.text,
            self.finish_reason,
            self.routes,
            self.id,
            self.score,
            arrays,
        )

    @property
    def num_tokens(self) -> int:
        """The number of tokens of prompt and answer together."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def num_learnt(self) -> int:
        """The number of tokens that the model wrote."""
        return int(self.loss_mask.sum())

    def staleness(self, step: int) -> NDArray[np.int32]:
        """Return by how many updates the weights of each token [answer] are older than those that the step updates."""
        return step - 1 - self.versions


_SAMPLE_ARRAYS: tuple[tuple[str, Any], ...] = (
    ("prompt_ids", np.int32),
    ("token_ids", np.int32),
    ("log_probs", np.float32),
    ("loss_mask", np.bool_),
    ("versions", np.int32),
    ("advantages", np.float32),
    ("reference_log_probs", np.float32),
    ("values", np.float32),
    ("returns", np.float32),
)


def _sample_from_bytes(
    prompt: Prompt,
    text: str,
    finish_reason: FinishReason,
    routes: RoutedExperts | CodedRoutes | None,
    sample_id: str,
    score: Score | None,
    arrays: Sequence[bytes | None],
) -> Sample:
    read = {
        name: None if data is None else np.frombuffer(data, dtype)
        for (name, dtype), data in zip(_SAMPLE_ARRAYS, arrays, strict=True)
    }
    return Sample(
        prompt,
        text=text,
        finish_reason=finish_reason,
        routes=routes,
        id=sample_id,
        score=score,
        **read,  # type: ignore[arg-type]
    )


@dataclass(slots=True, eq=False)
class Trajectory:
    """One answer to a prompt: one score, and one or more samples (an agent may leave several contexts behind)."""

    id: str
    number: int  # within its group; with the group's seed it decides the random numbers
    samples: list[Sample] = field(default_factory=list)
    score: Score | None = None  # of the graders; or already of the rollout, where tools or environment have failed
    counts: dict[str, int] = field(default_factory=dict)  # of a conversation: turns, and calls of tools by outcome

    @property
    def is_finished(self) -> bool:
        return bool(self.samples) and self.samples[-1].finish_reason != "abort"

    @property
    def last(self) -> Sample:
        """The sample that ends it: the one that graders read."""
        return self.samples[-1]

    def add(self, sample: Sample) -> None:
        """Append a finished sample, or the one that continues an aborted one."""
        if self.samples and self.samples[-1].finish_reason == "abort":
            self.samples.pop()
        sample.id = self.id if not self.samples else f"{self.id}/{len(self.samples)}"
        self.samples.append(sample)


@dataclass(slots=True, eq=False)
class PromptGroup:
    """A prompt, tokenised, and its trajectories: `params.num_answers` of them, which rollout fills in.

    The answers depend on prompt, sampling parameters, seed and weights; never on what else is written with them.
    """

    id: str  # unique in a run
    prompt: Prompt
    prompt_ids: NDArray[np.int32]  # [prompt]
    params: SamplingParams
    seed: int
    trajectories: list[Trajectory] = field(default_factory=list)
    session: str | None = None  # set by the caller: groups of one conversation are best written by one engine
    baseline: float | None = None  # the reward of a greedy answer, where the algorithm wants one

    def __post_init__(self) -> None:
        if not self.trajectories:
            self.trajectories = [Trajectory(f"{self.id}/{n}", n) for n in range(self.params.num_answers)]
        elif len(self.trajectories) != self.params.num_answers:
            raise ValueError(
                f"group {self.id} has {len(self.trajectories)} trajectories for {self.params.num_answers} answers"
            )

    @property
    def is_finished(self) -> bool:
        return all(trajectory.is_finished for trajectory in self.trajectories)

    @property
    def samples(self) -> list[Sample]:
        return [sample for trajectory in self.trajectories for sample in trajectory.samples]


@dataclass(frozen=True, slots=True)
class Score:
    """A grade. `value` is a finite number exactly when `status` is `ok`; a failure is never a zero.

    `answer` is what the grader read as the result of the sample, written one way for all that mean the same: with it
    the sample votes in `maj@k`. None where the grader does not tell. It is no part of the grade.
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    status: ScoreStatus = "ok"
    reason: str = ""
    answer: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.status not in SCORE_STATUSES:
            raise ValueError(f"score status {self.status!r} is not one of {', '.join(SCORE_STATUSES)}")
        if self.status == "ok" and (self.value is None or not abs(self.value) <= FLOAT32_MAX):
            raise ValueError(f"a score with status ok needs a finite value of float32, not {self.value}")
        if self.status != "ok" and self.value is not None:
            raise ValueError(f"a score with status {self.status} has no value, not {self.value}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Score, (self.value, self.parts, self.status, self.reason, self.answer)

    @classmethod
    def failed(cls, status: ScoreStatus, reason: str) -> Score:
        """Return the score of a sample that could not be graded."""
        return cls(None, status=status, reason=reason)
