"""aiosqlite: sqlite3 in a thread for each connection.

Each command, and each `Together` as a whole, is handed to that thread and carried out there by the
executor of sqlite3. The thread keeps the order: what comes after a cancelled command runs after it.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import aiosqlite

from taptwice import sql
from taptwice.core import plan
from taptwice.core.plan import Command
from taptwice.drivers.base import GIVEN_BACK, USED_OUTSIDE, Awaiting, logger
from taptwice.drivers.sqlite import PATIENCE, SqliteExecutor
from taptwice.errors import Misuse, StoreUnavailable

Reply = TypeVar("Reply")


class Turns:
    """Who of this process waits for the right to write, one after the other, and holds nothing meanwhile.

    Trying again and again instead costs a connection, and its thread, for each try. It only delays, by
    `PATIENCE` at most: SQLite alone knows who may write, and an origin that is a function may open several
    databases.
    """

    def __init__(self) -> None:
        self._writer: weakref.ref[AiosqliteExecutor] | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, executor: AiosqliteExecutor) -> None:
        """Wait for the executor's turn."""
        writer = None if self._writer is None else self._writer()
        if writer is not None and writer.is_writing:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(mine)
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    await mine
        self._writer, executor.has_turn = weakref.ref(executor), True

    def give_back(self, executor: AiosqliteExecutor) -> None:
        """Wake the next. A wake-up that is lost costs him his patience, no more."""
        executor.has_turn = False
        while True:
            try:
                mine = self._waiting.popleft()
            except IndexError:
                return
            with suppress(RuntimeError):  # its loop is closed
                if not mine.done():
                    mine.get_loop().call_soon_threadsafe(_wake, mine)
                    return


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class AiosqliteExecutor(Awaiting):
    """Commands on one connection: the caller's, or one that `connect` opens at `Begin`."""

    dialect: sql.Dialect = "sqlite"

    def __init__(
        self,
        connection: aiosqlite.Connection | None = None,
        connect: Callable[[], Awaitable[aiosqlite.Connection]] | None = None,
        turns: Turns | None = None,
    ) -> None:
        self._connection = connection
        self._connect = connect
        self._turns = turns
        self.has_turn = False
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
            await self._open(command)
        reply: Reply = await self._in_thread(command)
        if isinstance(command.commands[-1] if isinstance(command, plan.Together) else command, plan.Commit):
            self._end_turn()
        return reply

    async def _in_thread(self, command: Command[Any]) -> Any:
        connection: Any = self.handle
        if self._inner is None:
            raw = connection._conn
            # As one that it opened itself, it also takes Python's implicit transactions from it.
            self._inner = (
                SqliteExecutor(raw) if self._connect is None else SqliteExecutor(connect=lambda: raw)
            )
        # The thread takes any function; the public methods of a connection are made of this one.
        return await connection._execute(self._inner.execute, command)

    @property
    def is_writing(self) -> bool:
        """Or about to; no more when the handler ended the transaction by itself."""
        begun = self._inner is not None and self._inner.has_connection
        return self.has_turn and (not begun or (self._inner is not None and self._inner.is_writing))

    async def _open(self, command: Command[Any]) -> None:
        if self._connect is None:
            raise Misuse(GIVEN_BACK)
        first = command.commands[0] if isinstance(command, plan.Together) else command
        if self._turns is not None and isinstance(first, plan.Begin) and not first.wait:
            await self._turns.take(self)
        try:
            self._connection = await self._connect()
        except Exception as error:
            raise StoreUnavailable(f"SQLite: {error}") from error

    async def rollback(self, command: plan.Rollback) -> bool:
        return self._inner is not None and bool(await self._in_thread(command))

    async def close(self, command: plan.Close) -> None:
        connection, self._connection, self._inner = self._connection, None, None
        if connection is None or self._connect is None:
            self._end_turn()
            return
        try:
            await asyncio.shield(connection.close())
        except Exception:
            logger.warning("a connection to SQLite could not be closed", exc_info=True)
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        if self._turns is not None and self.has_turn:
            self._turns.give_back(self)


class AiosqliteSource:
    """Connections from a function, one for each transaction."""

    dialect: sql.Dialect = "sqlite"
    blocking = False

    def __init__(self, connect: Callable[[], Awaitable[aiosqlite.Connection]]) -> None:
        self._connect = connect
        self._turns = Turns()

    def open(self) -> AiosqliteExecutor:
        return AiosqliteExecutor(connect=self._connect, turns=self._turns)


def join(connection: Any) -> AiosqliteExecutor | None:
    """The executor for a connection of the caller."""
    return AiosqliteExecutor(connection) if isinstance(connection, aiosqlite.Connection) else None


def source(origin: Any) -> None:
    """A connection serves one transaction at a time: it is no source."""


def connecting(connect: Callable[[], Awaitable[aiosqlite.Connection]]) -> AiosqliteSource:
    """A source that opens a connection for each transaction."""
    return AiosqliteSource(connect)
