"""Fault injection itself, on functions of a user; on plans it is at work in tests/crash."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from taptwice import sql
from taptwice.core import fingerprint
from taptwice.core.model import Answer, Keyed
from taptwice.core.plan import Begin, Commit, Plan, Query, Rollback, Savepoint, arun, ask
from taptwice.errors import CommitUnknown, InFlight, StoreUnavailable
from taptwice.faults import (
    Crash,
    Fail,
    Fault,
    Injected,
    Kind,
    Lose,
    Stall,
    apoint,
    crash_at,
    driving,
    every,
    interleavings,
    point,
    watched,
)
from taptwice.flows.guard import Guard
from taptwice.flows.transaction import Asked, Replayed, conclude, open_claim
from taptwice.stores.memory import MemoryDatabase
from taptwice.stores.sql import SqlStore

ASKED = Asked(Keyed("anna", "k"), fingerprint.of_bytes(b"pay 5"), 60, wait=0)


def test_a_crash_ends_everything() -> None:
    database = MemoryDatabase()
    source = crash_at(3, database)
    executor = source.open()
    executor.execute(Begin())
    executor.handle.insert("charges", 5)
    executor.execute(Savepoint())
    with pytest.raises(Crash):
        executor.execute(Commit())
    for command in (Rollback(), Commit()):
        with pytest.raises(Crash):
            executor.execute(command)
    with pytest.raises(Crash):
        _ = executor.handle
    assert source.fate.struck
    assert [type(command) for command in source.fate.commands] == [Begin, Savepoint, Commit]
    assert (database.rows("charges"), database.transactions) == ((), [])


@pytest.mark.parametrize(
    ("kind", "error", "rows"),
    [
        (Kind.BEFORE, Crash, ()),
        (Kind.AFTER, Crash, (5,)),
        (Kind.LOST, CommitUnknown, (5,)),
        (Kind.REFUSED, StoreUnavailable, ()),
    ],
)
def test_each_kind_at_a_commit(kind: Kind, error: type[BaseException], rows: tuple[int, ...]) -> None:
    database = MemoryDatabase()
    executor = crash_at(2, database, kind).open()
    executor.execute(Begin())
    executor.handle.insert("charges", 5)
    with pytest.raises(error):
        executor.execute(Commit())
    if error is not Crash:
        with pytest.raises(StoreUnavailable):
            executor.execute(Savepoint())
        executor.execute(Rollback())
    assert database.rows("charges") == rows


# --- a function of the user's, in his own transaction on sqlite3


def pay(connection: sqlite3.Connection, target: Any) -> int:
    """`target` is what the claim is given: the connection, or the connection under a fault."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        claimed = Guard().claim(target, account="anna", key="a-long-enough-key", request={"cents": 5})
        with claimed as claim:
            if not claim.replayed:
                charge = connection.execute("INSERT INTO charges (cents) VALUES (5)").lastrowid
                claim.finish(201, {"charge": charge})
        answer: dict[str, int] = claim.answer.json()
        return answer["charge"]


def test_a_users_function(tmp_path: Path) -> None:
    numbers = iter(range(10_000))

    def start() -> Callable[[Any], int]:
        path = tmp_path / f"{next(numbers)}.db"
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE charges (id INTEGER PRIMARY KEY, cents INTEGER)")
            for migration in sql.migrations("sqlite"):
                connection.executescript(migration.text)
        connection.close()

        def attempt(faulty: Callable[[Any], Any]) -> int:
            connection = sqlite3.connect(path, isolation_level=None)
            try:
                return pay(connection, faulty(connection))
            finally:
                charges.append(connection.execute("SELECT count(*) FROM charges").fetchone()[0])
                connection.close()

        return attempt

    charges: list[int] = []
    trials = 0
    for trial in every(start):
        trials += 1
        assert isinstance(trial.outcomes[0], Crash | StoreUnavailable), trial
        assert trial.retry() == trial.retry(), trial
        assert charges[-2:] == [1, 1], trial
    assert trials > 10


# --- a function that awaits, on a source


async def pay_async(source: Any) -> Answer:
    executor = source.open()
    store = SqlStore(source.dialect)
    claimed = await arun(open_claim(store, ASKED), executor.execute)
    if isinstance(claimed, Replayed):
        return claimed.record.answer
    executor.handle.insert("charges", 5)
    return (await arun(conclude(store, ASKED, claimed, Answer(201), False), executor.execute)).answer


def test_a_function_that_awaits() -> None:
    class World:
        def __init__(self) -> None:
            self.database = MemoryDatabase()

        def __call__(self, faulty: Callable[[Any], Any]) -> Answer:
            return asyncio.run(pay_async(faulty(self.database.asynchronous())))

    trials = 0
    for trial in every(World, in_a_row=1):
        trials += 1
        assert trial.retry() == Answer(201), trial
        assert trial.attempt.database.rows("charges") == (5,), trial
    assert trials > 20


# --- plans


def test_every_place_of_a_plan_and_the_words_for_it() -> None:
    def plan() -> Plan[str]:
        yield from ask(Begin())
        yield from ask(Commit())
        return "done"

    trials = list(every(lambda: driving(plan, MemoryDatabase()), in_a_row=2, kinds=(Kind.AFTER,)))
    places = [tuple(fault.command for fault in trial.faults) for trial in trials]
    assert places == [(1,), (1, 1), (1, 2), (2,), (2, 1), (2, 2)]
    assert str(trials[1]) == "crash after command 1, then crash after command 1"
    assert trials[0].retry() == "done"
    assert str(Fault(Kind.LOST, 3)) == "reply lost command 3"


def test_all_orders_of_two_plans() -> None:
    class World:
        def __init__(self) -> None:
            self.database = MemoryDatabase()
            self.said: list[str] = []
            self.workers = [(self.plan(name), self.database.open()) for name in "ab"]

        def plan(self, name: str) -> Plan[str]:
            yield from ask(Begin())
            self.said.append(name)
            yield from ask(Commit())
            self.said.append(name)
            return name

    games = list(interleavings(World, cuts=None))
    assert len(games) == 6
    assert {str(game) for game in games} == {"0011", "0101", "0110", "1001", "1010", "1100"}
    assert all(game.outcomes == ("a", "b") for game in games)
    assert {str(game) for game in interleavings(World, cuts=0)} == {"0011", "1100"}


def test_nobody_waits_in_a_game() -> None:
    """A worker that waits for a lock lets the other go on; where nobody can, it gives up."""

    class World:
        def __init__(self, ends: bool) -> None:
            database = MemoryDatabase(lock_timeout=0)
            self.workers = [(self.plan(ends), database.open()) for _ in range(2)]

        def plan(self, ends: bool) -> Plan[bool]:
            yield from ask(Begin())
            given = (("lock", 7), ("id", b"7"), ("wait_ms", 1000))
            rows = yield from ask(Query("claim", given))
            if ends:
                yield from ask(Commit())
            if not rows[0][0]:
                raise InFlight
            return True

    for game in interleavings(lambda: World(ends=True)):
        assert game.outcomes == (True, True)
    for game in interleavings(lambda: World(ends=False)):
        assert sorted(map(repr, game.outcomes))[1] == "True"
        assert any(isinstance(outcome, InFlight) for outcome in game.outcomes)


# --- named points


def test_who_stalls_is_let_go_at_the_end() -> None:
    said = []

    def handler(name: str) -> None:
        point("here")
        said.append(name)

    with ThreadPoolExecutor() as threads, Stall("here") as stall:
        first = threads.submit(handler, "first")
        stall.reached(timeout=10)
        handler("second")  # one stalls, unless told otherwise
        assert said == ["second"]
    first.result(timeout=10)
    assert said == ["second", "first"]


async def test_a_point_that_awaits() -> None:
    async def handler() -> str:
        await apoint("here")
        return "done"

    with Stall("here") as stall:
        task = asyncio.create_task(handler())
        await stall.areached()
        assert not task.done()
        stall.release()
        assert await task == "done"
    with Fail("here", ValueError("asked for"), times=2) as fail:
        for _ in range(2):
            with pytest.raises(ValueError, match="asked for"):
                await handler()
        assert fail.met
        assert await handler() == "done"


def test_a_point_that_awaits_blocks_without_an_event_loop() -> None:
    """A handler on a blocking driver is driven by hand and cannot suspend."""

    def drive() -> None:
        with pytest.raises(StopIteration):
            apoint("here").send(None)

    with ThreadPoolExecutor() as threads, Stall("here") as stall:
        driven = threads.submit(drive)
        stall.reached(timeout=10)
        stall.release()
        driven.result(timeout=10)


def test_nobody_stands_at_a_point_after_the_block() -> None:
    with Fail("here"), pytest.raises(Injected):
        point("here")
    point("here")


@pytest.mark.parametrize(("carried_out", "rows"), [(True, (5,)), (False, ())])
def test_a_lost_commit(carried_out: bool, rows: tuple[int, ...]) -> None:
    database = MemoryDatabase()
    executor = watched(database).open()
    with Lose("commit", carried_out):
        executor.execute(Begin())
        executor.handle.insert("charges", 5)
        with pytest.raises(CommitUnknown):
            executor.execute(Commit())
    assert database.rows("charges") == rows


async def test_the_points_of_a_transaction() -> None:
    database = MemoryDatabase()
    source = watched(database.asynchronous())
    with Lose("before_claim"), pytest.raises(StoreUnavailable):
        await pay_async(source)
    for name in ("begin", "after_claim", "before_commit", "after_commit"):
        with Fail(name), pytest.raises(Injected):
            await pay_async(watched(MemoryDatabase().asynchronous()))
    assert await pay_async(source) == Answer(201)
    with Fail("after_claim") as never:
        assert await pay_async(source) == Answer(201)  # a replay does not win the claim
    assert not never.met


def test_kill() -> None:
    code = "from taptwice.faults import Kill, point\nwith Kill('here'):\n    point('here')"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
