"""sqlite3 of the standard library."""

from __future__ import annotations

import sqlite3
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from taptwice import sql
from taptwice.core import plan
from taptwice.core.plan import Rows
from taptwice.drivers import system
from taptwice.drivers.base import GIVEN_BACK, SAVEPOINT, USED_OUTSIDE, Blocking, logger
from taptwice.errors import (
    Busy,
    ConstraintViolated,
    Contention,
    Misuse,
    StoreUnavailable,
    TaptwiceError,
    Torn,
)

STATEMENTS = sql.compile_all("sqlite", lambda name, position: f":{name}")

_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_UNAVAILABLE = {
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_READONLY,
}


def ours(error: BaseException) -> TaptwiceError | None:
    """Our error for an error of sqlite3 at a statement of ours; None when it is the user's affair."""
    code = getattr(error, "sqlite_errorcode", None)
    text = str(error)
    if code is None:
        if "created in a thread" in text:
            return Misuse("the connection moves between threads: open it with check_same_thread=False")
        return Misuse(f"sqlite3 refused: {text}")
    if code == sqlite3.SQLITE_BUSY_SNAPSHOT:
        return Contention(
            "this transaction read before another one wrote, and can no longer write: roll back and run it "
            "again; begin it with BEGIN IMMEDIATE and it waits for its turn instead"
        )
    if "SQL statements in progress" in text:
        return Misuse(
            "a statement of the handler's is still open, and SQLite cannot commit under it: fetch its rows "
            "(INSERT … RETURNING has some) or close its cursor"
        )
    if code & 0xFF in _BUSY:
        return Busy(
            "another transaction is writing to this SQLite database; if yours has read already, begin it "
            "with BEGIN IMMEDIATE"
        )
    if code & 0xFF in _UNAVAILABLE:
        return StoreUnavailable(f"SQLite: {text}")
    if code & 0xFF == sqlite3.SQLITE_CONSTRAINT:
        return ConstraintViolated(text)
    if "no such table: taptwice" in text or "no such column" in text:
        return Misuse(
            f"{text}: run `taptwice init` against this database (or apply the output of `taptwice sql`)"
        )
    if "no such savepoint" in text:
        return Torn()
    return None


def at_commit(error: BaseException) -> TaptwiceError | None:
    """Our error for a COMMIT that SQLite refused; None when the user's work is at fault."""
    known = ours(error)
    return None if isinstance(known, ConstraintViolated) else known


@contextmanager
def asking(known: Callable[[BaseException], TaptwiceError | None] = ours) -> Iterator[None]:
    """Around statements of ours."""
    try:
        yield
    except sqlite3.Error as error:
        if (ours_for_it := known(error)) is not None:
            raise ours_for_it from error
        raise


PATIENCE = 0.5
"""Seconds for which those of one process believe each other that somebody is writing; then they try."""


class Writer:
    """Who of this process is writing. It spares the others a connection for most tries that must fail.

    Most, not all: SQLite alone knows who may write, and an origin that is a function may open several
    databases.
    """

    def __init__(self) -> None:
        self._last: weakref.ref[Any] | None = None
        self._tried = 0.0

    def begins(self, executor: Any, wait: float) -> None:
        """Raises `Busy` for one that does not wait, while another is at it."""
        last = None if self._last is None else self._last()
        now = system.now()
        if not wait and last is not None and last.is_writing and now < self._tried + PATIENCE:
            raise Busy("another transaction of this process is writing to this SQLite database")
        self._last, self._tried = weakref.ref(executor), now


class SqliteExecutor(Blocking):
    """Commands on one sqlite3 connection: the caller's, or one from `connect` at `Begin`."""

    dialect: sql.Dialect = "sqlite"

    def __init__(
        self,
        connection: sqlite3.Connection | None = None,
        connect: Callable[[], sqlite3.Connection] | None = None,
        writer: Writer | None = None,
    ) -> None:
        self._connection = connection
        self._connect = connect
        self._writer = writer

    @property
    def has_connection(self) -> bool:
        return self._connection is not None

    @property
    def is_writing(self) -> bool:
        """False, too, when the handler ended the transaction by itself."""
        connection = self._connection
        try:
            return connection is not None and connection.in_transaction
        except sqlite3.Error:  # the handler has closed it
            return False

    @property
    def handle(self) -> sqlite3.Connection:
        if self._connection is None:
            raise Misuse(USED_OUTSIDE)
        return self._connection

    def _run(self, text: str, parameters: dict[str, Any] | None = None) -> Rows:
        try:  # not `asking()`: this is the hot path
            cursor = self.handle.cursor()
            cursor.row_factory = None  # rows as they are, whatever the connection makes of them
            return tuple(cursor.execute(text, parameters or {}).fetchall())
        except sqlite3.Error as error:
            if (known := ours(error)) is not None:
                raise known from error
            raise

    def query(self, command: plan.Query) -> Rows:
        statement = STATEMENTS[command.statement]
        return self._run(statement.text, statement.named(command))

    def script(self, command: plan.Script) -> None:
        self._run(command.text)

    def begin(self, command: plan.Begin) -> None:
        if self._connection is None:
            if self._connect is None:
                raise Misuse(GIVEN_BACK)
            if self._writer is not None:
                self._writer.begins(self, command.wait)
            try:
                self._connection = self._connect()
            except sqlite3.Error as error:
                raise StoreUnavailable(f"SQLite: {error}") from error
            # Python's own implicit BEGIN would come before ours, and be a deferred one.
            with asking():
                self._connection.isolation_level = None
        # Restored on our own connections, too: without write-ahead logging COMMIT waits for readers.
        self._waiting(command.wait, "BEGIN IMMEDIATE")

    def join(self, command: plan.Join) -> None:
        connection = self.handle
        if connection.in_transaction:
            self._waiting(command.wait, STATEMENTS["lock"].text)
        elif connection.isolation_level is None:
            raise Misuse("a claim joins a transaction, and none is open: begin it with BEGIN IMMEDIATE")
        else:
            # Python would begin one before the first write; this is that first write.
            self._waiting(command.wait, "BEGIN IMMEDIATE")

    def _waiting(self, wait: float, statement: str) -> None:
        """Let a statement wait for its turn to write; the connection's own busy_timeout is restored."""
        [(before,)] = self._run("PRAGMA busy_timeout")
        wanted = int(wait * 1000)
        if before == wanted:
            self._run(statement)
            return
        self._run(f"PRAGMA busy_timeout = {wanted}")
        try:
            self._run(statement)
        finally:
            self._run(f"PRAGMA busy_timeout = {int(before)}")

    def savepoint(self, command: plan.Savepoint) -> None:
        self._run(f"SAVEPOINT {SAVEPOINT}")

    def undo(self, command: plan.Undo) -> None:
        self._run(f"ROLLBACK TO {SAVEPOINT}")
        self._run(f"RELEASE {SAVEPOINT}")

    def release(self, command: plan.Release) -> None:
        self._run(f"RELEASE {SAVEPOINT}")

    def commit(self, command: plan.Commit) -> None:
        if not self.handle.in_transaction:
            raise Torn
        with asking(at_commit):
            self.handle.execute("COMMIT")

    def rollback(self, command: plan.Rollback) -> bool:
        try:
            if self._connection is not None and not self._connection.in_transaction:
                return False
            if self._connection is not None:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            logger.warning("a rollback on SQLite failed", exc_info=True)
        return True

    def close(self, command: plan.Close) -> None:
        connection, self._connection = self._connection, None
        try:
            if connection is not None and self._connect is not None:
                connection.close()
        except sqlite3.Error:
            logger.warning("a connection to SQLite could not be closed", exc_info=True)


class SqliteSource:
    """Connections from a function, one for each transaction."""

    dialect: sql.Dialect = "sqlite"
    blocking = True

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._writer = Writer()

    def open(self) -> SqliteExecutor:
        return SqliteExecutor(connect=self._connect, writer=self._writer)


def join(connection: Any) -> SqliteExecutor | None:
    """The executor for a connection of the caller."""
    return SqliteExecutor(connection) if isinstance(connection, sqlite3.Connection) else None


def source(origin: Any) -> None:
    """A connection serves one transaction at a time: it is no source."""


def connecting(connect: Callable[[], sqlite3.Connection]) -> SqliteSource:
    """A source that opens a connection for each transaction."""
    return SqliteSource(connect)
