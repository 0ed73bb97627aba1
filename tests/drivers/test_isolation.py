"""Snapshots older than the lock: the loser is told, or replays; there are never two records."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest

from taptwice import drivers
from taptwice.core.model import Answer
from taptwice.core.plan import Begin, Plan, Savepoint, Script, ask
from taptwice.errors import Contention
from taptwice.flows.transaction import Claimed, Concluded, Replayed, abandon, join, settle
from taptwice.stores.sql import SqlStore
from tests.drivers.kits import DONE, Kit, asked, claim, finish, on_postgres, one_charge

pytestmark = on_postgres

STORE = SqlStore("postgresql")
FIRST = Answer(200, (), b"of the first")

levels = pytest.mark.parametrize("level", ["repeatable_read", "serializable"])


@levels
async def test_joined_the_loser_must_run_again(kit: Kit, level: str) -> None:
    with pytest.raises(Contention):
        async with kit.caller(level) as connection:
            executor = drivers.join(connection)
            await kit.work(executor.handle, "SELECT count(*) FROM work")  # the snapshot
            await one_charge(kit, asked(), FIRST)
            outcome = await kit.run(join(STORE, asked()), executor)
            assert isinstance(outcome, Claimed), "its snapshot cannot show the record"
            await kit.work(executor.handle, "INSERT INTO work (n) VALUES (2)")
            await kit.run(settle(STORE, asked(), outcome, DONE), executor)
    assert (kit.count("work"), kit.count("taptwice_records")) == (1, 1)
    async with kit.caller(level) as connection:
        again = await kit.run(join(STORE, asked()), drivers.join(connection))
    assert isinstance(again, Replayed)
    assert again.record.answer == FIRST


@asynccontextmanager
async def isolated(kit: Kit, level: str) -> AsyncIterator[None]:
    """All transactions of new connections are of this level, and so are those of the kit's pool."""
    with psycopg.connect(kit.place, autocommit=True) as connection:
        [name] = connection.execute("SELECT current_database()").fetchone() or [""]
        default = f"ALTER DATABASE {name} SET default_transaction_isolation"
        connection.execute(f"{default} = '{level.replace('_', ' ')}'")
        try:
            await kit.stop()
            await kit.start()
            yield
        finally:
            connection.execute(f"ALTER DATABASE {name} RESET default_transaction_isolation")


def claim_on_an_old_snapshot() -> Plan[Claimed | None]:
    """As `open_claim`, with something between the snapshot and the lock; `None` until that has happened."""
    yield from ask(Begin())
    yield from ask(Script("SELECT count(*) FROM work"))
    return None


def claim_now() -> Plan[Claimed]:
    found = yield from STORE.claim(asked().keyed, 0, (), (Savepoint(),))
    assert found.locked
    assert found.record is None, "the snapshot cannot show the record"
    return Claimed(found.begun)


@levels
@pytest.mark.parametrize("large", [False, True])
async def test_in_a_transaction_of_ours_the_loser_replays(kit: Kit, level: str, large: bool) -> None:
    executor: Any = kit.source.open()
    await kit.run(claim_on_an_old_snapshot(), executor)
    await kit.work(executor.handle, "SELECT 1")
    await kit.run(abandon(), executor)

    async with isolated(kit, level):
        executor = kit.source.open()
        await kit.run(claim_on_an_old_snapshot(), executor)
        await one_charge(kit, asked(), FIRST)
        claimed = await kit.run(claim_now(), executor)
        await kit.work(executor.handle, "INSERT INTO work (n) VALUES (2)")
        answer = Answer(200, (), b"x" * 100_000) if large else DONE
        concluded = await finish(kit, asked(), executor, claimed, answer)
    assert concluded == Concluded(FIRST, replayed=True)
    assert (kit.count("work"), kit.count("taptwice_records")) == (1, 1)


async def test_serializable_work_that_conflicts_is_contention_and_leaves_nothing(kit: Kit) -> None:
    """Each reads what the other writes: the second is refused with 40001, at the latest at COMMIT."""
    async with isolated(kit, "serializable"):
        (first, one), (second, two) = await claim(kit, asked("one")), await claim(kit, asked("two"))
        for number, executor in enumerate((first, second)):
            await kit.work(executor.handle, "SELECT count(*) FROM work")
            await kit.work(executor.handle, f"INSERT INTO work (n) VALUES ({number})")
        assert await finish(kit, asked("one"), first, one) == Concluded(DONE)
        with pytest.raises(Contention):
            await finish(kit, asked("two"), second, two)
        assert (kit.count("work"), kit.count("taptwice_records")) == (1, 1)
        assert kit.taken() == 0, "a connection was not given back"
        await one_charge(kit, asked("two"), DONE)  # the key is free
    assert (kit.count("work"), kit.count("taptwice_records")) == (2, 2)
