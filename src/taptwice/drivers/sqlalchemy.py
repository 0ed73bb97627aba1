"""SQLAlchemy 2: engines, connections, session makers and sessions, blocking and awaiting.

The awaiting half runs the blocking executor in SQLAlchemy's own greenlet, which is what its own
awaiting classes do with each of their calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sqlalchemy import BigInteger, Connection, Engine, Float, Integer, LargeBinary, String, TextClause, bindparam, text
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.util.concurrency import greenlet_spawn

from taptwice import sql
from taptwice.core import plan
from taptwice.core.plan import Command, Rows
from taptwice.drivers import sqlite, sqlstate
from taptwice.drivers.base import Awaiting, Blocking, logger
from taptwice.errors import CommitUnknown, Misuse, StoreUnavailable, TaptwiceError, Torn

Reply = TypeVar("Reply")

_TYPES: Mapping[str, Any] = {
    "lock": BigInteger,
    "id": LargeBinary,
    "wait_ms": Integer,
    "window": Float(53),
    "version": Integer,
    "status": Integer,
    "fingerprint": LargeBinary,
    "account": String,
    "key": String,
    "headers": LargeBinary,
    "body": LargeBinary,
    "now": Float(53),
    "begun": Float(53),
    "batch": Integer,
    "name": String,
}


def _clauses(dialect: sql.Dialect) -> Mapping[str, tuple[TextClause, sql.Statement]]:
    """Made once, with typed parameters: SQLAlchemy then compiles each once."""
    return {
        name: (
            text(statement.text).bindparams(*(bindparam(name, type_=_TYPES[name]) for name in statement.parameters)),
            statement,
        )
        for name, statement in sql.statements(dialect).items()
    }


CLAUSES: Mapping[sql.Dialect, Mapping[str, tuple[TextClause, sql.Statement]]] = {
    "postgresql": _clauses("postgresql"),
    "sqlite": _clauses("sqlite"),
}


def dialect_of(name: str) -> sql.Dialect:
    if name == "postgresql":
        return "postgresql"
    if name == "sqlite":
        return "sqlite"
    raise Misuse(f"no statements for the SQLAlchemy dialect {name!r}; there are postgresql and sqlite")


def translated(error: SQLAlchemyError, dialect: sql.Dialect) -> TaptwiceError | None:
    """Our error for an error at a statement of ours."""
    if isinstance(error, PoolTimeout):
        return StoreUnavailable(f"no connection to the database: {error}")
    if not isinstance(error, DBAPIError):
        return Misuse(f"SQLAlchemy refused: {error}")
    cause: Any = error.orig
    if dialect == "sqlite":
        return sqlite.ours(cause)
    code = getattr(cause, "sqlstate", None)
    if code is None and not (error.connection_invalidated or isinstance(error, OperationalError | InterfaceError)):
        return Misuse(f"SQLAlchemy refused: {error}")
    return sqlstate.ours(code, str(cause))


class SqlalchemyExecutor(Blocking):
    """Commands on one connection: the caller's connection or session, or one that `take` lends at `Begin`."""

    def __init__(
        self,
        dialect: sql.Dialect,
        connection: Connection | None = None,
        session: Session | None = None,
        take: Callable[[], Connection] | None = None,
        make: Callable[[Connection], Session] | None = None,
    ) -> None:
        self.dialect = dialect
        self._connection = connection
        self._session = session
        self._take = take
        self._make = make
        self._sessions: list[Session] = []
        self._nested: Any = None
        self._earlier: list[Session] = []

    @property
    def handle(self) -> Any:
        """The session that the claim works through where there is one, else the connection."""
        if self._connection is None:
            raise Misuse("the claim's connection is used outside its transaction")
        if self._make is None:
            return self._connection if self._session is None else self._session
        if not self._sessions:
            self._sessions.append(self._make(self._connection))
        return self._sessions[0]

    @property
    def connection(self) -> Connection:
        """The connection itself, for sessions that join."""
        if self._connection is None:
            raise Misuse("the claim's connection is used outside its transaction")
        return self._connection

    def adopt(self, session: Session) -> None:
        """A session of the user's that works on this connection: settled with the claim."""
        if session not in self._sessions:
            self._sessions.append(session)

    def settle_first(self, sessions: list[Session]) -> None:
        """Sessions that were used before the claim: `begin` ends their transactions, which are not ours."""
        self._earlier = list(sessions)

    def _settle_earlier(self) -> None:
        for session in self._earlier:
            if getattr(session, "_trans_context_manager", None) is not None:
                raise Misuse(
                    "a session began before the claim with `session.begin()` and is still inside that block: let the "
                    "login use a session of its own, or leave out begin() around the one it shares with the handler"
                )
            session.commit()
        self._earlier.clear()

    def _guarded(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except SQLAlchemyError as error:
            if (known := translated(error, self.dialect)) is not None:
                raise known from error
            raise

    def query(self, command: plan.Query) -> Rows:
        clause, statement = CLAUSES[self.dialect][command.statement]
        given = dict(command.parameters)
        values = {name: given.get(name) for name in statement.parameters}
        result = self._guarded(self.connection.execute, clause, values)
        return tuple(map(tuple, result)) if result.returns_rows else ()

    def _run(self, statement: str) -> None:
        self._guarded(self.connection.exec_driver_sql, statement)

    def script(self, command: plan.Script) -> None:
        self._run(command.text)

    def begin(self, command: plan.Begin) -> None:
        self._settle_earlier()
        if self._connection is None:
            if self._take is None:
                raise Misuse("the connection of this claim was given back")
            self._connection = self._guarded(self._take)
        self._guarded(self._connection.begin)
        if self.dialect == "sqlite":
            self._run(f"PRAGMA busy_timeout = {int(command.wait * 1000)}")
            # pysqlite begins by itself, late and deferred, unless it finds a transaction open.
            self._run("BEGIN IMMEDIATE")

    def join(self, command: plan.Join) -> None:
        if self._session is not None:
            self._connection = self._guarded(self._session.connection)
        connection = self.connection
        if connection.get_isolation_level() == "AUTOCOMMIT" if self.dialect == "sqlite" else _autocommits(connection):
            raise Misuse("a claim joins a transaction, and this connection is in AUTOCOMMIT")
        if self.dialect == "sqlite":
            driver: Any = connection.connection.driver_connection
            raw = getattr(driver, "_conn", driver)
            if not raw.in_transaction:
                self._run(f"PRAGMA busy_timeout = {int(command.wait * 1000)}")
                self._run("BEGIN IMMEDIATE")

    def savepoint(self, command: plan.Savepoint) -> None:
        if self._make is not None:
            return  # each session of ours begins a savepoint of its own, at its first statement
        target = self._session if self._session is not None else self.connection
        self._nested = self._guarded(target.begin_nested)

    def flush(self, command: plan.Flush) -> None:
        for session in self._sessions:
            session.flush()

    def undo(self, command: plan.Undo) -> None:
        for session in self._sessions:
            self._guarded(session.rollback)
        if self._nested is not None:
            nested, self._nested = self._nested, None
            self._end_nested(nested, nested.rollback)

    def release(self, command: plan.Release) -> None:
        for session in self._sessions:
            session.commit()
        if self._nested is not None:
            nested, self._nested = self._nested, None
            self._end_nested(nested, nested.commit)

    def _end_nested(self, nested: Any, end: Callable[[], None]) -> None:
        if not nested.is_active and self._take is None:
            raise Torn
        self._guarded(end)

    def commit(self, command: plan.Commit) -> None:
        connection = self.connection
        transaction = connection.get_transaction()
        if transaction is None:
            raise Torn
        try:
            transaction.commit()
        except DBAPIError as error:
            if error.connection_invalidated:
                raise CommitUnknown from error
            known = translated(error, self.dialect)
            if getattr(error.orig, "sqlstate", None) in ("40001", "40P01") and known is not None:
                raise known from error
            raise

    def rollback(self, command: plan.Rollback) -> None:
        try:
            for session in self._sessions:
                session.close()
            self._sessions.clear()
            self._nested = None
            transaction = None if self._connection is None else self._connection.get_transaction()
            if transaction is not None:
                transaction.rollback()
        except Exception:
            logger.warning("a rollback failed; the connection is thrown away", exc_info=True)
            if self._connection is not None:
                self._connection.invalidate()

    def close(self, command: plan.Close) -> None:
        connection, self._connection = self._connection, None
        try:
            if connection is not None and self._take is not None:
                connection.close()
        except Exception:
            logger.warning("a connection could not be given back", exc_info=True)


def _autocommits(connection: Connection) -> bool:
    return connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"


class AsyncSqlalchemyExecutor(Awaiting):
    """The same, awaiting: each command in SQLAlchemy's greenlet."""

    def __init__(self, blocking: SqlalchemyExecutor, wrap: Callable[[Any], Any]) -> None:
        self.dialect = blocking.dialect
        self.blocking = blocking
        self._wrap = wrap
        self._handle: Any = None

    @property
    def handle(self) -> Any:
        if self._handle is None:
            self._handle = self._wrap(self.blocking)
        return self._handle

    def settle_first(self, sessions: list[Session]) -> None:
        self.blocking.settle_first(sessions)

    async def execute(self, command: Command[Reply], /) -> Reply:
        if isinstance(command, plan.Now | plan.Sleep):
            return await super().execute(command)
        if isinstance(command, plan.Close):
            self._handle = None
        reply: Reply = await greenlet_spawn(self.blocking.execute, command)
        return reply


class SqlalchemySource:
    """Connections from an engine; sessions, where the origin makes them, from its maker."""

    blocking = True

    def __init__(self, engine: Engine, maker: sessionmaker[Any] | None = None) -> None:
        self.dialect: sql.Dialect = dialect_of(engine.dialect.name)
        self._engine = engine
        self._maker = maker

    def open(self) -> SqlalchemyExecutor:
        make = None if self._maker is None else self._session
        return SqlalchemyExecutor(self.dialect, take=self._engine.connect, make=make)

    def _session(self, connection: Connection) -> Session:
        assert self._maker is not None
        made: Session = self._maker(bind=connection, join_transaction_mode="create_savepoint")
        return made


class AsyncSqlalchemySource:
    """The same for the awaiting engine and session maker."""

    blocking = False

    def __init__(self, engine: AsyncEngine, maker: async_sessionmaker[Any] | None = None) -> None:
        self.dialect: sql.Dialect = dialect_of(engine.dialect.name)
        self._engine = engine
        self._maker = maker

    def open(self) -> AsyncSqlalchemyExecutor:
        inner = SqlalchemyExecutor(self.dialect, take=self._engine.sync_engine.connect)
        return AsyncSqlalchemyExecutor(inner, self._handle)

    def _handle(self, inner: SqlalchemyExecutor) -> AsyncConnection | AsyncSession:
        connection = AsyncConnection(self._engine, sync_connection=inner.connection)
        if self._maker is None:
            return connection
        session: AsyncSession = self._maker(bind=connection, join_transaction_mode="create_savepoint")
        inner.adopt(session.sync_session)
        return session


def join(connection: Any) -> SqlalchemyExecutor | AsyncSqlalchemyExecutor | None:
    if isinstance(connection, scoped_session):
        connection = connection()
    match connection:
        case Connection():
            return SqlalchemyExecutor(dialect_of(connection.dialect.name), connection)
        case Session():
            return SqlalchemyExecutor(dialect_of(connection.get_bind().dialect.name), session=connection)
        case AsyncConnection():
            inner = SqlalchemyExecutor(dialect_of(connection.dialect.name), connection.sync_connection)
            return AsyncSqlalchemyExecutor(inner, lambda _: connection)
        case AsyncSession():
            session = connection.sync_session
            inner = SqlalchemyExecutor(dialect_of(session.get_bind().dialect.name), session=session)
            return AsyncSqlalchemyExecutor(inner, lambda _: connection)
        case _:
            return None


def source(origin: Any) -> SqlalchemySource | AsyncSqlalchemySource | None:
    match origin:
        case Engine():
            return SqlalchemySource(origin)
        case AsyncEngine():
            return AsyncSqlalchemySource(origin)
        case sessionmaker():
            return SqlalchemySource(_engine_of(origin.kw), origin)
        case async_sessionmaker():
            return AsyncSqlalchemySource(_engine_of(origin.kw), origin)
        case scoped_session():
            return source(origin.session_factory)
        case _:
            return None


def _engine_of(settings: Mapping[str, Any]) -> Any:
    if settings.get("binds"):
        raise Misuse(
            "this session maker has binds=: its classes may go to another database, outside the claim's transaction; "
            "give a maker bound to one engine"
        )
    if settings.get("bind") is None:
        raise Misuse("this session maker is bound to no engine: make it with sessionmaker(engine)")
    return settings["bind"]


def connecting(connect: Callable[[], Any]) -> None:
    raise Misuse("give the engine or the session maker itself, not a function that opens a connection")
