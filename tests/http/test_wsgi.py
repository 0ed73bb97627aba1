"""The edge of plain WSGI: what a server gives, what an application may do, and what leaves when."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, cast
from wsgiref.validate import validator

import httpx2
import pytest

from taptwice.core.model import Answer
from taptwice.errors import Misuse, RequestIncomplete, RequestTooLarge
from taptwice.events import Event, Outcome
from taptwice.flows.current import current
from taptwice.http.edge import Reading
from taptwice.http.request import NotSaved
from taptwice.http.wsgi import Idempotency, read_body, request_of
from tests.http.serving import gunicorn
from tests.http.shop import BLOCKING, Shop, open_shop, sqlite_shop


@pytest.fixture(params=BLOCKING)
async def shop(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> AsyncIterator[Shop]:
    async with open_shop(request.param, tmp_path, lambda: request.getfixturevalue("fresh_postgres")) as made:
        yield made


@pytest.fixture
def small(tmp_path: pathlib.Path) -> Shop:
    """A shop for what does not depend on the driver."""
    return sqlite_shop(tmp_path, "sqlite3")


class Reply:
    """What came back over WSGI."""

    def __init__(self) -> None:
        self.line = ""
        self.headers: list[tuple[str, str]] = []
        self.parts: list[bytes] = []

    @property
    def status(self) -> int:
        return int(self.line[:3])

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def header(self, name: str) -> str | None:
        return next((value for known, value in self.headers if known.lower() == name.lower()), None)

    @property
    def replayed(self) -> bool:
        return self.header("idempotent-replayed") == "true"

    @property
    def problem(self) -> str:
        assert self.header("content-type") == "application/problem+json"
        return str(json.loads(self.body)["type"].rpartition("/")[2])


def environ_of(key: str | None = "k", body: bytes = b'{"cents":100}', **more: Any) -> dict[str, Any]:
    environ = {
        "REQUEST_METHOD": "POST",
        "SCRIPT_NAME": "",
        "PATH_INFO": "/charges",
        "QUERY_STRING": "",
        "SERVER_NAME": "shop",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(body),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
        **({} if key is None else {"HTTP_IDEMPOTENCY_KEY": key}),
        **more,
    }
    return {name: value for name, value in environ.items() if value is not None}


def call(
    app: Any, key: str | None = "k", on_part: Callable[[bytes], Any] = lambda part: None, **more: Any
) -> Reply:
    """One request through the application, as a server drives it."""
    reply = Reply()

    def start_response(line: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        if exc_info and reply.parts:
            raise exc_info[1].with_traceback(exc_info[2])
        reply.line, reply.headers = line, headers
        return reply.parts.append

    result = app(environ_of(key, **more), start_response)
    try:
        for part in result:
            assert reply.line, "a part before the beginning"
            reply.parts.append(part)
            on_part(part)
    finally:
        if hasattr(result, "close"):
            result.close()
    return reply


class Keyed:
    """A keyed application that charges, and then `rest(environ, start_response, connection)` goes on."""

    def __init__(self, shop: Shop, rest: Any = None, settings: Any = None, **policy: Any) -> None:
        self.shop = shop
        self.rest = rest or usual
        self.events: list[Event] = []
        self.once = Idempotency(shop.origin, listeners=[self.events.append], **(settings or {}))
        self.calls = 0
        policy.setdefault("account", lambda environ: "acct")
        self.app = self.once.keyed(self.charge, **policy)

    def charge(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        self.calls += 1
        connection = self.once.connection(environ)
        self.shop.insert_now(connection, environ.get("HTTP_IDEMPOTENCY_KEY", "none"))
        result: Iterable[bytes] = self.rest(environ, start_response, connection)
        return result

    def call(self, key: str | None = "k", **more: Any) -> Reply:
        return call(self.app, key, **more)


def usual(environ: Any, start_response: Any, connection: Any) -> list[bytes]:
    body = json.dumps({"sent": environ["wsgi.input"].read().decode()}).encode()
    start_response("201 Charged", [("Content-Type", "application/json")])
    return [body[:5], body[5:]]


class Closing:
    """An answer that knows whether it was closed."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self.parts = parts
        self.closed = 0

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.parts)

    def close(self) -> None:
        self.closed += 1


# --- the usual course ---------------------------------------------------------------------------------------


def test_a_retry_gets_the_first_answer(shop: Shop) -> None:
    keyed = Keyed(shop)
    first, again, other = keyed.call(), keyed.call(), keyed.call(body=b"other")
    assert (first.line, again.line) == ("201 Charged", "201 Created")
    assert json.loads(first.body) == {"sent": '{"cents":100}'}
    assert again.body == first.body
    assert (first.replayed, again.replayed) == (False, True)
    assert first.header("content-length") == again.header("content-length") == str(len(first.body))
    assert (other.status, other.problem) == (422, "key-reused")
    assert (shop.charges(), shop.records(), keyed.calls) == (1, {"k": 201}, 1)
    assert [each.outcome for each in keyed.events] == [
        Outcome.NEW,
        Outcome.FINISHED,
        Outcome.REPLAYED,
        Outcome.MISMATCH,
    ]
    shop.check()


def test_an_error_leaves_nothing_and_the_key_is_free(shop: Shop) -> None:
    def rest(environ: Any, start_response: Any, connection: Any) -> Any:
        if keyed.calls == 1:
            raise RuntimeError("a bug")
        return usual(environ, start_response, connection)

    keyed = Keyed(shop, rest)
    with pytest.raises(RuntimeError):
        keyed.call()
    assert (shop.charges(), shop.records(), current.get()) == (0, {}, None)
    assert keyed.call().status == 201
    shop.check()


@pytest.mark.parametrize("status", ["503 Later", "429 Slowly", "500 Bug"])
def test_what_is_not_saved_is_undone(shop: Shop, status: str) -> None:
    def rest(environ: Any, start_response: Any, connection: Any) -> Any:
        start_response(status, [])
        return [b"not now"]

    keyed = Keyed(shop, rest)
    assert [keyed.call().body for _ in range(2)] == [b"not now"] * 2
    assert (shop.charges(), shop.records(), keyed.calls) == (0, {}, 2)


def test_it_keeps_to_the_protocol_on_both_sides(small: Shop) -> None:
    """`wsgiref.validate` complains of whatever PEP 3333 forbids to a server and to an application."""
    once = Idempotency(small.origin)

    def whole(environ: Any, start_response: Any) -> Any:
        environ["wsgi.input"].read(-1)
        start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "4")])
        return [b"done"]

    def empty(environ: Any, start_response: Any) -> Any:
        start_response("204 No Content", [])
        return [b""]

    def stream(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return iter([b"one", b"two"])

    def check(key: str, app: Any, status: int, parts: list[bytes]) -> None:
        keyed = validator(once.keyed(validator(app), account=lambda environ: "acct"))
        reply = Reply()

        def start_response(line: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
            reply.line, reply.headers = line, headers
            return reply.parts.append

        result = keyed(environ_of(key), start_response)
        with contextlib.closing(cast(Any, result)):
            reply.parts = list(result)
        assert (reply.status, reply.body) == (status, b"".join(parts))

    for app, status, first, again in (
        (whole, 200, [b"done"], [b"done"]),
        (empty, 204, [], []),
        (stream, 200, [b"one", b"two"], []),
    ):
        check(app.__name__, app, status, first)
        if app is not stream:  # its replay has no Content-Type, which the validator wants of every 200
            check(app.__name__, app, status, again)


# --- what an application may do -----------------------------------------------------------------------------


def test_a_generator_works_inside_the_claim_up_to_its_first_part(small: Shop) -> None:
    """It is a stream: committed before its first byte, untouched behind it, remembered without its body."""
    seen: list[Any] = []

    def rest(environ: Any, start_response: Any, connection: Any) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        small.insert_now(connection, "k")
        yield b""
        yield b"one "
        seen.append((small.charges(), small.records()))
        yield b"two"

    keyed = Keyed(small, rest)
    first, again = keyed.call(on_part=lambda part: seen.append(part)), keyed.call()
    assert first.body == b"one two"
    assert seen == [b"one ", (2, {"k": 200}), b"two"]
    assert first.header("content-length") is None
    assert (again.body, again.header("idempotent-body")) == (b"", "omitted")
    assert again.header("content-type") is None


@pytest.mark.parametrize("parts", [[b"one ", b"two"], [b"", b"one two", b""], [b"one two"]])
def test_a_generator_of_known_length_is_saved(small: Shop, parts: list[bytes]) -> None:
    def rest(environ: Any, start_response: Any, connection: Any) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Length", "7")])
        yield from parts

    keyed = Keyed(small, rest)
    assert [keyed.call().body for _ in range(2)] == [b"one two"] * 2


@pytest.mark.parametrize("made", [list, tuple, iter])
def test_nothing_is_a_known_length_too(small: Shop, made: Any) -> None:
    def rest(environ: Any, start_response: Any, connection: Any) -> Any:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return made([])

    keyed = Keyed(small, rest)
    first, again = keyed.call(), keyed.call()
    assert first.header("content-length") == again.header("content-length") == "0"
    assert again.header("content-type") == "text/plain"


def test_a_captured_stream(small: Shop) -> None:
    def rest(environ: Any, start_response: Any, connection: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield b"one "
        yield environ["wsgi.input"].read()
        yield b" end"

    keyed = Keyed(small, rest, streams="capture", save_max_body=12)
    assert [keyed.call(body=b"two").body for _ in range(2)] == [b"one two end"] * 2
    assert [keyed.call("long", body=b"x" * 20).body for _ in range(2)] == [b"one " + b"x" * 20 + b" end", b""]


def test_what_is_written_comes_before_what_is_returned(small: Shop) -> None:
    def rest(environ: Any, start_response: Any, connection: Any) -> Any:
        write = start_response("200 OK", [("Content-Type", "text/plain")])
        write(b"one ")
        write(b"two ")
        return [b"three"]

    keyed = Keyed(small, rest)
    assert [keyed.call().body for _ in range(2)] == [b"one two three"] * 2


def test_an_answer_in_place_of_one_that_was_begun(small: Shop) -> None:
    def rest(environ: Any, start_response: Any, connection: Any) -> Any:
        start_response("200 OK", [("X-First", "1")])(b"the first")
        try:
            raise ValueError
        except ValueError:
            start_response("404 Nothing", [("X-Second", "1")], sys.exc_info())
        return [b"the second"]

    keyed = Keyed(small, rest)
    first, again = keyed.call(), keyed.call()
    assert (first.line, first.body, first.header("x-first")) == ("404 Nothing", b"the second", None)
    assert (again.status, again.body) == (404, b"the second")


def test_an_error_behind_the_first_byte_is_the_servers(small: Shop) -> None:
    def rest(environ: Any, start_response: Any, connection: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield b"one"
        try:
            raise ValueError
        except ValueError:
            start_response("500 Bug", [], sys.exc_info())

    keyed = Keyed(small, rest)
    with pytest.raises(ValueError):
        keyed.call()
    assert keyed.call().replayed
    assert small.charges() == 1


@pytest.mark.parametrize("times", [0, 2])
def test_an_application_that_breaks_the_protocol_leaves_nothing(small: Shop, times: int) -> None:
    def rest(environ: Any, start_response: Any, connection: Any) -> Any:
        for _ in range(times):
            start_response("200 OK", [])
        return [b"done"]

    keyed = Keyed(small, rest)
    with pytest.raises(AssertionError if times else Misuse):
        keyed.call()
    assert (small.charges(), small.records()) == (0, {})


@pytest.mark.parametrize("length", [None, "7", "99999999"])
def test_what_the_application_returned_is_closed_once(small: Shop, length: str | None) -> None:
    answers: list[Closing] = []

    def rest(environ: Any, start_response: Any, connection: Any) -> Any:
        start_response("200 OK", [] if length is None else [("Content-Length", length)])
        answers.append(Closing([b"one ", b"two"]))
        return answers[-1]

    keyed = Keyed(small, rest)
    assert keyed.call().body == b"one two"
    assert [answer.closed for answer in answers] == [1]
    assert keyed.call().replayed


def test_what_the_application_returned_is_closed_when_it_fails(small: Shop) -> None:
    def parts() -> Iterator[bytes]:
        yield from ()
        raise RuntimeError("a bug")

    answer = Closing(parts())

    def rest(environ: Any, start_response: Any, connection: Any) -> Any:
        start_response("200 OK", [])
        return answer

    keyed = Keyed(small, rest)
    with pytest.raises(RuntimeError):
        keyed.call()
    assert (answer.closed, small.charges()) == (1, 0)


def test_an_answer_that_is_not_saved(small: Shop) -> None:
    def rest(environ: Any, start_response: Any, connection: Any) -> Any:
        raise NotSaved(Answer(409, (("Content-Type", "text/plain"),), b"wait"))

    keyed = Keyed(small, rest)
    assert [(reply.line, reply.body) for reply in (keyed.call(), keyed.call())] == [
        ("409 Conflict", b"wait")
    ] * 2
    assert (small.charges(), small.records(), keyed.calls) == (0, {}, 2)


def test_everything_is_saved_once_the_application_began_where_that_is_the_policy(small: Shop) -> None:
    def rest(environ: Any, start_response: Any, connection: Any) -> Any:
        raise RuntimeError("a bug")

    keyed = Keyed(small, rest, save="all-after-start")
    first, again = keyed.call(), keyed.call()
    assert (first.status, again.status, first.body) == (500, 500, again.body)
    assert (small.charges(), small.records(), keyed.calls) == (0, {"k": 500}, 1)


def test_a_server_that_stops_a_worker_is_not_held_up(small: Shop) -> None:
    def rest(environ: Any, start_response: Any, connection: Any) -> Any:
        raise SystemExit

    keyed = Keyed(small, rest, save="all-after-start")
    with pytest.raises(SystemExit):
        keyed.call()
    assert (small.charges(), small.records()) == (0, {})


def test_another_attempt_that_came_between_has_the_answer(small: Shop) -> None:
    """The application ends the transaction, and with it the lock; while it goes on a duplicate is served."""
    answer = Closing([b"too late"])

    def rest(environ: Any, start_response: Any, connection: Any) -> Any:
        connection.execute("COMMIT")
        assert Keyed(small).call().status == 201  # another process
        start_response("200 OK", [])
        return answer

    keyed = Keyed(small, rest)
    first = keyed.call()
    assert (first.status, first.replayed) == (201, True)
    assert keyed.call().body == first.body
    assert answer.closed == 1
    assert Outcome.TORN in [each.outcome for each in keyed.events]


def test_strict_raises_when_the_answer_is_safe(small: Shop) -> None:
    def rest(environ: Any, start_response: Any, connection: Any) -> Any:
        connection.execute("COMMIT")
        return usual(environ, start_response, connection)

    keyed = Keyed(small, rest, settings={"strict": True})
    with pytest.raises(Misuse):
        keyed.call()
    assert keyed.call().replayed


# --- requests -----------------------------------------------------------------------------------------------


def test_requests_that_are_refused(small: Shop) -> None:
    keyed = Keyed(small, request_max_body=20)
    for more, status, problem in (
        ({"key": None}, 400, "key-missing"),
        ({"key": "a,b"}, 400, "key-invalid"),
        ({"key": '"a", "a"'}, 400, "key-invalid"),
        ({"body": b"x" * 21}, 413, "request-too-large"),
        ({"CONTENT_LENGTH": "14"}, 400, "request-incomplete"),
    ):
        reply = keyed.call(**more)
        assert (reply.status, reply.problem) == (status, problem)
    nobody = Keyed(small, account=lambda environ: None).call()
    assert (nobody.status, nobody.problem) == (401, "account-missing")
    assert (small.charges(), small.records(), keyed.calls) == (0, {}, 0)


def test_what_is_not_keyed_passes(small: Shop) -> None:
    keyed = Keyed(small, required=False)
    body = io.BytesIO(b"unread")
    assert keyed.call(None, **{"wsgi.input": body, "CONTENT_LENGTH": "6"}).status == 201
    assert (small.charges(), small.records()) == (1, {})

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        return [b"free"]

    once = Idempotency(small.origin)
    assert call(once.keyed(app, account=lambda environ: "acct"), REQUEST_METHOD="GET").body == b"free"
    with pytest.raises(Misuse, match="not keyed"):
        once.connection(environ_of())


def test_a_body_may_be_refused_before_the_claim(small: Shop) -> None:
    def parse(body: bytes) -> None:
        if not body.startswith(b"{"):
            raise NotSaved(Answer(400, (), b"no JSON"))

    keyed = Keyed(small, parse=parse, required=False)
    assert [keyed.call(key, body=b"x").body for key in ("k", None)] == [b"no JSON"] * 2
    assert keyed.calls == 0
    assert keyed.call().status == 201


def test_keyed_twice_is_refused(small: Shop) -> None:
    keyed = Keyed(small)
    with pytest.raises(Misuse, match="twice"):
        call(keyed.once.keyed(keyed.app, account=lambda environ: "acct"))
    assert small.charges() == 0


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"RAW_URI": "/a%2Fb?x=1"}, b"/a%2Fb"),
        ({"REQUEST_URI": "/a%2Fb"}, b"/a%2Fb"),
        ({"RAW_URI": "http://shop/a%2Fb?x=1"}, b"/a%2Fb"),
        ({"SCRIPT_NAME": "/v1", "PATH_INFO": "/ü x".encode().decode("latin-1")}, b"/v1/%C3%BC%20x"),
    ],
)
def test_the_path_as_it_stood_on_the_wire(more: dict[str, Any], path: bytes) -> None:
    request = request_of(environ_of(**more))
    assert request.path == path
    assert request.route == path.decode()


def test_the_headers_of_a_request() -> None:
    request = request_of(
        environ_of(HTTP_X_NAME="ü".encode().decode("latin-1"), QUERY_STRING="a=%20"), "/route"
    )
    assert set(request.headers) == {
        (b"idempotency-key", b"k"),
        (b"x-name", "ü".encode()),
        (b"content-type", b"application/json"),
        (b"content-length", b"13"),
    }
    assert (request.route, request.query) == ("/route", b"a=%20")
    assert {
        name for name, _ in request_of(environ_of(None, CONTENT_TYPE="", CONTENT_LENGTH="")).headers
    } == set()


class Broken(io.BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        raise ConnectionResetError


class Endless(io.BytesIO):
    """A connection that stays open: who reads beyond the body would wait for ever."""

    def read(self, size: int | None = -1) -> bytes:
        found = super().read(size)
        assert found or size == 0, "the end was read"
        return found


def body_of(environ: dict[str, Any], limit: int = 100) -> bytes:
    return read_body(environ, Reading(request_of(environ).headers, limit))


@pytest.mark.parametrize("terminated", [True, None])
def test_a_body_of_announced_length(terminated: bool | None) -> None:
    environ = environ_of(CONTENT_LENGTH="4")
    environ |= {"wsgi.input": Endless(b"body and more"), "wsgi.input_terminated": terminated}
    assert body_of(environ) == b"body"
    assert environ["wsgi.input"].read() == b"body"


def test_a_body_of_which_only_the_end_is_announced() -> None:
    chunked = environ_of(CONTENT_LENGTH=None, HTTP_TRANSFER_ENCODING="chunked", body=b"body")
    chunked["wsgi.input_terminated"] = True
    assert body_of(dict(chunked), 4) == b"body"
    chunked["wsgi.input"].seek(0)
    with pytest.raises(RequestTooLarge):
        body_of(dict(chunked), 3)
    chunked["wsgi.input"].seek(0)
    body_of(chunked)
    assert chunked["CONTENT_LENGTH"] == "4"
    assert "HTTP_TRANSFER_ENCODING" not in chunked


def test_without_length_and_end_there_is_no_body() -> None:
    environ = environ_of(CONTENT_LENGTH=None)
    environ["wsgi.input"] = Endless(b"")
    assert body_of(environ) == b""


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"wsgi.input": Broken()}, RequestIncomplete),
        ({"CONTENT_LENGTH": "14"}, RequestIncomplete),
        ({"CONTENT_LENGTH": "101", "wsgi.input": Broken()}, RequestTooLarge),  # before anything is read
    ],
)
def test_bodies_that_cannot_be_had(more: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        body_of(environ_of(**more))


# --- gunicorn -----------------------------------------------------------------------------------------------


def served() -> Any:
    """The application that gunicorn serves."""
    place = os.environ["SHOP_PLACE"]
    once = Idempotency(lambda: sqlite3.connect(place, check_same_thread=False))

    def charge(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        body = environ["wsgi.input"].read()
        row = ("acct", environ["HTTP_IDEMPOTENCY_KEY"], len(body))
        once.connection(environ).execute("INSERT INTO charges VALUES (?, ?, ?)", row)
        start_response("201 Created", [("Content-Type", "text/plain")])
        return [b"%d" % len(body)] if environ["PATH_INFO"] == "/charges" else (b"part " for _ in range(3))

    return once.keyed(charge, account=lambda environ: "acct")


def test_under_gunicorn(small: Shop) -> None:
    with (
        gunicorn("tests.http.test_wsgi:served()", workers=1, SHOP_PLACE=small.address) as (host, port),
        httpx2.Client(base_url=f"http://{host}:{port}", timeout=20) as client,
    ):

        def post(key: str, content: Any, path: str = "/charges", **more: Any) -> httpx2.Response:
            return client.post(path, content=content, headers={"Idempotency-Key": key}, **more)

        whole, chunked, other = post("k", b"one two"), post("k", iter([b"one ", b"two"])), post("k", b"two")
        assert (whole.text, chunked.text, other.status_code) == ("7", "7", 422)
        assert chunked.headers["idempotent-replayed"] == "true"
        stream, again = post("stream", b"x", "/stream"), post("stream", b"x", "/stream")
        assert (stream.text, again.text, again.headers["content-length"]) == ("part part part ", "", "0")
        twice = client.post("/charges", headers=[("Idempotency-Key", "k"), ("Idempotency-Key", "k")])
        assert (twice.status_code, twice.json()["type"].rpartition("/")[2]) == (400, "key-invalid")
    assert small.charges() == 2
