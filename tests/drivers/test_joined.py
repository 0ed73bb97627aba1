"""A claim inside a transaction of the caller's, on every driver."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import aiosqlite
import psycopg
import pytest

from taptwice import drivers
from taptwice.core.model import Answer
from taptwice.core.plan import run
from taptwice.errors import Contention, InFlight, KeyReused, Misuse, Torn
from taptwice.flows.transaction import Asked, Claimed, Replayed, join, settle, withdraw
from taptwice.stores.sql import SqlStore
from tests.drivers.kits import (
    POSTGRES,
    Kit,
    asked,
    on,
    on_all,
    on_postgres,
    on_sqlite,
    sqlite_database,
    until,
)

DONE = Answer(201, (("content-type", "text/plain"),), b"done\0\xff")


class Joined:
    """A claim on a caller's connection."""

    def __init__(self, kit: Kit, connection: Any) -> None:
        self._kit = kit
        self._executor = drivers.join(connection)
        self._store = SqlStore(kit.dialect)
        self.connection = connection

    async def claim(self, asking: Asked) -> Claimed | Replayed:
        return await self._kit.run(join(self._store, asking), self._executor)

    async def settle(self, asking: Asked, claimed: Claimed | Replayed, answer: Answer = DONE) -> None:
        assert isinstance(claimed, Claimed)
        await self._kit.run(settle(self._store, asking, claimed, answer), self._executor)

    async def withdraw(self) -> None:
        await self._kit.run(withdraw(), self._executor)

    async def work(self, text: str = "INSERT INTO work (n) VALUES (1)") -> list[tuple[Any, ...]]:
        return await self._kit.work(self._executor.handle, text)

    async def charge(self, asking: Asked, answer: Answer = DONE) -> None:
        claimed = await self.claim(asking)
        await self.work()
        await self.settle(asking, claimed, answer)


class RollBack(Exception):
    """What a caller may raise to leave his transaction."""


@contextlib.asynccontextmanager
async def rolled_back(kit: Kit) -> Any:
    """A transaction of the caller's that ends in an exception."""
    with contextlib.suppress(RollBack):
        async with kit.caller() as connection:
            yield connection
            raise RollBack


@on_all
@pytest.mark.parametrize(
    "body",
    [DONE.body, b"", None, bytes(range(256)) * 1024],
    ids=lambda body: "none" if body is None else str(len(body)),
)
async def test_saved_when_the_caller_commits_and_replayed(kit: Kit, body: bytes | None) -> None:
    answer = Answer(200, DONE.headers, body)
    async with kit.caller() as connection:
        await Joined(kit, connection).charge(asked(), answer)
    assert (kit.count("work"), kit.count("taptwice_records")) == (1, 1)

    async with kit.caller() as connection:
        replayed = await Joined(kit, connection).claim(asked())
        assert isinstance(replayed, Replayed)
        assert replayed.record.answer == answer
        await Joined(kit, connection).work()
    assert kit.count("work") == 2, "the caller's transaction goes on after a replay"


@on_all
async def test_nothing_stays_when_the_caller_rolls_back(kit: Kit) -> None:
    async with rolled_back(kit) as connection:
        await Joined(kit, connection).charge(asked())
    assert (kit.count("work"), kit.count("taptwice_records")) == (0, 0)
    async with kit.caller() as connection:
        await Joined(kit, connection).charge(asked())
    assert (kit.count("work"), kit.count("taptwice_records")) == (1, 1)


@on_all
async def test_withdrawing_undoes_the_work_since_the_claim_and_no_more(kit: Kit) -> None:
    async with kit.caller() as connection:
        joined = Joined(kit, connection)
        await joined.claim(asked("another"))
        await joined.work("INSERT INTO work (n) VALUES (7)")
        await joined.claim(asked())
        await joined.work("INSERT INTO work (n) VALUES (8)")
        await joined.withdraw()
    assert kit.ask("SELECT n FROM work") == [(7,)]
    assert kit.count("taptwice_records") == 0


@on_all
async def test_two_claims_in_one_transaction(kit: Kit) -> None:
    async with kit.caller() as connection:
        joined = Joined(kit, connection)
        await joined.charge(asked("one"))
        await joined.charge(asked("two"))
        assert isinstance(await joined.claim(asked("one")), Replayed)
    assert (kit.count("work"), kit.count("taptwice_records")) == (2, 2)


@on_all
async def test_another_request_with_the_same_key_is_refused_and_the_transaction_goes_on(kit: Kit) -> None:
    async with kit.caller() as connection:
        await Joined(kit, connection).charge(asked())
    async with kit.caller() as connection:
        joined = Joined(kit, connection)
        with pytest.raises(KeyReused):
            await joined.claim(asked(request="another"))
        await joined.work()
    assert kit.count("work") == 2


@on_postgres
@pytest.mark.parametrize("wait", [0.0, 0.05])
async def test_a_held_key_is_refused_after_the_wait_and_the_transaction_goes_on(
    kit: Kit, wait: float
) -> None:
    async with kit.caller() as first, kit.caller() as second:
        await Joined(kit, first).claim(asked())
        joined = Joined(kit, second)
        await joined.work("SET LOCAL lock_timeout = '7s'")
        with pytest.raises(InFlight):
            await joined.claim(asked(wait=wait))
        assert await joined.work("SELECT current_setting('lock_timeout')") == [("7s",)]
        await joined.work()
    assert kit.count("work") == 1


@on_postgres
async def test_a_wait_that_ends_leaves_the_callers_lock_timeout_alone(kit: Kit) -> None:
    async with kit.caller() as second:
        joined = Joined(kit, second)
        await joined.work("SET LOCAL lock_timeout = '7s'")
        async with rolled_back(kit) as first:
            await Joined(kit, first).claim(asked())
            waiting = asyncio.create_task(joined.claim(asked(wait=60)))
            await until(lambda: kit.ask(WAITING) == [(1,)], "the second waits for the lock")
        assert isinstance(await waiting, Claimed)
        assert await joined.work("SELECT current_setting('lock_timeout')") == [("7s",)]
        await joined.withdraw()
        assert await joined.work("SELECT current_setting('lock_timeout')") == [("7s",)]


WAITING = (
    "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database"
    " WHERE datname = current_database() AND locktype = 'advisory' AND NOT granted"
)


@on_postgres
async def test_who_waits_replays_the_first(kit: Kit) -> None:
    async with kit.caller() as second:
        async with kit.caller() as first:
            joined = Joined(kit, first)
            claimed = await joined.claim(asked())
            waiting = asyncio.create_task(Joined(kit, second).claim(asked(wait=60)))
            await until(lambda: kit.ask(WAITING) == [(1,)], "the second waits for the lock")
            await joined.settle(asked(), claimed)
        replayed = await waiting
    assert isinstance(replayed, Replayed)
    assert replayed.record.answer == DONE


# On SQLAlchemy's SQLite a claim begins the transaction that SQLAlchemy only has in mind.
@on(["sqlite3", "aiosqlite", *POSTGRES])
async def test_no_transaction_no_claim(kit: Kit) -> None:
    async with kit.caller(begin=False) as connection:
        with pytest.raises(Misuse, match=r"BEGIN IMMEDIATE|connection\.transaction\(\)|AUTOCOMMIT"):
            await Joined(kit, connection).claim(asked())
    assert kit.count("taptwice_records") == 0


@on_all
async def test_a_transaction_ended_under_the_claim_is_not_settled(kit: Kit) -> None:
    refused = []
    with contextlib.suppress(Exception):  # what a driver says to a transaction that is not there any more
        async with kit.caller() as connection:
            joined = Joined(kit, connection)
            claimed = await joined.claim(asked())
            await joined.work()
            await joined.work("COMMIT")
            with pytest.raises(Torn) as torn:
                await joined.settle(asked(), claimed)
            refused.append(torn.type)
    assert refused == [Torn]
    assert (kit.count("work"), kit.count("taptwice_records")) == (1, 0)


@on_postgres
async def test_a_swallowed_error_is_named(kit: Kit) -> None:
    async with rolled_back(kit) as connection:
        joined = Joined(kit, connection)
        claimed = await joined.claim(asked())
        with pytest.raises(Exception, match="division by zero"):
            await joined.work("SELECT 1/0")
        with pytest.raises(Misuse, match="swallowed"):
            await joined.settle(asked(), claimed)
    assert kit.count("taptwice_records") == 0


@on_postgres
async def test_withdrawing_mends_a_failed_transaction(kit: Kit) -> None:
    async with kit.caller() as connection:
        joined = Joined(kit, connection)
        await joined.work()
        await joined.claim(asked())
        with pytest.raises(Exception, match="division by zero"):
            await joined.work("SELECT 1/0")
        await joined.withdraw()
    assert kit.count("work") == 1


# --- SQLite's one writer ------------------------------------------------------------------------------------


@on_sqlite
async def test_a_busy_database_is_in_flight(kit: Kit) -> None:
    with contextlib.closing(sqlite3.connect(kit.place, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        refused = []
        with contextlib.suppress(Exception):
            async with kit.caller("BEGIN DEFERRED") as connection:
                with pytest.raises(InFlight, match="BEGIN IMMEDIATE") as busy:
                    await Joined(kit, connection).claim(asked(wait=0.05))
                refused.append(busy.type)
        other.execute("ROLLBACK")
    assert refused == [InFlight]
    assert kit.count("taptwice_records") == 0


@on_sqlite
async def test_a_transaction_that_read_before_another_wrote_must_run_again(kit: Kit) -> None:
    async with kit.caller("BEGIN DEFERRED") as connection:
        joined = Joined(kit, connection)
        await joined.work("SELECT count(*) FROM work")
        with contextlib.closing(sqlite3.connect(kit.place, isolation_level=None)) as other:
            other.execute("INSERT INTO work (n) VALUES (1)")
        with pytest.raises(Contention, match="BEGIN IMMEDIATE"):
            await joined.claim(asked())


@on_sqlite
async def test_the_busy_timeout_of_the_connection_is_restored(kit: Kit) -> None:
    async with kit.caller() as connection:
        joined = Joined(kit, connection)
        before = await joined.work("PRAGMA busy_timeout")
        await joined.charge(asked(wait=0.25))
        assert await joined.work("PRAGMA busy_timeout") == before


def test_pythons_own_implicit_transactions(tmp_path: Path) -> None:
    path = sqlite_database(tmp_path / "database.sqlite")
    store = SqlStore("sqlite")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for expected in (Claimed, Replayed):
            with connection:
                executor = drivers.join(connection)
                outcome = run(join(store, asked()), executor.execute)
                assert isinstance(outcome, expected)
                if isinstance(outcome, Claimed):
                    connection.execute("INSERT INTO work (n) VALUES (1)")
                    run(settle(store, asked(), outcome, DONE), executor.execute)
            assert not connection.in_transaction
        with contextlib.suppress(RollBack), connection:
            executor = drivers.join(connection)
            run(join(store, asked("another")), executor.execute)
            connection.execute("INSERT INTO work (n) VALUES (2)")
            raise RollBack
        assert connection.execute("SELECT n FROM work").fetchall() == [(1,)]


async def test_aiosqlites_implicit_transactions(tmp_path: Path) -> None:
    path = sqlite_database(tmp_path / "database.sqlite")
    kit = Kit("aiosqlite", path, "sqlite")
    async with aiosqlite.connect(path) as connection:
        executor, store = drivers.join(connection), SqlStore("sqlite")
        outcome = await kit.run(join(store, asked()), executor)
        assert isinstance(outcome, Claimed)
        await connection.execute("INSERT INTO work (n) VALUES (1)")
        await kit.run(settle(store, asked(), outcome, DONE), executor)
        await connection.commit()
    assert (kit.count("work"), kit.count("taptwice_records")) == (1, 1)


def test_rows_are_read_as_they_are_whatever_the_connection_makes_of_them(tmp_path: Path) -> None:
    path = sqlite_database(tmp_path / "database.sqlite")
    store = SqlStore("sqlite")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.row_factory = sqlite3.Row
        connection.execute("BEGIN IMMEDIATE")
        executor = drivers.join(connection)
        claimed = run(join(store, asked()), executor.execute)
        assert isinstance(claimed, Claimed)
        run(settle(store, asked(), claimed, DONE), executor.execute)
        assert isinstance(run(join(store, asked()), executor.execute), Replayed)
        assert isinstance(connection.execute("SELECT 1").fetchone(), sqlite3.Row)


def test_rows_of_a_psycopg_connection_with_another_row_factory(clean_database: str) -> None:
    store = SqlStore("postgresql")
    with psycopg.connect(clean_database, row_factory=psycopg.rows.dict_row) as connection:
        executor = drivers.join(connection)
        claimed = run(join(store, asked()), executor.execute)
        assert isinstance(claimed, Claimed)
        run(settle(store, asked(), claimed, DONE), executor.execute)
        assert isinstance(run(join(store, asked()), executor.execute), Replayed)


@on(["psycopg"])
async def test_psycopg_outside_autocommit_begins_by_itself(kit: Kit) -> None:
    with psycopg.connect(kit.place) as connection:
        await Joined(kit, connection).charge(asked())
    assert (kit.count("work"), kit.count("taptwice_records")) == (1, 1)


@on(["psycopg"])
async def test_psycopg_inside_a_pipeline_of_the_callers(kit: Kit) -> None:
    with psycopg.connect(kit.place) as connection, connection.pipeline():
        await Joined(kit, connection).charge(asked())
    assert (kit.count("work"), kit.count("taptwice_records")) == (1, 1)
