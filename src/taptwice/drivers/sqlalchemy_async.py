"""SQLAlchemy 2, awaiting. Apart from the blocking half because it needs greenlet, which that half does not.

Each command is carried out by the blocking executor in SQLAlchemy's own greenlet, which is what its own
awaiting classes do with each of their calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
)
from sqlalchemy.orm import Session
from sqlalchemy.util.concurrency import greenlet_spawn

from taptwice import sql
from taptwice.core import plan
from taptwice.core.plan import Command
from taptwice.drivers.base import Awaiting
from taptwice.drivers.sqlalchemy import SqlalchemyExecutor, dialect_of, engine_of
from taptwice.errors import Misuse

Reply = TypeVar("Reply")


class AsyncSqlalchemyExecutor(Awaiting):
    """Carries commands out by a blocking executor."""

    holds_back = True

    def __init__(self, blocking: SqlalchemyExecutor) -> None:
        self.dialect = blocking.dialect
        self.blocking = blocking

    @property
    def handle(self) -> Any:
        return self.blocking.handle

    def settle_first(self, sessions: list[Session]) -> None:
        """As that of the blocking executor."""
        self.blocking.settle_first(sessions)

    async def execute(self, command: Command[Reply], /) -> Reply:
        if type(command) in (plan.Now, plan.Sleep):
            return await super().execute(command)
        carrying_out = greenlet_spawn(self.blocking.execute, command)
        reply: Reply = await (asyncio.shield(carrying_out) if type(command) is plan.Close else carrying_out)
        return reply


class AsyncSqlalchemySource:
    """Connections from an engine; sessions, where the origin makes them, from its maker."""

    blocking = False

    def __init__(self, engine: AsyncEngine, maker: async_sessionmaker[Any] | None = None) -> None:
        self.dialect: sql.Dialect = dialect_of(engine.dialect.name)
        self._engine = engine
        self._maker = maker

    def open(self) -> AsyncSqlalchemyExecutor:
        take, maker = self._engine.sync_engine.connect, self._maker

        def connection(executor: SqlalchemyExecutor) -> AsyncConnection:
            return AsyncConnection(self._engine, sync_connection=executor.connection)

        if maker is None:
            return AsyncSqlalchemyExecutor(SqlalchemyExecutor(self.dialect, take=take, wrap=connection))

        def session(executor: SqlalchemyExecutor) -> AsyncSession:
            made: AsyncSession = maker(bind=connection(executor), join_transaction_mode="create_savepoint")
            executor.adopt(made.sync_session)
            return made

        inner = SqlalchemyExecutor(self.dialect, take=take, wrap=session, through_session=True)
        return AsyncSqlalchemyExecutor(inner)


def join(connection: Any) -> AsyncSqlalchemyExecutor | None:
    """The executor for a connection or session of the caller."""
    wrap: Callable[[SqlalchemyExecutor], Any] = lambda _: connection  # noqa: E731
    match connection:
        case AsyncConnection():
            dialect = dialect_of(connection.dialect.name)
            return AsyncSqlalchemyExecutor(SqlalchemyExecutor(dialect, connection.sync_connection, wrap=wrap))
        case AsyncSession():
            session = connection.sync_session
            dialect = dialect_of(session.get_bind().dialect.name)
            return AsyncSqlalchemyExecutor(SqlalchemyExecutor(dialect, session=session, wrap=wrap))
        case async_scoped_session():
            return join(connection())
        case _:
            return None


def source(origin: Any) -> AsyncSqlalchemySource | None:
    """The source for an engine or a session maker."""
    match origin:
        case AsyncEngine():
            return AsyncSqlalchemySource(origin)
        case async_sessionmaker():
            return AsyncSqlalchemySource(engine_of(origin.kw), origin)
        case async_scoped_session():
            return source(origin.session_factory)
        case _:
            return None


def connecting(connect: Callable[[], Any]) -> AsyncSqlalchemySource:
    """Refused: an engine is what opens connections."""
    raise Misuse("give the engine or the session maker itself, not a function that opens a connection")
