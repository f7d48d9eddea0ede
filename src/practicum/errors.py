"""The exception tree. Each class can cross a process boundary, and each message says what happened, where, what to do.

PracticumError
├── ConfigError        a key, a value or a combination of values in the config
├── DataError          a prompt file: missing, empty, or a record that cannot be used
├── ModelError         a model folder or hub name that cannot be loaded or trained
├── RewardError        a reward function that cannot be used, or too many samples that could not be graded
├── RolloutError       a request that an engine cannot answer, or an engine that cannot be used
│   ├── ConversationError  a conversation that no engine could continue
│   └── WeightsGone        weights of a version that the trainer has learnt on from
├── ToolError          raised by tools, for what the model that called them did wrong
├── RouterError        a router that cannot be started, asked or told as written
├── ReplayError        experts that cannot be recorded or replayed, or a recording that cannot be read or written
├── TrainingError      a loss or gradient that is no longer a number
├── CheckpointError    a run folder that cannot be written, resumed or read
├── ResourceError      more processes or accelerators asked for than the machine or cluster has
├── ProcessError       processes that may be lost cannot be started, or the work not be made ready in them
├── CallError          a call to a group that cannot be made: its method, role, mesh or arguments
├── ReplyError         replies of a call that ran but cannot be joined
└── WorkerError        a worker raised; carries group, rank, node, pid and the remote traceback
    ├── WorkerDied     its process is gone
    │   └── NodeLost   and so is the machine it ran on
    └── DeadlineError  a call or a start passed its deadline; carries the ranks that were late, and stacks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class PracticumError(Exception):
    """Base of every error Practicum raises on purpose."""


class ConfigError(PracticumError, ValueError):
    """The configuration cannot be used as written."""


class DataError(PracticumError, ValueError):
    """A prompt file cannot be used as written."""


class ModelError(PracticumError, ValueError):
    """A model or its tokenizer cannot be used."""


class RewardError(PracticumError, ValueError):
    """Answers cannot be graded."""


class RolloutError(PracticumError, ValueError):
    """Answers cannot be written: by this engine, to this request."""


class ConversationError(RolloutError):
    """A conversation cannot continue, for a reason that is no engine's: no other engine would do better."""


class ToolError(PracticumError, ValueError):
    """Raised by a tool for a mistake of the model, which reads the message. Any other exception says that the tool
    itself has failed."""


class WeightsGone(RolloutError):
    """The trainer has learnt since it sent this version: whoever comes late for it has to wait for the next."""


class ReplayError(PracticumError, ValueError):
    """Routed experts cannot be recorded or replayed: for this model, from this file."""


class RouterError(PracticumError, ValueError):
    """A router cannot be started, or cannot do what it was told."""


class TrainingError(PracticumError):
    """The numbers of the training have gone wrong; going on would only spoil the weights."""


class CheckpointError(PracticumError):
    """A run folder or one of its checkpoints cannot be used."""


class ResourceError(PracticumError):
    """The machine or cluster does not have what was asked for."""


class ProcessError(PracticumError):
    """Processes that hang or crash without harm cannot do this work."""


class CallError(PracticumError, ValueError):
    """A call to a group cannot be made as written. Nothing was sent to any worker."""


class ReplyError(PracticumError, ValueError):
    """All ranks have run the call, but their replies cannot be joined to one."""


class WorkerError(PracticumError):
    """A worker of a group failed. `cause` is the exception it raised, when that could be carried over; `others` are
    failures of other ranks that came with it."""

    def __init__(
        self,
        message: str,
        *,
        group: str,
        ranks: Sequence[int],
        node: str | None = None,
        pid: int | None = None,
        remote_traceback: str | None = None,
        cause: BaseException | None = None,
        others: Sequence[WorkerError] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.group = group
        self.ranks = tuple(ranks)
        self.node = node
        self.pid = pid
        self.remote_traceback = remote_traceback
        self.cause = cause
        self.others = tuple(others)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_worker_error, (
            type(self),
            self.message,
            {k: v for k, v in vars(self).items() if k not in ("message", "__notes__")},
        )


class WorkerDied(WorkerError):
    """The process of a worker ended while it was needed."""


class NodeLost(WorkerDied):
    """The node of a worker left the cluster or cannot be reached."""


class DeadlineError(WorkerError):
    """A call or a start took longer than its deadline; `ranks` are the ones that had not answered.

    `stacks` tells for every rank of the group what its process was doing just then.
    """

    def __init__(self, message: str, *, stacks: Mapping[int, str] | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.stacks = dict(stacks or {})


def _rebuild_worker_error(cls: type[WorkerError], message: str, fields: dict[str, Any]) -> WorkerError:
    return cls(message, **fields)
