"""A service on the test's own connection, its events in a list, and a database in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import iscoroutinefunction
from typing import Any

from taptwice import drivers
from taptwice.core.plan import (
    Begin,
    Close,
    Command,
    Commit,
    Join,
    Plan,
    Rollback,
    Script,
    Together,
    arun,
    ask,
    run,
)
from taptwice.drivers.base import USED_OUTSIDE
from taptwice.errors import Busy, Misuse
from taptwice.events import Event
from taptwice.http.settings import Settings
from taptwice.sql import Dialect
from taptwice.stores.memory import MemoryDatabase

SAVEPOINT = "taptwice_bound"


@contextmanager
def bound_to(once: Settings, connection: Any) -> Iterator[None]:
    """Inside this block the routes of `once` work on `connection`, whose transaction the test ends itself.

    What the edge begins is a savepoint there; what it commits is a savepoint released; what it rolls back
    goes back to one. Requests take turns, since there is one connection. Sessions of a maker that joins
    (``once.session``, `joined`) work on it too, also in routes that are not keyed.

    `connection` is what the guard takes: a connection of sqlite3, aiosqlite, psycopg or asyncpg, or one of
    SQLAlchemy's; in a transaction. A blocking one is used by other threads than the test's: open sqlite3's
    with ``check_same_thread=False``. What is deferred to the commit is never checked.
    """
    if once.bound is not None:
        raise Misuse("this Idempotency is bound to a connection already")
    with _in_place_of_its_engine(connection):
        once.bound = _BoundSource(once, connection)
        try:
            yield
        finally:
            once.bound = None


@contextmanager
def collect(once: Settings) -> Iterator[list[Event]]:
    """Inside this block every event of `once` is added to the list."""
    events: list[Event] = []
    before = once.listeners
    once.listeners = (*before, events.append)
    try:
        yield events
    finally:
        once.listeners = before


def memory() -> MemoryDatabase:
    """A database in memory, for ``Guard.transaction``; its ``asynchronous()`` is one for `AsyncGuard`.

    ``claim.connection.insert("charges", row)`` is work in the claim's transaction, and
    ``database.rows("charges")`` are those that were committed.
    """
    return MemoryDatabase()


class _Bound:
    """Commands on the test's connection: a transaction of ours is a savepoint of its."""

    def __init__(self, once: Settings, source: _BoundSource) -> None:
        self._turn = source.turn
        self._begun = False
        self._inner: Any = drivers.join(source.connection)
        _work_through_sessions(self._inner, once.origin)
        self.dialect: Dialect = self._inner.dialect

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # what SQLAlchemy's sessions join by

    @property
    def handle(self) -> Any:
        if not self._begun:
            raise Misuse(USED_OUTSIDE)
        return self._inner.handle

    def carry(self, command: Command[Any]) -> Plan[Any]:
        """What to do on the test's connection instead of this command."""
        match command:
            case Together(commands):
                replies = []
                for each in commands:
                    replies.append((yield from self.carry(each)))
                return tuple(replies)
            case Begin():
                yield from self._begin()
            case Commit():
                yield from ask(Script(f"RELEASE SAVEPOINT {SAVEPOINT}"))
                self._end()
            case Rollback() if self._begun:
                if _is_sqlalchemy(self._inner):
                    yield from ask(Rollback())  # which lets go of its sessions, and of no more
                yield from ask(Script(f"ROLLBACK TO SAVEPOINT {SAVEPOINT}"))
                yield from ask(Script(f"RELEASE SAVEPOINT {SAVEPOINT}"))
                self._end()
            case Rollback() | Close():
                pass
            case _:
                return (yield from ask(command))
        return None

    def _begin(self) -> Plan[None]:
        if not self._turn.acquire(blocking=False):
            raise Busy("another request is working on the test's connection")
        try:
            yield from ask(Join())
            yield from ask(Script(f"SAVEPOINT {SAVEPOINT}"))
            self._begun = True
        finally:
            if not self._begun:
                self._turn.release()

    def _end(self) -> None:
        self._begun = False
        self._turn.release()


class _BlockingBound(_Bound):
    def execute(self, command: Command[Any], /) -> Any:
        return run(self.carry(command), self._inner.execute)


class _AwaitingBound(_Bound):
    async def execute(self, command: Command[Any], /) -> Any:
        return await arun(self.carry(command), self._inner.execute)


class _BoundSource:
    """Where the edge takes connections from while it is bound: there is one, for whoever comes first."""

    def __init__(self, once: Settings, connection: Any) -> None:
        self.connection = connection
        self.turn = threading.Lock()
        self._once = once
        executor = drivers.join(connection)
        self.dialect: Dialect = executor.dialect
        self.blocking = not iscoroutinefunction(executor.execute)

    def open(self) -> _Bound:
        return (_BlockingBound if self.blocking else _AwaitingBound)(self._once, self)


def _is_sqlalchemy(executor: Any) -> bool:
    return hasattr(executor, "settle_first")


def _work_through_sessions(executor: Any, origin: Any) -> None:
    """Where `origin` makes sessions, the handler works through one of those, as when nothing is bound."""
    if not (_is_sqlalchemy(executor) and hasattr(origin, "configure")):
        return
    like = drivers.source(origin).open()
    ours, its = (getattr(each, "blocking", each) for each in (executor, like))
    ours._wrap, ours._through_session = its._wrap, its._through_session


@contextmanager
def _in_place_of_its_engine(connection: Any) -> Iterator[None]:
    """Sessions of a maker that joins work on this connection of SQLAlchemy's instead of on a new one."""
    connection = getattr(connection, "sync_connection", connection)
    if not type(connection).__module__.startswith("sqlalchemy.engine"):
        yield
        return
    from taptwice.http.joined import instead  # SQLAlchemy is an extra

    if not connection.in_transaction():
        raise Misuse("begin a transaction on the connection first: the test is to roll it back at its end")
    instead[connection.engine] = connection
    try:
        yield
    finally:
        del instead[connection.engine]
