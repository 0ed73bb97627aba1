"""sqlite3 of the standard library."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from taptwice import sql
from taptwice.core import plan
from taptwice.core.plan import Rows, Value
from taptwice.drivers.base import GIVEN_BACK, SAVEPOINT, USED_OUTSIDE, Blocking, logger
from taptwice.drivers.turns import Place, line_of
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


def _raise(error: sqlite3.Error, known: Callable[[BaseException], TaptwiceError | None] = ours) -> NoReturn:
    """Raise our error for one at a statement of ours, or the error itself."""
    if (ours_for_it := known(error)) is not None:
        raise ours_for_it from error
    raise error


NOTHING: Mapping[str, Value] = {}

LONGEST_BUSY_TIMEOUT = 2**31 - 1
"""Milliseconds; SQLite takes a larger number for 0."""


def busy_timeout(wait: float) -> int:
    """The busy_timeout of so many seconds."""
    return min(int(wait * 1000), LONGEST_BUSY_TIMEOUT)


class SqliteExecutor(Blocking):
    """Commands on one sqlite3 connection: the caller's, or one from `connect` at `Begin`.

    `in_line`: it stands in the line of its file before it begins, and has the turn to the end of the
    transaction. On a connection of the caller's, the end would show nowhere.
    """

    dialect: sql.Dialect = "sqlite"

    def __init__(
        self,
        connection: sqlite3.Connection | None = None,
        connect: Callable[[], sqlite3.Connection] | None = None,
        in_line: bool = False,
    ) -> None:
        self._connection = connection
        self._connect = connect
        self._in_line = in_line
        self._place: Place | None = None
        self._begun = False
        self._given_up = False

    @property
    def is_gone(self) -> bool:
        """As `Writer.is_gone`."""
        connection = self._connection
        try:
            over = self._begun and connection is not None and not connection.in_transaction
        except sqlite3.Error:  # the handler has closed it
            return True
        return over or self._given_up

    def give_up(self) -> None:
        """As `Blocking.give_up`: it waits for its turn no longer."""
        self._given_up = True
        if (place := self._place) is not None:
            place.ring()

    @property
    def handle(self) -> sqlite3.Connection:
        if self._connection is None:
            raise Misuse(USED_OUTSIDE)
        return self._connection

    def _rows(self, text: str, parameters: Mapping[str, Value] = NOTHING) -> Rows:
        try:
            cursor = (self._connection or self.handle).cursor()
            cursor.row_factory = None  # rows as they are, whatever the connection makes of them
            return tuple(cursor.execute(text, parameters).fetchall())
        except sqlite3.Error as error:
            _raise(error)

    def _run(self, text: str) -> None:
        try:
            (self._connection or self.handle).execute(text)
        except sqlite3.Error as error:
            _raise(error)

    def query(self, command: plan.Query) -> Rows:
        statement = STATEMENTS[command.statement]
        return self._rows(statement.text, statement.named(command))

    def script(self, command: plan.Script) -> None:
        self._run(command.text)

    def begin(self, command: plan.Begin) -> None:
        if self._connection is None:
            if self._connect is None:
                raise Misuse(GIVEN_BACK)
            try:
                self._connection = self._connect()
            except sqlite3.Error as error:
                raise StoreUnavailable(f"SQLite: {error}") from error
            # Python's own implicit BEGIN would come before ours, and be a deferred one.
            try:
                self._connection.isolation_level = None
            except sqlite3.Error as error:
                _raise(error)
        wait = max(command.wait, command.in_line)
        if self._in_line:
            wait = self._stand_in_line(wait)
        # Restored on our own connections, too: without write-ahead logging COMMIT waits for readers.
        self._waiting(wait, "BEGIN IMMEDIATE")
        self._begun = True

    def _stand_in_line(self, wait: float) -> float:
        """Wait for the turn; the seconds that are left. If it does not come, SQLite is asked all the same."""
        self._end_turn()  # of a transaction that the handler has ended
        file = next(file for _, name, file in self._rows("PRAGMA database_list") if name == "main")
        if file:  # else it is in memory, or temporary, and nobody else's
            self._place = Place(line_of(file), self)
            if not self._place.is_first and not self._given_up:
                # The last to close a file has SQLite write the log back and delete it: while the next one has
                # it open, nobody is the last. Connected is not enough; it is opened by the first to read.
                with suppress(TaptwiceError):
                    self._waiting(0, "SELECT 1 FROM sqlite_master LIMIT 1")
                wait = self._place.wait(wait)
        if self.is_gone:
            self._end_turn()
            raise Busy("nobody waits for this transaction any more")
        return wait

    def _end_turn(self) -> None:
        place, self._place, self._begun = self._place, None, False
        if place is not None:
            _ = place.leave()

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
        [(before,)] = self._rows("PRAGMA busy_timeout")
        wanted = busy_timeout(wait)
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
        connection = self.handle
        if not connection.in_transaction:
            raise Torn
        try:
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            _raise(error, at_commit)
        self._end_turn()

    def rollback(self, command: plan.Rollback) -> bool:
        try:
            if self._connection is not None and not self._connection.in_transaction:
                return False
            if self._connection is not None:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            logger.warning("a rollback on SQLite failed", exc_info=True)
        finally:
            self._end_turn()
            self._given_up = False
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

    def open(self) -> SqliteExecutor:
        return SqliteExecutor(connect=self._connect, in_line=True)


def join(connection: Any) -> SqliteExecutor | None:
    """The executor for a connection of the caller."""
    return SqliteExecutor(connection) if isinstance(connection, sqlite3.Connection) else None


def source(origin: Any) -> None:
    """A connection serves one transaction at a time: it is no source."""


def connecting(connect: Callable[[], sqlite3.Connection]) -> SqliteSource:
    """A source that opens a connection for each transaction."""
    return SqliteSource(connect)
