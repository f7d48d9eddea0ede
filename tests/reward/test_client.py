from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from practicum.config import LimitsConfig
from practicum.controller.host import free_port
from practicum.reward.client import AskFailed, RewardClient, Target
from practicum.reward.limits import LimitClient, LimitKeeper
from tests.reward.fakes import Answer, FakeService, hang, hang_up, run, saying


def asking(url: str) -> RewardClient:
    return RewardClient({"service": Target(url, window=8, timeout_s=10.0)})


async def failure(client: RewardClient) -> AskFailed:
    with pytest.raises(AskFailed) as caught:
        await client.post("service", "/score", {"a": 1})
    return caught.value


def test_a_question_and_its_answer() -> None:
    async def test() -> None:
        with FakeService({"score": 1}) as service:
            client = asking(service.url)
            assert await client.post("service", "/score", {"a": "é"}, {"Authorization": "Bearer k"}) == {"score": 1}
            assert (service.asked, service.paths) == ([{"a": "é"}], ["/score"])
            assert service.headers[0]["Authorization"] == "Bearer k"
            await client.close()

    run(test)


@pytest.mark.parametrize(
    ("reply", "status", "reason"),
    [
        (saying(400, "no such field"), "invalid", "answered 400: no such field"),
        (saying(404, ""), "invalid", "answered 404"),
        (saying(429, "slow down"), "infra_error", "answered 429: slow down"),
        (saying(500, "x" * 5000), "infra_error", "x" * 300 + " ..."),
        (saying(503, "full"), "infra_error", "answered 503: full"),
        (saying(504, "no answer in 5 s"), "timeout", "answered 504: no answer in 5 s"),
        (saying(200, '{"score": '), "invalid", "what is not JSON"),
        (saying(200, "<html>"), "invalid", "<html>"),
        (hang_up, "infra_error", "cannot be asked"),
    ],
)
def test_failures_have_a_status_and_name_who_was_asked(reply: Answer, status: str, reason: str) -> None:
    async def test() -> None:
        with FakeService(reply) as service:
            client = asking(service.url)
            error = await failure(client)
            assert error.status == status
            assert reason in error.reason and f"{service.url}/score" in error.reason
            assert len(error.reason) < 600
            await client.close()

    run(test)


def test_a_refused_connection_is_nobodys_answer() -> None:
    async def test() -> None:
        client = asking(f"http://127.0.0.1:{free_port()}")
        assert (await failure(client)).status == "infra_error"
        await client.close()

    run(test)


def test_waiting_can_be_cancelled() -> None:
    async def test() -> None:
        with FakeService(hang) as service:
            client = asking(service.url)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await client.post("service", "/", {})
            await client.close()

    run(test)


@pytest.mark.parametrize(
    ("usage", "counted"), [({"total_tokens": 7}, 7), ({"total_tokens": -1}, 50), ({"total_tokens": "7"}, 50), (3, 50)]
)
def test_tokens_that_were_used_are_written_on_the_permit(usage: Any, counted: int) -> None:
    async def test() -> None:
        with FakeService({"usage": usage}) as service:
            await ask(service)

    async def ask(service: FakeService) -> None:
        async with LimitKeeper(LimitsConfig(concurrency=1), "secret") as keeper:
            limits = await LimitClient.connect(keeper.address, "secret")
            client = asking(service.url)
            async with limits.permit(50) as permit:
                await client.using(permit).post("service", "/", {})
                assert permit.tokens == counted
            await client.post("service", "/", {})  # without one
            limits.close()
            await client.close()

    run(test)


def test_what_the_router_wants_goes_along_and_no_redirection_takes_it_elsewhere() -> None:
    async def test() -> None:
        with FakeService({"score": 1}) as elsewhere:

            async def send_away(request: web.Request, body: Any) -> web.StreamResponse:
                return web.Response(status=307, headers={"Location": f"{elsewhere.url}/score"})

            with FakeService(send_away) as service:
                wanted = {"x-practicum-token": "secret", "Authorization": "Bearer secret"}
                client = RewardClient({"service": Target(service.url, window=8, timeout_s=10.0, headers=wanted)})
                assert "secret" not in repr(client.targets)
                error = await failure(client)
                assert (error.status, "answered 307" in error.reason) == ("invalid", True)
                assert {name: service.headers[0].get(name) for name in wanted} == wanted
                assert elsewhere.asked == []
                await client.close()

    run(test)
