"""`Client` and `AsyncClient`: keys, options, layers, cancellation, and what must be refused."""

from __future__ import annotations

import asyncio
import contextlib
import io
import pathlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import httpx2
import pytest
import trio

from taptwice.client.errors import DeadlineExceeded
from taptwice.client.http import AsyncClient, Client
from taptwice.client.httpx2 import AsyncRetryTransport, RetryTransport
from taptwice.client.keys import key_of
from taptwice.client.outcome import Outcome
from taptwice.client.plan import StopReason
from taptwice.client.policy import RetryPolicy
from taptwice.client.reports import Attempted, Ended, report
from taptwice.client.shell import inherit, layer
from taptwice.client.testing import (
    Peer,
    ScriptedServer,
    Step,
    answer,
    close,
    hang,
    no_wait,
    problem,
    reset,
    send,
)
from taptwice.client.world import World
from taptwice.core.breaker import CircuitBreaker
from taptwice.core.budget import RetryBudget
from taptwice.errors import KeyInvalid, Misuse
from tests.client.doors import DOORS, Door
from tests.client.silent import silent

PAIR = DOORS[:2]
CERTIFICATE = pathlib.Path(__file__).with_name("self_signed.pem")


def keys(server: ScriptedServer) -> list[str | None]:
    return [request.header("Idempotency-Key") for request in server.requests]


# --- keys ---------------------------------------------------------------------------------------------------


def test_d310_an_intents_key_is_the_same_after_a_restart_and_on_every_machine() -> None:
    with ScriptedServer([201]) as server:
        for _ in range(2):
            with Client(server.url, namespace="shop-test") as client:
                client.post("/", intent="checkout-4711")
        assert keys(server) == ["d9178924-534e-559d-a28e-f1aec7fd7cb5"] * 2


def test_d311_another_intent_another_key_even_with_the_same_body() -> None:
    with ScriptedServer([201]) as server, Client(server.url, namespace="shop-test") as client:
        for intent in ("coffee-1", "coffee-2"):
            client.post("/", intent=intent, json={"user": 7, "cents": 500})
        client.with_options(namespace="shop-prod").post("/", intent="coffee-1")
        assert len(set(keys(server))) == 3
    assert key_of("a", "bc") != key_of("ab", "c")


def test_an_intent_on_any_method() -> None:
    with ScriptedServer([close, 200]) as server, no_wait(), Client(server.url, namespace="n") as client:
        client.delete("/", intent="i")
        assert keys(server) == [key_of("n", "i")] * 2


def test_what_makes_no_key_is_refused_before_anything_is_sent() -> None:
    with ScriptedServer() as server, Client(server.url) as client:
        with pytest.raises(Misuse, match=r"namespace='shop-prod'"):
            client.post("/", intent="i")
        named = client.with_options(namespace="n")
        with pytest.raises(Misuse, match="empty"):
            named.post("/", intent="")
        with pytest.raises(Misuse, match="not both"):
            named.post("/", intent="i", idempotency_key="k")
        with pytest.raises(Misuse, match="give one of them"):
            named.post("/", intent="i", headers={"idempotency-key": "k"})
        with pytest.raises(KeyInvalid):
            client.post("/", idempotency_key="ключ")
        assert server.requests == []


def test_d317_a_quoted_key() -> None:
    with ScriptedServer() as server, Client(server.url) as client:
        client.with_options(key_quoting="sf-string").post("/", idempotency_key="k")
        client.post("/", idempotency_key="k")
        assert keys(server) == ['"k"', "k"]


def test_a_key_among_the_clients_own_headers_would_be_every_calls() -> None:
    with pytest.raises(Misuse, match="every call would send that key"):
        Client(headers={"idempotency-key": "k"})


@pytest.mark.parametrize(
    "headers",
    [
        {"IDEMPOTENCY-key": "mine"},
        {b"idempotency-key": b"mine"},
        {"idempotency-key": b"mine"},
        [("X", "y"), ("idempotency-key", "mine")],
        httpx2.Headers({"idempotency-key": "mine"}),
    ],
    ids=str,
)
def test_ones_own_key_however_the_headers_are_spelled(headers: Any) -> None:
    with ScriptedServer() as server, Client(server.url) as client:
        response = client.post("/", headers=headers)
        assert report(response).idempotency_key == "mine"
        names = [name.lower() for name, _ in server.requests[0].headers]
        assert (keys(server), names.count("idempotency-key")) == (["mine"], 1)


def test_the_key_has_another_name() -> None:
    policy = RetryPolicy(key_header="X-Request-Id")
    with ScriptedServer() as server, Client(server.url, policy=policy) as client:
        response = client.post("/")
        assert server.requests[0].header("X-Request-Id") == report(response).idempotency_key
        assert keys(server) == [None]


# --- the story, and its end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("door", PAIR, ids=lambda door: door.name)
def test_d285_503_then_429_then_charged_and_dropped_then_the_replay(door: Door) -> None:
    replay = answer(201, {"Idempotent-Replayed": "true"}, b"{}")
    script: list[Step] = [503, answer(429, {"Retry-After": "1"}), close, replay]
    with ScriptedServer(script) as server, door.open(policy=RetryPolicy()) as session:
        result = session.call("POST", server.url, content=b"pay")
        assert (result.status, result.headers["idempotent-replayed"]) == (201, "true")
        assert result.log == [503, 429, "unknown", 201]
        assert session.waits == [0.4, 1.1, 1.6]  # the longest that can be drawn
        assert set(keys(server)) == {result.report.idempotency_key}


@pytest.mark.parametrize("door", PAIR, ids=lambda door: door.name)
def test_d306_one_deadline_covers_every_attempt_and_every_wait(door: Door) -> None:
    policy = RetryPolicy(deadline=0.6, per_try=0.2, base=0.01)
    with ScriptedServer([hang]) as server, door.open(policy=policy) as session:
        result = session.call("POST", server.url)
        assert isinstance(result.error, httpx2.TimeoutException)  # ours, if the deadline cut the last attempt
        assert len(result.log) <= 4
        assert result.report.stop_reason is StopReason.DEADLINE


# --- options ------------------------------------------------------------------------------------------------


def test_with_options_shares_connections_and_changes_nothing_behind() -> None:
    with ScriptedServer() as server, Client(server.url) as client:
        other = client.with_options(max_attempts=1)
        for each in (client, other, client.single_attempt()):
            each.get("/")
        assert server.connections == 1
        with pytest.raises(Misuse, match="no setting attempts"):
            client.with_options(attempts=1)


def test_a_calls_own_deadline() -> None:
    with ScriptedServer([hang]) as server, Client(server.url) as client:
        with pytest.raises(DeadlineExceeded) as caught:
            client.get("/", deadline=0.1)
        assert isinstance(caught.value, httpx2.TimeoutException)
        assert isinstance(caught.value.__cause__, httpx2.ReadTimeout)
        assert isinstance(caught.value.request, httpx2.Request)
        assert str(caught.value) == "the deadline of 0.1 s passed, after 1 attempt; outcome unknown"


def test_the_librarys_own_timeout_holds_beside_ours() -> None:
    with ScriptedServer([hang, 200]) as server, no_wait(), Client(server.url) as client:
        policy: dict[str, Any] = {"per_try": None, "deadline": 60.0}
        assert client.with_options(**policy).get("/", timeout=0.1).status_code == 200


def test_no_limit_at_all() -> None:
    with ScriptedServer() as server, Client(server.url) as client:
        assert client.with_options(per_try=None).get("/", deadline=None).status_code == 200
        assert server.requests[0].header("Request-Timeout-Ms") is None


def test_what_an_error_carries() -> None:
    with ScriptedServer([close]) as server, no_wait(), Client(server.url) as client:
        with pytest.raises(httpx2.RemoteProtocolError) as caught:
            client.post("/", idempotency_key="k")
        error: Any = caught.value
        assert len(error.attempts) == 5
        assert (error.stop_reason, error.outcome) == (StopReason.ATTEMPTS, Outcome.UNKNOWN)
        assert (error.idempotency_key, error.retry_after) == ("k", None)
        assert report(error).attempts == error.attempts
        assert error.attempts[-1].error is error


def test_an_answer_from_elsewhere_has_no_report() -> None:
    with pytest.raises(Misuse, match="did not come from a client"):
        report(httpx2.Response(200))
    with pytest.raises(Misuse):
        report(ValueError())


def test_events() -> None:
    heard: list[Attempted | Ended] = []

    def deaf(event: Attempted | Ended) -> None:
        raise ValueError

    with ScriptedServer([503, 200]) as server, no_wait():
        with Client(server.url, listeners=[deaf, heard.append]) as client:
            response = client.get("/")
        assert [type(event) for event in heard] == [Attempted, Attempted, Ended]
        assert [event.number for event in heard if isinstance(event, Attempted)] == [1, 2]
        assert isinstance(heard[2], Ended)
        assert heard[2].report is report(response)
        assert {(event.method, event.origin) for event in heard} == {("GET", server.url)}


@pytest.mark.parametrize("door", PAIR, ids=lambda door: door.name)
def test_t40_blocking_and_awaiting_tell_the_same_events(door: Door) -> None:
    with ScriptedServer([503, close, 200]) as server, door.open() as session:
        session.call("PUT", server.url)
        told = [
            (event.number, event.attempt.outcome, event.attempt.waited)
            for event in session.events
            if isinstance(event, Attempted)
        ]
    assert told == [(1, "unknown", 0.0), (2, "unknown", 0.1), (3, "processed", 0.2)]


def test_t17_the_wall_clock_may_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter([3600.0, -3600.0] * 9)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    with ScriptedServer([503, 503, 200]) as server, DOORS[0].open() as session:
        result = session.call("GET", server.url)
        assert (result.log, session.waits) == ([503, 503, 200], [0.1, 0.2])


@pytest.mark.parametrize(("status", "attempts"), [(503, 5), (404, 1), (429, 5)])
@pytest.mark.parametrize("read", [True, False])
def test_an_event_hook_that_raises_on_a_status(status: int, attempts: int, read: bool) -> None:
    def hook(response: httpx2.Response) -> None:
        if read:
            response.read()
        response.raise_for_status()

    body = answer(status, {"Content-Type": "application/problem+json"}, b"{}")
    hooks = {"response": [hook]}
    with ScriptedServer([body]) as server, no_wait(), Client(server.url, event_hooks=hooks) as client:
        with pytest.raises(httpx2.HTTPStatusError) as caught:
            client.post("/")
        assert len(server.requests) == len(report(caught.value).attempts) == attempts


# --- layers -------------------------------------------------------------------------------------------------


def test_t41_a_layer_around_a_layer_does_not_multiply() -> None:
    with ScriptedServer([503]) as server, no_wait():
        policy = RetryPolicy(max_attempts=4)
        inner = httpx2.Client(transport=RetryTransport(policy))
        with Client(http=inner, policy=policy) as client:
            assert client.get(server.url).status_code == 503
        assert len(server.requests) == 4


def test_a_clients_layer_ends_with_its_attempt() -> None:
    with ScriptedServer([503]) as server, no_wait(), Client(server.url) as client:
        client.get("/")
        assert layer.get() is None


def test_a_foreign_loop_around_a_single_attempt() -> None:
    with ScriptedServer([503]) as server, Client(server.url) as client:
        single = client.single_attempt()
        for _ in range(3):
            assert report(single.get("/")).stop_reason is StopReason.SINGLE_ATTEMPT
        assert len(server.requests) == 3
        assert server.requests[0].header("Retry-Attempt") is None


def test_what_a_request_says_that_came_in() -> None:
    with ScriptedServer([503]) as server, no_wait(), Client(server.url) as client:
        with inherit({"retry-attempt": "1", "Request-Timeout-Ms": "1500"}):
            found = report(client.get("/"))
        assert (len(found.attempts), found.stop_reason) == (1, StopReason.SINGLE_ATTEMPT)
        assert 0 < int(server.requests[0].header("Request-Timeout-Ms") or 0) <= 1500
        with inherit({"request-timeout-ms": "soon"}):
            assert len(report(client.get("/")).attempts) > 1


def test_s160_three_services_of_three_attempts_make_seven_calls_and_not_twenty_seven() -> None:
    """Each service calls the next; the last one's database is down."""
    policy = RetryPolicy(max_attempts=3, base=0.001, per_try=None, deadline=60)
    with ScriptedServer([503]) as database, contextlib.ExitStack() as stack:

        def service(below: str) -> str:
            client = stack.enter_context(Client(below, policy=policy, budget=None))

            def step(peer: Peer) -> None:
                with inherit(dict(peer.request.headers)):
                    status = client.get("/").status_code
                answer(status)(peer)

            return stack.enter_context(ScriptedServer([step])).url

        front = stack.enter_context(Client(service(service(database.url)), policy=policy, budget=None))
        assert front.get("/").status_code == 503
        assert len(database.requests) == 7


def test_a_limit_that_came_in_ends_our_calls() -> None:
    with (
        ScriptedServer([hang]) as server,
        Client(server.url) as client,
        inherit({"Request-Timeout-Ms": "100"}),
        pytest.raises(DeadlineExceeded),
    ):
        client.get("/")


# --- cancellation -------------------------------------------------------------------------------------------


async def test_t39_cancelled_in_a_wait_no_further_request() -> None:
    waiting = asyncio.Event()

    async def asleep(seconds: float) -> None:
        waiting.set()
        await asyncio.Event().wait()

    with ScriptedServer([503]) as server:
        async with AsyncClient(server.url) as client:
            client._world = World(asleep=asleep)
            call = asyncio.create_task(client.get("/"))
            await waiting.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert len(server.requests) == 1


async def test_t39_cancelled_in_an_attempt_the_server_sees_the_end() -> None:
    seen = asyncio.Event()
    loop = asyncio.get_running_loop()

    def step(peer: Any) -> None:
        loop.call_soon_threadsafe(seen.set)
        hang(peer)

    with ScriptedServer([step, 200]) as server:
        async with AsyncClient(server.url) as client:
            call = asyncio.create_task(client.get("/"))
            await seen.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await asyncio.to_thread(server.hung_up.acquire, timeout=10)
            assert (await client.get("/")).status_code == 200  # the pool has a free place again
            assert layer.get() is None


# --- what the network does ----------------------------------------------------------------------------------


@pytest.mark.parametrize("door", [door for door in DOORS if "httpx" in door.name], ids=lambda door: door.name)
def test_a_certificate_nobody_vouches_for_is_not_tried_again(door: Door) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(CERTIFICATE)
    with ScriptedServer(tls=tls) as server, door.open() as session:
        result = session.call("POST", server.url)
        assert (result.log, result.report.stop_reason) == (["not_sent"], StopReason.PERMANENT)
        assert server.requests == []


def test_addresses_of_a_host_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two addresses the first drops all packets: the second has its share of the deadline left."""
    with ScriptedServer([200]) as server, silent("127.0.0.2", server.port), Client() as client:
        both = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, server.port))
            for host in ("127.0.0.2", "127.0.0.1")
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: both)
        assert client.get(f"http://many.test:{server.port}/", deadline=1).status_code == 200


def test_a_host_of_which_no_address_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with silent("127.0.0.2", 0) as port, Client() as client:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
        with pytest.raises(httpx2.HTTPError) as caught:
            client.get(f"http://silent.test:{port}/", deadline=0.3)
        assert report(caught.value).outcome is Outcome.NOT_SENT


def test_accepted_and_closed_before_anything_was_sent_is_judged_by_what_was_written() -> None:
    with ScriptedServer([close]) as server, Client(server.url) as client:
        with pytest.raises(httpx2.HTTPError) as caught:
            client.with_options(auto_key=False).post("/")
        assert report(caught.value).outcome is Outcome.UNKNOWN


def ends_when_idle(heard: threading.Event, end: Callable[[Peer], None]) -> Step:
    def step(peer: Peer) -> None:
        answer(200)(peer)
        heard.wait(5)
        end(peer)

    return step


@pytest.mark.parametrize("end", [close, reset])
def test_a_connection_that_ended_while_idle_is_not_used_again(end: Callable[[Peer], None]) -> None:
    heard = threading.Event()
    with ScriptedServer([ends_when_idle(heard, end), 200]) as server, Client(server.url) as client:
        own = client.get("/").extensions["network_stream"].get_extra_info("socket")
        heard.set()
        select.select([own], [], [], 5)
        assert len(report(client.get("/")).attempts) == 1
        assert (len(server.requests), server.connections) == (2, 2)


@pytest.mark.parametrize("end", [close, reset])
async def test_nor_where_it_is_awaited(end: Callable[[Peer], None]) -> None:
    heard = threading.Event()
    with ScriptedServer([ends_when_idle(heard, end), 200]) as server:
        async with AsyncClient(server.url) as client:
            own = (await client.get("/")).extensions["network_stream"].get_extra_info("socket")
            heard.set()
            select.select([own], [], [], 5)
            assert len(report(await client.get("/")).attempts) == 1
        assert (len(server.requests), server.connections) == (2, 2)


def test_s150_bodies_of_failures_are_thrown_away_and_connections_used_again() -> None:
    with ScriptedServer([answer(503, body=b"x" * 4096)]) as server, no_wait():
        policy = RetryPolicy(max_attempts=50, base=0, deadline=None)
        with Client(server.url, policy=policy, budget=None) as client:
            for _ in range(4):
                client.get("/")
        assert (len(server.requests), server.connections) == (200, 1)


def test_d316_redirects_are_one_attempt() -> None:
    script: list[Step] = [answer(307, {"Location": "/other"}), 201, answer(303, {"Location": "/done"}), 200]
    with ScriptedServer(script) as server, Client(server.url, follow_redirects=True) as client:
        for status in (201, 200):
            response = client.post("/", content=b"body", idempotency_key="k")
            assert (response.status_code, len(report(response).attempts)) == (status, 1)
        assert [request.method for request in server.requests] == ["POST", "POST", "POST", "GET"]
        assert keys(server)[:3] == ["k", "k", "k"]
        assert server.requests[1].body == b"body"


def test_a_stream_is_not_cut_by_the_limit_of_an_attempt() -> None:
    later = [0.0]
    world = World(clock=lambda: time.monotonic() + later[0])
    read_on = threading.Event()

    def step(peer: Peer) -> None:
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\na")
        _ = read_on.wait(10)
        peer.send(b"b")

    with (
        ScriptedServer([step]) as server,
        Client(server.url, world=world) as client,
        client.stream("GET", "/") as response,
    ):
        later[0] = 5.0  # two seconds for an attempt, ten for the call
        read_on.set()
        assert b"".join(response.iter_bytes()) == b"ab"


def test_a_stream_ends_with_the_calls_deadline() -> None:
    def forever(peer: Any) -> None:
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while not peer.server.stopping.is_set():
            peer.send(b".")
            peer.pause(0.02)

    with (
        ScriptedServer([forever]) as server,
        Client(server.url) as client,
        client.stream("GET", "/", deadline=0.2) as response,
        pytest.raises(httpx2.ReadTimeout),
    ):
        list(response.iter_bytes())


async def test_a_stream_awaited() -> None:
    with ScriptedServer([503, answer(200, body=b"ab")]) as server, no_wait():
        async with AsyncClient(server.url) as client, client.stream("GET", "/") as response:
            assert b"".join([part async for part in response.aiter_bytes()]) == b"ab"
            assert len(report(response).attempts) == 2


def test_on_trio() -> None:
    async def main(url: str) -> httpx2.Response:
        world = World(draw=lambda: 0.01)
        async with AsyncClient(url, world=world) as client:
            with pytest.raises(DeadlineExceeded):
                await client.get("/", deadline=0.1)
            return await client.post("/", content=io.BytesIO(b"body"))

    with ScriptedServer([hang, 503, close, 201]) as server:
        response = trio.run(main, server.url)
        assert [each.outcome for each in report(response).attempts] == ["unknown", "unknown", "processed"]
        assert {request.body for request in server.requests[1:]} == {b"body"}


def test_an_encoded_problem_is_read_and_an_unreadable_one_is_an_answer() -> None:
    import gzip

    body = gzip.compress(b'{"type": "https://taptwice.dev/problems/in-progress"}')
    headers = {"Content-Type": "application/problem+json", "Content-Encoding": "gzip"}
    waiting = answer(409, headers, body)
    transport = RetryTransport()
    with ScriptedServer([waiting, 201]) as server, no_wait(), httpx2.Client(transport=transport) as client:
        assert client.post(server.url).status_code == 201


async def test_a_transport_asked_to_read_whole() -> None:
    cut = send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nwho")
    whole = answer(200, body=b"whole", chunked=True)
    with ScriptedServer([cut, whole]) as server, no_wait():
        async with httpx2.AsyncClient(transport=AsyncRetryTransport()) as client:
            response = await client.get(server.url, extensions={"taptwice": {"whole": True}})
            assert response.content == b"whole"


async def test_a_probe_that_is_cancelled_leaves_its_place_to_the_next() -> None:
    breaker, begun = CircuitBreaker(failures=1, cooldown=1), threading.Event()
    breaker.leave(breaker.enter(0.0) or 0, False, 0.0)  # open since the clock began: the next is the probe

    def hanging(peer: Peer) -> None:
        begun.set()
        hang(peer)

    with ScriptedServer([hanging, 200]) as server:
        async with AsyncClient(server.url, breaker=lambda: breaker) as client:
            probe = asyncio.create_task(client.get("/"))
            assert await asyncio.to_thread(begun.wait, 10)
            probe.cancel()
            with pytest.raises(asyncio.CancelledError):
                await probe
            assert (await client.get("/")).status_code == 200
    assert breaker.state == "closed"


def test_a_call_earns_its_part_of_a_retry() -> None:
    budget = RetryBudget(ratio=1, start=0)
    with (
        ScriptedServer([503, 200]) as server,
        no_wait(),
        Client(server.url, budget=lambda: budget) as client,
    ):
        assert client.get("/").status_code == 200
    assert budget.tokens == 0


# --- misuse -------------------------------------------------------------------------------------------------


def test_retries_below_ours_are_refused() -> None:
    for make in (
        lambda: RetryTransport(wrapping=httpx2.HTTPTransport(retries=2)),
        lambda: Client(http=httpx.Client(transport=httpx.HTTPTransport(retries=2))),
    ):
        with pytest.raises(Misuse, match="set it to 0"):
            make()


def test_settings_beside_a_client_would_be_ignored() -> None:
    with httpx2.Client() as http:
        for settings in ({"base_url": "http://x"}, {"verify": False}):
            with pytest.raises(Misuse, match="would be ignored"):
                Client(http=http, **settings)
    with pytest.raises(Misuse, match="no client of httpx2"):
        Client(http=object())


def test_a_transport_that_has_no_wire() -> None:
    def handler(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectTimeout("", request=request)

    with no_wait(), Client(http=httpx2.Client(transport=httpx2.MockTransport(handler))) as client:
        with pytest.raises(httpx2.ConnectTimeout) as caught:
            client.get("http://x/")
        assert report(caught.value).outcome is Outcome.NOT_SENT


@pytest.mark.parametrize("wrong", [lambda client: client.get("/", nonsense=1), lambda client: client.get(7)])
def test_a_wrong_call_is_no_failure_of_the_server(wrong: Callable[[Any], Any]) -> None:
    with ScriptedServer() as server, Client(server.url) as client, pytest.raises(TypeError):
        wrong(client)


def test_a_closed_client() -> None:
    client = Client("http://127.0.0.1:9")
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.get("/")


def test_problems_of_another_server() -> None:
    with (
        ScriptedServer([problem(409, "in-progress"), 201]) as server,
        no_wait(),
        Client(server.url) as client,
    ):
        elsewhere = client.with_options(problems="https://elsewhere.example/")
        assert elsewhere.post("/").status_code == 409
