"""What the crash tests attempt, on which database, and what must hold afterwards.

An attempt is one whole request as a plan: claim, two effects, answer. Effects and answers bear the number
of their attempt, so that it can be told which attempt an effect or a record belongs to.
"""

from __future__ import annotations

import itertools
import pathlib
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import psycopg
from psycopg_pool import ConnectionPool

from taptwice import drivers, sql
from taptwice.core import fingerprint
from taptwice.core.model import Answer, Keyed
from taptwice.core.plan import Begin, Close, Command, Commit, Plan, Rollback, ask, run
from taptwice.drivers import Source
from taptwice.drivers.sqlite import SqliteSource
from taptwice.errors import Busy, Contention, InFlight, KeyReused, StoreUnavailable
from taptwice.faults import Crash
from taptwice.flows.transaction import (
    Asked,
    Claimed,
    Concluded,
    Replayed,
    abandon,
    conclude,
    join,
    open_claim,
    settle,
    withdraw,
)
from taptwice.stores.memory import MemoryDatabase
from taptwice.stores.sql import SqlStore

# --- the user's work, as commands ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Effect(Command[None]):
    """A row of the user's, written through the handle of the claim."""

    keyed: Keyed
    attempt: int


@dataclass(frozen=True, slots=True)
class Tear(Command[None]):
    """The handler ends the transaction itself."""


class Working:
    """An executor that knows these too."""

    def __init__(self, inner: Any) -> None:
        self.dialect = inner.dialect
        self._inner = inner

    @property
    def handle(self) -> Any:
        return self._inner.handle

    def execute(self, command: Command[Any], /) -> Any:
        if isinstance(command, Effect):
            return insert_effect(self.handle, command)
        if isinstance(command, Tear):
            memory = self.dialect == "postgresql" and not isinstance(self.handle, psycopg.Connection)
            return self.handle.commit() if memory else self.handle.execute("COMMIT")
        return self._inner.execute(command)


def insert_effect(handle: Any, effect: Effect) -> None:
    row = (effect.keyed.id, effect.attempt)
    if isinstance(handle, sqlite3.Connection):
        handle.execute("INSERT INTO charges VALUES (?, ?)", row)
    elif isinstance(handle, psycopg.Connection):
        handle.execute("INSERT INTO charges VALUES (%s, %s)", row)
    else:
        handle.insert("charges", row)


class Joining(Working):
    """The user's own transaction: Begin, Commit, Rollback and Close are his, the rest joins it."""

    def __init__(self, database: Database) -> None:
        self.dialect = database.source.dialect
        self._database = database
        self._inner: Any = None

    def execute(self, command: Command[Any], /) -> Any:
        if isinstance(command, Begin):
            self._inner = drivers.join(self._database.begin())
        elif isinstance(command, Commit | Rollback | Close):
            if self._inner is not None:
                self._database.end(self._inner.handle, isinstance(command, Commit))
                self._inner = None
        else:
            return super().execute(command)
        return None


@dataclass
class Opening:
    """A source from a function."""

    dialect: sql.Dialect
    opening: Callable[[], Any]
    blocking: bool = True

    def open(self) -> Any:
        return self.opening()


# --- databases ----------------------------------------------------------------------------------------------


class Database:
    """Where the attempts happen."""

    source: Source

    def working(self, joined: bool) -> Source:
        return Opening(self.source.dialect, lambda: Joining(self) if joined else Working(self.source.open()))

    def begin(self) -> Any:
        """A connection, or executor, in a transaction of the user's."""
        raise NotImplementedError

    def end(self, connection: Any, commit: bool) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def effects(self, keyed: Keyed) -> list[int]:
        """The committed effects of a key: the numbers of their attempts."""
        raise NotImplementedError

    def records(self, keyed: Keyed) -> list[int]:
        """The committed records of a key: the numbers of their attempts."""
        raise NotImplementedError


class Memory(Database):
    def __init__(self, partitioned: bool = False) -> None:
        # Nobody waits here: all of these tests run in one thread.
        self.database = MemoryDatabase(lock_timeout=0, partitioned=partitioned)
        self.source = self.database

    def begin(self) -> Any:
        executor = self.database.open()
        executor.execute(Begin())
        return executor

    def end(self, connection: Any, commit: bool) -> None:
        (connection.commit if commit else connection.rollback)()

    def effects(self, keyed: Keyed) -> list[int]:
        return [attempt for identity, attempt in self.database.rows("charges") if identity == keyed.id]

    def records(self, keyed: Keyed) -> list[int]:
        return [int(each.content[-1]) for each in self.database.records if each.id == keyed.id]


CHARGES = "CREATE TABLE charges (id {}, attempt integer); CREATE INDEX charges_id ON charges (id)"


class Sqlite(Database):
    def __init__(self, folder: pathlib.Path, create: bool = True) -> None:
        self._path = folder / "crash.db"
        self.source = SqliteSource(self.connect)
        self._reader = self.connect()
        if create:
            self._reader.executescript("PRAGMA journal_mode = wal;" + CHARGES.format("blob"))
            for migration in sql.migrations("sqlite"):
                self._reader.executescript(migration.text)
        self._reader.isolation_level = None

    def connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path)
        connection.execute("PRAGMA synchronous = off")
        return connection

    def begin(self) -> Any:
        connection = self.connect()
        connection.isolation_level = None
        connection.execute("PRAGMA busy_timeout = 0")
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            connection.close()
            raise Busy from error
        return connection

    def end(self, connection: Any, commit: bool) -> None:
        (connection.commit if commit else connection.rollback)()
        connection.close()

    def effects(self, keyed: Keyed) -> list[int]:
        found = self._reader.execute("SELECT attempt FROM charges WHERE id = ?", (keyed.id,))
        return [attempt for (attempt,) in found.fetchall()]

    def records(self, keyed: Keyed) -> list[int]:
        found = self._reader.execute("SELECT body FROM taptwice_records WHERE id = ?", (keyed.id,))
        return [int(body) for (body,) in found.fetchall()]

    def close(self) -> None:
        self._reader.close()


class Postgres(Database):
    def __init__(self, url: str, create: bool = True, partitioned: bool = False) -> None:
        self._reader = psycopg.connect(url, autocommit=True)
        if create:
            self._reader.execute(CHARGES.format("bytea"))
            optional = (sql.partitioning("postgresql", "day"),) if partitioned else ()
            for migration in (*sql.migrations("postgresql"), *optional):
                self._reader.execute(migration.text.encode())
        self._pool = ConnectionPool(url, min_size=2, max_size=4, open=True)
        self.source = drivers.source(self._pool)

    def begin(self) -> Any:
        return self._pool.getconn()  # psycopg begins a transaction at the first statement

    def end(self, connection: Any, commit: bool) -> None:
        (connection.commit if commit else connection.rollback)()
        self._pool.putconn(connection)

    def effects(self, keyed: Keyed) -> list[int]:
        found = self._reader.execute("SELECT attempt FROM charges WHERE id = %s", (keyed.id,))
        return [attempt for (attempt,) in found.fetchall()]

    def records(self, keyed: Keyed) -> list[int]:
        found = self._reader.execute(
            "SELECT body FROM taptwice_records WHERE id = encode(%s, 'hex')::uuid", (keyed.id,)
        )
        return [int(body) for (body,) in found.fetchall()]

    def close(self) -> None:
        self._pool.close()
        self._reader.close()


# --- what is attempted --------------------------------------------------------------------------------------


class Flow:
    """How a request is served. The mutants override one thing of it."""

    store: ClassVar[type[SqlStore]] = SqlStore

    def asked(self, account: str, key: str, request: bytes, wait: float, savepoint: bool) -> Asked:
        return Asked(Keyed(account, key), fingerprint.of_bytes(request), 3600, wait, savepoint)

    def claim(self, store: SqlStore, asked: Asked, answer: Answer) -> Plan[Claimed | Replayed]:
        return open_claim(store, asked)

    def conclude(
        self, store: SqlStore, asked: Asked, claimed: Claimed, answer: Answer, undo: bool
    ) -> Plan[Concluded]:
        return conclude(store, asked, claimed, answer, undo)


DESIGNED = Flow()


@dataclass(frozen=True)
class Case:
    """A way in which an attempt may go."""

    raises: bool = False
    savepoint: bool = True
    joined: bool = False
    tears: bool = False
    wait: float = 0

    def __str__(self) -> str:
        names = [name for name in ("raises", "joined", "tears") if getattr(self, name)]
        return (
            "-".join([*names, *([] if self.savepoint else ["bare"]), *(["waits"] if self.wait else [])])
            or "kept"
        )


CASES = (
    Case(),
    Case(savepoint=False),
    Case(raises=True),
    Case(raises=True, savepoint=False),
    Case(joined=True),
    Case(joined=True, raises=True),
)

_fresh = itertools.count(1)

DECLINED = Answer(402, (), b"declined")


class World:
    """A key of its own in a database: callable as an attempt, with workers as a game."""

    def __init__(
        self,
        database: Database,
        case: Case = Case(),
        flow: Flow = DESIGNED,
        workers: int = 0,
        key: str | None = None,
        first: int = 1,
    ) -> None:
        self.database, self.case, self.flow = database, case, flow
        self.key = key or f"key-{next(_fresh)}"
        self.source = database.working(case.joined)
        self.store = flow.store(database.source.dialect)
        self._attempts = itertools.count(first)
        self.workers: Sequence[tuple[Plan[Any], Any]] = [
            (self.plan(), self.source.open()) for _ in range(workers)
        ]

    def __call__(self, faulty: Callable[[Any], Any] = lambda target: target) -> Answer:
        return run(self.plan(), faulty(self.source).open().execute)

    def plan(self, account: str = "anna", request: bytes = b"pay 5") -> Plan[Answer]:
        asked = self.flow.asked(account, self.key, request, self.case.wait, self.case.savepoint)
        attempt = next(self._attempts)
        answer = Answer(402 if self.case.raises else 201, (), str(attempt).encode())
        work = Effect(Keyed(account, self.key), attempt)
        return (self._joined if self.case.joined else self._served)(asked, answer, work)

    def _served(self, asked: Asked, answer: Answer, work: Effect) -> Plan[Answer]:
        claimed = yield from self.flow.claim(self.store, asked, answer)
        if isinstance(claimed, Replayed):
            return claimed.record.answer
        try:
            yield from ask(work)
            if self.case.tears:
                yield from ask(Tear())
            yield from ask(work)
        except BaseException:
            yield from abandon()
            raise
        done = yield from self.flow.conclude(self.store, asked, claimed, answer, self.case.raises)
        return done.answer

    def _joined(self, asked: Asked, answer: Answer, work: Effect) -> Plan[Answer]:
        """What the guard does, between the BEGIN and the COMMIT of the caller."""
        try:
            yield from ask(Begin(10))
            claimed = yield from join(self.store, asked)
            if isinstance(claimed, Replayed):
                answer = claimed.record.answer
            else:
                yield from ask(work)
                yield from ask(work)
                if self.case.raises:
                    answer = DECLINED
                    yield from withdraw()
                else:
                    yield from settle(self.store, asked, claimed, answer)
            yield from ask(Commit())
        finally:
            yield from abandon()
        return answer

    # --- what must hold

    def state(self, account: str = "anna") -> list[str]:
        """What is wrong with the effects and records of this key as they are now."""
        keyed = Keyed(account, self.key)
        effects = self.database.effects(keyed)
        records = self.database.records(self.flow.asked(account, self.key, b"", 0, True).keyed)
        wrong = []
        if self.case.raises:
            wrong += ["an effect that was to be undone"] if effects else []
        else:
            wrong += ["more than one effect"] if len(set(effects)) > 1 else []
            wrong += ["half an effect"] if any(effects.count(each) != 2 for each in effects) else []
            wrong += ["an effect without a record"] if set(effects) - set(records) else []
            wrong += ["a record without its effect"] if set(records) - set(effects) else []
        wrong += ["more than one record"] if len(records) > 1 else []
        return wrong

    def violations(self, outcomes: Sequence[Any]) -> list[str]:
        """What is wrong after these outcomes, then after a clean retry, another one, and strangers."""
        wrong = self.state()
        try:
            final = self()
        except Exception as error:
            return [*wrong, f"the retry failed: {error!r}"]
        wrong += self.state()
        for outcome in (*outcomes, self()):
            if isinstance(outcome, Answer):
                wrong += ["answers differ"] if outcome != final else []
            elif not isinstance(outcome, Crash | StoreUnavailable | InFlight | Contention):
                wrong.append(f"a strange outcome: {outcome!r}")
        wrong += self.state()
        if final != DECLINED:
            try:
                _ = run(self.plan(request=b"pay 6"), self.source.open().execute)
                wrong.append("another request got the answer of this one")
            except KeyReused:
                pass
            if run(self.plan(account="bert"), self.source.open().execute) == final:
                wrong.append("another account got the answer of this one")
            wrong += self.state("bert")
        return wrong
