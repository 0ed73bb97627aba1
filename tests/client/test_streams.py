"""Answers that are read piece by piece: what may be begun anew, what not, and what is told of it."""

from __future__ import annotations

import asyncio
import pathlib
import threading
from typing import Any

import httpx
import httpx2
import pytest
import trio

from taptwice.client.errors import DeadlineExceeded
from taptwice.client.http import AsyncClient, Client
from taptwice.client.httpx2 import RetryTransport
from taptwice.client.intents import IntentStore
from taptwice.client.outcome import Outcome
from taptwice.client.plan import StopReason
from taptwice.client.policy import RetryPolicy
from taptwice.client.reports import Attempted, Ended, report
from taptwice.client.testing import Peer, ScriptedServer, Step, answer, no_wait, send
from taptwice.core.breaker import CircuitBreaker
from taptwice.core.budget import RetryBudget
from tests.client.doors import DOORS, Door
from tests.client.fake import C0

STREAMING = DOORS[:8]
"""Those that take another attempt's body; `GAPS` tells of the others."""
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"
CUT = send(CHUNKED + b"\r\n")
WHOLE = answer(200, body=b"whole", chunked=True)

doors = pytest.mark.parametrize("door", STREAMING, ids=lambda door: door.name.replace(" ", "-"))


def broken(door: Door, script: list[Step], method: str = "GET", **setting: Any) -> tuple[Any, ScriptedServer]:
    """What comes up of a stream that could not be saved; the server must have seen what the log has."""
    with ScriptedServer(script) as server, door.open(**setting) as session:
        with pytest.raises((httpx2.HTTPError, httpx.HTTPError)) as caught:
            session.call(method, server.url, stream=True)
        assert len(server.requests) == len(report(caught.value).attempts)
        ended = [event.report for event in session.events if isinstance(event, Ended)]
        assert ended == [report(caught.value)]
        numbers = [event.number for event in session.events if isinstance(event, Attempted)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) == len(server.requests)
    return caught.value, server


@doors
@pytest.mark.parametrize(
    "other",
    [
        send(CHUNKED + b'ETag: "2"\r\n\r\n5\r\nother\r\n0\r\n\r\n'),
        send(CHUNKED + b'ETag: "1"\r\nContent-Encoding: gzip\r\n\r\n5\r\nother\r\n0\r\n\r\n'),
        send(CHUNKED + b"\r\n5\r\nother\r\n0\r\n\r\n"),
        send(b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 5\r\n\r\nother'),
        send(
            b'HTTP/1.1 201 Created\r\nETag: "1"\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nother\r\n0\r\n\r\n'
        ),
        answer(404),
    ],
    ids=["etag", "encoding", "no-etag", "length", "status", "refused"],
)
def test_another_answer_is_not_handed_out_under_the_first_ones_head(door: Door, other: Step) -> None:
    error, _ = broken(door, [send(CHUNKED + b'ETag: "1"\r\n\r\n'), other])
    assert "incomplete chunked read" in str(error)
    assert [each.status for each in error.attempts] == [None, error.attempts[1].status]
    assert error.attempts[0].error is error
    assert (error.stop_reason, error.outcome) == (StopReason.ANSWER_CHANGED, Outcome.PROCESSED)


@doors
def test_a_post_without_a_key_is_not_sent_again(door: Door) -> None:
    error, _ = broken(door, [CUT, WHOLE], "POST", policy=C0.replace(auto_key=False))
    assert error.stop_reason is StopReason.UNKNOWN_OUTCOME


@doors
def test_a_post_with_a_key_is_sent_again_with_it(door: Door) -> None:
    with ScriptedServer([CUT, WHOLE]) as server, door.open() as session:
        result = session.call("POST", server.url, content=b"body", stream=True)
        assert (result.body, result.log) == (b"whole", ["processed", 200])
        assert [request.body for request in server.requests] == [b"body"] * 2
        keys = {request.header("Idempotency-Key") for request in server.requests}
        assert keys == {result.report.idempotency_key}


@doors
def test_attempts_budget_and_breaker_hold(door: Door) -> None:
    error, _ = broken(door, [CUT])
    assert (len(error.attempts), error.stop_reason) == (4, StopReason.ATTEMPTS)
    error, _ = broken(door, [CUT], budget=RetryBudget(start=1))
    assert (len(error.attempts), error.stop_reason) == (2, StopReason.BUDGET)
    breaker = CircuitBreaker(failures=3)
    error, _ = broken(door, [CUT], breaker=breaker)
    assert (len(error.attempts), error.stop_reason, breaker.state) == (3, StopReason.CIRCUIT_OPEN, "open")


@doors
def test_what_the_last_attempts_show_when_none_goes_well(door: Door) -> None:
    error, _ = broken(door, [CUT, 503])
    assert [each.status for each in error.attempts] == [None, 503, 503, 503]
    assert "incomplete chunked read" in str(error)
    assert (error.stop_reason, error.outcome) == (StopReason.ATTEMPTS, Outcome.UNKNOWN)


@doors
def test_the_deadline_of_the_call_holds(door: Door) -> None:
    def silent(peer: Peer) -> None:
        peer.send(CHUNKED + b"\r\n")
        peer.wait_until_gone()

    error, server = broken(door, [silent], policy=C0.replace(deadline=0.3))
    assert isinstance(error, DeadlineExceeded)
    assert (len(server.requests), report(error).stop_reason) == (1, StopReason.DEADLINE)


def test_the_head_of_an_event_stream_is_not_held_back() -> None:
    first, heard = threading.Event(), list[Attempted | Ended]()

    def events(peer: Peer) -> None:
        peer.send(CHUNKED + b"Content-Type: text/event-stream\r\n\r\n")
        assert first.wait(30)
        peer.send(b"9\r\ndata: 1\n\n\r\n")
        peer.close()

    with ScriptedServer([events]) as server, Client(server.url, listeners=[heard.append]) as client:
        with client.stream("GET", "/") as response:
            assert (response.status_code, report(response).attempts[0].status) == (200, 200)
            assert heard == []  # the attempt can still fail
            first.set()
            lines = response.iter_lines()
            assert next(lines) == "data: 1"
            assert [type(event) for event in heard] == [Attempted, Ended]
            with pytest.raises(httpx2.RemoteProtocolError):
                list(lines)
        assert (len(server.requests), len(heard)) == (1, 2)


@pytest.mark.parametrize("library", [httpx2, httpx], ids=lambda library: library.__name__)
def test_the_response_tells_of_the_attempt_that_it_is_read_from(library: Any) -> None:
    with (
        ScriptedServer([CUT, WHOLE]) as server,
        no_wait(),
        Client(http=library.Client(base_url=server.url)) as client,
        client.stream("GET", "/") as response,
    ):
        before = response.extensions["network_stream"]
        assert len(report(response).attempts) == 1
        assert response.read() == b"whole"
        assert [each.outcome for each in report(response).attempts] == ["processed"] * 2
        assert report(response).attempts[0].error is not None
        assert response.extensions["network_stream"] is not before
        assert response.elapsed.total_seconds() > 0
        assert response.num_bytes_downloaded == 5


def test_an_event_hook_that_reads_the_repeat() -> None:
    heard: list[Attempted | Ended] = []

    def hook(response: httpx2.Response) -> None:
        if len(server.requests) == 2:
            response.read()

    hooks = {"response": [hook]}
    with (
        ScriptedServer([CUT, WHOLE]) as server,
        no_wait(),
        Client(server.url, listeners=[heard.append], event_hooks=hooks) as client,
        client.stream("GET", "/") as response,
    ):
        with pytest.raises(httpx2.RemoteProtocolError) as caught:
            response.read()
        assert [type(event) for event in heard] == [Attempted, Attempted, Ended]
        assert len(report(caught.value).attempts) == len(server.requests) == 2


def test_what_is_closed_unread_is_told_of_and_closes_the_circuit() -> None:
    heard: list[Attempted | Ended] = []
    breaker = CircuitBreaker(failures=1, cooldown=5.0)
    settings: dict[str, Any] = {"breaker": lambda: breaker, "listeners": [heard.append]}
    script: list[Step] = [503, send(CHUNKED + b"\r\n1\r\nx\r\n")]
    with ScriptedServer(script) as server, no_wait() as waits, Client(server.url, **settings) as client:
        client.get("/")
        heard.clear()
        waits.append(5.0)  # the cool-down is over
        with client.stream("GET", "/") as response:
            before = breaker.state
        assert (before, breaker.state) == ("probing", "closed")
    assert [type(event) for event in heard] == [Attempted, Ended]
    assert isinstance(heard[1], Ended)
    assert heard[1].report == report(response)


def test_a_layer_around_it_retries_and_this_one_does_not() -> None:
    policy = RetryPolicy(max_attempts=4)
    inner = httpx2.Client(transport=RetryTransport(policy))
    with ScriptedServer([CUT]) as server, no_wait(), Client(http=inner, policy=policy) as client:
        single = client.single_attempt()
        for each, attempts, reason in (
            (single, 1, StopReason.SINGLE_ATTEMPT),
            (client, 4, StopReason.ATTEMPTS),
        ):
            server.requests.clear()
            with (
                each.stream("GET", server.url) as response,
                pytest.raises(httpx2.RemoteProtocolError) as caught,
            ):
                response.read()
            assert len(server.requests) == attempts
            assert report(caught.value).stop_reason is reason


def test_an_intents_answer_is_streamed_under_its_key(tmp_path: pathlib.Path) -> None:
    store = IntentStore(tmp_path / "intents.db")
    with (
        ScriptedServer([CUT, WHOLE]) as server,
        no_wait(),
        Client(server.url, namespace="n", intents=store) as client,
        client.stream("POST", "/", intent="order-17", content=b"body") as response,
    ):
        assert response.read() == b"whole"
        assert len({request.header("Idempotency-Key") for request in server.requests}) == 1
        assert len(report(response).attempts) == len(server.requests) == 2


async def test_cancelled_before_the_first_piece_no_further_request() -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def silent(peer: Peer) -> None:
        peer.send(CHUNKED + b"\r\n")
        loop.call_soon_threadsafe(asked.set)
        peer.wait_until_gone()

    with ScriptedServer([silent]) as server:
        async with AsyncClient(server.url) as client:

            async def read() -> None:
                async with client.stream("GET", "/") as response:
                    await response.aread()

            task = asyncio.create_task(read())
            await asked.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await asyncio.to_thread(server.hung_up.acquire, timeout=30)
        assert len(server.requests) == 1


def test_on_trio() -> None:
    async def main(url: str) -> bytes:
        async with AsyncClient(url) as client, client.stream("GET", "/") as response:
            return b"".join([piece async for piece in response.aiter_bytes()])

    with ScriptedServer([CUT, WHOLE]) as server, no_wait():
        assert trio.run(main, server.url) == b"whole"
        assert len(server.requests) == 2
