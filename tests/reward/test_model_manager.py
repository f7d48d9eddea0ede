"""Reward models behind a router: in this process, and in processes of a Ray cluster that are killed and stopped."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from practicum.config import RewardModelConfig
from practicum.controller import RayResourcePool
from practicum.controller.loop import run_sync
from practicum.errors import ModelError, ResourceError, RewardError
from practicum.reward import model_manager
from practicum.reward.model_manager import RewardModelManager, check_reward_model, watched
from tests.models import save_classifier
from tests.rollout.server.client import ask, ask_all, score_of

WAIT_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("classifier") / "model", hidden_size=128, num_hidden_layers=4)


@pytest.fixture
def own_folder(folder: Path, tmp_path: Path) -> Path:
    """For a test that spoils it."""
    return Path(shutil.copytree(folder, tmp_path / "model"))


@pytest.fixture
def local(own_folder: Path) -> Iterator[RewardModelManager]:
    """In this process; used from the driver's loop."""
    manager = RewardModelManager(RewardModelConfig(path=str(own_folder)), None, device="cpu")
    run_sync(manager.__aenter__())
    yield manager
    run_sync(manager.close())


@contextmanager
def opened(
    config: RewardModelConfig, pool: RayResourcePool | None = None, device: str = "cpu"
) -> Iterator[RewardModelManager]:
    manager = RewardModelManager(config, pool, device=device)
    run_sync(manager.__aenter__())
    try:
        yield manager
    finally:
        run_sync(manager.close())


@contextmanager
def awake(manager: RewardModelManager) -> Iterator[None]:
    """Awake while this thread does something else: the loop goes on beside it."""
    block = manager.awake()
    run_sync(block.__aenter__())
    try:
        yield
    except BaseException as error:
        assert not run_sync(block.__aexit__(type(error), error, error.__traceback__))
        raise
    else:
        run_sync(block.__aexit__(None, None, None))


def state(manager: RewardModelManager) -> list[str]:
    """What each replica says of itself."""
    return [ask(url, "/health", method="GET")[1]["status"] for url in urls(manager)]


def urls(manager: RewardModelManager) -> list[str]:
    return [worker["url"] for worker in manager.router.workers()]


def score(manager: RewardModelManager, text: str = "1+2=3") -> float:
    return score_of(ask(manager.url, "/classify", {"input": text}, headers=manager.headers))


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.002)


# Before anything starts


def test_a_model_that_can_grade_passes(folder: Path, tiny_model: Path) -> None:
    check_reward_model(RewardModelConfig(path=str(folder)))
    check_reward_model(RewardModelConfig(path=str(tiny_model), kind="generative"))


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: change_config(f, id2label={"0": "a", "1": "b"}), "classifies into 2 labels .* needs exactly 1"),
        (lambda f: change_config(f, architectures=["LlamaForCausalLM"]), "no sequence classifier: .* LlamaForCausalLM"),
        (lambda f: change_config(f, model_type="clvp"), "'clvp', which transformers has no sequence classifier for"),
        (lambda f: (f / "config.json").unlink(), r"config\.json cannot be loaded"),
        (lambda f: [(f / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")], "has no tokenizer"),
    ],
    ids=["two labels", "causal", "no such head", "no config", "no tokenizer"],
)
def test_a_folder_that_is_no_classifier_is_refused(
    own_folder: Path, spoil: Callable[[Path], Any], message: str
) -> None:
    spoil(own_folder)
    config = RewardModelConfig(path=str(own_folder))
    with pytest.raises(ModelError, match=message) as caught:
        RewardModelManager(config, None, device="cpu")
    assert str(own_folder) in str(caught.value)


def test_a_classifier_does_not_judge_in_words(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"writes no text: .*LlamaForSequenceClassification.* kind=classifier"):
        check_reward_model(RewardModelConfig(path=str(folder), kind="generative"))


def test_a_head_that_is_not_in_the_files_is_an_error_of_the_model(own_folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(own_folder / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != "score.weight"}, own_folder / "model.safetensors")
    with (
        pytest.raises(ModelError, match=r"would be random, the first is score\.weight"),
        opened(RewardModelConfig(path=str(own_folder))),
    ):
        raise AssertionError("not reached")


def test_more_replicas_than_places_are_refused_with_the_arithmetic(folder: Path) -> None:
    with pytest.raises(ResourceError, match=r"replicas=3 .* room for 1: lower replicas by 2"):
        RewardModelManager(RewardModelConfig(path=str(folder), replicas=3), None, device="cpu")


# In this process


def test_replicas_sleep_outside_of_the_block(local: RewardModelManager) -> None:
    assert local.num_replicas == 1
    assert state(local) == ["asleep"]
    with awake(local):
        assert state(local) == ["awake"]
        before = score(local)
        with awake(local):
            assert score(local) == before
        assert state(local) == ["awake"]
    assert state(local) == ["asleep"]
    with awake(local):
        assert score(local) == before
    (memory,) = run_sync(local.memory())
    assert memory is not None and memory.weights > 1e6


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_inside_leaves_them_asleep(local: RewardModelManager, error: type[BaseException]) -> None:
    with pytest.raises(error), awake(local):
        score(local)
        raise error
    assert state(local) == ["asleep"]
    with awake(local):
        score(local)


def test_blocks_side_by_side_share_the_time_awake(local: RewardModelManager) -> None:
    with awake(local):
        with awake(local):
            pass
        assert state(local) == ["awake"]  # the other one is not done
    assert state(local) == ["asleep"]

    async def many() -> None:
        async def one() -> None:
            async with local.awake():
                assert (await asyncio.to_thread(state, local)) == ["awake"]

        await asyncio.gather(*(one() for _ in range(5)))

    run_sync(many())
    assert state(local) == ["asleep"]


def test_requests_before_the_block_wait_for_it(local: RewardModelManager) -> None:
    answers: list[float] = []
    asking = threading.Thread(target=lambda: answers.append(score(local)))
    asking.start()
    with awake(local):
        asking.join(WAIT_S)
        assert answers == [score(local)]


def test_if_none_can_wake_up_it_is_an_error_and_they_stay_asleep(local: RewardModelManager, own_folder: Path) -> None:
    kept = (own_folder / "model.safetensors").read_bytes()
    (own_folder / "model.safetensors").unlink()
    with (
        pytest.raises(RewardError, match=r"no replica .* can serve\. replica 0: .*weights cannot be loaded"),
        awake(local),
    ):
        raise AssertionError("not reached")
    assert state(local) == ["asleep"]
    (own_folder / "model.safetensors").write_bytes(kept)
    with awake(local):
        score(local)


def test_standalone_ones_never_sleep(folder: Path) -> None:
    config = RewardModelConfig(path=str(folder), placement="standalone")
    with opened(config) as manager:
        outside = score(manager)
        with awake(manager):
            assert score(manager) == outside
        assert state(manager) == ["awake"]


def test_a_judge_answers_in_words(tiny_model: Path) -> None:
    config = RewardModelConfig(path=str(tiny_model), kind="generative")
    body = {"messages": [{"role": "user", "content": "1+2="}], "max_tokens": 8, "seed": 4, "n": 2}
    with opened(config) as manager:
        replies = []
        for _ in range(2):
            with awake(manager):
                status, reply = ask(manager.url, "/v1/chat/completions", body, headers=manager.headers)
            assert status == 200
            replies.append([choice["message"]["content"] for choice in reply["choices"]])
        assert replies[0] == replies[1]


def test_closed_it_is_gone(folder: Path) -> None:
    with opened(RewardModelConfig(path=str(folder))) as manager:
        router = manager.router.pid  # type: ignore[attr-defined]
        run_sync(manager.close())
    assert not psutil.pid_exists(router)
    with pytest.raises(RewardError, match="has been closed"), awake(manager):
        raise AssertionError("not reached")


# Looking after replicas


class FakeReplica:
    def __init__(self, number: int, *, well: bool) -> None:
        self.number = number
        self.well = well
        self.problem = ""
        self.misses_left = 0
        self.looked_at, self.ended, self.replaced = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.num_replaced = 0

    async def is_well(self) -> bool:
        self.looked_at.set()
        if self.misses_left:
            self.misses_left -= 1
            return False
        return self.well

    async def end(self) -> None:
        self.ended.set()


async def replace_one(replica: Any) -> None:
    replica.num_replaced += 1
    replica.well = True
    replica.replaced.set()


def watch(
    test: Callable[[Sequence[Any]], Awaitable[None]],
    replicas: Sequence[Any],
    monkeypatch: pytest.MonkeyPatch,
    replace: Callable[[Any], Awaitable[None]] = replace_one,
) -> None:
    monkeypatch.setattr(model_manager, "_CHECK_EVERY_S", 0.01)

    async def within() -> None:
        async with asyncio.timeout(WAIT_S), watched(replicas, replace):
            await test(replicas)

    asyncio.run(within())


def test_who_does_not_answer_is_started_again_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replicas: Sequence[Any]) -> None:
        await replicas[1].replaced.wait()
        for other in (replicas[0], replicas[2]):
            await other.looked_at.wait()
        replicas[2].well = False
        await replicas[2].replaced.wait()
        assert replicas[0].num_replaced == 0

    watch(test, [FakeReplica(0, well=True), FakeReplica(1, well=False), FakeReplica(2, well=True)], monkeypatch)


def test_one_missed_look_is_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replicas: Sequence[Any]) -> None:
        (slow,) = replicas
        slow.misses_left = 1
        for _ in range(5):
            slow.looked_at.clear()
            await slow.looked_at.wait()
        assert slow.num_replaced == 0

    watch(test, [FakeReplica(0, well=True)], monkeypatch)


def test_one_that_dies_again_and_again_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def in_vain(replica: Any) -> None:
        replica.num_replaced += 1

    async def test(replicas: Sequence[Any]) -> None:
        await replicas[0].ended.wait()
        assert replicas[0].num_replaced == 2

    watch(test, [FakeReplica(0, well=False)], monkeypatch, in_vain)


def test_a_start_that_fails_ends_the_watch_over_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    async def fail(replica: Any) -> None:
        tried.append(replica)
        raise RewardError("no room")

    async def test(replicas: Sequence[Any]) -> None:
        await replicas[1].replaced.wait()
        assert len(tried) == 1

    async def replace(replica: Any) -> None:
        await (fail if replica.number == 0 else replace_one)(replica)

    watch(test, [FakeReplica(0, well=False), FakeReplica(1, well=False)], monkeypatch, replace)


def test_nothing_is_watched_after_the_block_or_that_has_a_problem_already(monkeypatch: pytest.MonkeyPatch) -> None:
    ill = FakeReplica(2, well=False)
    ill.problem = "does not start"

    async def test(replicas: Sequence[Any]) -> None:
        await replicas[0].looked_at.wait()
        assert len(asyncio.all_tasks()) == 2  # the test and one that looks

    watch(test, [FakeReplica(0, well=True), ill], monkeypatch)
    assert not ill.looked_at.is_set()


# In processes of their own

NUM_REPLICAS = 3
# Longer than half of what a batch may have, so that each is computed alone and its score is the same bit for bit.
TEXTS = [f"{i:03d}+" + "7" * 130 for i in range(200)]
BODIES = [{"input": text} for text in TEXTS]


@pytest.fixture(scope="module")
def pool(ray_session: None) -> Iterator[RayResourcePool]:
    with RayResourcePool([NUM_REPLICAS], resources_per_process={"CPU": 0.5}) as pool:
        yield pool


@pytest.fixture(scope="module")
def spread(folder: Path, pool: RayResourcePool) -> Iterator[RewardModelManager]:
    config = RewardModelConfig(path=str(folder), max_batch_tokens=256)
    with opened(config, pool) as manager:
        yield manager


def pids(manager: RewardModelManager) -> list[int]:
    """Of the processes that listen at the replicas' addresses."""
    connections = psutil.net_connections("tcp")
    listening = {c.laddr.port: c.pid for c in connections if c.laddr and c.status == psutil.CONN_LISTEN}
    found = [listening[int(url.rpartition(":")[2])] for url in urls(manager)]
    assert None not in found
    return [pid for pid in found if pid is not None]


@pytest.mark.slow
def test_there_is_one_replica_for_each_place(spread: RewardModelManager) -> None:
    assert spread.num_replicas == NUM_REPLICAS
    assert len(set(pids(spread))) == NUM_REPLICAS
    assert os.getpid() not in pids(spread)
    assert state(spread) == ["asleep"] * NUM_REPLICAS
    with awake(spread):
        assert state(spread) == ["awake"] * NUM_REPLICAS
    assert all(memory is not None for memory in run_sync(spread.memory()))


@pytest.mark.slow
def test_one_killed_and_one_hung_in_the_middle_change_no_score(
    spread: RewardModelManager, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[tuple[int, Any]] = []
    with caplog.at_level(logging.WARNING, logger="practicum.reward"), awake(spread):
        undisturbed = [score_of(answer) for answer in ask_all(spread.url, "/classify", BODIES, headers=spread.headers)]
        killed, stopped, _ = pids(spread)
        before = {worker["url"]: worker["requests"] for worker in spread.router.workers()}
        asking = threading.Thread(
            target=lambda: answers.extend(ask_all(spread.url, "/classify", BODIES, headers=spread.headers))
        )
        started = time.monotonic()
        asking.start()

        def all_are_at_it() -> bool:
            workers = spread.router.workers()
            return all(worker["in_flight"] and worker["requests"] > before[worker["url"]] for worker in workers)

        wait_until(all_are_at_it, "all replicas have requests in hand")
        os.kill(killed, signal.SIGKILL)
        os.kill(stopped, signal.SIGSTOP)
        asking.join(WAIT_S)
        assert not asking.is_alive()
        print(f"all answered after {time.monotonic() - started:.1f} s")
        assert [score_of(answer) for answer in answers] == undisturbed
        assert time.monotonic() - started < 30.0  # and not the request's 60 s timeout
    wait_until(lambda: not psutil.pid_exists(stopped), "the hung replica is ended, so that it holds no memory")
    assert caplog.text.count("it is started again") == 2
    assert state(spread) == ["asleep"] * NUM_REPLICAS
    with awake(spread):
        assert state(spread) == ["awake"] * NUM_REPLICAS
        wait_until(lambda: all(w["state"] == "up" for w in spread.router.workers()), "all are let in")
        assert [
            score_of(answer) for answer in ask_all(spread.url, "/classify", BODIES[:50], headers=spread.headers)
        ] == undisturbed[:50]
    assert state(spread) == ["asleep"] * NUM_REPLICAS


@pytest.mark.slow
def test_a_restart_that_fails_is_told_and_the_others_go_on(
    own_folder: Path, ray_session: None, caplog: pytest.LogCaptureFixture
) -> None:
    config = RewardModelConfig(path=str(own_folder), replicas=2, placement="standalone")
    with RayResourcePool([2], resources_per_process={"CPU": 0.25}) as pool, opened(config, pool) as manager:
        both = pids(manager)
        kept = (own_folder / "config.json").read_text()
        (own_folder / "config.json").write_text("{}")
        os.kill(both[0], signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(both[0]), "it is dead")
        with caplog.at_level(logging.WARNING, logger="practicum.reward"), awake(manager):
            assert "replica 0 cannot serve, the others go on" in caplog.text
            score(manager)
            assert run_sync(manager.memory())[0] is None
        (own_folder / "config.json").write_text(kept)
        with awake(manager):
            assert len(set(pids(manager))) == 2
        manager_pids = pids(manager)
    wait_until(lambda: not any(map(psutil.pid_exists, manager_pids)), "no process is left")


@pytest.mark.slow
def test_what_does_not_fit_the_pool_is_told_in_words(folder: Path, own_folder: Path, pool: RayResourcePool) -> None:
    with pytest.raises(ResourceError, match=r"replicas=5 .* pool has 3 places, for one replica each: lower .* by 2"):
        RewardModelManager(RewardModelConfig(path=str(folder), replicas=5), pool)
    change_config(own_folder, hidden_size=2**17, intermediate_size=2**19, num_hidden_layers=64)
    with RayResourcePool([2], resources_per_process={"CPU": 0.1}) as small:
        with (
            pytest.raises(ResourceError, match=r"does not fit: 2 replicas x [\d,]+ weights x 4 bytes \(float32\) = "),
            opened(RewardModelConfig(path=str(own_folder)), small),
        ):
            raise AssertionError("not reached")
        assert all(not place.tenants for place in small.places)  # nothing is left on the pool


# On a CUDA device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_asleep_the_gpu_has_its_memory_back(tmp_path: Path, ray_session: None, backend: str) -> None:
    folder = save_classifier(tmp_path, hidden_size=2048, intermediate_size=8192, num_attention_heads=16)
    with ExitStack() as stack:
        pool = stack.enter_context(RayResourcePool([1], use_gpu=True)) if backend == "ray" else None
        config = RewardModelConfig(path=str(folder), dtype="bfloat16")
        manager = stack.enter_context(opened(config, pool, "cuda"))
        scores = []
        for _ in range(2):
            with awake(manager):
                scores.append(
                    [
                        score_of(answer)
                        for answer in ask_all(manager.url, "/classify", BODIES[:1], headers=manager.headers)
                    ]
                )
                (up,) = run_sync(manager.memory())
            (down,) = run_sync(manager.memory())
            assert up is not None and up.device_reserved is not None and up.device_allocated is not None
            assert down is not None and down.device_reserved is not None and down.device_allocated is not None
            assert up.device_reserved - down.device_reserved >= 0.95 * up.weights
            assert up.device_allocated - down.device_allocated >= 0.95 * up.weights
        assert scores[0] == scores[1]
