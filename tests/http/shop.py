"""A shop with a database, on each kind of driver, and calls to it without a network.

A charge is a row (account, key, cents). What must hold whatever happens: at most one charge a key, no charge
without a record, and every saved 201 has its charge.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import pathlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import aiosqlite
import asyncpg
import psycopg
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from taptwice import sql

CHARGES = "CREATE TABLE charges (account text, key text, cents integer)"
BLOCKING = ("sqlite3", "psycopg", "sqlalchemy")
AWAITING = ("aiosqlite", "async psycopg", "asyncpg", "async sqlalchemy")
EVERY = BLOCKING + AWAITING
SQLITE = ("sqlite3", "aiosqlite")


@dataclasses.dataclass
class Shop:
    """`origin` is what `Idempotency` is given; `query` reads what is committed, on another connection."""

    kind: str
    origin: Any
    query: Callable[[str], list[tuple[Any, ...]]]
    address: str

    async def insert(self, handle: Any, key: str, cents: int = 100) -> None:
        """Charge, on the claim's connection."""
        done = self.insert_now(handle, key, cents)
        if inspect.isawaitable(done):
            await done

    def insert_now(self, handle: Any, key: str, cents: int = 100) -> Any:
        """The same where nothing awaits; what is returned is to be awaited where something does."""
        row = ("acct", key, cents)
        if "sqlalchemy" in self.kind:
            values = dict(zip(("account", "key", "cents"), row, strict=True))
            return handle.execute(text("INSERT INTO charges VALUES (:account, :key, :cents)"), values)
        if self.kind == "asyncpg":
            return handle.execute("INSERT INTO charges VALUES ($1, $2, $3)", *row)
        mark = "?" if self.kind in SQLITE else "%s"
        return handle.execute(f"INSERT INTO charges VALUES ({mark}, {mark}, {mark})", row)

    def charges(self, key: str | None = None) -> int:
        """How many charges are committed: of a key, or of all."""
        rows = self.query("SELECT key FROM charges")
        return sum(key is None or found == key for (found,) in rows)

    def records(self) -> dict[str, int]:
        """The keys that are remembered, and the status that each was answered with."""
        return dict(self.query("SELECT key, status FROM taptwice_records"))

    def check(self) -> None:
        """What must hold at any time."""
        assert_invariants(self.query)


def assert_invariants(query: Callable[[str], list[tuple[Any, ...]]]) -> None:
    twice = "SELECT account, key FROM charges GROUP BY account, key HAVING count(*) > 1"
    assert query(twice) == [], "charged twice"
    orphans = (
        "SELECT key FROM charges c WHERE NOT EXISTS "
        "(SELECT 1 FROM taptwice_records r WHERE r.account = c.account AND r.key = c.key)"
    )
    assert query(orphans) == [], "charged, and nothing is remembered"
    hollow = (
        "SELECT key FROM taptwice_records r WHERE status = 201 AND NOT EXISTS "
        "(SELECT 1 FROM charges c WHERE r.account = c.account AND r.key = c.key)"
    )
    assert query(hollow) == [], "a 201 is saved, and nothing was charged"


def make_tables(run: Callable[[str], Any], dialect: sql.Dialect) -> None:
    for migration in sql.migrations(dialect):
        for statement in migration.statements:
            run(statement)
    run(CHARGES)


def sqlite_shop(folder: pathlib.Path, kind: str) -> Shop:
    path = folder / "shop.db"
    with contextlib.closing(sqlite3.connect(path)) as made:
        made.execute("PRAGMA journal_mode = wal")
        make_tables(made.execute, "sqlite")
        made.commit()

    def query(statement: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            return connection.execute(statement).fetchall()

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(path, check_same_thread=False)
        connection.execute("PRAGMA synchronous = off")
        return connection

    origin: Any = connect if kind == "sqlite3" else (lambda: aiosqlite.connect(path))
    return Shop(kind, origin, query, str(path))


def postgres_query(url: str) -> Callable[[str], list[tuple[Any, ...]]]:
    def query(statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(url, autocommit=True) as connection:
            return connection.execute(statement).fetchall()

    return query


def postgres_tables(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        make_tables(connection.execute, "postgresql")


@contextlib.asynccontextmanager
async def open_shop(kind: str, folder: pathlib.Path, url: Callable[[], str]) -> AsyncIterator[Shop]:
    """A shop of this kind with empty tables; `url` names an empty PostgreSQL database."""
    if kind in SQLITE:
        yield sqlite_shop(folder, kind)
        return
    address = url()
    postgres_tables(address)
    query = postgres_query(address)
    driver = address.replace("postgresql://", "postgresql+psycopg://", 1)
    match kind:
        case "psycopg":
            with ConnectionPool(address, min_size=0, max_size=5) as pool:
                yield Shop(kind, pool, query, address)
        case "async psycopg":
            async with AsyncConnectionPool(address, min_size=0, max_size=5) as async_pool:
                yield Shop(kind, async_pool, query, address)
        case "asyncpg":
            async with asyncpg.create_pool(address, min_size=0, max_size=5) as asyncpg_pool:
                yield Shop(kind, asyncpg_pool, query, address)
        case "sqlalchemy":
            engine = create_engine(driver)
            yield Shop(kind, engine, query, address)
            engine.dispose()
        case "async sqlalchemy":
            async_engine = create_async_engine(driver)
            yield Shop(kind, async_engine, query, address)
            await async_engine.dispose()
        case _:
            raise ValueError(kind)


# --- calls --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Reply:
    """What came back over ASGI."""

    messages: list[Any]

    @property
    def started(self) -> bool:
        return any(message["type"] == "http.response.start" for message in self.messages)

    @property
    def _start(self) -> Any:
        [start] = [message for message in self.messages if message["type"] == "http.response.start"]
        return start

    @property
    def status(self) -> int:
        status: int = self._start["status"]
        return status

    @property
    def headers(self) -> list[tuple[str, str]]:
        return [(name.decode().lower(), value.decode()) for name, value in self._start["headers"]]

    def header(self, name: str) -> str | None:
        return next((value for known, value in self.headers if known == name), None)

    @property
    def replayed(self) -> bool:
        return self.header("idempotent-replayed") == "true"

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.messages if m["type"] == "http.response.body")

    @property
    def problem(self) -> str:
        """The last segment of the problem's type."""
        name: str = json.loads(self.body)["type"].rpartition("/")[2]
        return name


def scope_of(
    method: str = "POST",
    path: str = "/charges",
    headers: Iterable[tuple[str, str]] = (),
    query: bytes = b"",
    **more: Any,
) -> dict[str, Any]:
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "root_path": "",
        "headers": raw,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        **more,
    }


async def call(
    app: Any,
    scope: dict[str, Any] | None = None,
    key: str | None = "k",
    body: bytes | list[bytes] = b'{"cents":100}',
    on_send: Callable[[Any], Any] | None = None,
    **more: Any,
) -> Reply:
    """One request through the application. `on_send` sees each message as it leaves, and may fail or wait."""
    if scope is None:
        headers = [*more.pop("headers", []), *([("idempotency-key", key)] if key is not None else [])]
        scope = scope_of(headers=headers, **more)
    chunks = [body] if isinstance(body, bytes) else list(body)
    incoming = [
        {"type": "http.request", "body": chunk, "more_body": at < len(chunks) - 1}
        for at, chunk in enumerate(chunks)
    ]
    reply = Reply([])

    async def receive() -> Any:
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if on_send is not None:
            done = on_send(message)
            if inspect.isawaitable(done):
                await done
        reply.messages.append(message)

    await app(scope, receive, send)
    return reply
