"""An interceptor that retries unary calls of gRPC, on a channel that one has already.

    channel = grpc.intercept_channel(
        grpc.insecure_channel(target, options=[("grpc.enable_retries", 0)]), RetryInterceptor(policy)
    )

gRPC's own retries, if a service config asks for them, cannot be seen from here: the option turns them off.
A call that is made with ``.future()`` blocks in the interceptor. The call's deadline is the policy's or its
own ``timeout=``, whichever is shorter, and gRPC carries what is left of it to the server by itself.
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

__all__ = ["RetryInterceptor"]

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


class RetryInterceptor(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Retries beneath the stubs of a channel. It raises exceptions of gRPC only."""

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

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """gRPC's own hook. Gives back the last attempt's call, whether it went well or not."""
        details = client_call_details
        metadata = list(details.metadata or ())
        going = self._going(details, metadata)

        def attempt(limit: Limit) -> Seen:
            repeats = len(going.call.attempts)
            sent = [*metadata, ("grpc-previous-rpc-attempts", str(repeats))] if repeats else metadata
            changed = Details(
                details.method,
                limit.left() if limit.end < math.inf else None,
                sent,
                details.credentials,
                getattr(details, "wait_for_ready", None),
                getattr(details, "compression", None),
            )
            return _judged(continuation(changed, request))

        seen = going.run(attempt)
        report = going.report(seen)
        if isinstance(seen.error, CircuitOpen):
            refused = Refused(seen.error.retry_after, seen.error.origin)
            attach(refused, report)
            raise refused
        if seen.error is not None:
            attach(seen.error, report)
        seen.answer.taptwice = report
        return seen.answer

    def _going(self, details: Any, metadata: list[tuple[str, Any]]) -> Going:
        policy, name = self._policy, self._policy.key_header.lower()
        if details.timeout is not None and (policy.deadline is None or details.timeout < policy.deadline):
            policy = policy.replace(deadline=max(details.timeout, 0.001))
        key = next((str(value) for known, value in metadata if known == name), None)
        repeatable = self._idempotent(details.method)
        if key is None and policy.auto_key and not repeatable:
            key = new_key()
            metadata.append((name, key))
        call = Call(policy, self._world.clock(), method="RPC", key=key)
        call.keyed = repeatable or key is not None
        return Going(call, self._gates["channel"], self._world, self._listeners, details.method)


class Refused(CircuitOpen, grpc.RpcError):  # type: ignore[misc]
    """The circuit breaker is open: nothing was sent."""

    def code(self) -> Any:
        """As gRPC's own errors: UNAVAILABLE."""
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        """In words."""
        return str(self)


def _judged(call: Any) -> Seen:
    error = call.exception()
    if error is None:
        return Seen(Outcome.PROCESSED, answer=call)
    code = call.code()
    pushed = next((value for name, value in call.trailing_metadata() or () if name == PUSHBACK), None)
    after, hint = None, None
    if pushed is not None:
        # Below zero, or unreadable: not again.
        after, hint = (int(pushed) / 1000, None) if str(pushed).isdecimal() else (None, False)
    if code is grpc.StatusCode.UNAVAILABLE and "failed to connect to all addresses" in (call.details() or ""):
        outcome = Outcome.NOT_SENT  # the text is all that tells it from a connection that broke
    elif code is grpc.StatusCode.RESOURCE_EXHAUSTED and after is not None:
        outcome = Outcome.REFUSED
    elif code in UNKNOWN:
        outcome = Outcome.UNKNOWN
    else:
        return Seen(Outcome.PROCESSED, answer=call, error=error, permanent=True)
    return Seen(outcome, answer=call, error=error, retry_after=after, hint=hint)
