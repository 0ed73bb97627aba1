"""asyncpg.

asyncpg sends one statement a round trip, except by the simple protocol, which takes several at once but
no parameters. The answer's INSERT is written out in literals and sent in front of COMMIT that way, so
that saving it costs no further trip.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
from asyncpg.transaction import Transaction

from taptwice import sql
from taptwice.core import plan
from taptwice.core.plan import Rows, Value
from taptwice.drivers.base import Awaiting, logger
from taptwice.drivers.sqlstate import ours
from taptwice.errors import CommitUnknown, Misuse, StoreUnavailable, TaptwiceError, Torn

STATEMENTS = sql.compile_all("postgresql", lambda name, position: f"${position}")
BY_NAME = sql.statements("postgresql")

SAVEPOINT = "taptwice"

LARGEST_LITERAL = 65_536
"""Bytes of a body up to which writing it out in hexadecimal is cheaper than a round trip."""

LOST = (OSError, asyncpg.InterfaceError, asyncpg.PostgresConnectionError, TimeoutError)


def translated(error: Exception) -> TaptwiceError | None:
    """Our error for an error at a statement of ours."""
    if isinstance(error, asyncpg.PostgresError):
        return ours(error.sqlstate, str(error))
    return StoreUnavailable(f"the connection to PostgreSQL failed: {error or type(error).__name__}")


def literal(value: Value) -> str:
    """A value as SQL text. Text and bytes travel in hexadecimal: nothing in them can end the literal."""
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"decode('{value.hex()}', 'hex')"
    if isinstance(value, str):
        return f"convert_from(decode('{value.encode().hex()}', 'hex'), 'UTF8')"
    return repr(value)


class _Prefixed:
    """A connection whose next `execute` sends a text in front: how COMMIT takes the INSERT along."""

    def __init__(self, connection: Any) -> None:
        object.__setattr__(self, "connection", connection)
        object.__setattr__(self, "prefix", "")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.connection, name, value)

    def send_in_front(self, text: str) -> None:
        object.__setattr__(self, "prefix", text)

    async def execute(self, query: str, *arguments: Any, **options: Any) -> Any:
        return await self.connection.execute(self.prefix + query, *arguments, **options)


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
        self._prefixed: _Prefixed | None = None
        self._transaction: Transaction | None = None

    @property
    def handle(self) -> Any:
        if self._connection is None:
            raise Misuse("the claim's connection is used outside its transaction")
        return self._connection

    async def together(self, command: plan.Together) -> tuple[Any, ...]:
        match command.commands:
            case (*first, plan.Query("insert") as insert, plan.Commit() as commit) if _fits(insert):
                before = [await self.execute(each) for each in first]
                assert self._prefixed is not None, "only a transaction of ours is committed by us"
                self._prefixed.send_in_front(_saving(insert))
                await self._commit(ours_in_front=True)
                return (*before, ((1,),), None)
            case _:
                return await super().together(command)

    async def _run(self, call: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        try:
            return await call(*arguments)
        except (asyncpg.PostgresError, *LOST) as error:
            if (known := translated(error)) is not None:
                raise known from error
            raise

    async def query(self, command: plan.Query) -> Rows:
        statement = STATEMENTS[command.statement]
        rows = await self._run(self.handle.fetch, statement.text, *statement.ordered(command))
        return tuple(map(tuple, rows))

    async def script(self, command: plan.Script) -> None:
        await self._run(self.handle.execute, command.text)

    async def begin(self, command: plan.Begin) -> None:
        if self._connection is None:
            if self._take is None:
                raise Misuse("the connection of this claim was given back")
            self._connection = await self._run(self._take)
        self._prefixed = _Prefixed(self._connection)
        transaction = Transaction(self._prefixed, None, False, False)
        await self._run(transaction.start)
        self._transaction = transaction

    async def join(self, command: plan.Join) -> None:
        if not self.handle.is_in_transaction():
            raise Misuse(
                "a claim joins a transaction, and none is open: use it inside `async with connection.transaction():`"
            )

    async def savepoint(self, command: plan.Savepoint) -> None:
        await self._run(self.handle.execute, f"SAVEPOINT {SAVEPOINT}")

    async def undo(self, command: plan.Undo) -> None:
        await self._run(
            self.handle.execute, f"ROLLBACK TO SAVEPOINT {SAVEPOINT}; RELEASE SAVEPOINT {SAVEPOINT}"
        )

    async def release(self, command: plan.Release) -> None:
        if self._transaction is None:  # COMMIT releases it where the transaction is ours
            await self._run(self.handle.execute, f"RELEASE SAVEPOINT {SAVEPOINT}")

    async def commit(self, command: plan.Commit) -> None:
        if self._transaction is None:
            raise Torn
        await self._commit(ours_in_front=False)

    async def _commit(self, ours_in_front: bool) -> None:
        transaction, self._transaction = self._transaction, None
        assert transaction is not None
        connection = self.handle
        try:
            await transaction.commit()
        except (asyncpg.PostgresError, *LOST) as error:
            if connection.is_closed() or isinstance(error, LOST):
                raise CommitUnknown from error
            code = getattr(error, "sqlstate", "")
            if ours_in_front and code == TORN_CODE and TORN_MARK in str(error):
                raise Torn from error
            if code in ("40001", "40P01") or (ours_in_front and _of_our_table(error)):
                known = translated(error)
                assert known is not None
                raise known from error
            raise
        except asyncio.CancelledError:
            # Half-sent: whether it committed is for the next attempt to find out.
            connection.terminate()
            raise

    async def rollback(self, command: plan.Rollback) -> None:
        transaction, self._transaction = self._transaction, None
        connection = self._connection
        try:
            if connection is None or connection.is_closed():
                return
            if transaction is not None:
                await transaction.rollback()
            elif self._take is not None and connection.is_in_transaction():
                # After a failed COMMIT asyncpg believes the transaction over, and the server does not.
                await connection.execute("ROLLBACK")
        except Exception:
            logger.warning("a rollback on PostgreSQL failed; the connection is closed", exc_info=True)
            if connection is not None:
                connection.terminate()

    async def close(self, command: plan.Close) -> None:
        connection, self._connection = self._connection, None
        try:
            if connection is not None and self._give_back is not None:
                await self._give_back(connection)
        except Exception:
            logger.warning("a connection to PostgreSQL could not be given back", exc_info=True)


TORN_CODE, TORN_MARK = "22P02", "taptwice: torn"
"""What the cast below raises, so that a claim whose transaction was ended is not committed as if it were whole."""


def _fits(insert: plan.Query) -> bool:
    body = dict(insert.parameters).get("body")
    return not isinstance(body, bytes) or len(body) <= LARGEST_LITERAL


def _saving(insert: plan.Query) -> str:
    """The INSERT in literals, behind a check that it is still the transaction that claimed."""
    statement = BY_NAME[insert.statement]
    given = dict(insert.parameters)
    text = statement.compiled(lambda name, position: literal(given.get(name)))
    check = (
        f"SELECT CASE WHEN CAST(extract(epoch FROM transaction_timestamp()) AS float8) = {given['begun']!r} "
        f"THEN 0 ELSE CAST(concat('{TORN_MARK}', pg_backend_pid()) AS integer) END; "
    )
    return f"{check}{text}; "


def _of_our_table(error: Exception) -> bool:
    table = getattr(error, "table_name", None)
    return table is None and getattr(error, "sqlstate", "")[:2] != "23" or str(table).startswith("taptwice_")


class AsyncpgSource:
    """Connections from a pool, or from a function that opens one."""

    dialect: sql.Dialect = "postgresql"
    blocking = False

    def __init__(self, take: Callable[[], Awaitable[Any]], give_back: Callable[[Any], Awaitable[None]]) -> None:
        self._take = take
        self._give_back = give_back

    def open(self) -> AsyncpgExecutor:
        return AsyncpgExecutor(take=self._take, give_back=self._give_back)


def join(connection: Any) -> AsyncpgExecutor | None:
    if isinstance(connection, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy):
        return AsyncpgExecutor(connection)
    return None


def source(origin: Any) -> AsyncpgSource | None:
    return AsyncpgSource(origin.acquire, origin.release) if isinstance(origin, asyncpg.Pool) else None


def connecting(connect: Callable[[], Awaitable[Any]]) -> AsyncpgSource:
    """A source that opens a connection for each transaction."""
    return AsyncpgSource(connect, lambda connection: connection.close())
