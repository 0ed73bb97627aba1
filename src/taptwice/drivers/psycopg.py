"""psycopg 3, blocking and awaiting.

A claim's statements travel in one pipeline with BEGIN, the answer's with COMMIT, where that pays: in the
blocking half. On the awaiting half a pipeline costs more than the round trips it saves on a near server.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from taptwice import sql
from taptwice.core import plan
from taptwice.core.plan import Rows
from taptwice.drivers import sqlstate
from taptwice.drivers.base import GIVEN_BACK, SAVEPOINT, USED_OUTSIDE, Awaiting, Blocking, logger
from taptwice.errors import CommitUnknown, Misuse, StoreUnavailable, TaptwiceError, Torn

STATEMENTS = sql.compile_all("postgresql", lambda name, position: f"%({name})s")

Connection: TypeAlias = psycopg.Connection[Any]
AsyncConnection: TypeAlias = psycopg.AsyncConnection[Any]


def translated(error: psycopg.Error) -> TaptwiceError | None:
    """Our error for an error of psycopg at a statement of ours."""
    error = first_of(error)
    if isinstance(error, psycopg.ProgrammingError | psycopg.InterfaceError) and error.sqlstate is None:
        return Misuse(f"psycopg refused: {error}")
    return sqlstate.ours(error.sqlstate, str(error))


def first_of(error: psycopg.Error) -> psycopg.Error:
    """The error that aborted a pipeline; psycopg may raise that of a later statement, which it aborted."""
    first = error.__context__
    if isinstance(error, psycopg.errors.PipelineAborted) and isinstance(first, psycopg.Error):
        return first_of(first)
    return error


@contextmanager
def taking() -> Iterator[None]:
    """Around the call that takes a connection; the errors of psycopg_pool are operational ones too."""
    try:
        yield
    except psycopg.OperationalError as error:
        raise StoreUnavailable(f"no connection to PostgreSQL: {error}") from error


class Asking:
    """Around statements of ours. A class, and no generator, because it stands around every one."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, psycopg.Error) and (known := translated(error)) is not None:
            raise known from error


ASKING = Asking()


@contextmanager
def committing(connection: psycopg.BaseConnection[Any]) -> Iterator[None]:
    """Around COMMIT and what travels in front of it."""
    try:
        yield
    except psycopg.Error as error:
        if connection.closed:
            raise CommitUnknown from error
        # A transaction that is still there was not refused at COMMIT: a statement of ours in front failed.
        came_to_commit = not is_open(connection)
        known = sqlstate.at_commit(error.sqlstate, str(error)) if came_to_commit else translated(error)
        if known is not None:
            raise known from error
        raise


def is_open(connection: psycopg.BaseConnection[Any]) -> bool:
    """Whether a transaction is under way on it."""
    return connection.info.transaction_status != TransactionStatus.IDLE


def check_joinable(connection: psycopg.BaseConnection[Any]) -> None:
    """Outside autocommit psycopg begins a transaction with the first statement."""
    if connection.autocommit and not is_open(connection):
        raise Misuse(
            "a claim joins a transaction, and none is open: use it inside `with connection.transaction():`"
        )


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
        self._autocommit = False
        self._transaction: psycopg.Transaction | None = None

    @property
    def handle(self) -> Connection:
        if self._connection is None:
            raise Misuse(USED_OUTSIDE)
        return self._connection

    def together(self, command: plan.Together) -> tuple[Any, ...]:
        if not psycopg.Pipeline.is_supported():  # a libpq older than 14
            return super().together(command)
        if any(isinstance(each, plan.Begin) for each in command.commands):
            self._borrow()
        commits = any(isinstance(each, plan.Commit) for each in command.commands)
        connection = self.handle
        with committing(connection) if commits else ASKING, connection.pipeline():
            sent = [
                self._send(each) if isinstance(each, plan.Query) else self.execute(each)
                for each in command.commands
            ]
        return tuple(_rows(each) if isinstance(each, psycopg.Cursor) else each for each in sent)

    def _borrow(self) -> None:
        if self._connection is not None:
            return
        if self._take is None:
            raise Misuse(GIVEN_BACK)
        with taking():
            self._connection = self._take()
        # Our BEGIN is explicit. Without this psycopg would send a second one, and wait for it, as long as
        # the first is still under way in the pipeline.
        self._autocommit = self._connection.autocommit
        self._connection.autocommit = True

    def _send(self, command: plan.Query) -> psycopg.Cursor[Any]:
        statement = STATEMENTS[command.statement]
        cursor = self.handle.cursor(row_factory=tuple_row)
        cursor.execute(statement.text, statement.named(command))
        return cursor

    def _run(self, text: str) -> None:
        with ASKING:
            self.handle.execute(text)

    def query(self, command: plan.Query) -> Rows:
        with ASKING:
            return _rows(self._send(command))

    def script(self, command: plan.Script) -> None:
        self._run(command.text)

    def begin(self, command: plan.Begin) -> None:
        self._borrow()
        # Not connection.transaction(): inside a pipeline that keeps a pipeline open until its own end.
        transaction = psycopg.Transaction(self.handle)
        with ASKING:
            transaction.__enter__()
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
        with committing(self.handle):
            transaction.__exit__(None, None, None)

    def rollback(self, command: plan.Rollback) -> bool:
        transaction, self._transaction = self._transaction, None
        connection = self._connection
        if connection is None or connection.closed:
            return True
        was_open = is_open(connection)
        try:
            if transaction is not None:
                undoing = psycopg.Rollback()
                transaction.__exit__(type(undoing), undoing, None)
            elif self._take is not None:
                connection.rollback()  # a statement in front of COMMIT failed: that was never carried out
        except Exception:
            logger.warning("a rollback on PostgreSQL failed; the connection is closed", exc_info=True)
            connection.close()
        return was_open

    def close(self, command: plan.Close) -> None:
        connection, self._connection = self._connection, None
        if connection is None or self._give_back is None:
            return
        try:
            try:
                if not connection.closed:
                    connection.autocommit = self._autocommit
            except psycopg.Error:  # no rollback came before
                connection.close()
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
            raise Misuse(USED_OUTSIDE)
        return self._connection

    async def _run(self, text: str) -> None:
        with ASKING:
            await self.handle.execute(text)

    async def query(self, command: plan.Query) -> Rows:
        statement = STATEMENTS[command.statement]
        cursor = self.handle.cursor(row_factory=tuple_row)
        with ASKING:
            await cursor.execute(statement.text, statement.named(command))
            return tuple(await cursor.fetchall()) if cursor.rownumber is not None else ()

    async def script(self, command: plan.Script) -> None:
        await self._run(command.text)

    async def begin(self, command: plan.Begin) -> None:
        if self._connection is None:
            if self._take is None:
                raise Misuse(GIVEN_BACK)
            with taking():
                self._connection = await self._take()
        transaction = psycopg.AsyncTransaction(self.handle)
        with ASKING:
            await transaction.__aenter__()
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
        with committing(self.handle):
            await transaction.__aexit__(None, None, None)

    async def rollback(self, command: plan.Rollback) -> bool:
        transaction, self._transaction = self._transaction, None
        connection = self._connection
        if connection is None or transaction is None or connection.closed:
            return True
        was_open = is_open(connection)
        try:
            undoing = psycopg.Rollback()
            await transaction.__aexit__(type(undoing), undoing, None)
        except BaseException as error:
            await connection.close()
            if not isinstance(error, Exception):
                raise
            logger.warning("a rollback on PostgreSQL failed; the connection is closed", exc_info=True)
        return was_open

    async def close(self, command: plan.Close) -> None:
        connection, self._connection = self._connection, None
        if connection is None or self._give_back is None:
            return
        try:
            await asyncio.shield(self._give_back(connection))
        except Exception:
            logger.warning("a connection to PostgreSQL could not be given back", exc_info=True)


def _rows(cursor: psycopg.Cursor[Any]) -> Rows:
    # Not `description`, which makes an object for each column.
    return tuple(cursor.fetchall()) if cursor.rownumber is not None else ()


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
        self,
        take: Callable[[], Awaitable[AsyncConnection]],
        give_back: Callable[[AsyncConnection], Awaitable[None]],
    ) -> None:
        self._take = take
        self._give_back = give_back

    def open(self) -> AsyncPsycopgExecutor:
        return AsyncPsycopgExecutor(take=self._take, give_back=self._give_back)


def join(connection: Any) -> PsycopgExecutor | AsyncPsycopgExecutor | None:
    """The executor for a connection of the caller."""
    if isinstance(connection, psycopg.Connection):
        return PsycopgExecutor(connection)
    if isinstance(connection, psycopg.AsyncConnection):
        return AsyncPsycopgExecutor(connection)
    return None


def source(origin: Any) -> PsycopgSource | AsyncPsycopgSource | None:
    """The source for a pool."""
    pools = sys.modules.get("psycopg_pool")  # a distribution of its own; whoever has a pool has imported it
    if pools is not None and isinstance(origin, pools.ConnectionPool):
        return PsycopgSource(origin.getconn, origin.putconn)
    if pools is not None and isinstance(origin, pools.AsyncConnectionPool):
        return AsyncPsycopgSource(origin.getconn, origin.putconn)
    return None


def connecting(connect: Callable[[], Any]) -> PsycopgSource | AsyncPsycopgSource:
    """A source that opens a connection for each transaction; an ``async def`` opens awaiting ones."""
    if inspect.iscoroutinefunction(connect):
        return AsyncPsycopgSource(connect, lambda connection: connection.close())
    return PsycopgSource(connect, lambda connection: connection.close())
