"""The measured service, in a process of its own: `python -m benchmarks.parts.app STACK URL PORT`.

Every route takes the same request: an account from a header, a key, a small JSON body. What differs is who
looks after the key. All stand in routers, which cost FastAPI something too.
"""

# No `from __future__ import annotations`: FastAPI reads them, and some name what stands in a function.
import contextlib
import os
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Annotated, Any

import asyncpg
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request, Response
from psycopg_pool import AsyncConnectionPool
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from benchmarks.parts.driver import CLAUSES
from benchmarks.parts.statements import (
    DOLLARS,
    HEADERS,
    PERCENTS,
    WINDOW,
    body_of,
    fingerprint,
    identity,
    lock_of,
)
from taptwice.core.model import unpack_headers
from taptwice.http.fastapi import Idempotency, IdempotentRoute

CONNECTIONS = 20


class Charge(BaseModel):
    cents: int
    currency: str
    source: str


async def account_of(authorization: Annotated[str, Header()]) -> str:
    return authorization.removeprefix("Bearer ")


Account = Annotated[str, Depends(account_of)]
Key = Annotated[str, Header(alias="idempotency-key")]


class ByHand:
    """What a handler needs that looks after the key itself."""

    def __init__(self, account: str, key: str, body: bytes) -> None:
        id_ = identity(account, key)
        self.account, self.key = account, key
        self.lock = lock_of(id_)
        self.id = uuid.UUID(bytes=id_)
        self.fingerprint = fingerprint(body)

    def replay(self, found: Any) -> Response | None:
        locked, read_only, _, known, status, headers, body = found
        if read_only:
            raise HTTPException(503)
        if not locked:
            raise HTTPException(409)
        if known is None:
            return None
        if bytes(known) != self.fingerprint:
            raise HTTPException(422)
        answer = Response(bytes(body), status)
        answer.headers.update(dict(unpack_headers(bytes(headers))))
        answer.headers["idempotent-replayed"] = "true"
        return answer

    def record(self, body: bytes) -> dict[str, Any]:
        return {
            "id": self.id,
            "window": WINDOW,
            "status": 201,
            "fingerprint": self.fingerprint,
            "account": self.account,
            "key": self.key,
            "headers": HEADERS,
            "body": body,
        }


def answered(body: bytes) -> Response:
    return Response(body, 201, media_type="application/json")


# --- asyncpg ------------------------------------------------------------------------------------------------


class Late:
    """A pool that opens on the server's own loop."""

    pool: Any = None


async def charge_asyncpg(connection: Any, account: str, body: Charge) -> int:
    return int(await connection.fetchval(DOLLARS["charge"], account, body.cents))


def with_asyncpg(url: str) -> FastAPI:
    late = Late()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with asyncpg.create_pool(url, min_size=CONNECTIONS, max_size=CONNECTIONS) as late.pool:
            include_ours(app, late.pool)
            yield

    app, router = FastAPI(lifespan=lifespan), APIRouter()

    @router.post("/bare", status_code=201)
    async def bare(account: Account, body: Charge) -> dict[str, int]:
        async with late.pool.acquire() as connection, connection.transaction():
            return {"charge_id": await charge_asyncpg(connection, account, body)}

    @router.get("/charges/{charge_id}")
    async def read(account: Account, charge_id: int) -> dict[str, Any]:
        async with late.pool.acquire() as connection:
            return dict(await connection.fetchrow(DOLLARS["read"], charge_id))

    async def by_hand(
        account: Account, key: Key, body: Charge, request: Request, savepoint: bool
    ) -> Response:
        mine = ByHand(account, key, await request.body())
        async with late.pool.acquire() as connection, connection.transaction():
            found = await connection.fetchrow(DOLLARS["claim"], mine.lock, mine.id)
            if (replay := mine.replay(found)) is not None:
                return replay
            async with connection.transaction() if savepoint else contextlib.nullcontext():
                answer = body_of(await charge_asyncpg(connection, account, body))
            await connection.execute(DOLLARS["save"], *mine.record(answer).values())
        return answered(answer)

    @router.post("/hand", status_code=201)
    async def hand(account: Account, key: Key, body: Charge, request: Request) -> Response:
        return await by_hand(account, key, body, request, False)

    @router.post("/hand-savepoint", status_code=201)
    async def hand_savepoint(account: Account, key: Key, body: Charge, request: Request) -> Response:
        return await by_hand(account, key, body, request, True)

    app.include_router(router)

    def include_ours(app: FastAPI, pool: Any) -> None:
        once = Idempotency(pool, account=account_of)
        app.include_router(ours(once, once.connection, charge_asyncpg))

    return app


# --- psycopg ------------------------------------------------------------------------------------------------


async def charge_psycopg(connection: Any, account: str, body: Charge) -> int:
    cursor = await connection.execute(PERCENTS["charge"], {"account": account, "cents": body.cents})
    [charge] = await cursor.fetchone()
    return int(charge)


def with_psycopg(url: str) -> FastAPI:
    pool: Any = AsyncConnectionPool(url, min_size=CONNECTIONS, max_size=CONNECTIONS, open=False)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with pool:
            await pool.wait()
            yield

    app, router = FastAPI(lifespan=lifespan), APIRouter()

    @router.post("/bare", status_code=201)
    async def bare(account: Account, body: Charge) -> dict[str, int]:
        async with pool.connection() as connection:
            return {"charge_id": await charge_psycopg(connection, account, body)}

    @router.get("/charges/{charge_id}")
    async def read(account: Account, charge_id: int) -> dict[str, Any]:
        async with pool.connection() as connection:
            cursor = await connection.execute(PERCENTS["read"], {"charge": charge_id})
            return dict(zip(("id", "account", "cents"), await cursor.fetchone(), strict=True))

    async def by_hand(
        account: Account, key: Key, body: Charge, request: Request, savepoint: bool
    ) -> Response:
        mine = ByHand(account, key, await request.body())
        async with pool.connection() as connection:
            cursor = await connection.execute(PERCENTS["claim"], {"lock": mine.lock, "id": mine.id})
            if (replay := mine.replay(await cursor.fetchone())) is not None:
                return replay
            async with connection.transaction() if savepoint else contextlib.nullcontext():
                answer = body_of(await charge_psycopg(connection, account, body))
            await connection.execute(PERCENTS["save"], mine.record(answer))
        return answered(answer)

    @router.post("/hand", status_code=201)
    async def hand(account: Account, key: Key, body: Charge, request: Request) -> Response:
        return await by_hand(account, key, body, request, False)

    @router.post("/hand-savepoint", status_code=201)
    async def hand_savepoint(account: Account, key: Key, body: Charge, request: Request) -> Response:
        return await by_hand(account, key, body, request, True)

    app.include_router(router)
    once = Idempotency(pool, account=account_of)
    app.include_router(ours(once, once.connection, charge_psycopg))
    return app


# --- SQLAlchemy ---------------------------------------------------------------------------------------------


async def charge_sqlalchemy(session: Any, account: str, body: Charge) -> int:
    found = await session.execute(CLAUSES["charge"], {"account": account, "cents": body.cents})
    return int(found.scalar_one())


def with_sqlalchemy(url: str) -> FastAPI:
    engine = create_async_engine(
        url.replace("postgresql://", "postgresql+asyncpg://"), pool_size=CONNECTIONS, max_overflow=0
    )
    maker = async_sessionmaker(engine, expire_on_commit=False)
    app, router = FastAPI(), APIRouter()

    @router.post("/bare", status_code=201)
    async def bare(account: Account, body: Charge) -> dict[str, int]:
        async with maker.begin() as session:
            return {"charge_id": await charge_sqlalchemy(session, account, body)}

    @router.get("/charges/{charge_id}")
    async def read(account: Account, charge_id: int) -> dict[str, Any]:
        async with maker() as session:
            return dict((await session.execute(CLAUSES["read"], {"charge": charge_id})).mappings().one())

    async def by_hand(
        account: Account, key: Key, body: Charge, request: Request, savepoint: bool
    ) -> Response:
        mine = ByHand(account, key, await request.body())
        async with maker.begin() as session:
            found = await session.execute(CLAUSES["claim"], {"lock": mine.lock, "id": mine.id})
            if (replay := mine.replay(found.one())) is not None:
                return replay
            async with session.begin_nested() if savepoint else contextlib.nullcontext():
                answer = body_of(await charge_sqlalchemy(session, account, body))
            await session.execute(CLAUSES["save"], mine.record(answer))
        return answered(answer)

    @router.post("/hand", status_code=201)
    async def hand(account: Account, key: Key, body: Charge, request: Request) -> Response:
        return await by_hand(account, key, body, request, False)

    @router.post("/hand-savepoint", status_code=201)
    async def hand_savepoint(account: Account, key: Key, body: Charge, request: Request) -> Response:
        return await by_hand(account, key, body, request, True)

    app.include_router(router)
    once = Idempotency(maker, account=account_of)
    app.include_router(ours(once, once.session, charge_sqlalchemy))
    return app


# --- ours, and idemkit --------------------------------------------------------------------------------------


def ours(once: Idempotency, connection: Callable[..., Any], charge: Callable[..., Any]) -> APIRouter:
    """The library's routes, as its documentation writes them."""
    router = APIRouter(route_class=IdempotentRoute)
    On = Annotated[Any, Depends(connection)]

    @router.post("/ours", status_code=201, dependencies=[once.keyed(savepoint=False)])
    async def plain(account: Account, body: Charge, on: On) -> dict[str, int]:
        return {"charge_id": await charge(on, account, body)}

    @router.post("/ours-savepoint", status_code=201, dependencies=[once.keyed()])
    async def with_savepoint(account: Account, body: Charge, on: On) -> dict[str, int]:
        return {"charge_id": await charge(on, account, body)}

    return router


def with_idemkit(url: str) -> FastAPI:
    """As its README says: the middleware, a backend from a URL, a scope. The work has a pool of its own."""
    from idemkit import HttpConfig, IdempotencyMiddleware
    from idemkit.backends.postgres import PostgresBackend

    app = with_asyncpg(url)
    app.add_middleware(
        IdempotencyMiddleware,
        backend=PostgresBackend.from_url(url, min_size=CONNECTIONS, max_size=CONNECTIONS),
        config=HttpConfig(scope=lambda request: request.headers.get("authorization", "")),
    )
    return app


STACKS: Mapping[str, Callable[[str], FastAPI]] = {
    "asyncpg": with_asyncpg,
    "psycopg": with_psycopg,
    "sqlalchemy": with_sqlalchemy,
    "idemkit": with_idemkit,
}


def main() -> None:
    stack, url, port = sys.argv[1:]
    config = uvicorn.Config(
        STACKS[stack](url), host="127.0.0.1", port=int(port), log_level="warning", access_log=False
    )
    if profile := os.environ.get("TAPTWICE_BENCH_PROFILE"):
        import cProfile
        import signal

        signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn hands it on to us once it has stopped
        profiler = cProfile.Profile()
        profiler.enable()
        uvicorn.Server(config).run()
        profiler.disable()
        profiler.dump_stats(profile)
        return
    uvicorn.Server(config).run()


if __name__ == "__main__":
    main()
