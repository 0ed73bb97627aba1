"""The middleware for aiohttp: what the cases do not ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from taptwice.client.aiohttp import RetryMiddleware
from taptwice.client.errors import DeadlineExceeded
from taptwice.client.outcome import Outcome
from taptwice.client.policy import RetryPolicy
from taptwice.client.reports import report
from taptwice.client.shell import layer
from taptwice.client.testing import Peer, ScriptedServer, answer, close, hang, no_wait
from taptwice.client.world import World
from taptwice.core.breaker import CircuitBreaker
from taptwice.errors import CircuitOpen


def session(policy: RetryPolicy = RetryPolicy(), **settings: Any) -> aiohttp.ClientSession:  # noqa: B008
    return aiohttp.ClientSession(middlewares=[RetryMiddleware(policy, **settings)])


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "POST"])
async def test_aiohttps_own_replay_sends_nothing(method: str) -> None:
    with ScriptedServer([200, close]) as server, no_wait():
        async with session() as client:
            async with client.request(method, server.url):
                pass  # a connection to use again
            for _ in range(2):
                before = len(server.requests)
                with pytest.raises(aiohttp.ServerDisconnectedError) as caught:
                    await client.request(method, server.url)
                assert len(server.requests) - before == len(report(caught.value).attempts) == 5


async def test_aiohttp_alone_does_replay() -> None:
    """If this fails, aiohttp has changed, and what keeps its replays from the wire may go."""
    with ScriptedServer([200, close]) as server:
        async with aiohttp.ClientSession() as client:
            async with client.get(server.url):
                pass
            with pytest.raises(aiohttp.ServerDisconnectedError):
                await client.get(server.url)
        assert len(server.requests) == 3


async def test_a_body_that_was_read_can_still_be_streamed() -> None:
    with ScriptedServer([answer(200, body=b"body" * 50_000), answer(404, body=b"nothing")]) as server:
        async with session() as client:
            async with client.get(server.url) as response:
                parts = [part async for part in response.content.iter_chunked(1000)]
                assert b"".join(parts) == b"body" * 50_000
            async with client.get(server.url) as response:
                assert (await response.content.read(), await response.text()) == (b"nothing", "nothing")


async def test_a_large_body_is_handed_on_unread() -> None:
    read_on = asyncio.Event()
    loop = asyncio.get_running_loop()

    def step(peer: Peer) -> None:
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2000000\r\n\r\n" + b"a" * 1_000_000)
        asyncio.run_coroutine_threadsafe(read_on.wait(), loop).result(10)
        peer.send(b"b" * 1_000_000)

    with ScriptedServer([step]) as server:
        async with session() as client, client.get(server.url) as response:
            read_on.set()
            assert len(await response.read()) == 2_000_000


async def test_what_it_raises_is_of_aiohttp_and_of_ours() -> None:
    with ScriptedServer([hang]) as server:
        async with session(RetryPolicy(deadline=0.1)) as client:
            with pytest.raises(DeadlineExceeded) as caught:
                await client.get(server.url)
    assert isinstance(caught.value, aiohttp.ServerTimeoutError)
    assert report(caught.value).outcome is Outcome.UNKNOWN
    breaker = CircuitBreaker(failures=1)
    with ScriptedServer([503]) as server, no_wait():
        async with session(breaker=lambda: breaker) as client:
            async with client.get(server.url):
                pass
            with pytest.raises(CircuitOpen) as refused:
                await client.get(server.url)
    assert isinstance(refused.value, aiohttp.ClientConnectionError)


async def test_a_generator_of_which_nothing_was_sent_may_be_sent_after_all() -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"bo"
        yield b"dy"

    with ScriptedServer([201], listening=False) as server:
        server_listens = iter([server.listen])

        async def asleep(seconds: float) -> None:
            next(server_listens)()

        world = World(asleep=asleep)
        async with session(world=world) as client, client.post(server.url, data=parts()) as response:
            assert response.status == 201
        assert [request.body for request in server.requests] == [b"body"]


async def test_a_form_is_sent_again() -> None:
    with ScriptedServer([503, 200]) as server, no_wait():
        async with session() as client:
            form = aiohttp.FormData()
            form.add_field("file", b"content", filename="name")
            async with client.post(server.url, data=form):
                pass
        first, again = server.requests
        assert first.body == again.body
        assert b"content" in first.body


@pytest.mark.parametrize("total", [300, None])
async def test_a_redirect_keeps_the_key_and_the_next_call_has_its_own(total: float | None) -> None:
    with ScriptedServer([answer(307, {"Location": "/other"}), 201, 201]) as server:
        limit = aiohttp.ClientTimeout(total=total)
        async with session() as client:
            for _ in range(2):
                async with client.post(server.url, data=b"body", timeout=limit) as response:
                    assert response.status == 201
        first, followed, second = (request.header("Idempotency-Key") for request in server.requests)
        assert first == followed != second


async def test_a_cancellation_passes_and_the_connection_is_closed() -> None:
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def step(peer: Peer) -> None:
        loop.call_soon_threadsafe(begun.set)
        hang(peer)

    with ScriptedServer([step]) as server:
        async with session() as client:
            call = asyncio.create_task(client._request("GET", server.url))
            await begun.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await asyncio.to_thread(server.hung_up.acquire, timeout=10)
        assert (len(server.requests), layer.get()) == (1, None)
