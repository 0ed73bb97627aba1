"""A region's front: what belongs to an account that is at home elsewhere is passed on to there.

Keys are remembered at home only, so that a retry which lands in another region meets its first attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from taptwice.conformance import wire
from taptwice.faults import Injected, Lost, apoint

FORWARDED = b"shop-forwarded-by"
_ONE_HOP = {b"connection", b"host", b"transfer-encoding", b"content-length", FORWARDED}


class Region:
    """The application of one region, with the others behind it."""

    def __init__(
        self,
        app: Any,
        name: str,
        peers: Mapping[str, tuple[str, int]],
        home_of: Callable[[bytes], str | None],
    ) -> None:
        self._app = app
        self._name = name
        self._peers = peers
        self._home_of = home_of

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        home = self._home_of(headers.get(b"authorization", b"")) or self._name
        if home == self._name:
            await self._app(scope, receive, send)
        elif FORWARDED in headers:
            await _send(send, wire.Response(503, [("retry-after", "1")]))  # two tables disagree: no circle
        else:
            await _send(send, await self._passed_on(home, scope, receive))

    async def _passed_on(self, home: str, scope: Any, receive: Any) -> wire.Response:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        lines = [line for line in scope["headers"] if line[0] not in _ONE_HOP]
        lines += [(FORWARDED, self._name.encode()), (b"content-length", str(len(body)).encode())]
        query = scope["query_string"]
        target = scope["raw_path"].decode() + (f"?{query.decode()}" if query else "")
        request = wire.Request(scope["method"], target, tuple(lines), body)
        response = await wire.Call(self._peers[home]).send(request)
        try:
            await apoint("forward_reply")
        except Lost:
            return wire.Response(504, [("retry-after", "1")])
        except Injected:
            return wire.Response(502, [("retry-after", "1")])
        if response.status == wire.NO_RESPONSE:
            return wire.Response(503, [("retry-after", "1")])
        return response


async def _send(send: Any, response: wire.Response) -> None:
    lines = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in response.headers]
    kept = [line for line in lines if line[0] not in _ONE_HOP]
    kept.append((b"content-length", str(len(response.body)).encode()))
    await send({"type": "http.response.start", "status": response.status, "headers": kept})
    await send({"type": "http.response.body", "body": response.body})
