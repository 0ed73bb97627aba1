"""What a service may have around the layer: decoding, compression, a time limit, headers of its own."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.middleware.gzip import GZipMiddleware

from taptwice.conformance.bridge import Bridge
from taptwice.conformance.settings import Settings


def around(app: Any, settings: Settings) -> Any:
    """The application inside whatever the settings put around it. One for WSGI is bridged to ASGI first."""
    if hasattr(app, "wsgi_app"):
        app = Bridge(app)
    if settings.rebuild:
        app = Rebuild(app, settings)
    if settings.echo_key or settings.announce_ignored:
        app = Announcing(app, settings)
    if settings.request_decompression:
        app = Decompression(app)
    if settings.gzip:
        app = GZipMiddleware(app, minimum_size=1)
    if settings.handler_timeout is not None:
        app = TimeLimit(app, settings.handler_timeout)
    return app


class Decompression:
    """Decodes gzip requests, so that everything behind it sees what was meant."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        if scope["type"] != "http" or headers.get(b"content-encoding") != b"gzip":
            await self.app(scope, receive, send)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        body = gzip.decompress(body)
        dropped = (b"content-encoding", b"content-length")
        kept = [(name, value) for name, value in scope["headers"] if name not in dropped]
        kept.append((b"content-length", str(len(body)).encode()))
        given = False

        async def decoded() -> Any:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app({**scope, "headers": kept}, decoded, send)


class TimeLimit:
    """Gives a request up after a time, and answers 504 unless an answer has begun."""

    def __init__(self, app: Any, limit: float) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        started = False

        async def sending(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            async with asyncio.timeout(self.limit):
                await self.app(scope, receive, sending)
        except TimeoutError:
            if started:
                raise
            await send({"type": "http.response.start", "status": 504, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})


class Announcing:
    """Headers that tell the caller what became of the key: it comes back, or it was ignored."""

    def __init__(self, app: Any, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self._name = settings.names[0].lower().encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        key = dict(scope.get("headers", ())).get(self._name)
        ignored = scope.get("method") not in self.settings.methods
        added = []
        if key is not None and ignored and self.settings.announce_ignored:
            added.append((b"idempotency-status", b"ignored"))
        if key is not None and not ignored and self.settings.echo_key:
            added.append((self._name, key))

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        await self.app(scope, receive, sending)


class Rebuild:
    """A replay tells what has become of the resource: status and id are saved, the rest is read anew.

    A resource that is gone since is told of as it was.
    """

    def __init__(self, app: Any, settings: Settings) -> None:
        self.app = app
        self._marker = settings.replay_header.lower().encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        status, headers, body = await _answer(self.app, scope, receive)
        if dict(headers).get(self._marker) and 200 <= status < 300 and scope["path"].startswith("/payments"):
            path = f"/payments/{json.loads(body)['id']}"
            reading = {**scope, "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
            found, now, document = await _answer(self.app, reading, _no_body)
            if found == 200:
                anew = {name: value for name, value in now if name in (b"etag", b"content-length")}
                headers = [(name, anew.get(name, value)) for name, value in headers]
                body = document
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def _no_body() -> Any:
    return {"type": "http.request", "body": b""}


async def _answer(
    app: Any, scope: Any, receive: Callable[[], Awaitable[Any]]
) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """The whole answer of an application."""
    status, headers, body = 0, [], b""

    async def keep(message: Any) -> None:
        nonlocal status, headers, body
        if message["type"] == "http.response.start":
            status, headers = message["status"], list(message["headers"])
        body += message.get("body", b"")

    await app(scope, receive, keep)
    return status, headers, body
