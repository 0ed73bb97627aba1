"""A charging service under uvicorn that tells what it does, and holds a request where it is told to.

    python -m tests.client.intents_service LISTENER DATABASE

``POST /charges`` is keyed, and charges ``{"order": …, "cents": …}``. ``POST /hold/working`` lets the next
charge wait in its handler, ``POST /hold/answering`` lets its answer wait behind the commit, ``POST /go`` lets
both go on. ``GET /seen`` gives the keys that each order was asked for with, attempt by attempt.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from taptwice.http.starlette import Idempotency
from tests.http.serving import serve
from tests.http.shop import Shop


class Holding:
    """Where the next charge stops, and what lets it go on."""

    def __init__(self) -> None:
        self.place = ""
        self.go = asyncio.Event()

    async def at(self, place: str) -> None:
        if self.place == place:
            self.place = ""
            print(place, flush=True)
            await self.go.wait()


class Answering:
    """Outside the edge: what comes here is committed."""

    def __init__(self, app: Any, holding: Holding) -> None:
        self.app = app
        self.holding = holding

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                await self.holding.at("answering")
            await send(message)

        await self.app(scope, receive, sending)


def make(address: str) -> Starlette:
    holding = Holding()
    seen: dict[str, list[str]] = {}
    once = Idempotency(
        lambda: sqlite3.connect(address, check_same_thread=False), account=lambda request: "acct"
    )
    shop = Shop("sqlite3", None, lambda statement: [], address)

    class Seeing:
        """Counts before anything is refused or replayed."""

        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            message = await receive()
            headers = dict(scope["headers"])
            order = json.loads(message["body"])["order"]
            seen.setdefault(order, []).append(headers[b"idempotency-key"].decode())

            async def again() -> Any:
                nonlocal message
                first, message = message, None
                return first if first is not None else await receive()

            await self.app(scope, again, send)

    @once.keyed(wait=0, retry_after=0)
    async def charge(request: Request) -> Response:
        await holding.at("working")
        asked = await request.json()
        await shop.insert(once.connection(request), request.headers["idempotency-key"], asked["cents"])
        return JSONResponse({"charged": asked["order"]}, 201)

    async def hold(request: Request) -> Response:
        holding.place = request.path_params["place"]
        holding.go.clear()
        return Response(status_code=204)

    async def go(request: Request) -> Response:
        holding.go.set()
        return Response(status_code=204)

    async def what_was_seen(request: Request) -> Response:
        return JSONResponse(seen)

    around = [Middleware(Seeing), Middleware(Answering, holding=holding), Middleware(once.Edge)]
    return Starlette(
        routes=[
            Route("/charges", charge, methods=["POST"], middleware=around),
            Route("/hold/{place}", hold, methods=["POST"]),
            Route("/go", go, methods=["POST"]),
            Route("/seen", what_was_seen),
        ]
    )


if __name__ == "__main__":
    listener, database = sys.argv[1:]
    serve(make(database), listener)
