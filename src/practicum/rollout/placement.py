"""Where replicas live: how many fit, on which places, and a manager over them for the time of a block.

hybrid       the trainer's own processes: one engine in each
colocated    the trainer's places, a process of its own on each, asleep while the trainer learns
standalone   places beside the trainer's, never asleep
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from practicum.config import RolloutConfig
from practicum.controller import (
    Controller,
    RayClassWithInitArgs,
    RayResourcePool,
    WorkerGroup,
    num_replicas,
    places_beside,
    side_by_side,
)
from practicum.errors import PracticumError, WorkerError
from practicum.models import load_config, load_tokenizer, num_cores
from practicum.rollout.delivery import WeightDelivery, WeightsOfTrainer
from practicum.rollout.engines import EngineSettings
from practicum.rollout.manager import RolloutManager
from practicum.rollout.replica import RolloutReplica
from practicum.rollout.worker import RolloutWorker
from practicum.rollout.writing import HandingOut
from practicum.weights import Place

# What waits at a lane beyond what its engine writes at a time, as a share of that. `hf` begins a batch only when the
# one before is done: another whole one has to be there by then.
_WAITING_SHARE = {"hf": 1.0}
_FEW_WAIT = 0.125


class TrainersEnd(WeightsOfTrainer, Protocol):
    def open(self, engines: Sequence[Place]) -> None:
        """Choose a channel that reaches all of them, and make ready to send."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """What replicas need beside their engines."""

    threads: int | None = None
    """Of each on CPUs; None divides a machine's cores among its replicas."""
    start_timeout_s: float = 300.0
    call_timeout_s: float = 1800.0
    num_spared: int = 0
    """standalone: free GPUs that others are going to ask for."""


def hybrid_manager(group: WorkerGroup[RolloutWorker], settings: ReplicaSettings) -> RolloutManager:
    """Over the rollout role of the trainer's group."""
    return RolloutManager(
        [RolloutReplica.hybrid(group, timeout_s=settings.call_timeout_s)],
        HandingOut(None, settings.call_timeout_s),
        delivery=None,
        sleeps=True,
    )


@contextmanager
def open_replicas(
    config: RolloutConfig,
    controller: Controller,
    engine: EngineSettings,
    weights: TrainersEnd,
    settings: ReplicaSettings | None = None,
) -> Iterator[RolloutManager]:
    """A manager over replicas in processes of their own; they end with the block."""
    settings = settings or ReplicaSettings()
    with ExitStack() as stack:
        pool = stack.enter_context(_places(config, controller, settings))
        num = num_replicas(1 if engine.engine == "openai" else config.replicas, pool, "the rollout engine")
        replicas: list[RolloutReplica] = []
        stack.callback(lambda: side_by_side(RolloutReplica.end, replicas))
        with _as_it_is():
            _start(replicas, num, pool, _packed(config, engine, settings, num, pool), settings)
            weights.open([replica.where() for replica in replicas])
            vocab_size = min(
                len(load_tokenizer(engine.model_path)), load_config(engine.model_path).get_text_config().vocab_size
            )
            delivery = WeightDelivery(weights, replicas, vocab_size=vocab_size)
            rules = HandingOut(window(config), settings.call_timeout_s)
            manager = RolloutManager(replicas, rules, delivery=delivery, sleeps=config.placement == "colocated")
        yield stack.enter_context(manager)


def window(config: RolloutConfig) -> int:
    """The most answers that one replica has."""
    return config.max_batch + max(1, int(config.max_batch * _WAITING_SHARE.get(config.engine, _FEW_WAIT)))


def _packed(
    config: RolloutConfig, engine: EngineSettings, settings: ReplicaSettings, num: int, pool: RayResourcePool | None
) -> RayClassWithInitArgs[RolloutWorker]:
    on_node = 1 if pool is None else max(pool.sub_pool(range(num)).process_on_nodes)
    return RayClassWithInitArgs(
        RolloutWorker,
        engine,
        agent=config.agent,
        threads=settings.threads or max(1, num_cores() // on_node),
        is_partial=config.partial,
        timeout_s=settings.call_timeout_s,
    )


def _start(
    replicas: list[RolloutReplica],
    num: int,
    pool: RayResourcePool | None,
    packed: RayClassWithInitArgs[RolloutWorker],
    settings: ReplicaSettings,
) -> None:
    """All at once. Those that are up are in the list, even if another fails."""

    def start(number: int) -> None:
        place = None if pool is None else pool.sub_pool([number])
        times = {"start_timeout_s": settings.start_timeout_s, "timeout_s": settings.call_timeout_s}
        replicas.append(RolloutReplica.placed(number, place, packed, **times))

    side_by_side(start, range(num))
    replicas.sort(key=lambda replica: replica.number)


@contextmanager
def _as_it_is() -> Iterator[None]:
    """What keeps replicas from starting, such as an engine that is not installed, is no matter of one of them."""
    try:
        yield
    except WorkerError as error:
        if isinstance(error.cause, PracticumError):
            raise error.cause from error
        raise


@contextmanager
def _places(
    config: RolloutConfig, controller: Controller, settings: ReplicaSettings
) -> Iterator[RayResourcePool | None]:
    if controller.pool is None or config.placement == "colocated":
        yield controller.pool
    elif config.engine == "openai":  # it only asks others, which takes hardly any room
        with RayResourcePool([1], resources_per_process={"CPU": 0.01}) as pool:
            yield pool
    else:
        with places_beside(
            controller,
            config.replicas,
            key="rollout.placement",
            gpus_each=config.vllm.tensor_parallel if config.engine == "vllm" else 1,
            num_spared=settings.num_spared,
        ) as pool:
            yield pool
