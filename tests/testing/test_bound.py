"""Service tests that roll back and leave nothing, as users write them."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import sqlite3
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiosqlite
import asyncpg
import httpx2
import psycopg
import pytest
from fastapi import APIRouter, Depends, FastAPI
from flask import Flask
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from taptwice.errors import Misuse
from taptwice.events import Outcome
from taptwice.flows.guard import AsyncGuard, Guard
from taptwice.http import fastapi as once_fastapi
from taptwice.http import flask as once_flask
from taptwice.http import starlette as once_starlette
from taptwice.testing import bound_to, collect, memory
from tests.http.shop import Shop, postgres_query, postgres_tables, sqlite_shop

INSERT = "INSERT INTO charges (account, key, cents) VALUES ('acct', {}, 1)"


@pytest.fixture
def postgres(fresh_postgres: str) -> str:
    postgres_tables(fresh_postgres)
    return fresh_postgres


def starlette_app(shop: Shop) -> tuple[once_starlette.Idempotency, Any]:
    once = once_starlette.Idempotency(shop.origin, account=lambda request: "acct")

    @once.keyed()
    async def charge(request: Request) -> Response:
        key = request.headers["idempotency-key"]
        await shop.insert(once.connection(request), key)
        if key == "fails":
            raise ZeroDivisionError
        return JSONResponse({"key": key}, 201 if key != "busy" else 503)

    route = Route("/charges", charge, methods=["POST"], middleware=[Middleware(once.Edge)])
    return once, Starlette(routes=[route])


def client_of(app: Any) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://shop")


async def post(client: httpx2.AsyncClient, key: str = "k") -> httpx2.Response:
    return await client.post("/charges", json={"cents": 1}, headers={"Idempotency-Key": key})


KINDS = ("sqlite3", "aiosqlite", "psycopg", "async psycopg", "asyncpg", "sqlalchemy", "async sqlalchemy")


@contextlib.asynccontextmanager
async def begun(kind: str, folder: pathlib.Path, url: Any) -> AsyncIterator[tuple[Shop, Any]]:
    """A shop, and a connection to it in a transaction that is rolled back at the end."""
    if kind in ("sqlite3", "aiosqlite"):
        shop = sqlite_shop(folder, kind)
        if kind == "sqlite3":
            with contextlib.closing(shop.origin()) as connection:
                connection.execute("BEGIN IMMEDIATE")
                yield shop, connection
                connection.rollback()
            return
        async with aiosqlite.connect(shop.address) as awaiting:
            await awaiting.execute("BEGIN IMMEDIATE")
            yield shop, awaiting
            await awaiting.rollback()
        return
    address = url()
    postgres_tables(address)
    driver = address.replace("postgresql://", "postgresql+psycopg://", 1)
    shop = Shop(kind, None, postgres_query(address), address)
    if kind == "psycopg":
        shop.origin = lambda: psycopg.connect(address)
        with psycopg.connect(address) as psycopg_connection:
            yield shop, psycopg_connection
            psycopg_connection.rollback()
    elif kind == "async psycopg":
        shop.origin = lambda: psycopg.connect(address)  # never used
        async with await psycopg.AsyncConnection.connect(address) as async_connection:
            yield shop, async_connection
            await async_connection.rollback()
    elif kind == "asyncpg":
        async with asyncpg.create_pool(address, min_size=0) as pool:
            shop.origin = pool
            async with pool.acquire() as asyncpg_connection:
                transaction = asyncpg_connection.transaction()
                await transaction.start()
                yield shop, asyncpg_connection
                await transaction.rollback()
    elif kind == "sqlalchemy":
        shop.origin = engine = create_engine(driver)
        with engine.connect() as sync_connection:
            outer = sync_connection.begin()
            yield shop, sync_connection
            outer.rollback()
        engine.dispose()
    else:
        shop.origin = async_engine = create_async_engine(driver)
        async with async_engine.connect() as alchemy_connection:
            async_outer = await alchemy_connection.begin()
            yield shop, alchemy_connection
            await async_outer.rollback()
        await async_engine.dispose()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_service_test_that_leaves_nothing(
    kind: str, tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> None:
    url = lambda: request.getfixturevalue("fresh_postgres")  # noqa: E731
    async with begun(kind, tmp_path, url) as (shop, connection):
        once, app = starlette_app(shop)
        with bound_to(once, connection), collect(once) as events:
            async with client_of(app) as client:
                first, again = await post(client), await post(client)
                assert (first.status_code, again.status_code) == (201, 201)
                assert again.headers["Idempotent-Replayed"] == "true"
                assert first.content == again.content
                other = await client.post("/charges", json={}, headers={"Idempotency-Key": "k"})
                assert other.status_code == 422
                assert (await post(client, "fails")).status_code == 500
                assert (await post(client, "busy")).status_code == 503
                at_once = await asyncio.gather(*(post(client, f"k{number}") for number in range(4)))
                assert [each.status_code for each in at_once] == [201] * 4
            assert [event.outcome for event in events][:4] == [
                Outcome.NEW,
                Outcome.FINISHED,
                Outcome.REPLAYED,
                Outcome.MISMATCH,
            ]
            assert await keys(connection) == ["k", "k0", "k1", "k2", "k3"], "what failed was undone"
            assert shop.charges() == 0, "nobody else sees anything"
        assert await keys(connection) == ["k", "k0", "k1", "k2", "k3"]
    assert (shop.charges(), shop.records()) == (0, {})


async def keys(connection: Any) -> list[str]:
    statement: Any = "SELECT key FROM charges ORDER BY key"
    if "asyncpg" in type(connection).__module__:
        return [row["key"] for row in await connection.fetch(statement)]
    if "sqlalchemy" in type(connection).__module__:
        statement = text(statement)
    result = connection.execute(statement)
    result = await result if hasattr(result, "__await__") else result
    rows = result.fetchall()
    rows = await rows if hasattr(rows, "__await__") else rows
    return [row[0] for row in rows]


async def test_fastapi_with_an_awaiting_session_maker(postgres: str) -> None:
    """Keyed and plain routes, a login that reads: all of them see what the test has prepared."""
    engine = create_async_engine(postgres.replace("postgresql://", "postgresql+asyncpg://", 1))
    maker = async_sessionmaker(engine)
    login = once_fastapi.Idempotency(maker, account=lambda: "acct")

    async def account(db: AsyncSession = Depends(login.session)) -> str:  # noqa: B008
        found: str = (
            await db.execute(text("SELECT account FROM charges WHERE key = 'prepared'"))
        ).scalar_one()
        return found

    once = once_fastapi.Idempotency(maker, account=account)
    router = APIRouter(route_class=once_fastapi.IdempotentRoute)

    @router.post("/charges", status_code=201, dependencies=[once.keyed()])
    async def charge(db: AsyncSession = Depends(once.session)) -> dict[str, int]:  # noqa: B008
        await db.execute(text(INSERT.format("'charged'")))
        await db.commit()
        return {"cents": 1}

    @router.get("/charges")
    async def count(db: AsyncSession = Depends(once.session)) -> int:  # noqa: B008
        found: int = (await db.execute(text("SELECT count(*) FROM charges"))).scalar_one()
        return found

    app = FastAPI()
    app.include_router(router)
    async with engine.connect() as connection:
        outer = await connection.begin()
        await connection.execute(text(INSERT.format("'prepared'")))
        with bound_to(once, connection):
            async with client_of(app) as client:
                assert (await client.get("/charges")).json() == 1
                first, again = await post(client), await post(client)
                assert (first.status_code, again.headers.get("Idempotent-Replayed")) == (201, "true")
                assert (await client.get("/charges")).json() == 2
        await outer.rollback()
    assert postgres_query(postgres)("SELECT count(*) FROM charges") == [(0,)]
    assert postgres_query(postgres)("SELECT count(*) FROM taptwice_records") == [(0,)]
    await engine.dispose()


@pytest.fixture
def engine(postgres: str) -> Iterator[Any]:
    made = create_engine(postgres.replace("postgresql://", "postgresql+psycopg://", 1))
    yield made
    made.dispose()


def test_flask(engine: Any) -> None:
    once = once_flask.Idempotency(sessionmaker(engine), account=lambda: "acct")
    app = Flask(__name__)

    @app.post("/charges")
    @once.keyed()
    def charge() -> Any:
        with once.session() as session:
            session.execute(text(INSERT.format("'flask'")))
        return {"cents": 1}, 201

    with engine.connect() as connection:
        outer = connection.begin()
        with bound_to(once, connection):
            client = app.test_client()
            for replayed in (None, "true"):
                answer = client.post("/charges", json={}, headers={"Idempotency-Key": "k"})
                assert (answer.status_code, answer.headers.get("Idempotent-Replayed")) == (201, replayed)
            assert connection.execute(text("SELECT count(*) FROM charges")).scalar() == 1
        outer.rollback()
    with Session(engine) as session:
        assert session.execute(text("SELECT count(*) FROM charges")).scalar() == 0


def test_bound_twice_and_not_begun(engine: Any, tmp_path: pathlib.Path) -> None:
    once = once_flask.Idempotency(engine, account=lambda: "acct")
    with engine.connect() as connection:
        with pytest.raises(Misuse, match="begin a transaction"), bound_to(once, connection):
            pytest.fail("nothing to roll back")
        bound, again = bound_to(once, connection), bound_to(once, connection)
        with connection.begin(), bound, pytest.raises(Misuse, match="already"), again:
            pytest.fail("twice")
    assert once.bound is None
    with pytest.raises(Misuse, match="cannot claim on"), bound_to(once, object()):
        pytest.fail("no connection")


def test_collecting_ends_with_its_block(tmp_path: pathlib.Path) -> None:
    once = once_flask.Idempotency(lambda: sqlite3.connect(":memory:"), account=lambda: "acct")
    with collect(once) as events:
        assert len(once.listeners) == 1
    assert not once.listeners
    assert events == []


def test_the_memory_database_for_the_guard() -> None:
    database = memory()
    for replayed in (False, True):
        with Guard().transaction(database, account="acct", key="k", request={}) as claim:
            assert claim.replayed is replayed
            if not replayed:
                claim.connection.insert("charges", 100)
                claim.finish(201, {"cents": 100})
    assert database.rows("charges") == (100,)


async def test_the_memory_database_for_the_awaiting_guard() -> None:
    database = memory()
    for replayed in (False, True):
        guard = AsyncGuard()
        async with guard.transaction(database.asynchronous(), account="acct", key="k", request={}) as claim:
            assert claim.replayed is replayed
            if not replayed:
                claim.connection.insert("charges", 100)
                claim.finish(201, {"cents": 100})
    assert database.rows("charges") == (100,)
