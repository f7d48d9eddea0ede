"""Reward models in their places: replicas on a pool, a router in front of them, awake only while they grade.

    start ─▶ one replica per place, started side by side ─▶ router in front ─▶ url
    async with manager.awake():   well? else started again ─▶ woken ─▶ router sends … router pauses ─▶ asleep, or ended
                                  meanwhile: one that does not answer is ended, its requests go to others

The router is a process beside the driver: it takes no place of the pool, and the driver outlives every grading. Where
the cluster has several nodes it listens at the driver's address. It and the replicas answer those who send the secret,
and it passes on what graders ask, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Self

from practicum.config import RewardModelConfig
from practicum.controller import RayClassWithInitArgs, RayResourcePool, num_replicas
from practicum.controller.cluster import living_nodes
from practicum.controller.host import host_address
from practicum.errors import ModelError, PracticumError, RewardError, RouterError, WorkerError
from practicum.models import absolute, load_classifier_config, load_config, load_tokenizer
from practicum.reward.replica import PlacedReplica, ReplicaMemory, RewardModelReplica
from practicum.reward.router import Router, RouterHandle
from practicum.secret import headers_for, new_secret

log = logging.getLogger("practicum.reward")
_DRAIN_S = 2.0
_MOST_IN_FLIGHT = 32  # requests that a replica has: a batch, and not so many that the last waits for minutes
_CHECK_EVERY_S = 1.0
_MOST_MISSES = 2
_MOST_REPLACEMENTS = 2
# What graders ask; not what puts a replica to sleep or gives it other weights.
_PATHS = ("/classify", "/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/metrics")


def check_reward_model(config: RewardModelConfig) -> None:
    """Raise ModelError when config.json or the tokenizer alone tell that the model cannot grade. Starts nothing."""
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
    """Replicas of one reward model behind `url`: `async with RewardModelManager(config, pool) as models:` starts them.
    Grade inside `async with models.awake():`.

    With a pool each replica has a place of it and a process of its own; without one there is a single replica in this
    process, on `device`. Colocated replicas are asleep outside of `awake`, standalone ones never sleep.
    Questions are answered to those who send `headers`; without a `secret` of the run it makes one of its own.
    """

    def __init__(
        self,
        config: RewardModelConfig,
        pool: RayResourcePool | None,
        *,
        device: str = "auto",
        secret: str | None = None,
        log_dir: Path | None = None,
    ) -> None:
        self._config = config = config.model_copy(update={"path": absolute(config.path)})
        check_reward_model(config)
        self._secret = new_secret() if secret is None else secret
        self.sleeps = config.placement == "colocated"
        """Whether they are asleep outside of `awake`."""
        self.num_replicas = num_replicas(config.replicas, pool, "the reward model")
        self._pool = pool
        self._router_log = None if log_dir is None else log_dir / "reward-model-router.log"
        self._device = device if pool is None else "cuda" if pool.use_gpu else "cpu"
        self._replicas: list[PlacedReplica] = []
        self._listed: dict[int, str] = {}  # by the replica's number, its address as the router knows it
        self._router: RouterHandle | None = None
        self._changing = asyncio.Lock()  # falling asleep and waking come one after another
        self._num_inside = 0
        self._watch = AsyncExitStack()

    @property
    def url(self) -> str:
        """The router's address, where questions go."""
        return self.router.url

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers that questions must carry."""
        return headers_for(self._secret, server=True)

    @property
    def router(self) -> RouterHandle:
        """The router in front: `router.workers()`, `router.metrics()`."""
        if self._router is None:
            raise RewardError("this RewardModelManager has been closed")
        return self._router

    async def __aenter__(self) -> Self:
        is_spread = self._pool is not None and len(living_nodes()) > 1
        try:
            await self._start_replicas(is_spread)
            self._listed = {replica.number: replica.url for replica in self._replicas if replica.url is not None}
            urls = list(self._listed.values())
            self._router = await _start_router(self._config, urls, is_spread, self._secret, self._router_log)
            if self.sleeps:
                await asyncio.to_thread(self._router.pause)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the router and the replicas. Closing twice does nothing."""
        await self._watch.aclose()
        async with AsyncExitStack() as stack:  # all are ended, even if one raises
            for replica in self._replicas:
                stack.push_async_callback(replica.end)
            if self._router is not None:
                stack.push_async_callback(asyncio.to_thread, self._router.stop)
            self._replicas, self._router = [], None

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Let replicas serve inside the block. However it is left, those that sleep are asleep after it, or ended.

        Dead and hanging replicas are started again first. The log names one that cannot be, and the others go on;
        it is a `RewardError` if none is left. Blocks may be nested, and open side by side.
        """
        async with self._changing:
            if not self._num_inside:
                try:
                    await self._begin()
                except BaseException:
                    await self._end()
                    raise
            self._num_inside += 1
        try:
            yield
        finally:
            async with self._changing:
                self._num_inside -= 1
                if not self._num_inside:
                    await self._end()

    async def memory(self) -> list[ReplicaMemory | None]:
        """Return what each replica holds; None for one that is not there."""
        return await asyncio.gather(*(replica.memory() for replica in self._replicas))

    async def _start_replicas(self, is_spread: bool) -> None:
        config, pool, num = self._config, self._pool, self.num_replicas
        packed = RayClassWithInitArgs(
            RewardModelReplica,
            config,
            device=self._device,
            on_node=None if pool is None else max(pool.sub_pool(range(num)).process_on_nodes),
            public=is_spread,
            asleep=self.sleeps,
            secret=self._secret,
        )
        places = [None if pool is None else pool.sub_pool([number]) for number in range(num)]
        started = await asyncio.gather(
            *(PlacedReplica.start(n, place, packed, config.start_timeout_s) for n, place in enumerate(places)),
            return_exceptions=True,
        )
        self._replicas = [replica for replica in started if isinstance(replica, PlacedReplica)]
        error = next((one for one in started if isinstance(one, BaseException)), None)
        if isinstance(error, WorkerError) and isinstance(error.cause, PracticumError):
            raise error.cause from error  # such as a model that does not fit: no matter of one replica
        if error is not None:
            raise error

    async def _begin(self) -> None:
        router = self.router
        await asyncio.gather(*map(self._bring_up, self._replicas))
        ready = [replica for replica in self._replicas if not replica.problem]
        if not ready:
            problems = "; ".join(f"replica {replica.number}: {replica.problem}" for replica in self._replicas)
            raise RewardError(f"no replica of the reward model can serve. {problems}")
        for replica in ready:
            await asyncio.to_thread(router.resume, self._listed[replica.number])
        await self._watch.enter_async_context(watched(self._replicas, self._replace))

    async def _replace(self, replica: PlacedReplica) -> None:
        """Start a replica again in the middle of the work: the others take its requests until it is back."""
        await self._unlist(replica)  # first: Ray takes seconds to kill a process that hangs
        await replica.end()
        await self._bring_up(replica)
        if not replica.problem:
            await asyncio.to_thread(self.router.resume, self._listed[replica.number])

    async def _bring_up(self, replica: PlacedReplica) -> None:
        replica.problem = ""
        try:
            if replica.number not in self._listed or not await replica.is_well():
                log.warning("reward-model replica %d is gone or hangs: it is started again", replica.number)
                await self._restart(replica)
            if self.sleeps:
                await replica.wake_up()
        except PracticumError as error:
            replica.problem = str(error)
            log.warning("reward-model replica %d cannot serve, the others go on: %s", replica.number, error)

    async def _restart(self, replica: PlacedReplica) -> None:
        router = self.router
        await self._unlist(replica)
        url = await replica.restart()
        await asyncio.to_thread(router.add, url)
        self._listed[replica.number] = url
        if self.sleeps:
            await asyncio.to_thread(router.pause, url)

    async def _end(self) -> None:
        try:
            await self._watch.aclose()
        finally:
            for replica in self._replicas:
                if replica.url is None:
                    await self._unlist(replica)
            if self.sleeps and self._router is not None:
                try:
                    await asyncio.to_thread(self._router.pause)
                except RouterError as error:
                    log.warning("the router before the reward models cannot be paused: %s", error)
                await asyncio.gather(*(self._put_to_sleep(one) for one in self._replicas if one.url is not None))

    async def _put_to_sleep(self, replica: PlacedReplica) -> None:
        """Leave it asleep, or ended: in either case it holds none of the device."""
        problem = "does not answer"
        if await replica.is_well():
            try:
                return await replica.sleep()
            except PracticumError as error:
                problem = f"did not fall asleep: {error}"
        log.warning("reward-model replica %d is ended, to be started again when needed: %s", replica.number, problem)
        await self._unlist(replica)
        await replica.end()

    async def _unlist(self, replica: PlacedReplica) -> None:
        url = self._listed.pop(replica.number, None)
        if url is not None and self._router is not None:
            with suppress(RouterError):  # it may be the router that is gone; the next question will show it
                await asyncio.to_thread(self._router.remove, url)


@asynccontextmanager
async def watched(
    replicas: Sequence[PlacedReplica], replace: Callable[[PlacedReplica], Awaitable[None]]
) -> AsyncIterator[None]:
    """Look after replicas while they work: `replace` is to end one that hangs, and start it again.

    A router cannot tell a replica that hangs from one that is busy, so that requests would wait there until their
    timeout. We can: a replica of ours answers `/health` in the middle of a forward pass. One that does not, twice in a
    row, is replaced; its connections break, and the router sends its requests to the others, or to the new one.
    """
    is_over = asyncio.Event()

    async def look_after(replica: PlacedReplica) -> None:
        misses = replacements = 0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_EVERY_S):
                    await is_over.wait()
                    return
            misses = 0 if await replica.is_well() else misses + 1
            if misses < _MOST_MISSES:
                continue
            if replacements == _MOST_REPLACEMENTS:
                log.warning("reward-model replica %d has died again and again: it stays away", replica.number)
                await replica.end()
                return
            misses, replacements = 0, replacements + 1
            try:
                await replace(replica)
            except PracticumError as error:
                log.warning("reward-model replica %d cannot be started again: %s", replica.number, error)
                return

    tasks = [asyncio.ensure_future(look_after(replica)) for replica in replicas if not replica.problem]
    try:
        yield
    finally:
        is_over.set()
        await asyncio.gather(*tasks)  # a look, and a start, have deadlines of their own


async def _start_router(
    config: RewardModelConfig, urls: Sequence[str], is_spread: bool, secret: str, log: Path | None
) -> RouterHandle:
    router = Router(
        urls,
        host=host_address() if is_spread else "127.0.0.1",
        token=secret,
        token_for="all",
        paths=_PATHS,
        max_in_flight=_MOST_IN_FLIGHT,
        response_timeout_s=config.request_timeout_s,
        wait_timeout_s=config.start_timeout_s,  # as long as replicas may take to come back
        drain_timeout_s=_DRAIN_S,
        retry_share=1.0,  # all requests of a replica that hangs must be able to go elsewhere at once
    )
    return await router.start_process_async(log=log)
