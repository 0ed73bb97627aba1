"""On the driver: one connection, new keys, no HTTP. Bare work, the textbook, our SQL by hand, the library.

`ours` begins and commits a transaction of its own; `ours + savepoint` is the same with the default policy;
`guard` claims in a transaction of the caller's, which always takes a savepoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import sqlite3
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import asyncpg
import psycopg
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from benchmarks.parts.machine import settle
from benchmarks.parts.measure import Result, Variant, in_turn, judged
from benchmarks.parts.statements import (
    ACCOUNT,
    DOLLARS,
    HEADERS,
    PERCENTS,
    POSTGRESQL,
    REQUEST,
    REQUEST_BYTES,
    SQLITE,
    TABLES,
    WINDOW,
    Keys,
    body_of,
    fingerprint,
    identity,
    lock_of,
)
from taptwice.core import plan
from taptwice.core.model import Answer
from taptwice.core.plan import arun, run
from taptwice.drivers.asyncpg import AsyncpgSource
from taptwice.drivers.psycopg import PsycopgSource
from taptwice.drivers.sqlalchemy import SqlalchemySource
from taptwice.drivers.sqlalchemy_async import AsyncSqlalchemySource
from taptwice.drivers.sqlite import SqliteExecutor
from taptwice.flows.guard import AsyncGuard, Guard, answer_from, checked, fingerprint_of
from taptwice.flows.transaction import Asked, Claimed, conclude, open_claim
from taptwice.sql import migrations
from taptwice.stores.sql import SqlStore

CENTS = 1250
WORK = {"account": ACCOUNT, "cents": CENTS}

Variants = Mapping[str, Variant]


def asked(key: str, savepoint: bool) -> Asked:
    return Asked(checked(ACCOUNT, key), fingerprint_of(REQUEST), WINDOW, 5.0, savepoint)


def answer(charge: int) -> Answer:
    return answer_from(201, {"charge_id": charge}, ())


def blocking(
    open_: Callable[[], Any], store: SqlStore, work: Callable[[Any], int], savepoint: bool
) -> Variant:
    """The library, in a transaction of its own, on a library that blocks."""
    keys = Keys()

    def ours(number: int) -> None:
        for _ in range(number):
            executor, wanted = open_(), asked(keys(), savepoint)
            claimed = run(open_claim(store, wanted), executor.execute)
            assert isinstance(claimed, Claimed)
            charge = work(executor.handle)
            run(conclude(store, wanted, claimed, answer(charge), False), executor.execute)

    return ours


def awaiting(
    loop: asyncio.AbstractEventLoop,
    open_: Callable[[], Any],
    store: SqlStore,
    work: Callable[[Any], Awaitable[int]],
    savepoint: bool,
) -> Variant:
    """The same, awaiting."""
    keys = Keys()

    async def ours(number: int) -> None:
        for _ in range(number):
            executor, wanted = open_(), asked(keys(), savepoint)
            claimed = await arun(open_claim(store, wanted), executor.execute)
            assert isinstance(claimed, Claimed)
            charge = await work(executor.handle)
            await arun(conclude(store, wanted, claimed, answer(charge), False), executor.execute)

    return lambda number: loop.run_until_complete(ours(number))


def by_name(key: str, charge: int) -> dict[str, Any]:
    """What the finished record of our SQL by hand is made of."""
    return {
        "window": WINDOW,
        "status": 201,
        "fingerprint": fingerprint(REQUEST_BYTES),
        "account": ACCOUNT,
        "key": key,
        "headers": HEADERS,
        "body": body_of(charge),
    }


# --- psycopg ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def with_psycopg(url: str) -> Iterator[Variants]:
    keys, guard, store = Keys(), Guard(), SqlStore("postgresql")
    with psycopg.connect(url, autocommit=True) as connection:
        source = PsycopgSource(lambda: connection, lambda _: None)

        def execute(name: str, values: Mapping[str, Any]) -> psycopg.Cursor[Any]:
            return connection.execute(PERCENTS[name].encode(), values)

        def work(on: Any) -> int:
            [charge] = on.execute(
                PERCENTS["charge"].encode(), {"account": ACCOUNT, "cents": CENTS}
            ).fetchone()
            return int(charge)

        def bare(number: int) -> None:
            for _ in range(number):
                with connection.transaction():
                    work(connection)

        def textbook(number: int) -> None:
            for _ in range(number):
                key = keys()
                with connection.transaction():
                    values: dict[str, Any] = {"account": ACCOUNT, "key": key}
                    new = execute(
                        "begin_key", {**values, "fingerprint": fingerprint(REQUEST_BYTES)}
                    ).fetchone()
                    assert new is not None
                    body = body_of(work(connection))
                    execute("finish_key", {**values, "status": 201, "headers": HEADERS, "body": body})

        def hand(number: int) -> None:
            for _ in range(number):
                key = keys()
                id_ = identity(ACCOUNT, key)
                with connection.transaction():
                    asked_for = {"lock": lock_of(id_), "id": uuid.UUID(bytes=id_)}
                    [(locked, _, known, *_)] = execute("claim", asked_for).fetchall()
                    assert (locked, known) == (True, None)
                    charge = work(connection)
                    execute("save", {"id": uuid.UUID(bytes=id_), **by_name(key, charge)})

        def guarded(number: int) -> None:
            for _ in range(number):
                with (
                    connection.transaction(),
                    guard.claim(connection, account=ACCOUNT, key=keys(), request=REQUEST) as claim,
                ):
                    claim.finish(201, {"charge_id": work(connection)})

        yield {
            "bare": bare,
            "textbook": textbook,
            "by hand": hand,
            "ours": blocking(source.open, store, work, False),
            "ours + savepoint": blocking(source.open, store, work, True),
            "guard": guarded,
        }


# --- asyncpg ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def with_asyncpg(url: str) -> Iterator[Variants]:
    keys, guard, store = Keys(), AsyncGuard(), SqlStore("postgresql")
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        connection: Any = loop.run_until_complete(asyncpg.connect(url))

        async def take() -> Any:
            return connection

        async def keep(_: Any) -> None:
            pass

        source = AsyncpgSource(take, keep)

        async def work(on: Any) -> int:
            return int(await on.fetchval(DOLLARS["charge"], ACCOUNT, CENTS))

        async def bare(number: int) -> None:
            for _ in range(number):
                async with connection.transaction():
                    await work(connection)

        async def textbook(number: int) -> None:
            for _ in range(number):
                key = keys()
                async with connection.transaction():
                    new = await connection.fetchval(
                        DOLLARS["begin_key"], ACCOUNT, key, fingerprint(REQUEST_BYTES)
                    )
                    assert new
                    body = body_of(await work(connection))
                    await connection.execute(DOLLARS["finish_key"], 201, HEADERS, body, ACCOUNT, key)

        async def hand(number: int) -> None:
            for _ in range(number):
                key = keys()
                id_ = identity(ACCOUNT, key)
                async with connection.transaction():
                    found = await connection.fetchrow(DOLLARS["claim"], lock_of(id_), uuid.UUID(bytes=id_))
                    assert (found[0], found[2]) == (True, None)
                    saved = by_name(key, await work(connection))
                    await connection.execute(DOLLARS["save"], uuid.UUID(bytes=id_), *saved.values())

        async def guarded(number: int) -> None:
            for _ in range(number):
                async with (
                    connection.transaction(),
                    guard.claim(connection, account=ACCOUNT, key=keys(), request=REQUEST) as claim,
                ):
                    claim.finish(201, {"charge_id": await work(connection)})

        def blocked(variant: Callable[[int], Awaitable[None]]) -> Variant:
            return lambda number: loop.run_until_complete(variant(number))

        yield {
            "bare": blocked(bare),
            "textbook": blocked(textbook),
            "by hand": blocked(hand),
            "ours": awaiting(loop, source.open, store, work, False),
            "ours + savepoint": awaiting(loop, source.open, store, work, True),
            "guard": blocked(guarded),
        }
        loop.run_until_complete(connection.close())


# --- SQLAlchemy ---------------------------------------------------------------------------------------------

TYPES: Mapping[str, Any] = {
    "lock": sqlalchemy.BigInteger(),
    "id": sqlalchemy.Uuid(),
    "window": sqlalchemy.Float(53),
    "fingerprint": sqlalchemy.LargeBinary(),
    "headers": sqlalchemy.LargeBinary(),
    "body": sqlalchemy.LargeBinary(),
}


def clause(name: str) -> sqlalchemy.TextClause:
    """Made once, with typed parameters, so that SQLAlchemy compiles it once."""
    made = sqlalchemy.text(POSTGRESQL[name])
    typed = (sqlalchemy.bindparam(each, type_=TYPES[each]) for each in made._bindparams if each in TYPES)
    return made.bindparams(*typed)


CLAUSES = {name: clause(name) for name in POSTGRESQL}


@contextlib.contextmanager
def with_sqlalchemy(url: str) -> Iterator[Variants]:
    keys, guard, store = Keys(), Guard(), SqlStore("postgresql")
    engine = sqlalchemy.create_engine(url.replace("postgresql://", "postgresql+psycopg://"), pool_size=1)
    source = SqlalchemySource(engine)

    def work(on: Any) -> int:
        return int(on.execute(CLAUSES["charge"], WORK).scalar_one())

    def bare(number: int) -> None:
        for _ in range(number):
            with engine.begin() as connection:
                work(connection)

    def textbook(number: int) -> None:
        for _ in range(number):
            values = {"account": ACCOUNT, "key": keys()}
            with engine.begin() as connection:
                new = {**values, "fingerprint": fingerprint(REQUEST_BYTES)}
                assert connection.execute(CLAUSES["begin_key"], new).scalar_one()
                body = body_of(work(connection))
                connection.execute(
                    CLAUSES["finish_key"], {**values, "status": 201, "headers": HEADERS, "body": body}
                )

    def hand(number: int) -> None:
        for _ in range(number):
            key = keys()
            id_ = identity(ACCOUNT, key)
            with engine.begin() as connection:
                asked_for = {"lock": lock_of(id_), "id": uuid.UUID(bytes=id_)}
                found = connection.execute(CLAUSES["claim"], asked_for).one()
                assert (found[0], found[2]) == (True, None)
                charge = work(connection)
                connection.execute(CLAUSES["save"], {"id": uuid.UUID(bytes=id_), **by_name(key, charge)})

    def guarded(number: int) -> None:
        for _ in range(number):
            with (
                engine.begin() as connection,
                guard.claim(connection, account=ACCOUNT, key=keys(), request=REQUEST) as claim,
            ):
                claim.finish(201, {"charge_id": work(connection)})

    yield {
        "bare": bare,
        "textbook": textbook,
        "by hand": hand,
        "ours": blocking(source.open, store, work, False),
        "ours + savepoint": blocking(source.open, store, work, True),
        "guard": guarded,
    }
    engine.dispose()


@contextlib.asynccontextmanager
async def begun(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    async with engine.begin() as connection:
        yield connection


@contextlib.contextmanager
def with_async_sqlalchemy(url: str) -> Iterator[Variants]:
    keys, guard, store = Keys(), AsyncGuard(), SqlStore("postgresql")
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"), pool_size=1)
        source = AsyncSqlalchemySource(engine)

        async def work(on: Any) -> int:
            return int((await on.execute(CLAUSES["charge"], WORK)).scalar_one())

        async def bare(number: int) -> None:
            for _ in range(number):
                async with begun(engine) as connection:
                    await work(connection)

        async def textbook(number: int) -> None:
            for _ in range(number):
                values = {"account": ACCOUNT, "key": keys()}
                async with begun(engine) as connection:
                    new = {**values, "fingerprint": fingerprint(REQUEST_BYTES)}
                    assert (await connection.execute(CLAUSES["begin_key"], new)).scalar_one()
                    body = body_of(await work(connection))
                    await connection.execute(
                        CLAUSES["finish_key"], {**values, "status": 201, "headers": HEADERS, "body": body}
                    )

        async def hand(number: int) -> None:
            for _ in range(number):
                key = keys()
                id_ = identity(ACCOUNT, key)
                async with begun(engine) as connection:
                    asked_for = {"lock": lock_of(id_), "id": uuid.UUID(bytes=id_)}
                    found = (await connection.execute(CLAUSES["claim"], asked_for)).one()
                    assert (found[0], found[2]) == (True, None)
                    saved = by_name(key, await work(connection))
                    await connection.execute(CLAUSES["save"], {"id": uuid.UUID(bytes=id_), **saved})

        async def guarded(number: int) -> None:
            for _ in range(number):
                async with (
                    begun(engine) as connection,
                    guard.claim(connection, account=ACCOUNT, key=keys(), request=REQUEST) as claim,
                ):
                    claim.finish(201, {"charge_id": await work(connection)})

        def blocked(variant: Callable[[int], Awaitable[None]]) -> Variant:
            return lambda number: loop.run_until_complete(variant(number))

        yield {
            "bare": blocked(bare),
            "textbook": blocked(textbook),
            "by hand": blocked(hand),
            "ours": awaiting(loop, source.open, store, work, False),
            "ours + savepoint": awaiting(loop, source.open, store, work, True),
            "guard": blocked(guarded),
        }
        loop.run_until_complete(engine.dispose())


# --- sqlite3 ------------------------------------------------------------------------------------------------


class OneConnection(SqliteExecutor):
    """Takes always the same connection, and leaves it open: opening one is not what is measured."""

    def close(self, command: plan.Close) -> None:
        self._connection = None


@contextlib.contextmanager
def with_sqlite(synchronous: str) -> Iterator[Variants]:
    keys, guard, store = Keys(), Guard(), SqlStore("sqlite")
    with tempfile.TemporaryDirectory(prefix="taptwice-bench-") as folder:
        connection = sqlite3.connect(pathlib.Path(folder) / "bench.db", isolation_level=None)
        connection.execute("PRAGMA journal_mode = wal")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        for migration in migrations("sqlite"):
            connection.executescript(migration.text)
        for table in TABLES["sqlite"]:
            connection.execute(table)

        def work(on: Any) -> int:
            [[charge]] = on.execute(SQLITE["charge"], WORK).fetchall()
            return int(charge)

        @contextlib.contextmanager
        def transaction() -> Iterator[None]:
            connection.execute("BEGIN IMMEDIATE")
            yield
            connection.execute("COMMIT")

        def bare(number: int) -> None:
            for _ in range(number):
                with transaction():
                    work(connection)

        def textbook(number: int) -> None:
            for _ in range(number):
                values = {"account": ACCOUNT, "key": keys()}
                with transaction():
                    new = {**values, "fingerprint": fingerprint(REQUEST_BYTES)}
                    assert connection.execute(SQLITE["begin_key"], new).fetchall()
                    body = body_of(work(connection))
                    connection.execute(
                        SQLITE["finish_key"], {**values, "status": 201, "headers": HEADERS, "body": body}
                    )

        def hand(number: int) -> None:
            for _ in range(number):
                key = keys()
                id_ = identity(ACCOUNT, key)
                with transaction():
                    assert not connection.execute(SQLITE["claim"], {"id": id_}).fetchall()
                    saved = by_name(key, work(connection))
                    connection.execute(SQLITE["save"], {"id": id_, "now": time.time(), **saved})

        def guarded(number: int) -> None:
            for _ in range(number):
                with (
                    transaction(),
                    guard.claim(connection, account=ACCOUNT, key=keys(), request=REQUEST) as claim,
                ):
                    claim.finish(201, {"charge_id": work(connection)})

        def open_() -> OneConnection:
            return OneConnection(connect=lambda: connection)

        yield {
            "bare": bare,
            "textbook": textbook,
            "by hand": hand,
            "ours": blocking(open_, store, work, False),
            "ours + savepoint": blocking(open_, store, work, True),
            "guard": guarded,
        }
        connection.close()


# --- the section --------------------------------------------------------------------------------------------

LIBRARIES: Mapping[str, tuple[Callable[[str], contextlib.AbstractContextManager[Variants]], float | None]] = {
    "psycopg": (with_psycopg, 0.90),
    "asyncpg": (with_asyncpg, 0.78),
    "SQLAlchemy, Connection on psycopg": (with_sqlalchemy, 0.75),
    "SQLAlchemy, AsyncConnection on asyncpg": (with_async_sqlalchemy, 0.75),
}

NORMAL_GOAL = 12_000


def section(url: str, rounds: int, seconds: float) -> list[Result]:
    results = []
    for library, (opened, goal) in LIBRARIES.items():
        settle(url)
        with opened(url) as variants:
            results += _compared(library, variants, rounds, seconds, goal)
    for synchronous, goal in (("FULL", 0.70), ("NORMAL", None)):
        with with_sqlite(synchronous) as variants:
            results += _compared(f"sqlite3, synchronous {synchronous}", variants, rounds, seconds, goal)
    return results


def _compared(
    library: str, variants: Variants, rounds: int, seconds: float, goal: float | None
) -> list[Result]:
    found = in_turn(variants, rounds, seconds)
    group = f"driver · {library}"
    cpu = 1e6 * min(found.cpu["bare"])
    results = [Result(group, "bare work", "", f"{found.median('bare'):,.0f}/s; {cpu:.0f} µs of CPU")]
    for name in variants:
        if name == "ours" and goal is None:
            rate = found.median(name)
            shown = f"{rate:,.0f}/s (best {found.best(name):,.0f}/s; {found.ratio(name, 'bare'):.2f} of bare)"
            results.append(Result(group, name, f"≥ {NORMAL_GOAL:,}/s", shown, rate >= NORMAL_GOAL))
        elif name != "bare":
            wanted = goal if name == "ours" else None
            results.append(judged(group, f"{name} ÷ bare", found, name, "bare", wanted))
    results.append(judged(group, "ours ÷ by hand", found, "ours", "by hand", None))
    return results
