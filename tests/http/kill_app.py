"""A charging service that stops at a named point of a request, says so, and waits to be killed.

    python -m tests.http.kill_app LISTENER STACK ADDRESS [POINT]

Points: `claimed`, `worked`, `saving` (in front of the INSERT of the record), `saved` (in front of COMMIT),
`committed` (in front of the first byte), `replying` (behind the first byte).
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiosqlite
import asyncpg
from psycopg_pool import ConnectionPool
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from taptwice.core.plan import Commit, Query, Together
from taptwice.drivers import aiosqlite as aiosqlite_driver
from taptwice.drivers import asyncpg as asyncpg_driver
from taptwice.drivers import psycopg as psycopg_driver
from taptwice.drivers import sqlite as sqlite_driver
from taptwice.events import Event
from taptwice.http.starlette import Idempotency
from tests.http.serving import serve
from tests.http.shop import Shop

STACKS = ("sqlite3", "psycopg", "asyncpg")
POINTS = ("claimed", "worked", "saving", "saved", "committed", "replying")


def stop() -> None:
    """Say where we are, and be killed there."""
    print("stopped", flush=True)
    time.sleep(600)


def stop_executors(point: str) -> None:
    """Stop in front of a command of the end. What a driver sends in one trip is taken apart for it."""
    inner: Any
    for inner in (sqlite_driver.SqliteExecutor, psycopg_driver.PsycopgExecutor):

        def execute(self: Any, command: Any, before: Any = inner.execute) -> Any:
            if isinstance(command, Together) and any(isinstance(each, Commit) for each in command.commands):
                return tuple(self.execute(each) for each in command.commands)
            stop_before(command, point)
            return before(self, command)

        inner.execute = execute
    for inner in (aiosqlite_driver.AiosqliteExecutor, asyncpg_driver.AsyncpgExecutor):

        async def aexecute(self: Any, command: Any, before: Any = inner.execute) -> Any:
            if isinstance(command, Together) and any(isinstance(each, Commit) for each in command.commands):
                return tuple([await self.execute(each) for each in command.commands])
            stop_before(command, point)
            return await before(self, command)

        inner.execute = aexecute


def stop_before(command: Any, point: str) -> None:
    saving = isinstance(command, Query) and command.statement == "insert"
    if (saving and point == "saving") or (isinstance(command, Commit) and point == "saved"):
        stop()


class Replying:
    """Stops around the first byte."""

    def __init__(self, app: Any, point: str) -> None:
        self.app = app
        self.point = point

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def sending(message: Any) -> None:
            starts = message["type"] == "http.response.start"
            if starts and self.point == "committed":
                stop()
            await send(message)
            if not starts and self.point == "replying":
                await asyncio.sleep(0)
                stop()

        await self.app(scope, receive, sending)


def make(stack: str, address: str, point: str = "") -> Starlette:
    pools: dict[str, Any] = {}
    origins = {
        "sqlite3": lambda: sqlite3.connect(address, check_same_thread=False),
        "aiosqlite": lambda: aiosqlite.connect(address),
        "psycopg": lambda: pools["psycopg"],
        "asyncpg": lambda: pools["asyncpg"],
    }

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if stack == "psycopg":
            pools["psycopg"] = ConnectionPool(address, min_size=0, max_size=10, timeout=2)
            with pools["psycopg"]:
                yield
        elif stack == "asyncpg":
            pools["asyncpg"] = asyncpg.create_pool(address, min_size=0, max_size=10, timeout=2)
            async with pools["asyncpg"]:
                yield
        else:
            yield

    def listener(event: Event) -> None:
        print(event.outcome.value, flush=True)

    once = Idempotency(origins[stack], account=lambda request: "acct", listeners=[listener])
    shop = Shop(stack, None, lambda statement: [], address)

    @once.keyed()
    async def charge(request: Request) -> Response:
        connection = once.connection(request)
        if point == "claimed":
            stop()
        key = request.headers["idempotency-key"]
        await shop.insert(connection, key)
        if point == "worked":
            stop()
        return JSONResponse({"key": key}, 201)

    if point in ("saving", "saved"):
        stop_executors(point)
    route = Route("/charges", charge, methods=["POST"], middleware=[Middleware(once.Edge)])
    return Starlette(
        routes=[route], middleware=[Middleware(Replying, point=point)] if point else [], lifespan=lifespan
    )


if __name__ == "__main__":
    serve(make(*sys.argv[2:]), sys.argv[1], lifespan="on")
