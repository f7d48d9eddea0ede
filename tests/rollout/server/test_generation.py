"""What OpenAI's own client sees of a model that writes."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import numpy as np
import openai
import pytest
import torch

from practicum.models import load_model, load_tokenizer
from practicum.rollout.engines import EngineSettings
from practicum.rollout.schemas import CompletionRequest
from practicum.rollout.server import generation_service
from practicum.weights import WeightUpdate
from tests.models import save_classifier
from tests.rollout.server.client import ask, ask_all
from tests.rollout.server.fakes import WAIT_S, Served, StepEngine

TOKEN = "secret"
CHAT: Any = [{"role": "user", "content": "1+2="}]


def start(model: Path, engine: str) -> Served:
    chosen = EngineSettings(engine, str(model), device="cpu", max_batch=16, cache_gb=0.05)
    return Served(generation_service(chosen, names=frozenset({"tiny"})))


@pytest.fixture(scope="module", params=["native", "hf"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def url(tiny_model: Path, engine: str) -> Iterator[str]:
    server = start(tiny_model, engine)
    yield server.url
    server.close()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with client_of(url) as client:
        yield client


def client_of(url: str, token: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0, timeout=WAIT_S)


def texts(reply: Any) -> list[str]:
    return [choice.text for choice in reply.choices]


def test_a_completion_is_what_the_model_says(client: openai.OpenAI, tiny_model: Path) -> None:
    reply: Any = client.completions.create(model="tiny", prompt="1+2=", max_tokens=6, temperature=0, logprobs=0)
    (choice,) = reply.choices
    model, tokenizer = load_model(str(tiny_model)).eval(), load_tokenizer(str(tiny_model))
    ids = torch.tensor([tokenizer("1+2=")["input_ids"]])
    written = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
    assert choice.token_ids == written
    assert choice.text == tokenizer.decode(written, skip_special_tokens=True)
    with torch.no_grad():
        logits = model(torch.cat([ids, torch.tensor([written])], 1)).logits[0, ids.shape[1] - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(written)[:, None])[:, 0].numpy()
    assert np.abs(np.array(choice.logprobs.token_logprobs) - expected).max() < 2e-5
    assert [tokenizer.convert_tokens_to_ids(token) for token in choice.logprobs.tokens] == written
    assert reply.usage.prompt_tokens == 4 and reply.usage.completion_tokens == len(written)
    assert reply.weight_version == choice.weight_version == 0


def test_prompts_of_all_kinds_come_back_in_order(client: openai.OpenAI, url: str) -> None:
    ids = [ask(url, "/tokenize", {"prompt": text})[1]["tokens"] for text in ("1+2=", "7")]
    as_text: Any = client.completions.create(model="tiny", prompt=["1+2=", "7"], n=2, max_tokens=5, seed=3)
    as_ids: Any = client.completions.create(
        model="tiny", prompt=ids, n=2, max_tokens=5, seed=3, extra_body={"return_token_ids": True}
    )
    assert texts(as_text) == texts(as_ids) and [choice.index for choice in as_ids.choices] == [0, 1, 2, 3]
    assert [choice.prompt_token_ids for choice in as_ids.choices] == [ids[0], ids[0], ids[1], ids[1]]
    one = client.completions.create(model="tiny", prompt=ids[1], n=2, max_tokens=5, seed=3)
    assert texts(one) == texts(as_text)[2:]


def test_a_seed_repeats_itself_whatever_else_is_asked(client: openai.OpenAI) -> None:
    def seeded(seed: int, n: int = 4) -> list[str]:
        return texts(client.completions.create(model="tiny", prompt="1+2=", max_tokens=12, seed=seed, n=n))

    alone = seeded(7)
    with ThreadPoolExecutor(8) as threads:
        rows = list(threads.map(seeded, [7, 1, 2, 7, 3, 4, 5, 7]))
    assert rows[0] == rows[3] == rows[7] == alone
    assert len({tuple(row) for row in rows}) == 6 and len(set(alone)) > 1
    assert seeded(9, n=1) == alone[2:3]  # a row of answers can be asked for in parts
    unseeded = [texts(client.completions.create(model="tiny", prompt="1", max_tokens=12)) for _ in range(4)]
    assert len({tuple(row) for row in unseeded}) > 1


def test_answers_end_before_a_stop_text_and_at_a_stop_token(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "1+2=", "max_tokens": 30, "n": 8, "seed": 2}
    whole = texts(client.completions.create(**asked))
    longest = max(range(8), key=lambda index: len(whole[index]))
    stop = whole[longest][3:5]
    cut: Any = client.completions.create(**asked, stop=[stop, "never written"])
    assert texts(cut) == [text.split(stop)[0] for text in whole]
    assert cut.choices[longest].finish_reason == "stop"
    assert len(cut.choices[longest].token_ids) < 30
    kept = client.completions.create(**asked, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert texts(kept)[longest] == whole[longest].split(stop)[0] + stop
    ended: Any = client.completions.create(**asked, extra_body={"stop_token_ids": [5], "ignore_eos": True})
    for choice in ended.choices:
        assert 5 not in choice.token_ids[:-1]
        assert choice.finish_reason == ("stop" if choice.token_ids[-1] == 5 else "length")


def test_a_chat_goes_through_the_template(client: openai.OpenAI) -> None:
    said = client.chat.completions.create(
        model="tiny", messages=CHAT, n=3, max_completion_tokens=8, seed=1, logprobs=True
    )
    plain: Any = client.completions.create(
        model="tiny", prompt="<user>1+2=<bot>", n=3, max_tokens=8, seed=1, logprobs=1
    )
    assert [choice.message.content for choice in said.choices] == texts(plain)
    for chat, text in zip(said.choices, plain.choices, strict=True):
        assert chat.logprobs is not None and chat.logprobs.content is not None
        assert [entry.logprob for entry in chat.logprobs.content] == text.logprobs.token_logprobs
    assert said.usage is not None and said.usage.prompt_tokens == 6
    unlimited: Any = client.chat.completions.create(
        model="tiny", messages=CHAT, extra_body={"ignore_eos": True}, temperature=0
    )
    assert len(unlimited.choices[0].token_ids) == 64 - 6  # what the model's length leaves


def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "n": 3, "max_tokens": 20, "seed": 4, "stop": ["1"]}
    whole: Any = client.completions.create(prompt="1+2=", logprobs=0, **asked)
    said = [""] * 3
    ids: list[list[int]] = [[], [], []]
    log_probs: list[list[float]] = [[], [], []]
    ends, versions, used = {}, {}, []
    part: Any
    for part in client.completions.create(
        prompt="1+2=", logprobs=0, stream=True, stream_options={"include_usage": True}, **asked
    ):
        used.append(part.usage)
        for choice in part.choices:
            said[choice.index] += choice.text
            ids[choice.index] += choice.token_ids
            log_probs[choice.index] += choice.logprobs.token_logprobs
            if choice.finish_reason:
                ends[choice.index], versions[choice.index] = choice.finish_reason, choice.weight_version
    assert said == texts(whole)
    assert ids == [choice.token_ids for choice in whole.choices]
    assert log_probs == [pytest.approx(choice.logprobs.token_logprobs) for choice in whole.choices]
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert versions == {0: 0, 1: 0, 2: 0}
    assert used[-1] == whole.usage and not any(used[:-1])
    chat = client.chat.completions.create(messages=CHAT, stream=True, **asked)
    told = [""] * 3
    for piece in chat:
        for delta in piece.choices:
            told[delta.index] += delta.delta.content or ""
    expected = client.chat.completions.create(messages=CHAT, **asked)
    assert told == [choice.message.content for choice in expected.choices]


def test_mistakes_are_openais_errors(client: openai.OpenAI, engine: str) -> None:
    ask_for: Any = client.completions.create
    with pytest.raises(openai.BadRequestError, match=r"prompt has 70 tokens and the answer up to 16: together 86") as e:
        ask_for(model="tiny", prompt="1" * 70)
    assert e.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="messages have 72 tokens, which leaves none for the answer"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "1" * 70}])
    with pytest.raises(openai.BadRequestError, match="token id 99 is not one of this model's"):
        ask_for(model="tiny", prompt=[5, 99])
    with pytest.raises(openai.BadRequestError, match="echo=true is not supported"):
        ask_for(model="tiny", prompt="1", echo=True)
    with pytest.raises(
        openai.BadRequestError,
        match=rf"messages.0: engine {engine} reads text only, and part 1 of the user's message is of type 'image_url'",
    ):
        image: Any = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": [image]}])
    with pytest.raises(openai.BadRequestError, match="no place for tools"):
        tool: Any = {"type": "function", "function": {"name": "add"}}
        client.chat.completions.create(model="tiny", messages=CHAT, tools=[tool])
    with pytest.raises(openai.NotFoundError, match="there is no model 'huge' here") as missing:
        ask_for(model="huge", prompt="1")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="does not answer /classify"):
        client.post("/../classify", body={"input": "1"}, cast_to=object)
    (listed,) = client.models.list().data
    assert listed.max_model_len == 64  # type: ignore[attr-defined]
    assert client.models.retrieve("tiny").id == listed.id
    with pytest.raises(openai.NotFoundError, match="there is no model 'huge' here"):
        client.models.retrieve("huge")


def test_the_token_is_asked_for(tiny_model: Path) -> None:
    engine = StepEngine()
    with Served(engine.service(tiny_model), token=TOKEN) as server:
        engine.step()
        with client_of(server.url, "wrong") as client, pytest.raises(openai.AuthenticationError, match="token"):
            client.completions.create(model="tiny", prompt="1")
        with client_of(server.url, TOKEN) as client:
            assert client.completions.create(model="any", prompt="1", max_tokens=1).choices[0].text == "1"


def test_asleep_it_refuses_and_awake_it_writes_the_same(url: str, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "1+2=", "max_tokens": 12, "seed": 5}
    before = texts(client.completions.create(**asked))
    assert ask(url, "/sleep") == (200, {})
    with pytest.raises(openai.InternalServerError, match="asleep") as refused:
        client.completions.create(**asked)
    assert refused.value.status_code == 503
    assert ask(url, "/update_weights", {"path": "x"})[0] == 503
    assert ask(url, "/wake_up") == (200, {})
    assert texts(client.completions.create(**asked)) == before


def test_a_text_that_is_no_unicode_is_the_clients_mistake(url: str) -> None:
    status, told = ask(url, "/v1/completions", {"prompt": "1\ud800", "max_tokens": 2})
    assert status == 400
    assert "no valid Unicode" in told["error"]["message"]


def test_log_probs_of_given_sequences_are_those_of_a_forward_pass(url: str, tiny_model: Path) -> None:
    ids = [[3, 5, 9, 4], [7, 7]]
    status, told = ask(url, "/log_probs", {"token_ids": ids})
    assert status == 200
    model = load_model(str(tiny_model)).eval()
    for one, found in zip(ids, told["log_probs"], strict=True):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([one])).logits[0].log_softmax(-1)
        assert found == pytest.approx([float(expected[at, token]) for at, token in enumerate(one[1:])], abs=2e-5)
    assert ask(url, "/log_probs", {"token_ids": [[3]]})[0] == 400


def other_weights(model: Path, folder: Path, factor: float) -> Path:
    other = load_model(str(model))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(factor)
    other.save_pretrained(folder)
    return folder


def greedy(folder: Path) -> str:
    model, tokenizer = load_model(str(folder)).eval(), load_tokenizer(str(folder.parent / "tokenizer"))
    ids = torch.tensor([tokenizer("1+2=")["input_ids"]])
    answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    return str(tokenizer.decode(answer, skip_special_tokens=True))


def test_new_weights_under_load_and_every_answer_tells_its_own(tiny_model: Path, engine: str, tmp_path: Path) -> None:
    load_tokenizer(str(tiny_model)).save_pretrained(tmp_path / "tokenizer")
    folders = [other_weights(tiny_model, tmp_path / f"v{i}", factor) for i, factor in enumerate((1.0, -1.0, 3.0))]
    expected = {0: greedy(folders[0]), 4: greedy(folders[1]), 5: greedy(folders[2])}
    assert len(set(expected.values())) == 3
    server = start(tiny_model, engine)
    over = threading.Event()

    def keep_asking(_: int) -> list[tuple[int, str]]:
        seen = []
        with client_of(server.url) as client:
            while not over.is_set():
                reply: Any = client.completions.create(model="tiny", prompt="1+2=", max_tokens=12, temperature=0)
                seen.append((reply.choices[0].weight_version, reply.choices[0].text))
        return seen

    try:
        with ThreadPoolExecutor(4) as threads:
            asking = [threads.submit(keep_asking, i) for i in range(4)]
            try:
                for folder, said, version in ((folders[1], {"version": 4}, 4), (folders[2], {}, 5)):
                    told = ask(server.url, "/update_weights", {"path": str(folder), **said})
                    assert told == (200, {"version": version})
                    reply = ask(server.url, "/v1/completions", {"prompt": "1", "max_tokens": 1})[1]
                    assert reply["weight_version"] == version
            finally:
                over.set()
            seen = [answer for one in asking for answer in one.result(WAIT_S)]
        assert all(text == expected[version] for version, text in seen)
        ask(server.url, "/sleep")
        ask(server.url, "/wake_up")  # with the new weights, not those it was started with
        last = ask(server.url, "/v1/completions", {"prompt": "1+2=", "max_tokens": 12, "temperature": 0})[1]
        assert (last["weight_version"], last["choices"][0]["text"]) == (5, expected[5])
    finally:
        server.close()


def test_weights_that_do_not_fit_change_nothing(url: str, client: openai.OpenAI, tmp_path: Path) -> None:
    before = client.completions.create(model="tiny", prompt="1", max_tokens=9, temperature=0)
    classifier = save_classifier(tmp_path / "classifier")
    for path, message in [("/nowhere", "does not exist"), (str(classifier), "")]:
        status, told = ask(url, "/update_weights", {"path": path})
        assert status == 400 and message in told["error"]["message"]
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=18, **shape)).save_pretrained(tmp_path / "llama")
    status, told = ask(url, "/update_weights", {"path": str(tmp_path / "llama")})
    assert status == 400 and "are of another model: " in told["error"]["message"]
    after: Any = client.completions.create(model="tiny", prompt="1", max_tokens=9, temperature=0)
    assert texts(after) == texts(before) and after.weight_version == 0


@pytest.fixture
def steps(tiny_model: Path) -> Iterator[tuple[StepEngine, str]]:
    engine = StepEngine()
    with Served(engine.service(tiny_model)) as server:
        yield engine, server.url


def metric(url: str, name: str) -> float:
    host, _, port = url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"practicum_server_{name} "))


def wait_for(url: str, name: str, value: float) -> None:
    deadline = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if metric(url, name) == value:
            return
        deadline.wait(0.01)
    raise AssertionError(f"{name} is {metric(url, name)}, not {value}")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_takes_its_request_along(steps: tuple[StepEngine, str], stream: bool) -> None:
    engine, url = steps
    host, _, port = url.removeprefix("http://").partition(":")
    leaving = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    leaving.request("POST", "/v1/completions", json.dumps({"prompt": "1", "max_tokens": 50, "stream": stream}))
    wait_for(url, "running", 1)
    engine.step(2)
    if stream:
        assert leaving.getresponse().read(5) == b"data:"
    leaving.close()
    wait_for(url, "running", 0)
    assert engine.num_aborted == 1
    assert metric(url, "abandoned_total") == 1
    engine.step(1)
    assert ask(url, "/v1/completions", {"prompt": "1", "max_tokens": 1})[0] == 200


def test_requests_join_those_under_way(steps: tuple[StepEngine, str]) -> None:
    engine, url = steps
    with ThreadPoolExecutor(2) as threads:
        long = threads.submit(ask, url, "/v1/completions", {"prompt": "1", "max_tokens": 10})
        wait_for(url, "running", 1)
        short = threads.submit(ask, url, "/v1/completions", {"prompt": "1", "max_tokens": 2})
        wait_for(url, "running", 2)
        engine.step(2)
        assert short.result(WAIT_S)[1]["usage"]["completion_tokens"] == 2
        assert not long.done()
        engine.step(8)
        assert long.result(WAIT_S)[1]["usage"]["completion_tokens"] == 10
    assert metric(url, "written_tokens_total") == 12


def test_a_failure_of_the_engine_is_told_and_passes(steps: tuple[StepEngine, str]) -> None:
    engine, url = steps
    engine.error = RuntimeError("the forward pass broke")
    status, told = ask(url, "/v1/completions", {"prompt": "1"})
    assert (status, told["error"]["message"]) == (500, "RuntimeError: the forward pass broke")
    with client_of(url) as client, pytest.raises(openai.APIError, match="the forward pass broke"):
        list(client.completions.create(model="steps", prompt="1", stream=True))
    host, _, port = url.removeprefix("http://").partition(":")
    kept = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    kept.request("POST", "/v1/completions", json.dumps({"prompt": "1", "stream": True}))
    events = kept.getresponse().read().split(b"\n\n")  # whole, so that the connection can be used again
    assert b"the forward pass broke" in events[0] and events[1:] == [b""]
    kept.request("GET", "/health")
    assert kept.getresponse().status == 200
    engine.error = None
    engine.step(16)
    assert ask(url, "/v1/completions", {"prompt": "1"})[0] == 200


def test_many_clients_at_once_each_get_their_own(url: str) -> None:
    bodies = [{"prompt": f"{i}+{i}=", "max_tokens": 6, "seed": i, "n": 1 + i % 3} for i in range(60)]
    together = ask_all(url, "/v1/completions", bodies)
    for body, (status, told) in zip(bodies, together, strict=True):
        assert status == 200 and len(told["choices"]) == body["n"]
    alone = [ask(url, "/v1/completions", body) for body in bodies[::12]]
    assert [[c["token_ids"] for c in told["choices"]] for _, told in alone] == [
        [c["token_ids"] for c in told["choices"]] for _, told in together[::12]
    ]


def test_tokens_come_as_they_are_written_and_nothing_ahead(steps: tuple[StepEngine, str]) -> None:
    engine, url = steps
    with client_of(url) as client:
        parts = iter(client.completions.create(model="steps", prompt=["1", "1"], max_tokens=2, stream=True))
        engine.step()
        assert sorted(next(parts).choices[0].index for _ in range(2)) == [0, 1]
        engine.step()
        rest = [(part.choices[0].index, part.choices[0].finish_reason) for part in parts]
    assert sorted(rest, key=str) == [(0, "length"), (0, None), (1, "length"), (1, None)]


def test_closing_breaks_off_what_takes_too_long(tiny_model: Path) -> None:
    engine = StepEngine()
    with Served(engine.service(tiny_model)) as server, ThreadPoolExecutor() as threads:
        asking = threads.submit(client_sees, server.url)
        wait_for(server.url, "running", 1)
        server.close(0.05)
        assert asking.result(WAIT_S) == "connection lost" and engine.num_aborted == 1


def client_sees(url: str) -> str:
    try:
        ask(url, "/v1/completions", {"prompt": "1"})
    except (OSError, http.client.HTTPException):
        return "connection lost"
    return "an answer"


def test_an_answer_that_the_engine_aborts_is_503(steps: tuple[StepEngine, str]) -> None:
    engine, url = steps
    with ThreadPoolExecutor() as threads:
        asking = threads.submit(ask, url, "/v1/completions", {"prompt": "1"})
        wait_for(url, "running", 1)
        assert engine._loop is not None
        engine._loop.call_soon_threadsafe(engine.abort)
        status, told = asking.result(WAIT_S)
    assert status == 503 and "the answer was aborted" in told["error"]["message"]


def test_an_engine_that_has_been_closed_takes_nothing(steps: tuple[StepEngine, str]) -> None:
    engine, url = steps
    engine._is_closed = True
    status, told = ask(url, "/v1/completions", {"prompt": "1"})
    assert (status, told["error"]["message"]) == (503, "the engine has been closed.")


def test_a_client_that_reads_slowly_does_not_hold_up_new_weights(tiny_model: Path) -> None:
    async def run() -> int:
        engine = StepEngine()
        service = engine.service(tiny_model)
        await service.wake(WAIT_S)
        asked = service._read(CompletionRequest, b'{"prompt": "1", "max_tokens": 3, "stream": true}')
        engine._add_steps(3)
        async with aclosing(service._events(asked)) as events:
            await anext(events)
            async with engine.exclusive(timeout_s=WAIT_S):
                pass
            return len([event async for event in events])

    assert asyncio.run(run()) == 3  # two tokens, and the end


def test_new_weights_have_their_version_even_if_the_client_is_gone(tiny_model: Path) -> None:
    async def run() -> int:
        engine, is_updating, may_end = StepEngine(), asyncio.Event(), asyncio.Event()
        service = engine.service(tiny_model)
        await service.wake(WAIT_S)
        take = engine.update_weights

        async def in_a_while(update: WeightUpdate) -> None:
            is_updating.set()
            await may_end.wait()
            await take(update)

        async def done_even_if_nobody_waits(update: WeightUpdate) -> None:  # as by an engine's thread
            await asyncio.shield(asyncio.create_task(in_a_while(update)))

        engine.update_weights = done_even_if_nobody_waits  # type: ignore[method-assign]
        body = json.dumps({"path": str(tiny_model)}).encode()
        asking = asyncio.ensure_future(service.handlers["/update_weights"](cast(Any, None), body))
        await asyncio.wait_for(is_updating.wait(), WAIT_S)
        asking.cancel()
        await asyncio.wait([asking])
        may_end.set()
        while not engine._version:
            await asyncio.sleep(0)
        async with engine.exclusive(timeout_s=WAIT_S):
            return service.weight_version

    assert asyncio.run(run()) == 1


@pytest.mark.parametrize(("path", "body"), [("/update_weights", {}), ("/log_probs", {"token_ids": [[3, 5]]})])
def test_an_engine_that_is_not_free_in_time_is_503(
    steps: tuple[StepEngine, str], tiny_model: Path, path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("practicum.rollout.server.generation._UPDATE_S", 0.05)
    engine, url = steps
    with ThreadPoolExecutor() as threads:
        asking = threads.submit(ask, url, "/v1/completions", {"prompt": "1"})
        wait_for(url, "running", 1)
        status, told = ask(url, path, body or {"path": str(tiny_model)})
        engine.step(16)
        assert asking.result(WAIT_S)[0] == 200
    assert status == 503 and told["error"]["message"].startswith("the engine was not free within 0.05 s; it has 1 ")


def test_an_update_that_waits_for_another_one_in_vain_is_503(
    steps: tuple[StepEngine, str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, url = steps
    is_updating, may_end = threading.Event(), threading.Event()

    async def late(update: WeightUpdate) -> None:
        is_updating.set()
        await asyncio.to_thread(may_end.wait, WAIT_S)

    engine.update_weights = late  # type: ignore[method-assign]
    with ThreadPoolExecutor() as threads:
        asking = threads.submit(ask, url, "/update_weights", {"path": str(tiny_model)})
        assert is_updating.wait(WAIT_S)
        monkeypatch.setattr("practicum.rollout.server.generation._UPDATE_S", 0.05)
        status, told = ask(url, "/update_weights", {"path": str(tiny_model)})
        may_end.set()
        assert asking.result(WAIT_S)[0] == 200
    message = "an earlier update of the weights has not ended within 0.05 s."
    assert (status, told["error"]["message"]) == (503, message)
