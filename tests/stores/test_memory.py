"""The reference model itself: what it must share with a real database."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from taptwice import drivers
from taptwice.core import fingerprint
from taptwice.core.model import Answer, Keyed
from taptwice.core.plan import (
    Begin,
    Close,
    Command,
    Commit,
    Join,
    Query,
    Release,
    Rollback,
    Savepoint,
    Sleep,
    Together,
    Undo,
    arun,
    run,
)
from taptwice.errors import Busy, ConstraintViolated, InFlight, Misuse, Torn
from taptwice.flows.guard import Guard
from taptwice.flows.transaction import Asked, Claimed, Replayed, conclude, open_claim
from taptwice.stores.memory import MemoryDatabase, MemoryExecutor
from taptwice.stores.sql import Entry, SqlStore

KEYED = Keyed("anna", "k")
STORE = SqlStore("postgresql")
ASKED = Asked(KEYED, fingerprint.of_bytes(b"pay 5"), 60, wait=30)
PAID = Answer(201, (), b"paid")


def begun(database: MemoryDatabase) -> MemoryExecutor:
    executor = database.open()
    executor.execute(Begin())
    return executor


def claim(executor: Any, wait_ms: int = 0) -> Any:
    given = (("lock", KEYED.lock), ("id", KEYED.id), ("wait_ms", wait_ms))
    return executor.execute(Query("claim", given))[0]


def late(executor: Any) -> bool:
    return run(STORE.insert_late(Entry(KEYED, ASKED.fingerprint, PAID, 60, None)), executor.execute)


def test_it_is_a_source_and_its_executors_join() -> None:
    database = MemoryDatabase()
    executor = begun(database)
    assert drivers.source(database) is database
    assert isinstance(database.asynchronous(), drivers.Source)
    assert drivers.join(executor) is executor
    with Guard().claim(executor, account="anna", key="a-long-enough-key", request=b"pay 5") as claimed:
        executor.handle.insert("charges", 5)
        claimed.finish(201)
    assert database.rows("charges") == ()
    executor.execute(Commit())
    assert database.rows("charges") == (5,)


def test_nothing_is_seen_before_the_commit() -> None:
    database = MemoryDatabase()
    writer, reader = begun(database), begun(database)
    writer.handle.insert("charges", 5)
    assert late(writer)
    assert run(STORE.look(KEYED), reader.execute) is None
    assert database.rows("charges") == ()
    writer.execute(Commit())
    assert run(STORE.look(KEYED), reader.execute) is not None
    assert database.rows("charges") == (5,)


@pytest.mark.parametrize("end", [Commit(), Rollback(), Close()])
def test_a_lock_ends_with_its_transaction(end: Command[object]) -> None:
    database = MemoryDatabase()
    first, second = begun(database), begun(database)
    assert claim(first)[0] is True
    assert claim(second)[0] is False
    _ = first.execute(end)
    assert claim(second)[0] is True


def test_undo_goes_back_to_the_last_savepoint() -> None:
    database = MemoryDatabase()
    executor = begun(database)
    executor.handle.insert("charges", 1)
    executor.execute(Savepoint())
    executor.handle.insert("charges", 2)
    executor.execute(Undo())
    with pytest.raises(Torn):
        executor.execute(Release())
    executor.execute(Commit())
    assert database.rows("charges") == (1,)


def test_torn_and_misused() -> None:
    executor = begun(MemoryDatabase())
    executor.handle.commit()
    with pytest.raises(Torn):
        executor.execute(Commit())
    with pytest.raises(Misuse):
        executor.execute(Join())
    executor.execute(Close())
    with pytest.raises(Misuse):
        _ = executor.handle


def test_an_error_costs_the_transaction() -> None:
    database = MemoryDatabase()
    first, second = begun(database), begun(database)
    begun_at = claim(second)[1]
    second.handle.insert("charges", 5)
    assert late(first)
    first.execute(Commit())
    entry = Entry(KEYED, ASKED.fingerprint, PAID, 60, begun_at)
    with pytest.raises(ConstraintViolated):
        run(STORE.insert(entry), second.execute)
    with pytest.raises(Misuse):
        second.handle.insert("charges", 6)
    second.execute(Commit())
    assert database.rows("charges") == ()


def test_an_insert_waits_for_an_insert_of_the_same_key() -> None:
    database = MemoryDatabase(lock_timeout=0)
    first, second = begun(database), begun(database)
    assert late(first)
    with pytest.raises(Busy):
        late(second)
    first.execute(Rollback())
    assert late(second)


def test_threads_wait_for_each_other_and_work_once() -> None:
    database = MemoryDatabase()
    together = threading.Barrier(8)
    answers: list[Answer] = []

    def request(number: int) -> None:
        executor = database.open()
        together.wait(10)
        claimed = run(open_claim(STORE, ASKED), executor.execute)
        if isinstance(claimed, Replayed):
            answers.append(claimed.record.answer)
            return
        executor.handle.insert("charges", number)
        answer = Answer(201, (), str(number).encode())
        answers.append(run(conclude(STORE, ASKED, claimed, answer, False), executor.execute).answer)

    threads = [threading.Thread(target=request, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [charge] = database.rows("charges")
    assert answers == [Answer(201, (), str(charge).encode())] * 8


def test_a_waiting_claim_is_woken_by_the_end_of_the_other() -> None:
    database = MemoryDatabase()
    holder, waiter = begun(database), begun(database)
    assert claim(holder)[0]
    got: list[bool] = []
    thread = threading.Thread(target=lambda: got.append(claim(waiter, wait_ms=30_000)[0]))
    thread.start()
    holder.execute(Commit())
    thread.join(10)
    assert got == [True]


async def test_the_awaiting_twin() -> None:
    database = MemoryDatabase()
    source = database.asynchronous()

    async def request() -> Answer:
        executor = source.open()
        claimed = await arun(open_claim(STORE, ASKED), executor.execute)
        if isinstance(claimed, Replayed):
            return claimed.record.answer
        executor.handle.insert("charges", 5)
        await asyncio.sleep(0)
        return (await arun(conclude(STORE, ASKED, claimed, PAID, False), executor.execute)).answer

    assert await asyncio.gather(*(request() for _ in range(8))) == [PAID] * 8
    assert database.rows("charges") == (5,)
    holder, waiter = source.open(), source.open()
    await holder.execute(Together((Begin(), Sleep(0))))
    await waiter.execute(Begin())
    claims = (("lock", 7), ("id", b"7"), ("wait_ms", 30_000))
    assert (await holder.execute(Query("claim", claims)))[0][0]
    waiting = asyncio.create_task(waiter.execute(Query("claim", claims)))
    await asyncio.sleep(0)
    assert not waiting.done()
    await holder.execute(Commit())
    assert (await waiting)[0][0]


def test_who_does_not_wait_is_refused() -> None:
    database = MemoryDatabase()
    asked = Asked(KEYED, ASKED.fingerprint, 60, wait=0)
    assert isinstance(run(open_claim(STORE, asked), database.open().execute), Claimed)
    with pytest.raises(InFlight):
        run(open_claim(STORE, asked), database.open().execute)
