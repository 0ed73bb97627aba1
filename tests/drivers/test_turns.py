"""The line of those who write to one file of SQLite: in their order, one at a time, and no turn is lost."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from taptwice.core.plan import Begin, Close, Commit, Join, Rollback
from taptwice.drivers import join as join_executor
from taptwice.drivers import turns
from taptwice.drivers.aiosqlite import Inner
from taptwice.drivers.sqlite import SqliteExecutor, SqliteSource, busy_timeout
from taptwice.drivers.turns import Line, Place, line_of
from taptwice.errors import Busy
from taptwice.flows.transaction import Claimed, abandon
from tests.drivers import kits
from tests.drivers.kits import SQLITE, Kit, asked, called, claim, finish, on, sqlite_database, until

LONG = 60.0
"""Seconds: who waits so long has failed."""

in_line = on(["sqlite3", "aiosqlite"])


# --- a line -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Somebody:
    """Who stands in a line."""

    is_gone: bool = False


def standing(line: Line, number: int) -> tuple[list[Somebody], list[Place]]:
    """So many, one behind the other."""
    writers = [Somebody() for _ in range(number)]
    return writers, [Place(line, writer) for writer in writers]


def order(line: Line) -> list[Place]:
    return list(line._places)


def test_the_next_has_the_turn_from_wherever_somebody_leaves() -> None:
    line = Line()
    writers, [first, second, third, fourth] = standing(line, 4)
    third.leave()
    assert order(line) == [first, second, fourth]
    first.leave()
    assert second.wait(LONG) > 0
    assert second.is_first
    second.leave()
    second.leave()
    assert fourth.wait(LONG) > 0
    fourth.leave()
    assert order(line) == []
    assert len(writers) == 4


def test_whose_turn_does_not_come_in_time_leaves_and_the_others_keep_their_order() -> None:
    line = Line()
    writers, [first, second, third] = standing(line, 3)
    assert second.wait(0.0) == 0.0
    assert order(line) == [first, third]
    first.leave()
    assert third.wait(LONG) > 0
    assert len(writers) == 3


def test_a_turn_that_comes_as_somebody_leaves_goes_on_to_the_next() -> None:
    line = Line()
    writers, [first, second, third] = standing(line, 3)
    first.leave()  # which calls the second
    second.leave()
    assert third.wait(LONG) > 0
    assert third.is_first
    assert len(writers) == 3


def test_a_waiting_that_is_interrupted_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line()
    writers, [first, second, third] = standing(line, 3)

    class Interrupted:
        def acquire(self, timeout: float) -> bool:
            raise KeyboardInterrupt

        def release(self) -> None:
            pass

    monkeypatch.setattr(second, "_bell", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        second.wait(LONG)
    assert order(line) == [first, third]
    assert len(writers) == 3


@pytest.mark.parametrize("whose", [0, 1])
def test_a_writer_that_is_collected_has_left(whose: int) -> None:
    line = Line()
    writers, places = standing(line, 3)
    del writers[whose]
    gc.collect()
    del places[whose]
    assert order(line) == places
    if whose == 1:
        places[0].leave()
    assert places[1 - (whose == 0)].wait(LONG) > 0


def test_a_writer_that_is_gone_is_taken_off_by_who_comes_next() -> None:
    line = Line()
    writers, [first, second] = standing(line, 2)
    writers[0].is_gone = True
    assert first.is_first
    newcomer = Somebody()
    third = Place(line, newcomer)
    assert order(line) == [second, third]
    assert second.wait(LONG) > 0


def test_writers_that_are_gone_are_taken_off_by_who_leaves() -> None:
    line = Line()
    writers, [first, second, third, fourth] = standing(line, 4)
    writers[1].is_gone = writers[2].is_gone = True
    first.leave()
    assert order(line) == [fourth]
    assert fourth.wait(LONG) > 0
    assert second.wait(LONG) > 0, "it does not sleep on in vain"
    assert not second.is_first
    assert not third.is_first


def test_fifty_threads_have_the_turn_one_at_a_time_in_the_order_in_which_they_came() -> None:
    line, served = Line(), list[int]()
    stands, crowds = threading.Semaphore(0), list[int]()
    inside = threading.Semaphore(1)

    def work(number: int) -> None:
        writer = Somebody()
        place = Place(line, writer)
        stands.release()
        assert place.wait(LONG) > 0
        if not inside.acquire(blocking=False):
            crowds.append(number)
        served.append(number)
        inside.release()
        place.leave()
        assert not writer.is_gone

    holder = Somebody()
    held = Place(line, holder)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
        stands.acquire()
    held.leave()
    for thread in threads:
        thread.join()
    assert (served, crowds, order(line)) == (list(range(50)), [], [])


def test_a_crowd_that_comes_and_goes_at_random_loses_no_turn() -> None:
    """Some do not wait for long, some are collected with the turn; each of the others has it once, alone."""
    line = Line()
    inside, crowds, served = threading.Semaphore(1), list[int](), list[int]()

    def work(number: int) -> None:
        for each in range(100):
            writer = Somebody()
            place = Place(line, writer)
            if (number + each) % 3 == 0:
                if place.wait(0.0) == 0.0:
                    place.leave()
                del writer
                continue
            assert place.is_first or place.wait(LONG) > 0
            if not inside.acquire(blocking=False):
                crowds.append(number)
            served.append(number)
            inside.release()
            if (number + each) % 3 == 1:
                place.leave()
            assert not writer.is_gone
            del writer

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(served), crowds, order(line)) == (12 * 100 * 2 // 3, [], [])


def test_a_file_has_one_line_and_nobody_keeps_an_empty_one() -> None:
    mine, another = line_of("/a/file"), line_of("/another/file")
    assert line_of("/a/file") is mine
    assert another is not mine
    writer = Somebody()
    place = Place(mine, writer)
    del mine
    gc.collect()
    assert order(line_of("/a/file")) == [place]
    place.leave()
    del place
    gc.collect()
    assert "/a/file" not in turns._lines


def test_a_forked_process_has_nobody_in_its_lines() -> None:
    program = (
        "import os, sys, threading\n"
        "from taptwice.drivers import turns\n"
        "class Somebody: is_gone = False\n"
        "writer = Somebody()\n"
        "turns.Place(turns.line_of('/a/file'), writer)\n"
        "turns._making.acquire()\n"  # as another thread may, at that moment
        "child = os.fork()\n"
        "if not child:\n"
        "    mine = Somebody()\n"
        "    os._exit(0 if turns.Place(turns.line_of('/a/file'), mine).is_first else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# --- on SQLite ----------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> str:
    return sqlite_database(tmp_path / "database.sqlite")


def people(path: str) -> int:
    """How many stand in the line of the file."""
    return len(order(line_of(str(Path(path).resolve()))))


async def stand(path: str, number: int) -> None:
    await until(lambda: people(path) == number, f"{number} stand in line")


async def cycle(kit: Kit, key: str, note: Callable[[], object]) -> None:
    executor, claimed = await claim(kit, asked(key, wait=LONG))
    assert isinstance(claimed, Claimed)
    note()
    await finish(kit, asked(key), executor, claimed)


@in_line
async def test_the_turn_is_had_from_begin_to_the_end_of_the_transaction(kit: Kit) -> None:
    executor, claimed = await claim(kit, asked())
    assert people(kit.place) == 1
    await kit.work(executor.handle, "INSERT INTO work (n) VALUES (1)")
    assert people(kit.place) == 1
    await finish(kit, asked(), executor, claimed)
    assert people(kit.place) == 0
    executor, _ = await claim(kit, asked("another"))
    await kit.run(abandon(), executor)
    assert people(kit.place) == 0


async def test_threads_and_tasks_stand_in_one_line(path: str) -> None:
    both = [SQLITE[name](path) for name in ("sqlite3", "aiosqlite")]
    for kit in both:
        await kit.start()
    holder, claimed = await claim(both[0], asked("held"))
    served: list[int] = []
    waiting = []
    for number in range(20):
        note = lambda number=number: served.append(number)  # noqa: E731
        waiting.append(asyncio.create_task(cycle(both[number % 2], str(number), note)))
        await stand(path, number + 2)
    await finish(both[0], asked("held"), holder, claimed)
    await asyncio.gather(*waiting)
    assert served == list(range(20))
    assert both[0].count("taptwice_records") == 21


@pytest.mark.parametrize("name", ["sqlite3", "aiosqlite"])
async def test_each_takes_one_connection_however_long_it_waits(
    path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = 0

    class Counted(sqlite3.Connection):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            nonlocal opened
            opened += 1
            super().__init__(*arguments, **options)

    monkeypatch.setattr(kits, "Enforcing", Counted)
    kit = SQLITE[name](path)
    await kit.start()
    await asyncio.gather(*(cycle(kit, str(number), lambda: None) for number in range(40)))
    assert opened == 40


@in_line
async def test_a_turn_that_does_not_come_in_time(kit: Kit) -> None:
    holder, claimed = await claim(kit, asked("held"))
    executor = kit.source.open()
    with pytest.raises(Busy):
        await kit.run(_begin(0.05), executor)
    assert people(kit.place) == 1
    await kit.run(abandon(), executor)
    await finish(kit, asked("held"), holder, claimed)
    assert people(kit.place) == 0


def _begin(wait: float) -> Any:
    yield Begin(wait)


@in_line
async def test_another_process_has_the_lock(kit: Kit) -> None:
    """The first in line waits for it in SQLite, those behind it for the first."""
    with contextlib.closing(sqlite3.connect(kit.place, isolation_level=None)) as outside:
        outside.execute("BEGIN IMMEDIATE")
        served: list[int] = []
        waiting = []
        for number in range(3):
            note = lambda number=number: served.append(number)  # noqa: E731
            waiting.append(asyncio.create_task(cycle(kit, str(number), note)))
            await stand(kit.place, number + 1)
        outside.execute("COMMIT")
        await asyncio.gather(*waiting)
    assert served == [0, 1, 2]


@in_line
async def test_a_handler_that_ends_the_transaction_keeps_nobody_waiting(kit: Kit) -> None:
    holder, claimed = await claim(kit, asked("torn"))
    await kit.work(holder.handle, "COMMIT")
    executor, other = await claim(kit, asked("another"))
    assert people(kit.place) == 1, "who comes takes it off"
    saving = asyncio.create_task(finish(kit, asked("torn"), holder, claimed))
    await stand(kit.place, 2)
    await finish(kit, asked("another"), executor, other)
    assert (await saving).torn
    assert people(kit.place) == 0


async def test_a_cancelled_task_waits_no_longer(path: str) -> None:
    kit = SQLITE["aiosqlite"](path)
    await kit.start()
    holder, claimed = await claim(kit, asked("held"))
    waiting = asyncio.create_task(cycle(kit, "cancelled", lambda: None))
    await stand(path, 2)
    behind = asyncio.create_task(cycle(kit, "behind", lambda: None))
    await stand(path, 3)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await stand(path, 2)
    assert not behind.done()
    await finish(kit, asked("held"), holder, claimed)
    await behind
    assert kit.count("taptwice_records") == 2


def test_an_event_loop_that_is_closed_keeps_nobody_waiting(path: str) -> None:
    """Neither in front, with its transaction open, nor further behind."""

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(path, check_same_thread=False)

    async def inner() -> Inner:
        return Inner(connect)

    def begin(executor: SqliteExecutor, seconds: float = LONG) -> None:
        with contextlib.suppress(Busy):
            executor.execute(Begin(seconds))

    loops = [asyncio.new_event_loop() for _ in range(2)]
    first, second = (loop.run_until_complete(inner()) for loop in loops)
    third = SqliteSource(connect).open()
    begin(first)
    threads = []
    for number, executor in enumerate((second, third), 2):
        threads.append(threading.Thread(target=begin, args=(executor,)))
        threads[-1].start()
        asyncio.run(stand(path, number))
    for loop in loops:
        loop.close()
    newcomer = SqliteSource(connect).open()
    threads.append(threading.Thread(target=begin, args=(newcomer,)))
    threads[-1].start()
    asyncio.run(stand(path, 2))  # the first two are taken off
    first.execute(Rollback())  # as when its connection is collected: until then the file is locked
    threads[0].join()
    threads[1].join()
    assert not second.handle.in_transaction
    assert third.handle.in_transaction
    for executor in (third, newcomer, first, second):
        executor.execute(Rollback())
        for thread in threads[2:] if executor is third else ():
            thread.join()
    for executor in (third, newcomer, first, second):
        executor.execute(Close())
    assert people(path) == 0


def test_a_thread_that_ends_without_a_word_keeps_nobody_waiting(path: str) -> None:
    source = SqliteSource(lambda: sqlite3.connect(path, check_same_thread=False))
    began = threading.Event()

    def leave_it_open() -> None:
        source.open().execute(Begin())
        began.set()

    thread = threading.Thread(target=leave_it_open)
    thread.start()
    thread.join()
    gc.collect()
    assert began.is_set()
    assert people(path) == 0
    executor = source.open()
    executor.execute(Begin())
    executor.execute(Commit())
    executor.execute(Close())


@in_line
async def test_a_connection_of_the_callers_stands_in_no_line(kit: Kit) -> None:
    async with kit.caller() as connection:
        executor = join_executor(connection)
        await (called(executor.execute, Join()) if kit.blocking else executor.execute(Join()))
        assert people(kit.place) == 0


@pytest.mark.parametrize("place", [":memory:", "", "file:shared?mode=memory&cache=shared"])
def test_what_is_in_no_file_has_no_line(place: str) -> None:
    source = SqliteSource(lambda: sqlite3.connect(place, uri=True))
    executor = source.open()
    before = dict(turns._lines)
    executor.execute(Begin())
    assert dict(turns._lines) == before
    executor.execute(Close())


async def test_two_names_of_a_file_are_one_line(path: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    first, second = (SQLITE["sqlite3"](place) for place in (path, str(tmp_path / "link")))
    for kit in (first, second):
        await kit.start()
    holder, claimed = await claim(first, asked("held"))
    waiting = asyncio.create_task(cycle(second, "waiting", lambda: None))
    await stand(path, 2)
    await finish(first, asked("held"), holder, claimed)
    await waiting


async def test_files_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Whichever of them a function opens."""
    paths = [sqlite_database(tmp_path / f"{number}.sqlite") for number in range(2)]
    opens = iter([paths[0], paths[1], paths[0]])
    source = SqliteSource(lambda: sqlite3.connect(next(opens), check_same_thread=False))
    one, other, behind = source.open(), source.open(), source.open()
    one.execute(Begin())
    other.execute(Begin())
    assert [people(path) for path in paths] == [1, 1]
    with pytest.raises(Busy):
        behind.execute(Begin())
    for executor in (one, other, behind):
        executor.execute(Rollback())
        executor.execute(Close())
    assert [people(path) for path in paths] == [0, 0]


@pytest.mark.parametrize(("wait", "milliseconds"), [(0, 0), (2.5, 2500), (1e9, 2**31 - 1)])
def test_sqlite_waits_as_long_as_it_is_told(wait: float, milliseconds: int) -> None:
    """It takes what does not fit into its number for no wait at all."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(f"PRAGMA busy_timeout = {busy_timeout(wait)}")
        assert connection.execute("PRAGMA busy_timeout").fetchone() == (milliseconds,)
