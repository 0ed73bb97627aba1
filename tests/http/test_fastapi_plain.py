"""A plain route of FastAPI on a connection of `once`: nothing is answered that is not committed."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from fastapi import Depends, FastAPI

from taptwice.http.fastapi import Idempotency


async def test_a_commit_that_fails_is_not_answered_with_success(tmp_path: Path) -> None:
    place = str(tmp_path / "plain.db")
    with sqlite3.connect(place) as made:
        made.execute("CREATE TABLE parents (id integer PRIMARY KEY)")
        made.execute(
            "CREATE TABLE children (parent integer REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED)"
        )
    made.close()

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(place, check_same_thread=False)
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    once = Idempotency(connect, account=lambda: "a")
    app = FastAPI()

    @app.put("/children")
    def put(db: Any = Depends(once.connection)) -> dict[str, str]:  # noqa: B008
        db.execute("INSERT INTO children (parent) VALUES (7)")
        return {}

    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "PUT",
        "path": "/children",
        "query_string": b"",
        "headers": [],
    }
    with pytest.raises(sqlite3.IntegrityError):
        await app(scope, receive, send)
    assert [each["status"] for each in sent if each["type"] == "http.response.start"] == [500]
