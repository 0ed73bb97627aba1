"""What a keyed FastAPI route promises, on every stack."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import traceback
from typing import Any

import asyncpg
import psycopg
import pytest
from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from sqlalchemy.exc import IntegrityError
from starlette.background import BackgroundTask

from taptwice.errors import Torn
from taptwice.http.fastapi import Idempotency, IdempotentRoute, NotSaved
from tests.http.fastapi_stacks import (
    POSTGRES,
    SESSIONS,
    STACKS,
    Charge,
    Client,
    Stack,
    Work,
    answer_429,
    on,
    problem,
    replayed,
    work_of_one_row,
)

INTEGRITY = (IntegrityError, sqlite3.IntegrityError, psycopg.IntegrityError, asyncpg.UniqueViolationError)
"""What each stack says to a second row with the same note."""

# --- one effect, one answer ---------------------------------------------------------------------------------


@on()
async def test_a_retry_gets_the_first_answer(stack: Stack) -> None:
    async with stack.client(work_of_one_row) as client:
        first, again = await client.charge(), await client.charge()
    assert (first.status_code, again.status_code) == (201, 201)
    assert (replayed(first), replayed(again)) == (False, True)
    assert first.content == again.content == b'{"id":1}'
    assert stack.rows() == [5]
    assert stack.calls == 1


@on()
async def test_another_request_under_the_same_key(stack: Stack) -> None:
    async with stack.client(work_of_one_row) as client:
        await client.charge(amount=5)
        other = await client.charge(amount=6)
    assert (other.status_code, problem(other)) == (422, "key-reused")
    assert stack.rows() == [5]


@on()
async def test_duplicates_at_once_have_one_effect(stack: Stack) -> None:
    async with stack.client(work_of_one_row) as client:
        answers = await asyncio.gather(*(client.charge() for _ in range(20)))
    assert {(answer.status_code, answer.content) for answer in answers} == {(201, b'{"id":1}')}
    assert sum(map(replayed, answers)) == 19
    assert stack.rows() == [5]


@on()
async def test_duplicates_at_several_processes_have_one_effect(stack: Stack) -> None:
    """Each application has a gate of its own, as each process would: only the claim stands between them."""
    clients = [stack.client(work_of_one_row, once=stack.once()) for _ in range(8)]
    answers = await asyncio.gather(*(client.charge() for client in clients for _ in range(2)))
    assert {(answer.status_code, answer.content) for answer in answers} == {(201, b'{"id":1}')}
    assert sum(map(replayed, answers)) == 15
    assert stack.rows() == [5]
    assert stack.calls == 1


@on()
async def test_many_keys_share_a_small_pool(stack: Stack) -> None:
    """More requests than connections, and on blocking stacks more than threads of ours."""
    async with stack.client(work_of_one_row, once=stack.once(threads=4)) as client:
        answers = await asyncio.gather(*(client.charge(f"key-{n}") for n in range(30)))
    assert {answer.status_code for answer in answers} == {201}
    assert len(stack.rows()) == 30


# --- who is it, and is the request valid --------------------------------------------------------------------


@on()
async def test_a_validation_error_uses_up_no_key(stack: Stack) -> None:
    async with stack.client(work_of_one_row) as client:
        invalid = await client.post("/charges", json={"amount": "much"}, headers={"idempotency-key": "key-1"})
        assert invalid.status_code == 422
        assert stack.saved() == []
        valid = await client.charge()
    assert (valid.status_code, replayed(valid)) == (201, False)


@on()
async def test_nobody_reads_an_answer_without_login(stack: Stack) -> None:
    async with stack.client(work_of_one_row) as client:
        assert (await client.charge()).status_code == 201
        assert (await client.charge(authorization="")).status_code == 401
        assert (await client.charge(authorization="banned")).status_code == 403
        other = await client.charge(authorization="acct_2")
        assert (other.status_code, replayed(other)) == (201, False)
    assert stack.saved() == [201, 201]


@on("sqlite-sqlalchemy-async", "sqlalchemy-psycopg")
@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], "key-missing"),
        ([""], "key-invalid"),
        (["a b"], "key-invalid"),
        (["a" * 256], "key-invalid"),
        (["same", "same"], "key-invalid"),
        (['"unfinished'], "key-invalid"),
    ],
)
async def test_keys_that_are_none(stack: Stack, lines: list[str], expected: str) -> None:
    async with stack.client(work_of_one_row) as client:
        refused = await client.post(
            "/charges",
            json={"amount": 5},
            headers=[("authorization", "acct_1"), *(("idempotency-key", line) for line in lines)],
        )
        assert (refused.status_code, problem(refused)) == (400, expected)
        assert (await client.charge(lines[0] if lines else None, authorization="")).status_code == 401
    assert stack.calls == 0


async def test_both_spellings_are_one_key(charges_sqlite: str) -> None:
    stack = Stack("sqlite-sqlalchemy-async", charges_sqlite)
    await stack.open()
    async with stack.client(work_of_one_row) as client:
        await client.charge("abc")
        assert replayed(await client.charge('"abc"'))
    await stack.close()


# --- what is saved, what is undone --------------------------------------------------------------------------


@on()
async def test_a_raised_refusal_is_kept_and_its_work_undone(stack: Stack) -> None:
    async def handler(work: Work) -> Any:
        await work.insert(5)
        raise HTTPException(402, "too much")

    async with stack.client(handler) as client:
        first, again = await client.charge(), await client.charge()
    assert (first.status_code, replayed(first)) == (402, False)
    assert (again.status_code, replayed(again)) == (402, True)
    assert first.content == again.content
    assert stack.rows() == []
    assert stack.saved() == [402]


@on()
async def test_a_returned_refusal_is_kept_with_its_work(stack: Stack) -> None:
    async def handler(work: Work) -> Any:
        await work.insert(5)
        return JSONResponse({"declined": True}, 402)

    async with stack.client(handler) as client:
        first, again = await client.charge(), await client.charge()
    assert (first.status_code, again.status_code, replayed(again)) == (402, 402, True)
    assert stack.rows() == [5]


@on()
@pytest.mark.parametrize("status", [429, 503])
async def test_what_is_not_saved_is_undone(stack: Stack, status: int) -> None:
    async def handler(work: Work) -> Any:
        await work.insert(5)
        return Response("later", status_code=status if stack.calls == 1 else 201)

    async with stack.client(handler) as client:
        first = await client.charge()
        assert (first.status_code, stack.rows(), stack.saved()) == (status, [], [])
        again = await client.charge()
    assert (again.status_code, replayed(again)) == (201, False)
    assert stack.rows() == [5]


@on()
async def test_an_unhandled_error_undoes_everything(stack: Stack) -> None:
    async def handler(work: Work) -> Any:
        id_ = await work.insert(5)
        if stack.calls == 1:
            raise ValueError("boom")
        return {"id": id_}

    app = stack.app(handler)

    @app.exception_handler(Exception)
    async def page(request: Request, error: Exception) -> Response:
        return Response("our own page", status_code=500)

    async with Client(app) as client:
        first = await client.charge()
        assert (first.status_code, first.text) == (500, "our own page")
        assert (stack.rows(), stack.saved()) == ([], [])
        again = await client.charge()
    assert (again.status_code, replayed(again)) == (201, False)
    assert stack.rows() == [5]


@on(*POSTGRES)
async def test_a_commit_that_fails_is_a_500(stack: Stack) -> None:
    async def handler(work: Work) -> Any:
        return {"id": await work.insert(5, parent=None if stack.calls > 1 else 12345)}

    async with stack.client(handler) as client:
        first = await client.charge()
        assert (first.status_code, stack.rows(), stack.saved()) == (500, [], [])
        assert (await client.charge()).status_code == 201
    assert stack.rows() == [5]


@on(*POSTGRES)
async def test_a_commit_that_fails_may_have_an_exception_handler(stack: Stack) -> None:
    """Its answer is given, but nothing of it is kept."""

    async def handler(work: Work) -> Any:
        return {"id": await work.insert(5, parent=None if stack.calls > 1 else 12345)}

    app = stack.app(handler)

    async def conflict(request: Request, error: Exception) -> Response:
        return Response("handled", status_code=409)

    for kind in (IntegrityError, asyncpg.ForeignKeyViolationError, psycopg.errors.ForeignKeyViolation):
        app.add_exception_handler(kind, conflict)
    async with Client(app) as client:
        first = await client.charge()
        assert (first.status_code, first.text, stack.rows(), stack.saved()) == (409, "handled", [], [])
        assert (await client.charge()).status_code == 201


@on(*POSTGRES)
async def test_an_answer_that_was_not_committed_has_no_background_task(stack: Stack) -> None:
    sent: list[int] = []

    async def handler(work: Work) -> Any:
        id_ = await work.insert(5)
        if stack.calls == 1:
            [[backend]] = await work.execute("SELECT pg_backend_pid()")
            stack.execute(f"SELECT pg_terminate_backend({backend}, 10000)")
        return JSONResponse({"id": id_}, 201, background=BackgroundTask(sent.append, stack.calls))

    async with stack.client(handler) as client:
        first, second = await client.charge(), await client.charge()
    assert first.status_code == 503
    assert (second.status_code, stack.rows()) == (201, [5])
    assert sent == [2]


@on()
async def test_not_saved(stack: Stack) -> None:
    async def handler(work: Work) -> Any:
        id_ = await work.insert(5)
        match stack.calls:
            case 1:
                raise NotSaved(Response("no", status_code=418))
            case 2:
                raise NotSaved({"model": "rendered as if returned"})
        return {"id": id_}

    async with stack.client(handler) as client:
        response, model, done = [await client.charge() for _ in range(3)]
    assert (response.status_code, response.text) == (418, "no")
    assert (model.status_code, model.json()) == (201, {"model": "rendered as if returned"})
    assert (done.status_code, replayed(done)) == (201, False)
    assert stack.rows() == [5]
    assert stack.saved() == [201]


# --- handlers that end or break the transaction -------------------------------------------------------------


@on(*SESSIONS)
async def test_the_handlers_commit_comes_with_the_answer(stack: Stack) -> None:
    async def handler(work: Work) -> Any:
        await work.insert(1)
        await work.commit()
        assert stack.rows() == [], "committed before the answer"
        await work.insert(2)
        return {}

    async with stack.client(handler) as client:
        assert (await client.charge()).status_code == 201
        assert replayed(await client.charge())
    assert stack.rows() == [1, 2]


@on(*SESSIONS)
@pytest.mark.parametrize("error", [HTTPException(402), ValueError("boom")])
async def test_what_the_handler_committed_is_undone_when_it_raises(stack: Stack, error: Exception) -> None:
    async def handler(work: Work) -> Any:
        await work.insert(1)
        await work.commit()
        await work.insert(2)
        raise error

    kept = isinstance(error, HTTPException)
    async with stack.client(handler) as client:
        assert (await client.charge()).status_code == (402 if kept else 500)
        assert replayed(await client.charge()) is kept
    assert stack.rows() == []
    assert stack.saved() == ([402] if kept else [])


@on(*SESSIONS)
async def test_the_handlers_rollback_goes_back_to_the_claim(stack: Stack) -> None:
    async def handler(work: Work) -> Any:
        await work.insert(1)
        await work.rollback()
        await work.insert(2)
        return {}

    async with stack.client(handler) as client:
        assert (await client.charge()).status_code == 201
        assert replayed(await client.charge())
    assert stack.rows() == [2]


@on(*SESSIONS)
async def test_an_error_that_is_caught_and_rolled_back(stack: Stack) -> None:
    async def handler(work: Work) -> Any:
        await work.insert(1, "same")
        await work.commit()
        try:
            await work.insert(2, "same")
        except IntegrityError:
            await work.rollback()
        await work.insert(3)
        return {}

    async with stack.client(handler) as client:
        assert (await client.charge()).status_code == 201
    assert stack.rows() == [1, 3]


@on()
async def test_a_nested_savepoint(stack: Stack) -> None:
    async def handler(work: Work) -> Any:
        await work.insert(1, "same")
        try:
            async with work.savepoint():
                await work.insert(2, "same")
        except INTEGRITY:
            pass
        async with work.savepoint():
            await work.insert(3)
        return {}

    async with stack.client(handler) as client:
        assert (await client.charge()).status_code == 201
    assert stack.rows() == [1, 3]


@on(*POSTGRES)
async def test_a_swallowed_error_does_nothing(stack: Stack) -> None:
    """PostgreSQL refuses every further statement: the claim with its answer cannot be saved either."""

    async def handler(work: Work) -> Any:
        await work.insert(1, "same")
        try:
            await work.insert(2, "same")
        except INTEGRITY:
            pass
        return {}

    async with stack.client(handler) as client:
        assert (await client.charge()).status_code == 500
    assert (stack.rows(), stack.saved()) == ([], [])


@on(*POSTGRES)
async def test_neither_key_nor_answer_stands_in_the_traceback_of_a_failure(stack: Stack) -> None:
    async def handler(work: Work) -> Any:
        with contextlib.suppress(Exception):
            await work.execute("SELECT nonsense")
        return {"card": "4242"}

    app = stack.app(handler)
    raised: list[str] = []

    @app.exception_handler(Exception)
    async def page(request: Request, error: Exception) -> Response:
        raised.extend(traceback.format_exception(error))
        return Response(status_code=500)

    async with Client(app) as client:
        assert (await client.charge("key-of-mine")).status_code == 500
    told = "".join(raised)
    assert "swallowed" in told
    assert "key-of-mine" not in told
    assert "4242" not in told


@on()
@pytest.mark.parametrize("strict", [False, True])
async def test_a_raw_commit_tears_but_blocks_nobody(stack: Stack, strict: bool) -> None:
    async def handler(work: Work) -> Any:
        await work.insert(5)
        await work.execute("COMMIT")
        return {}

    app = stack.app(handler, stack.once(strict=strict))
    raised: list[Exception] = []

    @app.exception_handler(Exception)
    async def page(request: Request, error: Exception) -> Response:
        raised.append(error)
        return Response(status_code=500)

    async with Client(app) as client:
        first, again = await client.charge(), await client.charge()
    assert first.status_code == (500 if strict else 201)
    assert [type(error) for error in raised] == ([Torn] if strict else [])
    assert (again.status_code, replayed(again)) == (201, True), "the answer was saved, strict or not"
    assert stack.rows() == [5]
    assert (
        [event.outcome.value for event in stack.events] == ["new", "torn", "replayed"]
        if strict
        else [
            "new",
            "torn",
            "finished",
            "replayed",
        ]
    )


@on()
async def test_a_raw_commit_without_a_key_is_answered_as_what_it_is(stack: Stack) -> None:
    """The work is done: an error would have it done again."""

    async def handler(work: Work) -> Any:
        await work.insert(5)
        await work.execute("COMMIT")
        return {}

    async with stack.client(handler, required=False) as client:
        assert (await client.charge(key=None)).status_code == 201
    assert (stack.rows(), stack.saved()) == ([5], [])


@on(*(name for name in STACKS if name != "sqlalchemy-psycopg"))
async def test_a_raw_commit_in_front_of_a_failure_is_told(stack: Stack) -> None:
    """What was committed stays, and a retry does it again: nobody can mend that, so somebody must hear of it.

    Through SQLAlchemy psycopg has begun another transaction by then, at the session's own rollback.
    """

    async def handler(work: Work) -> Any:
        await work.insert(5)
        await work.execute("COMMIT")
        raise ZeroDivisionError

    async with stack.client(handler) as client:
        assert (await client.charge()).status_code == 500
    assert (stack.rows(), stack.saved()) == ([5], [])
    assert [event.outcome.value for event in stack.events] == ["new", "torn"]


async def test_a_route_made_anew_without_its_edge_refuses() -> None:
    """The effect would happen twice: its marker went with the route that was keyed."""
    once = Idempotency(lambda: None, account=lambda: "acct_1")
    router = APIRouter(route_class=IdempotentRoute)
    done = []

    @router.post("/charges", dependencies=[once.keyed()])
    async def charge() -> None:
        done.append(1)

    app = FastAPI()
    [route] = router.routes
    assert isinstance(route, APIRoute)
    app.add_api_route(route.path, route.endpoint, methods=["POST"], dependencies=route.dependencies)
    async with Client(app) as client:
        assert (await client.charge()).status_code == 500
    assert done == []


@on(*SESSIONS)
async def test_an_unflushed_duplicate_reaches_the_exception_handler(stack: Stack) -> None:
    async def handler(work: Work) -> Any:
        work.raw.add(Charge(amount=5, note="same"))
        return {}

    app = stack.app(handler)

    @app.exception_handler(IntegrityError)
    async def conflict(request: Request, error: Exception) -> Response:
        return Response("taken", status_code=409)

    async with Client(app) as client:
        assert (await client.charge("key-1")).status_code == 201
        first, again = await client.charge("key-2"), await client.charge("key-2")
    assert (first.status_code, first.text, replayed(first)) == (409, "taken", False)
    assert (again.status_code, again.text, replayed(again)) == (409, "taken", True)
    assert stack.rows() == [5]
    assert stack.saved() == [201, 409]


@on()
async def test_no_savepoint(stack: Stack) -> None:
    async def handler(work: Work) -> Any:
        await work.insert(5)
        if stack.calls == 1:
            raise HTTPException(402)
        return {}

    async with stack.client(handler, savepoint=False) as client:
        first, again, other = await client.charge(), await client.charge(), await client.charge("key-2")
    assert (first.status_code, again.status_code, replayed(again)) == (402, 402, True)
    assert (other.status_code, stack.rows()) == (201, [5])


# --- without a key ------------------------------------------------------------------------------------------


@on()
async def test_an_optional_key(stack: Stack) -> None:
    async def handler(work: Work) -> Any:
        await work.insert(5)
        match stack.calls:
            case 2:
                raise HTTPException(402)
            case 3:
                return answer_429()
            case 4:
                raise ValueError("boom")
        return {}

    async with stack.client(handler, required=False) as client:
        statuses = [(await client.charge(None)).status_code for _ in range(5)]
        assert statuses == [201, 402, 429, 500, 201]
        assert stack.rows() == [5, 5]
        assert stack.saved() == []
        malformed = await client.charge("a b")
        assert (malformed.status_code, problem(malformed)) == (400, "key-invalid")
        assert replayed(await client.charge("key-1")) is False
        assert replayed(await client.charge("key-1")) is True


@on()
async def test_outside_keyed_routes_the_dependency_gives_one_of_its_own(stack: Stack) -> None:
    once = stack.once()
    app = FastAPI()

    async def handler(work: Work) -> Any:
        await work.insert(5)
        if stack.sessions:
            await work.commit()
        return {}

    app.post("/charges", response_model=None)(stack.endpoint(handler, stack.given(once)))
    async with Client(app) as client:
        assert (await client.charge(None)).status_code == 200
    assert stack.rows() == [5]
