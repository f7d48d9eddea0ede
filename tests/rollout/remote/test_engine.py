"""Requests to completions servers and what comes of them, by the engine `openai` and a server that fails on demand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from practicum.errors import RolloutError
from practicum.models import load_tokenizer
from practicum.rollout.engine.sequence import Sequence
from practicum.rollout.openai import OpenAIRollout
from practicum.types import PromptGroup, Sample, SamplingParams
from tests.rollout.asking import ask, run, tokens, written
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
            run(engine.resume())
            server.requests.clear()
            yield engine

    yield started
    for engine in opened:
        run(engine.close())


def sequence(
    params: SamplingParams, seed: int = 0, on_tokens: Callable[[list[int], list[float]], None] | None = None
) -> Sequence:
    group = ask(params, seed=seed)
    return Sequence.of(group, group.trajectories[0], on_tokens)


def expected_log_probs(server: FakeServer, sample: Sample, temperature: float) -> np.ndarray:
    ids = np.concatenate([sample.prompt_ids[-1:], sample.token_ids])
    return log_softmax(server.table[ids[:-1]] / temperature)[np.arange(len(ids) - 1), ids[1:]].astype(np.float32)


@pytest.mark.parametrize("dialect", ["vllm", "practicum", "plain"])
def test_answers_come_with_their_tokens_log_probs_and_reasons(start: Any, tokenizer: Any, dialect: str) -> None:
    server = FakeServer(dialect, tokenizer=tokenizer)
    with start(server) as engine:

        def groups() -> list[PromptGroup]:
            return [ask(SamplingParams(12, 0.7, num_answers=4), seed=i) for i in range(3)]

        samples = written(engine, *groups())
        # All answers to a prompt take one request where the server can number them.
        assert len(server.requests) == (12 if dialect == "plain" else 3)
        assert [s.prompt.id for s in samples] == ["p0"] * 4 + ["p1"] * 4 + ["p2"] * 4
        assert {s.finish_reason for s in samples} <= {"stop", "length"}
        for sample in samples:
            assert np.abs(sample.log_probs - expected_log_probs(server, sample, 0.7)).max() < 1e-5
            assert (sample.token_ids[-1] == EOS) == (sample.finish_reason == "stop")
            assert len(sample.token_ids) == 12 or sample.finish_reason == "stop"
            assert sample.text == tokenizer.decode(sample.token_ids, skip_special_tokens=True)
        assert len({tuple(ids) for ids in tokens(samples)}) > 6
        assert tokens(written(engine, *groups())) == tokens(samples)
        # Whoever asks for some of the answers only gets the same ones, in whatever groups.
        group = groups()[0]
        rest = [Sequence.of(group, trajectory) for trajectory in group.trajectories[2:]]
        assert tokens(run(engine.collect_samples(rest))) == tokens(samples[2:4])


def test_answers_that_are_asked_for_one_by_one_share_a_request(start: Any) -> None:
    server = FakeServer()
    with start(server) as engine:
        whole = ask(SamplingParams(8, num_answers=3))
        expected = tokens(written(engine, whole))
        parts = [Sequence(whole.prompt, whole.prompt_ids, SamplingParams(8), whole.seed, number) for number in range(3)]
        assert tokens(run(engine.collect_samples(parts))) == expected
        assert [body["n"] for body in server.requests] == [3, 3]


def test_greedy_answers_take_the_likeliest_token(start: Any) -> None:
    server = FakeServer()
    with start(server) as engine:
        (sample,) = written(engine, ask(SamplingParams(6, 0.0)))
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
        free = written(engine, ask(params, seed=1))
        token = int(next(s for s in free if len(s.token_ids) > 4).token_ids[2])
        for sample in written(engine, ask(replace(params, stop_token_ids=(token,)), seed=1)):
            assert not {token, EOS} & set(sample.token_ids[:-1].tolist())
            assert sample.finish_reason == "length" or sample.token_ids[-1] in (token, EOS)
        for sample in written(engine, ask(replace(params, stop=("1",)), seed=1)):
            assert sample.text.count("1") == (sample.finish_reason == "stop" and sample.token_ids[-1] != EOS)


def test_end_of_text_can_be_ignored(start: Any) -> None:
    with start(FakeServer()) as engine:
        samples = written(engine, ask(SamplingParams(30, num_answers=4, ignore_eos=True)))
        assert all(len(s.token_ids) == 30 and s.finish_reason == "length" for s in samples)
        assert any(EOS in s.token_ids for s in samples)


def test_tokens_are_streamed_as_they_come(start: Any) -> None:
    with start(FakeServer(delay_s=0.005)) as engine:
        group = ask(SamplingParams(20, num_answers=2))
        heard: dict[int, list[int]] = {0: [], 1: []}
        early: list[bool] = []
        sequences: list[Sequence] = []

        def listener(number: int) -> Callable[[list[int], list[float]], None]:
            def on_tokens(ids: list[int], log_probs: list[float]) -> None:
                assert len(ids) == len(log_probs)
                early.append(not any(sequence.done.done() for sequence in sequences))
                heard[number] += ids

            return on_tokens

        sequences += [Sequence.of(group, trajectory, listener(n)) for n, trajectory in enumerate(group.trajectories)]
        samples = run(engine.collect_samples(sequences))
        assert heard == {number: sample.token_ids.tolist() for number, sample in enumerate(samples)}
        assert early.count(True) > 2


def test_an_abort_leaves_what_there_is_and_it_can_be_continued(start: Any) -> None:
    server = FakeServer(delay_s=0.05)
    with start(server) as engine:
        params = SamplingParams(50, 0.0, num_answers=2, ignore_eos=True)

        async def aborted() -> list[Sample]:
            groups = [ask(params, seed=i) for i in range(2)]
            asyncio.get_running_loop().call_later(0.5, engine.abort)
            async for _ in engine.generate(groups):
                pass
            while server.num_left < 4:  # the servers need not write on: they see that the connections are closed
                await asyncio.sleep(0.02)
            return [sample for group in groups for sample in group.samples]

        samples = run(asyncio.wait_for(aborted(), 20))
        assert all(s.finish_reason == "abort" and 0 < len(s.token_ids) < 50 for s in samples)
        server.delay_s = 0.0
        group = ask(params)
        group.trajectories[1].add(samples[1])
        whole = written(engine, group)[1]
        assert tokens([whole]) == tokens(written(engine, ask(params)))[:1]
        assert [5, 6, 7, *samples[1].token_ids.tolist()] in [body["prompt"] for body in server.requests]
        assert whole.finish_reason == "length" and len(whole.log_probs) == 50


def test_a_continued_answer_does_not_repeat_its_random_numbers(start: Any) -> None:
    server = FakeServer()
    with start(server) as engine:
        params = SamplingParams(8, num_answers=2)
        samples = written(engine, ask(params))
        for number, sample in enumerate(samples):
            arrays = {name: getattr(sample, name)[:3] for name in ("token_ids", "log_probs", "loss_mask", "versions")}
            group = ask(params)
            part = replace(sample, **arrays, finish_reason="abort")
            written_part = Sequence(group.prompt, group.prompt_ids, params, group.seed, number, written=part)
            run(engine.collect_samples([written_part]))
        seeds = [body["seed"] for body in server.requests]
        assert len({seeds[0], seeds[0] + 1, *seeds[1:]}) == 4


def test_one_answer_is_aborted_and_others_join_while_it_is_written(start: Any) -> None:
    with start(FakeServer(delay_s=0.03)) as engine:
        params = SamplingParams(60, ignore_eos=True, temperature=0.0)

        async def both() -> list[list[Sample]]:
            lazy = sequence(params)
            asking = asyncio.create_task(engine.collect_samples([lazy]))
            await asyncio.sleep(0.3)
            late = asyncio.create_task(engine.collect_samples([sequence(replace(params, max_new_tokens=3))]))
            await asyncio.sleep(0.3)
            engine.abort([lazy])
            return [await asking, await late]

        (lazy,), (late,) = run(both())
        assert late.finish_reason == "length"
        assert lazy.finish_reason == "abort" and 3 < len(lazy.token_ids) < 60


def test_one_of_several_answers_to_a_prompt_is_aborted(start: Any) -> None:
    server = FakeServer(delay_s=0.01)
    with start(server) as engine:
        group = ask(SamplingParams(30, num_answers=3, ignore_eos=True))
        expected = tokens(written(engine, ask(group.params)))

        async def work() -> list[Sample]:
            sequences = [Sequence.of(group, trajectory) for trajectory in group.trajectories]
            sequences[1].on_tokens = lambda ids, log_probs: engine.abort([sequences[1]])
            return await engine.collect_samples(sequences)

        samples = run(work())
        assert [sample.finish_reason for sample in samples] == ["length", "abort", "length"]
        assert tokens([samples[0], samples[2]]) == [expected[0], expected[2]]
        assert 0 < len(samples[1].token_ids) < 30


def test_what_waits_when_all_is_aborted_comes_untouched(start: Any) -> None:
    with start(FakeServer(delay_s=0.05), max_batch=1) as engine:

        async def work() -> list[Sample]:
            asyncio.get_running_loop().call_later(0.3, engine.abort)
            return await engine.collect_samples(
                [sequence(SamplingParams(50, ignore_eos=True), seed=i) for i in range(3)]
            )

        samples = run(work())
        assert [len(s.token_ids) > 0 for s in samples] == [True, False, False]
        assert all(s.finish_reason == "abort" for s in samples)


def test_no_more_are_asked_for_at_a_time_than_may_be(start: Any) -> None:
    server = FakeServer(delay_s=0.01)
    with start(server, max_batch=2) as engine:
        most = 0

        def on_tokens(ids: list[int], log_probs: list[float]) -> None:
            nonlocal most
            most = max(most, engine.num_running)
            assert engine.num_running + engine.num_waiting <= 6

        run(engine.collect_samples([sequence(SamplingParams(4, ignore_eos=True), i, on_tokens) for i in range(6)]))
        assert most == 2 and engine.num_running == engine.num_waiting == 0


def test_who_wants_the_engine_alone_does_not_wait_for_what_has_not_been_asked_for(start: Any) -> None:
    server = FakeServer(delay_s=0.01)
    with start(server, max_batch=2) as engine:

        async def interrupted() -> list[Sample]:
            begun = asyncio.Event()
            params = SamplingParams(8, ignore_eos=True)
            sequences = [sequence(params, i, lambda *_: begun.set()) for i in range(6)]
            generating = asyncio.create_task(engine.collect_samples(sequences))
            await begun.wait()
            num_asked = len(server.requests)
            async with engine.exclusive(timeout_s=20):
                assert engine.num_running == 0 and len(server.requests) == num_asked < 6
            return await generating

        assert [sample.finish_reason for sample in run(interrupted())] == ["length"] * 6


@pytest.mark.parametrize("fault", ["500", "break", "cut", "error"])
def test_what_is_transient_is_tried_again_and_gives_the_same_answers(start: Any, fault: str) -> None:
    server = FakeServer()
    with start(server) as engine:
        params = SamplingParams(12, num_answers=3, ignore_eos=True)
        whole = tokens(written(engine, ask(params)))
        server.faults = [fault]
        assert tokens(written(engine, ask(params))) == whole
        server.faults = [fault] * 50
        with pytest.raises(RolloutError, match=server.url):
            written(engine, ask(params))


def test_what_was_streamed_is_not_written_again(start: Any) -> None:
    server = FakeServer(faults=[])
    with start(server) as engine:
        server.faults = ["break"]
        with pytest.raises(RolloutError, match=r"broke the connection|in the middle"):
            run(engine.collect_samples([sequence(SamplingParams(12, ignore_eos=True), on_tokens=lambda *_: None)]))
        assert len(server.requests) == 1


def test_a_listener_that_fails_ends_its_answer_and_no_other(start: Any) -> None:
    with start(FakeServer()) as engine:

        def fails(ids: list[int], log_probs: list[float]) -> None:
            raise KeyError("gone")

        async def work() -> list[Any]:
            writes = [
                engine.collect_samples([sequence(SamplingParams(4, ignore_eos=True), i, own)])
                for i, own in ((0, fails), (1, None))
            ]
            return await asyncio.gather(*writes, return_exceptions=True)

        failed, (other,) = run(work())
        assert isinstance(failed, KeyError) and other.finish_reason == "length"


def test_a_server_that_hangs_is_an_error_within_the_deadline(start: Any) -> None:
    server = FakeServer()
    with start(server, timeout_s=0.3) as engine:
        server.faults = ["hang"]
        assert written(engine, ask(SamplingParams(3)))  # the second try is answered
        server.faults = ["hang"] * 10
        with pytest.raises(RolloutError, match=r"prompt p0: server http.* wait for 0.3 s"):
            written(engine, ask(SamplingParams(3)))


def test_a_refusal_is_not_tried_again(start: Any) -> None:
    server = FakeServer()
    with start(server) as engine:
        server.faults = ["400"] * 5
        with pytest.raises(RolloutError, match="made up 400"):
            written(engine, ask(SamplingParams(3)))
        assert len(server.requests) == 1


@pytest.mark.parametrize("max_batch", [1, 512])
def test_a_failure_leaves_what_is_under_way_beside_it_and_what_comes_after_it(start: Any, max_batch: int) -> None:
    server = FakeServer()
    with start(server, max_batch=max_batch) as engine:
        server.faults = ["400"]

        async def work() -> list[Any]:
            params = SamplingParams(20, ignore_eos=True)
            return await asyncio.gather(
                *(engine.collect_samples([sequence(params, seed)]) for seed in range(3)), return_exceptions=True
            )

        found = run(work())
        failed = [one for one in found if isinstance(one, RolloutError)]
        assert len(failed) == 1 and "made up 400" in str(failed[0])
        assert [len(samples[0].token_ids) for samples in found if isinstance(samples, list)] == [20, 20]
        assert max_batch > 1 or found[0] is failed[0]


def test_leaving_early_ends_the_requests(start: Any) -> None:
    server = FakeServer(delay_s=0.02)
    with start(server) as engine:

        async def work() -> None:
            groups = [ask(SamplingParams(length, 0.0, ignore_eos=True), seed=length) for length in (2, 60)]
            async with aclosing(engine.generate(groups)) as finished:
                async for some in finished:
                    assert some == groups[:1]
                    break
            assert engine.num_running == 0
            deadline = time.monotonic() + 10
            while not server.num_left and time.monotonic() < deadline:
                await asyncio.sleep(0.02)

        run(work())
        assert server.num_left == 1


def test_closing_fails_what_is_under_way(start: Any) -> None:
    with start(FakeServer(delay_s=0.05)) as engine:

        async def work() -> None:
            asking = asyncio.create_task(engine.collect_samples([sequence(SamplingParams(60, ignore_eos=True))]))
            await asyncio.sleep(0.2)
            await engine.close()
            with pytest.raises(RolloutError, match="has been closed"):
                await asking

        run(work())


def test_an_answer_that_ends_without_its_last_token_is_refused(start: Any, tokenizer: Any) -> None:
    server = FakeServer("plain", tokenizer=tokenizer, leaves_out_eos=True)
    with start(server) as engine, pytest.raises(RolloutError, match="leave out the end-of-text token"):
        written(engine, ask(SamplingParams(60, num_answers=4)))


def test_samples_carry_the_version_the_server_reports(start: Any) -> None:
    server = FakeServer("practicum", version=7)
    with start(server) as engine:
        (sample,) = written(engine, ask(SamplingParams(5, ignore_eos=True)))
        assert sample.versions.tolist() == [7] * 5
        server.version = None
        (sample,) = written(engine, ask(SamplingParams(5, ignore_eos=True)))
        assert sample.versions.tolist() == [0] * 5


def test_requests_that_do_not_fit_are_refused_before_anything_is_asked(start: Any) -> None:
    server = FakeServer(max_tokens=10)
    with start(server) as engine:
        with pytest.raises(RolloutError, match="room for 10"):
            written(engine, ask(SamplingParams(8)))
        assert not server.requests


def test_log_probs_of_given_sequences(start: Any) -> None:
    server = FakeServer()
    with start(server) as engine:
        sequences = [np.array([5, 6, 7, 2], np.int32), np.array([3, 4], np.int32)]
        found = run(engine.log_probs(sequences))
        for ids, got in zip(sequences, found, strict=True):
            assert np.abs(got - log_softmax(server.table[ids[:-1]])[np.arange(len(ids) - 1), ids[1:]]).max() < 1e-5


def test_filters_are_allowed_where_the_log_probs_are_right_and_nobody_pays_for_finding_out_before(start: Any) -> None:
    filtered = SamplingParams(4, 0.7, top_k=3)
    for kind in ("tempered", "processed"):
        server = FakeServer(log_probs=kind)
        with start(server) as engine:
            written(engine, ask(SamplingParams(4)))
            assert len(server.requests) == 1
            if kind == "processed":
                with pytest.raises(RolloutError, match="after top-k and top-p"):
                    written(engine, *(ask(filtered, seed=seed) for seed in range(4)))
                probes = [body for body in server.requests[1:] if body["max_tokens"] == 1]
                assert len(probes) == len(server.requests) - 1 <= 4  # probed once, and nothing was written
                continue
            (sample,) = written(engine, ask(filtered))
            assert np.abs(sample.log_probs - expected_log_probs(server, sample, 0.7)).max() < 1e-5
