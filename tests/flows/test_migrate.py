from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path

import aiosqlite
import asyncpg
import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from taptwice import drivers, sql
from taptwice.core.plan import arun, run
from taptwice.drivers import aiosqlite as aiosqlite_driver
from taptwice.drivers import asyncpg as asyncpg_driver
from taptwice.drivers import psycopg as psycopg_driver
from taptwice.drivers import sqlite as sqlite_driver
from taptwice.errors import Misuse
from taptwice.flows.migrate import BOTH, Migrated, migrate

FIRST = sql.Migration("001_pre_a", "CREATE TABLE a (n int); CREATE TABLE b (n int);")
CLEANUP = sql.Migration("002_post_b", "DROP TABLE b;")
THIRD = sql.Migration("003_pre_c", "-- why\nCREATE TABLE c (n int);")

DRIVERS = [
    "sqlite",
    "aiosqlite",
    "psycopg",
    "async-psycopg",
    "asyncpg",
    "sqlalchemy-sqlite",
    "sqlalchemy-aiosqlite",
    "sqlalchemy-psycopg",
    "sqlalchemy-asyncpg",
]


async def migrated(
    source: drivers.Source,
    phases: Collection[sql.Phase] = BOTH,
    known: Sequence[sql.Migration] | None = None,
) -> Migrated:
    plan, execute = migrate(source.dialect, phases, known), source.open().execute
    return run(plan, execute) if source.blocking else await arun(plan, execute)


def tables(path: Path) -> list[str]:
    connection = sqlite3.connect(path)
    found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1").fetchall()
    connection.close()
    return [name for (name,) in found]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "shop.db"


@pytest.fixture
def source(file: Path) -> drivers.Source:
    return sqlite_driver.connecting(lambda: sqlite3.connect(file))


@pytest.fixture(params=DRIVERS)
async def any_source(request: pytest.FixtureRequest, file: Path) -> AsyncIterator[drivers.Source]:
    name: str = request.param
    url = "" if name.endswith("sqlite") else request.getfixturevalue("fresh_postgres")

    async def connect_psycopg() -> psycopg.AsyncConnection[object]:
        return await psycopg.AsyncConnection.connect(url)

    async def connect_asyncpg() -> object:
        return await asyncpg.connect(url)

    match name:
        case "sqlite":
            yield sqlite_driver.connecting(lambda: sqlite3.connect(file))
        case "aiosqlite":
            yield aiosqlite_driver.connecting(lambda: aiosqlite.connect(file))
        case "psycopg":
            yield psycopg_driver.connecting(lambda: psycopg.connect(url))
        case "async-psycopg":
            yield psycopg_driver.connecting(connect_psycopg)
        case "asyncpg":
            yield asyncpg_driver.connecting(connect_asyncpg)
        case "sqlalchemy-sqlite" | "sqlalchemy-psycopg":
            engine = create_engine(f"sqlite:///{file}" if not url else url.replace("://", "+psycopg://"))
            yield drivers.source(engine)
            engine.dispose()
        case _:
            awaiting = create_async_engine(
                f"sqlite+aiosqlite:///{file}" if not url else url.replace("://", "+asyncpg://")
            )
            yield drivers.source(awaiting)
            await awaiting.dispose()


async def test_every_driver_migrates_and_a_second_run_finds_nothing_to_do(any_source: drivers.Source) -> None:
    every = tuple(each.name for each in sql.migrations(any_source.dialect))
    assert await migrated(any_source) == Migrated(every, ())
    assert await migrated(any_source) == Migrated((), ())


@pytest.mark.parametrize("any_source", [name for name in DRIVERS if "sqlite" not in name], indirect=True)
async def test_every_driver_of_postgresql_partitions(any_source: drivers.Source) -> None:
    step = sql.partitioning("postgresql", "day")
    known = (*sql.migrations("postgresql"), step)
    assert (await migrated(any_source, known=known)).applied[-1] == step.name
    assert await migrated(any_source, known=known) == Migrated((), ())


async def test_each_phase_alone(source: drivers.Source, file: Path) -> None:
    known = (FIRST, CLEANUP, THIRD)
    assert await migrated(source, ["pre"], known) == Migrated(("001_pre_a", "003_pre_c"), ("002_post_b",))
    assert tables(file) == ["a", "b", "c", "taptwice_migrations"]
    assert await migrated(source, ["pre"], known) == Migrated((), ("002_post_b",))
    assert await migrated(source, ["post"], known) == Migrated(("002_post_b",), ())
    assert tables(file) == ["a", "c", "taptwice_migrations"]


async def test_both_phases_keep_their_order(source: drivers.Source) -> None:
    done = await migrated(source, known=(FIRST, CLEANUP, THIRD))
    assert done.applied == ("001_pre_a", "002_post_b", "003_pre_c")


async def test_a_cleanup_never_comes_before_what_it_follows(source: drivers.Source, file: Path) -> None:
    with pytest.raises(Misuse, match=r"002_post_b comes after 001_pre_a.*--phase pre"):
        await migrated(source, ["post"], (FIRST, CLEANUP))
    assert tables(file) == []


async def test_a_failure_undoes_its_migration_and_keeps_those_before(
    source: drivers.Source, file: Path
) -> None:
    broken = sql.Migration("002_pre_x", "CREATE TABLE x (n int); CREATE TABLE a (n int);")
    with pytest.raises(sqlite3.OperationalError, match="already exists"):
        await migrated(source, known=(FIRST, broken, THIRD))
    assert tables(file) == ["a", "b", "taptwice_migrations"]
    repaired = sql.Migration("002_pre_x", "CREATE TABLE x (n int)")
    assert (await migrated(source, known=(FIRST, repaired))).applied == ("002_pre_x",)


async def test_names_of_a_newer_release_are_left_alone(source: drivers.Source) -> None:
    await migrated(source, known=(FIRST, CLEANUP))
    assert await migrated(source, known=(FIRST,)) == Migrated((), ())


def at_once(source: drivers.Source, count: int = 8) -> list[tuple[str, ...]]:
    """The results of so many runs that begin together."""
    barrier = threading.Barrier(count)
    applied: list[tuple[str, ...]] = []

    def work() -> None:
        barrier.wait()
        applied.append(run(migrate(source.dialect), source.open().execute).applied)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return applied


def test_many_at_once_on_sqlite(source: drivers.Source) -> None:
    applied = at_once(source)
    assert len(applied) == 8
    assert sorted(sum(applied, ())) == [each.name for each in sql.migrations("sqlite")]


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
def test_many_at_once_on_postgresql(fresh_postgres: str, isolation: str) -> None:
    # A snapshot from before the wait would show that everything is still missing.
    isolation = isolation.replace(" ", r"\ ")
    options = f"-c default_transaction_isolation={isolation}"
    source = psycopg_driver.connecting(lambda: psycopg.connect(fresh_postgres, options=options))
    applied = at_once(source)
    assert len(applied) == 8
    assert sorted(sum(applied, ())) == [each.name for each in sql.migrations("postgresql")]


async def test_many_at_once_awaiting(fresh_postgres: str) -> None:
    async def connect() -> object:
        return await asyncpg.connect(fresh_postgres)

    source = asyncpg_driver.connecting(connect)
    done = await asyncio.gather(*(migrated(source) for _ in range(8)))
    applied = sorted(name for each in done for name in each.applied)
    assert applied == [each.name for each in sql.migrations("postgresql")]
