"""The user's own sessions inside a claim: they join it, however they are made."""

# ruff: noqa: B008 - a dependency as a default is how FastAPI spells what only this function knows

from __future__ import annotations

import asyncio
import gc
import inspect
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from taptwice import AsyncGuard, Guard
from taptwice.errors import Misuse
from taptwice.events import Outcome
from taptwice.http.fastapi import Idempotency, IdempotentRoute
from taptwice.http.joined import joined, outside
from tests.http.fastapi_stacks import (
    SESSIONS,
    Charge,
    ChargeIn,
    Client,
    Handler,
    Stack,
    Work,
    account,
    on,
    replayed,
    until,
)


def dependencies(maker: Any) -> dict[str, Callable[..., Any]]:
    """The ways in which people hand out sessions."""

    async def plain() -> AsyncIterator[AsyncSession]:
        async with maker() as session:
            yield session

    async def commit_after() -> AsyncIterator[AsyncSession]:
        async with maker() as session:
            yield session
            await session.commit()

    async def commit_or_rollback() -> AsyncIterator[AsyncSession]:
        async with maker() as session:
            try:
                yield session
                await session.commit()
            except Exception:
                await session.rollback()
                raise

    async def begin_around() -> AsyncIterator[AsyncSession]:
        async with maker() as session, session.begin():
            yield session

    return {each.__name__: each for each in (plain, commit_after, commit_or_rollback, begin_around)}


def blocking_dependencies(maker: Any) -> dict[str, Callable[..., Any]]:
    def plain() -> Iterator[Session]:
        with maker() as session:
            yield session

    def commit_after() -> Iterator[Session]:
        with maker() as session:
            yield session
            session.commit()

    def commit_or_rollback() -> Iterator[Session]:
        with maker() as session:
            try:
                yield session
                session.commit()
            except Exception:
                session.rollback()
                raise

    def begin_around() -> Iterator[Session]:
        with maker() as session, session.begin():
            yield session

    return {each.__name__: each for each in (plain, commit_after, commit_or_rollback, begin_around)}


HOWS = ("plain", "commit_after", "commit_or_rollback", "begin_around")


def app_of(stack: Stack, handler: Handler, given: Any, **policy: Any) -> FastAPI:
    """A keyed route whose handler gets its session from the user's own dependency."""
    once = stack.once()
    router = APIRouter(route_class=IdempotentRoute)
    router.post("/charges", status_code=201, response_model=None, dependencies=[once.keyed(**policy)])(
        stack.endpoint(handler, given)
    )
    app = FastAPI()
    app.include_router(router)
    return app


def given_by(stack: Stack, maker: Any, how: str) -> Callable[..., Any]:
    return (blocking_dependencies if stack.blocking else dependencies)(maker)[how]


@on(*SESSIONS)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("scope", ["request", "function"])
async def test_the_users_own_get_session(stack: Stack, how: str, scope: Any) -> None:
    async def handler(work: Work) -> Any:
        work.raw.add(Charge(amount=5))  # not flushed by anybody but us
        match stack.calls:
            case 1:
                raise HTTPException(402)
            case 2:
                raise ValueError("boom")
        return {}

    app = FastAPI()
    once = stack.once()
    router = APIRouter(route_class=IdempotentRoute)
    given = given_by(stack, joined(stack.origin), how)
    if scope == "function" and "scope" not in inspect.signature(Depends).parameters:
        pytest.skip("an older FastAPI, which knows one scope, and closes it before the answer leaves")
    own: Any = Depends(given, scope="function") if scope == "function" else Depends(given)

    if stack.blocking:

        def blocking(body: ChargeIn, db: Any = own) -> dict[str, int]:
            stack.calls += 1
            work = handler(Work(db))
            try:
                work.send(None)
            except StopIteration as stop:
                return dict(stop.value)
            raise AssertionError

        endpoint: Any = blocking
    else:

        async def awaiting(body: ChargeIn, db: Any = own) -> dict[str, int]:
            stack.calls += 1
            return dict(await handler(Work(db)))

        endpoint = awaiting
    router.post("/charges", status_code=201, dependencies=[once.keyed()])(endpoint)
    app.include_router(router)
    async with Client(app) as client:
        refused = [await client.charge("key-1") for _ in range(2)]
        assert [answer.status_code for answer in refused] == [402, 402]
        assert replayed(refused[1])
        assert (await client.charge("key-2")).status_code == 500
        assert stack.rows() == []
        done = [await client.charge("key-2") for _ in range(2)]
        assert [answer.status_code for answer in done] == [201, 201]
        assert replayed(done[1])
    assert stack.rows() == [5]
    assert stack.saved() == [402, 201]
    assert not any(event.outcome is Outcome.STRAY for event in stack.events)


def second_session(stack: Stack, maker: Any, statement: str) -> Callable[[], Any]:
    async def awaiting() -> None:
        async with maker() as session:
            await session.execute(text(statement))
            await session.commit()

    async def blocking() -> None:
        with maker() as session:
            session.execute(text(statement))
            session.commit()

    return blocking if stack.blocking else awaiting


@on(*SESSIONS)
async def test_a_second_session_in_the_handler_joins(stack: Stack) -> None:
    maker = joined(stack.origin)
    second = second_session(stack, maker, "INSERT INTO charges (amount) VALUES (9)")

    async def handler(work: Work) -> Any:
        await work.insert(5)
        await second()
        if stack.calls == 1:
            raise HTTPException(402)
        await work.insert(6)
        return {}

    async with Client(app_of(stack, handler, given_by(stack, maker, "plain"))) as client:
        assert (await client.charge("key-1")).status_code == 402
        assert stack.rows() == []
        assert (await client.charge("key-2")).status_code == 201
    assert stack.rows() == [5, 9, 6]
    assert not any(event.outcome is Outcome.STRAY for event in stack.events)


@on("sqlalchemy-asyncpg", "sqlalchemy-psycopg")
async def test_a_second_session_inside_a_guards_block_joins_too(stack: Stack) -> None:
    second = second_session(stack, joined(stack.origin), "INSERT INTO charges (amount) VALUES (9)")
    inner: dict[str, Any] = {"account": "acct_1", "key": "inner", "request": b""}

    async def handler(work: Work) -> Any:
        if stack.blocking:
            with Guard().claim(work.raw, **inner) as blocking:
                await second()
                blocking.finish(200)
        else:
            async with AsyncGuard().claim(work.raw, **inner) as awaiting:
                await second()
                awaiting.finish(200)
        raise HTTPException(402)

    async with stack.client(handler) as client:
        assert (await client.charge()).status_code == 402
    assert (stack.rows(), stack.saved()) == ([], [402])


@on("sqlalchemy-asyncpg", "sqlalchemy-psycopg")
async def test_a_second_session_that_does_not_join_is_seen(stack: Stack) -> None:
    second = second_session(stack, stack.origin, "INSERT INTO charges (amount) VALUES (9)")

    async def handler(work: Work) -> Any:
        await work.insert(5)
        await second()
        if stack.calls == 1:
            raise HTTPException(402)
        return {}

    async with stack.client(handler) as client:
        assert (await client.charge("key-1")).status_code == 402
        assert stack.rows() == [9], "it went its own way"
    strays = [event for event in stack.events if event.outcome is Outcome.STRAY]
    assert [stray.route for stray in strays] == ["POST /charges"]


@on("sqlalchemy-asyncpg", "sqlalchemy-psycopg")
async def test_work_that_is_meant_to_stay_outside(stack: Stack) -> None:
    second = second_session(stack, joined(stack.origin), "INSERT INTO charges (amount) VALUES (9)")

    async def handler(work: Work) -> Any:
        await work.insert(5)
        with outside():
            await second()
        raise HTTPException(402)

    async with stack.client(handler) as client:
        assert (await client.charge("key-1")).status_code == 402
    assert stack.rows() == [9]
    assert not any(event.outcome is Outcome.STRAY for event in stack.events)


@on(*SESSIONS)
async def test_sessions_opened_in_the_handler_alone(stack: Stack) -> None:
    """Repositories that open their own: what they do not commit is lost, as ever."""
    maker = joined(stack.origin)
    commits = second_session(stack, maker, "INSERT INTO charges (amount) VALUES (1)")

    async def handler(work: Work) -> Any:
        await commits()
        if stack.blocking:
            with maker() as session:
                session.add(Charge(amount=2))
                session.flush()
        else:
            async with maker() as session:
                session.add(Charge(amount=2))
                await session.flush()
        return {}

    async with Client(app_of(stack, handler, lambda: None)) as client:
        assert [(await client.charge()).status_code for _ in range(2)] == [201, 201]
    assert stack.rows() == [1]


@on(*SESSIONS)
async def test_sessions_that_interleave(stack: Stack) -> None:
    """One opened, used around the other, and both committed in the order of their opening."""
    maker = joined(stack.origin)

    async def handler(work: Work) -> Any:
        other = Work(maker())
        await other.insert(1)
        await work.insert(2)
        if stack.calls == 1:
            await work.commit()
            await other.commit()
        else:
            await other.commit()
            await work.commit()
        return {}

    async with Client(app_of(stack, handler, given_by(stack, maker, "plain"))) as client:
        nested = await client.charge("key-1")
        crossed = await client.charge("key-2")
    assert nested.status_code == 201
    # Savepoints nest, and the outer one takes the inner one with it: all is kept, or nothing, and loudly.
    if crossed.status_code == 201:
        assert stack.rows() == [1, 2, 1, 2]
    else:
        assert (crossed.status_code, stack.rows(), stack.saved()) == (500, [1, 2], [201])


# --- a login that reads through the handler's session -------------------------------------------------------


def login_through_session(stack: Stack, given: Any, write: bool = False) -> FastAPI:
    """The account comes from a row, which the handler looks at again."""

    if stack.blocking:

        def user(
            db: Any = Depends(given), authorization: str = Header()
        ) -> Charge:  # FastAPI gives one session to both
            found: Charge | None = db.query(Charge).filter_by(note=authorization).one_or_none()
            if found is None:
                raise HTTPException(401)
            return found

        def charge(body: ChargeIn, user: Charge = Depends(user), db: Any = Depends(given)) -> dict[str, Any]:
            stack.calls += 1
            db.add(Charge(amount=body.amount))
            if stack.calls == 1:
                raise HTTPException(402)
            return {"user": user.note}

        endpoint: Any = charge
        who: Any = user
    else:
        from sqlalchemy import select

        async def async_user(db: Any = Depends(given), authorization: str = Header()) -> Charge:
            found: Charge | None = await db.scalar(select(Charge).filter_by(note=authorization))
            if found is None:
                raise HTTPException(401)
            return found

        async def async_charge(
            body: ChargeIn, user: Charge = Depends(async_user), db: Any = Depends(given)
        ) -> dict[str, Any]:
            stack.calls += 1
            db.add(Charge(amount=body.amount))
            if stack.calls == 1:
                raise HTTPException(402)
            return {"user": user.note}

        endpoint, who = async_charge, async_user

    def account_of(user: Charge = Depends(who)) -> str:
        return str(user.note)

    once = Idempotency(stack.origin, account=account_of, listeners=[stack.events.append])
    router = APIRouter(route_class=IdempotentRoute)
    router.post("/charges", status_code=201, dependencies=[once.keyed()])(endpoint)
    app = FastAPI()
    app.include_router(router)
    return app


@on(*SESSIONS)
@pytest.mark.parametrize("how", ["once.session", *HOWS[:3]])
async def test_a_login_that_reads_through_the_handlers_session(stack: Stack, how: str) -> None:
    stack.execute("INSERT INTO charges (amount, note) VALUES (0, 'acct_1')")
    maker = joined(stack.origin)
    given = (
        Idempotency(stack.origin, account=account).session
        if how == "once.session"
        else given_by(stack, maker, how)
    )
    async with Client(login_through_session(stack, given)) as client:
        assert (await client.charge("key-1", authorization="nobody")).status_code == 401
        assert [(await client.charge("key-1")).status_code for _ in range(2)] == [402, 402]
        assert stack.rows() == [0]
        done = [await client.charge("key-2") for _ in range(2)]
    assert [(answer.status_code, answer.json()) for answer in done] == [(201, {"user": "acct_1"})] * 2
    assert replayed(done[1])
    assert stack.rows() == [0, 5]


@on(*SESSIONS)
async def test_a_login_inside_the_handlers_begin_block_is_refused(stack: Stack) -> None:
    stack.execute("INSERT INTO charges (amount, note) VALUES (0, 'acct_1')")
    given = given_by(stack, joined(stack.origin), "begin_around")
    app = login_through_session(stack, given)
    said: list[str] = []

    @app.exception_handler(Exception)
    async def page(request: Any, error: Exception) -> Any:
        from starlette.responses import Response

        said.append(str(error))
        return Response(status_code=500)

    async with Client(app) as client:
        assert (await client.charge("key-1")).status_code == 500
    assert "session.begin()" in said[0]
    assert (stack.calls, stack.rows(), stack.saved()) == (0, [0], [])


# --- tasks --------------------------------------------------------------------------------------------------


@on("sqlalchemy-asyncpg")
async def test_a_task_that_outlives_the_request_joins_nothing(stack: Stack) -> None:
    maker = joined(stack.origin)
    go = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []
    used: list[weakref.ref[Session]] = []

    async def later() -> None:
        await go.wait()
        async with maker() as session:
            session.add(Charge(amount=9))
            await session.commit()
            used.append(weakref.ref(session.sync_session))

    async def handler(work: Work) -> Any:
        await work.insert(5)
        tasks.append(asyncio.create_task(later()))
        return {}

    async with stack.client(handler) as client:
        assert (await client.charge()).status_code == 201
        assert stack.rows() == [5]
        go.set()
        await tasks[0]
        await until(lambda: stack.rows() == [5, 9])
    gc.collect()
    assert used[0]() is None, "a task that makes sessions for ever keeps them all"


@on("sqlalchemy-asyncpg")
async def test_two_sessions_at_once_fail_loudly(stack: Stack) -> None:
    """One connection cannot do two things at once; nothing of it goes past the claim."""
    second = second_session(stack, joined(stack.origin), "INSERT INTO charges (amount) VALUES (9)")

    async def handler(work: Work) -> Any:
        await work.insert(5)
        await asyncio.gather(second(), second())
        return {}

    async with stack.client(handler) as client:
        answer = await client.charge()
    if answer.status_code == 201:
        assert stack.rows() == [5, 9, 9]
    else:
        assert (answer.status_code, stack.rows(), stack.saved()) == (500, [], [])
    assert not any(event.outcome is Outcome.STRAY for event in stack.events)


# --- makers -------------------------------------------------------------------------------------------------


def test_makers_with_binds_are_refused() -> None:
    engine, awaiting = create_engine("sqlite://"), create_async_engine("sqlite+aiosqlite://")
    for maker in (
        sessionmaker(engine, binds={Charge: engine}),
        async_sessionmaker(awaiting, binds={Charge: awaiting}),
    ):
        with pytest.raises(Misuse, match="binds="):
            joined(maker)
        with pytest.raises(Misuse, match="binds="):
            Idempotency(maker, account=account)


def test_a_joined_maker_makes_the_users_own_class() -> None:
    class Mine(AsyncSession):
        """Of the user's."""

    class Inner(Session):
        """Of the user's, too."""

    awaiting = joined(
        async_sessionmaker(create_async_engine("sqlite+aiosqlite://"), class_=Mine, sync_session_class=Inner)
    )
    session = awaiting()
    assert isinstance(session, Mine)
    assert isinstance(session.sync_session, Inner)
    assert isinstance(joined(sessionmaker(create_engine("sqlite://"), class_=Inner))(), Inner)


@on("sqlite-sqlalchemy-async", "sqlalchemy-psycopg")
async def test_outside_a_request_a_joined_session_is_what_it_was(stack: Stack) -> None:
    maker = joined(stack.origin)
    await second_session(stack, maker, "INSERT INTO charges (amount) VALUES (9)")()
    assert stack.rows() == [9]
