"""SQLAlchemy 2, blocking: engines, connections, session makers and sessions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from taptwice import sql
from taptwice.core import plan
from taptwice.core.plan import Rows
from taptwice.drivers import sqlite, sqlstate
from taptwice.drivers.base import GIVEN_BACK, USED_OUTSIDE, Blocking, logger
from taptwice.errors import CommitUnknown, Inseparable, Misuse, StoreUnavailable, TaptwiceError, Torn

PARAMETERS: Mapping[str, Callable[[str, int], str]] = {
    "numeric_dollar": lambda name, position: f"${position}",
    "numeric": lambda name, position: f":{position}",
    "qmark": lambda name, position: f"?{position}",
    "pyformat": lambda name, position: f"%({name})s",
    "named": lambda name, position: f":{name}",
    "format": lambda name, position: "%s",
}
"""How each of SQLAlchemy's ``paramstyle`` writes a parameter; ``?1`` is SQLite's, which alone has "qmark"."""


@cache
def statements(dialect: sql.Dialect, paramstyle: str) -> Mapping[str, tuple[str, tuple[str, ...]]]:
    """Every statement as the driver itself takes it, and the names of its parameters in their order.

    They pass SQLAlchemy unread: to read them would cost more than all else that it does with them.
    """
    write = PARAMETERS[paramstyle]
    found = {}
    for name, statement in sql.statements(dialect).items():
        each = statement.occurrences if paramstyle == "format" else statement.parameters
        found[name] = statement.compiled(write), each
    return found


def dialect_of(name: str) -> sql.Dialect:
    """Our dialect for SQLAlchemy's."""
    if name == "postgresql":
        return "postgresql"
    if name == "sqlite":
        return "sqlite"
    raise Misuse(f"no statements for the SQLAlchemy dialect {name!r}; there are postgresql and sqlite")


def _sqlstate(error: DBAPIError) -> str | None:
    """psycopg and asyncpg call it `sqlstate`, psycopg2 `pgcode`."""
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)


def translated(error: SQLAlchemyError, dialect: sql.Dialect) -> TaptwiceError | None:
    """Our error for an error at a statement of ours."""
    if isinstance(error, PoolTimeout):
        return StoreUnavailable(f"no connection to the database: {error}")
    if not isinstance(error, DBAPIError) or error.orig is None:
        return Misuse(f"SQLAlchemy refused: {error}")
    if dialect == "sqlite":
        return sqlite.ours(error.orig)
    code = _sqlstate(error)
    lost = error.connection_invalidated or isinstance(error, OperationalError | InterfaceError)
    if code is None and not lost:
        return Misuse(f"SQLAlchemy refused: {error}")
    return sqlstate.ours(code, str(error.orig))


class asking:
    """Around statements of ours. A class, and no generator, because it stands around every one."""

    __slots__ = ("_dialect",)

    def __init__(self, dialect: sql.Dialect) -> None:
        self._dialect = dialect

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        known = translated(error, self._dialect) if isinstance(error, SQLAlchemyError) else None
        if known is not None:
            # From the driver's own: SQLAlchemy's tells the parameters, among which are key and answer.
            raise known from (error.orig if isinstance(error, DBAPIError) else error)


class SqlalchemyExecutor(Blocking):
    """Commands on one connection: the caller's connection or session, or one that `take` lends at `Begin`.

    `wrap` makes the user's handle where it is not the connection or session itself. `through_session`: the
    handle is a session that `wrap` made, and brings a savepoint of its own.
    """

    holds_back = True

    def __init__(
        self,
        dialect: sql.Dialect,
        connection: Connection | None = None,
        session: Session | None = None,
        take: Callable[[], Connection] | None = None,
        wrap: Callable[[SqlalchemyExecutor], Any] | None = None,
        through_session: bool = False,
    ) -> None:
        self.dialect = dialect
        self._connection = connection
        self._session = session
        self._take = take
        self._wrap = wrap
        self._through_session = through_session
        self._handle: Any = None
        self._sessions: list[Session] = []
        self._committed = False
        self._torn = False
        self._nested: Any = None
        self._earlier: list[Session] = []

    @property
    def handle(self) -> Any:
        """The session that the claim works through where there is one, else the connection."""
        if self._handle is None:
            own = self._session or self.connection
            self._handle = own if self._wrap is None else self._wrap(self)
        return self._handle

    @property
    def connection(self) -> Connection:
        """The connection itself, for sessions that join."""
        if self._connection is None:
            raise Misuse(USED_OUTSIDE)
        return self._connection

    def adopt(self, session: Session) -> None:
        """A session that works on this connection, in a savepoint of its own: settled with the claim."""
        if session not in self._sessions:
            self._sessions.append(session)
            if hasattr(session, "claimed_by"):
                session.claimed_by = self  # one of `joined`'s, whose class tells of its commits
            else:
                event.listen(session, "after_commit", self.note_commit)

    def note_commit(self, session: Session) -> None:
        """Its savepoint is released, and can no longer be undone by itself."""
        self._committed = True

    def settle_first(self, sessions: list[Session]) -> None:
        """Sessions that were used before the claim: `begin` ends their transactions, which are not ours."""
        self._earlier = list(sessions)

    def _settle_earlier(self) -> None:
        for session in self._earlier:
            if getattr(session, "_trans_context_manager", None) is not None:
                raise Misuse(
                    "a session began before the claim with `session.begin()` and is still inside that block: "
                    "let the login use a session of its own, or leave out begin() around the one it shares "
                    "with the handler"
                )
            # What the login has loaded stays readable: to load it again would be a surprise, and awaiting
            # sessions cannot do it.
            expires, session.expire_on_commit = session.expire_on_commit, False
            session.commit()
            session.expire_on_commit = expires
        self._earlier.clear()

    def query(self, command: plan.Query) -> Rows:
        connection = self.connection
        paramstyle = connection.dialect.paramstyle
        statement, names = statements(self.dialect, paramstyle)[command.statement]
        given = dict(command.parameters)
        values: Any = (
            {name: given[name] for name in names}
            if paramstyle in ("pyformat", "named")
            else tuple([given[name] for name in names])
        )
        with asking(self.dialect):
            result = connection.exec_driver_sql(statement, values)
            rows = tuple(map(tuple, result)) if result.returns_rows else ()
        self._torn |= command.statement == "insert" and self.dialect == "postgresql" and not rows
        return rows

    def _run(self, statement: str) -> Any:
        """The first value that it gives, if it gives any."""
        with asking(self.dialect):
            result = self.connection.exec_driver_sql(statement)
            return result.scalar() if result.returns_rows else None

    def script(self, command: plan.Script) -> None:
        self._run(command.text)

    def begin(self, command: plan.Begin) -> None:
        self._settle_earlier()
        if self._connection is None:
            if self._take is None:
                raise Misuse(GIVEN_BACK)
            try:
                with asking(self.dialect):
                    self._connection = self._take()
            except OSError as error:  # asyncpg's, which SQLAlchemy lets through
                raise StoreUnavailable(f"no connection to the database: {error}") from error
        self._check_transactional()
        with asking(self.dialect):
            self.connection.begin()
        if self.dialect == "sqlite":
            # pysqlite begins by itself, late and deferred, unless it finds a transaction open.
            self._waiting(command.wait, "BEGIN IMMEDIATE")

    def join(self, command: plan.Join) -> None:
        self._settle_earlier()
        if self._session is not None:
            self._flush()
            with asking(self.dialect):
                self._connection = self._session.connection()
        self._check_transactional()
        if self.dialect == "sqlite":
            driver: Any = self.connection.connection.driver_connection
            raw = getattr(driver, "_conn", driver)  # aiosqlite has sqlite3's inside
            lock = sql.statements("sqlite")["lock"].text
            self._waiting(command.wait, lock if raw.in_transaction else "BEGIN IMMEDIATE")

    def _check_transactional(self) -> None:
        # `is True`: sqlite3 has a number of that name. There our own BEGIN makes a transaction in any case.
        if getattr(self.connection.connection.dbapi_connection, "autocommit", None) is True:
            raise Misuse("a claim needs a transaction, and this connection or its engine is in AUTOCOMMIT")

    def _waiting(self, wait: float, statement: str) -> None:
        """Let a statement wait for its turn to write; the connection's own busy_timeout is restored."""
        before = self._run("PRAGMA busy_timeout")
        self._run(f"PRAGMA busy_timeout = {sqlite.busy_timeout(wait)}")
        try:
            self._run(statement)
        finally:
            if not self.connection.invalidated:  # as one that was cancelled is, and its error is to go on
                self._run(f"PRAGMA busy_timeout = {int(before)}")

    def savepoint(self, command: plan.Savepoint) -> None:
        if self._through_session:
            return  # it begins one of its own, at its first statement
        with asking(self.dialect):
            self._nested = (self._session or self.connection).begin_nested()

    def flush(self, command: plan.Flush) -> None:
        self._flush()

    def _flush(self) -> None:
        for session in self._sessions:
            session.flush()
        if self._session is not None:
            self._session.flush()

    def undo(self, command: plan.Undo) -> None:
        if self._nested is None and self._committed:
            raise Inseparable
        with asking(self.dialect):
            for session in reversed(self._sessions):
                session.rollback()
        self._end_nested("rollback")

    def release(self, command: plan.Release) -> None:
        self._flush()  # its errors are the user's
        # Of a claim that was torn on PostgreSQL the INSERT tells, and harms nothing. A RELEASE that fails
        # would cost whatever transaction the handler has begun instead, so it waits for that.
        if self._take is None or self.dialect == "sqlite":
            self._end_sessions()
            self._end_nested("commit")

    def _end_sessions(self) -> None:
        for session in reversed(self._sessions):
            try:
                if session.in_transaction():  # else a surrounding `session.begin()` would take offence
                    session.commit()
            except DBAPIError as error:
                if isinstance(known := translated(error, self.dialect), Torn):
                    self._torn = True
                    raise known from error
                raise

    def _end_nested(self, how: str) -> None:
        nested, self._nested = self._nested, None
        if nested is None:
            return
        if not nested.is_active:
            raise Torn
        with asking(self.dialect):
            getattr(nested, how)()

    def commit(self, command: plan.Commit) -> None:
        if not self._torn:
            self._end_sessions()
        transaction = self.connection.get_transaction()
        if transaction is None:
            raise Torn
        try:
            transaction.commit()
        except DBAPIError as error:
            if error.connection_invalidated:
                raise CommitUnknown from error
            if (known := self._refused(error)) is not None:
                raise known from error
            raise

    def _refused(self, error: DBAPIError) -> TaptwiceError | None:
        if self.dialect == "sqlite" and error.orig is not None:
            return sqlite.at_commit(error.orig)
        return sqlstate.at_commit(_sqlstate(error), str(error.orig))

    def rollback(self, command: plan.Rollback) -> bool:
        sessions, self._sessions = self._sessions, []
        made, self._handle = self._handle, None
        self._nested, self._committed, self._torn = None, False, False
        was_open = True
        try:
            was_open = self._is_open()
            for session in reversed(sessions):
                if hasattr(session, "claimed_by"):
                    session.claimed_by = None
                else:
                    event.remove(session, "after_commit", self.note_commit)
                if session is made:
                    session.close()
                else:
                    session.rollback()  # its owner may still use its objects, with a connection of its own
            transaction = None if self._connection is None else self._connection.get_transaction()
            if transaction is not None and self._take is not None:
                transaction.rollback()
        except BaseException as error:
            if self._connection is not None:
                self._connection.invalidate()
            if not isinstance(error, Exception):
                raise
            logger.warning("a rollback failed; the connection is thrown away", exc_info=True)
        return was_open

    def _is_open(self) -> bool:
        connection = self._connection
        if connection is None or connection.closed or connection.invalidated:
            return True
        if not connection.in_transaction():
            return False
        # SQLAlchemy does not see a COMMIT that was sent as text; the driver does.
        driver: Any = connection.connection.driver_connection
        if hasattr(driver, "info"):
            return bool(driver.info.transaction_status)
        in_transaction = getattr(driver, "is_in_transaction", getattr(driver, "in_transaction", True))
        return bool(in_transaction() if callable(in_transaction) else in_transaction)

    def close(self, command: plan.Close) -> None:
        connection, self._connection = self._connection, None
        try:
            if connection is not None and self._take is not None:
                connection.close()
        except Exception:
            logger.warning("a connection could not be given back", exc_info=True)


class SqlalchemySource:
    """Connections from an engine; sessions, where the origin makes them, from its maker."""

    blocking = True

    def __init__(self, engine: Engine, maker: sessionmaker[Any] | None = None) -> None:
        self.dialect: sql.Dialect = dialect_of(engine.dialect.name)
        self.engine = engine
        self._maker = maker

    def open(self) -> SqlalchemyExecutor:
        take, maker = self.engine.connect, self._maker
        if maker is None:
            return SqlalchemyExecutor(self.dialect, take=take)

        def session(executor: SqlalchemyExecutor) -> Session:
            made: Session = maker(bind=executor.connection, join_transaction_mode="create_savepoint")
            executor.adopt(made)
            return made

        return SqlalchemyExecutor(self.dialect, take=take, wrap=session, through_session=True)


def join(connection: Any) -> SqlalchemyExecutor | None:
    """The executor for a connection or session of the caller."""
    match connection:
        case Connection():
            return SqlalchemyExecutor(dialect_of(connection.dialect.name), connection)
        case Session():
            return SqlalchemyExecutor(dialect_of(connection.get_bind().dialect.name), session=connection)
        case scoped_session():
            return join(connection())
        case _:
            return None


def source(origin: Any) -> SqlalchemySource | None:
    """The source for an engine or a session maker."""
    match origin:
        case Engine():
            return SqlalchemySource(origin)
        case sessionmaker():
            return SqlalchemySource(engine_of(origin.kw), origin)
        case scoped_session():
            return source(origin.session_factory)
        case _:
            return None


def engine_of(settings: Mapping[str, Any]) -> Any:
    """The one engine of a session maker."""
    if settings.get("binds"):
        raise Misuse(
            "this session maker has binds=: its classes may go to another database, outside the claim's "
            "transaction; give a maker bound to one engine"
        )
    if settings.get("bind") is None:
        raise Misuse("this session maker is bound to no engine: make it with sessionmaker(engine)")
    return settings["bind"]


def connecting(connect: Callable[[], Any]) -> SqlalchemySource:
    """Refused: an engine is what opens connections."""
    raise Misuse("give the engine or the session maker itself, not a function that opens a connection")
