from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from practicum.rollout.inbox import Inbox, Ticket
from practicum.rollout.runner import EngineRunner, Order

from practicum.errors import RolloutError
from practicum.models import load_tokenizer
from practicum.rollout.remote.openai import OpenAIRollout
from practicum.types import Prompt, RolloutRequest, Sample, SamplingParams
from tests.rollout.fake_completions import EOS, FakeServer, log_softmax


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(str(tiny_model))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two tries: the servers here are as well after a moment as after a second."""
    monkeypatch.setattr("practicum.rollout.remote.engine._PAUSE_S", 0.02)


@pytest.fixture
def start(tiny_model: Path) -> Iterator[Callable[..., Any]]:
    opened: list[OpenAIRollout] = []

    @contextmanager
    def started(server: FakeServer, **settings: Any) -> Iterator[OpenAIRollout]:
        with server:
            engine = OpenAIRollout([server.url], model_path=str(tiny_model), **settings)
            opened.append(engine)
            engine.resume()
            server.requests.clear()
            yield engine

    yield started
    for engine in opened:
        engine.close()


def ask(params: SamplingParams, prompt: tuple[int, ...] = (5, 6, 7), seed: int = 0) -> RolloutRequest:
    return RolloutRequest(Prompt(f"p{seed}", text="x"), np.array(prompt, np.int32), params, seed)


def expected_log_probs(server: FakeServer, sample: Sample, temperature: float) -> np.ndarray:
    ids = np.concatenate([sample.prompt_ids[-1:], sample.token_ids])
    return log_softmax(server.table[ids[:-1]] / temperature)[np.arange(len(ids) - 1), ids[1:]].astype(np.float32)


def tokens(samples: list[Sample]) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in samples]


@pytest.mark.parametrize("dialect", ["vllm", "practicum", "plain"])
def test_answers_come_with_their_tokens_log_probs_and_reasons(start: Any, tokenizer: Any, dialect: str) -> None:
    server = FakeServer(dialect, tokenizer=tokenizer)
    with start(server) as engine:
        requests = [ask(SamplingParams(12, 0.7, num_answers=4), seed=i) for i in range(3)]
        samples = engine.generate(requests)
        assert [s.prompt.id for s in samples] == ["p0"] * 4 + ["p1"] * 4 + ["p2"] * 4
        assert {s.finish_reason for s in samples} <= {"stop", "length"}
        for sample in samples:
            assert np.abs(sample.log_probs - expected_log_probs(server, sample, 0.7)).max() < 1e-5
            assert (sample.token_ids[-1] == EOS) == (sample.finish_reason == "stop")
            assert len(sample.token_ids) == 12 or sample.finish_reason == "stop"
            assert sample.text == tokenizer.decode(sample.token_ids, skip_special_tokens=True)
        assert len({tuple(ids) for ids in tokens(samples)}) > 6
        assert tokens(engine.generate(requests)) == tokens(samples)
        # Whoever asks for some of the answers only gets the same ones.
        rest = replace(requests[0], first_answer=2, params=replace(requests[0].params, num_answers=2))
        assert tokens(engine.generate([rest])) == tokens(samples[2:4])


def test_greedy_answers_take_the_likeliest_token(start: Any) -> None:
    server = FakeServer()
    with start(server) as engine:
        (sample,) = engine.generate([ask(SamplingParams(6, 0.0))])
        last = 7
        for token in sample.token_ids.tolist():
            assert token == server.table[last].argmax()
            last = token
        assert np.abs(sample.log_probs - expected_log_probs(server, sample, 1.0)).max() < 1e-5


@pytest.mark.parametrize("dialect", ["vllm", "plain"])
def test_answers_end_with_what_was_asked_for_whatever_the_server_knows(
    start: Any, tokenizer: Any, dialect: str
) -> None:
    server = FakeServer(dialect, tokenizer=tokenizer, delay_s=0.001)
    with start(server) as engine:
        params = SamplingParams(40, num_answers=8)
        free = engine.generate([ask(params, seed=1)])
        token = int(next(s for s in free if len(s.token_ids) > 4).token_ids[2])
        for sample in engine.generate([ask(replace(params, stop_token_ids=(token,)), seed=1)]):
            assert not {token, EOS} & set(sample.token_ids[:-1].tolist())
            assert sample.finish_reason == "length" or sample.token_ids[-1] in (token, EOS)
        for sample in engine.generate([ask(replace(params, stop=("1",)), seed=1)]):
            assert sample.text.count("1") == (sample.finish_reason == "stop" and sample.token_ids[-1] != EOS)


def test_end_of_text_can_be_ignored(start: Any) -> None:
    with start(FakeServer()) as engine:
        samples = engine.generate([ask(SamplingParams(30, num_answers=4, ignore_eos=True))])
        assert all(len(s.token_ids) == 30 and s.finish_reason == "length" for s in samples)
        assert any(EOS in s.token_ids for s in samples)


def test_tokens_are_told_as_they_come(start: Any) -> None:
    with start(FakeServer(delay_s=0.005)) as engine:
        heard: dict[int, list[int]] = {0: [], 1: []}
        done: dict[int, Sample] = {}
        early: list[bool] = []

        def on_tokens(answer: int, ids: list[int], log_probs: list[float]) -> None:
            assert len(ids) == len(log_probs)
            early.append(not done)
            heard[answer] += ids

        inbox = Inbox()
        inbox.put(Ticket(ask(SamplingParams(20, num_answers=2)), done.__setitem__, on_tokens))
        inbox.close()
        engine.write(inbox)
        assert heard == {answer: sample.token_ids.tolist() for answer, sample in done.items()}
        assert early.count(True) > 2


def test_an_abort_leaves_what_there_is_and_it_can_be_gone_on_with(start: Any) -> None:
    server = FakeServer(delay_s=0.05)
    with start(server) as engine:
        params = SamplingParams(50, 0.0, num_answers=2, ignore_eos=True)
        threading.Timer(0.5, engine.abort).start()
        requests = [ask(params, seed=i) for i in range(2)]
        samples = engine.generate(requests)
        assert all(s.finish_reason == "abort" and 0 < len(s.token_ids) < 50 for s in samples)
        server.delay_s = 0.0
        whole = engine.generate([requests[0].going_on(1, samples[1])])
        assert tokens(whole) == tokens(engine.generate([requests[0]]))[:1]
        assert [5, 6, 7, *samples[1].token_ids.tolist()] in [body["prompt"] for body in server.requests]
        assert whole[0].finish_reason == "length" and len(whole[0].log_probs) == 50
        deadline = time.monotonic() + 10
        while server.num_left < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.num_left == 4  # the server need not write on


def test_a_continued_answer_does_not_repeat_its_random_numbers(start: Any) -> None:
    server = FakeServer()
    with start(server) as engine:
        request = ask(SamplingParams(8, num_answers=2))
        first, second = engine.generate([request])
        for number, sample in enumerate((first, second)):
            part = replace(
                sample, **{n: getattr(sample, n)[:3] for n in ("token_ids", "log_probs", "loss_mask", "versions")}
            )
            engine.generate([request.going_on(number, part)])
        seeds = [body["seed"] for body in server.requests]
        assert len({seeds[0], seeds[0] + 1, *seeds[1:]}) == 4


def test_one_request_can_be_cancelled_and_others_join_while_it_is_written(start: Any) -> None:
    with start(FakeServer(delay_s=0.03)) as engine:
        inbox = Inbox()
        done: dict[str, Sample] = {}
        params = SamplingParams(60, ignore_eos=True, temperature=0.0)
        lazy = Ticket(ask(params), lambda _, sample: done.__setitem__("lazy", sample))
        inbox.put(lazy)
        late = Ticket(ask(replace(params, max_new_tokens=3)), lambda _, sample: done.__setitem__("late", sample))

        def meanwhile() -> None:
            time.sleep(0.3)
            inbox.put(late)
            time.sleep(0.3)
            inbox.cancel(lazy)
            inbox.close()

        thread = threading.Thread(target=meanwhile)
        thread.start()
        engine.write(inbox)
        thread.join()
        assert done["late"].finish_reason == "length"
        assert done["lazy"].finish_reason == "abort" and 3 < len(done["lazy"].token_ids) < 60


def test_what_waits_when_all_is_aborted_is_told_untouched(start: Any) -> None:
    with start(FakeServer(delay_s=0.05), max_batch=1) as engine:
        threading.Timer(0.3, engine.abort).start()
        samples = engine.generate([ask(SamplingParams(50, ignore_eos=True), seed=i) for i in range(3)])
        assert [len(s.token_ids) > 0 for s in samples] == [True, False, False]
        assert all(s.finish_reason == "abort" for s in samples)


@pytest.mark.parametrize("fault", ["500", "break", "cut", "error"])
def test_what_may_pass_is_tried_again_and_gives_the_same_answers(start: Any, fault: str) -> None:
    server = FakeServer()
    with start(server) as engine:
        request = ask(SamplingParams(12, num_answers=3, ignore_eos=True))
        whole = tokens(engine.generate([request]))
        server.faults = [fault]
        assert tokens(engine.generate([request])) == whole
        server.faults = [fault] * 50
        with pytest.raises(RolloutError, match=server.url):
            engine.generate([request])


def test_what_was_told_is_not_written_again(start: Any) -> None:
    server = FakeServer(faults=[])
    with start(server) as engine:
        server.faults = ["break"]
        inbox = Inbox()
        inbox.put(Ticket(ask(SamplingParams(12, ignore_eos=True)), lambda *_: None, lambda *_: None))
        inbox.close()
        with pytest.raises(RolloutError, match=r"broke the connection|in the middle"):
            engine.write(inbox)
        assert len(server.requests) == 1


def test_a_server_that_hangs_is_an_error_within_the_deadline(start: Any) -> None:
    server = FakeServer()
    with start(server, timeout_s=0.3) as engine:
        server.faults = ["hang"]
        assert engine.generate([ask(SamplingParams(3))])  # the second try is answered
        server.faults = ["hang"] * 10
        with pytest.raises(RolloutError, match=r"prompt p0: server http.* wait for 0.3 s"):
            engine.generate([ask(SamplingParams(3))])


def test_a_refusal_is_not_tried_again(start: Any) -> None:
    server = FakeServer()
    with start(server) as engine:
        server.faults = ["400"] * 5
        with pytest.raises(RolloutError, match="made up 400"):
            engine.generate([ask(SamplingParams(3))])
        assert len(server.requests) == 1


def test_what_is_under_way_beside_a_failure_is_finished_first(start: Any) -> None:
    server = FakeServer()
    told: list[str] = []
    with start(server) as engine:
        server.faults = ["400"]
        inbox = Inbox()
        for name in "abc":
            request = replace(ask(SamplingParams(20, ignore_eos=True)), prompt=Prompt(name, text="?"))
            inbox.put(Ticket(request, lambda number, sample: told.append(sample.prompt.id)))
        inbox.close()
        with pytest.raises(RolloutError, match=r"prompt (a|b|c): .*made up 400"):
            engine.write(inbox)
    assert len(told) == 2 and len(server.requests) == 3


def test_what_was_not_begun_before_a_failure_is_written_after_it(start: Any) -> None:
    server = FakeServer()
    told: list[str] = []
    failed: list[str] = []
    with start(server, max_batch=1) as engine:
        server.faults = ["400"]
        runner = EngineRunner(engine)
        over = threading.Semaphore(0)
        for name in "abc":
            request = replace(ask(SamplingParams(5, ignore_eos=True)), prompt=Prompt(name, text="?"))

            def on_sample(number: int, sample: Sample) -> None:
                told.append(sample.prompt.id)
                over.release()

            def on_failure(error: Exception, name: str = name) -> None:
                failed.append(name)
                over.release()

            runner.submit(Order(request, on_sample, on_failure))
        assert all(over.acquire(timeout=30) for _ in "abc")
        runner.close()
    assert failed == ["a"] and told == ["b", "c"]


def test_an_answer_that_ends_without_its_last_token_is_refused(start: Any, tokenizer: Any) -> None:
    server = FakeServer("plain", tokenizer=tokenizer, leaves_out_eos=True)
    with start(server) as engine, pytest.raises(RolloutError, match="leave out the end-of-text token"):
        engine.generate([ask(SamplingParams(60, num_answers=4))])


def test_samples_carry_the_version_the_server_tells(start: Any) -> None:
    server = FakeServer("practicum", version=7)
    with start(server) as engine:
        (sample,) = engine.generate([ask(SamplingParams(5, ignore_eos=True))])
        assert sample.versions.tolist() == [7] * 5
        server.version = None
        (sample,) = engine.generate([ask(SamplingParams(5, ignore_eos=True))])
        assert sample.versions.tolist() == [0] * 5


def test_requests_that_do_not_fit_are_refused_before_anything_is_asked(start: Any) -> None:
    server = FakeServer(most_tokens=10)
    with start(server) as engine:
        with pytest.raises(RolloutError, match="room for 10"):
            engine.generate([ask(SamplingParams(8))])
        assert not server.requests


def test_log_probs_of_given_sequences(start: Any) -> None:
    server = FakeServer()
    with start(server) as engine:
        sequences = [np.array([5, 6, 7, 2], np.int32), np.array([3, 4], np.int32)]
        found = engine.log_probs(sequences)
        for ids, got in zip(sequences, found, strict=True):
            assert np.abs(got - log_softmax(server.table[ids[:-1]])[np.arange(len(ids) - 1), ids[1:]]).max() < 1e-5


def test_filters_are_allowed_where_the_log_probs_are_right_and_nobody_pays_for_finding_out_before(start: Any) -> None:
    filtered = SamplingParams(4, 0.7, top_k=3)
    for kind in ("tempered", "processed"):
        server = FakeServer(log_probs=kind)
        with start(server) as engine:
            engine.generate([ask(SamplingParams(4))])
            assert len(server.requests) == 1
            if kind == "processed":
                with pytest.raises(RolloutError, match="after top-k and top-p"):
                    engine.generate([ask(filtered)])
                continue
            (sample,) = engine.generate([ask(filtered)])
            assert np.abs(sample.log_probs - expected_log_probs(server, sample, 0.7)).max() < 1e-5
