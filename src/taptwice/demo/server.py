"""The service under uvicorn, in a process of its own. It tells what it sees, and can be made slow.

On stdout, one JSON object a line: `listening` and its port, `holding`, then for each request `received`,
`working` and `answered`. On stdin, one word a line: ``hold`` makes the next piece of work wait for
``release``. The end of stdin ends the server, so that none is left over when the demo is killed.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from contextvars import ContextVar
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from taptwice.demo import service, unprotected

tap: ContextVar[str] = ContextVar("tap", default="")
"""Which request it is; the demo's client names each of its own in a header."""


def tell(event: str, **details: Any) -> None:
    print(json.dumps({"event": event, **details}), flush=True)


class Slow:
    """In the place of `service.review`."""

    def __init__(self) -> None:
        self._next: asyncio.Event | None = None
        self._held: list[asyncio.Event] = []

    def hold(self) -> None:
        self._next = asyncio.Event()
        tell("holding")

    def release(self) -> None:
        self._next = None
        for each in self._held:
            each.set()
        self._held.clear()

    async def review(self, payment: service.Payment) -> None:
        tell("working", tap=tap.get())
        held, self._next = self._next, None  # one only: whoever comes next is served at once
        if held is not None:
            self._held.append(held)
            await held.wait()


class Witness:
    """Tells of each request, and of its answer once the last byte of it was handed over."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._port = port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":

            async def ready(message: Message) -> None:
                await send(message)
                if message["type"] == "lifespan.startup.complete":  # not before: its tables are there now
                    tell("listening", port=self._port)

            await self._app(scope, receive, ready)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        tap.set(headers.get("x-tap", ""))
        request = {
            "tap": tap.get(),
            "request": f"{scope['method']} {scope['path']}",
            "key": headers.get("idempotency-key"),
        }
        tell("received", **request)
        answer: dict[str, Any] = {"status": 0, "replayed": False}
        body = b""

        async def witnessed(message: Message) -> None:
            nonlocal body
            await send(message)
            if message["type"] == "http.response.start":
                answer["status"] = message["status"]
                answer["replayed"] = (b"idempotent-replayed", b"true") in message["headers"]
            elif message["type"] == "http.response.body":
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    tell("answered", **request, **answer, body=body.decode(errors="replace"))

        await self._app(scope, receive, witnessed)


async def obey(slow: Slow, server: uvicorn.Server) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    async for line in reader:
        if line.strip() == b"hold":
            slow.hold()
        else:
            slow.release()
    slow.release()  # or the work would keep the server from ending
    server.should_exit = True


async def serve() -> None:
    slow = Slow()
    setattr(service, "review", slow.review)  # noqa: B010 - to mypy a function of a module is a constant
    service.app.include_router(unprotected.router)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()  # from here on nobody is refused, only kept waiting
        app = Witness(service.app, listening.getsockname()[1])
        config = uvicorn.Config(
            app, lifespan="on", log_level="warning", access_log=False, timeout_graceful_shutdown=2
        )
        server = uvicorn.Server(config)
        obeying = asyncio.create_task(obey(slow, server))
        await server.serve(sockets=[listening])
        obeying.cancel()


if __name__ == "__main__":
    asyncio.run(serve())
