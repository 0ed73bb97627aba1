"""Interceptors that retry unary calls of gRPC, on a channel that one has already.

    options = [("grpc.enable_retries", 0)]
    channel = grpc.intercept_channel(grpc.insecure_channel(target, options), RetryInterceptor(policy))
    channel = grpc.aio.insecure_channel(target, options, interceptors=[AsyncRetryInterceptor(policy)])

gRPC's own retries, if a service config asks for them, cannot be seen from here: the option turns them off.
A call that is made with ``.future()`` blocks in the interceptor. The call's deadline is the policy's or its
own ``timeout=``, whichever is shorter, and gRPC carries what is left of it to the server by itself.

An error carries the call's report, and so does a blocking call that went well. grpc.aio shows nobody the
call that an interceptor hands back, so there a listener is told of what went well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from taptwice.client.errors import missing
from taptwice.client.gate import Gates, MakeBreaker, MakeBudget
from taptwice.client.keys import new_key
from taptwice.client.limits import Limit
from taptwice.client.outcome import Outcome, Seen
from taptwice.client.plan import Call
from taptwice.client.policy import DEFAULT, RetryPolicy
from taptwice.client.reports import Listener, attach
from taptwice.client.settings import check
from taptwice.client.shell import Going
from taptwice.client.world import REAL, World
from taptwice.core.budget import RetryBudget
from taptwice.errors import CircuitOpen

try:
    import grpc
except ModuleNotFoundError:
    raise missing("grpcio", "grpc") from None

__all__ = ["AsyncRetryInterceptor", "RetryInterceptor"]

PUSHBACK = "grpc-retry-pushback-ms"
"""Metadata by which a server says when to come again: milliseconds, or below zero never (proposal A6)."""

UNKNOWN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
"""Codes that prove nothing. ABORTED is not among them: it asks for a repetition further out."""


class Details(NamedTuple):
    """What gRPC asks of the details that an interceptor hands on."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class _Interceptor:
    def __init__(
        self,
        policy: RetryPolicy = DEFAULT,
        *,
        idempotent: Callable[[str], bool] = lambda method: False,
        budget: MakeBudget = RetryBudget,
        breaker: MakeBreaker = None,
        listeners: Sequence[Listener] = (),
        world: World = REAL,
    ) -> None:
        """`idempotent` tells of a method ("/shop.Charges/Get") that it may be repeated without a key.

        Every other call carries one in its metadata, under the policy's `key_header` in lower case.
        """
        check(policy, listeners, world)
        self._policy = policy
        self._idempotent = idempotent
        self._gates = Gates(budget, breaker)
        self._listeners = listeners
        self._world = world


class _Call(Going):
    """One call: a shell, and what gRPC is told of it."""

    __slots__ = ("_details", "_metadata")

    def __init__(self, interceptor: _Interceptor, details: Any) -> None:
        policy, world, method = interceptor._policy, interceptor._world, details.method
        if isinstance(method, bytes):  # as grpc.aio has it
            method = method.decode()
        if details.timeout is not None and (policy.deadline is None or details.timeout < policy.deadline):
            policy = policy.replace(deadline=max(details.timeout, 0.001))
        self._details = details
        self._metadata = list(details.metadata or ())
        name = policy.key_header.lower()
        key = next((str(value) for known, value in self._metadata if known == name), None)
        repeatable = interceptor._idempotent(method)
        if key is None and policy.auto_key and not repeatable:
            key = new_key()
            self._metadata.append((name, key))
        call = Call(policy, world.clock(), method="RPC", key=key)
        call.keyed = repeatable or key is not None
        super().__init__(call, interceptor._gates["channel"], world, interceptor._listeners, method)

    def fresh(self, limit: Limit) -> Details:
        """The details of the next attempt."""
        details, repeats = self._details, len(self.call.attempts)
        more = [("grpc-previous-rpc-attempts", str(repeats))] if repeats else []
        return Details(
            details.method,
            limit.left() if limit.end < math.inf else None,
            [*self._metadata, *more],
            details.credentials,
            getattr(details, "wait_for_ready", None),
            getattr(details, "compression", None),
        )

    def concluded(self, seen: Seen, refused: type[CircuitOpen]) -> Exception | None:
        """The last attempt's error; the call's report goes with it, and with the answer."""
        report, error = self.report(seen), seen.error
        if isinstance(error, CircuitOpen):
            error = refused(error.retry_after, error.origin)
        if error is not None:
            attach(error, report)
        if seen.answer is not None:
            seen.answer.taptwice = report
        return error


class RetryInterceptor(_Interceptor, grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Retries beneath the stubs of a channel. It raises exceptions of gRPC only."""

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """gRPC's own hook. Gives back the last attempt's call, whether it went well or not."""
        call = _Call(self, client_call_details)

        def attempt(limit: Limit) -> Seen:
            answer = continuation(call.fresh(limit), request)
            return _judged(answer, answer.exception())

        seen = call.run(attempt)
        error = call.concluded(seen, Refused)
        if isinstance(error, Refused):
            raise error
        return seen.answer


class AsyncRetryInterceptor(_Interceptor, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Retries beneath the stubs of a channel of grpc.aio. It raises exceptions of gRPC only."""

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """gRPC's own hook. Gives back the call that went well."""
        call = _Call(self, client_call_details)

        async def attempt(limit: Limit) -> Seen:
            details = call.fresh(limit)
            details = details._replace(metadata=grpc.aio.Metadata(*details.metadata))
            try:
                answer = await continuation(details, request)
                await answer
            except grpc.aio.AioRpcError as error:
                return _judged(None, error)
            return _judged(answer, None)

        seen = await call.arun(attempt)
        error = call.concluded(seen, AsyncRefused)
        if error is not None:
            raise error
        return seen.answer


class Refused(CircuitOpen, grpc.RpcError):  # type: ignore[misc]
    """The circuit breaker is open: nothing was sent."""

    def code(self) -> Any:
        """As gRPC's own errors: UNAVAILABLE."""
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        """In words."""
        return str(self)


class AsyncRefused(CircuitOpen, grpc.aio.AioRpcError):  # type: ignore[misc]
    """As `Refused`, for grpc.aio, where a call is asked for its code after an error of this kind only."""

    def __init__(self, retry_after: float, origin: str = "") -> None:
        CircuitOpen.__init__(self, retry_after, origin)
        grpc.aio.AioRpcError.__init__(self, grpc.StatusCode.UNAVAILABLE, details=self.detail)


def _judged(call: Any, error: Any) -> Seen:
    """Judge a call by its error, if it has one."""
    if error is None:
        return Seen(Outcome.PROCESSED, answer=call)
    code = error.code()
    pushed = next((value for name, value in error.trailing_metadata() or () if name == PUSHBACK), None)
    after, hint = None, None
    if pushed is not None:
        # Below zero, or unreadable: not again.
        after, hint = (int(pushed) / 1000, None) if str(pushed).isdecimal() else (None, False)
    if code is grpc.StatusCode.UNAVAILABLE and "failed to connect to all addresses" in (
        error.details() or ""
    ):
        outcome = Outcome.NOT_SENT  # the text is all that tells it from a connection that broke
    elif code is grpc.StatusCode.RESOURCE_EXHAUSTED and after is not None:
        outcome = Outcome.REFUSED
    elif code in UNKNOWN:
        outcome = Outcome.UNKNOWN
    else:
        return Seen(Outcome.PROCESSED, answer=call, error=error, permanent=True)
    return Seen(outcome, answer=call, error=error, retry_after=after, hint=hint)
