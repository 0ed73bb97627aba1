"""Bytes, headers, streams and bodies of keyed FastAPI routes, and what the settings of a policy change."""

# ruff: noqa: B008 - a dependency as a default is how FastAPI spells what only this function knows

from __future__ import annotations

import asyncio
import gzip
import logging
from typing import Any

import httpx2
import pytest
from fastapi import APIRouter, Depends, FastAPI, Form, Request, Response, UploadFile
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, StreamingResponse
from sqlalchemy.exc import OperationalError
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware

from taptwice.core.fingerprint import Rules
from taptwice.core.header import KeySyntax
from taptwice.core.policy import profile
from taptwice.errors import CommitUnknown, StoreUnavailable
from taptwice.events import Event, Outcome
from taptwice.flows.current import KeyHashFilter
from taptwice.http.fastapi import Idempotency, IdempotentRoute
from tests.http.fastapi_stacks import (
    Client,
    Stack,
    Work,
    account,
    drive,
    on,
    problem,
    replayed,
    work_of_one_row,
)

HERE = on("sqlite-sqlalchemy-async")
BOTH = on("sqlite-sqlalchemy-async", "sqlalchemy-psycopg")


def site(stack: Stack, endpoint: Any, once: Idempotency | None = None, **policy: Any) -> FastAPI:
    """One keyed route, ``POST /x``, whose endpoint needs no database."""
    once = once or stack.once()
    router = APIRouter(route_class=IdempotentRoute)
    router.post("/x", response_model=None, dependencies=[once.keyed(**policy)])(endpoint)
    app = FastAPI()
    app.include_router(router)
    return app


async def twice(client: httpx2.AsyncClient, **options: Any) -> tuple[httpx2.Response, httpx2.Response]:
    options["headers"] = {"idempotency-key": "key-1", **options.get("headers", {})}
    return await client.post("/x", **options), await client.post("/x", **options)


# --- fidelity -----------------------------------------------------------------------------------------------


@HERE
async def test_204_has_neither_length_nor_type(stack: Stack) -> None:
    async def endpoint() -> Response:
        return Response(status_code=204)

    async with Client(site(stack, endpoint)) as client:
        for answer in await twice(client):
            assert (answer.status_code, answer.content) == (204, b"")
            assert "content-length" not in answer.headers
            assert "content-type" not in answer.headers
    assert stack.saved() == [204]


@HERE
async def test_the_headers_that_are_kept(stack: Stack) -> None:
    async def endpoint() -> Response:
        response = RedirectResponse("/charges/1", 303)
        response.headers["etag"] = '"v1"'
        response.headers.append("link", "</a>; rel=next")
        response.headers.append("link", "</b>; rel=prev")
        response.set_cookie("session", "secret")
        response.set_cookie("other", "secret")
        response.headers["x-request-id"] = "r1"
        return response

    async with Client(site(stack, endpoint)) as client:
        first, again = await twice(client)
    assert (first.status_code, again.status_code) == (303, 303)
    assert len(first.headers.get_list("set-cookie")) == 2
    assert "set-cookie" not in again.headers
    assert "x-request-id" not in again.headers
    assert again.headers["location"] == "/charges/1"
    assert again.headers["etag"] == '"v1"'
    assert again.headers.get_list("link") == ["</a>; rel=next", "</b>; rel=prev"]
    assert again.headers["cache-control"] == "no-store"
    assert again.headers["content-length"] == "0"


@BOTH
async def test_a_binary_body(stack: Stack) -> None:
    async def handler(work: Work) -> Response:
        return Response(bytes(range(256)), media_type="application/octet-stream")

    async with stack.client(handler) as client:
        first, again = await client.charge(), await client.charge()
    assert first.content == again.content == bytes(range(256))
    assert again.headers["content-type"] == "application/octet-stream"
    assert replayed(again)


@HERE
async def test_middleware_outside_works_on_replays_as_on_first_answers(stack: Stack) -> None:
    async def endpoint() -> Any:
        return {"text": "x" * 2000}

    app = site(stack, endpoint)
    app.add_middleware(GZipMiddleware, minimum_size=100)
    app.add_middleware(CORSMiddleware, allow_origins=["https://a.test", "https://b.test"])
    async with Client(app) as client:

        async def post(origin: str, encoding: str) -> httpx2.Response:
            headers = {"idempotency-key": "key-1", "origin": origin, "accept-encoding": encoding}
            return await client.post("/x", headers=headers)

        first = await post("https://a.test", "gzip")
        plain = await post("https://b.test", "identity")
        zipped = await post("https://a.test", "gzip")
    assert (first.headers["content-encoding"], replayed(first)) == ("gzip", False)
    assert ("content-encoding" in plain.headers, replayed(plain)) == (False, True)
    assert (zipped.headers["content-encoding"], replayed(zipped)) == ("gzip", True)
    assert first.json() == plain.json() == zipped.json()
    assert plain.headers["access-control-allow-origin"] == "https://b.test"
    assert "Idempotent-Replayed" in plain.headers["access-control-expose-headers"]


@HERE
async def test_middleware_outside_sees_the_state_that_the_request_is_left_with(stack: Stack) -> None:
    async def endpoint(request: Request) -> Any:
        request.state.told = "by the handler"
        return {}

    app = site(stack, endpoint)

    @app.middleware("http")
    async def outside(request: Request, call_next: Any) -> Any:
        response = await call_next(request)
        response.headers["x-told"] = request.state.told
        return response

    async with Client(app) as client:
        answer = await client.charge(path="/x")
    assert (answer.status_code, answer.headers["x-told"]) == (200, "by the handler")


@HERE
async def test_an_encoding_of_the_handlers_own_is_kept(stack: Stack) -> None:
    async def endpoint() -> Response:
        return Response(gzip.compress(b"text"), headers={"content-encoding": "gzip"})

    async with Client(site(stack, endpoint)) as client:
        first, again = await twice(client)
    assert first.text == again.text == "text"
    assert again.headers["content-encoding"] == "gzip"


# --- streams ------------------------------------------------------------------------------------------------


def events() -> StreamingResponse:
    async def three() -> Any:
        for n in range(3):
            yield f"data: {n}\n\n"

    return StreamingResponse(three(), media_type="text/event-stream")


@BOTH
async def test_a_stream_leaves_a_tombstone(stack: Stack) -> None:
    async def handler(work: Work) -> Any:
        await work.insert(5)
        return events()

    async with stack.client(handler) as client:
        first, again = await client.charge(), await client.charge()
    assert first.text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
    assert first.headers["content-type"].startswith("text/event-stream")
    assert (again.status_code, again.content, replayed(again)) == (200, b"", True)
    assert again.headers["idempotent-body"] == "omitted"
    assert "content-type" not in again.headers
    assert stack.rows() == [5]


@HERE
async def test_a_stream_that_is_captured(stack: Stack) -> None:
    async def endpoint() -> Any:
        return events()

    async with Client(site(stack, endpoint, streams="capture")) as client:
        first, again = await twice(client)
    assert first.text == again.text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
    assert replayed(again)


@BOTH
async def test_an_answer_over_the_cap_leaves_a_tombstone(stack: Stack) -> None:
    async def handler(work: Work) -> Any:
        return {"id": await work.insert(5), "text": "x" * 100}

    async with stack.client(handler, save_max_body=50) as client:
        first, again = await client.charge(), await client.charge()
    assert first.json()["id"] == 1
    assert (again.status_code, again.content, again.headers["idempotent-body"]) == (201, b"", "omitted")
    assert stack.rows() == [5]


@HERE
async def test_a_file(stack: Stack, tmp_path: Any) -> None:
    (tmp_path / "receipt.txt").write_text("paid")

    async def endpoint() -> Any:
        return FileResponse(tmp_path / "receipt.txt")

    async with Client(site(stack, endpoint)) as client:
        first, again = await twice(client)
    assert first.text == "paid"
    assert (again.status_code, replayed(again)) == (200, True)


# --- request bodies -----------------------------------------------------------------------------------------


@HERE
@pytest.mark.parametrize("blocking", [False, True])
async def test_uploads(stack: Stack, blocking: bool) -> None:
    def names(file: UploadFile, note: str = Form()) -> Any:
        return [file.filename, file.file.read().decode(), note]

    async def async_names(file: UploadFile, note: str = Form()) -> Any:
        return [file.filename, (await file.read()).decode(), note]

    async with Client(site(stack, names if blocking else async_names)) as client:

        async def upload(content: bytes) -> httpx2.Response:
            return await client.post(
                "/x",
                headers={"idempotency-key": "key-1"},
                files={"file": ("a.txt", content)},
                data={"note": "n"},
            )

        first, again, other = await upload(b"one"), await upload(b"one"), await upload(b"two")
    assert (first.status_code, first.json()) == (200, ["a.txt", "one", "n"])
    assert replayed(again), "the boundary is another each time"
    assert (other.status_code, problem(other)) == (422, "key-reused")


@HERE
async def test_a_handler_that_reads_the_stream_itself(stack: Stack) -> None:
    async def endpoint(request: Request) -> Any:
        return [len(chunk) async for chunk in request.stream() if chunk]

    async with Client(site(stack, endpoint)) as client:
        first, again = await twice(client, content=b"x" * 1000)
    assert (first.json(), replayed(again)) == ([1000], True)


@HERE
async def test_a_request_over_the_cap(stack: Stack) -> None:
    async def endpoint() -> None:
        raise AssertionError

    async with Client(site(stack, endpoint, request_max_body=10)) as client:
        refused = (await twice(client, content=b"x" * 11))[0]
    assert (refused.status_code, problem(refused)) == (413, "request-too-large")


# --- settings -----------------------------------------------------------------------------------------------


@BOTH
async def test_save_success(stack: Stack) -> None:
    async def handler(work: Work) -> Any:
        await work.insert(5)
        return JSONResponse({}, 402 if stack.calls == 1 else 201)

    async with stack.client(handler, save="success") as client:
        assert (await client.charge()).status_code == 402
        assert (stack.rows(), stack.saved()) == ([], [])
        assert not replayed(await client.charge())
        assert replayed(await client.charge())
    assert stack.rows() == [5]


@BOTH
async def test_stripe_v1_saves_everything_that_began(stack: Stack) -> None:
    async def handler(work: Work) -> Any:
        await work.insert(5)
        match stack.calls:
            case 1:
                raise ValueError("boom")
            case 2:
                return Response("busy", 503)
        return {}

    once = stack.once(policy=profile("stripe-v1"))
    async with stack.client(handler, once) as client:
        for key, status in (("key-1", 500), ("key-2", 503), ("key-3", 201)):
            first, again = await client.charge(key), await client.charge(key)
            assert (first.status_code, again.status_code, replayed(again)) == (status, status, True)
            assert first.content == again.content
        reused = await client.charge("key-3", amount=6)
        assert (reused.status_code, problem(reused)) == (400, "key-reused")
        assert (await client.charge(None)).status_code == 201, "a key is optional"
    assert stack.rows() == [5, 5, 5], "raised: undone; returned: kept"


@HERE
async def test_fingerprint_rules(stack: Stack) -> None:
    async def endpoint(request: Request) -> Any:
        return {}

    app = site(stack, endpoint, fingerprint=Rules(exclude=("/at",)))
    async with Client(app) as client:

        async def post(body: bytes, **options: Any) -> httpx2.Response:
            headers = {"idempotency-key": "key-1", "content-type": "application/json"}
            return await client.post("/x", content=body, headers=headers, **options)

        assert (await post(b'{"amount": 1.0, "at": 1}')).status_code == 200
        assert replayed(await post(b'{"at":2,"amount":1}'))
        assert (await post(b'{"at":2,"amount":2}')).status_code == 422
        assert (await post(b'{"at":2,"amount":1}', params={"q": "1"})).status_code == 422


@HERE
async def test_the_window_and_old_uuids(stack: Stack) -> None:
    now = [1_800_000_000.0]

    async def endpoint() -> Any:
        return {}

    once = stack.once(clock=lambda: now[0])
    app = site(stack, endpoint, once, window="1h", uuid7_guard=True)
    made_at = f"{int(now[0] * 1000):012x}"
    key = f"{made_at[:8]}-{made_at[8:]}-7abc-8def-0123456789ab"
    async with Client(app) as client:
        headers = {"idempotency-key": key}
        assert (await client.post("/x", headers=headers)).status_code == 200
        now[0] += 3599
        assert replayed(await client.post("/x", headers=headers))
        now[0] += 2
        late = await client.post("/x", headers=headers)
    assert (late.status_code, problem(late)) == (400, "key-expired")
    assert stack.rows("SELECT expires_at - created_at FROM taptwice_records") == [3600]


@HERE
async def test_a_key_in_the_body(stack: Stack) -> None:
    async def endpoint(request: Request) -> Any:
        return await request.json()

    async with Client(site(stack, endpoint, key_pointer="/meta/key")) as client:
        body = {"meta": {"key": "key-1"}, "amount": 5}
        first, again = [await client.post("/x", json=body) for _ in range(2)]
        missing = await client.post("/x", json={"meta": {}})
        malformed = await client.post("/x", json={"meta": {"key": 7}})
        other = await client.post("/x", json={**body, "amount": 6})
    assert (first.json(), replayed(again)) == (body, True)
    assert [(a.status_code, problem(a)) for a in (missing, malformed, other)] == [
        (400, "key-missing"),
        (400, "key-invalid"),
        (422, "key-reused"),
    ]


@HERE
async def test_other_names_and_a_strict_syntax(stack: Stack) -> None:
    async def endpoint() -> Any:
        return {}

    syntax = KeySyntax(names=("X-Key", "Idempotency-Key"), strict=True)
    app = site(stack, endpoint, key=syntax, replay_header="X-Seen", replay_allow=())
    async with Client(app) as client:
        assert (await client.post("/x", headers={"x-key": "bare"})).status_code == 400
        assert (
            await client.post("/x", headers={"x-key": '"a"', "idempotency-key": '"b"'})
        ).status_code == 400
        assert (await client.post("/x", headers={"x-key": '"a"'})).status_code == 200
        again = await client.post("/x", headers={"idempotency-key": '"a"'})
    assert again.headers["x-seen"] == "true"
    assert "content-type" not in again.headers


# --- a store that fails -------------------------------------------------------------------------------------


def refusing(once: Idempotency, error: Exception, at: str) -> None:
    """Let one kind of command fail, in whatever executor."""
    open_ = once.source.open

    def opened() -> Any:
        executor = open_()
        inner = getattr(executor, "blocking", executor)

        def fail(command: Any) -> None:
            raise error

        setattr(inner, at, fail)
        return executor

    once.source.open = opened  # type: ignore[method-assign]


@BOTH
async def test_a_store_that_is_down(stack: Stack) -> None:
    once = stack.once()
    async with stack.client(work_of_one_row, once, required=False, retry_after=3) as client:
        refusing(once, StoreUnavailable("no connection"), "begin")
        for key in ("key-1", None):
            down = await client.charge(key)
            assert (down.status_code, problem(down)) == (503, "store-unavailable")
            assert down.headers["retry-after"] == "3"
    assert stack.calls == 0
    assert Outcome.STORE_UNAVAILABLE in [event.outcome for event in stack.events]


@on("sqlalchemy-asyncpg", "sqlalchemy-psycopg", "asyncpg", "psycopg-async", "psycopg-sync")
async def test_a_database_that_does_not_answer(stack: Stack) -> None:
    """Nobody listens there; the real errors of the real drivers."""
    import asyncpg
    import psycopg
    from sqlalchemy import create_engine
    from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
    from sqlalchemy.orm import sessionmaker

    nowhere = "127.0.0.1:1/nothing"
    origin: Any
    match stack.name:
        case "sqlalchemy-asyncpg":
            origin = async_sessionmaker(create_async_engine(f"postgresql+asyncpg://{nowhere}"))
        case "sqlalchemy-psycopg":
            origin = sessionmaker(create_engine(f"postgresql+psycopg://{nowhere}"))
        case "asyncpg":
            origin = asyncpg.create_pool(f"postgresql://{nowhere}", min_size=0)
            await origin
        case "psycopg-async":
            from psycopg_pool import AsyncConnectionPool

            origin = AsyncConnectionPool(
                f"postgresql://{nowhere}", min_size=0, max_size=1, timeout=0.2, open=False
            )
            await origin.open()
        case _:

            def origin() -> Any:
                return psycopg.connect(f"postgresql://{nowhere}")

    once = Idempotency(origin, account=account, listeners=[stack.events.append])
    async with stack.client(work_of_one_row, once) as client:
        down = await client.charge()
    assert (down.status_code, problem(down)) == (503, "store-unavailable")
    assert stack.calls == 0
    if stack.name in ("asyncpg", "psycopg-async"):
        await origin.close()


@BOTH
async def test_a_commit_of_which_nobody_knows(stack: Stack) -> None:
    once = stack.once()
    async with stack.client(work_of_one_row, once) as client:
        await client.charge("warm")
        refusing(once, CommitUnknown(), "commit")
        unknown = await client.charge()
    assert (unknown.status_code, problem(unknown)) == (503, "commit-unknown")
    assert "retry-after" in unknown.headers
    assert stack.saved() == [201]


@HERE
async def test_a_database_error_in_the_handler_is_the_handlers(stack: Stack) -> None:
    async def handler(work: Work) -> Any:
        await work.execute("SELECT * FROM nowhere")

    app = stack.app(handler)

    @app.exception_handler(OperationalError)
    async def page(request: Request, error: Exception) -> Response:
        return Response("theirs", 500)

    async with Client(app) as client:
        assert (await client.charge()).text == "theirs"


# --- events and logs ----------------------------------------------------------------------------------------


@BOTH
async def test_events_of_every_outcome(stack: Stack) -> None:
    borrowed: list[int] = []
    heard: list[Event] = []

    def listen(event: Event) -> None:
        borrowed.append(stack.borrowed())
        heard.append(event)
        raise ValueError("a listener that fails harms nobody")

    async def handler(work: Work) -> Any:
        await work.insert(5)
        if stack.calls == 2:
            raise ValueError("boom")
        return {}

    once = Idempotency(stack.origin, account=account, listeners=[listen])
    async with stack.client(handler, once) as client:
        await client.charge("key-1")
        await client.charge("key-1")
        await client.charge("key-1", amount=6)
        await client.charge(None)
        await client.charge("a b")
        await client.charge("key-2")
    assert [event.outcome for event in heard] == [
        Outcome.NEW,
        Outcome.FINISHED,
        Outcome.REPLAYED,
        Outcome.MISMATCH,
        Outcome.MISSING,
        Outcome.INVALID,
        Outcome.NEW,
        Outcome.RELEASED,
    ]
    assert set(borrowed) == {0}, "told after the transaction"
    assert {event.route for event in heard} == {"POST /charges"}
    assert [event.status for event in heard[:3]] == [None, 201, 201]
    told = repr(heard)
    assert "key-1" not in told
    assert "acct_1" not in told
    assert len(heard[0].key or "") == len(heard[0].account or "") == 16


@HERE
async def test_events_in_the_clear(stack: Stack) -> None:
    once = stack.once(show=True, in_clear=False)
    async with stack.client(work_of_one_row, once) as client:
        await client.charge()
    assert {(event.account, event.key) for event in stack.events} == {("acct_1", "key-1")}
    assert stack.rows("SELECT account, key FROM taptwice_records") == [("", "")]


@BOTH
async def test_the_keys_hash_on_every_log_line(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    caplog.handler.addFilter(KeyHashFilter())
    mine = logging.getLogger("shop")

    async def handler(work: Work) -> Any:
        mine.info("in the handler")
        return {"id": await work.insert(5)}

    async with stack.client(handler) as client:
        await client.charge()
        mine.info("outside")
    lines = {record.getMessage(): getattr(record, "idempotency_key_hash", None) for record in caplog.records}
    hashed = stack.events[0].key
    assert hashed is not None
    assert lines["in the handler"] == hashed
    assert lines["outside"] is None
    assert {value for line, value in lines.items() if line.startswith("idempotency key")} == {hashed}


@HERE
async def test_a_sync_handler_of_an_awaiting_origin_sees_the_claim(stack: Stack) -> None:
    """Plain functions run in a thread, in the same context."""
    from taptwice.flows.current import current

    def endpoint(_: Any = Depends(lambda: None)) -> Any:
        under_way = current.get()
        return under_way is not None and under_way.executor is not None

    async with Client(site(stack, endpoint)) as client:
        assert (await twice(client))[0].json() is True
    with pytest.raises(AssertionError):
        drive(asyncio.sleep(0))
