"""The guard: claims in the caller's transaction and in one of their own, on every driver."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pathlib
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiosqlite
import asyncpg
import psycopg
import pytest
from psycopg_pool import ConnectionPool
from sqlalchemy import create_engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from taptwice.core import fingerprint
from taptwice.errors import Contention, InFlight, KeyInvalid, KeyReused, Misuse, Torn, Unfinished
from taptwice.events import Event, Outcome
from taptwice.flows import transaction
from taptwice.flows.current import KeyHashFilter, current
from taptwice.flows.guard import AsyncGuard, Guard
from tests.http.shop import Shop, open_shop, postgres_tables, sqlite_shop

BLOCKING = ("sqlite3", "psycopg", "sqlalchemy connection", "sqlalchemy session", "sqlalchemy sqlite")
AWAITING = (
    "aiosqlite",
    "async psycopg",
    "asyncpg",
    "sqlalchemy async connection",
    "sqlalchemy async session",
    "sqlalchemy aiosqlite",
)


class Base(DeclarativeBase):
    pass


class Row(Base):
    __tablename__ = "charges"
    account: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    cents: Mapped[int]


class Bench:
    """One driver: connections in a transaction of the caller's, awaited whether the driver blocks or not."""

    def __init__(self, kind: str, shop: Shop, begin: Callable[[], Any]) -> None:
        self.kind = kind
        self.shop = shop
        self.awaits = kind in AWAITING
        self.events: list[Event] = []
        guard = AsyncGuard if self.awaits else Guard
        self.guard: Any = guard([self.events.append])
        self._begin = begin

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        """A connection in a transaction that commits at the end of the block."""
        manager = self._begin()
        if self.awaits:
            async with manager as connection:
                yield connection
        else:
            with manager as connection:
                yield connection

    @contextlib.asynccontextmanager
    async def claim(
        self, connection: Any, key: str = "k", request: Any = None, **more: Any
    ) -> AsyncIterator[Any]:
        given = {
            "account": "acct",
            "key": key,
            "request": {"cents": 100} if request is None else request,
            **more,
        }
        block = self.guard.claim(connection, **given)
        if self.awaits:
            async with block as claim:
                yield claim
        else:
            with block as claim:
                yield claim

    async def charge(self, connection: Any, key: str = "k") -> None:
        row = ("acct", key, 100)
        if "sqlalchemy" in self.kind:
            values = dict(zip("akc", row, strict=True))
            done = connection.execute(text("INSERT INTO charges VALUES (:a, :k, :c)"), values)
        elif self.kind == "asyncpg":
            done = connection.execute("INSERT INTO charges VALUES ($1, $2, $3)", *row)
        else:
            mark = "?" if self.kind in ("sqlite3", "aiosqlite") else "%s"
            done = connection.execute(f"INSERT INTO charges VALUES ({mark}, {mark}, {mark})", row)
        if self.awaits:
            await done

    async def pay(self, key: str = "k", **more: Any) -> tuple[bool, Any]:
        """The ten lines of the module's docstring: whether it was a replay, and the answer."""
        async with self.transaction() as connection, self.claim(connection, key, **more) as claim:
            if not claim.replayed:
                await self.charge(connection, key)
                claim.finish(201, {"paid": key})
            return claim.replayed, claim.answer

    def outcomes(self) -> list[Outcome]:
        return [event.outcome for event in self.events]


@contextlib.asynccontextmanager
async def open_bench(kind: str, folder: pathlib.Path, url: Callable[[], str]) -> AsyncIterator[Bench]:
    if "sqlite" in kind:
        shop = sqlite_shop(folder, "sqlite3")
    else:
        address = url()
        postgres_tables(address)
        from tests.http.shop import postgres_query

        shop = Shop(kind, None, postgres_query(address), address)
    address = shop.address
    driver = address.replace("postgresql://", "postgresql+psycopg://", 1)
    match kind:
        case "sqlite3":

            @contextlib.contextmanager
            def sqlite_begin() -> Any:
                with contextlib.closing(sqlite3.connect(address, timeout=0.01)) as connection, connection:
                    yield connection

            yield Bench(kind, shop, sqlite_begin)
        case "psycopg":
            yield Bench(kind, shop, lambda: psycopg.connect(address))
        case "sqlalchemy connection" | "sqlalchemy session" | "sqlalchemy sqlite":
            engine = create_engine(f"sqlite:///{address}" if kind.endswith("sqlite") else driver)
            yield Bench(kind, shop, sessionmaker(engine).begin if "session" in kind else engine.begin)
            engine.dispose()
        case "aiosqlite":

            @contextlib.asynccontextmanager
            async def aiosqlite_begin() -> Any:
                async with aiosqlite.connect(address, timeout=0.01) as connection:
                    yield connection
                    await connection.commit()

            yield Bench(kind, shop, aiosqlite_begin)
        case "async psycopg":

            @contextlib.asynccontextmanager
            async def psycopg_begin() -> Any:
                async with await psycopg.AsyncConnection.connect(address) as connection:
                    yield connection

            yield Bench(kind, shop, psycopg_begin)
        case "asyncpg":
            async with asyncpg.create_pool(address, min_size=0) as pool:

                @contextlib.asynccontextmanager
                async def asyncpg_begin() -> Any:
                    async with pool.acquire() as connection, connection.transaction():
                        yield connection

                yield Bench(kind, shop, asyncpg_begin)
        case _:
            path = f"sqlite+aiosqlite:///{address}" if kind.endswith("sqlite") else driver
            async_engine = create_async_engine(path)
            maker = async_sessionmaker(async_engine)
            yield Bench(kind, shop, maker.begin if "session" in kind else async_engine.begin)
            await async_engine.dispose()


@pytest.fixture(params=BLOCKING + AWAITING)
async def bench(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> AsyncIterator[Bench]:
    async with open_bench(request.param, tmp_path, lambda: request.getfixturevalue("fresh_postgres")) as made:
        yield made


@pytest.fixture
def shop(tmp_path: pathlib.Path) -> Shop:
    return sqlite_shop(tmp_path, "sqlite3")


@pytest.fixture
def connection(shop: Shop) -> Any:
    with contextlib.closing(sqlite3.connect(shop.address, timeout=0.01, isolation_level=None)) as made:
        made.execute("BEGIN IMMEDIATE")
        yield made


def claimed(connection: Any, key: str = "k", guard: Guard | None = None, **more: Any) -> Any:
    given = {"account": "acct", "key": key, "request": {}, **more}
    return (guard or Guard()).claim(connection, **given)


# --- in the caller's transaction, on every driver -----------------------------------------------------------


async def test_work_and_answer_are_committed_together_and_once(bench: Bench) -> None:
    replayed, first = await bench.pay()
    assert not replayed
    replayed, again = await bench.pay()
    assert replayed
    assert again == first
    assert (first.status, first.json(), first.header("content-type")) == (
        201,
        {"paid": "k"},
        "application/json",
    )
    assert (bench.shop.charges("k"), bench.shop.records()) == (1, {"k": 201})
    assert bench.outcomes() == [Outcome.NEW, Outcome.FINISHED, Outcome.REPLAYED]
    assert all(event.pending for event in bench.events)


async def test_another_request_under_the_same_key(bench: Bench) -> None:
    await bench.pay()
    with pytest.raises(KeyReused):
        await bench.pay(request={"cents": 999})
    await bench.pay("k2")
    assert bench.shop.charges() == 2
    assert bench.outcomes()[2] is Outcome.MISMATCH


async def test_the_caller_rolls_back(bench: Bench) -> None:
    with pytest.raises(ZeroDivisionError):
        async with bench.transaction() as connection:
            async with bench.claim(connection) as claim:
                await bench.charge(connection)
                claim.finish(201)
            raise ZeroDivisionError
    assert (bench.shop.charges(), bench.shop.records()) == (0, {})
    assert (await bench.pay())[0] is False


async def test_an_exception_undoes_the_work_and_leaves_what_the_caller_did_before(bench: Bench) -> None:
    async with bench.transaction() as connection:
        await bench.charge(connection, "before")
        with pytest.raises(ZeroDivisionError):
            async with bench.claim(connection) as claim:
                await bench.charge(connection)
                claim.finish(201)
                raise ZeroDivisionError
        await bench.charge(connection, "after")
    assert sorted(bench.shop.query("SELECT key FROM charges")) == [("after",), ("before",)]
    assert bench.shop.records() == {}
    assert bench.outcomes() == [Outcome.NEW, Outcome.RELEASED]


async def test_without_finish(bench: Bench) -> None:
    async with bench.transaction() as connection:
        with pytest.raises(Unfinished):
            async with bench.claim(connection):
                await bench.charge(connection)
        await bench.charge(connection, "after")
    assert bench.shop.query("SELECT key FROM charges") == [("after",)]
    assert bench.shop.records() == {}
    assert bench.outcomes() == [Outcome.NEW, Outcome.RELEASED]


async def test_an_error_of_the_database_in_the_block(bench: Bench) -> None:
    """PostgreSQL takes no further statement then, but goes back to the savepoint."""
    async with bench.transaction() as connection:
        await bench.charge(connection, "before")
        with pytest.raises(Exception, match=r"(?i)no_such_table"):
            async with bench.claim(connection):
                done = connection.execute(
                    text("SELECT * FROM no_such_table")
                    if "sqlalchemy" in bench.kind
                    else "SELECT * FROM no_such_table"
                )
                if bench.awaits:
                    await done
    assert bench.shop.query("SELECT key FROM charges") == [("before",)]


async def test_where_nobody_may_wait(bench: Bench) -> None:
    async with bench.transaction() as first:
        async with bench.claim(first) as claim:
            await bench.charge(first)
            claim.finish(201)
        with pytest.raises(InFlight):
            async with bench.transaction() as second, bench.claim(second, wait=0):
                pytest.fail("two at once")
    assert bench.outcomes()[-1] is Outcome.IN_FLIGHT
    assert (await bench.pay())[0] is True


async def test_waiting_is_bounded_and_leaves_the_connection_as_it_was(bench: Bench) -> None:
    """Also its lock_timeout, or busy_timeout."""
    if "sqlalchemy" in bench.kind:
        pytest.skip("the same statements, through SQLAlchemy")
    lite = "sqlite" in bench.kind
    setting = "PRAGMA busy_timeout" if lite else "SHOW lock_timeout"

    async def read(connection: Any) -> Any:
        if bench.kind == "asyncpg":
            return await connection.fetchval(setting)
        cursor = connection.execute(setting)
        cursor = await cursor if bench.awaits else cursor
        row = cursor.fetchone()
        return (await row if bench.awaits else row)[0]

    async with bench.transaction() as first:
        async with bench.claim(first) as claim:
            claim.finish(201)
        async with bench.transaction() as second:
            if not lite:
                done = second.execute("SET lock_timeout = '7s'")
                if bench.awaits:
                    await done
            before = await read(second)
            with pytest.raises(InFlight):
                async with bench.claim(second, wait="20ms"):
                    pytest.fail("two at once")
            assert await read(second) == before


async def test_two_keys_in_one_transaction(bench: Bench) -> None:
    """One after the other, and one inside the other; the inner one may fail alone."""
    async with bench.transaction() as connection:
        for key in ("a", "b"):
            async with bench.claim(connection, key) as claim:
                await bench.charge(connection, key)
                claim.finish(201)
        async with bench.claim(connection, "outer") as outer:
            await bench.charge(connection, "outer")
            async with bench.claim(connection, "inner") as inner:
                await bench.charge(connection, "inner")
                inner.finish(201)
            with pytest.raises(ZeroDivisionError):
                async with bench.claim(connection, "failed"):
                    await bench.charge(connection, "failed")
                    raise ZeroDivisionError
            outer.finish(201)
    assert sorted(bench.shop.records()) == ["a", "b", "inner", "outer"]
    bench.shop.check()


async def test_an_outer_claim_that_fails_takes_the_inner_one_with_it(bench: Bench) -> None:
    async with bench.transaction() as connection:
        with pytest.raises(ZeroDivisionError):
            async with bench.claim(connection, "outer"):
                async with bench.claim(connection, "inner") as inner:
                    await bench.charge(connection, "inner")
                    inner.finish(201)
                raise ZeroDivisionError
    assert (bench.shop.charges(), bench.shop.records()) == (0, {})


async def test_one_key_inside_itself(bench: Bench) -> None:
    async with bench.transaction() as connection:
        with pytest.raises(Misuse, match="claimed already"):
            async with bench.claim(connection), bench.claim(connection):
                pytest.fail("twice")


async def test_blocks_that_do_not_nest(bench: Bench) -> None:
    """Nothing is saved of the outer one, and whoever wrote it is told."""
    async with bench.transaction() as connection:
        outer, inner = bench.claim(connection, "outer"), bench.claim(connection, "inner")
        (await outer.__aenter__()).finish(201)
        (await inner.__aenter__()).finish(201)
        with pytest.raises(Misuse, match="reverse"):
            await outer.__aexit__(None, None, None)
        await inner.__aexit__(None, None, None)
    assert "outer" not in bench.shop.records()


# --- what the guard says ------------------------------------------------------------------------------------


def test_the_wrong_half(connection: Any) -> None:
    with pytest.raises(Misuse, match="use Guard"):
        AsyncGuard().claim(connection, account="a", key="k", request={})
    with pytest.raises(Misuse, match="use Guard"):
        AsyncGuard().transaction(lambda: sqlite3.connect(":memory:"), account="a", key="k", request={})


async def test_the_other_wrong_half() -> None:
    async with aiosqlite.connect(":memory:") as connection:
        with pytest.raises(Misuse, match="use AsyncGuard"):
            Guard().claim(connection, account="a", key="k", request={})


def test_what_is_no_connection() -> None:
    with pytest.raises(Misuse, match="cannot claim on"):
        claimed(object())


def test_no_transaction(shop: Shop) -> None:
    connection = sqlite3.connect(shop.address, isolation_level=None)
    with contextlib.closing(connection), pytest.raises(Misuse, match="BEGIN IMMEDIATE"), claimed(connection):
        pytest.fail("outside a transaction")


def test_no_transaction_on_postgresql(fresh_postgres: str) -> None:
    connection = psycopg.connect(fresh_postgres, autocommit=True)
    with connection, pytest.raises(Misuse, match=r"connection\.transaction"), claimed(connection):
        pytest.fail("outside a transaction")


def test_no_table(fresh_postgres: str) -> None:
    connection = psycopg.connect(fresh_postgres)
    with connection, pytest.raises(Misuse, match="taptwice init"), claimed(connection):
        pytest.fail("without a table")


@pytest.mark.parametrize("account", ["", None, 7, "a\0b", b"a"])
def test_what_is_no_account(connection: Any, account: Any) -> None:
    with pytest.raises(Misuse, match="account"):
        claimed(connection, account=account)


@pytest.mark.parametrize("key", ["", " ", "ä", "x" * 256, "a\nb", None, 7])
def test_what_is_no_key(connection: Any, key: Any) -> None:
    with pytest.raises(KeyInvalid):
        claimed(connection, key)


@pytest.mark.parametrize("duration", ["5", "-1s", "soon", -1, float("nan"), float("inf")])
def test_what_is_no_duration(connection: Any, duration: Any) -> None:
    for name in ("window", "wait"):
        with pytest.raises(Misuse, match="duration"):
            claimed(connection, **{name: duration})


@pytest.mark.parametrize(
    ("body", "headers", "content", "kind"),
    [
        ({"a": 1}, {}, b'{"a":1}', "application/json"),
        ([1, "ä"], {}, b'[1,"\\u00e4"]', "application/json"),
        (0, {}, b"0", "application/json"),
        ("ä", {}, "ä".encode(), "text/plain; charset=utf-8"),
        (b"\0\xff", {}, b"\0\xff", None),
        (None, {}, b"", None),
        ({"a": 1}, {"Content-Type": "application/hal+json"}, b'{"a":1}', "application/hal+json"),
        (b"x", [("Link", "1"), ("Link", "2")], b"x", None),
    ],
)
def test_answers_of_all_kinds(
    connection: Any, body: Any, headers: Any, content: bytes, kind: str | None
) -> None:
    with claimed(connection) as claim:
        made = claim.finish(201, body, headers)
    with claimed(connection) as claim:
        assert claim.replayed
        assert claim.answer == made
    assert (made.body, made.header("content-type")) == (content, kind)


@pytest.mark.parametrize("status", [99, 1000, "201", None, 200.0])
def test_what_is_no_status(connection: Any, status: Any) -> None:
    with pytest.raises(Misuse, match="status"), claimed(connection) as claim:
        claim.finish(status)


def test_a_body_that_is_no_json_saves_nothing(shop: Shop, connection: Any) -> None:
    with pytest.raises(TypeError), claimed(connection) as claim:
        claim.finish(201, object())
    connection.commit()
    assert shop.records() == {}


def test_a_header_that_cannot_be_one_saves_nothing_and_undoes_the_work(connection: Any) -> None:
    with pytest.raises(Misuse, match="Latin-1"), claimed(connection) as claim:
        connection.execute("INSERT INTO charges VALUES ('acct', 'k', 100)")
        claim.finish(201, None, {"X-Price": "1 €"})
    connection.commit()
    assert connection.execute("SELECT * FROM charges").fetchall() == []


def test_finish_twice_and_on_a_replay_and_answer_too_early(connection: Any) -> None:
    with claimed(connection) as claim:
        with pytest.raises(Misuse, match="no answer yet"):
            _ = claim.answer
        claim.finish(200)
        with pytest.raises(Misuse, match="twice"):
            claim.finish(200)
    with claimed(connection) as claim, pytest.raises(Misuse, match="nothing to finish"):
        claim.finish(200)


def test_requests_of_all_kinds(connection: Any) -> None:
    made = fingerprint.of_value({"a": 1})
    with claimed(connection, request=made) as claim:
        claim.finish(200)
    with claimed(connection, request={"a": 1.0}) as claim:
        assert claim.replayed, "by its meaning"
    for number, request in enumerate((b"raw", [1, 2], "text", 7)):
        with claimed(connection, f"k{number}", request=request) as claim:
            claim.finish(200)
        with claimed(connection, f"k{number}", request=request) as claim:
            assert claim.replayed


def test_the_error_of_the_block_wins_when_its_transaction_is_gone(
    connection: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError), claimed(connection):
        connection.rollback()
        raise ZeroDivisionError
    assert "could not be undone" in caplog.text


def test_a_block_that_ends_its_transaction_is_told(connection: Any) -> None:
    events: list[Event] = []
    with pytest.raises(Torn), claimed(connection, guard=Guard([events.append])) as claim:
        connection.commit()
        claim.finish(201)
    assert [event.outcome for event in events] == [Outcome.NEW, Outcome.TORN]


def test_an_old_snapshot_must_run_again(fresh_postgres: str) -> None:
    """REPEATABLE READ: what was committed since the snapshot cannot be seen, and the primary key says no."""
    postgres_tables(fresh_postgres)
    with psycopg.connect(fresh_postgres) as old, psycopg.connect(fresh_postgres) as new:
        old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        old.execute("SELECT 1 FROM charges")
        with claimed(new) as claim:
            claim.finish(201)
        new.commit()
        with pytest.raises(Contention, match="run yours again"), claimed(old) as claim:
            claim.finish(201)
        old.rollback()
        with claimed(old) as claim:
            assert claim.replayed


def test_the_users_own_duplicate_stays_the_users(fresh_postgres: str) -> None:
    """An unflushed row that breaks his constraint is his IntegrityError, and not ours to retry."""
    postgres_tables(fresh_postgres)
    engine = create_engine(fresh_postgres.replace("postgresql://", "postgresql+psycopg://", 1))
    with engine.begin() as connection:
        connection.execute(text("CREATE UNIQUE INDEX ON charges (account, key)"))
        connection.execute(text("INSERT INTO charges VALUES ('acct', 'row', 1)"))
    again = {"account": "acct", "key": "row", "cents": 2}
    with (
        pytest.raises(IntegrityError),
        Session(engine) as session,
        session.begin(),
        claimed(session) as claim,
    ):
        session.add(Row(**again))
        claim.finish(201)
    own = Guard().transaction(sessionmaker(engine), account="acct", key="k", request={})
    with pytest.raises(IntegrityError), own as claim:
        claim.connection.add(Row(**again))
        claim.finish(201)
    with engine.begin() as connection:
        assert connection.execute(text("SELECT count(*) FROM taptwice_records")).scalar() == 0
    engine.dispose()


# --- events and logs ----------------------------------------------------------------------------------------


def test_account_and_key_are_hashed_unless_shown(connection: Any) -> None:
    hidden: list[Event] = []
    shown: list[Event] = []
    for key, guard in (("k1", Guard([hidden.append])), ("k2", Guard([shown.append], show=True))):
        with claimed(connection, key, guard) as claim:
            claim.finish(201)
    assert {(event.account, event.key) for event in shown} == {("acct", "k2")}
    assert all(len(event.key or "") == 16 and "k1" not in (event.key or "") for event in hidden)


def test_neither_stands_in_the_table_when_told_so(shop: Shop, connection: Any) -> None:
    with claimed(connection, guard=Guard(in_clear=False)) as claim:
        claim.finish(201)
    connection.commit()
    assert shop.query("SELECT account, key FROM taptwice_records") == [("", "")]


def test_events_come_when_the_block_is_over(connection: Any) -> None:
    events: list[Event] = []
    with claimed(connection, guard=Guard([events.append])) as claim:
        assert events == []
        claim.finish(201)
    assert [(event.outcome, event.status) for event in events] == [
        (Outcome.NEW, None),
        (Outcome.FINISHED, 201),
    ]


def test_the_key_stands_on_every_log_line_of_the_block(connection: Any) -> None:
    record = logging.LogRecord("x", logging.INFO, __file__, 1, "hello", None, None)
    with claimed(connection) as claim:
        KeyHashFilter().filter(record)
        claim.finish(201)
    assert len(record.idempotency_key_hash or "") == 16  # type: ignore[attr-defined]
    assert current.get() is None


# --- in a transaction of its own ----------------------------------------------------------------------------

OWN = ("sqlite3", "psycopg", "sqlalchemy", "aiosqlite", "async psycopg", "asyncpg", "async sqlalchemy")


class Own:
    """`Guard.transaction` or `AsyncGuard.transaction`, on one driver."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.awaits = shop.kind in ("aiosqlite", "async psycopg", "asyncpg", "async sqlalchemy")
        self.events: list[Event] = []
        self.guard: Any = (AsyncGuard if self.awaits else Guard)([self.events.append])

    @contextlib.asynccontextmanager
    async def transaction(self, key: str = "k", **more: Any) -> AsyncIterator[Any]:
        block = self.guard.transaction(self.shop.origin, account="acct", key=key, **{"request": {}, **more})
        if self.awaits:
            async with block as claim:
                yield claim
        else:
            with block as claim:
                yield claim

    async def pay(
        self, key: str = "k", then: Callable[[Any], Awaitable[None]] | None = None, **more: Any
    ) -> Any:
        async with self.transaction(key, **more) as claim:
            if not claim.replayed:
                await self.shop.insert(claim.connection, key)
                if then is not None:
                    await then(claim)
                claim.finish(201, {"paid": key})
        return claim


@pytest.fixture(params=OWN)
async def own(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> AsyncIterator[Own]:
    async with open_shop(request.param, tmp_path, lambda: request.getfixturevalue("fresh_postgres")) as made:
        yield Own(made)


async def test_own_transaction(own: Own) -> None:
    first = await own.pay()
    again = await own.pay()
    assert (first.replayed, again.replayed) == (False, True)
    assert first.answer == again.answer
    assert (own.shop.charges("k"), own.shop.records()) == (1, {"k": 201})
    outcomes = [event.outcome for event in own.events]
    assert outcomes == [Outcome.NEW, Outcome.FINISHED, Outcome.REPLAYED]
    assert not any(event.pending for event in own.events), "it is committed"
    with pytest.raises(KeyReused):
        await own.pay(request={"another": 1})
    for _ in range(20):  # more than a pool has
        await own.pay()


async def test_own_transaction_that_fails(own: Own) -> None:
    async def fail(claim: Any) -> None:
        raise ZeroDivisionError

    for _ in range(10):
        with pytest.raises(ZeroDivisionError):
            await own.pay(then=fail)
    with pytest.raises(Unfinished):
        async with own.transaction() as claim:
            await own.shop.insert(claim.connection, "k")
    assert (own.shop.charges(), own.shop.records()) == (0, {})
    assert not (await own.pay()).replayed
    own.shop.check()


async def test_own_connection_is_gone_when_the_block_is_over(own: Own) -> None:
    claim = await own.pay()
    with pytest.raises(Misuse, match="outside"):
        _ = claim.connection


async def test_own_transaction_where_nobody_may_wait(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "TURN", 0.05)  # SQLite's one writer is waited for, whatever the key

    async def meanwhile(claim: Any) -> None:
        with pytest.raises(InFlight):
            await own.pay(wait=0)

    await own.pay(then=meanwhile, wait=0)
    assert (await own.pay()).replayed


async def test_own_transactions_at_once(own: Own) -> None:
    if own.awaits:
        claims = await asyncio.gather(*(own.pay(f"k{n % 3}", wait="20s") for n in range(30)))
    else:
        claims = []

        def visit(key: str) -> None:
            claims.append(asyncio.run(own.pay(key, wait="20s")))

        threads = [threading.Thread(target=visit, args=[f"k{n % 3}"]) for n in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
    assert len(claims) == 30
    assert sum(not claim.replayed for claim in claims) == 3
    assert own.shop.charges() == 3
    own.shop.check()


@pytest.mark.parametrize("times", [1, 3])
async def test_own_transaction_that_is_cancelled_as_it_ends(own: Own, times: int) -> None:
    if not own.awaits:
        pytest.skip("nobody cancels a thread")

    async def cancel(claim: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        for _ in range(times - 1):
            asyncio.get_running_loop().call_soon(task.cancel)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(own.pay(then=cancel))
    await own.pay()
    own.shop.check()
    assert own.shop.charges() == 1


def test_own_transaction_on_a_session_maker(fresh_postgres: str) -> None:
    postgres_tables(fresh_postgres)
    engine = create_engine(fresh_postgres.replace("postgresql://", "postgresql+psycopg://", 1))
    maker = sessionmaker(engine)
    for replayed in (False, True):
        with Guard().transaction(maker, account="a", key="k", request={}) as claim:
            assert claim.replayed is replayed
            if not replayed:
                assert isinstance(claim.connection, Session)
                claim.connection.add(Row(account="a", key="k", cents=1))  # unflushed
                claim.finish(201)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM charges")).scalar() == 1
    engine.dispose()


async def test_own_transaction_on_an_awaiting_session_maker(fresh_postgres: str) -> None:
    postgres_tables(fresh_postgres)
    engine = create_async_engine(fresh_postgres.replace("postgresql://", "postgresql+asyncpg://", 1))
    maker = async_sessionmaker(engine)
    for replayed in (False, True):
        async with AsyncGuard().transaction(maker, account="a", key="k", request={}) as claim:
            assert claim.replayed is replayed
            if not replayed:
                assert isinstance(claim.connection, AsyncSession)
                claim.connection.add(Row(account="a", key="k", cents=1))
                claim.finish(201)
    async with engine.connect() as connection:
        assert isinstance(connection, AsyncConnection)
        assert (await connection.execute(text("SELECT count(*) FROM charges"))).scalar() == 1
    await engine.dispose()


def test_own_transaction_holds_nothing_while_it_waits(fresh_postgres: str) -> None:
    """One connection, one attempt that needs it to finish, and one that waits for that attempt."""
    postgres_tables(fresh_postgres)
    with (
        psycopg.connect(fresh_postgres) as holder,
        ConnectionPool(fresh_postgres, min_size=0, max_size=1) as pool,
    ):
        with claimed(holder) as claim:
            claim.finish(201)
        taken = threading.Event()
        replayed = []

        def wait() -> None:
            taken.set()
            with Guard().transaction(pool, account="acct", key="k", request={}, wait="60s") as waiting:
                replayed.append(waiting.replayed)

        thread = threading.Thread(target=wait)
        thread.start()
        taken.wait()
        for _ in range(20):
            with pool.connection(timeout=10) as connection:
                connection.execute("SELECT 1")
        holder.commit()
        thread.join()
    assert replayed == [True]


def test_own_transaction_that_the_block_ends_is_saved_late(shop: Shop) -> None:
    events: list[Event] = []
    with Guard([events.append]).transaction(shop.origin, account="acct", key="k", request={}) as claim:
        shop.insert_now(claim.connection, "k")
        claim.connection.execute("COMMIT")
        claim.finish(201)
    assert [event.outcome for event in events] == [Outcome.NEW, Outcome.TORN, Outcome.FINISHED]
    shop.check()
    assert shop.records() == {"k": 201}
