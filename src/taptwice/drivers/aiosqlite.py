"""aiosqlite: sqlite3 in a thread for each connection.

Each command, and each `Together` as a whole, is handed to that thread and carried out there by the
executor of sqlite3, which waits there for its turn too. The thread keeps the order: what comes after a
cancelled command runs after it.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiosqlite

from taptwice import sql
from taptwice.core import plan
from taptwice.core.plan import Command
from taptwice.drivers.base import GIVEN_BACK, USED_OUTSIDE, Awaiting, logger
from taptwice.drivers.sqlite import SqliteExecutor
from taptwice.errors import Misuse, StoreUnavailable

Reply = TypeVar("Reply")


class Inner(SqliteExecutor):
    """On the connection's thread, for a task."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        super().__init__(connect=connect, in_line=True)
        self._loop = asyncio.get_running_loop()

    @property
    def is_gone(self) -> bool:
        return self._loop.is_closed() or super().is_gone


class AiosqliteExecutor(Awaiting):
    """Commands on one connection: the caller's, or one that `connect` opens at `Begin`."""

    dialect: sql.Dialect = "sqlite"

    def __init__(
        self,
        connection: aiosqlite.Connection | None = None,
        connect: Callable[[], Awaitable[aiosqlite.Connection]] | None = None,
    ) -> None:
        self._connection = connection
        self._connect = connect
        self._inner: SqliteExecutor | None = None

    @property
    def handle(self) -> aiosqlite.Connection:
        if self._connection is None:
            raise Misuse(USED_OUTSIDE)
        return self._connection

    async def execute(self, command: Command[Reply], /) -> Reply:
        if type(command) in (plan.Now, plan.Sleep, plan.Close, plan.Rollback):
            return await super().execute(command)
        if self._connection is None:
            await self._open()
        reply: Reply = await self._in_thread(command)
        return reply

    async def _in_thread(self, command: Command[Any]) -> Any:
        connection: Any = self.handle
        if self._inner is None:
            raw = connection._conn
            # As one that it opened itself, it also takes Python's implicit transactions from it.
            self._inner = SqliteExecutor(raw) if self._connect is None else Inner(lambda: raw)
        # The thread takes any function; the public methods of a connection are made of this one.
        return await connection._execute(self._inner.execute, command)

    async def _open(self) -> None:
        if self._connect is None:
            raise Misuse(GIVEN_BACK)
        try:
            self._connection = await self._connect()
        except Exception as error:
            raise StoreUnavailable(f"SQLite: {error}") from error

    async def rollback(self, command: plan.Rollback) -> bool:
        if self._inner is None:
            return False
        self._inner.give_up()
        return bool(await self._in_thread(command))

    async def close(self, command: plan.Close) -> None:
        connection, self._connection, self._inner = self._connection, None, None
        if connection is None or self._connect is None:
            return
        try:
            await asyncio.shield(connection.close())
        except Exception:
            logger.warning("a connection to SQLite could not be closed", exc_info=True)


class AiosqliteSource:
    """Connections from a function, one for each transaction."""

    dialect: sql.Dialect = "sqlite"
    blocking = False

    def __init__(self, connect: Callable[[], Awaitable[aiosqlite.Connection]]) -> None:
        self._connect = connect

    def open(self) -> AiosqliteExecutor:
        return AiosqliteExecutor(connect=self._connect)


def join(connection: Any) -> AiosqliteExecutor | None:
    """The executor for a connection of the caller."""
    return AiosqliteExecutor(connection) if isinstance(connection, aiosqlite.Connection) else None


def source(origin: Any) -> None:
    """A connection serves one transaction at a time: it is no source."""


def connecting(connect: Callable[[], Awaitable[aiosqlite.Connection]]) -> AiosqliteSource:
    """A source that opens a connection for each transaction."""
    return AiosqliteSource(connect)
