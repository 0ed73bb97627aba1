"""Services as users have them, good and bad, each with a real database.

The good ones charge under a key. A bad one fails in one way: it checks before it inserts, or works outside
the claim's transaction, or does not keep what its method promises.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiosqlite
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from flask import Flask
from flask import request as flask_request

from taptwice import sql
from taptwice.http import fastapi as once_fastapi
from taptwice.http import flask as once_flask

TABLES = (
    "CREATE TABLE charges (id INTEGER PRIMARY KEY, cents INTEGER NOT NULL)",
    "CREATE TABLE wallets (owner TEXT PRIMARY KEY, cents INTEGER NOT NULL)",
    "CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT NOT NULL)",
    "INSERT INTO wallets VALUES ('anna', 10000)",
    "INSERT INTO notes VALUES (1, 'first')",
)
CHARGE = "INSERT INTO charges (cents) VALUES (?) RETURNING id"
PAY = "UPDATE wallets SET cents = cents - ? WHERE owner = 'anna'"


@dataclass
class Shop:
    """An application, its `Idempotency`, its database, and what it has sent by mail."""

    app: Any
    once: Any
    connect: Callable[[], Any]
    mails: list[str] = field(default_factory=list)


def database(folder: pathlib.Path) -> Callable[[], sqlite3.Connection]:
    """A new SQLite database, given by the function that opens connections to it."""
    path = folder / "shop.db"

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(path, check_same_thread=False)
        connection.execute("PRAGMA synchronous = off")
        return connection

    with contextlib.closing(connect()) as made:
        made.execute("PRAGMA journal_mode = wal")
        ours = [each for migration in sql.migrations("sqlite") for each in migration.statements]
        for statement in (*ours, *TABLES):
            made.execute(statement)
        made.commit()
    return connect


def flask_shop(folder: pathlib.Path) -> Shop:
    """POST /charges is good. POST /mails sends a mail from inside the handler, as if that were a row."""
    connect = database(folder)
    app = Flask(__name__)
    once = once_flask.Idempotency(connect, account=lambda: "acct")
    shop = Shop(app, once, connect)

    @app.post("/charges")
    @once.keyed()
    def charge() -> Any:
        cents = flask_request.get_json()["cents"]
        [row] = once.connection().execute(CHARGE, [cents]).fetchall()
        once.connection().execute(PAY, [cents])
        return {"charge_id": row[0]}, 201, {"Location": f"/charges/{row[0]}"}

    @app.post("/mails")
    @once.keyed()
    def mail() -> Any:
        shop.mails.append("hello")
        return {"mails": len(shop.mails)}, 201

    @app.post("/login")
    def login() -> Any:
        return {"token": len(shop.mails)}

    @app.get("/charges")
    def charges() -> Any:
        with contextlib.closing(connect()) as reading:
            return {"charges": reading.execute("SELECT count(*) FROM charges").fetchone()[0]}

    @app.put("/wallets/<owner>")
    def set_wallet(owner: str) -> Any:
        with contextlib.closing(connect()) as writing, writing:
            writing.execute(
                "INSERT OR REPLACE INTO wallets VALUES (?, ?)", [owner, flask_request.get_json()["cents"]]
            )
        return {"owner": owner}

    return shop


def fastapi_shop(folder: pathlib.Path, **policy: Any) -> Shop:
    """POST /charges and what stands under /wallets is good; PUT and GET below /notes break their promise."""
    connect = database(folder)
    once = once_fastapi.Idempotency(lambda: aiosqlite.connect(folder / "shop.db"), account=lambda: "acct")
    router = APIRouter(route_class=once_fastapi.IdempotentRoute)
    shop = Shop(FastAPI(openapi_url=None), once, connect)

    @router.post("/charges", status_code=201, dependencies=[once.keyed(**policy)])
    async def charge(
        request: Request,
        response: Response,
        db: Any = Depends(once.connection),  # noqa: B008
    ) -> dict[str, int]:
        cents = (await request.json())["cents"]
        row = await (await db.execute(CHARGE, [cents])).fetchone()
        await db.execute(PAY, [cents])
        response.headers["Location"] = f"/charges/{row[0]}"
        return {"charge_id": row[0]}

    @router.post("/streams", dependencies=[once.keyed(**policy)])
    async def stream(db: Any = Depends(once.connection)) -> StreamingResponse:  # noqa: B008
        await db.execute("INSERT INTO charges (cents) VALUES (1)")
        return StreamingResponse(iter([b"char", b"ged"]))

    @router.post("/mails", status_code=201, dependencies=[once.keyed()])
    async def mail() -> dict[str, int]:
        shop.mails.append("hello")
        return {"mails": len(shop.mails)}

    def run(statement: str, *values: Any) -> list[Any]:
        with contextlib.closing(connect()) as connection, connection:
            return connection.execute(statement, values).fetchall()

    @router.get("/wallets/{owner}")
    def wallet(owner: str) -> list[Any]:
        return run("SELECT cents FROM wallets WHERE owner = ?", owner)

    @router.put("/wallets/{owner}")
    def set_wallet(owner: str, cents: int) -> None:
        run("INSERT OR REPLACE INTO wallets VALUES (?, ?)", owner, cents)

    @router.delete("/wallets/{owner}", status_code=204)
    def close_wallet(owner: str) -> None:
        run("DELETE FROM wallets WHERE owner = ?", owner)

    @router.put("/notes/{number}")
    def append(number: int, text: str) -> None:
        run("INSERT INTO notes (text) VALUES (?)", text)

    @router.get("/notes")
    def count_reader() -> list[Any]:
        run("UPDATE notes SET text = text || '.' WHERE id = 1")
        return run("SELECT text FROM notes")

    shop.app.include_router(router, prefix="/v1")
    return shop


CHECKS = (
    "CREATE TABLE seen (key TEXT, body BLOB, answer TEXT)",
    "SELECT body, answer FROM seen WHERE key = ?",
)


def check_then_insert(folder: pathlib.Path, at_once: int, racing_from: int = 2) -> Shop:
    """What many write by hand: look for the key, and where it is not there, do the work and insert it.

    Its race is not left to luck. From the second key on, or a later one, all requests have looked before
    one of them goes on; under the keys before that they take turns.
    """
    connect = database(folder)
    app = Flask(__name__)
    shop = Shop(app, None, connect)
    meeting = threading.Barrier(at_once)
    alone = threading.Lock()
    keys: list[str] = []
    with contextlib.closing(connect()) as made:
        made.execute(CHECKS[0])

    @app.post("/charges")
    def charge() -> Any:
        key = flask_request.headers["Idempotency-Key"]
        with alone:
            if key not in keys:
                keys.append(key)
        if keys.index(key) + 1 >= racing_from:
            return checked_and_inserted(key, meeting.wait)
        with alone:
            return checked_and_inserted(key, lambda timeout: None)

    def checked_and_inserted(key: str, wait: Callable[[float], Any]) -> Any:
        body = flask_request.get_data()
        with contextlib.closing(connect()) as connection:
            found = connection.execute(CHECKS[1], [key]).fetchone()
        if found is not None and found[0] != body:
            return {"type": "urn:x/key-reused"}, 422, {"Content-Type": "application/problem+json"}
        if found is not None:
            return json.loads(found[1]), 201, {"Idempotent-Replayed": "true"}
        wait(30)
        with contextlib.closing(connect()) as connection, connection:
            [row] = connection.execute(CHARGE, [flask_request.get_json()["cents"]]).fetchall()
            answer = {"charge_id": row[0]}
            connection.execute("INSERT INTO seen VALUES (?, ?, ?)", [key, body, json.dumps(answer)])
        return answer, 201

    return shop


def by_hand(folder: pathlib.Path, defect: str = "") -> Shop:
    """Idempotency as one can write it for one process, under a lock, and good; or with one defect."""
    connect = database(folder)
    app = Flask(__name__)
    alone = threading.Lock()
    saved: dict[str, tuple[bytes, int, Any]] = {}
    times: dict[str, int] = {}

    def charge() -> int:
        with contextlib.closing(connect()) as connection, connection:
            [row] = connection.execute(CHARGE, [1]).fetchall()
        return int(row[0])

    @app.post("/charges")
    def charges() -> Any:
        key, body = flask_request.headers["Idempotency-Key"], flask_request.get_data()
        with alone:
            times[key] = times.get(key, 0) + 1
            if key in saved and saved[key][0] != body:
                if defect == "works and refuses":
                    charge()
                return {"type": "urn:x/key-reused"}, 422, {"Content-Type": "application/problem+json"}
            if key in saved:
                _, status, answer = saved[key]
                if defect == "another body" or (defect == "another body the fifth time" and times[key] == 5):
                    answer = {"charge_id": -1}
                return answer, status, {"Idempotent-Replayed": "true"}
            status = 200 if defect == "another status the second time" and saved else 201
            saved[key] = body, status, {"charge_id": charge()}
            return saved[key][2], status, {"Idempotent-Replayed": "true"} if defect == "marked" else {}

    return Shop(app, None, connect)
