"""A transport that retries, beneath a client of httpx2 or httpx that one has already.

What a transport does not know: whether its caller streams the answer, and where a request's body came from.
So it reads an answer's body, and repeats the call if the body breaks, only if the answer says that it is
small; a body of unknown length is handed on unread, since an event stream looks the same. A request asks
for it all the same by ``extensions={"taptwice": {"whole": True}}``. It sends again only bodies that are
bytes in memory: files and generators can be read once by the time they come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from taptwice.client.exchange import aattempt, attempt, prepare
from taptwice.client.gate import Gates, MakeBreaker, MakeBudget
from taptwice.client.keys import new_key
from taptwice.client.limits import Limit
from taptwice.client.outcome import Seen
from taptwice.client.plan import Call
from taptwice.client.policy import DEFAULT, RetryPolicy
from taptwice.client.reports import Listener
from taptwice.client.settings import check
from taptwice.client.shell import Going
from taptwice.client.streams import concluded
from taptwice.client.world import REAL, World
from taptwice.core.budget import RetryBudget
from taptwice.core.header import format_key

__all__ = ["AwaitingTransport", "BlockingTransport"]


class _Transport:
    _lib: ModuleType
    _default: str

    def __init__(
        self,
        policy: RetryPolicy = DEFAULT,
        *,
        wrapping: Any = None,
        budget: MakeBudget = RetryBudget,
        breaker: MakeBreaker = None,
        listeners: Sequence[Listener] = (),
        world: World = REAL,
    ) -> None:
        """`wrapping` is the transport below, a new one by default.

        A client with ``transport=…`` ignores its own `verify`, `cert`, `http2`, `limits` and the proxies of
        the environment: give them to the transport below.
        """
        self._wrapped = getattr(self._lib, self._default)() if wrapping is None else wrapping
        prepare(self._lib, self._wrapped)
        check(policy, listeners, world)
        self._policy = policy
        self._gates = Gates(budget, breaker)
        self._listeners = listeners
        self._world = world

    def _going(self, request: Any) -> Going:
        policy = self._policy
        key = request.headers.get(policy.key_header)
        if key is None and policy.auto_key and request.method in ("POST", "PATCH"):
            key = new_key()
            request.headers[policy.key_header] = format_key(key, policy.key_quoting == "sf-string")
        call = Call(
            policy,
            self._world.clock(),
            method=request.method,
            key=key,
            replayable=isinstance(request.stream, self._lib.ByteStream),
        )
        origin = f"{request.url.scheme}://{request.url.netloc.decode('ascii')}"
        return Going(call, self._gates[origin], self._world, self._listeners, origin)

    def _whole(self, request: Any) -> bool | None:
        return True if request.extensions.get("taptwice", {}).get("whole") else None


class BlockingTransport(_Transport):
    """What `RetryTransport` of both libraries is."""

    _default = "HTTPTransport"

    def handle_request(self, request: Any) -> Any:
        """Make one call of the client's."""
        going, whole, lib = self._going(request), self._whole(request), self._lib

        def once(limit: Limit) -> Seen:
            send = self._wrapped.handle_request
            return attempt(going, lib, request, limit, whole, send, self._read)

        return concluded(going, lib, going.run(once), request, once, typed=False)

    def _read(self, response: Any) -> Any:
        stream = response.stream
        try:
            response.stream = self._lib.ByteStream(b"".join(stream))  # still encoded as it came
        finally:
            stream.close()
        return response

    def close(self) -> None:
        """Close the transport below."""
        self._wrapped.close()


class AwaitingTransport(_Transport):
    """What `AsyncRetryTransport` of both libraries is."""

    _default = "AsyncHTTPTransport"

    async def handle_async_request(self, request: Any) -> Any:
        """Make one call of the client's."""
        going, whole, lib = self._going(request), self._whole(request), self._lib

        async def once(limit: Limit) -> Seen:
            send = self._wrapped.handle_async_request
            return await aattempt(going, lib, request, limit, whole, send, self._read)

        return concluded(going, lib, await going.arun(once), request, once, typed=False)

    async def _read(self, response: Any) -> Any:
        stream = response.stream
        try:
            response.stream = self._lib.ByteStream(b"".join([part async for part in stream]))
        finally:
            await stream.aclose()
        return response

    async def aclose(self) -> None:
        """Close the transport below."""
        await self._wrapped.aclose()
