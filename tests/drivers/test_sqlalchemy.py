"""What a session adds: commits that release a savepoint, work that waits to be flushed, and more than one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from taptwice import drivers
from taptwice.core.plan import Command, Flush
from taptwice.flows.transaction import Concluded, abandon, join, settle
from taptwice.stores.sql import SqlStore
from tests.drivers.kits import (
    DONE,
    POSTGRES,
    SQLITE,
    AsyncSqlalchemyKit,
    Kit,
    asked,
    called,
    claim,
    finish,
    on,
)

SESSIONS = [name for name in [*SQLITE, *POSTGRES] if "session" in name]
ENGINES = [name for name in [*SQLITE, *POSTGRES] if "engine" in name]

sessions = on(SESSIONS)


class Base(DeclarativeBase):
    pass


class Parent(Base):
    __tablename__ = "parents"
    id: Mapped[int] = mapped_column(primary_key=True)


async def on_session(kit: Kit, session: Any, name: str, *arguments: Any) -> Any:
    """Call a method of a session, blocking or awaiting."""
    if isinstance(session, AsyncSession):
        made = getattr(session, name)(*arguments)
        return await made if asyncio.iscoroutine(made) else made
    return await called(getattr(session, name), *arguments)


async def insert(kit: Kit, session: Any, number: int) -> None:
    await kit.work(session, f"INSERT INTO work (n) VALUES ({number})")


@sessions
async def test_a_commit_of_the_handlers_is_none_until_the_answer(kit: Kit) -> None:
    executor, claimed = await claim(kit, asked())
    await insert(kit, executor.handle, 1)
    await on_session(kit, executor.handle, "commit")
    await insert(kit, executor.handle, 2)
    await on_session(kit, executor.handle, "commit")
    assert kit.dialect == "sqlite" or kit.count("work") == 0
    assert await finish(kit, asked(), executor, claimed) == Concluded(DONE)
    assert kit.ask("SELECT n FROM work ORDER BY n") == [(1,), (2,)]


@sessions
async def test_undo_reaches_behind_the_handlers_commits(kit: Kit) -> None:
    executor, claimed = await claim(kit, asked())
    await insert(kit, executor.handle, 1)
    await on_session(kit, executor.handle, "commit")
    await insert(kit, executor.handle, 2)
    assert await finish(kit, asked(), executor, claimed, undo=True) == Concluded(DONE)
    assert (kit.count("work"), kit.count("taptwice_records")) == (0, 1)


@sessions
async def test_abandon_reaches_behind_the_handlers_commits(kit: Kit) -> None:
    executor, _ = await claim(kit, asked())
    await insert(kit, executor.handle, 1)
    await on_session(kit, executor.handle, "commit")
    await kit.run(abandon(), executor)
    assert (kit.count("work"), kit.count("taptwice_records")) == (0, 0)


@sessions
async def test_a_rollback_of_the_handlers_goes_back_to_its_last_commit(kit: Kit) -> None:
    executor, claimed = await claim(kit, asked())
    await insert(kit, executor.handle, 1)
    await on_session(kit, executor.handle, "commit")
    await insert(kit, executor.handle, 2)
    await on_session(kit, executor.handle, "rollback")
    await insert(kit, executor.handle, 3)
    assert await finish(kit, asked(), executor, claimed) == Concluded(DONE)
    assert kit.ask("SELECT n FROM work ORDER BY n") == [(1,), (3,)]


@sessions
async def test_what_waits_to_be_flushed_is_kept(kit: Kit) -> None:
    executor, claimed = await claim(kit, asked())
    await on_session(kit, executor.handle, "add", Parent(id=1))
    assert await finish(kit, asked(), executor, claimed) == Concluded(DONE)
    assert kit.ask("SELECT id FROM parents") == [(1,)]


@sessions
async def test_a_flush_that_fails_is_the_users_own_error(kit: Kit) -> None:
    executor, claimed = await claim(kit, asked())
    await kit.work(executor.handle, "INSERT INTO parents (id) VALUES (1)")
    await on_session(kit, executor.handle, "add", Parent(id=1))
    with pytest.raises(IntegrityError):
        await finish(kit, asked(), executor, claimed)
    assert (kit.count("parents"), kit.count("taptwice_records")) == (0, 0)


@sessions
async def test_flush_brings_its_errors_up_early(kit: Kit) -> None:
    executor, claimed = await claim(kit, asked())
    await kit.work(executor.handle, "INSERT INTO parents (id) VALUES (1)")
    await on_session(kit, executor.handle, "add", Parent(id=1))
    with pytest.raises(IntegrityError):
        await _execute(kit, executor, Flush())
    assert await finish(kit, asked(), executor, claimed, undo=True) == Concluded(DONE)
    assert (kit.count("parents"), kit.count("taptwice_records")) == (0, 1)


async def _execute(kit: Kit, executor: Any, command: Command[Any]) -> Any:
    return await called(executor.execute, command) if kit.blocking else await executor.execute(command)


@sessions
async def test_joined_what_waited_before_the_claim_is_the_callers(kit: Kit) -> None:
    """It is flushed outside the claim's savepoint, and its errors are his."""
    async with kit.caller() as session:
        await on_session(kit, session, "add", Parent(id=1))
        executor = drivers.join(session)
        claimed: Any = await kit.run(join(SqlStore(kit.dialect), asked()), executor)
        await on_session(kit, session, "add", Parent(id=2))
        await kit.run(settle(SqlStore(kit.dialect), asked(), claimed, DONE), executor)
    assert kit.ask("SELECT id FROM parents ORDER BY id") == [(1,), (2,)]
    with pytest.raises(IntegrityError):
        async with kit.caller() as session:
            await on_session(kit, session, "add", Parent(id=1))
            await kit.run(join(SqlStore(kit.dialect), asked("another")), drivers.join(session))


@pytest.mark.parametrize("undo", [False, True])
@on(ENGINES)
async def test_sessions_of_the_users_that_join(kit: Kit, undo: bool) -> None:
    executor, claimed = await claim(kit, asked())
    inner = executor.blocking if isinstance(kit, AsyncSqlalchemyKit) else executor
    first, second = (
        sessionmaker(bind=inner.connection, join_transaction_mode="create_savepoint")() for _ in range(2)
    )

    def work() -> None:
        for session in (first, second):
            inner.adopt(session)
            session.execute(sqlalchemy.text("INSERT INTO work (n) VALUES (1)"))
            session.commit()
        for number, session in enumerate((first, second)):
            session.add(Parent(id=number))
            session.flush()

    await _in_its_world(kit, work)
    assert await finish(kit, asked(), executor, claimed, undo=undo) == Concluded(DONE)
    assert kit.count("taptwice_records") == 1
    assert (kit.count("work"), kit.count("parents")) == ((0, 0) if undo else (2, 2))


async def _in_its_world(kit: Kit, work: Any) -> None:
    if isinstance(kit, AsyncSqlalchemyKit):
        from sqlalchemy.util.concurrency import greenlet_spawn

        await greenlet_spawn(work)
    else:
        await called(work)


@on(ENGINES)
async def test_a_connection_that_the_handler_commits_tears_the_claim(kit: Kit) -> None:
    executor, claimed = await claim(kit, asked())
    await insert(kit, executor.handle, 1)
    committed = executor.handle.commit
    await (committed() if isinstance(kit, AsyncSqlalchemyKit) else called(committed))
    await insert(kit, executor.handle, 2)  # in a transaction that SQLAlchemy begins
    assert await finish(kit, asked(), executor, claimed) == Concluded(DONE, torn=True)
    assert (kit.count("work"), kit.count("taptwice_records")) == (2, 1)


@on([name for name in SQLITE if "sqlalchemy" in name])
async def test_the_busy_timeout_of_a_pooled_connection_is_restored(kit: Kit) -> None:
    executor, claimed = await claim(kit, asked())
    assert await kit.work(executor.handle, "PRAGMA busy_timeout") == [(5000,)]
    await finish(kit, asked(), executor, claimed)


def test_no_listener_stays_on_a_session(clean_database: str) -> None:
    engine = sqlalchemy.create_engine(clean_database.replace("postgresql:", "postgresql+psycopg:"))
    executor = drivers.source(engine).open()
    with Session(engine) as session:
        from taptwice.core.plan import Begin, Close, Rollback

        for _ in range(3):
            executor.execute(Begin())
            executor.adopt(session)
            executor.execute(Rollback())
            executor.execute(Close())
        assert len(list(session.dispatch.after_commit)) == 0
    engine.dispose()
