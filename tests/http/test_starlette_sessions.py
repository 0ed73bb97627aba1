"""`once.session()` in a Starlette handler: its block ends before the handler, and nobody commits by hand."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from taptwice.http.starlette import Idempotency
from tests.http.shop import call, postgres_query, postgres_tables, sqlite_shop

INSERT = text("INSERT INTO charges VALUES ('acct', 'k', 1)")
Query = Callable[[str], list[tuple[Any, ...]]]


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> tuple[str, str, Query]:
    """URLs of a blocking and an awaiting engine, and a way to look into the tables."""
    if request.param == "sqlite":
        shop = sqlite_shop(tmp_path, "sqlite3")
        return f"sqlite:///{shop.address}", f"sqlite+aiosqlite:///{shop.address}", shop.query
    url: str = request.getfixturevalue("fresh_postgres")
    postgres_tables(url)
    rest = url.removeprefix("postgresql")
    return f"postgresql+psycopg{rest}", f"postgresql+asyncpg{rest}", postgres_query(url)


def app_of(once: Idempotency, endpoint: Any) -> Starlette:
    edge = [Middleware(once.Edge)]
    return Starlette(routes=[Route("/charges", once.keyed()(endpoint), methods=["POST"], middleware=edge)])


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("raises", [False, True])
async def test_awaiting(address: tuple[str, str, Query], blocks: int, raises: bool) -> None:
    _, url, query = address
    engine = create_async_engine(url)
    once = Idempotency(async_sessionmaker(engine), account=lambda request: "acct")

    async def charge(request: Request) -> Response:
        for _ in range(blocks):
            async with once.session() as session:
                await session.execute(INSERT)
        if raises:
            raise HTTPException(402)
        return JSONResponse({}, 201)

    app = app_of(once, charge)
    replies = [await call(app) for _ in range(2)]
    await engine.dispose()
    assert [reply.status for reply in replies] == [402 if raises else 201] * 2
    assert [reply.replayed for reply in replies] == [False, True]
    assert query("SELECT key FROM charges") == ([] if raises else [("k",)] * blocks)


@pytest.mark.parametrize("raises", [False, True])
async def test_blocking(address: tuple[str, str, Query], raises: bool) -> None:
    url, _, query = address
    engine = create_engine(url)
    once = Idempotency(sessionmaker(engine), account=lambda request: "acct")

    def charge(request: Request) -> Response:
        with once.session() as session:
            session.execute(INSERT)
        if raises:
            raise HTTPException(402)
        return JSONResponse({}, 201)

    app = app_of(once, charge)
    replies = [await call(app) for _ in range(2)]
    engine.dispose()
    assert [reply.status for reply in replies] == [402 if raises else 201] * 2
    assert [reply.replayed for reply in replies] == [False, True]
    assert query("SELECT key FROM charges") == ([] if raises else [("k",)])


async def test_an_error_inside_the_block_is_undone_and_may_be_caught(address: tuple[str, str, Query]) -> None:
    _, url, query = address
    engine = create_async_engine(url)
    once = Idempotency(async_sessionmaker(engine), account=lambda request: "acct")

    async def charge(request: Request) -> Response:
        try:
            async with once.session() as session:
                await session.execute(INSERT)
                raise ValueError
        except ValueError:
            return JSONResponse({}, 201)

    replies = [await call(app_of(once, charge)) for _ in range(2)]
    await engine.dispose()
    assert [reply.replayed for reply in replies] == [False, True]
    assert query("SELECT key FROM charges") == []
