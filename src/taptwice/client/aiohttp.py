"""A middleware that retries, for a session of aiohttp that one has already.

    aiohttp.ClientSession(middlewares=[RetryMiddleware(policy)])

It does not know whether its caller streams: it reads an answer's body, and repeats the call if the body
breaks, only if the answer says that it is small. A body of unknown length is handed on unread, and what
comes of it is bound by the session's own timeout. It raises exceptions of aiohttp only. A redirect is a call
of its own, with a deadline of its own: the session follows it, above.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextvars import ContextVar

from taptwice.client.errors import DeadlineExceeded, kin, missing
from taptwice.client.gate import Gates, MakeBreaker, MakeBudget
from taptwice.client.keys import new_key
from taptwice.client.limits import Limit
from taptwice.client.outcome import Outcome, Seen, of_answer, of_error
from taptwice.client.plan import IDEMPOTENT, Call, StopReason
from taptwice.client.policy import DEFAULT, RetryPolicy
from taptwice.client.reports import Listener, attach
from taptwice.client.settings import check
from taptwice.client.shell import Going
from taptwice.client.world import REAL, World
from taptwice.core.budget import RetryBudget
from taptwice.core.header import format_key
from taptwice.errors import CircuitOpen

try:
    from aiohttp import (
        ClientConnectionError,
        ClientError,
        ClientHandlerType,
        ClientOSError,
        ClientRequest,
        ClientResponse,
        ServerDisconnectedError,
        ServerTimeoutError,
        StreamReader,
    )
    from aiohttp.base_protocol import BaseProtocol
except ModuleNotFoundError:
    raise missing("aiohttp", "aiohttp") from None

__all__ = ["RetryMiddleware"]

_SMALL = 1_048_576


class RetryMiddleware:
    """Retries beneath ``aiohttp.ClientSession``."""

    def __init__(
        self,
        policy: RetryPolicy = DEFAULT,
        *,
        budget: MakeBudget = RetryBudget,
        breaker: MakeBreaker = None,
        listeners: Sequence[Listener] = (),
        world: World = REAL,
    ) -> None:
        check(policy, listeners, world)
        self._policy = policy
        self._gates = Gates(budget, breaker)
        self._listeners = listeners
        self._world = world

    async def __call__(self, request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        """Make one call of the session's."""
        if (before := _raised.get()) is not None:
            _raised.set(None)
            if before[0] is _call_of(request):
                raise before[1]
        going = self._going(request)

        async def attempt(limit: Limit) -> Seen:
            if going.call.attempts:
                await request.close()  # what still writes the body of the attempt before
            going.stamp(limit, request.headers)
            response, body = None, b""
            try:
                async with asyncio.timeout(limit.left() if limit.end < math.inf else None):
                    response = await handler(request)
                    if response.status >= 400 or _is_small(response):
                        body = await response.read()
                        response.content = _stream_of(body)  # for who reads it piece by piece
            except (ClientError, OSError) as error:
                if response is not None:
                    response.close()
                seen = of_error(error, head=response is not None)
            else:
                if response.status < 400:
                    return Seen(Outcome.PROCESSED, response.status, response)
                header = response.headers.get
                seen = of_answer(self._policy, response, response.status, header, lambda: body)
            going.call.replayable = not getattr(request.body, "consumed", False)
            return seen

        return self._concluded(going, await going.arun(attempt), request)

    def _going(self, request: ClientRequest) -> Going:
        policy = self._policy
        key = request.headers.get(policy.key_header)
        if key is None and policy.auto_key and request.method in ("POST", "PATCH"):
            call, known = _call_of(request), _keyed.get()
            key = known[1] if known is not None and known[0] is call else new_key()
            _keyed.set((call, key))
            request.headers[policy.key_header] = format_key(key, policy.key_quoting == "sf-string")
        origin = f"{request.url.scheme}://{request.url.authority}"
        call = Call(policy, self._world.clock(), method=request.method, key=key)
        return Going(call, self._gates[origin], self._world, self._listeners, origin)

    def _concluded(self, going: Going, seen: Seen, request: ClientRequest) -> ClientResponse:
        report = going.report(seen)
        if seen.error is None:
            answer: ClientResponse = seen.answer
            answer.taptwice = report  # type: ignore[attr-defined]
            return answer
        cause: Exception | None = None
        error: Exception = seen.error
        if isinstance(error, CircuitOpen):
            error = kin(CircuitOpen, ClientConnectionError)(error.retry_after, error.origin)
        elif going.cut and report.stop_reason is StopReason.DEADLINE:
            cause, error = error, kin(DeadlineExceeded, ServerTimeoutError)(going.too_late(seen))
        attach(error, report)
        if request.method in IDEMPOTENT and isinstance(error, ClientOSError | ServerDisconnectedError):
            _raised.set((_call_of(request), error))
        raise error from cause


_raised: ContextVar[tuple[object, Exception] | None] = ContextVar("taptwice_aiohttp_raised", default=None)
"""aiohttp sends an idempotent request once more, by itself, when its connection dies, and comes through the
middleware again for that. All has been tried by then: what was raised is raised again."""

_keyed: ContextVar[tuple[object, str] | None] = ContextVar("taptwice_aiohttp_keyed", default=None)
"""The key that was made for a call: the session makes a redirected request anew, of its caller's headers."""


def _call_of(request: ClientRequest) -> object:
    return request._timer  # the one thing that a call's requests have in common; a test watches over it


def _is_small(response: ClientResponse) -> bool:
    length = response.headers.get("Content-Length", "")
    return response.status == 204 or (length.isdecimal() and int(length) <= _SMALL)


def _stream_of(body: bytes) -> StreamReader:
    loop = asyncio.get_running_loop()
    stream = StreamReader(BaseProtocol(loop), max(65536, len(body)), loop=loop)
    stream.feed_data(body)
    stream.feed_eof()
    return stream
