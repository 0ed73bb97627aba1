"""What goes wrong in the database, and what is said of it: errors of ours, or the driver's own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy

from services import PrivatePostgres
from taptwice.errors import CommitUnknown, Contention, Misuse, StoreUnavailable, TaptwiceError
from taptwice.flows.transaction import Claimed, Concluded, Replayed, abandon
from tests.drivers.kits import (
    DONE,
    POSTGRES,
    SQLITE,
    Kit,
    asked,
    claim,
    finish,
    on,
    on_all,
    on_postgres,
    on_sqlite,
    one_charge,
    sqlite_database,
    statements_of,
    until,
)
from tests.drivers.wire import Cut, proxy

THEIRS = (sqlite3.Error, psycopg.Error, asyncpg.PostgresError, sqlalchemy.exc.DBAPIError)


@asynccontextmanager
async def on_another(name: str, place: str) -> AsyncIterator[Kit]:
    """The kit on another database than the module's."""
    kit = {**POSTGRES, **SQLITE}[name](place)
    await kit.start()
    try:
        yield kit
        await until(lambda: kit.taken() == 0, "all connections are given back")
    finally:
        await kit.stop()


# --- the tables, the server, the right to write -------------------------------------------------------------


@pytest.mark.parametrize("name", [*SQLITE, *POSTGRES])
async def test_without_the_tables_it_says_how_to_make_them(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    empty = request.getfixturevalue("fresh_postgres") if name in POSTGRES else str(tmp_path / "empty.sqlite")
    async with on_another(name, empty) as kit:
        for savepoint in (True, False):
            with pytest.raises(Misuse, match="taptwice init"):
                await claim(kit, asked(savepoint=savepoint))


@pytest.mark.parametrize("name", POSTGRES)
async def test_nobody_listens(name: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        port = taken.getsockname()[1]
        async with on_another(name, f"postgresql://postgres@127.0.0.1:{port}/postgres") as kit:
            with pytest.raises(StoreUnavailable):
                await claim(kit, asked())


@pytest.mark.parametrize("name", SQLITE)
async def test_no_such_folder(name: str, tmp_path: Path) -> None:
    async with on_another(name, str(tmp_path / "missing" / "database.sqlite")) as kit:
        with pytest.raises(StoreUnavailable):
            await claim(kit, asked())


@pytest.mark.parametrize("name", SQLITE)
async def test_not_a_database(name: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"this is no database" * 1000)
    async with on_another(name, str(tmp_path / "text")) as kit:
        with pytest.raises(StoreUnavailable):
            await claim(kit, asked())


@pytest.fixture(scope="module")
def mortal(own_postgres: PrivatePostgres) -> PrivatePostgres:
    """A server to be killed, with all tables."""
    with psycopg.connect(own_postgres.start().url, autocommit=True) as connection:
        for statement in statements_of("postgresql"):
            connection.execute(statement)
    return own_postgres


@pytest.mark.crash
@pytest.mark.parametrize("name", POSTGRES)
async def test_the_server_dies(name: str, mortal: PrivatePostgres) -> None:
    with psycopg.connect(mortal.start().url, autocommit=True) as connection:
        connection.execute("TRUNCATE taptwice_records, work")
    async with on_another(name, mortal.url) as kit:
        await one_charge(kit, asked("before"))

        executor, claimed = await claim(kit, asked())
        await kit.work(executor.handle, "INSERT INTO work (n) VALUES (1)")
        await asyncio.to_thread(mortal.kill)
        with pytest.raises(StoreUnavailable):
            await finish(kit, asked(), executor, claimed)
        with pytest.raises(StoreUnavailable):
            await claim(kit, asked())

        await asyncio.to_thread(mortal.start)
        assert kit.count("work") == 1
        await _eventually(kit)
        assert isinstance((await claim(kit, asked("before")))[1], Replayed)
        await one_charge(kit, asked())
        assert (kit.count("work"), kit.count("taptwice_records")) == (2, 2)


async def _eventually(kit: Kit) -> None:
    """A pool may hand out the connections that died before it makes new ones."""
    for _ in range(20):
        with contextlib.suppress(StoreUnavailable):
            await claim(kit, asked("before"))
            return
    raise AssertionError("the pool does not recover")


@pytest.mark.parametrize("cut", ["before", "after"])
@on_postgres
async def test_the_connection_is_lost_during_commit(kit: Kit, cut: Cut) -> None:
    with proxy(kit.place) as wire:
        async with on_another(kit.name, wire.url) as cut_off:
            executor, claimed = await claim(cut_off, asked())
            await kit.work(executor.handle, "INSERT INTO work (n) VALUES (1)")
            wire.cut = cut
            with pytest.raises(CommitUnknown):
                await finish(cut_off, asked(), executor, claimed)

            _, outcome = found = await claim(cut_off, asked(wait=20))
            if isinstance(outcome, Claimed):
                await kit.run(abandon(), found[0])
    committed = cut == "after"
    assert isinstance(outcome, Replayed if committed else Claimed)
    assert kit.count("work") == kit.count("taptwice_records") == committed


@pytest.mark.parametrize("name", POSTGRES)
async def test_a_read_only_server_is_noticed_before_the_work(name: str, fresh_postgres: str) -> None:
    with psycopg.connect(fresh_postgres, autocommit=True) as connection:
        for statement in statements_of("postgresql"):
            connection.execute(statement)
        [database] = connection.execute("SELECT current_database()").fetchall()
        connection.execute(f"ALTER DATABASE {database[0]} SET default_transaction_read_only = on")
    async with on_another(name, fresh_postgres) as kit:
        with pytest.raises(StoreUnavailable, match="read-only"):
            await claim(kit, asked())


@on_sqlite
async def test_a_read_only_sqlite_is_noticed_before_the_work(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kit.name not in ("sqlite3", "aiosqlite"):
        await kit.stop()
        kit.place = f"file:{kit.place}?mode=ro&uri=true"
        await kit.start()
    else:
        connect = sqlite3.connect

        def read_only(path: str, **options: Any) -> sqlite3.Connection:
            opened: sqlite3.Connection = connect(f"file:{path}?mode=ro", uri=True, **options)
            return opened

        monkeypatch.setattr(sqlite3, "connect", read_only)
    with pytest.raises(StoreUnavailable, match="readonly"):
        await claim(kit, asked())


# --- the user's own errors ----------------------------------------------------------------------------------


@on_all
async def test_an_error_of_the_work_is_the_drivers_own(kit: Kit) -> None:
    await kit_inserts(kit, "INSERT INTO singles (n) VALUES (1)")
    executor, _ = await claim(kit, asked())
    if kit.dialect == "sqlite":
        with pytest.raises(THEIRS):
            await kit.work(executor.handle, "INSERT INTO singles (n) VALUES (1)")
    with pytest.raises(THEIRS):
        await kit.work(executor.handle, "INSERT INTO nowhere (n) VALUES (1)")
    await kit.run(abandon(), executor)
    await one_charge(kit, asked())
    assert kit.count("work") == 1


async def kit_inserts(kit: Kit, text: str) -> None:
    executor, claimed = await claim(kit, asked("an earlier one"))
    await kit.work(executor.handle, text)
    await finish(kit, asked("an earlier one"), executor, claimed)


@on_all
async def test_a_foreign_key_that_fails_at_commit_is_the_drivers_own_error(kit: Kit) -> None:
    await check_refused_at_commit(kit, "INSERT INTO children (parent) VALUES (7)")


@on_postgres
async def test_a_unique_constraint_that_fails_at_commit_is_the_drivers_own_error(kit: Kit) -> None:
    await kit_inserts(kit, "INSERT INTO singles (n) VALUES (1)")
    await check_refused_at_commit(kit, "INSERT INTO singles (n) VALUES (1)")


@pytest.mark.parametrize("code", ["P0001", "42P01", "22P02", "25006", "3B001"])
@on_postgres
async def test_a_trigger_that_fails_at_commit_is_the_drivers_own_error(kit: Kit, code: str) -> None:
    """Whatever it says: it is not about our statements."""
    with psycopg.connect(kit.place, autocommit=True) as connection:
        connection.execute(
            "CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = '{code}'; END $$"
        )
        connection.execute("DROP TABLE IF EXISTS refusing")
        connection.execute("CREATE TABLE refusing (n integer)")
        connection.execute(
            "CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON refusing DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION refuse()"
        )
    await check_refused_at_commit(kit, "INSERT INTO refusing (n) VALUES (1)")


async def check_refused_at_commit(kit: Kit, text: str) -> None:
    before = kit.count("taptwice_records")
    # A large answer goes another way than a small one with asyncpg.
    for answer in (DONE, type(DONE)(200, (), b"x" * 100_000)):
        executor, claimed = await claim(kit, asked())
        await kit.work(executor.handle, text)
        with pytest.raises(THEIRS):
            await finish(kit, asked(), executor, claimed, answer)
        assert kit.count("taptwice_records") == before
        await until(lambda: kit.taken() == 0, "the connection is given back")
    await one_charge(kit, asked())
    assert kit.count("work") == 1


@on_postgres
async def test_a_swallowed_error_is_named_and_nothing_saved(kit: Kit) -> None:
    executor, claimed = await claim(kit, asked())
    await kit.work(executor.handle, "INSERT INTO work (n) VALUES (1)")
    with pytest.raises(THEIRS):
        await kit.work(executor.handle, "SELECT 1/0")
    with pytest.raises(TaptwiceError, match="swallowed"):
        await finish(kit, asked(), executor, claimed)
    assert (kit.count("work"), kit.count("taptwice_records")) == (0, 0)
    await one_charge(kit, asked())


@on_postgres
async def test_undo_mends_a_transaction_that_failed(kit: Kit) -> None:
    executor, claimed = await claim(kit, asked())
    with pytest.raises(THEIRS):
        await kit.work(executor.handle, "SELECT 1/0")
    assert await finish(kit, asked(), executor, claimed, undo=True) == Concluded(DONE)
    assert kit.count("taptwice_records") == 1


@on_postgres
async def test_a_deadlock_with_the_work_of_another_is_the_drivers_own_error(kit: Kit) -> None:
    await kit_inserts(kit, "INSERT INTO parents (id) VALUES (1), (2)")
    first, _ = await claim(kit, asked("one"))
    second, _ = await claim(kit, asked("two"))
    await kit.work(first.handle, "SELECT id FROM parents WHERE id = 1 FOR UPDATE")
    await kit.work(second.handle, "SELECT id FROM parents WHERE id = 2 FOR UPDATE")
    outcomes = await asyncio.gather(
        kit.work(first.handle, "SELECT id FROM parents WHERE id = 2 FOR UPDATE"),
        _then_give_up(kit, second, "SELECT id FROM parents WHERE id = 1 FOR UPDATE"),
        return_exceptions=True,
    )
    for executor in (first, second):
        await kit.run(abandon(), executor)
    failed = [each for each in outcomes if isinstance(each, BaseException)]
    assert len(failed) == 1
    assert isinstance(failed[0], THEIRS)
    assert kit.count("taptwice_records") == 1


async def _then_give_up(kit: Kit, executor: Any, text: str) -> None:
    try:
        await kit.work(executor.handle, text)
    finally:
        await kit.run(abandon(), executor)


@pytest.mark.parametrize("name", ["psycopg", "asyncpg", "sqlalchemy-engine-psycopg"])
async def test_no_rights_on_the_table_says_what_to_grant(name: str, clean_database: str) -> None:
    role = "taptwice_without_rights"
    with psycopg.connect(clean_database, autocommit=True) as connection:
        connection.execute(f"DROP ROLE IF EXISTS {role}")
        connection.execute(f"CREATE ROLE {role} LOGIN")
        try:
            async with on_another(name, clean_database.replace("postgres@", f"{role}@", 1)) as kit:
                with pytest.raises(Misuse, match="grant SELECT, INSERT and DELETE"):
                    await claim(kit, asked())
        finally:
            connection.execute(f"DROP ROLE {role}")


# --- SQLite -------------------------------------------------------------------------------------------------


@on(["sqlite3"])
async def test_a_reader_that_keeps_sqlite_from_committing(kit: Kit, tmp_path: Path) -> None:
    """With a rollback journal COMMIT waits for readers; a claim that waits in vain is undone."""
    with contextlib.closing(sqlite3.connect(kit.place)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    executor, claimed = await claim(kit, asked())
    await kit.work(executor.handle, "PRAGMA busy_timeout = 0")
    await kit.work(executor.handle, "INSERT INTO work (n) VALUES (1)")
    with contextlib.closing(sqlite3.connect(kit.place, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM work").fetchall()
        with pytest.raises(Contention):
            await finish(kit, asked(), executor, claimed)
    assert (kit.count("work"), kit.count("taptwice_records")) == (0, 0)
    await one_charge(kit, asked())


@on(["sqlite3", "aiosqlite", "sqlalchemy-engine-pysqlite", "sqlalchemy-async-engine-aiosqlite"])
async def test_commit_waits_for_a_reader(kit: Kit) -> None:
    """As long as the connection's own busy_timeout says, whatever the claim's wait was."""
    with contextlib.closing(sqlite3.connect(kit.place)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    executor, claimed = await claim(kit, asked())
    await kit.work(executor.handle, "INSERT INTO work (n) VALUES (1)")
    with contextlib.closing(sqlite3.connect(kit.place, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM work").fetchall()
        finishing = asyncio.create_task(finish(kit, asked(), executor, claimed))
        await until(lambda: _somebody_commits(kit.place), "COMMIT waits for the reader")
        reader.execute("ROLLBACK")
        assert await finishing == Concluded(DONE)
    assert (kit.count("work"), kit.count("taptwice_records")) == (1, 1)


def _somebody_commits(path: str) -> bool:
    """From then on SQLite lets no further reader in."""
    with contextlib.closing(sqlite3.connect(path, timeout=0)) as reader:
        try:
            reader.execute("SELECT count(*) FROM work").fetchall()
        except sqlite3.OperationalError:
            return True
    return False


async def test_a_connection_of_another_thread_says_how_to_open_it(tmp_path: Path) -> None:
    from taptwice.drivers import sqlite as sqlite_driver

    path = sqlite_database(tmp_path / "database.sqlite")
    kit = Kit("sqlite3", path, "sqlite", blocking=True, source=sqlite_driver.connecting(lambda: own))
    own = sqlite3.connect(path)
    with pytest.raises(Misuse, match="check_same_thread=False"):
        await claim(kit, asked())
    own.close()
