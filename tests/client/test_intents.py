"""Intents on a real SQLite file and a real PostgreSQL, through every driver."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from inspect import isawaitable
from pathlib import Path
from typing import Any

import aiosqlite
import asyncpg
import psycopg
import pytest
import trio
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from taptwice import drivers
from taptwice.client.intents import AsyncIntentStore, Intent, IntentStore, Sent, Wish, fingerprint_of
from taptwice.core.model import Answer
from taptwice.core.plan import Begin, Close, arun, run
from taptwice.drivers import aiosqlite as aiosqlite_driver
from taptwice.drivers import asyncpg as asyncpg_driver
from taptwice.drivers import psycopg as psycopg_driver
from taptwice.errors import Contention, IntentChanged, IntentDropped, IntentTooOld, Misuse, StoreUnavailable
from taptwice.flows.migrate import migrate
from taptwice.stores.intents import SqlIntents

ONE, OTHER = fingerprint_of("POST", "https://x/a", b"1"), fingerprint_of("POST", "https://x/a", b"2")
PAID = Answer(201, (("content-type", "text/plain"), ("location", "/charges/7")), b"paid")
HOUR, DAY = 3600.0, 86_400.0

BLOCKING = ["file", "sqlite3", "psycopg", "sqlalchemy sqlite", "sqlalchemy psycopg"]
AWAITING = [
    "async file",
    "trio file",
    "trio psycopg",
    "async sqlite3",
    "aiosqlite",
    "async psycopg",
    "asyncpg",
    "async sqlalchemy aiosqlite",
    "async sqlalchemy asyncpg",
]


@dataclass
class Kit:
    """A store of either kind, driven alike."""

    store: Any
    keys: list[str] = field(default_factory=list)
    """Under which a request was sent."""
    on_trio: bool = False

    async def fulfil(self, wish: Wish, answer: Answer | None = PAID) -> Any:
        def send(key: str) -> Sent[str]:
            self.keys.append(key)
            return Sent("response", answer)

        async def asend(key: str) -> Sent[str]:
            return send(key)

        if self.on_trio:
            return await asyncio.to_thread(trio.run, self.store.fulfil, wish, asend)
        if isinstance(self.store, IntentStore):
            return await asyncio.to_thread(self.store.fulfil, wish, send)
        return await self.store.fulfil(wish, asend)

    async def ask(self, verb: str, *arguments: Any, **more: Any) -> Any:
        method = getattr(self.store, verb)
        if self.on_trio:
            return await asyncio.to_thread(trio.run, partial(method, *arguments, **more))
        if isinstance(self.store, IntentStore):
            return await asyncio.to_thread(method, *arguments, **more)
        return await method(*arguments, **more)

    async def get(self, name: str) -> Intent:
        found = await self.ask("get", name)
        assert isinstance(found, Intent)
        return found

    def at(self, now: float) -> None:
        """What time it is, from here on."""
        self.store._table = SqlIntents(self.store._table.dialect, now)


async def with_tables(origin: Any) -> Any:
    source = drivers.source(origin)
    plan = migrate(source.dialect)
    _ = run(plan, source.open().execute) if source.blocking else await arun(plan, source.open().execute)
    return origin


@asynccontextmanager
async def opened(kind: str, path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Kit]:
    url = request.getfixturevalue("fresh_postgres") if "psycopg" in kind or "asyncpg" in kind else ""
    store = AsyncIntentStore if kind in AWAITING else IntentStore
    match kind:
        case "file" | "async file" | "trio file":
            yield Kit(store(path), on_trio=kind == "trio file")
        case "sqlite3" | "async sqlite3":
            connect = lambda: sqlite3.connect(path, check_same_thread=False)  # noqa: E731
            yield Kit(store(await with_tables(connect)))
        case "aiosqlite":
            yield Kit(store(await with_tables(aiosqlite_driver.connecting(lambda: aiosqlite.connect(path)))))
        case "psycopg":
            yield Kit(store(await with_tables(lambda: psycopg.connect(url))))
        case "trio psycopg":
            yield Kit(store(await with_tables(lambda: psycopg.connect(url))), on_trio=True)
        case "psycopg serializable":
            options = "-c default_transaction_isolation=serializable"
            yield Kit(store(await with_tables(lambda: psycopg.connect(url, options=options))))
        case "async psycopg":

            async def connect_psycopg() -> Any:
                return await psycopg.AsyncConnection.connect(url)

            yield Kit(store(await with_tables(psycopg_driver.connecting(connect_psycopg))))
        case "asyncpg":

            async def connect_asyncpg() -> Any:
                return await asyncpg.connect(url)

            yield Kit(store(await with_tables(asyncpg_driver.connecting(connect_asyncpg))))
        case "sqlalchemy sqlite" | "sqlalchemy psycopg":
            engine = create_engine(url.replace("://", "+psycopg://") if url else f"sqlite:///{path}")
            yield Kit(store(await with_tables(engine)))
            engine.dispose()
        case _:
            address = url.replace("://", "+asyncpg://") if url else f"sqlite+aiosqlite:///{path}"
            awaiting = create_async_engine(address)
            yield Kit(store(await with_tables(awaiting)))
            await awaiting.dispose()


@pytest.fixture(params=BLOCKING + AWAITING)
async def kit(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Kit]:
    async with opened(request.param, tmp_path / "intents.db", request) as made:
        yield made


@pytest.fixture
async def file(tmp_path: Path) -> Kit:
    return Kit(IntentStore(tmp_path / "intents.db"))


# --- an intent's life ---------------------------------------------------------------------------------------


async def test_sent_once_and_its_answer_comes_back_ever_after(kit: Kit) -> None:
    sent = await kit.fulfil(Wish("order-17", ONE))
    assert sent.response == "response"
    assert (await kit.fulfil(Wish("order-17", ONE))).answer == PAID
    assert (await kit.fulfil(Wish("order-17", ONE))).answer == PAID
    found = await kit.get("order-17")
    assert kit.keys == [found.key]
    assert (found.state, found.fingerprint, found.answer) == ("done", ONE, PAID)
    assert found.made_at == found.sent_at
    assert found.sent_at is not None
    assert found.done_at is not None
    assert found.sent_at <= found.done_at <= found.now


async def test_open_until_an_answer_is_final_and_one_key_all_the_while(kit: Kit) -> None:
    for answer in (None, Answer(401), Answer(403), Answer(429)):
        await kit.fulfil(Wish("order-17", ONE), answer)
        assert (await kit.get("order-17")).state == "sent"
    await kit.fulfil(Wish("order-17", ONE), Answer(402, (), b"no money"))
    assert (await kit.get("order-17")).state == "done"
    assert (await kit.fulfil(Wish("order-17", ONE))).answer == Answer(402, (), b"no money")
    assert len(kit.keys) == 5
    assert len(set(kit.keys)) == 1


async def test_another_request_under_the_same_name_is_refused_before_it_is_sent(kit: Kit) -> None:
    await kit.fulfil(Wish("order-17", ONE), None)
    with pytest.raises(IntentChanged):
        await kit.fulfil(Wish("order-17", OTHER))
    await kit.fulfil(Wish("order-17", ONE))
    with pytest.raises(IntentChanged):
        await kit.fulfil(Wish("order-17", OTHER))
    assert len(kit.keys) == 2


async def test_a_key_older_than_the_servers_window_is_refused(kit: Kit) -> None:
    kit.at(1_000_000)
    await kit.fulfil(Wish("order-17", ONE, lasts=10), None)
    kit.at(1_000_000 + DAY - 10)
    await kit.fulfil(Wish("order-17", ONE, lasts=10), None)
    kit.at(1_000_000 + DAY - 9)
    with pytest.raises(IntentTooOld):
        await kit.fulfil(Wish("order-17", ONE, lasts=10))
    assert len(kit.keys) == 2
    renewed = await kit.ask("renew", "order-17")
    assert (renewed.state, renewed.key in kit.keys) == ("made", False)
    await kit.fulfil(Wish("order-17", OTHER, lasts=10))
    assert kit.keys[2] == renewed.key


async def test_an_answer_without_its_body_is_asked_for_again_in_the_window_only(kit: Kit) -> None:
    kit.at(1_000_000)
    await kit.fulfil(Wish("order-17", ONE), Answer(201, (), None))
    assert (await kit.get("order-17")).answer == Answer(201, (), None)
    sent = await kit.fulfil(Wish("order-17", ONE))
    assert sent.answer == PAID, "the server replays it"
    assert kit.keys[0] == kit.keys[1]
    kit.at(1_000_000 + DAY + 1)
    with pytest.raises(IntentTooOld):
        await kit.fulfil(Wish("order-17", ONE))


async def test_what_was_dropped_is_not_sent_until_it_is_renewed(kit: Kit) -> None:
    await kit.fulfil(Wish("order-17", ONE), None)
    assert (await kit.ask("drop", "order-17")).state == "dropped"
    with pytest.raises(IntentDropped, match="renew"):
        await kit.fulfil(Wish("order-17", ONE))
    assert (await kit.ask("renew", "order-17")).state == "made"
    await kit.fulfil(Wish("order-17", ONE))
    assert len(set(kit.keys)) == 2
    assert (await kit.ask("drop", "order-17")).state == "done", "one that is done stays done"
    assert await kit.ask("drop", "nobody") is None


async def test_what_has_succeeded_is_never_renewed_and_what_was_declined_may_be(kit: Kit) -> None:
    await kit.fulfil(Wish("order-17", ONE))
    with pytest.raises(Misuse, match="has succeeded"):
        await kit.ask("renew", "order-17")
    await kit.fulfil(Wish("order-18", ONE), Answer(402, (), b""))
    assert (await kit.ask("renew", "order-18")).answer is None
    await kit.fulfil(Wish("order-18", OTHER))
    assert len(set(kit.keys)) == 3
    assert await kit.ask("renew", "nobody") is None


async def test_an_answer_to_a_key_that_was_renewed_meanwhile_counts_for_nothing(file: Kit) -> None:
    def send(key: str) -> Sent[None]:
        file.store.renew("order-17")
        return Sent(None, PAID)

    file.store.fulfil(Wish("order-17", ONE), send)
    assert (await file.get("order-17")).state == "made"


async def test_an_answer_to_an_intent_that_was_dropped_meanwhile_is_kept(file: Kit) -> None:
    def send(key: str) -> Sent[None]:
        file.store.drop("order-17")
        return Sent(None, PAID)

    file.store.fulfil(Wish("order-17", ONE), send)
    assert (await file.get("order-17")).state == "done"
    assert (await file.fulfil(Wish("order-17", ONE))).answer == PAID


async def test_a_call_that_outlasts_the_window_is_not_even_bound(tmp_path: Path) -> None:
    kit = Kit(IntentStore(tmp_path / "intents.db", window="5s"))
    with pytest.raises(IntentTooOld, match="shorter deadline"):
        await kit.fulfil(Wish("order-17", ONE, lasts=6))
    assert await kit.ask("get", "order-17") is None
    await kit.fulfil(Wish("order-17", ONE, lasts=4))
    assert len(kit.keys) == 1


async def test_lists(kit: Kit) -> None:
    for number, name in enumerate(["open", "done", "dropped", "made"]):
        kit.at(1_000_000 + number)
        if name == "made":
            await kit.ask("make", name)
        else:
            await kit.fulfil(Wish(name, ONE), PAID if name == "done" else None)
    await kit.ask("drop", "dropped")
    assert [each.name for each in await kit.ask("list")] == ["open", "made"]
    everything = await kit.ask("list", open=False)
    assert [(each.name, each.state) for each in everything] == [
        ("made", "made"),
        ("dropped", "dropped"),
        ("done", "done"),
        ("open", "sent"),
    ]
    assert [each.name for each in await kit.ask("list", limit=1)] == ["open"]


async def test_purge_forgets_what_ended_long_ago(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taptwice.client.intents.BATCH", 2)
    kit.at(1_000_000)
    for number in range(5):
        await kit.fulfil(Wish(f"done-{number}", ONE))
    await kit.fulfil(Wish("open", ONE), None)
    await kit.fulfil(Wish("dropped", ONE), None)
    await kit.ask("drop", "dropped")
    kit.at(1_000_000 + HOUR)
    await kit.fulfil(Wish("young", ONE))
    assert await kit.ask("purge", "1h") == 0
    kit.at(1_000_000 + HOUR + 1)
    assert await kit.ask("purge", "1h") == 6
    assert {each.name for each in await kit.ask("list", open=False)} == {"open", "young"}


async def test_the_database_has_a_clock_of_its_own(kit: Kit) -> None:
    await kit.fulfil(Wish("order-17", ONE), None)
    first = await kit.get("order-17")
    assert 0 <= first.age < 60


async def test_without_answers_kept_the_server_is_asked_again(tmp_path: Path) -> None:
    kit = Kit(IntentStore(tmp_path / "intents.db", keep="key", window=None))
    kit.at(1_000_000)
    for _ in range(2):
        assert (await kit.fulfil(Wish("order-17", ONE))).response == "response"
    kit.at(9_000_000_000)
    assert (await kit.fulfil(Wish("order-17", ONE))).response == "response", "its window never ends"
    found = await kit.get("order-17")
    assert (found.state, found.answer) == ("done", Answer(201, (), None))
    assert len(set(kit.keys)) == 1


# --- in one's own transaction -------------------------------------------------------------------------------


@asynccontextmanager
async def connected(kind: str, path: Path, url: str) -> AsyncIterator[tuple[Any, Any]]:
    """A connection of the caller's, in a transaction; and what ends it by its name."""
    match kind:
        case "sqlite3":
            with closing(sqlite3.connect(path)) as lite:
                lite.execute("INSERT INTO orders VALUES (17)")
                yield lite, lambda verb: getattr(lite, verb)()
        case "aiosqlite":
            async with aiosqlite.connect(path) as alite:
                await alite.execute("INSERT INTO orders VALUES (17)")
                yield alite, lambda verb: getattr(alite, verb)()
        case "psycopg":
            with closing(psycopg.connect(url)) as sync:
                sync.execute("INSERT INTO orders VALUES (17)")
                yield sync, lambda verb: getattr(sync, verb)()
        case "asyncpg":
            loose = await asyncpg.connect(url)
            transaction = loose.transaction()
            await transaction.start()
            await loose.execute("INSERT INTO orders VALUES (17)")
            yield loose, lambda verb: getattr(transaction, verb)()
            await loose.close()
        case "sqlalchemy sqlite" | "sqlalchemy psycopg":
            engine = create_engine(
                url.replace("://", "+psycopg://") if "psycopg" in kind else f"sqlite:///{path}"
            )
            with engine.connect() as connection:
                connection.exec_driver_sql("INSERT INTO orders VALUES (17)")
                yield connection, lambda verb: getattr(connection, verb)()
            engine.dispose()
        case _:
            raise ValueError(kind)


@pytest.mark.parametrize(
    "kind", ["sqlite3", "aiosqlite", "psycopg", "asyncpg", "sqlalchemy sqlite", "sqlalchemy psycopg"]
)
async def test_made_in_the_callers_transaction(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Rolled back with the order it is not there; committed with it, it is found and sent."""
    path, url = tmp_path / "shop.db", ""
    if "psycopg" in kind or "asyncpg" in kind:
        url = request.getfixturevalue("fresh_postgres")
        store = IntentStore(await with_tables(lambda: psycopg.connect(url)))
        with psycopg.connect(url) as first:
            first.execute("CREATE TABLE orders (id int)")
    else:
        store = IntentStore(path)
        with closing(sqlite3.connect(path)) as lite:
            lite.execute("CREATE TABLE orders (id int)")
    maker: Any = AsyncIntentStore(store._source) if kind in ("aiosqlite", "asyncpg") else store
    committed = ""
    for end in ("rollback", "commit"):
        async with connected(kind, path, url) as (connection, finish):
            made = maker.make("order-17", connection=connection)
            made = await made if isawaitable(made) else made
            again = maker.make("order-17", connection=connection)
            again = await again if isawaitable(again) else again
            assert again == made
            assert made.state == "made"
            committed = made.key
            done = finish(end)
            if isawaitable(done):
                await done
        assert (store.get("order-17") is not None) is (end == "commit")
    kit = Kit(store)
    await kit.fulfil(Wish("order-17", ONE))
    [found] = store.list(open=False)
    assert kit.keys == [found.key] == [committed], "not the key that the wish brought along"


def test_made_outside_any_transaction_is_refused(tmp_path: Path, fresh_postgres: str) -> None:
    store = IntentStore(tmp_path / "intents.db")
    lite = closing(sqlite3.connect(tmp_path / "intents.db", isolation_level=None))
    with lite as connection, pytest.raises(Misuse, match="BEGIN IMMEDIATE"):
        store.make("order-17", connection=connection)
    with (
        psycopg.connect(fresh_postgres, autocommit=True) as loose,
        pytest.raises(Misuse, match="transaction"),
    ):
        store.make("order-17", connection=loose)


@pytest.mark.slow
def test_sent_before_the_callers_own_transaction_has_committed(fresh_postgres: str) -> None:
    """It would wait for itself for ever; after 5 s it is told what to do, and nothing was sent."""
    source = psycopg_driver.connecting(lambda: psycopg.connect(fresh_postgres))
    _ = run(migrate("postgresql"), source.open().execute)
    store = IntentStore(source)

    def send(key: str) -> Sent[None]:
        raise AssertionError("not reached")

    with psycopg.connect(fresh_postgres) as mine:
        store.make("order-17", connection=mine)
        with pytest.raises(Contention, match="commit it first"):
            store.fulfil(Wish("order-17", ONE), send)
        mine.commit()
    found = store.get("order-17")
    assert found is not None
    assert found.state == "made"


# --- many at once -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "psycopg", "psycopg serializable"])
async def test_threads_that_carry_out_one_intent_use_one_key(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """All have begun before any has its answer: each sends, under the same key."""
    async with opened(kind, tmp_path / "intents.db", request) as kit:
        together, results = threading.Barrier(8), []

        def send(key: str) -> Sent[str]:
            kit.keys.append(key)
            together.wait(timeout=60)
            return Sent("response", PAID)

        def work() -> None:
            results.append(kit.store.fulfil(Wish("order-17", ONE), send))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert len(results) == len(kit.keys) == 8
        assert set(kit.keys) == {(await kit.get("order-17")).key}


async def test_a_task_that_is_cancelled_leaves_the_intent_open(tmp_path: Path) -> None:
    store = AsyncIntentStore(tmp_path / "intents.db")
    sending = asyncio.Event()

    async def send(key: str) -> Sent[str]:
        sending.set()
        await asyncio.Event().wait()
        raise AssertionError("not reached")

    task = asyncio.create_task(store.fulfil(Wish("order-17", ONE), send))
    await sending.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    found = await store.get("order-17")
    assert found is not None
    assert found.state == "sent"


# --- wrong use ----------------------------------------------------------------------------------------------


def test_a_url_of_sqlite_names_its_file_and_no_url_is_shown_otherwise_than_it_was(tmp_path: Path) -> None:
    made = IntentStore(f"sqlite:///{tmp_path}/intents.db").make("order-17")
    assert IntentStore(tmp_path / "intents.db").get("order-17") == made
    with pytest.raises(Misuse, match=r"^sqlite:///:memory:: give the path"):
        IntentStore("sqlite:///:memory:")
    with pytest.raises(Misuse, match=r"^postgresql://…: give") as refused:
        IntentStore("postgresql://me:secret@db/shop")
    assert "secret" not in str(refused.value)


def test_a_store_that_forgets_is_refused() -> None:
    for origin in (":memory:", "sqlite:///:memory:", "sqlite://", "postgresql://db/shop"):
        with pytest.raises(Misuse, match="path of a file"):
            IntentStore(origin)


def test_a_key_outlives_a_power_failure_whatever_the_default_of_this_sqlite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect

    def careless(*given: Any, **more: Any) -> sqlite3.Connection:
        """As a build with another default would."""
        connection: sqlite3.Connection = connect(*given, **more)
        connection.execute("PRAGMA synchronous = off")
        return connection

    monkeypatch.setattr(sqlite3, "connect", careless)
    executor: Any = IntentStore(tmp_path / "intents.db")._source.open()
    executor.execute(Begin())
    assert executor.handle.execute("PRAGMA synchronous").fetchone() == (2,), "full"
    executor.execute(Close())


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable):
        IntentStore(tmp_path / "nowhere" / "intents.db")


def test_a_database_without_our_tables(tmp_path: Path) -> None:
    store = IntentStore(lambda: sqlite3.connect(tmp_path / "other.db"))
    with pytest.raises(Misuse, match="taptwice init"):
        store.get("order-17")


async def test_blocking_and_awaiting_are_told_apart(tmp_path: Path) -> None:
    awaits = aiosqlite_driver.connecting(lambda: aiosqlite.connect(tmp_path / "intents.db"))
    with pytest.raises(Misuse, match="AsyncIntentStore"):
        IntentStore(awaits)
    async with aiosqlite.connect(tmp_path / "intents.db") as connection:
        with pytest.raises(Misuse, match="AsyncIntentStore"):
            IntentStore(tmp_path / "intents.db").make("order-17", connection=connection)
    blocks = closing(sqlite3.connect(tmp_path / "intents.db"))
    with blocks as connection, pytest.raises(Misuse, match="use IntentStore"):
        await AsyncIntentStore(tmp_path / "intents.db").make("order-17", connection=connection)


def test_settings_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="keep="):
        IntentStore(tmp_path / "intents.db", keep="all")  # type: ignore[arg-type]
    with pytest.raises(Misuse, match="duration"):
        IntentStore(tmp_path / "intents.db", window="a day")
