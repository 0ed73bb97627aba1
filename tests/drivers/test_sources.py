"""How a library is recognised, what is refused, and what is imported on the way."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiosqlite
import asyncpg
import psycopg
import psycopg_pool
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import (
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import scoped_session, sessionmaker

from taptwice import drivers
from taptwice.core.plan import Begin, Close, Rollback, run
from taptwice.drivers import aiosqlite as aiosqlite_driver
from taptwice.drivers import asyncpg as asyncpg_driver
from taptwice.drivers import psycopg as psycopg_driver
from taptwice.drivers import sqlalchemy as sqlalchemy_driver
from taptwice.errors import Misuse, StoreUnavailable
from taptwice.flows.transaction import Claimed, Replayed, join
from taptwice.stores.sql import SqlStore
from tests.drivers.kits import (
    DONE,
    AiosqliteKit,
    AsyncPsycopgKit,
    AsyncSqlalchemyKit,
    Kit,
    PsycopgKit,
    SqlalchemyKit,
    SqliteKit,
    asked,
    claim,
    finish,
    one_charge,
    sqlite_database,
)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return sqlite_database(tmp_path / "database.sqlite")


async def check_serves(source: Any, kind: type[Kit], place: str) -> None:
    """A claim on this source is made, finished and replayed."""
    kit = kind("a source", place, source.dialect, source.blocking, source)
    await one_charge(kit, asked())
    assert isinstance((await claim(kit, asked()))[1], Replayed)
    assert kit.count("work") == 1


async def test_a_function_that_opens_connections_of_sqlite3(path: str) -> None:
    await check_serves(
        drivers.source(lambda: sqlite3.connect(path, check_same_thread=False)), SqliteKit, path
    )


async def test_a_function_that_opens_connections_of_aiosqlite(path: str) -> None:
    await check_serves(drivers.source(lambda: aiosqlite.connect(path)), AiosqliteKit, path)


async def test_a_function_that_opens_connections_of_psycopg(clean_database: str) -> None:
    await check_serves(drivers.source(lambda: psycopg.connect(clean_database)), PsycopgKit, clean_database)


async def test_a_function_that_returns_a_pool(clean_database: str) -> None:
    with psycopg_pool.ConnectionPool(clean_database, min_size=1, open=True) as pool:
        await check_serves(drivers.source(lambda: pool), PsycopgKit, clean_database)


async def test_a_function_that_returns_a_session_maker(path: str) -> None:
    maker = sessionmaker(sqlalchemy.create_engine(f"sqlite:///{path}"))
    await check_serves(drivers.source(lambda: maker), SqlalchemyKit, path)
    maker.kw["bind"].dispose()


async def test_connect_functions_of_the_libraries_that_only_await(clean_database: str, path: str) -> None:
    async def with_psycopg() -> psycopg.AsyncConnection[Any]:
        return await psycopg.AsyncConnection.connect(clean_database)

    await check_serves(psycopg_driver.connecting(with_psycopg), AsyncPsycopgKit, clean_database)
    kit = Kit(
        "asyncpg", clean_database, source=asyncpg_driver.connecting(lambda: asyncpg.connect(clean_database))
    )
    executor, claimed = await claim(kit, asked("another"))
    await finish(kit, asked("another"), executor, claimed)
    await check_serves(aiosqlite_driver.connecting(lambda: aiosqlite.connect(path)), AiosqliteKit, path)


async def test_scoped_sessions_are_sources(path: str) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    await check_serves(drivers.source(scoped_session(sessionmaker(engine))), SqlalchemyKit, path)
    engine.dispose()


async def test_awaiting_scoped_sessions_are_sources(path: str) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
    await check_serves(
        drivers.source(async_scoped_session(async_sessionmaker(engine), lambda: 1)), AsyncSqlalchemyKit, path
    )
    await engine.dispose()


def test_a_scoped_session_is_joined(path: str) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    sessions = scoped_session(sessionmaker(engine))
    executor = drivers.join(sessions)
    assert isinstance(run(join(SqlStore("sqlite"), asked()), executor.execute), Claimed)
    assert executor.handle is sessions()
    sessions.remove()
    engine.dispose()


def test_executors_and_sources_are_taken_as_they_are(path: str) -> None:
    source = drivers.source(lambda: sqlite3.connect(path))
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert drivers.join(drivers.join(connection)).handle is connection
    assert drivers.source(source) is source


async def an_async_def() -> Any:
    return await aiosqlite.connect(":memory:")


def no_engine() -> Any:
    return sessionmaker()


def several_engines() -> Any:
    return sessionmaker(binds={})


REFUSED: dict[str, tuple[Any, str]] = {
    "a number": (7, "builtins.int"),
    "a string": ("postgresql://localhost", "builtins.str"),
    "an async def": (an_async_def, "connecting"),
    "a function of nothing": (lambda: None, "NoneType"),
    "a maker without engine": (no_engine, "bound to no engine"),
    "a maker with several engines": (lambda: sessionmaker(binds={object: None}), "binds="),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_a_source(name: str) -> None:
    origin, says = REFUSED[name]
    with pytest.raises(Misuse, match=says):
        drivers.source(origin)


def test_a_connection_is_no_source() -> None:
    connection = sqlite3.connect(":memory:")
    with pytest.raises(Misuse, match="a function that opens a connection"):
        drivers.source(connection)
    connection.close()


def test_a_function_that_opens_a_connection_of_sqlalchemy_is_refused(path: str) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    with pytest.raises(Misuse, match="the engine"):
        drivers.source(engine.connect)
    engine.dispose()


def test_refused_to_join() -> None:
    with pytest.raises(Misuse, match=r"cannot claim on builtins\.str"):
        drivers.join("a string")


def test_dialects_without_statements_are_refused() -> None:
    with pytest.raises(Misuse, match="mysql"):
        sqlalchemy_driver.dialect_of("mysql")


@pytest.mark.parametrize(
    "connect",
    [
        lambda: psycopg.connect("postgresql://postgres@127.0.0.1:1/nothing"),
        lambda: sqlite3.connect("/nowhere/at/all"),
    ],
)
def test_a_function_that_cannot_connect_means_that_the_store_is_down(connect: Callable[[], Any]) -> None:
    with pytest.raises(StoreUnavailable):
        drivers.source(connect)


def test_a_function_with_a_bug_shows_its_bug() -> None:
    with pytest.raises(ZeroDivisionError):
        drivers.source(lambda: 1 // 0)


@pytest.mark.parametrize("maker", [False, True])
async def test_autocommit_is_refused_where_a_claim_would_hold_nothing(
    clean_database: str, maker: bool
) -> None:
    engine = sqlalchemy.create_engine(
        clean_database.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT"
    )
    kit = Kit(
        "autocommit",
        clean_database,
        "postgresql",
        True,
        drivers.source(sessionmaker(engine) if maker else engine),
    )
    with pytest.raises(Misuse, match="AUTOCOMMIT"):
        await claim(kit, asked())
    engine.dispose()


# --- imports ------------------------------------------------------------------------------------------------


def check_program(program: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


def test_no_library_is_imported_that_the_program_did_not_import() -> None:
    check_program(
        "import sys, taptwice.drivers\n"
        "libraries = {'psycopg', 'psycopg_pool', 'asyncpg', 'aiosqlite', 'sqlalchemy', 'greenlet'}\n"
        "assert not libraries & set(sys.modules)\n"
    )


def test_sqlalchemy_without_greenlet(path: str) -> None:
    check_program(
        "import sys\n"
        "sys.modules['greenlet'] = None\n"
        "import sqlalchemy\n"
        "from taptwice import drivers\n"
        f"source = drivers.source(sqlalchemy.create_engine('sqlite:///{path}'))\n"
        "assert source.blocking\n"
    )


def test_psycopg_without_its_pool(path: str) -> None:
    check_program(
        "import sys\n"
        "sys.modules['psycopg_pool'] = None\n"
        "import taptwice.drivers.psycopg as driver\n"
        "assert driver.source(object()) is None\n"
    )


async def test_psycopg_with_a_libpq_that_cannot_pipeline(
    clean_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psycopg.Pipeline, "is_supported", lambda: False)
    await check_serves(drivers.source(lambda: psycopg.connect(clean_database)), PsycopgKit, clean_database)
    assert DONE.status == 201


async def test_a_connection_of_psycopg_that_is_slow_to_give_back_is_given_back_though_cancelled(
    clean_database: str,
) -> None:
    slow, given_back = asyncio.Event(), asyncio.Event()

    async def take() -> psycopg.AsyncConnection[Any]:
        return await psycopg.AsyncConnection.connect(clean_database)

    async def give_back(connection: psycopg.AsyncConnection[Any]) -> None:
        await slow.wait()
        await connection.close()
        given_back.set()

    executor = psycopg_driver.AsyncPsycopgSource(take, give_back).open()
    await executor.execute(Begin())
    await executor.execute(Rollback())
    closing = asyncio.create_task(executor.execute(Close()))
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    slow.set()
    async with asyncio.timeout(20):
        await given_back.wait()
