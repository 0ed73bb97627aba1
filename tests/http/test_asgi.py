"""The edge of plain ASGI: one request at a time, many at once, cancelled and torn, on every driver."""

from __future__ import annotations

import asyncio
import json
import pathlib
import random
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest
from psycopg_pool import ConnectionPool

from taptwice.core.model import Answer
from taptwice.core.plan import Begin, Close, Query, Rollback, Together
from taptwice.core.policy import Policy
from taptwice.drivers import system
from taptwice.errors import InFlight, Misuse
from taptwice.events import Event, Outcome
from taptwice.http.asgi import Idempotency, conducted_in, read_body
from taptwice.http.driven import Driven, Threads, to_its_end
from taptwice.http.request import NotSaved
from tests.http.shop import (
    EVERY,
    Reply,
    Shop,
    call,
    open_shop,
    postgres_query,
    postgres_tables,
    scope_of,
    sqlite_shop,
)

Handler = Callable[[Any, str], Awaitable[Any]]


@pytest.fixture(params=EVERY)
async def shop(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> AsyncIterator[Shop]:
    async with open_shop(request.param, tmp_path, lambda: request.getfixturevalue("fresh_postgres")) as made:
        yield made


@pytest.fixture
def small(tmp_path: pathlib.Path) -> Shop:
    """A shop for what does not depend on the driver."""
    return sqlite_shop(tmp_path, "sqlite3")


def keyed(
    shop: Shop,
    handler: Handler | None = None,
    listener: Callable[[Event], Any] | None = None,
    account: Any = lambda scope: "acct",
    parse: Any = None,
    status: int = 201,
    settings: dict[str, Any] | None = None,
    **policy: Any,
) -> Any:
    """An application that charges, then runs `handler(connection, key)`, then answers with what that gave."""
    once = Idempotency(shop.origin, listeners=[listener] if listener else [], **(settings or {}))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            assert message["type"] == "http.request"
            body += message["body"]
            more = message.get("more_body", False)
        key = next((v.decode() for n, v in scope["headers"] if n == b"idempotency-key"), "none").strip('"')
        connection = once.connection(scope)
        await shop.insert(connection, key)
        result = None if handler is None else await handler(connection, key)
        content = json.dumps({"key": key, "result": result}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    return once.keyed(app, account=account, parse=parse, **policy)


def outcomes(events: list[Event]) -> list[Outcome]:
    return [event.outcome for event in events]


# --- one at a time, on every driver -------------------------------------------------------------------------


async def test_the_work_is_done_once_and_answered_alike(shop: Shop) -> None:
    events: list[Event] = []
    app = keyed(shop, listener=events.append)
    first = await call(app)
    again = await call(app)
    assert (first.status, first.replayed) == (201, False)
    assert (again.status, again.replayed) == (201, True)
    assert first.body == again.body
    assert again.header("content-type") == "application/json"
    assert shop.charges("k") == 1
    assert shop.records() == {"k": 201}
    assert outcomes(events) == [Outcome.NEW, Outcome.FINISHED, Outcome.REPLAYED]
    other = await call(app, body=b'{"cents":1}')
    assert (other.status, other.problem) == (422, "key-reused")
    assert shop.charges() == 1


async def test_without_a_key_nobody_waits_for_another(small: Shop) -> None:
    begun: list[bytes] = []
    both = asyncio.Event()

    def parse(body: bytes) -> None:
        begun.append(body)
        if len(begun) == 2:
            both.set()

    async def handler(connection: Any, key: str) -> None:
        await both.wait()

    app = keyed(small, handler, parse=parse, required=False, wait=0)
    async with asyncio.timeout(20):
        replies = await asyncio.gather(call(app, key=None), call(app, key=None))
    assert [reply.status for reply in replies] == [201, 201]


async def test_an_error_leaves_nothing_and_the_key_is_free(shop: Shop) -> None:
    fail = True

    async def handler(connection: Any, key: str) -> None:
        if fail:
            raise ZeroDivisionError

    events: list[Event] = []
    app = keyed(shop, handler, events.append)
    with pytest.raises(ZeroDivisionError):
        await call(app)
    assert (shop.charges(), shop.records()) == (0, {})
    assert outcomes(events) == [Outcome.NEW, Outcome.RELEASED]
    fail = False
    assert (await call(app)).status == 201
    shop.check()


@pytest.mark.parametrize("status", [402, 429, 500, 503])
async def test_what_is_not_saved_is_undone(shop: Shop, status: int) -> None:
    app = keyed(shop, status=status)
    assert (await call(app)).status == status
    saved = status == 402
    assert shop.records() == ({"k": 402} if saved else {})
    assert shop.charges("k") == int(saved)
    again = await call(app)
    assert (again.status, again.replayed) == (status, saved)


async def test_twenty_at_once_are_one_charge_and_twenty_equal_answers(shop: Shop) -> None:
    app = keyed(shop)
    replies = await asyncio.gather(*(call(app) for _ in range(20)))
    assert [reply.status for reply in replies] == [201] * 20
    assert len({reply.body for reply in replies}) == 1
    assert sum(reply.replayed for reply in replies) == 19
    assert shop.charges("k") == 1
    shop.check()


async def test_two_processes_at_once(shop: Shop) -> None:
    """Two `Idempotency` share no gate: what decides is the claim."""
    apps = [keyed(shop), keyed(shop)]
    replies = await asyncio.gather(*(call(apps[at % 2], key=f"k{at % 3}") for at in range(24)))
    assert [reply.status for reply in replies] == [201] * 24
    assert shop.charges() == 3
    shop.check()


async def test_a_waiter_does_the_work_when_the_first_attempt_fails(shop: Shop) -> None:
    attempts = 0

    async def handler(connection: Any, key: str) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            await asyncio.sleep(0)
            raise ZeroDivisionError

    app = keyed(shop, handler)
    results = await asyncio.gather(*(call(app) for _ in range(5)), return_exceptions=True)
    assert sum(isinstance(result, ZeroDivisionError) for result in results) == 1
    assert sum(isinstance(result, Reply) and result.replayed for result in results) == 3
    assert shop.charges("k") == 1
    shop.check()


async def test_cancelled_at_random_moments(shop: Shop) -> None:
    """Nobody is charged twice, no connection is lost, and a cancelled request is cancelled, not failed."""
    chance = random.Random(7)

    async def handler(connection: Any, key: str) -> None:
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)

    app = keyed(shop, handler)
    tasks = []
    for number in range(120):
        task = asyncio.create_task(call(app, key=f"k{number % 15}"))
        tasks.append(task)
        await asyncio.sleep(chance.random() * 0.004)
        for _ in range(chance.choice([1, 1, 3])):  # once, or again while it is cleaning up
            chance.choice(tasks).cancel()
            await asyncio.sleep(0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    odd = [r for r in results if not isinstance(r, Reply | asyncio.CancelledError)]
    assert odd == []
    assert {reply.status for reply in results if isinstance(reply, Reply)} <= {201}
    shop.check()
    # More than the pool holds: a connection that had been lost would be missed now.
    finals = await asyncio.gather(*(call(app, key=f"k{number}") for number in range(15)))
    assert [reply.status for reply in finals] == [201] * 15
    assert shop.charges() == 15
    shop.check()


@pytest.mark.parametrize("times", [1, 2, 5])
async def test_cancelled_while_it_commits(shop: Shop, times: int) -> None:
    """Once the answer is final it is concluded, whoever cancels and however often; and its event comes."""
    events: list[Event] = []
    finished = asyncio.Event()

    async def handler(connection: Any, key: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()  # comes up where the request next waits: at the commit
        for _ in range(times - 1):
            asyncio.get_running_loop().call_soon(task.cancel)

    def listener(event: Event) -> None:
        events.append(event)
        if event.outcome is Outcome.FINISHED:
            finished.set()

    app = keyed(shop, handler, listener)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(call(app))
    await finished.wait()
    assert outcomes(events) == [Outcome.NEW, Outcome.FINISHED]
    again = await call(app)
    assert (again.status, again.replayed) == (201, True)
    assert shop.charges("k") == 1
    shop.check()


async def test_committed_and_given_back_before_the_first_byte(shop: Shop) -> None:
    seen = []

    def on_send(message: Any) -> None:
        if message["type"] == "http.response.start":
            seen.append((shop.charges("k"), shop.records()))

    await call(keyed(shop), on_send=on_send)
    assert seen == [(1, {"k": 201})]


async def test_a_client_that_is_gone_at_the_first_byte_finds_its_answer(shop: Shop) -> None:
    def on_send(message: Any) -> None:
        raise OSError("the client has gone")

    app = keyed(shop)
    with pytest.raises(OSError, match="gone"):
        await call(app, on_send=on_send)
    assert (await call(app)).replayed
    assert shop.charges("k") == 1


# --- what is refused, and leaves nothing --------------------------------------------------------------------


def nothing(shop: Shop) -> None:
    assert (shop.charges(), shop.records()) == (0, {})


@pytest.mark.parametrize(
    "value", ["", " ", '"', '"a', 'a"b', "a b", "a,b", "a;b", '"a" "b"', "k\xe9", "x" * 256, '"\t"', "?1,"]
)
async def test_a_malformed_key(small: Shop, value: str) -> None:
    for required in (True, False):
        reply = await call(keyed(small, required=required), key=value)
        assert (reply.status, reply.problem) == (400, "key-invalid")
    nothing(small)


async def test_two_header_lines_are_refused_even_if_equal(small: Shop) -> None:
    reply = await call(keyed(small), headers=[("Idempotency-Key", "k")])
    assert (reply.status, reply.problem) == (400, "key-invalid")
    nothing(small)


async def test_all_spellings_of_a_key_are_one(small: Shop) -> None:
    app = keyed(small)
    replies = [await call(app, key=value) for value in ("k", '"k"', '  "k"  ', '"k";a=1', "\tk ")]
    assert [reply.status for reply in replies] == [201] * 5
    assert small.charges() == 1


async def test_a_missing_key(small: Shop) -> None:
    reply = await call(keyed(small), key=None)
    assert (reply.status, reply.problem) == (400, "key-missing")
    nothing(small)


async def test_nobody_logged_in(small: Shop) -> None:
    async def nobody(scope: Any) -> None:
        return None

    reply = await call(keyed(small, account=nobody))
    assert (reply.status, reply.problem) == (401, "account-missing")
    nothing(small)


@pytest.mark.parametrize("chunks", [[b"x" * 11], [b"x" * 6, b"x" * 5], [b"x" * 11, b"x" * 99]])
@pytest.mark.parametrize("announced", [None, "11", "9" * 30, "9" * 5000])
async def test_a_body_above_the_limit(small: Shop, chunks: list[bytes], announced: str | None) -> None:
    headers = [] if announced is None else [("content-length", announced)]
    reply = await call(keyed(small, request_max_body=10), headers=headers, body=chunks)
    assert (reply.status, reply.problem) == (413, "request-too-large")
    nothing(small)


async def test_a_body_at_the_limit(small: Shop) -> None:
    app = keyed(small, request_max_body=10)
    assert (await call(app, body=[b"x" * 5, b"x" * 5], headers=[("content-length", "10")])).status == 201


async def test_a_body_that_ends_too_early(small: Shop) -> None:
    async def receive() -> Any:
        return next(messages)

    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await keyed(small)(scope_of(headers=[("idempotency-key", "k")]), receive, send)
    assert (Reply(sent).status, Reply(sent).problem) == (400, "request-incomplete")
    reply = await call(keyed(small), headers=[("content-length", "20")], body=b"{}")
    assert (reply.status, reply.problem) == (400, "request-incomplete")
    nothing(small)


async def test_a_body_that_was_decoded_on_its_way_may_be_shorter_than_announced() -> None:
    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    headers = ((b"content-length", b"20"), (b"content-encoding", b"gzip"))
    assert await read_body(receive, headers, 100) == b"{}"


async def test_chunks_make_no_difference(small: Shop) -> None:
    app = keyed(small)
    first = await call(app, body=b'{"cents":100}')
    again = await call(
        app, body=[b'{"ce', b"", b'nts":', b"100}"], headers=[("transfer-encoding", "chunked")]
    )
    assert (first.status, again.status, again.replayed) == (201, 201, True)


async def test_a_body_may_be_refused_before_the_claim(small: Shop) -> None:
    def parse(body: bytes) -> None:
        if b"cents" not in body:
            raise NotSaved(Answer(400, (("Content-Type", "text/plain"),), b"no cents"))

    app = keyed(small, parse=parse)
    reply = await call(app, body=b"{}")
    assert (reply.status, reply.body) == (400, b"no cents")
    nothing(small)
    assert (await call(app)).status == 201, "the key was free"


async def test_an_answer_that_is_not_saved(small: Shop) -> None:
    refuse = True

    async def handler(connection: Any, key: str) -> None:
        if refuse:
            raise NotSaved(Answer(200, (), b"not now"))

    app = keyed(small, handler)
    assert (await call(app)).body == b"not now"
    nothing(small)
    refuse = False
    assert (await call(app)).status == 201


# --- what is not ours ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scope",
    [
        scope_of("GET", headers=[("idempotency-key", "k")]),
        scope_of("HEAD", headers=[("idempotency-key", "k")]),
        scope_of("OPTIONS", headers=[("idempotency-key", "k")]),
        scope_of("PUT", headers=[("idempotency-key", "k")]),
        {"type": "websocket", "path": "/charges", "headers": [(b"idempotency-key", b"k")]},
        {"type": "lifespan"},
    ],
    ids=lambda scope: scope.get("method", scope["type"]),
)
async def test_what_is_not_ours_passes_untouched(small: Shop, scope: dict[str, Any]) -> None:
    got = []

    async def app(*arguments: Any) -> None:
        got.append(arguments)

    async def receive() -> Any: ...
    async def send(message: Any) -> None: ...

    once = Idempotency(small.origin)
    await once.keyed(app, account=lambda scope: "acct")(scope, receive, send)
    [(their_scope, their_receive, their_send)] = got
    assert (their_scope is scope, their_receive is receive, their_send is send) == (True, True, True)


async def test_without_a_key_where_none_is_required(shop: Shop) -> None:
    fail = True

    async def handler(connection: Any, key: str) -> None:
        if fail:
            raise ZeroDivisionError

    app = keyed(shop, handler, required=False)
    with pytest.raises(ZeroDivisionError):
        await call(app, key=None)
    assert shop.charges() == 0
    fail = False
    assert (await call(app, key=None)).status == 201
    assert (await call(app, key=None)).status == 201
    assert (shop.charges("none"), shop.records()) == (2, {})


# --- answers of all kinds -----------------------------------------------------------------------------------


def answering(shop: Shop, *messages: Any, before: Any = None, **policy: Any) -> Any:
    """An application that charges and sends these messages."""
    once = Idempotency(shop.origin, **policy.pop("settings", {}))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await shop.insert(once.connection(scope), "k")
        for message in messages:
            await send(message)
        if before is not None:
            await before(scope)

    return once.keyed(app, account=lambda scope: "acct", **policy)


def start(status: int = 200, *headers: tuple[str, str]) -> Any:
    raw = [(name.encode(), value.encode()) for name, value in headers]
    return {"type": "http.response.start", "status": status, "headers": raw}


def body(content: bytes = b"", more: bool = False) -> Any:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def test_a_stream_is_remembered_without_its_body(small: Shop) -> None:
    seen: list[int] = []
    stream = [start(200, ("content-type", "text/event-stream")), body(b"1", True), body(b"2", True), body()]
    app = answering(small, *stream)
    first = await call(app, on_send=lambda message: seen.append(small.charges()))
    assert first.messages == stream, "untouched"
    assert seen == [1, 1, 1, 1], "committed before the first byte"
    again = await call(app)
    assert (again.status, again.body, again.header("idempotent-body")) == (200, b"", "omitted")
    assert again.header("content-type") is None
    assert small.charges() == 1


async def test_a_stream_that_breaks_was_done_all_the_same(small: Shop) -> None:
    async def fail(scope: Any) -> None:
        raise ZeroDivisionError

    app = answering(small, start(200), body(b"1", True), before=fail)
    with pytest.raises(ZeroDivisionError):
        await call(app)
    assert (await call(app)).replayed
    assert small.charges() == 1


async def test_an_application_that_fails_behind_its_answer_was_done(small: Shop) -> None:
    async def fail(scope: Any) -> None:
        with pytest.raises(Misuse, match="outside the keyed handler"):
            _ = conducted_in(scope).handle
        raise ZeroDivisionError

    app = answering(small, start(200, ("content-length", "2")), body(b"ok"), before=fail)
    with pytest.raises(ZeroDivisionError):
        await call(app)
    again = await call(app)
    assert (again.body, again.replayed) == (b"ok", True)


@pytest.mark.parametrize("messages", [(), (start(200, ("content-length", "2")),), (start(204),)])
async def test_an_application_that_ends_without_an_answer_leaves_nothing(small: Shop, messages: Any) -> None:
    reply = await call(answering(small, *messages))
    assert not reply.started
    nothing(small)


async def test_a_larger_answer_than_can_be_kept(small: Shop) -> None:
    app = answering(
        small, start(201, ("content-length", "4"), ("location", "/1")), body(b"1234"), save_max_body=3
    )
    first = await call(app)
    assert first.body == b"1234"
    again = await call(app)
    assert (again.status, again.body, again.header("location")) == (201, b"", "/1")


async def test_informational_messages_pass_at_once(small: Shop) -> None:
    hint = {"type": "http.response.early_hint", "links": []}
    seen: list[int] = []
    app = answering(small, hint, start(200, ("content-length", "0")), body())
    reply = await call(app, on_send=lambda message: seen.append(small.charges()))
    assert reply.messages[0] == hint
    assert seen == [0, 1, 1]


async def test_only_a_replay_says_that_it_is_one_and_only_allowed_headers_come_again(small: Shop) -> None:
    headers = [
        ("content-length", "2"),
        ("set-cookie", "a=1"),
        ("set-cookie", "b=2"),
        ("link", "<1>"),
        ("link", "<2>"),
        ("date", "now"),
        ("etag", '"x"'),
    ]
    app = answering(small, start(201, *headers), body(b"ok"))
    first, again = await call(app), await call(app, headers=[("origin", "https://shop.test")])
    assert first.headers == headers
    assert [each for each in again.headers if each[0] != "content-length"] == [
        ("link", "<1>"),
        ("link", "<2>"),
        ("etag", '"x"'),
        ("cache-control", "no-store"),
        ("idempotent-replayed", "true"),
        ("access-control-expose-headers", "Idempotent-Replayed, Retry-After"),
    ]


@pytest.mark.parametrize("status", [204, 304])
async def test_a_replay_without_a_body(small: Shop, status: int) -> None:
    app = answering(small, start(status), body())
    assert (await call(app)).status == status
    again = await call(app)
    assert (again.status, again.header("content-length")) == (status, None)


# --- failures at the commit ---------------------------------------------------------------------------------


@pytest.fixture
def deferred(tmp_path: pathlib.Path) -> Shop:
    """A shop in which the handler's work can be refused at the commit."""
    shop = sqlite_shop(tmp_path, "sqlite3")

    def connect() -> Any:
        connection = shop_connect()
        connection.execute("PRAGMA foreign_keys = on")
        return connection

    shop_connect, shop.origin = shop.origin, connect
    with shop_connect() as connection:
        connection.execute("CREATE TABLE parent (id integer primary key)")
        connection.execute("CREATE TABLE child (id references parent DEFERRABLE INITIALLY DEFERRED)")
        connection.commit()
    connection.close()
    return shop


def failing_at_commit(shop: Shop, after: Callable[[BaseException, Any], Awaitable[None]]) -> Any:
    once = Idempotency(shop.origin)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        once.connection(scope).execute("INSERT INTO child VALUES (1)")
        await send(start(201, ("content-length", "2")))
        try:
            await send(body(b"ok"))
        except Exception as error:
            await after(error, send)

    return once.keyed(app, account=lambda scope: "acct")


async def test_a_commit_that_fails_is_told_whatever_the_application_makes_of_it(deferred: Shop) -> None:
    async def swallow(error: BaseException, send: Any) -> None:
        pass

    async def disguise(error: BaseException, send: Any) -> None:
        raise RuntimeError("response already started") from error

    for after in (swallow, disguise):
        with pytest.raises(sqlite3.IntegrityError):
            await call(failing_at_commit(deferred, after))
    assert deferred.records() == {}


async def test_an_application_may_answer_for_a_commit_that_failed(deferred: Shop) -> None:
    async def answer(error: BaseException, send: Any) -> None:
        await send(start(500, ("content-length", "3")))
        await send(body(b"sad"))

    reply = await call(failing_at_commit(deferred, answer))
    assert (reply.status, reply.body) == (500, b"sad")
    assert deferred.records() == {}


async def test_a_handler_that_commits_is_noticed_and_its_answer_saved(small: Shop) -> None:
    events: list[Event] = []

    async def handler(connection: Any, key: str) -> None:
        connection.execute("COMMIT")

    app = keyed(small, handler, events.append)
    assert (await call(app)).status == 201
    assert (await call(app)).replayed
    assert small.charges() == 1
    assert Outcome.TORN in outcomes(events)


async def test_everything_is_saved_once_the_handler_began_where_that_is_the_policy(small: Shop) -> None:
    async def handler(connection: Any, key: str) -> None:
        raise ZeroDivisionError

    app = keyed(small, handler, save="all-after-start")
    first, again = await call(app), await call(app)
    assert (first.status, again.status, again.replayed) == (500, 500, True)
    assert first.body == again.body
    assert small.charges() == 0


# --- the gate and the edge ----------------------------------------------------------------------------------


async def test_a_slow_reader_keeps_no_duplicate_waiting(small: Shop) -> None:
    reading, let_go = asyncio.Event(), asyncio.Event()

    async def slowly(message: Any) -> None:
        reading.set()
        await let_go.wait()

    app = keyed(small, wait="60s")
    slow = []
    for _ in range(2):  # a first answer, then a replay
        slow.append(asyncio.create_task(call(app, on_send=slowly)))
        await reading.wait()
        reading.clear()
        assert (await call(app)).replayed
    let_go.set()
    await asyncio.gather(*slow)


async def test_a_client_that_dies_while_it_sends_keeps_no_retry_waiting(small: Shop) -> None:
    app = keyed(small)

    async def stalled() -> Any:
        return await asyncio.Event().wait()

    async def send(message: Any) -> None: ...

    dead = asyncio.create_task(app(scope_of(headers=[("idempotency-key", "k")]), stalled, send))
    await asyncio.sleep(0)
    assert (await call(app)).status == 201
    dead.cancel()


async def test_where_nobody_may_wait(small: Shop) -> None:
    reached, let_go = asyncio.Event(), asyncio.Event()

    async def handler(connection: Any, key: str) -> None:
        reached.set()
        await let_go.wait()

    app = keyed(small, handler, wait=0)
    first = asyncio.create_task(call(app))
    await reached.wait()
    refused = await call(app)
    assert (refused.status, refused.problem, refused.header("retry-after")) == (409, "in-progress", "1")
    let_go.set()
    assert (await first).status == 201
    assert (await call(app)).replayed


async def test_keyed_twice_is_refused_at_once(small: Shop) -> None:
    app = keyed(small)
    twice = Idempotency(small.origin).keyed(app, account=lambda scope: "acct")
    with pytest.raises(Misuse, match="keyed twice"):
        await call(twice)
    nothing(small)


async def test_an_error_of_ours_from_inside_the_application_is_its_own_affair(small: Shop) -> None:
    """It may come from a guard of the handler's, on another key; and an answer may be out already."""

    async def handler(connection: Any, key: str) -> None:
        raise InFlight

    with pytest.raises(InFlight):
        await call(keyed(small, handler))
    nothing(small)


async def test_a_server_that_gives_no_raw_path_and_one_that_gives_a_query_in_it(small: Shop) -> None:
    app = keyed(small)
    scope = scope_of(path="/ä b", headers=[("idempotency-key", "k")])
    assert (await call(app, {**scope, "raw_path": None})).status == 201
    assert (await call(app, {**scope, "raw_path": "/ä b".encode() + b"?x=1"})).replayed
    assert (await call(app, {**scope, "raw_path": b"/%C3%A4%20b"})).status == 422, "as it stood on the wire"


# --- threads ------------------------------------------------------------------------------------------------


async def test_claims_that_wait_for_a_connection_let_others_end(fresh_postgres: str) -> None:
    """Two connections, two threads, many requests: who has a connection needs a thread to give it back."""
    postgres_tables(fresh_postgres)
    with ConnectionPool(fresh_postgres, min_size=0, max_size=2) as pool:
        shop = Shop("psycopg", pool, postgres_query(fresh_postgres), fresh_postgres)

        async def handler(connection: Any, key: str) -> None:
            await asyncio.sleep(0)

        one, two = (keyed(shop, handler, settings={"threads": 2}) for _ in range(2))
        async with asyncio.timeout(25):  # the pool would give up after 30
            replies = await asyncio.gather(
                *(call(app, key=f"k{number % 8}") for number in range(16) for app in (one, two))
            )
        assert [reply.status for reply in replies] == [201] * 32
        assert shop.charges() == 8
        shop.check()


async def test_a_command_waits_for_the_thread_before_it() -> None:
    """A request that is cancelled at its claim gives back no connection that a thread is working on."""
    begun, let_go = threading.Event(), threading.Event()
    done = []

    class Executor:
        def execute(self, command: Any) -> None:
            if isinstance(command, Begin):
                begun.set()
                let_go.wait()
            done.append(type(command).__name__)

    executor, threads = Executor(), Threads(1)
    driven = Driven(executor, True, threads)
    beginning = asyncio.create_task(driven.execute(Begin()))
    await asyncio.to_thread(begun.wait)
    beginning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beginning
    closing = asyncio.create_task(driven.execute(Close()))
    for _ in range(10):  # it is on its way
        await asyncio.sleep(0)
    await threads.execute(executor, Rollback())  # in the thread where Close would be before it
    assert done == ["Rollback"]
    let_go.set()
    await closing
    assert done == ["Rollback", "Begin", "Close"]


async def test_to_wait_for_a_thread_is_to_wait_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gets his thread late has the less time for his turn."""
    clock, begun, let_go = 100.0, threading.Event(), threading.Event()
    monkeypatch.setattr(system, "now", lambda: clock)
    seen: list[Any] = []

    class Executor:
        def execute(self, command: Any) -> None:
            seen.append(command)
            begun.set()
            let_go.wait()

    threads, wanted = Threads(1), Together((Begin(in_line=5.0), Query("claim")))
    waiting = [asyncio.create_task(threads.execute(Executor(), wanted)) for _ in range(3)]
    await asyncio.to_thread(begun.wait)
    clock = 103.0
    let_go.set()
    await asyncio.gather(*waiting)
    late = Together((Begin(in_line=2.0), Query("claim")))
    assert seen == [wanted, late, late]


async def test_a_scope_of_anyio_does_not_keep_the_loop_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cancels anew at each turn of the loop, as long as somebody in it awaits."""
    waits, wait, let_go = 0, asyncio.wait, asyncio.Event()

    async def counted(awaited: Any) -> Any:
        nonlocal waits
        waits += 1
        return await wait(awaited)

    async def letting_go() -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        let_go.set()

    monkeypatch.setattr(asyncio, "wait", counted)
    turns = asyncio.create_task(letting_go())
    with anyio.CancelScope() as scope:
        scope.cancel()
        _ = await to_its_end(let_go.wait())
    await turns
    assert let_go.is_set()
    assert waits == 1


def test_a_policy_that_does_not_exist_is_refused_where_it_is_written(small: Shop) -> None:
    with pytest.raises(Misuse, match="no setting"):
        keyed(small, windw="1h")
    assert Idempotency(small.origin, policy=Policy(wait=0)).policy.wait_s == 0
