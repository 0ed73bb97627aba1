"""`assert_crash_safe` on good services, on each kind of client, and on work outside the claim."""

from __future__ import annotations

import contextlib
import gc
import pathlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2
import psycopg
import pytest
import uvicorn
from fastapi import APIRouter, Depends, FastAPI
from flask import request
from psycopg_pool import ConnectionPool
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.testclient import TestClient

from taptwice import sql
from taptwice.errors import Misuse
from taptwice.faults import Kind
from taptwice.http import fastapi as once_fastapi
from taptwice.testing import Effects, assert_crash_safe, assert_once, bound_to
from tests.testing.shops import Shop, fastapi_shop, flask_shop

CHARGE: dict[str, Any] = {"json": {"cents": 100}}


def effects(shop: Shop) -> Effects:
    return Effects(shop.connect, "charges", "wallets")


def test_flask(tmp_path: pathlib.Path) -> None:
    shop = flask_shop(tmp_path)
    client = shop.app.test_client()
    answer = assert_crash_safe(client, "POST", "/charges", once=shop.once, effects=effects(shop), **CHARGE)
    assert answer.status_code == 201
    with contextlib.closing(shop.connect()) as connection:
        [(charges,)] = connection.execute("SELECT count(*) FROM charges").fetchall()
    assert charges > 4 * 6, "one without a fault, and one at each point of the claim and the finish"
    assert shop.once.bound is None


@pytest.mark.parametrize("raises", [True, False])
def test_starlettes_client(tmp_path: pathlib.Path, raises: bool) -> None:
    shop = fastapi_shop(tmp_path)

    async def dispatch(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    shop.app.add_middleware(BaseHTTPMiddleware, dispatch=dispatch)  # in a task group, which a crash would end
    with TestClient(shop.app, raise_server_exceptions=raises) as client:
        assert_crash_safe(client, "POST", "/v1/charges", once=shop.once, effects=effects(shop), **CHARGE)
    assert "serve" not in vars(shop.once)


async def test_a_client_that_awaits(tmp_path: pathlib.Path) -> None:
    shop = fastapi_shop(tmp_path)
    transport = httpx2.ASGITransport(shop.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://shop/v1") as client:
        await assert_crash_safe(client, "POST", "/charges", once=shop.once, effects=effects(shop), **CHARGE)


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """Over a real socket, by uvicorn in a thread."""
    up = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            up.set()

    server = Server(uvicorn.Config(app, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    up.wait(30)
    try:
        [socket] = server.servers[0].sockets
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


def test_over_a_socket(tmp_path: pathlib.Path) -> None:
    shop = fastapi_shop(tmp_path)
    with served(shop.app) as url, httpx2.Client(base_url=url) as client:
        assert_crash_safe(client, "POST", "/v1/charges", once=shop.once, effects=effects(shop), **CHARGE)


# --- on PostgreSQL ----------------------------------------------------------------------------------------


def postgres_shop(url: str, database: str, outside: bool = False) -> Shop:
    """One keyed route. `outside`: its row is written by another connection, and committed at once."""
    with psycopg.connect(url, autocommit=True) as made:
        for migration in sql.migrations("postgresql"):
            for statement in migration.statements:
                made.execute(statement)
        made.execute("CREATE TABLE charges (id serial, cents integer)")
    alchemy = url.replace("postgresql://", f"postgresql+{database.rpartition(' ')[2]}://", 1)
    makers: dict[str, Any] = {
        "psycopg": lambda: sessionmaker(create_engine(alchemy)),
        "async psycopg": lambda: async_sessionmaker(create_async_engine(alchemy)),
        "async asyncpg": lambda: async_sessionmaker(create_async_engine(alchemy)),
    }
    maker = makers[database]()
    once = once_fastapi.Idempotency(maker, account=lambda: "acct")
    router = APIRouter(route_class=once_fastapi.IdempotentRoute)
    charge = text("INSERT INTO charges (cents) VALUES (5) RETURNING id")

    def elsewhere() -> int:
        with psycopg.connect(url, autocommit=True) as connection:
            [(found,)] = connection.execute("INSERT INTO charges (cents) VALUES (5) RETURNING id").fetchall()
        return int(found)

    if database == "psycopg":

        @router.post("/charges", status_code=201, dependencies=[once.keyed()])
        def blocking(db: Session = Depends(once.session)) -> int:  # noqa: B008
            return elsewhere() if outside else db.execute(charge).scalar_one()

    else:

        @router.post("/charges", status_code=201, dependencies=[once.keyed()])
        async def awaiting(db: AsyncSession = Depends(once.session)) -> int:  # noqa: B008
            return elsewhere() if outside else (await db.execute(charge)).scalar_one()

    app = FastAPI()
    app.include_router(router)
    return Shop(app, once, lambda: psycopg.connect(url))


@pytest.mark.parametrize("database", ["psycopg", "async psycopg", "async asyncpg"])
async def test_sessions_on_postgresql(fresh_postgres: str, database: str) -> None:
    shop = postgres_shop(fresh_postgres, database)
    transport = httpx2.ASGITransport(shop.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://shop") as client:
        counted = Effects(shop.connect, "charges")
        await assert_once(client, "POST", "/charges", effects=counted)
        await assert_crash_safe(client, "POST", "/charges", once=shop.once, effects=counted)
    engine = shop.once.origin.kw["bind"]
    disposed = engine.dispose()
    if disposed is not None:
        await disposed


async def test_a_row_outside_the_transaction_is_found(fresh_postgres: str) -> None:
    shop = postgres_shop(fresh_postgres, "psycopg", outside=True)
    transport = httpx2.ASGITransport(shop.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://shop") as client:
        counted = Effects(ConnectionPool(fresh_postgres, min_size=0, max_size=2, open=True), "charges")
        with pytest.raises(AssertionError) as failed:
            await assert_crash_safe(client, "POST", "/charges", once=shop.once, effects=counted)
    lines = str(failed.value).splitlines()
    assert lines[0] == "POST /charges does not survive:"
    points = {line.split(":")[0].strip() for line in lines[1:]}
    found = {point.partition(" (")[2] for point in points}
    assert found >= {"insert), crash before", "insert), reply lost", "commit), crash before"}
    assert not any("commit), crash after" in point or "claim" in point for point in points), points
    assert all("expected charges: 1 row added, found charges: 2 rows added" in line for line in lines[1:])
    shop.once.origin.kw["bind"].dispose()


# --- what it is to find, and to refuse --------------------------------------------------------------------


def test_a_mail_from_inside_the_handler_is_found(tmp_path: pathlib.Path) -> None:
    shop = flask_shop(tmp_path)
    with pytest.raises(AssertionError) as failed:
        assert_crash_safe(
            shop.app.test_client(), "POST", "/mails", once=shop.once, effects=lambda: len(shop.mails)
        )
    text = str(failed.value)
    assert text.startswith("POST /mails does not survive:\n  ")
    assert "(commit), crash before: " in text
    assert "effect: expected effects: +1, found effects: +2" in text


@pytest.mark.parametrize(
    ("defect", "found"),
    [
        ("a lock that is not given back", "command 1 (begin), crash before: the retry failed: 500 "),
        ("says yes to what failed", "the retry, after an answer: status: expected 202, found 201 "),
        ("another body each time", "the second retry: body: expected b'201 2', found b'201 3'"),
        ("raises the third time", "the second retry failed: ZeroDivisionError()"),
    ],
)
def test_each_defect(tmp_path: pathlib.Path, defect: str, found: str) -> None:
    """What stands around the handler can break what a retry relies on."""
    shop = flask_shop(tmp_path)
    busy: set[str] = set()
    times: Counter[str] = Counter()

    def key() -> str:
        return request.headers["Idempotency-Key"]

    def before() -> Any:
        times[key()] += 1
        if defect == "raises the third time" and times[key()] == 3:
            raise ZeroDivisionError
        if defect == "a lock that is not given back" and key() in busy:
            return {"error": "busy"}, 500
        busy.add(key())
        return None

    def after(response: Any) -> Any:
        busy.discard(key())
        if defect == "says yes to what failed" and response.status_code == 503:
            response.status_code = 202
        if defect == "another body each time":
            response.data = f"{response.status_code} {times[key()]}"
        return response

    shop.app.before_request(before)
    shop.app.after_request(after)
    shop.app.testing = defect == "raises the third time"
    with pytest.raises(AssertionError) as failed:
        assert_crash_safe(
            shop.app.test_client(), "POST", "/charges", once=shop.once, effects=effects(shop), **CHARGE
        )
    assert found in str(failed.value)


async def test_a_dead_process_says_nothing_more(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The edge gives its connection back in a task of which nobody would fetch a second crash."""
    shop = fastapi_shop(tmp_path)
    transport = httpx2.ASGITransport(shop.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://shop/v1") as client:
        await assert_crash_safe(client, "POST", "/charges", once=shop.once, effects=effects(shop), **CHARGE)
    gc.collect()
    assert not [record for record in caplog.records if "never retrieved" in record.getMessage()]


def test_one_effect_of_which_the_client_is_told_no(tmp_path: pathlib.Path) -> None:
    """Somebody else refuses the second time, say by a unique number: nobody ever has the first answer."""
    shop = flask_shop(tmp_path)

    def order() -> Any:
        number = request.headers["Idempotency-Key"]
        if number in shop.mails:
            return {"error": "exists"}, 409
        shop.mails.append(number)
        return {}, 201

    shop.app.add_url_rule("/orders", view_func=shop.once.keyed()(order), methods=["POST"])
    client = shop.app.test_client()
    with pytest.raises(AssertionError) as failed:
        assert_crash_safe(client, "POST", "/orders", once=shop.once, effects=lambda: len(shop.mails))
    text = str(failed.value)
    assert "(commit), crash before: the retry: status: expected 201 as without a fault, found 409 " in text
    assert "effect: " not in text


def test_a_route_that_takes_no_key(tmp_path: pathlib.Path) -> None:
    shop = flask_shop(tmp_path)
    client = shop.app.test_client()
    with pytest.raises(AssertionError, match="no claim was made through `once`"):
        assert_crash_safe(
            client, "PUT", "/wallets/bea", once=shop.once, json={"cents": 1}, effects=effects(shop)
        )


def test_one_kind_of_fault_only(tmp_path: pathlib.Path) -> None:
    shop = flask_shop(tmp_path)
    client = shop.app.test_client()
    with pytest.raises(AssertionError) as failed:
        assert_crash_safe(
            client,
            "POST",
            "/mails",
            once=shop.once,
            effects=lambda: len(shop.mails),
            kinds=[Kind.REFUSED],
        )
    assert all(", connection broken before: " in line for line in str(failed.value).splitlines()[1:])


def test_bound_to_the_tests_connection(tmp_path: pathlib.Path) -> None:
    shop = flask_shop(tmp_path)
    with contextlib.closing(shop.connect()) as connection:
        connection.execute("BEGIN")
        with bound_to(shop.once, connection), pytest.raises(Misuse, match="does not die with a process"):
            assert_crash_safe(
                shop.app.test_client(),
                "POST",
                "/charges",
                once=shop.once,
                effects=lambda: connection.execute("SELECT count(*) FROM charges").fetchall(),
                **CHARGE,
            )
        connection.rollback()
