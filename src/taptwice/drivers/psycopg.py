"""psycopg 3, blocking and awaiting.

A claim's statements travel in one pipeline with BEGIN, the answer's with COMMIT, where that pays: in the
blocking half. On the awaiting half a pipeline costs more than the round trips it saves on a near server.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import psycopg
from psycopg.rows import tuple_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolClosed, PoolTimeout, TooManyRequests

from taptwice import sql
from taptwice.core import plan
from taptwice.core.plan import Rows
from taptwice.drivers.base import Awaiting, Blocking, logger
from taptwice.drivers.sqlstate import ours
from taptwice.errors import CommitUnknown, Misuse, StoreUnavailable, TaptwiceError, Torn

STATEMENTS = sql.compile_all("postgresql", lambda name, position: f"%({name})s")

SAVEPOINT = "taptwice"

Connection: TypeAlias = psycopg.Connection[Any]
AsyncConnection: TypeAlias = psycopg.AsyncConnection[Any]

NOT_TAKEN = (PoolTimeout, PoolClosed, TooManyRequests, psycopg.OperationalError)
"""What a pool or a connect function raises when it has no connection to give."""


def translated(error: psycopg.Error) -> TaptwiceError | None:
    """Our error for an error of psycopg at a statement of ours."""
    if isinstance(error, psycopg.ProgrammingError | psycopg.InterfaceError) and error.sqlstate is None:
        return Misuse(f"psycopg refused: {error}")
    return ours(error.sqlstate, str(error))


def broken(connection: psycopg.BaseConnection[Any]) -> bool:
    return bool(connection.closed)


def commit_error(connection: psycopg.BaseConnection[Any], error: psycopg.Error) -> TaptwiceError | None:
    """Our error for a failed COMMIT; None when it is the user's work that the database refused."""
    if broken(connection):
        return CommitUnknown()
    if error.sqlstate in ("40001", "40P01"):
        return ours(error.sqlstate, str(error))
    return None


def check_joinable(connection: psycopg.BaseConnection[Any]) -> None:
    idle = connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    if idle and connection.autocommit:
        raise Misuse("a claim joins a transaction, and none is open: use it inside `with connection.transaction():`")


class PsycopgExecutor(Blocking):
    """Commands on one connection: the caller's, or one that `take` lends at `Begin`."""

    dialect: sql.Dialect = "postgresql"

    def __init__(
        self,
        connection: Connection | None = None,
        take: Callable[[], Connection] | None = None,
        give_back: Callable[[Connection], None] | None = None,
    ) -> None:
        self._connection = connection
        self._take = take
        self._give_back = give_back
        self._transaction: psycopg.Transaction | None = None

    @property
    def handle(self) -> Connection:
        if self._connection is None:
            raise Misuse("the claim's connection is used outside its transaction")
        return self._connection

    def together(self, command: plan.Together) -> tuple[Any, ...]:
        commits = any(isinstance(each, plan.Commit) for each in command.commands)
        self._borrow()
        connection = self.handle
        try:
            with connection.pipeline():
                sent = [
                    self._send(each) if isinstance(each, plan.Query) else self.execute(each)
                    for each in command.commands
                ]
        except psycopg.Error as error:
            if commits and broken(connection):
                raise CommitUnknown from error
            # Only a COMMIT can fail for a reason of the user's: a deferred constraint of his tables.
            if (known := translated(error)) is not None and not (commits and error.sqlstate not in (None, "23505") and error.sqlstate[:2] == "23"):
                raise known from error
            raise
        return tuple(_rows(each) if isinstance(each, psycopg.Cursor) else each for each in sent)

    def _borrow(self) -> None:
        if self._connection is None:
            if self._take is None:
                raise Misuse("the connection of this claim was given back")
            try:
                self._connection = self._take()
            except NOT_TAKEN as error:
                raise StoreUnavailable(f"no connection to PostgreSQL: {error}") from error

    def _send(self, command: plan.Query) -> psycopg.Cursor[Any]:
        statement = STATEMENTS[command.statement]
        cursor = self.handle.cursor(row_factory=tuple_row)
        cursor.execute(statement.text, statement.named(command))
        return cursor

    def _run(self, text: str) -> None:
        try:
            self.handle.execute(text)
        except psycopg.Error as error:
            if (known := translated(error)) is not None:
                raise known from error
            raise

    def query(self, command: plan.Query) -> Rows:
        try:
            return _rows(self._send(command))
        except psycopg.Error as error:
            if (known := translated(error)) is not None:
                raise known from error
            raise

    def script(self, command: plan.Script) -> None:
        self._run(command.text)

    def begin(self, command: plan.Begin) -> None:
        self._borrow()
        transaction = self.handle.transaction()
        try:
            transaction.__enter__()
        except psycopg.Error as error:
            raise StoreUnavailable(f"PostgreSQL: {error}") from error
        self._transaction = transaction

    def join(self, command: plan.Join) -> None:
        check_joinable(self.handle)

    def savepoint(self, command: plan.Savepoint) -> None:
        self._run(f"SAVEPOINT {SAVEPOINT}")

    def undo(self, command: plan.Undo) -> None:
        self._run(f"ROLLBACK TO SAVEPOINT {SAVEPOINT}")
        self._run(f"RELEASE SAVEPOINT {SAVEPOINT}")

    def release(self, command: plan.Release) -> None:
        if self._transaction is None:  # COMMIT releases it where the transaction is ours
            self._run(f"RELEASE SAVEPOINT {SAVEPOINT}")

    def commit(self, command: plan.Commit) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is None:
            raise Torn
        connection = self.handle
        try:
            transaction.__exit__(None, None, None)
        except psycopg.Error as error:
            if (known := commit_error(connection, error)) is not None:
                raise known from error
            raise

    def rollback(self, command: plan.Rollback) -> None:
        transaction, self._transaction = self._transaction, None
        connection = self._connection
        try:
            if connection is None or broken(connection):
                return
            if transaction is not None:
                undoing = psycopg.Rollback()
                transaction.__exit__(type(undoing), undoing, None)
            elif self._take is not None:
                connection.rollback()
        except Exception:
            logger.warning("a rollback on PostgreSQL failed; the connection is closed", exc_info=True)
            if connection is not None:
                connection.close()

    def close(self, command: plan.Close) -> None:
        connection, self._connection = self._connection, None
        try:
            if connection is not None and self._give_back is not None:
                self._give_back(connection)
        except Exception:
            logger.warning("a connection to PostgreSQL could not be given back", exc_info=True)


class AsyncPsycopgExecutor(Awaiting):
    """The same, awaiting."""

    dialect: sql.Dialect = "postgresql"

    def __init__(
        self,
        connection: AsyncConnection | None = None,
        take: Callable[[], Awaitable[AsyncConnection]] | None = None,
        give_back: Callable[[AsyncConnection], Awaitable[None]] | None = None,
    ) -> None:
        self._connection = connection
        self._take = take
        self._give_back = give_back
        self._transaction: psycopg.AsyncTransaction | None = None

    @property
    def handle(self) -> AsyncConnection:
        if self._connection is None:
            raise Misuse("the claim's connection is used outside its transaction")
        return self._connection

    async def _run(self, text: str, parameters: dict[str, Any] | None = None) -> psycopg.AsyncCursor[Any]:
        cursor = self.handle.cursor(row_factory=tuple_row)
        try:
            await cursor.execute(text, parameters)
        except psycopg.Error as error:
            if (known := translated(error)) is not None:
                raise known from error
            raise
        return cursor

    async def query(self, command: plan.Query) -> Rows:
        statement = STATEMENTS[command.statement]
        cursor = await self._run(statement.text, statement.named(command))
        return tuple(await cursor.fetchall()) if cursor.description else ()

    async def script(self, command: plan.Script) -> None:
        await self._run(command.text)

    async def begin(self, command: plan.Begin) -> None:
        if self._connection is None:
            if self._take is None:
                raise Misuse("the connection of this claim was given back")
            try:
                self._connection = await self._take()
            except NOT_TAKEN as error:
                raise StoreUnavailable(f"no connection to PostgreSQL: {error}") from error
        transaction = self._connection.transaction()
        try:
            await transaction.__aenter__()
        except psycopg.Error as error:
            raise StoreUnavailable(f"PostgreSQL: {error}") from error
        self._transaction = transaction

    async def join(self, command: plan.Join) -> None:
        check_joinable(self.handle)

    async def savepoint(self, command: plan.Savepoint) -> None:
        await self._run(f"SAVEPOINT {SAVEPOINT}")

    async def undo(self, command: plan.Undo) -> None:
        await self._run(f"ROLLBACK TO SAVEPOINT {SAVEPOINT}")
        await self._run(f"RELEASE SAVEPOINT {SAVEPOINT}")

    async def release(self, command: plan.Release) -> None:
        if self._transaction is None:  # COMMIT releases it where the transaction is ours
            await self._run(f"RELEASE SAVEPOINT {SAVEPOINT}")

    async def commit(self, command: plan.Commit) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is None:
            raise Torn
        connection = self.handle
        try:
            await transaction.__aexit__(None, None, None)
        except psycopg.Error as error:
            if (known := commit_error(connection, error)) is not None:
                raise known from error
            raise

    async def rollback(self, command: plan.Rollback) -> None:
        transaction, self._transaction = self._transaction, None
        connection = self._connection
        try:
            if connection is None or broken(connection):
                return
            if transaction is not None:
                undoing = psycopg.Rollback()
                await transaction.__aexit__(type(undoing), undoing, None)
            elif self._take is not None:
                await connection.rollback()
        except Exception:
            logger.warning("a rollback on PostgreSQL failed; the connection is closed", exc_info=True)
            if connection is not None:
                await connection.close()

    async def close(self, command: plan.Close) -> None:
        connection, self._connection = self._connection, None
        try:
            if connection is not None and self._give_back is not None:
                await self._give_back(connection)
        except Exception:
            logger.warning("a connection to PostgreSQL could not be given back", exc_info=True)


def _rows(cursor: psycopg.Cursor[Any]) -> Rows:
    return tuple(cursor.fetchall()) if cursor.description else ()


class PsycopgSource:
    """Connections from a pool of psycopg_pool, or from a function that opens one."""

    dialect: sql.Dialect = "postgresql"
    blocking = True

    def __init__(self, take: Callable[[], Connection], give_back: Callable[[Connection], None]) -> None:
        self._take = take
        self._give_back = give_back

    def open(self) -> PsycopgExecutor:
        return PsycopgExecutor(take=self._take, give_back=self._give_back)


class AsyncPsycopgSource:
    """The same for the awaiting pool or connect function."""

    dialect: sql.Dialect = "postgresql"
    blocking = False

    def __init__(
        self, take: Callable[[], Awaitable[AsyncConnection]], give_back: Callable[[AsyncConnection], Awaitable[None]]
    ) -> None:
        self._take = take
        self._give_back = give_back

    def open(self) -> AsyncPsycopgExecutor:
        return AsyncPsycopgExecutor(take=self._take, give_back=self._give_back)


def join(connection: Any) -> PsycopgExecutor | AsyncPsycopgExecutor | None:
    if isinstance(connection, psycopg.Connection):
        return PsycopgExecutor(connection)
    if isinstance(connection, psycopg.AsyncConnection):
        return AsyncPsycopgExecutor(connection)
    return None


def source(origin: Any) -> PsycopgSource | AsyncPsycopgSource | None:
    if isinstance(origin, ConnectionPool):
        return PsycopgSource(origin.getconn, origin.putconn)
    if isinstance(origin, AsyncConnectionPool):
        return AsyncPsycopgSource(origin.getconn, origin.putconn)
    return None


def connecting(connect: Callable[[], Any]) -> PsycopgSource | AsyncPsycopgSource:
    """A source that opens a connection for each transaction."""
    if inspect.iscoroutinefunction(connect):
        return AsyncPsycopgSource(connect, lambda connection: connection.close())
    return PsycopgSource(connect, lambda connection: connection.close())
