from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from practicum.config import RewardModelConfig
from practicum.controller import LocalWorkerGroup, RayClassWithInitArgs
from practicum.errors import ResourceError, WorkerError
from practicum.reward.replica import PlacedReplica, RewardModelReplica
from tests.models import save_classifier
from tests.reward.fakes import run
from tests.rollout.server.client import ask, score_of

SENT = {"Authorization": "Bearer s"}


def start(config: RewardModelConfig, *, asleep: bool = False) -> LocalWorkerGroup[RewardModelReplica]:
    packed = RayClassWithInitArgs(
        RewardModelReplica, config, device="cpu", on_node=None, public=False, asleep=asleep, secret="s"
    )
    return LocalWorkerGroup(packed)


@pytest.fixture(scope="module")
def replica(classifier_folder: Path) -> Iterator[LocalWorkerGroup[RewardModelReplica]]:
    with start(RewardModelConfig(path=str(classifier_folder))) as group:
        yield group


def test_it_serves_at_its_address_and_sleeps(replica: LocalWorkerGroup[RewardModelReplica]) -> None:
    url = replica.execute_rank_zero(RewardModelReplica.address)
    before = score_of(ask(url, "/classify", {"input": "1+2=3"}, headers=SENT))
    replica.execute_all(RewardModelReplica.sleep)
    assert ask(url, "/classify", {"input": "1+2=3"}, headers=SENT)[0] == 503
    replica.execute_all(RewardModelReplica.wake_up)
    assert score_of(ask(url, "/classify", {"input": "1+2=3"}, headers=SENT)) == before


@pytest.mark.parametrize("closes_inside", [True, False])
def test_it_is_closed_wherever_its_loop_is(classifier_folder: Path, closes_inside: bool) -> None:
    group = start(RewardModelConfig(path=str(classifier_folder)))

    async def main() -> str:
        url = await group.execute_rank_zero_async(RewardModelReplica.address)
        score_of(await asyncio.to_thread(ask, url, "/classify", {"input": "1+2=3"}, headers=SENT))
        if closes_inside:
            await asyncio.to_thread(group.shutdown)
        return url

    url = asyncio.run(main())
    group.shutdown()
    with pytest.raises(OSError):
        ask(url, "/health", method="GET")


def test_it_tells_its_memory(replica: LocalWorkerGroup[RewardModelReplica]) -> None:
    memory = replica.execute_rank_zero(RewardModelReplica.memory)
    assert memory.weights > 300_000
    assert memory.host_rss > 50e6
    assert memory.device_allocated is None and memory.device_reserved is None


def test_a_causal_model_judges_in_words(tiny_model: Path) -> None:
    with start(RewardModelConfig(path=str(tiny_model), kind="generative"), asleep=True) as group:
        url = group.execute_rank_zero(RewardModelReplica.address)
        body = {"messages": [{"role": "user", "content": "1+2="}], "max_tokens": 8, "seed": 1}
        assert ask(url, "/v1/chat/completions", body, headers=SENT)[0] == 503
        group.execute_all(RewardModelReplica.wake_up)
        status, reply = ask(url, "/v1/chat/completions", body, headers=SENT)
        assert status == 200
        assert reply["usage"]["completion_tokens"] <= 8


def test_a_model_larger_than_the_machine_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path)
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 2**17, "intermediate_size": 2**19, "num_hidden_layers": 64}
    (folder / "config.json").write_text(json.dumps(config))
    arithmetic = r"does not fit: [\d,]+ weights x 2 bytes \(bfloat16\) = .* GB, and cpu has .* GB in all"
    with pytest.raises(WorkerError, match=arithmetic) as caught:
        start(RewardModelConfig(path=str(folder), dtype="bfloat16"))
    assert isinstance(caught.value.cause, ResourceError)


def test_the_life_of_a_placed_replica(classifier_folder: Path) -> None:
    config = RewardModelConfig(path=str(classifier_folder))
    packed = RayClassWithInitArgs(
        RewardModelReplica, config, device="cpu", on_node=None, public=False, asleep=True, secret="s"
    )

    async def test() -> None:
        replica = await PlacedReplica.start(3, None, packed, timeout_s=60.0)
        try:
            first = replica.url
            assert first is not None
            assert await replica.is_well()  # asleep as it is
            await replica.wake_up()
            assert (await asyncio.to_thread(ask, first, "/health", method="GET"))[1] == {"status": "awake"}
            await replica.sleep()
            assert (await asyncio.to_thread(ask, first, "/health", method="GET"))[1] == {"status": "asleep"}
            await replica.end()
            assert (replica.url, await replica.is_well(), await replica.memory()) == (None, False, None)
            await replica.restart()
            assert await replica.is_well()
            memory = await replica.memory()
            assert memory is not None and memory.weights > 0
        finally:
            await replica.end()
            await replica.end()

    run(test)
