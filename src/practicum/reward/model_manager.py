"""Reward models in their places: replicas on a pool, a router in front of them, awake only while they grade.

    check ─▶ one replica per place, started side by side ─▶ router in front ─▶ url
    with manager.awake():   well? else started again ─▶ woken ─▶ router sends … router pauses ─▶ asleep, or ended
                            meanwhile: who does not answer is ended, and the router sends its requests to others

The router is a process beside the driver: it takes no place of the pool, and the driver outlives every grading. Where
the cluster has several nodes it listens at the driver's address, with a token for its control plane.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Self

from practicum.config import RewardModelConfig
from practicum.controller import RayClassWithInitArgs, RayResourcePool, num_replicas, side_by_side
from practicum.controller.host import host_address
from practicum.controller.cluster import living_nodes
from practicum.errors import ModelError, PracticumError, RewardError, RouterError, WorkerError
from practicum.models import absolute, load_classifier_config, load_config, load_tokenizer
from practicum.reward.router import Router, RouterHandle
from practicum.reward.serving import PlacedReplica, ReplicaMemory, RewardModelReplica, Watch

log = logging.getLogger("practicum.reward")
_DRAIN_S = 2.0
_MOST_IN_HAND = 32  # requests that a replica has: a batch, and not so many that the last waits for minutes


def check_reward_model(config: RewardModelConfig) -> None:
    """A `ModelError` when config.json or the tokenizer alone tell that the model cannot grade. Starts nothing."""
    if config.kind == "classifier":
        load_classifier_config(config.path)
    else:
        named = load_config(config.path).architectures or []
        if named and all(name.endswith("ForSequenceClassification") for name in named):
            raise ModelError(
                f"model {config.path!r} writes no text: its config.json says {', '.join(named)}. It can grade with "
                "kind=classifier."
            )
    load_tokenizer(config.path, for_writing=config.kind == "generative")


class RewardModelManager:
    """Replicas of one reward model behind `url`. Grade inside `with manager.awake():`.

    With a pool each replica has a place of it and a process of its own; without one there is a single replica in this
    process, on `device`. Colocated replicas are asleep outside of `awake`, standalone ones never sleep.
    """

    def __init__(self, config: RewardModelConfig, pool: RayResourcePool | None, *, device: str = "auto") -> None:
        config = config.model_copy(update={"path": absolute(config.path)})
        check_reward_model(config)
        self.sleeps = config.placement == "colocated"
        """Whether they are asleep outside of `awake`."""
        self._lock = threading.Lock()
        self._num_inside = 0
        self._replicas: list[PlacedReplica] = []
        self._listed: dict[int, str] = {}  # by the replica's number, its address as the router knows it
        self._router: RouterHandle | None = None
        self._watch = ExitStack()
        num = num_replicas(config.replicas, pool, "the reward model")
        is_spread = pool is not None and len(living_nodes()) > 1
        try:
            self._start_replicas(config, pool, num, device, is_spread)
            self._listed = {replica.number: replica.url for replica in self._replicas if replica.url is not None}
            self._router = _start_router(config, list(self._listed.values()), is_spread)
            if self.sleeps:
                self._router.pause()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """Where to ask: the router's address."""
        return self._running_router.url

    @property
    def router(self) -> RouterHandle:
        """Who is behind it and how they are: `router.workers()`, `router.metrics()`."""
        return self._running_router

    @property
    def num_replicas(self) -> int:
        return len(self._replicas)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Replicas serve inside the block. However it is left, those that sleep are asleep after it, or ended.

        Dead and hanging replicas are started again first. One that cannot be is told to the log, and the others go on;
        it is a `RewardError` if none is left. Blocks may be nested and entered by several threads.
        """
        with self._lock:
            if not self._num_inside:
                try:
                    self._begin()
                except BaseException:
                    self._end()
                    raise
            self._num_inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                if not self._num_inside:
                    self._end()

    def memory(self) -> list[ReplicaMemory | None]:
        """Of each replica; None for one that is not there."""
        return [replica.memory() for replica in self._replicas]

    def close(self) -> None:
        """End the router and the replicas. Closing twice does nothing."""
        self._watch.close()
        with ExitStack() as stack:  # all are ended, even if one raises
            for replica in self._replicas:
                stack.callback(replica.end)
            if self._router is not None:
                stack.callback(self._router.stop)
            self._replicas, self._router = [], None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def _running_router(self) -> RouterHandle:
        if self._router is None:
            raise RewardError("this RewardModelManager has been closed")
        return self._router

    def _start_replicas(
        self, config: RewardModelConfig, pool: RayResourcePool | None, num: int, device: str, is_spread: bool
    ) -> None:
        if pool is not None:
            device = "cuda" if pool.use_gpu else "cpu"
        packed = RayClassWithInitArgs(
            RewardModelReplica,
            config,
            device=device,
            on_node=None if pool is None else max(pool.sub_pool(range(num)).process_on_nodes),
            public=is_spread,
            asleep=self.sleeps,
        )

        def start(number: int) -> None:
            place = None if pool is None else pool.sub_pool([number])
            self._replicas.append(PlacedReplica(number, place, packed, config.start_timeout_s))

        try:
            side_by_side(start, range(num))
        except WorkerError as error:
            if isinstance(error.cause, PracticumError):  # such as a model that does not fit: no matter of one replica
                raise error.cause from error
            raise
        self._replicas.sort(key=lambda replica: replica.number)

    def _begin(self) -> None:
        router = self._running_router
        side_by_side(self._bring_up, self._replicas)
        ready = [replica for replica in self._replicas if not replica.problem]
        if not ready:
            told = "; ".join(f"replica {replica.number}: {replica.problem}" for replica in self._replicas)
            raise RewardError(f"no replica of the reward model can serve. {told}")
        for replica in ready:
            router.resume(self._listed[replica.number])
        self._watch.enter_context(Watch(self._replicas, self._replace))

    def _replace(self, replica: PlacedReplica) -> None:
        """In the middle of the work: the others take its requests until it is back."""
        replica.end()
        self._bring_up(replica)
        if not replica.problem:
            self._running_router.resume(self._listed[replica.number])

    def _bring_up(self, replica: PlacedReplica) -> None:
        replica.problem = ""
        try:
            if replica.number not in self._listed or not replica.is_well():
                log.warning("reward-model replica %d is gone or hangs: it is started again", replica.number)
                self._restart(replica)
            if self.sleeps:
                replica.wake_up()
        except PracticumError as error:
            replica.problem = str(error)
            log.warning("reward-model replica %d cannot serve, the others go on: %s", replica.number, error)

    def _restart(self, replica: PlacedReplica) -> None:
        router = self._running_router
        self._strike_off(replica)
        url = replica.restart()
        router.add(url)
        self._listed[replica.number] = url
        if self.sleeps:
            router.pause(url)

    def _end(self) -> None:
        try:
            self._watch.close()
        finally:
            for replica in self._replicas:
                if replica.url is None:
                    self._strike_off(replica)
            if self.sleeps and self._router is not None:
                self._put_all_to_sleep(self._router)

    def _put_all_to_sleep(self, router: RouterHandle) -> None:
        try:
            router.pause()
        except RouterError as error:
            log.warning("the router before the reward models cannot be paused: %s", error)
        side_by_side(self._put_to_sleep, [replica for replica in self._replicas if replica.url is not None])

    def _put_to_sleep(self, replica: PlacedReplica) -> None:
        """Asleep, or ended: in either case it holds none of the device."""
        problem = "does not answer"
        if replica.is_well():
            try:
                return replica.sleep()
            except PracticumError as error:
                problem = f"did not fall asleep: {error}"
        log.warning("reward-model replica %d is ended, to be started again when needed: %s", replica.number, problem)
        self._strike_off(replica)
        replica.end()

    def _strike_off(self, replica: PlacedReplica) -> None:
        url = self._listed.pop(replica.number, None)
        if url is not None and self._router is not None:
            with suppress(RouterError):  # it may be the router that is gone; whoever asks it will see
                self._router.remove(url)


def _start_router(config: RewardModelConfig, urls: Sequence[str], is_spread: bool) -> RouterHandle:
    router = Router(
        urls,
        host=host_address() if is_spread else "127.0.0.1",
        token=secrets.token_urlsafe() if is_spread else None,
        max_in_flight=_MOST_IN_HAND,
        response_timeout_s=config.request_timeout_s,
        wait_timeout_s=config.start_timeout_s,  # as long as replicas may take to come back
        drain_timeout_s=_DRAIN_S,
        retry_share=1.0,  # of what a hanging replica has in hand, all must be able to go elsewhere at once
    )
    return router.start_process()
