"""What a service may have around the layer: decoding of requests, compression, a time limit."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

from starlette.middleware.gzip import GZipMiddleware

from taptwice.conformance.bridge import Bridge
from taptwice.conformance.settings import Settings


def around(app: Any, settings: Settings) -> Any:
    """The application inside whatever the settings put around it. One for WSGI is bridged to ASGI first."""
    if hasattr(app, "wsgi_app"):
        app = Bridge(app)
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
