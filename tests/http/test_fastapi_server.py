"""Against real servers: uvicorn, two of them, over sockets."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import uvicorn
from fastapi.responses import StreamingResponse

from tests.http.fastapi_stacks import Stack, Work, on, replayed, until

SERVERS = on("sqlalchemy-asyncpg", "sqlalchemy-psycopg", "asyncpg", "psycopg-async", "psycopg-sync")


class Server(uvicorn.Server):
    """In a thread and event loop of its own, on a port that the system chooses."""

    def __init__(self, app: Any) -> None:
        super().__init__(uvicorn.Config(app, port=0, log_level="warning", lifespan="on"))
        self.up = threading.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}"


class Lifespan:
    """Opens the stack's pool on the server's event loop, which is where it will be used."""

    def __init__(self, stack: Stack, handler: Any) -> None:
        self.stack = Stack(stack.name, stack.place)
        self.handler = handler
        self.app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self.app(scope, receive, send)
            return
        await receive()
        await self.stack.open()
        self.app = self.stack.app(self.handler)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        left = self.stack.borrowed()
        await self.stack.close()
        assert left == 0, "a connection was not given back"
        await send({"type": "lifespan.shutdown.complete"})


@contextlib.contextmanager
def serving(*apps: Any) -> Iterator[list[str]]:
    servers = [Server(app) for app in apps]
    threads = [threading.Thread(target=server.run) for server in servers]
    for thread in threads:
        thread.start()
    try:
        for server in servers:
            assert server.up.wait(30)
        yield [server.url for server in servers]
    finally:
        for server in servers:
            server.should_exit = True
        for thread in threads:
            thread.join(30)
    assert not any(server.lifespan.should_exit for server in servers), "the lifespan failed"


HEADERS = {"authorization": "acct_1", "idempotency-key": "key-1"}


@SERVERS
async def test_a_hundred_at_once_at_two_servers(stack: Stack) -> None:
    async def handler(work: Work) -> Any:
        return {"id": await work.insert(5)}

    with serving(*(Lifespan(stack, handler) for _ in range(2))) as urls:
        async with httpx2.AsyncClient(headers=HEADERS, timeout=60) as client:
            answers = await asyncio.gather(
                *(client.post(f"{urls[n % 2]}/charges", json={"amount": 5}) for n in range(100))
            )
    assert {(answer.status_code, answer.content) for answer in answers} == {(201, b'{"id":1}')}
    assert sum(not replayed(answer) for answer in answers) == 1
    assert (stack.rows(), stack.saved()) == ([5], [201])


@on("sqlalchemy-asyncpg", "sqlalchemy-psycopg")
async def test_a_client_that_gives_up_finds_the_answer_later(stack: Stack) -> None:
    came, go = threading.Event(), threading.Event()

    async def handler(work: Work) -> Any:
        id_ = await work.insert(5)
        came.set()
        if stack.blocking:
            assert go.wait(30)
        else:
            await until(go.is_set)
        return {"id": id_}

    with serving(Lifespan(stack, handler)) as [url]:
        async with httpx2.AsyncClient(headers=HEADERS, timeout=60) as client:
            given_up = asyncio.create_task(client.post(f"{url}/charges", json={"amount": 5}))
            await until(came.is_set)
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            go.set()
            again = await client.post(f"{url}/charges", json={"amount": 5})
    assert (again.status_code, replayed(again)) == (201, True)
    assert stack.rows() == [5]


@on("sqlalchemy-asyncpg", "sqlalchemy-psycopg")
async def test_a_stream_and_its_retry(stack: Stack) -> None:
    """The retry comes while the stream is flowing: its tombstone was committed before the first byte."""
    go = threading.Event()

    async def chunks() -> Any:
        yield "one"
        await until(go.is_set)
        yield "two"

    async def handler(work: Work) -> Any:
        await work.insert(5)
        return StreamingResponse(chunks(), media_type="text/plain")

    with serving(Lifespan(stack, handler)) as [url]:
        async with (
            httpx2.AsyncClient(headers=HEADERS, timeout=60) as client,
            client.stream("POST", f"{url}/charges", json={"amount": 5}) as first,
        ):
            read = first.aiter_text()
            assert await anext(read) == "one"
            again = await client.post(f"{url}/charges", json={"amount": 5})
            assert (again.status_code, again.content) == (200, b"")
            assert again.headers["idempotent-body"] == "omitted"
            go.set()
            assert await anext(read) == "two"
    assert stack.rows() == [5]
