"""How each driver opens what a `Stack` takes its connections from."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Generator
from typing import Any

from taptwice.conformance.stack import Stack

PATIENCE = 4
"""Seconds to wait for a connection, so that an unreachable database is an answer and not a hang."""


class Unsynced(sqlite3.Connection):
    """It does not wait for the disk: processes are killed here, the machine is not."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        _ = self.execute("PRAGMA synchronous = OFF")


async def _nothing() -> None:
    pass


def _sqlite3(driver: str, dsn: str, pool_size: int, timeout: float | None, isolation: str | None) -> Stack:
    return Stack(
        driver,
        lambda: sqlite3.connect(dsn, check_same_thread=False, factory=Unsynced),
        _nothing,
        _nothing,
    )


def _aiosqlite(driver: str, dsn: str, pool_size: int, timeout: float | None, isolation: str | None) -> Stack:
    import aiosqlite

    return Stack(driver, lambda: aiosqlite.connect(dsn, factory=Unsynced), _nothing, _nothing)


def _options(timeout: float | None, isolation: str | None) -> str:
    """Settings of the server that travel with the connection."""
    options = []
    if timeout is not None:
        options.append(f"-c statement_timeout={int(timeout * 1000)}")
    if isolation is not None:
        options.append(f"-c default_transaction_isolation={isolation.replace(' ', chr(92) + ' ')}")
    return " ".join(options)


def _within(limit: float, statement: Generator[Any, Any, Any], connection: Any) -> Generator[Any, Any, Any]:
    """What psycopg waits for, with an end: it asks again every moment that nothing has come."""
    import psycopg

    end = time.monotonic() + limit
    try:
        wanted = next(statement)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > end:
                connection.pgconn.finish()
                raise psycopg.OperationalError(f"no answer within {limit:g} s")
            wanted = statement.send(ready)
    except StopIteration as done:
        return done.value


def _limited(kind: Any, limit: float | None) -> Any:
    """The class of connections whose statements have a time limit, which psycopg does not offer."""
    if limit is None:
        return kind
    seconds = limit

    class Limited(kind):  # type: ignore[misc]
        def wait(self, statement: Any, *arguments: Any, **named: Any) -> Any:
            return super().wait(_within(seconds, statement, self), *arguments, **named)

    return Limited


def _psycopg(driver: str, dsn: str, pool_size: int, timeout: float | None, isolation: str | None) -> Stack:
    from psycopg import Connection
    from psycopg_pool import ConnectionPool

    pool = ConnectionPool(
        dsn,
        connection_class=_limited(Connection, timeout),
        min_size=1,
        max_size=pool_size,
        open=False,
        timeout=PATIENCE,
        kwargs={"connect_timeout": PATIENCE, "options": _options(timeout, isolation)},
        check=ConnectionPool.check_connection,
    )

    async def open_() -> None:
        pool.open(wait=True)

    async def close() -> None:
        pool.close()

    return Stack(driver, pool, open_, close)


def _psycopg_async(
    driver: str, dsn: str, pool_size: int, timeout: float | None, isolation: str | None
) -> Stack:
    from psycopg import AsyncConnection
    from psycopg_pool import AsyncConnectionPool

    pool = AsyncConnectionPool(
        dsn,
        connection_class=_limited(AsyncConnection, timeout),
        min_size=1,
        max_size=pool_size,
        open=False,
        timeout=PATIENCE,
        kwargs={"connect_timeout": PATIENCE, "options": _options(timeout, isolation)},
        check=AsyncConnectionPool.check_connection,
    )

    async def open_() -> None:
        await pool.open(wait=True)

    return Stack(driver, pool, open_, pool.close)


def _asyncpg(driver: str, dsn: str, pool_size: int, timeout: float | None, isolation: str | None) -> Stack:
    import asyncpg

    settings = {} if isolation is None else {"default_transaction_isolation": isolation}
    pool = asyncpg.create_pool(
        dsn,
        min_size=1,
        max_size=pool_size,
        timeout=timeout or PATIENCE,
        command_timeout=timeout,
        server_settings=settings,
    )

    async def open_() -> None:
        await pool

    async def close() -> None:
        pool.terminate()

    return Stack(driver, pool, open_, close)


def _sqlalchemy(driver: str, dsn: str, pool_size: int, timeout: float | None, isolation: str | None) -> Stack:
    from sqlalchemy import create_engine
    from sqlalchemy.orm import sessionmaker

    engine = create_engine(
        dsn.replace("postgresql://", "postgresql+psycopg://"),
        pool_size=pool_size,
        max_overflow=0,
        pool_pre_ping=True,
        pool_timeout=30,
        connect_args={"connect_timeout": PATIENCE, "options": _options(timeout, isolation)},
    )

    async def close() -> None:
        engine.dispose()

    return Stack(driver, sessionmaker(engine), _nothing, close)


def _sqlalchemy_async(
    driver: str, dsn: str, pool_size: int, timeout: float | None, isolation: str | None
) -> Stack:
    from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

    settings = {} if isolation is None else {"default_transaction_isolation": isolation}
    engine = create_async_engine(
        dsn.replace("postgresql://", "postgresql+asyncpg://"),
        pool_size=pool_size,
        max_overflow=0,
        pool_pre_ping=True,
        pool_timeout=30,
        connect_args={
            "timeout": timeout or PATIENCE,
            "command_timeout": timeout,
            "server_settings": settings,
        },
    )
    return Stack(driver, async_sessionmaker(engine), _nothing, engine.dispose)


MAKERS: dict[str, Callable[[str, str, int, float | None, str | None], Stack]] = {
    "sqlite3": _sqlite3,
    "aiosqlite": _aiosqlite,
    "psycopg": _psycopg,
    "psycopg-async": _psycopg_async,
    "asyncpg": _asyncpg,
    "sqlalchemy": _sqlalchemy,
    "sqlalchemy-async": _sqlalchemy_async,
}
