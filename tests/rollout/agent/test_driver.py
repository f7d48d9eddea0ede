"""Conversations with tools and environments over an engine whose words are known: every token is accounted for."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from practicum.rollout.runner import EngineRunner, Order

from practicum.config import AgentConfig
from practicum.errors import ConversationError, RolloutError
from practicum.models import encode_prompts
from practicum.rollout.agent.driver import ConversationDriver
from practicum.rollout.hf import HFRollout
from practicum.types import Message, Prompt, RolloutRequest, Sample, SamplingParams
from practicum.weights import WeightUpdate
from tests.rollout.agents import HERE
from tests.rollout.scripted import ScriptedEngine
from tests.rollout.tokenizers import byte_tokenizer

DEADLINE_S = 60.0
ADD = '<tool_call>{"name": "add", "arguments": {"a": %d, "b": 1}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def tools(*names: str, **settings: Any) -> AgentConfig:
    return AgentConfig(tools=tuple(f"{HERE}:{name}" for name in names), **settings)


def environment(name: str, **settings: Any) -> AgentConfig:
    return AgentConfig(environment=f"{HERE}:{name}", **settings)


class Asked:
    """An order, and what came of it."""

    def __init__(self, request: RolloutRequest) -> None:
        self.samples: dict[int, Sample] = {}
        self.failures: list[Exception] = []
        self._over = threading.Event()
        self._num = request.params.num_answers
        self.order = Order(request, self._told, self._failed)

    def _told(self, answer: int, sample: Sample) -> None:
        assert answer not in self.samples
        self.samples[answer] = sample
        if len(self.samples) == self._num:
            self._over.set()

    def _failed(self, error: Exception) -> None:
        self.failures.append(error)
        self._over.set()

    def wait(self) -> list[Sample]:
        assert self._over.wait(DEADLINE_S), "no answer in time"
        return [self.samples[i] for i in sorted(self.samples)]


class Table:
    """A driver, its engine and its tokenizer."""

    def __init__(self, driver: ConversationDriver, engine: Any, tokenizer: Any) -> None:
        self.driver, self.engine, self.tokenizer = driver, engine, tokenizer

    def ask(self, question: str = "go", params: SamplingParams | None = None, **fields: Any) -> Asked:
        prompt = Prompt(question, messages=(Message("user", question),), **fields)
        return self.ask_all([prompt], params)[0]

    def ask_all(self, prompts: Sequence[Prompt], params: SamplingParams | None = None, seed: int = 7) -> list[Asked]:
        params = params or SamplingParams(4000)
        ids = encode_prompts(self.tokenizer, prompts)
        requests = [RolloutRequest(p, i, params, seed + n) for n, (p, i) in enumerate(zip(prompts, ids, strict=True))]
        asked = [Asked(request) for request in requests]
        self.driver.submit(*(one.order for one in asked))
        return asked


@contextmanager
def table(
    tokenizer: Any,
    agent: AgentConfig,
    says: Callable[[str], str | None],
    *,
    is_partial: bool = False,
    pause_s: float = 0.0,
) -> Iterator[Table]:
    engine = ScriptedEngine(tokenizer, says, pause_s=pause_s)
    driver = ConversationDriver(EngineRunner(engine, is_partial=is_partial), tokenizer, agent, is_partial=is_partial)
    try:
        yield Table(driver, engine, tokenizer)
    finally:
        driver.close()


def counts_up(to: int) -> Callable[[str], str]:
    """Calls the tool with its last result until that is high enough."""

    def says(text: str) -> str:
        results = re.findall(r"<tool_response>\s*(\d+)", text)
        last = int(results[-1]) if results else 0
        return f"that is {last}" if last >= to else f"12 add \n\n {ADD % last}"

    return says


def test_fifty_turns_the_trainer_sees_the_tokens_the_engine_saw(tokenizer: Any) -> None:
    with table(tokenizer, tools("add", max_turns=60), counts_up(to=49)) as t:
        (sample,) = t.ask(params=SamplingParams(40_000)).wait()
        assert t.driver.take_counts() == {"conversations": 1, "turns": 50, "calls_ok": 49}
        assert t.driver.take_counts() == {}
    whole = [*sample.prompt_ids.tolist(), *sample.token_ids.tolist()]
    assert len(t.engine.seen) == 50
    # What went in and came out in each turn is the beginning of the whole, and the last turn is all of it.
    for seen in t.engine.seen:
        assert whole[: len(seen)] == seen
    assert t.engine.seen[-1] == whole
    # Learnt is exactly what came out, with the log-probs it came out with.
    wrote = np.zeros(len(sample.token_ids), bool)
    for request, seen in zip(t.engine.begun, t.engine.seen, strict=True):
        start = len(request.prompt_ids) - len(sample.prompt_ids)
        wrote[start : len(seen) - len(sample.prompt_ids)] = True
    assert np.array_equal(sample.loss_mask, wrote)
    assert np.array_equal(np.isnan(sample.log_probs), ~wrote)
    assert np.array_equal(sample.log_probs[wrote], -sample.token_ids[wrote].astype(np.float32) / 100)
    assert np.array_equal(sample.versions, np.where(wrote, 0, -1))
    # The model's text tokenised again would have been something else.
    assert tokenizer(tokenizer.decode(whole), add_special_tokens=False)["input_ids"] != whole
    assert (sample.text, sample.finish_reason) == ("that is 49", "stop")
    text = tokenizer.decode(whole)
    assert text.count("<|im_end|>\n<|im_start|>user<tool_response>\n") == 49
    assert text.count("<|im_end|>") == 1 + 50 + 49  # each turn is closed once


ODD: dict[str, tuple[str, str, str, int]] = {  # by what is asked: first turn, reply, reason, turns
    "none": ("no call", "", "stop", 1),
    "json": ("<tool_call>{oops</tool_call>", "error: the call is not valid JSON", "stop", 2),
    "open": ('<tool_call>{"name": "add"}', "error: a <tool_call> is not closed", "stop", 2),
    "unknown": ('<tool_call>{"name": "mul"}</tool_call>', "error: there is no tool 'mul'; there are: add", "stop", 2),
    "malformed": ('<tool_call>{"name": "add", "arguments": {"a": "x"}}</tool_call>', "error: add: a: Input", "stop", 2),
    "hang": ('<tool_call>{"name": "hang"}</tool_call>', "error: hang took longer than 0.5 s", "stop", 2),
    "raise": ('<tool_call>{"name": "fail", "arguments": {"text": "u"}}</tool_call>', "raised KeyError: 'u'", "stop", 2),
    "crash": ('<tool_call>{"name": "crash"}</tool_call>', "error: crash its process ended", "stop", 2),
    "async": ('<tool_call>{"name": "patient", "arguments": {"seconds": 0.01}}</tool_call>', "waited", "stop", 2),
    "late": ('<tool_call>{"name": "patient", "arguments": {"seconds": 60}}</tool_call>', "took longer", "stop", 2),
    "two": (ADD % 1 + ADD % 5, "<tool_response>\n2\n</tool_response><tool_response>\n6", "stop", 2),
    "forever": (ADD % 1, "<tool_response>\n2", "length", 3),
}


def test_many_conversations_at_once_with_every_odd_case(tokenizer: Any) -> None:
    def says(text: str) -> str | None:
        question = re.findall(r"<\|im_start\|>user\n(\w+)", text)[0]
        if question == "endless":
            return None
        return ODD[question][0] if "<tool_response>" not in text or question == "forever" else "done"

    agent = tools("add", "hang", "fail", "crash", "patient", max_turns=3, tool_timeout_s=0.5, max_turn_tokens=200)
    questions = [*ODD, "endless"]
    with table(tokenizer, agent, says) as t:
        prompts = [Prompt(name, messages=(Message("user", name),)) for name in questions]
        asked = t.ask_all(prompts, SamplingParams(4000, num_answers=3))
        for name, one in zip(questions, asked, strict=True):
            for sample in (samples := one.wait()):
                text = tokenizer.decode(sample.token_ids)
                if name == "endless":  # cut off by the limit of a turn
                    assert (sample.finish_reason, len(sample.token_ids)) == ("length", 200)
                    continue
                _, reply, reason, num_turns = ODD[name]
                assert reply in text, (name, text)
                assert (sample.finish_reason, text.count("<|im_start|>assistant")) == (reason, num_turns - 1), name
                assert sample.text == ("done" if num_turns == 2 else ODD[name][0])
            assert len(samples) == 3 and not one.failures
        counts = t.driver.take_counts()
    assert counts["conversations"] == 3 * len(questions)
    assert counts["calls_ok"] == 3 * (1 + 2 + 2)  # async, two, and forever but for its last
    assert counts["calls_malformed"] == 9 and counts["calls_unknown"] == 3
    assert counts["calls_timeout"] == 6 and counts["calls_raised"] == 6


def test_the_tokens_of_tools_count_too_and_a_reply_without_room_for_a_turn_is_left_out(tokenizer: Any) -> None:
    with table(tokenizer, tools("add", max_turns=60), counts_up(to=1000)) as t:
        for most in (100, 300, 301, 302, 1000):
            (sample,) = t.ask(params=SamplingParams(most)).wait()
            assert sample.finish_reason == "length"
            assert len(sample.token_ids) <= most and sample.loss_mask[-1]


def test_the_answers_to_a_prompt_are_one_request_and_the_outcome_does_not_depend_on_the_batch(tiny_model: Path) -> None:
    """With a model that draws: each answer and turn has random numbers of its own."""
    from practicum.models import load_tokenizer

    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ {'user': '<user>', 'tool': '+'}.get(m['role'], '<bot>') }}{{ m['content'] }}"
        "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    )
    engine = HFRollout(str(tiny_model), device=torch.device("cpu"), dtype=torch.float32, max_batch=64)
    runner = EngineRunner(engine)
    runner.between(engine.resume, DEADLINE_S)
    agent = environment("Countdown", max_turns=4, max_turn_tokens=8)
    driver = ConversationDriver(runner, tokenizer, agent)
    try:
        t = Table(driver, engine, tokenizer)
        params = SamplingParams(50, num_answers=4)
        prompts = [Prompt(f"p{i}", messages=(Message("user", f"{i}+1="),), answer=3) for i in range(4)]
        together = [one.wait() for one in t.ask_all(prompts, params)]
        alone = [t.ask_all([prompt], params, seed=7 + i)[0].wait() for i, prompt in enumerate(prompts)]
    finally:
        driver.close()
    for one, other in zip(together, alone, strict=True):
        assert [s.token_ids.tolist() for s in one] == [s.token_ids.tolist() for s in other]
        assert len({tuple(s.token_ids.tolist()) for s in one}) == 4
    assert any(np.any(~sample.loss_mask) for one in together for sample in one)


def test_the_first_turn_of_all_answers_is_one_request_and_all_turns_are_one_session(tokenizer: Any) -> None:
    with table(tokenizer, tools("add"), counts_up(to=1)) as t:
        t.ask(params=SamplingParams(4000, num_answers=4)).wait()
    assert [request.params.num_answers for request in t.engine.begun] == [4, 1, 1, 1, 1]
    assert len({request.session for request in t.engine.begun}) == 1
    later = [(request.seed, request.first_answer) for request in t.engine.begun[1:]]
    assert len(set(later)) == 4


@pytest.mark.parametrize("name", ["Countdown", "AsyncCountdown"])
def test_an_environment_answers_until_it_is_over_and_tells_the_outcome(tokenizer: Any, name: str) -> None:
    words = iter(["one", "raise", "hang", "two", "three"])
    with table(tokenizer, environment(name, tool_timeout_s=0.5), lambda text: next(words)) as t:
        (sample,) = t.ask(answer=3, metadata={"speaks": True}).wait()
        counts = t.driver.take_counts()
    opening = tokenizer.decode(sample.prompt_ids)
    assert opening.endswith("go<|im_end|>\n<|im_start|>user\n3+<|im_end|>\n<|im_start|>assistant\n")
    assert sample.prompt.metadata["environment"] == {"heard": ["one", "two", "three"], "left": 0}
    assert counts == {"conversations": 1, "turns": 5, "calls_ok": 3, "calls_raised": 1, "calls_timeout": 1}
    said = re.findall(r"user\n(.*?)<\|im_end\|>", tokenizer.decode(sample.token_ids))
    assert (said[0], said[-1]) == ("2", "1")
    assert "RuntimeError: not that" in said[1] and "took longer" in said[2]
    assert (sample.text, sample.finish_reason) == ("three", "stop")


@pytest.mark.parametrize(("name", "why"), [("CannotReset", "no level of that name"), ("KeepsALock", "pickle")])
def test_an_environment_that_cannot_begin_fails_its_own_requests(tokenizer: Any, name: str, why: str) -> None:
    with table(tokenizer, environment(name), lambda text: "x") as t:
        asked = t.ask(params=SamplingParams(9, num_answers=3), answer=1)
        assert asked.wait() == []
        (failure,) = asked.failures
        assert isinstance(failure, ConversationError) and why in str(failure) and "prompt go" in str(failure)
        assert t.driver.num_running == 0 or wait_until(lambda: t.driver.num_running == 0)


def wait_until(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


@pytest.mark.parametrize("where", ["writing", "calling", "later turn"])
def test_a_cancelled_conversation_is_told_with_what_there_is_and_can_be_gone_on_with(
    tokenizer: Any, where: str
) -> None:
    def says(text: str) -> str | None:
        if is_cancelled:
            return "12" * 400
        return None if where == "writing" or "waited" in text else call

    is_cancelled = False
    seconds = 30.0 if where == "calling" else 0.01
    call = f'<tool_call>{{"name": "patient", "arguments": {{"seconds": {seconds}}}}}</tool_call>'
    with table(tokenizer, tools("patient", tool_timeout_s=60), says, pause_s=0.001) as t:
        asked = t.ask()
        assert wait_until(lambda: len(t.engine.begun) == (2 if where == "later turn" else 1))
        whole_call = len(call) + 1  # letters, and the end of the turn
        enough = {"writing": 1, "calling": whole_call, "later turn": whole_call + 1}[where]
        assert wait_until(lambda: t.engine.num_tokens >= enough)
        t.driver.cancel(asked.order)
        (sample,) = asked.wait()
        assert sample.finish_reason == "abort" and sample.loss_mask[-1]
        assert ("waited" in tokenizer.decode(sample.token_ids)) == (where == "later turn")
        if where != "calling":  # which would call for half a minute again
            is_cancelled = True
            again = Asked(asked.order.request.going_on(0, sample))
            t.driver.submit(again.order)
            (whole,) = again.wait()
            assert whole.token_ids[: len(sample.token_ids)].tolist() == sample.token_ids.tolist()
            assert np.array_equal(whole.loss_mask[: len(sample.token_ids)], sample.loss_mask)
            assert t.engine.seen[-1] == [*whole.prompt_ids.tolist(), *whole.token_ids.tolist()]


def test_abort_ends_everything_and_close_leaves_no_one_waiting(tokenizer: Any) -> None:
    with table(tokenizer, tools("add"), lambda text: None, pause_s=0.001) as t:
        asked = [t.ask(f"q{i}", SamplingParams(500)) for i in range(5)]
        t.driver.abort()
        assert [one.wait()[0].finish_reason for one in asked] == ["abort"] * 5
        last = t.ask("last", SamplingParams(500))
    assert last.wait()[0].finish_reason == "abort"
    with pytest.raises(RolloutError, match="closed"):
        t.ask("too late")


def test_an_engine_that_fails_is_told_once_and_the_next_request_is_answered(tokenizer: Any) -> None:
    with table(tokenizer, tools("add"), counts_up(to=1)) as t:
        t.engine.fails = True
        asked = t.ask(params=SamplingParams(500, num_answers=3))
        assert asked.wait() == [] and [repr(error) for error in asked.failures] == [
            "RuntimeError('the engine is on fire')"
        ]
        t.engine.fails = False
        assert len(t.ask(params=SamplingParams(500, num_answers=3)).wait()) == 3


@pytest.mark.parametrize("is_partial", [False, True])
def test_new_weights_wait_for_conversations_unless_they_may_go_on_under_them(tokenizer: Any, is_partial: bool) -> None:
    with table(tokenizer, tools("add"), counts_up(to=7), is_partial=is_partial, pause_s=0.001) as t:
        early = t.ask("early")
        assert wait_until(lambda: t.engine.num_tokens >= 1)
        update = WeightUpdate(1, iter(()), shared=False)
        t.driver.between(lambda: t.engine.update_weights(update), DEADLINE_S)
        late = t.ask("late")
        versions = [set(one.wait()[0].versions.tolist()) - {-1} for one in (early, late)]
    assert versions == [{0, 1} if is_partial else {0}, {1}]


def test_whoever_listens_hears_of_every_token(tokenizer: Any) -> None:
    heard: list[int] = []
    with table(tokenizer, tools("add"), counts_up(to=2)) as t:
        prompt = Prompt("go", messages=(Message("user", "go"),))
        asked = Asked(RolloutRequest(prompt, encode_prompts(tokenizer, [prompt])[0], SamplingParams(999), 0))
        asked.order.on_tokens = lambda answer, ids, log_probs: heard.extend(ids)
        t.driver.submit(asked.order)
        (sample,) = asked.wait()
    assert heard == sample.token_ids.tolist()


def test_routes_are_those_of_the_turn_that_first_saw_a_token(tokenizer: Any) -> None:
    with table(tokenizer, tools("add"), counts_up(to=2)) as t:
        t.engine.routes = True
        (sample,) = t.ask().wait()
    assert sample.routes is not None
    assert sample.routes.known.tolist() == [True] * (sample.num_tokens - 1) + [False]
    expected = np.zeros(sample.num_tokens, int)
    for turn, seen in enumerate(t.engine.seen, start=1):
        before = 0 if turn == 1 else len(t.engine.seen[turn - 2]) - 1  # of its last token nothing was known then
        expected[before : len(seen)] = turn
    assert sample.routes.experts[:-1, 0, 0].tolist() == expected[:-1].tolist()


def test_a_prompt_of_plain_text_goes_on_as_plain_text(tokenizer: Any) -> None:
    agent = AgentConfig(tools=(f"{HERE}:add",), call_format="plain")
    with table(tokenizer, agent, lambda text: "so 3" if "\n3\n" in text else "[1, 2]") as t:
        (asked,) = t.ask_all([Prompt("p", text="1+2=")])
        (sample,) = asked.wait()
    whole = tokenizer.decode([*sample.prompt_ids, *sample.token_ids])
    assert whole == "1+2=[1, 2]<|im_end|>\n3\nso 3<|im_end|>"


@pytest.mark.parametrize(
    ("agent", "complaint"),
    [
        (AgentConfig(tools=("nowhere.py:add",)), "nowhere.py does not exist"),
        (tools("plus"), "has no function 'plus'; it defines add"),
        (tools("add", "add"), "two tools are called 'add'"),
        (environment("NoEnvironment"), "has no method reset and step"),
        (environment("Nobody"), "has no class 'Nobody'; it defines Countdown"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(tokenizer: Any, agent: AgentConfig, complaint: str) -> None:
    with pytest.raises(RolloutError) as caught, table(tokenizer, agent, lambda text: "x"):
        pass
    assert complaint in str(caught.value)


def test_a_chat_template_that_cannot_hold_tools_is_refused_with_a_report(tiny_model: Path) -> None:
    from practicum.demo.arithmetic import make_tokenizer

    with (
        pytest.raises(RolloutError, match="tool messages: look like the model's own"),
        table(make_tokenizer(), tools("add"), lambda text: "1"),
    ):
        pass
