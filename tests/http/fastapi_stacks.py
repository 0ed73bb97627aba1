"""The same FastAPI application on every stack: a handler is written once, awaiting, and runs on all of them.

A blocking stack has a plain ``def`` endpoint, which drives the handler by hand: nothing that it awaits
ever suspends. `Stack.app` makes the application, `Stack.client` a client of it, `Stack.rows` reads the
truth through a connection of its own, `Stack.borrowed` says how many connections are not back.
"""

# ruff: noqa: B008 - a dependency as a default is how FastAPI spells what only this function knows

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pathlib
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Annotated, Any

import asyncpg
import httpx2
import psycopg
import psycopg_pool
import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Response
from pydantic import BaseModel
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from taptwice import sql
from taptwice.events import Event
from taptwice.http.fastapi import Idempotency, IdempotentRoute
from tests.fix_postgres import _new_database, _server

CHARGES = {
    "postgresql": """
        CREATE TABLE charges (
            id serial PRIMARY KEY, amount integer NOT NULL, note text UNIQUE,
            parent integer REFERENCES charges (id) DEFERRABLE INITIALLY DEFERRED)""",
    "sqlite": """
        CREATE TABLE charges (
            id integer PRIMARY KEY, amount integer NOT NULL, note text UNIQUE,
            parent integer REFERENCES charges (id) DEFERRABLE INITIALLY DEFERRED)""",
}
STACKS = (
    "sqlite-sqlalchemy-async",
    "sqlite-raw",
    "sqlalchemy-asyncpg",
    "sqlalchemy-psycopg",
    "asyncpg",
    "psycopg-async",
    "psycopg-sync",
)
SESSIONS = ("sqlite-sqlalchemy-async", "sqlalchemy-asyncpg", "sqlalchemy-psycopg")
POSTGRES = STACKS[2:]


class Base(DeclarativeBase):
    pass


class Charge(Base):
    __tablename__ = "charges"
    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int]
    note: Mapped[str | None]
    parent: Mapped[int | None]


class ChargeIn(BaseModel):
    amount: int = 5


def drive(handler: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never suspends."""
    try:
        handler.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("a handler on a blocking stack suspended")


async def _now(value: Any) -> Any:
    return await value if isinstance(value, Awaitable) else value


class Work:
    """What a handler does, on whatever its connection is. `raw` is that connection or session."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    async def insert(self, amount: int, note: str | None = None, parent: int | None = None) -> int:
        def literal(value: Any) -> str:
            return "NULL" if value is None else repr(value)

        rows = await self.execute(
            "INSERT INTO charges (amount, note, parent) "
            f"VALUES ({amount}, {literal(note)}, {literal(parent)}) RETURNING id"
        )
        return int(rows[0][0])

    async def execute(self, statement: str) -> list[Any]:
        if isinstance(self.raw, psycopg.Connection | psycopg.AsyncConnection) or hasattr(self.raw, "pgconn"):
            cursor = await _now(self.raw.execute(statement))
            return list(await _now(cursor.fetchall())) if cursor.description else []
        if hasattr(self.raw, "fetchrow"):
            return list(await self.raw.fetch(statement))
        if hasattr(self.raw, "executescript"):
            return list(self.raw.execute(statement))
        result = await _now(self.raw.execute(text(statement)))
        return list(result) if result.returns_rows else []

    @contextlib.asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        if hasattr(self.raw, "executescript"):
            self.raw.execute("SAVEPOINT users_own")
            try:
                yield
            except BaseException:
                self.raw.execute("ROLLBACK TO users_own")
                raise
            finally:
                self.raw.execute("RELEASE users_own")
            return
        begin = getattr(self.raw, "begin_nested", None) or self.raw.transaction
        block = begin()
        if hasattr(block, "__aenter__"):
            async with block:
                yield
        else:
            with block:
                yield

    async def commit(self) -> None:
        await _now(self.raw.commit())

    async def rollback(self) -> None:
        await _now(self.raw.rollback())


Handler = Callable[[Work], Coroutine[Any, Any, Any]]


async def account(authorization: Annotated[str | None, Header()] = None) -> str:
    """The login of all these applications: the header is the account."""
    if not authorization:
        raise HTTPException(401)
    if authorization == "banned":
        raise HTTPException(403)
    return authorization


class Stack:
    """One way to reach a database."""

    def __init__(self, name: str, place: str, pool_size: int = 5) -> None:
        self.name = name
        self.place = place
        self.pool_size = pool_size
        self.sqlite = name.startswith("sqlite")
        self.sessions = "sqlalchemy" in name
        self.blocking = name in ("sqlite-raw", "sqlalchemy-psycopg", "psycopg-sync")
        self.origin: Any = None
        self.engine: Any = None
        self.events: list[Event] = []
        self.calls = 0
        """How often a handler of `app` was called."""
        self._opened: list[Any] = []

    async def open(self, **engine_options: Any) -> Any:
        """An origin of its own each time; `self.origin` is the last."""
        place, size = self.place, self.pool_size
        bare = place.partition("://")[2]
        sizes = {"pool_size": size, "max_overflow": 0, **engine_options}
        match self.name:
            case "sqlite-sqlalchemy-async":
                self.engine = create_async_engine(f"sqlite+aiosqlite:///{place}", **sizes)
                self.origin = async_sessionmaker(self.engine)
            case "sqlite-raw":
                self.origin = lambda: sqlite3.connect(place, check_same_thread=False)
            case "sqlalchemy-asyncpg":
                self.engine = create_async_engine(f"postgresql+asyncpg://{bare}", **sizes)
                self.origin = async_sessionmaker(self.engine)
            case "sqlalchemy-psycopg":
                self.engine = create_engine(f"postgresql+psycopg://{bare}", **sizes)
                self.origin = sessionmaker(self.engine)
            case "asyncpg":
                self.origin = await asyncpg.create_pool(place, min_size=1, max_size=size)
            case "psycopg-async":
                self.origin = psycopg_pool.AsyncConnectionPool(place, min_size=1, max_size=size, open=False)
                await self.origin.open(wait=True)
            case "psycopg-sync":
                self.origin = psycopg_pool.ConnectionPool(place, min_size=1, max_size=size, open=True)
                self.origin.wait()
        self._opened.append(self.engine or self.origin)
        return self.origin

    async def close(self) -> None:
        for opened in self._opened:
            if self.sessions:
                await _now(opened.dispose())
            elif self.name != "sqlite-raw":
                await _now(opened.close())

    def borrowed(self) -> int:
        """Connections of the pool that somebody holds."""
        if self.sessions:
            return int(self.engine.pool.checkedout())
        if self.name == "asyncpg":
            return int(self.origin.get_size() - self.origin.get_idle_size())
        if self.name == "sqlite-raw":
            return 0
        stats = self.origin.get_stats()
        return int(stats["pool_size"] - stats["pool_available"])

    def rows(self, statement: str = "SELECT amount FROM charges ORDER BY id") -> list[Any]:
        """The truth, as committed; single columns as bare values."""
        if self.sqlite:
            with contextlib.closing(sqlite3.connect(self.place)) as connection:
                found = connection.execute(statement).fetchall()
        else:
            with psycopg.connect(self.place) as pg:
                found = pg.execute(statement.encode()).fetchall()
        return [row[0] if len(row) == 1 else tuple(row) for row in found]

    def saved(self) -> list[int]:
        """The statuses of the answers that were saved."""
        return self.rows("SELECT status FROM taptwice_records ORDER BY created_at, id")

    def execute(self, statement: str) -> None:
        """Through a connection of its own, committed."""
        if self.sqlite:
            with contextlib.closing(sqlite3.connect(self.place, isolation_level=None)) as connection:
                connection.execute(statement)
        else:
            with psycopg.connect(self.place) as pg:
                pg.execute(statement.encode())

    # --- applications ------------------------------------------------------------------------------

    def once(self, **settings: Any) -> Idempotency:
        settings.setdefault("account", account)
        return Idempotency(self.origin, listeners=[self.events.append], **settings)

    def given(self, once: Idempotency) -> Any:
        """The dependency that gives a handler what it works on."""
        return once.session if self.sessions else once.connection

    def endpoint(self, handler: Handler, given: Any) -> Callable[..., Any]:
        """An endpoint of the stack's kind around a handler."""
        if self.blocking:

            def blocking(body: ChargeIn, db: Any = Depends(given)) -> Any:
                self.calls += 1
                return drive(handler(Work(db)))

            return blocking

        async def awaiting(body: ChargeIn, db: Any = Depends(given)) -> Any:
            self.calls += 1
            return await handler(Work(db))

        return awaiting

    def app(self, handler: Handler, once: Idempotency | None = None, **policy: Any) -> FastAPI:
        """One keyed route, ``POST /charges``, and ``GET /free`` that needs nothing."""
        once = once or self.once()
        router = APIRouter(route_class=IdempotentRoute)
        router.post("/charges", status_code=201, response_model=None, dependencies=[once.keyed(**policy)])(
            self.endpoint(handler, self.given(once))
        )

        @router.get("/free")
        async def free() -> str:
            return "free"

        app = FastAPI()
        app.include_router(router)
        return app

    def client(self, handler: Handler, once: Idempotency | None = None, **policy: Any) -> Client:
        return Client(self.app(handler, once, **policy))


class Client(httpx2.AsyncClient):
    """In the same process and event loop; what the application raises is a 500 here, as it is on a server."""

    def __init__(self, app: Any, **options: Any) -> None:
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        options.setdefault("headers", {"authorization": "acct_1"})
        super().__init__(transport=transport, base_url="http://test", **options)

    async def charge(
        self, key: str | None = "key-1", amount: int = 5, path: str = "/charges", **headers: str
    ) -> httpx2.Response:
        if key is not None:
            headers["idempotency-key"] = key
        return await self.post(
            path, json={"amount": amount}, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )


def replayed(answer: httpx2.Response) -> bool:
    return answer.headers.get("idempotent-replayed") == "true"


def problem(answer: httpx2.Response) -> str:
    """The last segment of a problem document's type."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    assert answer.json()["status"] == answer.status_code
    return str(answer.json()["type"].rpartition("/")[2])


async def work_of_one_row(work: Work) -> Any:
    """The usual handler."""
    return {"id": await work.insert(5)}


def answer_429() -> Response:
    return Response("slow down", status_code=429)


# --- fixtures -----------------------------------------------------------------------------------------------

_numbers = itertools.count()


def _make_tables(dialect: sql.Dialect, execute: Callable[[str], Any]) -> None:
    for migration in sql.migrations(dialect):
        for statement in migration.statements:
            execute(statement)
    execute(CHARGES[dialect])


@pytest.fixture(scope="session")
def _charges_database() -> Iterator[str]:
    with _new_database(_server()) as url:
        with psycopg.connect(url, autocommit=True) as connection:
            _make_tables("postgresql", lambda statement: connection.execute(statement.encode()))
        yield url


@pytest.fixture
def charges_postgres(_charges_database: str) -> str:
    """A database with both tables, empty."""
    with psycopg.connect(_charges_database, autocommit=True) as connection:
        connection.execute("TRUNCATE charges, taptwice_records RESTART IDENTITY")
    return _charges_database


@pytest.fixture
def charges_sqlite(tmp_path: pathlib.Path) -> str:
    path = tmp_path / f"charges-{next(_numbers)}.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        _make_tables("sqlite", connection.execute)
        connection.commit()
    return str(path)


@pytest.fixture
async def stack(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    """The stack that `on` names; without it, each of them."""
    name = request.param
    place = request.getfixturevalue("charges_sqlite" if name.startswith("sqlite") else "charges_postgres")
    made = Stack(name, place)
    await made.open()
    try:
        yield made
        assert made.borrowed() == 0, "a connection was not given back"
    finally:
        await made.close()


def on(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("stack", names or STACKS, indirect=True)


async def until(condition: Callable[[], bool]) -> None:
    """Let the others run until something is so."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for knows of no event
            await asyncio.sleep(0.001)
