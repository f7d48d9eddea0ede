from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from practicum.adapters import LoneAdapters, adapters_alone, merged_weights
from practicum.errors import RolloutError
from practicum.models import load_model
from practicum.rollout.openai import OpenAIRollout
from practicum.types import PromptGroup, SamplingParams
from practicum.weights import WeightUpdate
from tests.rollout import asking
from tests.rollout.asking import run, written
from tests.rollout.contract import EngineContract
from tests.rollout.fake_completions import FakeServer
from tests.test_adapters import RANK4, stirred


def ask(seed: int = 0, num_answers: int = 1) -> PromptGroup:
    return asking.ask(SamplingParams(6, num_answers=num_answers), seed=seed)


class ModelServer(FakeServer):
    """As `practicum serve` with a transformers model."""

    _loading = threading.Lock()  # transformers loads one model at a time; real servers are processes of their own

    def __init__(self, path: str) -> None:
        super().__init__("practicum", delay_s=0.001, max_tokens=128, version=0, logits=self._logits)
        self._load({"path": path, "version": 0})
        self.on_update = self._load

    def _load(self, body: dict[str, Any]) -> None:
        with self._loading:
            self._model = load_model(body["path"]).eval()
        self._known: dict[tuple[int, ...], np.ndarray] = {}
        self.version = body["version"]

    @torch.no_grad()
    def _logits(self, ids: list[int]) -> np.ndarray:
        key = tuple(ids)
        if key not in self._known:
            logits: np.ndarray = (
                self._model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double().numpy()
            )
            self._known[key] = logits
        return self._known[key]


class TestContract(EngineContract):
    draws_like_us = False

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tiny_model: Path) -> Iterator[OpenAIRollout]:
        with ModelServer(str(tiny_model)) as server:
            engine = OpenAIRollout([server.url], model_path=str(tiny_model))
            run(engine.resume())
            yield engine
            run(engine.close())


def test_a_server_that_takes_new_weights_is_not_taken_for_another(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has them a while before it says so, and the engine checks its servers every now and then."""
    monkeypatch.setattr("practicum.rollout.openai._INTERVAL_S", 0.3)
    with FakeServer("practicum", version=0) as server:

        def load(body: dict[str, Any]) -> None:
            server.version = body["version"]
            time.sleep(1.0)

        server.on_update = load
        engine = OpenAIRollout([server.url], model_path=str(tiny_model))
        run(engine.resume())
        for version in (1, 2):
            run(
                engine.update_weights(
                    WeightUpdate(version, load_model(str(tiny_model)).named_parameters(), shared=False)
                )
            )
            (sample,) = written(engine, ask())
            assert set(sample.versions.tolist()) == {version}
        run(engine.close())


def test_it_sleeps_wakes_up_and_takes_weights_where_the_server_can(tiny_model: Path) -> None:
    found: list[dict[str, torch.Tensor]] = []
    with FakeServer("practicum", version=0) as one, FakeServer("practicum", version=0) as other:
        engine = OpenAIRollout([one.url, other.url + "/v1"], model_path=str(tiny_model))
        run(engine.resume())
        model = load_model(str(tiny_model))
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        # While the folder is there.
        one.on_update = lambda body: found.append(dict(load_model(body["path"]).named_parameters()))
        run(engine.update_weights(WeightUpdate(3, model.named_parameters(), shared=False)))
        run(engine.release())
        with pytest.raises(AssertionError, match="resume"):
            written(engine, ask())
        run(engine.resume())
        run(engine.close())
    for server in (one, other):
        assert [path for path, _ in server.calls] == ["/wake_up", "/update_weights", "/sleep", "/wake_up"]
        assert server.calls[1][1]["version"] == 3
    assert not Path(one.calls[1][1]["path"]).exists()
    for name, parameter in model.named_parameters():
        assert torch.equal(found[0][name], parameter), name


def test_adapters_go_out_alone_and_the_server_merges_them(tiny_model: Path) -> None:
    learner = stirred(tiny_model, RANK4)
    with ModelServer(str(tiny_model)) as server:
        engine = OpenAIRollout([server.url], model_path=str(tiny_model), adapters=LoneAdapters(str(tiny_model), RANK4))
        try:
            run(engine.resume())
            run(engine.update_weights(WeightUpdate(1, adapters_alone(learner, torch.Tensor.detach), shared=False)))
            (sample,) = written(engine, ask())
        finally:
            run(engine.close())
        expected = dict(merged_weights(learner, torch.Tensor.detach))
        assert set(sample.versions.tolist()) == {1}
        assert all(torch.equal(own, expected[name]) for name, own in server._model.named_parameters())


def test_other_servers_take_no_weights_and_need_not_know_how_to_sleep(tiny_model: Path) -> None:
    with FakeServer("texts", tokenizer=None, owner="somebody", log_probs="raw") as bare:
        from practicum.models import load_tokenizer

        bare.tokenizer = load_tokenizer(str(tiny_model))
        engine = OpenAIRollout([bare.url], model_path=str(tiny_model))
        run(engine.resume())
        assert len(written(engine, ask())) == 1
        with pytest.raises(RolloutError, match=r"cannot be given new weights.*practicum serve"):
            run(engine.update_weights(WeightUpdate(1, [], shared=False)))
        run(engine.release())
        run(engine.close())
    # vLLM's own /update_weights means something else.
    with FakeServer("vllm") as vllm:
        engine = OpenAIRollout([vllm.url], model_path=str(tiny_model))
        run(engine.resume())
        with pytest.raises(RolloutError, match="cannot be given new weights"):
            run(engine.update_weights(WeightUpdate(1, [], shared=False)))
        assert "/update_weights" not in [path for path, _ in vllm.calls]
        run(engine.close())


def test_requests_go_to_the_servers_in_turn_or_all_to_the_router(tiny_model: Path) -> None:
    with FakeServer() as one, FakeServer() as other, FakeServer() as router:
        engine = OpenAIRollout([one.url, other.url], model_path=str(tiny_model))
        run(engine.resume())
        for server in (one, other):
            server.requests.clear()
        written(engine, *(ask(seed) for seed in range(6)))
        assert [len(one.requests), len(other.requests)] == [3, 3]
        run(engine.close())
        engine = OpenAIRollout(
            [one.url, other.url], model_path=str(tiny_model), router=router.url, router_token="secret"
        )
        run(engine.resume())
        for server in (one, other):
            server.requests.clear()
        written(engine, *(ask(seed) for seed in range(6)))
        assert [len(one.requests), len(other.requests), len(router.requests)] == [0, 0, 6]
        assert router.router_tokens == {"secret"}
        assert one.router_tokens == other.router_tokens == {None}
        run(engine.close())


def test_another_server_gets_what_one_failed_at(tiny_model: Path) -> None:
    with FakeServer() as one, FakeServer() as other:
        engine = OpenAIRollout([one.url, other.url], model_path=str(tiny_model))
        run(engine.resume())
        one.faults = ["500"]
        assert len(written(engine, *(ask(seed) for seed in range(4)))) == 4
        run(engine.close())


def test_the_token_is_sent(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "open sesame")
    with FakeServer(token="open sesame") as server:
        engine = OpenAIRollout([server.url], model_path=str(tiny_model), api_key_env="SOME_KEY")
        run(engine.resume())
        assert len(written(engine, ask())) == 1
        run(engine.close())
        engine = OpenAIRollout([server.url], model_path=str(tiny_model))
        with pytest.raises(RolloutError, match="401"):
            run(engine.resume())
        run(engine.close())
    with pytest.raises(RolloutError, match="api_key_env=NOT_THERE"):
        OpenAIRollout([server.url], model_path=str(tiny_model), api_key_env="NOT_THERE")


def test_bad_addresses_are_named(tiny_model: Path) -> None:
    with pytest.raises(RolloutError, match="'localhost:8000' is no address"):
        OpenAIRollout(["localhost:8000"], model_path=str(tiny_model))
    with pytest.raises(RolloutError, match=r"rollout\.openai\.servers"):
        OpenAIRollout([], model_path=str(tiny_model))
    engine = OpenAIRollout(["http://127.0.0.1:9"], model_path=str(tiny_model))
    with pytest.raises(RolloutError, match=r"server http://127\.0\.0\.1:9 cannot be asked"):
        run(engine.resume())
    run(engine.close())


def test_log_probs_are_those_of_all_servers(tiny_model: Path) -> None:
    ids = [np.array([3, 5, 9], np.int32)]
    with FakeServer("practicum", version=0) as one, FakeServer("practicum", version=0) as other:
        engine = OpenAIRollout([one.url, other.url], model_path=str(tiny_model))
        run(engine.resume())
        assert run(engine.log_probs(ids))[0].shape == (2,)
        other.table = other.table + np.eye(len(other.table))
        with pytest.raises(RolloutError, match="do not agree on log-probs"):
            run(engine.log_probs(ids))
        run(engine.close())
