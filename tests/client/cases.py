"""The black-box cases: a server by a script, a call, and what the caller and the server must have seen.

Each case is written once and runs through every door. `GAPS` names what a door cannot do, and why; a gap
that has closed is an error, so the table in the documentation, which is made from here, stays true.
"""

from __future__ import annotations

import contextlib
import io
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any

import pytest

from taptwice.client.errors import DeadlineExceeded, KeyRejected, KeyReused
from taptwice.client.outcome import Outcome
from taptwice.client.plan import StopReason
from taptwice.client.testing import (
    Peer,
    Request,
    ScriptedServer,
    answer,
    close,
    drip,
    hang,
    problem,
    reset,
    send,
)
from taptwice.core.breaker import CircuitBreaker
from taptwice.core.budget import RetryBudget
from taptwice.errors import CircuitOpen
from tests.client.doors import Door, Result, Session
from tests.client.fake import C0


@dataclass(frozen=True)
class Case:
    """A case by its name."""

    name: str
    title: str
    run: Callable[[Door], None]


CASES: list[Case] = []


def case(name: str, title: str) -> Callable[[Callable[[Door], None]], Callable[[Door], None]]:
    """Register a case."""

    def register(function: Callable[[Door], None]) -> Callable[[Door], None]:
        CASES.append(Case(name, title, function))
        return function

    return register


@contextlib.contextmanager
def scene(door: Door, script: list[Any], **setting: Any) -> Iterator[tuple[ScriptedServer, Session]]:
    """A server and a client for it; afterwards the client's log must equal what the server saw."""
    with ScriptedServer(script) as server, door.open(**setting) as session:
        yield server, session


def once(
    door: Door, script: list[Any], method: str = "GET", *, sent: int | None = None, **more: Any
) -> Result:
    """One call. The server must have seen as many requests as the log has attempts, or `sent`."""
    call = {name: more.pop(name) for name in ("content", "headers", "stream") if name in more}
    with scene(door, script, **more) as (server, session):
        result = session.call(method, server.url + "/x", **call)
        assert len(server.requests) == (len(result.log) if sent is None else sent), result
        result.headers["waits"] = repr(session.waits)
        session.events.clear()
        once.requests = server.requests  # type: ignore[attr-defined]
    return result


def waits(result: Result) -> list[float]:
    """What the call waited, between its attempts."""
    return [each.waited for each in result.report.attempts[1:]]


def requests() -> list[Request]:
    """What the server of the last `once` saw."""
    return once.requests  # type: ignore[attr-defined, no-any-return]


KEYED = {"Idempotency-Key": "k-1"}
KEYLESS = C0.replace(auto_key=False)


@case("T01", "two 503, then an answer: exact waits")
def t01(door: Door) -> None:
    result = once(door, [503, 503, 200])
    assert (result.status, result.log, waits(result)) == (200, [503, 503, 200], [0.1, 0.2])


@case("T03", "Retry-After is a lower bound")
def t03(door: Door) -> None:
    for status in (429, 503):
        for u in (0.001, 1.0):
            result = once(door, [answer(status, {"Retry-After": "2"}), 200], u=lambda u=u: u)
            assert result.log == [status, 200]
            assert 2.0 <= waits(result)[0] <= 2.5


@case("T04", "Retry-After as a date, in three forms")
def t04(door: Door) -> None:
    for form in ("%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT", "%a %b %e %H:%M:%S %Y"):

        def step(peer: Peer, form: str = form) -> None:
            # Whole seconds, so 2.2 to 3.2 of them: the fifth is for the way to the client.
            date = time.strftime(form, time.gmtime(time.time() + 3.2))
            answer(503, {"Retry-After": date})(peer)

        result = once(door, [step, 200])
        assert result.log == [503, 200]
        assert 2.0 <= waits(result)[0] <= 3.6


@case("T06", "Retry-After that cannot be used")
def t06(door: Door) -> None:
    for value in ("0", formatdate(1e9, usegmt=True), "soon", "-5", ""):
        result = once(door, [answer(503, {"Retry-After": value}), 200])
        assert waits(result) == [0.1]
    assert waits(once(door, [answer(503, {"Retry-After": "1.5"}), 200]))[0] >= 1.5


@case("T07", "Retry-After beyond the deadline: stop at once")
def t07(door: Door) -> None:
    result = once(door, [answer(429, {"Retry-After": "86400"})])
    assert (result.status, result.log, result.report.retry_after) == (429, [429], 86400)
    assert result.report.stop_reason is StopReason.RETRY_AFTER_EXCEEDS_DEADLINE


@case("T08", "Retry-After too long, no deadline: stop, no early retry")
def t08(door: Door) -> None:
    result = once(door, [answer(429, {"Retry-After": "86400"})], policy=C0.replace(deadline=None))
    assert (result.log, result.report.stop_reason) == ([429], StopReason.RETRY_AFTER_TOO_LONG)


@case("T10", "final statuses")
def t10(door: Door) -> None:
    for status in (400, 401, 402, 403, 404, 405, 410, 412, 413, 422, 501, 505):
        result = once(door, [status, 200], "POST")
        assert (result.status, result.log) == (status, [status])


@case("T11", "no wait beyond the deadline")
def t11(door: Door) -> None:
    result = once(door, [503], policy=C0.replace(base=0.7, cap=0.7, deadline=1.0))
    assert (result.status, result.log) == (503, [503, 503])
    assert result.report.stop_reason is StopReason.DEADLINE


@case("T12", "a server that hangs: the deadline ends it, the socket is closed")
def t12(door: Door) -> None:
    with scene(door, [hang], policy=C0.replace(deadline=0.3)) as (server, session):
        result = session.call("GET", server.url)
        assert isinstance(result.error, DeadlineExceeded)
        assert (result.log, result.report.outcome) == (["unknown"], Outcome.UNKNOWN)
        assert result.report.attempts[0].ended >= result.report.attempts[0].began + 0.29
        assert server.hung_up.acquire(timeout=10)


@case("T13", "per-try limit, then an answer")
def t13(door: Door) -> None:
    result = once(door, [hang, 200], policy=C0.replace(per_try=0.2))
    assert (result.status, result.log) == (200, ["unknown", 200])


@case("T14", "the deadline holds while the body drips")
def t14(door: Door) -> None:
    _slow(door, cut_short(drip(b"x" * 200, 0.05)))


@case("T14b", "the deadline holds while the head drips")
def t14b(door: Door) -> None:
    _slow(door, cut_short(drip(b"x" * 200, 0.05, head=True)))


@case("T14c", "the deadline holds when a body drips, then stops")
def t14c(door: Door) -> None:
    _slow(door, drip(b"x" * 200, 0.05, silent_after=2))


def _slow(door: Door, step: Any) -> None:
    """The client goes while the server still has something to send."""
    with scene(door, [step], policy=C0.replace(deadline=0.3)) as (server, session):
        result = session.call("GET", server.url)
        assert server.hung_up.acquire(timeout=10)
    assert isinstance(result.error, DeadlineExceeded), result
    assert len(result.log) == len(server.requests) == 1


def cut_short(step: Callable[[Peer], None]) -> Callable[[Peer], None]:
    """A step that counts it as hanging up when the client goes before its end."""

    def noticing(peer: Peer) -> None:
        try:
            step(peer)
        except OSError:
            if not peer.server.stopping.is_set():
                peer.server.hung_up.release()
            raise

    return noticing


@case("T15", "the remaining time goes to the server")
def t15(door: Door) -> None:
    policy = C0.replace(base=0.7, cap=0.7, deadline=3.0, per_try=2.0)
    assert once(door, [503, 503, 503, 200], policy=policy).status == 200
    left = [int(request.header("Request-Timeout-Ms") or 0) for request in requests()]
    assert left[:2] == [2000, 2000]
    assert 1000 < left[2] <= 1600  # 3.0 - 2 * 0.7, and what a busy machine takes
    assert 300 < left[3] <= 900
    assert [request.header("Retry-Attempt") for request in requests()] == [None, "1", "2", "3"]


@case("T18", "connection refused, then listening; a name that does not exist")
def t18(door: Door) -> None:
    with ScriptedServer([201], listening=False) as server:

        def listen(wait: int) -> None:
            if wait == 2:
                server.listen()

        with door.open(policy=KEYLESS.replace(deadline=None), on_wait=listen) as session:
            result = session.call("POST", server.url)
            assert (result.status, result.log) == (201, ["not_sent", "not_sent", 201])
            nowhere = session.call("POST", "http://nowhere.invalid/")
            assert (nowhere.log, nowhere.report.outcome) == (["not_sent"] * 4, Outcome.NOT_SENT)


@case("T19", "POST without a key: nothing is sent twice")
def t19(door: Door) -> None:
    for step in (close, reset, hang):
        result = once(door, [step, 201], "POST", policy=KEYLESS.replace(per_try=0.2))
        assert (result.log, result.report.stop_reason) == (["unknown"], StopReason.UNKNOWN_OUTCOME)
        assert result.error is not None


@case("T20", "POST with a key: closed, hung, done; one key, one body")
def t20(door: Door) -> None:
    result = once(door, [close, hang, 201], "POST", content=b"abc", policy=C0.replace(per_try=0.2))
    assert (result.status, len(result.log)) == (201, 3)
    assert {request.body for request in requests()} == {b"abc"}
    assert {request.header("Idempotency-Key") for request in requests()} == {result.report.idempotency_key}


@case("T21", "408, 429, 503, 504, without and with a key")
def t21(door: Door) -> None:
    for first, keyless in ((answer(429, {"Retry-After": "1"}), 2), (408, 2), (503, 1), (504, 1)):
        assert len(once(door, [first, 201], "POST", policy=KEYLESS).log) == keyless
        assert len(once(door, [first, 201], "POST").log) == 2


@case("T23", "a head that is cut is never an answer")
def t23(door: Door) -> None:
    whole = answer(200, body=b"whole")
    for cut in (b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\nContent-Le", b"HTTP/1.1 200 OK\r\nX-Header: y\r\n"):
        result = once(door, [send(cut), whole], "PUT")
        assert (result.status, result.body, result.log) == (200, b"whole", ["unknown", 200])


@case("T24", "a body that is cut is never an answer")
def t24(door: Door) -> None:
    whole = answer(200, body=b"whole")
    result = once(door, [send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nwho"), whole], "PUT")
    assert (result.status, result.body, result.log) == (200, b"whole", ["processed", 200])


@case("T24b", "a chunked body that is cut is never an answer")
def t24b(door: Door) -> None:
    whole = answer(200, body=b"whole", chunked=True)
    result = once(
        door, [send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nwho"), whole], "PUT"
    )
    assert (result.status, result.body, result.log) == (200, b"whole", ["processed", 200])


@case("T24c", "a cut answer to a POST without a key is not asked for again")
def t24c(door: Door) -> None:
    cut = send(b"HTTP/1.1 201 Created\r\nContent-Length: 10\r\n\r\nwho")
    result = once(door, [cut, 201], "POST", policy=KEYLESS)
    assert (result.log, result.report.outcome) == (["processed"], Outcome.PROCESSED)
    assert result.error is not None


@case("T25", "a key on POST and PATCH only; one a call; one's own unchanged")
def t25(door: Door) -> None:
    with scene(door, [200]) as (server, session):
        for method in ("GET", "HEAD", "OPTIONS", "PUT", "DELETE", "POST", "PATCH", "POST"):
            session.call(method, server.url)
        keys = [request.header("idempotency-key") for request in server.requests]
        assert keys[:5] == [None] * 5
        assert None not in keys[5:]
        assert len(set(keys[5:])) == 3
    for name in ("Idempotency-Key", "idempotency-key", "IDEMPOTENCY-KEY"):
        result = once(door, [503, 201], "POST", headers={name: "mine"})
        assert [request.header(name) for request in requests()] == ["mine", "mine"]
        assert sum(each.lower() == "idempotency-key" for each, _ in requests()[0].headers) == 1
        assert result.report.idempotency_key == "mine"


@case("T26", "409 in progress: outside budget, breaker and attempts")
def t26(door: Door) -> None:
    waiting = problem(409, "in-progress", {"Retry-After": "1"})
    budget, breaker = RetryBudget(), CircuitBreaker(failures=1)
    result = once(door, [waiting, waiting, 201], "POST", budget=budget, breaker=breaker)
    assert (result.status, result.log) == (201, [409, 409, 201])
    assert all(wait >= 1.0 for wait in waits(result))
    assert (budget.tokens, breaker.state) == (10, "closed")
    assert len({request.header("Idempotency-Key") for request in requests()}) == 1


@case("T27", "every other 409 is an answer")
def t27(door: Door) -> None:
    problems = {"Content-Type": "application/problem+json"}
    for headers, body in (
        (problems, b'{"type": "https://taptwice.dev/problems/seat-taken"}'),
        ({"Content-Type": "text/plain"}, b"taken"),
        (problems, b'{"title": "no type"}'),
        (problems, b"{"),
        (problems, b"[]"),
    ):
        result = once(door, [answer(409, headers, body), 201], "POST")
        assert (result.status, result.log, result.body) == (409, [409], body)


@case("T28", "a key that is refused: a typed error from clients, the answer below them")
def t28(door: Door) -> None:
    for status, name, kind in ((422, "key-reused", KeyReused), (400, "key-missing", KeyRejected)):
        result = once(door, [problem(status, name)], "POST")
        assert result.log == [status]
        if door.wrapper:
            assert type(result.error) is kind
        else:
            assert (result.error, result.status) == (None, status)


@case("T31", "bytes and files are sent again, from where they stood")
def t31(door: Door) -> None:
    file = io.BytesIO(b"01234" + b"body" * 20_000)
    _ = file.seek(5)
    for content in (b"body" * 20_000, file):
        result = once(door, [503, 200], "PUT", content=content)
        assert result.log == [503, 200], result
        assert [request.body for request in requests()] == [b"body" * 20_000] * 2


@case("T31b", "a function makes the body anew")
def t31b(door: Door) -> None:
    result = once(door, [503, 200], "PUT", content=lambda: b"body")
    assert result.log == [503, 200]
    assert [request.body for request in requests()] == [b"body"] * 2


@case("T31c", "a generator is sent once")
def t31c(door: Door) -> None:
    async def awaited() -> Any:
        for part in parts():
            yield part

    def parts() -> Any:
        yield b"bo"
        yield b"dy"

    result = once(door, [503, 200], "PUT", content=awaited() if door.awaiting else parts())
    assert (result.status, result.log) == (503, [503])
    assert result.report.stop_reason is StopReason.BODY_NOT_REPLAYABLE
    assert requests()[0].body == b"body"


@case("T32a", "a stream that breaks is the reader's: nothing comes twice")
def t32a(door: Door) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with scene(door, [send(head, b"3\r\none\r\n", b"3\r\ntwo\r\n")]) as (server, session):
        with pytest.raises(Exception, match=r"incomplete|prematurely|not completed"):
            session.call("GET", server.url, stream=True)
        assert len(server.requests) == 1


@case("T32b", "a stream that breaks before its first piece is begun anew, and the log tells of both")
def t32b(door: Door) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    whole = send(head, b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
    for cut in (send(head), send(head, b"3\r\n"), cut_off(head)):
        result = once(door, [cut, 503, cut, whole], stream=True)
        assert (result.status, result.body, result.log) == (
            200,
            b"onetwo",
            ["processed", 503, "processed", 200],
        )
        assert waits(result) == [0.1, 0.2, 0.4]


@case("T37", "an open circuit: no connection, and when to come again")
def t37(door: Door) -> None:
    breaker = CircuitBreaker(failures=3, cooldown=50)
    with scene(door, [503], breaker=breaker, policy=C0.replace(deadline=40.0)) as (server, session):
        assert session.call("GET", server.url).report.stop_reason is StopReason.CIRCUIT_OPEN
        assert len(server.requests) == 3
        result = session.call("GET", server.url)
        assert isinstance(result.error, CircuitOpen)
        assert f"the circuit for {server.url} is open, nothing was sent; again in " in str(result.error)
        assert 0 < (result.report.retry_after or 0) <= 50
        assert (result.log, len(server.requests)) == ([], 3)


@case("T36", "a budget that is empty: its own 503, no wait")
def t36(door: Door) -> None:
    with scene(door, [503], budget=RetryBudget(start=1)) as (server, session):
        results = [session.call("GET", server.url) for _ in range(2)]
        assert [result.log for result in results] == [[503, 503], [503]]
        assert [result.report.stop_reason for result in results] == [StopReason.BUDGET] * 2
        assert len(session.waits) == 1
        assert len(server.requests) == 3


@case("T40", "a reused connection dies: nothing is repeated behind the log's back")
def t40(door: Door) -> None:
    for method in ("GET", "PUT", "DELETE"):
        with scene(door, [200, close, 200]) as (server, session):
            assert session.call(method, server.url).status == 200
            result = session.call(method, server.url)
            assert (result.status, result.log) == (200, ["unknown", 200])
            assert len(server.requests) == 3
            assert [request.connection for request in server.requests] == [1, 1, 2]


@case("T40b", "one seed, the same waits and outcomes everywhere")
def t40b(door: Door) -> None:
    chance = random.Random(7)
    result = once(
        door, [503, close, hang, 200], policy=C0.replace(per_try=0.2), u=lambda: 1 - chance.random()
    )
    assert result.log == [503, "unknown", "unknown", 200]
    expected = random.Random(7)
    bounds = (0.1, 0.2, 0.4)
    assert waits(result) == [bound * (1 - expected.random()) for bound in bounds]


@case("T42", "the server says whether")
def t42(door: Door) -> None:
    assert once(door, [answer(503, {"x-should-retry": "false"}), 200]).log == [503]
    yes = [answer(400, {"X-Should-Retry": "true"}), 200]
    assert once(door, yes, policy=C0.replace(obey_should_retry=True)).log == [400, 200]
    assert once(door, yes).log == [400]


def cut_off(head: bytes) -> Callable[[Peer], None]:
    """A head, and then a RST; the pause lets the client read the head, which the RST would discard."""

    def step(peer: Peer) -> None:
        peer.send(head)
        peer.pause(0.05)
        peer.reset()

    return step


FACTORY = "a function as the body is the client's: what is below gets what the library made of it"
ONE_SHOT = "the body is a one-shot iterator by the time it comes here"
NO_STREAM = "what is read there is an object of the library's, with no place for another attempt's body"
UNKNOWN_LENGTH = "an answer of unknown length is handed on unread, since an event stream looks the same"
_TRANSPORTS = (
    "httpx2 transport",
    "httpx2 async transport",
    "httpx transport",
    "httpx async transport",
)
GAPS: dict[tuple[str, str], str] = {
    **{("T24b", door): UNKNOWN_LENGTH for door in (*_TRANSPORTS, "aiohttp middleware")},
    **{("T31", door): ONE_SHOT for door in _TRANSPORTS},
    **{("T32b", door): NO_STREAM for door in ("requests adapter", "aiohttp middleware")},
    **{("T31b", door): FACTORY for door in (*_TRANSPORTS, "requests adapter", "aiohttp middleware")},
}
"""(case, door) and why it is not so there."""
