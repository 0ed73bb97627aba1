"""Claim, work and answer in a transaction of ours: what holds on every driver."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taptwice.core.model import Answer
from taptwice.core.plan import Begin, Command, Commit, Plan, Savepoint, Script, Together, ask
from taptwice.errors import InFlight, KeyReused, Misuse
from taptwice.flows import transaction
from taptwice.flows.transaction import (
    Asked,
    Claimed,
    Concluded,
    Replayed,
    abandon,
)
from taptwice.stores.sql import SqlStore
from tests.drivers.kits import (
    DONE,
    Kit,
    asked,
    claim,
    finish,
    on_all,
    on_postgres,
    one_charge,
    signal_at_waiting,
)

ANSWERS = {
    "json": Answer(201, (("content-type", "application/json"), ("x", "1"), ("x", "2")), b'{"a":1}'),
    "binary": Answer(200, (), bytes(range(256)) * 3),
    "NUL": Answer(200, (("x-latin", "caf\xe9"),), b"\0a\0"),
    "quotes": Answer(200, (("x", "'; COMMIT; --"),), b"';\\ %s %(id)s $1 :id"),
    "empty": Answer(204, (), b""),
    "tombstone": Answer(200, (("etag", '"1"'),), None),
    "large": Answer(200, (), bytes(range(256)) * 1024),
}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite waits for its one writer however long, up to this."""
    monkeypatch.setattr(transaction, "TURN", 0.1)


@on_all
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_the_answer_is_saved_with_the_work_and_replayed_to_the_byte(kit: Kit, answer: Answer) -> None:
    assert await one_charge(kit, asked(), answer) == Concluded(answer)
    assert (kit.count("work"), kit.count("taptwice_records")) == (1, 1)

    _, replayed = await claim(kit, asked())
    assert isinstance(replayed, Replayed)
    assert replayed.record.answer == answer
    assert kit.count("work") == 1


@on_all
async def test_many_claims_one_after_the_other(kit: Kit) -> None:
    """More than the pool has connections, and more than any driver runs before it prepares a statement."""
    for number in range(12):
        await one_charge(kit, asked(f"key {number}"))
        assert isinstance((await claim(kit, asked(f"key {number}")))[1], Replayed)
    assert (kit.count("work"), kit.count("taptwice_records")) == (12, 12)


@on_all
async def test_another_request_with_the_same_key_is_refused(kit: Kit) -> None:
    await one_charge(kit, asked())
    with pytest.raises(KeyReused):
        await claim(kit, asked(request="another"))


@on_all
async def test_a_claim_that_is_held_answers_at_once_to_who_does_not_wait(kit: Kit, impatient: None) -> None:
    executor, claimed = await claim(kit, asked())
    with pytest.raises(InFlight):
        await claim(kit, asked())
    assert await finish(kit, asked(), executor, claimed) == Concluded(DONE)


@on_all
async def test_who_waits_gets_the_answer_of_the_first(kit: Kit) -> None:
    executor, claimed = await claim(kit, asked())
    await kit.work(executor.handle, "INSERT INTO work (n) VALUES (1)")

    waits = signal_at_waiting(kit)
    second = asyncio.create_task(claim(kit, asked(wait=60)))
    await waits.wait()
    await finish(kit, asked(), executor, claimed)

    _, replayed = await second
    assert isinstance(replayed, Replayed)
    assert replayed.record.answer == DONE
    assert kit.count("work") == 1


@on_all
async def test_who_waits_does_the_work_when_the_first_gave_up(kit: Kit) -> None:
    executor, _ = await claim(kit, asked())
    await kit.work(executor.handle, "INSERT INTO work (n) VALUES (1)")

    waits = signal_at_waiting(kit)
    second = asyncio.create_task(claim(kit, asked(wait=60)))
    await waits.wait()
    await kit.run(abandon(), executor)

    executor, claimed = await second
    assert isinstance(claimed, Claimed)
    await finish(kit, asked(), executor, claimed)
    assert (kit.count("work"), kit.count("taptwice_records")) == (0, 1)


@on_all
@pytest.mark.parametrize("savepoint", [True, False])
async def test_undo_saves_the_answer_without_the_work(kit: Kit, savepoint: bool) -> None:
    executor, claimed = await claim(kit, asked(savepoint=savepoint))
    await kit.work(executor.handle, "INSERT INTO work (n) VALUES (1)")
    assert await finish(kit, asked(savepoint=savepoint), executor, claimed, undo=True) == Concluded(DONE)
    assert (kit.count("work"), kit.count("taptwice_records")) == (0, 1)


@on_all
async def test_undo_without_any_work(kit: Kit) -> None:
    executor, claimed = await claim(kit, asked())
    assert await finish(kit, asked(), executor, claimed, undo=True) == Concluded(DONE)
    assert kit.count("taptwice_records") == 1


@on_all
async def test_without_a_savepoint(kit: Kit) -> None:
    executor, claimed = await claim(kit, asked(savepoint=False))
    await kit.work(executor.handle, "INSERT INTO work (n) VALUES (1)")
    assert await finish(kit, asked(savepoint=False), executor, claimed) == Concluded(DONE)
    assert (kit.count("work"), kit.count("taptwice_records")) == (1, 1)


@on_all
async def test_abandon_leaves_nothing_and_frees_the_key(kit: Kit) -> None:
    executor, _ = await claim(kit, asked())
    await kit.work(executor.handle, "INSERT INTO work (n) VALUES (1)")
    await kit.run(abandon(), executor)
    assert (kit.count("work"), kit.count("taptwice_records")) == (0, 0)
    await one_charge(kit, asked())
    assert kit.count("work") == 1


@on_all
async def test_one_executor_serves_one_claim_after_another(kit: Kit) -> None:
    executor, claimed = await claim(kit, asked("one"))
    await finish(kit, asked("one"), executor, claimed)
    _, claimed = await claim(kit, asked("two"), executor)
    await kit.work(executor.handle, "INSERT INTO work (n) VALUES (2)")
    await finish(kit, asked("two"), executor, claimed)
    assert kit.ask("SELECT n FROM work") == [(2,)]


@on_all
async def test_the_handle_is_of_use_only_inside_the_claim(kit: Kit) -> None:
    executor = kit.source.open()
    with pytest.raises(Misuse):
        executor.handle  # noqa: B018
    executor, claimed = await claim(kit, asked(), executor)
    assert await kit.work(executor.handle, "SELECT 1") == [(1,)]
    await finish(kit, asked(), executor, claimed)
    with pytest.raises(Misuse):
        executor.handle  # noqa: B018


@on_all
async def test_a_handler_that_commits_by_itself_is_noticed_and_its_work_kept(kit: Kit) -> None:
    executor, claimed = await claim(kit, asked())
    await kit.work(executor.handle, "INSERT INTO work (n) VALUES (1)")
    await kit.work(executor.handle, "COMMIT")
    assert await finish(kit, asked(), executor, claimed) == Concluded(DONE, torn=True)
    assert (kit.count("work"), kit.count("taptwice_records")) == (1, 1)
    assert isinstance((await claim(kit, asked()))[1], Replayed)


@on_all
async def test_the_transaction_that_a_handler_began_instead_is_kept_too(kit: Kit) -> None:
    executor, claimed = await claim(kit, asked())
    await kit.work(executor.handle, "COMMIT")
    await kit.work(executor.handle, "BEGIN")
    await kit.work(executor.handle, "INSERT INTO work (n) VALUES (1)")
    assert await finish(kit, asked(), executor, claimed) == Concluded(DONE, torn=True)
    assert (kit.count("work"), kit.count("taptwice_records")) == (1, 1)


@on_all
async def test_a_handler_that_rolls_back_by_itself_is_noticed(kit: Kit) -> None:
    executor, claimed = await claim(kit, asked())
    await kit.work(executor.handle, "INSERT INTO work (n) VALUES (1)")
    await kit.work(executor.handle, "ROLLBACK")
    assert await finish(kit, asked(), executor, claimed) == Concluded(DONE, torn=True)
    assert (kit.count("work"), kit.count("taptwice_records")) == (0, 1)


@on_all
async def test_torn_and_another_attempt_came_between(kit: Kit) -> None:
    executor, claimed = await claim(kit, asked())
    await kit.work(executor.handle, "INSERT INTO work (n) VALUES (1)")
    await kit.work(executor.handle, "COMMIT")
    other = Answer(200, (), b"of the other")
    await one_charge(kit, asked(), other)
    assert await finish(kit, asked(), executor, claimed) == Concluded(other, replayed=True, torn=True)


@on_all
async def test_plain_transactions_without_a_claim(kit: Kit) -> None:
    """What the edge does for a request without a key."""
    executor = kit.source.open()

    async def step(command: Command[Any]) -> Any:
        if kit.blocking:
            return await asyncio.to_thread(executor.execute, command)
        return await executor.execute(command)

    await step(Together((Begin(1.0),)))
    await kit.work(executor.handle, "INSERT INTO work (n) VALUES (1)")
    await step(Commit())
    await kit.run(abandon(), executor)
    assert kit.count("work") == 1


@on_postgres
async def test_the_lock_ends_with_the_transaction_though_the_session_goes_on(kit: Kit) -> None:
    held = (
        "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database"
        " WHERE locktype = 'advisory' AND datname = current_database()"
    )
    executor, _ = await claim(kit, asked())
    assert kit.ask(held) == [(1,)]
    await kit.run(abandon(), executor)
    assert kit.ask(held) == [(0,)]


@on_postgres
async def test_a_server_that_shortens_floating_point_numbers_tears_no_claim(kit: Kit) -> None:
    """`begun` must come back as the number it was, and psycopg asks for it in text."""
    for savepoint in (True, False):
        asking = asked(str(savepoint), savepoint=savepoint)
        executor = kit.source.open()
        await kit.run(settled_to_short_numbers(), executor)
        claimed = await kit.run(claim_in_open_transaction(asking), executor)
        await kit.work(executor.handle, "INSERT INTO work (n) VALUES (1)")
        assert await finish(kit, asking, executor, claimed) == Concluded(DONE)


def settled_to_short_numbers() -> Plan[None]:
    yield from ask(Begin())
    yield from ask(Script("SET LOCAL extra_float_digits = 0"))


def claim_in_open_transaction(asking: Asked) -> Plan[Claimed]:
    after = (Savepoint(),) if asking.savepoint else ()
    found = yield from SqlStore("postgresql").claim(asking.keyed, 0, (), after)
    return Claimed(found.begun)
