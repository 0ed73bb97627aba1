"""aiosqlite: sqlite3 in a thread for each connection.

A whole `Together` is handed to that thread at once, and carried out there by the executor of sqlite3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import aiosqlite

from taptwice import sql
from taptwice.core import plan
from taptwice.core.plan import Command
from taptwice.drivers.base import Awaiting, logger
from taptwice.drivers.sqlite import SqliteExecutor
from taptwice.errors import Misuse, StoreUnavailable

Reply = TypeVar("Reply")


class AiosqliteExecutor(Awaiting):
    """Commands on one connection: the caller's, or one that `connect` opens at `Begin`."""

    dialect: sql.Dialect = "sqlite"

    def __init__(
        self,
        connection: aiosqlite.Connection | None = None,
        connect: Callable[[], aiosqlite.Connection] | None = None,
    ) -> None:
        self._connection = connection
        self._connect = connect
        self._inner = None if connection is None else SqliteExecutor(connection._conn)

    @property
    def handle(self) -> aiosqlite.Connection:
        if self._connection is None:
            raise Misuse("the claim's connection is used outside its transaction")
        return self._connection

    async def execute(self, command: Command[Reply], /) -> Reply:
        if isinstance(command, plan.Now | plan.Sleep | plan.Close):
            return await super().execute(command)
        if self._connection is None:
            if isinstance(command, plan.Rollback):
                return None  # type: ignore[return-value]  # nothing is open: nothing to roll back
            await self._open()
        inner = self._inner
        assert inner is not None
        # The thread of an aiosqlite connection takes any function; its public methods are made of this one.
        reply: Reply = await self.handle._execute(inner.execute, command)
        return reply

    async def _open(self) -> None:
        if self._connect is None:
            raise Misuse("the connection of this claim was given back")
        try:
            self._connection = await self._connect()
        except Exception as error:
            raise StoreUnavailable(f"SQLite: {error}") from error
        self._inner = SqliteExecutor(self._connection._conn)
        # Python's own implicit BEGIN would come before ours, and be a deferred one.
        self._connection.isolation_level = None

    async def close(self, command: plan.Close) -> None:
        connection, self._connection = self._connection, None
        try:
            if connection is not None and self._connect is not None:
                await connection.close()
        except Exception:
            logger.warning("a connection to SQLite could not be closed", exc_info=True)


class AiosqliteSource:
    """Connections from a function, one for each transaction."""

    dialect: sql.Dialect = "sqlite"
    blocking = False

    def __init__(self, connect: Callable[[], aiosqlite.Connection]) -> None:
        self._connect = connect

    def open(self) -> AiosqliteExecutor:
        return AiosqliteExecutor(connect=self._connect)


def join(connection: Any) -> AiosqliteExecutor | None:
    return AiosqliteExecutor(connection) if isinstance(connection, aiosqlite.Connection) else None


def source(origin: Any) -> None:
    """A connection serves one transaction at a time: it is no source."""
    return None


def connecting(connect: Callable[[], aiosqlite.Connection]) -> AiosqliteSource:
    return AiosqliteSource(connect)
