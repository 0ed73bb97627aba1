from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiosqlite
import psycopg
import pytest

from taptwice import drivers, sql
from taptwice.core import fingerprint, plan
from taptwice.core.model import Answer, Keyed
from taptwice.core.plan import Begin, Close, Command, Commit, Query, Rollback, run
from taptwice.drivers import aiosqlite as aiosqlite_driver
from taptwice.drivers import psycopg as psycopg_driver
from taptwice.drivers import sqlite as sqlite_driver
from taptwice.errors import Misuse, StoreUnavailable
from taptwice.flows import retention
from taptwice.flows.migrate import migrate
from taptwice.flows.retention import sweep_turn, sweeping
from taptwice.flows.transaction import abandon
from taptwice.stores.memory import MemoryDatabase
from taptwice.stores.sql import Entry, SqlStore

DAY = 86400.0
SOON = 0.01
"""Seconds: an interval after which a test need not wait for long."""


def remember(source: drivers.Source, key: str, made: float, window: float = DAY) -> None:
    """A record that was made so many seconds ago."""

    def saving() -> plan.Plan[None]:
        store = SqlStore(source.dialect, now=time.time() - made)
        entry = Entry(Keyed("acct_1", key), fingerprint.of_bytes(b"x"), Answer(201), window, None)
        yield from plan.ask(Begin())
        assert (yield from store.insert_late(entry))
        yield from plan.ask(Commit())
        yield from plan.ask(Close())

    run(saving(), source.open().execute)


def keys(source: drivers.Source) -> list[str]:
    """Those of all records that are left of `expired` and `alive`."""

    def looking() -> plan.Plan[list[str]]:
        yield from plan.ask(Begin(wait=5))
        left = []
        for number in range(10):
            for name in (f"expired-{number}", f"alive-{number}"):
                if (yield from SqlStore(source.dialect).look(Keyed("acct_1", name))):
                    left.append(name)
        yield from plan.ask(Rollback())
        yield from plan.ask(Close())
        return left

    return run(looking(), source.open().execute)


def filled(source: drivers.Source, expired: int) -> None:
    for number in range(expired):
        remember(source, f"expired-{number}", made=DAY + 60)
    remember(source, "alive-0", made=DAY - 60)
    remember(source, "alive-1", made=0)
    remember(source, "alive-2", made=2 * DAY, window=3 * DAY)


ALIVE = ["alive-0", "alive-1", "alive-2"]


@pytest.fixture
def source(tmp_path: Path) -> drivers.Source:
    made = sqlite_driver.connecting(lambda: sqlite3.connect(tmp_path / "shop.db"))
    run(migrate("sqlite"), made.open().execute)
    return made


@pytest.fixture(params=["memory", "sqlite", "psycopg"])
def any_source(request: pytest.FixtureRequest) -> drivers.Source:
    if request.param == "memory":
        return MemoryDatabase()
    if request.param == "sqlite":
        found: drivers.Source = request.getfixturevalue("source")
        return found
    url = request.getfixturevalue("fresh_postgres")
    made = psycopg_driver.connecting(lambda: psycopg.connect(url))
    run(migrate("postgresql"), made.open().execute)
    return made


# --- one turn -----------------------------------------------------------------------------------------------


def test_a_turn_removes_at_most_a_batch_and_never_what_is_within_its_window(
    any_source: drivers.Source,
) -> None:
    filled(any_source, expired=5)
    store = SqlStore(any_source.dialect)
    counts = [run(sweep_turn(store, 2), any_source.open().execute) for _ in range(4)]
    assert counts == [2, 2, 1, 0]
    assert keys(any_source) == ALIVE


def test_two_sweepers_of_postgresql_do_not_wait_for_each_other(fresh_postgres: str) -> None:
    source = psycopg_driver.connecting(
        lambda: psycopg.connect(fresh_postgres, options="-c lock_timeout=1000")
    )
    run(migrate("postgresql"), source.open().execute)
    filled(source, expired=6)
    store = SqlStore("postgresql")
    other = source.open()
    other.execute(Begin())
    other.execute(Query("sweep", (("batch", 4), ("now", None))))
    assert run(sweep_turn(store, 4), source.open().execute) == 2
    run(abandon(), other.execute)
    assert run(sweep_turn(store, 4), source.open().execute) == 4


class Scripted:
    """A source whose executors note their commands and answer as they are told."""

    dialect: sql.Dialect = "sqlite"  # whose turn has no more to it than the batch
    blocking = True

    def __init__(self, answer: Callable[[Command[Any]], Any]) -> None:
        self.answer = answer
        self.commands: list[Command[Any]] = []

    def open(self) -> Scripted:
        return self

    def execute(self, command: Command[Any]) -> Any:
        self.commands.append(command)
        return self.answer(command) if isinstance(command, Query) else None

    @property
    def kinds(self) -> list[type]:
        return [type(command) for command in self.commands]


class AsyncScripted(Scripted):
    blocking = False

    async def execute(self, command: Command[Any]) -> Any:
        self.commands.append(command)
        return await self.answer(command) if isinstance(command, Query) else None


def away(command: Command[Any]) -> Any:
    raise StoreUnavailable("the network is gone")


def test_a_turn_that_fails_gives_its_connection_back() -> None:
    source = Scripted(away)
    with pytest.raises(StoreUnavailable):
        run(sweep_turn(SqlStore("postgresql"), 10), source.execute)
    assert source.kinds == [Begin, Query, Rollback, Close]


# --- in the background --------------------------------------------------------------------------------------


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        # In a thread: a look waits for the sweeper's transaction, which may need this loop to end.
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110  (nothing tells when it is so)
            await asyncio.sleep(0.005)


async def test_a_blocking_source_is_swept_in_a_thread(any_source: drivers.Source) -> None:
    filled(any_source, expired=5)
    async with sweeping(any_source, every=SOON, batch=2):
        await eventually(lambda: keys(any_source) == ALIVE)
    assert keys(any_source) == ALIVE


async def test_an_awaiting_source_is_swept_in_a_task(source: drivers.Source, tmp_path: Path) -> None:
    filled(source, expired=5)
    awaiting = aiosqlite_driver.connecting(lambda: aiosqlite.connect(tmp_path / "shop.db"))
    async with sweeping(awaiting, every=SOON, batch=2):
        await eventually(lambda: keys(source) == ALIVE)
    assert keys(source) == ALIVE


def test_a_program_that_awaits_nothing_uses_with(source: drivers.Source) -> None:
    filled(source, expired=5)
    with sweeping(source, every=SOON, batch=2):
        deadline = time.monotonic() + 10
        while keys(source) != ALIVE and time.monotonic() < deadline:
            time.sleep(0.005)
    assert keys(source) == ALIVE
    assert "taptwice-sweeping" not in [thread.name for thread in threading.enumerate()]


def test_an_awaiting_source_refuses_with() -> None:
    with pytest.raises(Misuse, match="async with"), sweeping(AsyncScripted(away)):
        pass


@pytest.mark.parametrize("error", [StoreUnavailable("the network is gone"), RuntimeError("a bug")])
@pytest.mark.parametrize("blocking", [True, False])
async def test_a_failure_is_logged_and_the_sweeper_goes_on(
    blocking: bool, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    turns = 0

    def answer(command: Command[Any]) -> Any:
        nonlocal turns
        turns += 1
        if turns < 3:
            raise error
        return ()

    async def aanswer(command: Command[Any]) -> Any:
        return answer(command)

    source = Scripted(answer) if blocking else AsyncScripted(aanswer)
    async with sweeping(source, every=SOON):
        await eventually(lambda: turns >= 4)
    failures = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(failures) == 2
    assert str(error) in failures[0].message
    # A store that is away says so in one line; a bug shows where it is.
    assert (failures[0].exc_info is None) == isinstance(error, StoreUnavailable)


@pytest.mark.parametrize("kind", [Scripted, AsyncScripted])
async def test_leaving_between_two_turns_does_not_wait_for_the_next(kind: type[Scripted]) -> None:
    source = kind(away)
    async with asyncio.timeout(30):
        async with sweeping(source, every="1h"):
            pass
    assert source.commands == []


async def test_leaving_lets_the_batch_under_way_end() -> None:
    running, end = asyncio.Event(), asyncio.Event()

    async def slow(command: Command[Any]) -> Any:
        running.set()
        await end.wait()
        return ((1,),)

    source = AsyncScripted(slow)
    async with sweeping(source, every=SOON):
        await running.wait()
        asyncio.get_running_loop().call_soon(end.set)  # comes when the leaving waits
    assert source.kinds == [Begin, Query, Commit, Rollback, Close]


async def test_leaving_lets_the_batch_in_a_thread_end() -> None:
    running, end = threading.Event(), threading.Event()

    def slow(command: Command[Any]) -> Any:
        running.set()
        end.wait(10)
        return ((1,),)

    source = Scripted(slow)
    async with sweeping(source, every=SOON):
        await asyncio.to_thread(running.wait, 10)
        asyncio.get_running_loop().call_soon(end.set)  # comes when the leaving waits
    assert source.kinds == [Begin, Query, Commit, Rollback, Close]


@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_batch_that_hangs_is_rolled_back(monkeypatch: pytest.MonkeyPatch, cancelled: bool) -> None:
    monkeypatch.setattr(retention, "GRACE", 0.05)
    running = asyncio.Event()

    async def hanging(command: Command[Any]) -> Any:
        running.set()
        await asyncio.Event().wait()

    source = AsyncScripted(hanging)

    async def serve() -> None:
        async with sweeping(source, every=SOON):
            await (asyncio.Event() if cancelled else running).wait()

    serving = asyncio.create_task(serve())
    await running.wait()
    if cancelled:
        serving.cancel()
    _ = await asyncio.wait({serving}, timeout=10)
    assert serving.cancelled() == cancelled
    assert source.kinds == [Begin, Query, Rollback, Close]


async def test_a_full_batch_is_followed_by_the_next_one_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def shorter(pause: float) -> float:
        pauses.append(pause)
        return 0.0 if len(pauses) <= 3 else pause

    monkeypatch.setattr(retention, "jittered", shorter)
    counts = iter([2, 2, 1])

    async def answer(command: Command[Any]) -> Any:
        return ((1,),) * next(counts)

    source = AsyncScripted(answer)
    async with sweeping(source, every="1h", batch=2):
        await eventually(lambda: source.kinds.count(Close) == 3)
    assert pauses == [3600 * retention.FIRST, retention.BREATH, retention.BREATH, 3600]
    assert source.kinds.count(Query) == 3


@pytest.mark.parametrize(("every", "batch"), [(0, 1000), ("10m", 0), ("soon", 1000), (-1, 1000)])
def test_settings_that_make_no_sense(every: float | str, batch: int) -> None:
    with pytest.raises(Misuse):
        sweeping(Scripted(away), every, batch)
