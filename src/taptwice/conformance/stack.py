"""A database and a driver, as the reference applications use them: one way to run SQL on all of them.

    stack = Stack.named("asyncpg", dsn, pool_size=10)
    once = Idempotency(stack.origin, account=…)
    Database(connection).execute("UPDATE wallets SET … WHERE id = :id", id="w1")

A handler is written once, awaiting. On a blocking driver `Stack.endpoint` makes the plain function of it
that such a service would have: nothing in it ever suspends.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from taptwice.errors import Misuse

DRIVERS = {
    "sqlite": ("sqlite3", "aiosqlite"),
    "postgresql": ("psycopg", "psycopg-async", "asyncpg", "sqlalchemy", "sqlalchemy-async"),
}
BLOCKING = frozenset({"sqlite3", "psycopg", "sqlalchemy"})
APPS = {
    "fastapi": frozenset(DRIVERS["sqlite"] + DRIVERS["postgresql"]),
    "starlette": frozenset(DRIVERS["sqlite"] + DRIVERS["postgresql"]) - BLOCKING,
    "flask": BLOCKING,
}
"""The reference applications, and the drivers that each can be run with."""


DEFAULTS = ("aiosqlite", "asyncpg", "sqlite3", "psycopg")


def default_driver(app: str, store: str) -> str:
    """The driver to take when nobody names one. Raises `Misuse` for an application that is not there."""
    if app not in APPS:
        raise Misuse(f"no application {app!r}: choose of {', '.join(APPS)}")
    return next(driver for driver in DEFAULTS if driver in DRIVERS[store] and driver in APPS[app])


_NAME = re.compile(r"(?<!:):([a-z_]+)")


class Database:
    """SQL with ``:name`` parameters on a connection or session of any driver, told apart by its methods."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def execute(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        """Run one statement; the rows that it gives."""
        connection = self._connection
        if hasattr(connection, "fetchrow"):  # asyncpg
            names = list(dict.fromkeys(_NAME.findall(statement)))
            numbered = _NAME.sub(lambda found: f"${names.index(found[1]) + 1}", statement)
            return [tuple(row) for row in await connection.fetch(numbered, *(values[name] for name in names))]
        if hasattr(connection, "pgconn"):  # psycopg, both kinds
            cursor = await _now(connection.execute(_NAME.sub(r"%(\1)s", statement), values))
            return [tuple(row) for row in await _now(cursor.fetchall())] if cursor.description else []
        if hasattr(connection, "row_factory"):  # sqlite3, aiosqlite
            cursor = await _now(connection.execute(statement, values))
            return [tuple(row) for row in await _now(cursor.fetchall())]
        from sqlalchemy import text

        result = await _now(connection.execute(text(statement), values))
        return [tuple(row) for row in result] if result.returns_rows else []

    async def commit(self) -> None:
        """What a session needs outside a claim; a connection of `once.connection` is committed for us."""
        if hasattr(self._connection, "get_bind"):
            await _now(self._connection.commit())


class BlockingDatabase:
    """The same for handlers that block."""

    def __init__(self, connection: Any) -> None:
        self._database = Database(connection)

    def execute(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        """As `Database.execute`."""
        rows: list[tuple[Any, ...]] = drive(self._database.execute(statement, **values))
        return rows

    def commit(self) -> None:
        """As `Database.commit`."""
        drive(self._database.commit())


async def _now(value: Any) -> Any:
    return await value if isinstance(value, Awaitable) else value


def drive(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never suspends, because everything beneath it blocks."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value
    raise Misuse("a handler on a blocking driver awaited something that does not block")


@dataclass(frozen=True, slots=True)
class Stack:
    """Where the application's connections come from. `open` and `close` belong around its life."""

    driver: str
    origin: Any
    open: Callable[[], Awaitable[None]]
    close: Callable[[], Awaitable[None]]

    @property
    def sessions(self) -> bool:
        """Whether the origin makes sessions of SQLAlchemy."""
        return self.driver.startswith("sqlalchemy")

    def endpoint(self, handler: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        """The handler as this driver wants it: awaiting, or a plain function that blocks."""
        if self.driver not in BLOCKING:
            return handler

        def blocking(**values: Any) -> Any:
            return drive(handler(**values))

        # Not functools.wraps: __wrapped__ would show a coroutine function beneath.
        functools.update_wrapper(blocking, handler)
        del blocking.__wrapped__  # type: ignore[attr-defined]
        blocking.__signature__ = inspect.signature(handler, eval_str=True)  # type: ignore[attr-defined]
        return blocking

    async def sleep(self, duration: float) -> None:
        """Work that takes a while, in seconds."""
        if self.driver in BLOCKING:
            time.sleep(duration)  # noqa: ASYNC251  # in a thread of its own
        elif duration:
            await asyncio.sleep(duration)

    async def reading(self, statement: str) -> list[tuple[Any, ...]]:
        """Read something on a connection of its own, as a login does before the claim."""
        async with self.lent() as database:
            return await database.execute(statement)

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[Database]:
        """A connection outside of any claim, committed at the end."""
        if self.driver in ("sqlite3", "aiosqlite"):
            connection = await _now(self.origin())
            try:
                yield Database(connection)
                await _now(connection.commit())
            finally:
                await _now(connection.close())
            return
        lend = (
            getattr(self.origin, "connection", None) or getattr(self.origin, "acquire", None) or self.origin
        )
        async with AsyncExitStack() as stack:
            lent = lend()
            connection = (
                await stack.enter_async_context(lent)
                if hasattr(lent, "__aenter__")
                else stack.enter_context(lent)
            )
            yield Database(connection)
            await Database(connection).commit()

    @contextmanager
    def lent_blocking(self) -> Iterator[BlockingDatabase]:
        """The same for a handler that blocks."""
        if self.driver == "sqlite3":
            with closing(self.origin()) as connection, connection:
                yield BlockingDatabase(connection)
            return
        with (self.origin.connection if self.driver == "psycopg" else self.origin)() as connection:
            yield BlockingDatabase(connection)
            connection.commit()

    @classmethod
    def named(
        cls,
        driver: str,
        dsn: str,
        pool_size: int = 10,
        timeout: float | None = None,
        isolation: str | None = None,
    ) -> Stack:
        """The stack of a driver on a database: a file's path for SQLite, else a URL.

        `timeout`: seconds for one statement; `isolation` as in SQL. To be called on the event loop.
        """
        from taptwice.conformance.pools import MAKERS

        try:
            make = MAKERS[driver]
        except KeyError:
            raise Misuse(f"no driver {driver!r}; there are {', '.join(MAKERS)}") from None
        return make(driver, dsn, pool_size, timeout, isolation)
