"""One kit for each driver: the same few verbs, so that one suite says what holds on all of them.

A kit's blocking plans run in a thread each; so tests are written once, awaiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiosqlite
import asyncpg
import psycopg
import psycopg_pool
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from taptwice import drivers, sql
from taptwice.core.fingerprint import of_value
from taptwice.core.model import Answer, Keyed
from taptwice.core.plan import Begin, Command, Plan, Sleep, Together, arun, run
from taptwice.drivers import aiosqlite as aiosqlite_driver
from taptwice.drivers import sqlite as sqlite_driver
from taptwice.flows.transaction import Asked, Claimed, Concluded, conclude, open_claim
from taptwice.stores.sql import SqlStore

Result = TypeVar("Result")
Rows = list[tuple[Any, ...]]

POOL = 4
"""Connections in each pool: few, so that one that is not given back is missed soon."""

TABLES = (
    "CREATE TABLE work (n integer NOT NULL)",
    "CREATE TABLE parents (id integer PRIMARY KEY)",
    "CREATE TABLE children (parent integer REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED)",
    "CREATE TABLE singles (n integer UNIQUE{deferred})",
)

DEFERRED = {"postgresql": " DEFERRABLE INITIALLY DEFERRED", "sqlite": ""}


def statements_of(dialect: sql.Dialect) -> list[str]:
    """Everything that makes the tables: those of taptwice, then those of the tests."""
    ours = [each.format(deferred=DEFERRED[dialect]) for each in TABLES]
    return [*(each for step in sql.migrations(dialect) for each in step.statements), *ours]


@dataclass
class Kit:
    """A driver, ready to be used. `place` is the URL of a database, or the path of one of SQLite."""

    name: str
    place: str
    dialect: sql.Dialect = "postgresql"
    blocking: bool = False
    source: Any = None
    bouncer: bool = False
    """Behind PgBouncer in transaction mode, where a prepared statement is on another server the next time."""
    in_line: bool = False
    """Whoever waits for SQLite's one writer stands in line."""
    on_command: list[Callable[[Command[Any]], None]] = field(default_factory=list)

    # --- plans ------------------------------------------------------------------------------------------

    async def run(self, plan: Plan[Result], executor: Any) -> Result:
        def noting(command: Command[Any]) -> Any:
            for note in self.on_command:
                note(command)
            return executor.execute(command)

        if self.blocking:
            result: Result = await called(run, plan, noting)
            return result
        return await arun(plan, noting)

    # --- the user's side --------------------------------------------------------------------------------

    async def work(self, handle: Any, text: str) -> Rows:
        """Run a statement of the user's on the claim's handle."""
        raise NotImplementedError

    @asynccontextmanager
    async def caller(self, isolation: str | None = None, begin: bool = True) -> AsyncIterator[Any]:
        """A connection or session of the caller's, in a transaction that commits at the end of the block."""
        raise NotImplementedError
        yield

    async def bare(self, text: str) -> None:
        """The user's statement in a transaction of the pool's, without taptwice."""
        raise NotImplementedError

    def taken(self) -> int:
        """How many connections are out of the pool."""
        return 0

    async def start(self) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        raise NotImplementedError

    # --- from outside -----------------------------------------------------------------------------------

    def ask(self, text: str) -> Rows:
        """What is committed, seen by a connection of its own."""
        if self.dialect == "sqlite":
            with contextlib.closing(sqlite3.connect(self.place)) as outside:
                return outside.execute(text).fetchall()
        with psycopg.connect(self.place, autocommit=True) as connection:
            cursor = connection.execute(text)
            return cursor.fetchall() if cursor.description else []

    def count(self, table: str) -> int:
        [(number,)] = self.ask(f"SELECT count(*) FROM {table}")
        return int(number)


THREADS = ThreadPoolExecutor(64, thread_name_prefix="kits")


async def called(call: Callable[..., Any], *arguments: Any) -> Any:
    """A blocking call, in a thread: it may wait for another task of the same test.

    The event loop's own threads are too few: those who wait for a key would leave none to who holds it.
    """
    return await asyncio.get_running_loop().run_in_executor(THREADS, call, *arguments)


# --- SQLite -------------------------------------------------------------------------------------------------


class Enforcing(sqlite3.Connection):
    """A connection that checks foreign keys, which SQLite does only when told to."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.execute("PRAGMA foreign_keys = ON")


class SqliteKit(Kit):
    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.place, check_same_thread=False, isolation_level=None, factory=Enforcing)

    async def start(self) -> None:
        self.source = sqlite_driver.connecting(self.connect)

    async def stop(self) -> None:
        pass

    async def work(self, handle: Any, text: str) -> Rows:
        return list(await called(lambda: handle.execute(text).fetchall()))

    @asynccontextmanager
    async def caller(self, isolation: str | None = None, begin: bool = True) -> AsyncIterator[Any]:
        connection = self.connect()
        try:
            if begin:
                await called(connection.execute, isolation or "BEGIN IMMEDIATE")
            yield connection
            connection.commit()
        finally:
            connection.close()


class AiosqliteKit(Kit):
    async def start(self) -> None:
        self.source = aiosqlite_driver.connecting(lambda: aiosqlite.connect(self.place, factory=Enforcing))

    async def stop(self) -> None:
        pass

    async def work(self, handle: Any, text: str) -> Rows:
        async with handle.execute(text) as cursor:
            return list(await cursor.fetchall())

    @asynccontextmanager
    async def caller(self, isolation: str | None = None, begin: bool = True) -> AsyncIterator[Any]:
        async with aiosqlite.connect(self.place, isolation_level=None) as connection:
            if begin:
                await connection.execute(isolation or "BEGIN IMMEDIATE")
            yield connection
            await connection.commit()


# --- PostgreSQL ---------------------------------------------------------------------------------------------


class PsycopgKit(Kit):
    pool: psycopg_pool.ConnectionPool[Any]

    async def start(self) -> None:
        self.pool = psycopg_pool.ConnectionPool(
            self.place,
            min_size=0,
            max_size=POOL,
            open=True,
            timeout=2,
            reconnect_timeout=0.5,
            kwargs={"prepare_threshold": None} if self.bouncer else {},
        )
        self.source = drivers.source(self.pool)

    async def stop(self) -> None:
        await called(self.pool.close)

    async def work(self, handle: Any, text: str) -> Rows:
        def ask() -> Rows:
            cursor = handle.execute(text)
            return cursor.fetchall() if cursor.description else []

        return list(await called(ask))

    @asynccontextmanager
    async def caller(self, isolation: str | None = None, begin: bool = True) -> AsyncIterator[Any]:
        with psycopg.connect(self.place, autocommit=True) as connection:
            if not begin:
                yield connection
                return
            connection.isolation_level = _LEVELS[isolation]
            with connection.transaction():
                yield connection

    def taken(self) -> int:
        stats = self.pool.get_stats()
        return stats["pool_size"] - stats["pool_available"]

    async def bare(self, text: str) -> None:
        def work() -> None:
            with self.pool.connection() as connection, connection.transaction():
                connection.execute(text)

        await called(work)


class AsyncPsycopgKit(Kit):
    pool: psycopg_pool.AsyncConnectionPool[Any]

    async def start(self) -> None:
        self.pool = psycopg_pool.AsyncConnectionPool(
            self.place,
            min_size=0,
            max_size=POOL,
            open=False,
            timeout=2,
            reconnect_timeout=0.5,
            kwargs={"prepare_threshold": None} if self.bouncer else {},
        )
        await self.pool.open()
        self.source = drivers.source(self.pool)

    async def stop(self) -> None:
        await self.pool.close()

    async def work(self, handle: Any, text: str) -> Rows:
        cursor = await handle.execute(text)
        return list(await cursor.fetchall()) if cursor.description else []

    @asynccontextmanager
    async def caller(self, isolation: str | None = None, begin: bool = True) -> AsyncIterator[Any]:
        async with await psycopg.AsyncConnection.connect(self.place, autocommit=True) as connection:
            if not begin:
                yield connection
                return
            await connection.set_isolation_level(_LEVELS[isolation])
            async with connection.transaction():
                yield connection

    def taken(self) -> int:
        stats = self.pool.get_stats()
        return stats["pool_size"] - stats["pool_available"]

    async def bare(self, text: str) -> None:
        async with self.pool.connection() as connection, connection.transaction():
            await connection.execute(text)


_LEVELS: dict[str | None, psycopg.IsolationLevel | None] = {
    None: None,
    "repeatable_read": psycopg.IsolationLevel.REPEATABLE_READ,
    "serializable": psycopg.IsolationLevel.SERIALIZABLE,
}


class AsyncpgKit(Kit):
    pool: Any

    async def start(self) -> None:
        options = {"statement_cache_size": 0} if self.bouncer else {}
        self.pool = await asyncpg.create_pool(self.place, min_size=0, max_size=POOL, **options)
        self.source = drivers.source(self.pool)

    async def stop(self) -> None:
        await self.pool.close()

    async def work(self, handle: Any, text: str) -> Rows:
        if text.startswith("SELECT"):
            return [tuple(row) for row in await handle.fetch(text)]
        await handle.execute(text)
        return []

    @asynccontextmanager
    async def caller(self, isolation: str | None = None, begin: bool = True) -> AsyncIterator[Any]:
        connection = await asyncpg.connect(self.place)
        try:
            if not begin:
                yield connection
                return
            async with connection.transaction(isolation=isolation):
                yield connection
        finally:
            await connection.close()

    def taken(self) -> int:
        return int(self.pool.get_size()) - int(self.pool.get_idle_size())

    async def bare(self, text: str) -> None:
        async with self.pool.acquire() as connection, connection.transaction():
            await connection.execute(text)


# --- SQLAlchemy ---------------------------------------------------------------------------------------------


@dataclass
class SqlalchemyKit(Kit):
    driver: str = ""
    sessions: bool = False
    engine: Any = None
    maker: Any = None

    @property
    def url(self) -> str:
        place = self.place.partition(":")[2] if self.dialect == "postgresql" else f"///{self.place}"
        return f"{self.dialect}+{self.driver}:{place}"

    @property
    def options(self) -> dict[str, Any]:
        unprepared = {"psycopg": {"prepare_threshold": None}, "asyncpg": {"statement_cache_size": 0}}
        connect = unprepared[self.driver] if self.bouncer else {}
        return {"pool_size": POOL, "max_overflow": 0, "pool_timeout": 5, "connect_args": connect}

    def _enforce_foreign_keys(self, engine: sqlalchemy.Engine) -> None:
        if self.dialect == "sqlite":

            @sqlalchemy.event.listens_for(engine, "connect")
            def connected(connection: Any, _: Any) -> None:
                connection.execute("PRAGMA foreign_keys = ON")

    async def start(self) -> None:
        self.engine = sqlalchemy.create_engine(self.url, **self.options)
        self._enforce_foreign_keys(self.engine)
        self.maker = sessionmaker(self.engine)
        self.source = drivers.source(self.maker if self.sessions else self.engine)

    async def stop(self) -> None:
        self.engine.dispose()

    async def work(self, handle: Any, text: str) -> Rows:
        def ask() -> Rows:
            result = handle.execute(sqlalchemy.text(text))
            return list(map(tuple, result)) if result.returns_rows else []

        return list(await called(ask))

    @asynccontextmanager
    async def caller(self, isolation: str | None = None, begin: bool = True) -> AsyncIterator[Any]:
        level = _sqlalchemy_level(isolation, begin)
        engine = self.engine.execution_options(isolation_level=level) if level else self.engine
        with sessionmaker(engine)() if self.sessions else engine.connect() as connection:
            if self.dialect == "sqlite" and isolation:
                connection.execute(sqlalchemy.text(isolation))
            yield connection
            connection.commit()

    async def bare(self, text: str) -> None:
        def work() -> None:
            with self.maker.begin() if self.sessions else self.engine.begin() as connection:
                connection.execute(sqlalchemy.text(text))

        await called(work)

    def taken(self) -> int:
        return int(self.engine.pool.checkedout())


class AsyncSqlalchemyKit(SqlalchemyKit):
    async def start(self) -> None:
        self.engine = create_async_engine(self.url, **self.options)
        self._enforce_foreign_keys(self.engine.sync_engine)
        self.maker = async_sessionmaker(self.engine)
        self.source = drivers.source(self.maker if self.sessions else self.engine)

    async def stop(self) -> None:
        await self.engine.dispose()

    async def work(self, handle: Any, text: str) -> Rows:
        result = await handle.execute(sqlalchemy.text(text))
        return list(map(tuple, result)) if result.returns_rows else []

    @asynccontextmanager
    async def caller(self, isolation: str | None = None, begin: bool = True) -> AsyncIterator[Any]:
        level = _sqlalchemy_level(isolation, begin)
        engine = self.engine.execution_options(isolation_level=level) if level else self.engine
        async with async_sessionmaker(engine)() if self.sessions else engine.connect() as connection:
            if self.dialect == "sqlite" and isolation:
                await connection.execute(sqlalchemy.text(isolation))
            yield connection
            await connection.commit()

    async def bare(self, text: str) -> None:
        async with self.maker.begin() if self.sessions else self.engine.begin() as connection:
            await connection.execute(sqlalchemy.text(text))


def _sqlalchemy_level(isolation: str | None, begin: bool) -> str | None:
    if not begin:
        return "AUTOCOMMIT"
    return isolation.replace("_", " ").upper() if isolation and "BEGIN" not in isolation else None


POSTGRES: dict[str, Callable[[str], Kit]] = {
    "psycopg": lambda url: PsycopgKit("psycopg", url, blocking=True),
    "psycopg-async": lambda url: AsyncPsycopgKit("psycopg-async", url),
    "asyncpg": lambda url: AsyncpgKit("asyncpg", url),
}
SQLITE: dict[str, Callable[[str], Kit]] = {
    "sqlite3": lambda path: SqliteKit("sqlite3", path, "sqlite", blocking=True, in_line=True),
    "aiosqlite": lambda path: AiosqliteKit("aiosqlite", path, "sqlite", in_line=True),
}


def _sqlalchemy(dialect: sql.Dialect, driver: str, sessions: bool, awaiting: bool) -> None:
    kind = ("async " if awaiting else "") + ("session" if sessions else "engine")
    name = f"sqlalchemy-{kind.replace(' ', '-')}-{driver}"
    make = AsyncSqlalchemyKit if awaiting else SqlalchemyKit
    known = POSTGRES if dialect == "postgresql" else SQLITE
    known[name] = lambda place: make(
        name, place, dialect, blocking=not awaiting, driver=driver, sessions=sessions
    )


for _sessions in (False, True):
    _sqlalchemy("postgresql", "psycopg", _sessions, awaiting=False)
    _sqlalchemy("postgresql", "psycopg", _sessions, awaiting=True)
    _sqlalchemy("postgresql", "asyncpg", _sessions, awaiting=True)
    _sqlalchemy("sqlite", "pysqlite", _sessions, awaiting=False)
    _sqlalchemy("sqlite", "aiosqlite", _sessions, awaiting=True)


async def until(holds: Callable[[], object], what: str) -> None:
    """Wait for something that has no signal of its own: what a pool does in its own thread, or a server."""
    end = asyncio.get_running_loop().time() + 20
    while not await asyncio.to_thread(holds):
        assert asyncio.get_running_loop().time() < end, f"waited in vain: {what}"
        await asyncio.sleep(0.005)


def on(names: Iterable[str]) -> pytest.MarkDecorator:
    """Run a test, or all of a module, on these kits."""
    return pytest.mark.parametrize("kit", list(names), indirect=True)


on_all = on([*SQLITE, *POSTGRES])
on_postgres = on(POSTGRES)
on_sqlite = on(SQLITE)


def asked(key: str = "key", request: object = "charge", wait: float = 0.0, savepoint: bool = True) -> Asked:
    """What the tests ask for."""
    return Asked(Keyed("account", key), of_value(request), 3600.0, wait, savepoint)


DONE = Answer(201, (("content-type", "application/json"), ("x", "1"), ("x", "2")), b'{"a":1}')


async def claim(kit: Kit, asking: Asked, executor: Any = None) -> tuple[Any, Any]:
    executor = executor or kit.source.open()
    return executor, await kit.run(open_claim(SqlStore(kit.dialect), asking), executor)


async def finish(
    kit: Kit, asking: Asked, executor: Any, claimed: Claimed, answer: Answer = DONE, undo: bool = False
) -> Concluded:
    return await kit.run(conclude(SqlStore(kit.dialect), asking, claimed, answer, undo), executor)


async def one_charge(kit: Kit, asking: Asked, answer: Answer = DONE) -> Concluded:
    executor, claimed = await claim(kit, asking)
    assert isinstance(claimed, Claimed)
    await kit.work(executor.handle, "INSERT INTO work (n) VALUES (1)")
    return await finish(kit, asking, executor, claimed, answer)


def signal_at(kit: Kit, wanted: Callable[[Command[Any]], bool]) -> asyncio.Event:
    """An event that is set when a plan of this kit asks for such a command."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def note(command: Command[Any]) -> None:
        if wanted(command):
            loop.call_soon_threadsafe(event.set)

    kit.on_command.append(note)
    return event


def signal_at_waiting(kit: Kit) -> asyncio.Event:
    """An event that is set when a plan of this kit is to wait: in line, or by asking again."""

    def waits(command: Command[Any]) -> bool:
        parts = command.commands if isinstance(command, Together) else (command,)
        stands = kit.in_line and any(isinstance(part, Begin) and part.in_line for part in parts)
        return stands or isinstance(command, Sleep)

    return signal_at(kit, waits)


def sqlite_database(path: Path) -> str:
    """A new database with all tables; write-ahead logging, as a service would have it."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        for statement in statements_of("sqlite"):
            connection.execute(statement)
    return str(path)
