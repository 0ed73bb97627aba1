"""asyncpg.

asyncpg sends one statement a round trip, except by the simple protocol, which takes several at once but
no parameters. The answer's INSERT is written out in literals and sent in front of COMMIT that way, so
that saving it costs no further trip.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import asyncpg

from taptwice import sql
from taptwice.core import plan
from taptwice.core.plan import Rows, Value
from taptwice.drivers import sqlstate
from taptwice.drivers.base import GIVEN_BACK, SAVEPOINT, USED_OUTSIDE, Awaiting, logger
from taptwice.errors import CommitUnknown, Misuse, StoreUnavailable, TaptwiceError, Torn

STATEMENTS = sql.compile_all("postgresql", lambda name, position: f"${position}")
_INSERT = sql.statements("postgresql")["insert"].compiled(lambda name, position: f"%({name})s")

LARGEST_LITERAL = 65_536
"""Bytes of a body up to which writing it out in hexadecimal is cheaper than a round trip."""

FAILURES = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
"""What asyncpg raises; a timeout is an OSError, and a connection may be lost at any of its inner states."""


def translated(error: Exception, lost: bool) -> TaptwiceError | None:
    """Our error for an error of asyncpg at a statement of ours."""
    if isinstance(error, asyncpg.PostgresError):
        return sqlstate.ours(error.sqlstate, str(error))
    if isinstance(error, asyncpg.InterfaceError) and not lost:
        return Misuse(f"asyncpg refused: {error}")
    return StoreUnavailable(f"the connection to PostgreSQL failed: {error or type(error).__name__}")


def is_lost(connection: Any) -> bool:
    """A pool takes a connection that was lost back by itself, and every method of its proxy raises then."""
    try:
        return bool(connection.is_closed())
    except asyncpg.InterfaceError:
        return True


@contextmanager
def taking() -> Iterator[None]:
    """Around the call that takes a connection."""
    try:
        yield
    except FAILURES as error:
        raise StoreUnavailable(f"no connection to PostgreSQL: {error or type(error).__name__}") from error


class asking:
    """Around statements of ours. A class, and no generator, because it stands around every one."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if (
            isinstance(error, FAILURES)
            and (known := translated(error, is_lost(self._connection))) is not None
        ):
            raise known from error


class committing:
    """Around COMMIT and what travels in front of it."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        connection = self._connection
        if isinstance(error, asyncio.CancelledError):
            connection.terminate()  # whether it committed is for the next attempt to find out
        elif isinstance(error, FAILURES):
            if is_lost(connection) or not isinstance(error, asyncpg.PostgresError):
                raise CommitUnknown from error
            # A transaction that is still there was not refused at COMMIT: what travelled in front failed.
            refused = not connection.is_in_transaction()
            known = sqlstate.at_commit(error.sqlstate, str(error)) if refused else translated(error, False)
            if known is not None:
                raise known from error


class AsyncpgExecutor(Awaiting):
    """Commands on one connection: the caller's, or one that `take` lends at `Begin`."""

    dialect: sql.Dialect = "postgresql"

    def __init__(
        self,
        connection: Any = None,
        take: Callable[[], Awaitable[Any]] | None = None,
        give_back: Callable[[Any], Awaitable[None]] | None = None,
    ) -> None:
        self._connection = connection
        self._take = take
        self._give_back = give_back
        self._transaction: Any = None

    @property
    def handle(self) -> Any:
        if self._connection is None:
            raise Misuse(USED_OUTSIDE)
        return self._connection

    async def together(self, command: plan.Together) -> tuple[Any, ...]:
        match command.commands:
            case (*first, plan.Query("insert", parameters), plan.Commit()) if _fits(
                given := dict(parameters)
            ):
                before = [await self.execute(each) for each in first]
                await self._save_and_commit(given)
                return (*before, ((1,),), None)
            case _:
                return await super().together(command)

    async def _execute(self, text: str) -> None:
        with asking(self.handle):
            await self.handle.execute(text)

    async def query(self, command: plan.Query) -> Rows:
        statement = STATEMENTS[command.statement]
        with asking(self.handle):
            return tuple(map(tuple, await self.handle.fetch(statement.text, *statement.ordered(command))))

    async def script(self, command: plan.Script) -> None:
        await self._execute(command.text)

    async def begin(self, command: plan.Begin) -> None:
        if self._connection is None:
            if self._take is None:
                raise Misuse(GIVEN_BACK)
            with taking():
                self._connection = await self._take()
        # An object of asyncpg's, so that the handler's own `connection.transaction()` nests in it.
        transaction = self.handle.transaction()
        with asking(self.handle):
            await transaction.start()
        self._transaction = transaction

    async def join(self, command: plan.Join) -> None:
        if not self.handle.is_in_transaction():
            raise Misuse(
                "a claim joins a transaction, and none is open: "
                "use it inside `async with connection.transaction():`"
            )

    async def savepoint(self, command: plan.Savepoint) -> None:
        await self._execute(f"SAVEPOINT {SAVEPOINT}")

    async def undo(self, command: plan.Undo) -> None:
        await self._execute(f"ROLLBACK TO SAVEPOINT {SAVEPOINT}; RELEASE SAVEPOINT {SAVEPOINT}")

    async def release(self, command: plan.Release) -> None:
        if self._transaction is None:  # COMMIT releases it where the transaction is ours
            await self._execute(f"RELEASE SAVEPOINT {SAVEPOINT}")

    async def commit(self, command: plan.Commit) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is None:
            raise Torn
        with committing(self.handle):
            await transaction.commit()

    async def _save_and_commit(self, given: dict[str, Value]) -> None:
        """INSERT and COMMIT in one trip. `Torn`: nothing was saved, and whatever was open is committed."""
        connection = self.handle
        if is_lost(connection):
            raise StoreUnavailable("the connection to PostgreSQL was lost before COMMIT was sent")
        if not connection.is_in_transaction():
            raise Torn
        with committing(connection):
            status = await connection.execute(_saving(given))
        # Its own commit() would be a further trip: all that this does besides is to forget the transaction.
        transaction, self._transaction = self._transaction, None
        transaction._connection._top_xact = None
        if status != "SELECT 0":
            raise Torn

    async def rollback(self, command: plan.Rollback) -> bool:
        transaction, self._transaction = self._transaction, None
        connection = self._connection
        if connection is None or transaction is None or is_lost(connection):
            return True
        was_open = bool(connection.is_in_transaction())
        try:
            await transaction.rollback()
        except BaseException as error:
            if not is_lost(connection):
                connection.terminate()
            if not isinstance(error, Exception):
                raise
            logger.warning("a rollback on PostgreSQL failed; the connection is closed", exc_info=True)
        return was_open

    async def close(self, command: plan.Close) -> None:
        connection, self._connection = self._connection, None
        if connection is None or self._give_back is None:
            return
        try:
            await self._give_back(connection)
        except Exception:
            logger.warning("a connection to PostgreSQL could not be given back", exc_info=True)


def _fits(given: dict[str, Value]) -> bool:
    body = given["body"]
    return not isinstance(body, bytes) or len(body) <= LARGEST_LITERAL


def _saving(given: dict[str, Value]) -> str:
    """INSERT, COMMIT, and a look whether `taptwice_save` met a transaction that is not the claim's.

    Of several statements asyncpg shows the number of rows of the last one alone, by the simple protocol: so
    that one gives a row where nothing was saved. The setting is left to the session in that case, and says
    nothing of any other claim.
    """
    literals = {name: literal(value) for name, value in given.items()}
    id_ = f"CAST(encode({literals['id']}, 'hex') AS uuid)::text"
    claim = f"{id_} || '/' || CAST({literals['begun']} AS float8)::text"
    return f"{_INSERT % literals}; COMMIT; SELECT 1 WHERE current_setting('taptwice.torn', true) = {claim}"


def literal(value: Value) -> str:
    """A value as SQL text. Text and bytes travel in hexadecimal: nothing in them can end the literal."""
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"decode('{value.hex()}', 'hex')"
    if isinstance(value, str):
        return f"convert_from(decode('{value.encode().hex()}', 'hex'), 'UTF8')"
    return repr(value)


class AsyncpgSource:
    """Connections from a pool, or from a function that opens one."""

    dialect: sql.Dialect = "postgresql"
    blocking = False

    def __init__(
        self, take: Callable[[], Awaitable[Any]], give_back: Callable[[Any], Awaitable[None]]
    ) -> None:
        self._take = take
        self._give_back = give_back

    def open(self) -> AsyncpgExecutor:
        return AsyncpgExecutor(take=self._take, give_back=self._give_back)


def join(connection: Any) -> AsyncpgExecutor | None:
    """The executor for a connection of the caller."""
    if isinstance(connection, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy):
        return AsyncpgExecutor(connection)
    return None


def source(origin: Any) -> AsyncpgSource | None:
    """The source for a pool."""
    return AsyncpgSource(origin.acquire, origin.release) if isinstance(origin, asyncpg.Pool) else None


def connecting(connect: Callable[[], Awaitable[Any]]) -> AsyncpgSource:
    """A source that opens a connection for each transaction."""
    return AsyncpgSource(connect, lambda connection: asyncio.shield(connection.close()))
