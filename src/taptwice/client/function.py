"""`retry`: the same policy around any function, blocking or awaiting.

    @retry(on=ConnectionError)
    def fetch_rates() -> Rates: ...

    @retry(on=lambda error: isinstance(error, ApiError) and error.wait, policy=RetryPolicy(deadline=30))
    async def pay(order: Order) -> Receipt: ...

The last exception is raised as it is, and carries `.attempts`, `.stop_reason`, `.outcome`. A function that
calls others that retry does not multiply with them: those inside make one attempt each.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

from taptwice.client.errors import DeadlineExceeded, kin
from taptwice.client.gate import Breaker, Budget, Gate
from taptwice.client.limits import Limit
from taptwice.client.outcome import Outcome, Seen, of_error
from taptwice.client.plan import Call, StopReason
from taptwice.client.policy import DEFAULT, RetryPolicy
from taptwice.client.reports import Listener, attach
from taptwice.client.settings import check
from taptwice.client.shell import Going, layer
from taptwice.client.world import REAL, World
from taptwice.core.budget import RetryBudget
from taptwice.errors import Misuse

__all__ = ["retry"]

P = ParamSpec("P")
T = TypeVar("T")
On: TypeAlias = type[Exception] | tuple[type[Exception], ...] | Callable[[Exception], bool | float]


def retry(
    *,
    on: On,
    policy: RetryPolicy = DEFAULT,
    idempotent: bool = True,
    interrupt: bool = False,
    budget: Budget | Literal["own"] | None = "own",
    breaker: Breaker | None = None,
    listeners: Sequence[Listener] = (),
    world: World = REAL,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Call the function again when it raises what `on` names.

    `on`: exceptions, or a function that says whether an exception may go away by itself; a number says so
    too, and is the least wait in seconds. `idempotent=False` says that the function must not be repeated
    when it may have had an effect: only what certainly was not sent is tried again. `interrupt` cuts an
    awaiting function at the policy's `per_try` and `deadline`, on asyncio; without it, and in blocking
    functions, the deadline ends only the waits and the attempts that have not begun. `budget`: by default
    each decorated function has a `RetryBudget` of its own; share one among those that call the same server.
    """

    check(policy, listeners, world)
    gates: tuple[tuple[str, Any, str], ...] = (("budget", budget, "take"), ("breaker", breaker, "enter"))
    for name, given, method in gates:
        if given not in (None, "own") and (isinstance(given, type) or not hasattr(given, method)):
            raise Misuse(f"{name}={given!r}: the function has one, so give one that is made, or None")

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        own = RetryBudget() if budget == "own" else budget
        name = getattr(function, "__qualname__", type(function).__name__)
        retrier = _Retrier(name, on, policy, Gate(own, breaker), idempotent, listeners, world)
        if inspect.iscoroutinefunction(function):
            made: Any = _awaiting(retrier, function, interrupt)
        elif interrupt:
            raise Misuse(f"interrupt=True: {name} is blocking, and nothing can cut it")
        else:
            made = _blocking(retrier, function)
        return functools.wraps(function)(made)

    return decorate


class _Retrier:
    """What is the same in every call of one decorated function."""

    def __init__(
        self,
        name: str,
        on: On,
        policy: RetryPolicy,
        gate: Gate,
        idempotent: bool,
        listeners: Sequence[Listener],
        world: World,
    ) -> None:
        self.name = name
        self.on = on
        self.policy = policy
        self.gate = gate
        self.idempotent = idempotent
        self.listeners = listeners
        self.world = world
        self.deadline = math.inf if policy.deadline is None else policy.deadline

    def going(self, begun: float) -> Going:
        """A shell for what the hot path cannot do."""
        call = Call(self.policy, begun, method="CALL")
        call.keyed = self.idempotent
        return Going(call, self.gate, self.world, self.listeners, self.name)

    def judge(self, error: Exception) -> Seen | None:
        """What the exception shows; None: it is none of those that are retried."""
        if isinstance(self.on, type | tuple):
            return of_error(error) if isinstance(error, self.on) else None
        verdict = self.on(error)
        if verdict is False:
            return None
        seen = of_error(error)
        return seen if verdict is True else seen._replace(retry_after=float(verdict))

    def failed(self, error: BaseException, begun: float, ticket: int | None) -> tuple[Going, Seen]:
        """The first attempt has raised. Raises what is not retried."""
        seen = self.judge(error) if isinstance(error, Exception) else None
        if seen is None:
            if ticket is not None and self.gate.breaker is not None:
                self.gate.breaker.leave(ticket, None, self.world.clock())
            raise error
        return self.adopt(seen, begun, ticket)

    def adopt(self, seen: Seen, begun: float, ticket: int | None) -> tuple[Going, Seen]:
        """Let a shell go on from a first attempt that the hot path has made."""
        going = self.going(begun)
        going.adopt(seen, ticket)
        return going, seen

    def conclude(self, going: Going, seen: Seen) -> Any:
        """The result, or the exception."""
        report = going.report(seen)
        if seen.error is None:
            return seen.answer
        error: Exception = seen.error
        if isinstance(error, TimeoutError) and going.cut and report.stop_reason is StopReason.DEADLINE:
            late = kin(DeadlineExceeded, TimeoutError)(f"{self.name} was cut by the deadline of its call")
            attach(late, report)
            raise late from error
        attach(error, report)
        raise error


def _attempt(retrier: _Retrier, function: Callable[..., Any], args: Any, kwargs: Any, _: Limit) -> Seen:
    try:
        return Seen(Outcome.PROCESSED, answer=function(*args, **kwargs))
    except Exception as error:
        if (seen := retrier.judge(error)) is None:
            raise
        return seen


async def _aattempt(
    retrier: _Retrier, function: Callable[..., Any], args: Any, kwargs: Any, _: Limit
) -> Seen:
    try:
        return Seen(Outcome.PROCESSED, answer=await function(*args, **kwargs))
    except Exception as error:
        if (seen := retrier.judge(error)) is None:
            raise
        return seen


async def _acut(
    retrier: _Retrier, function: Callable[..., Any], args: Any, kwargs: Any, limit: Limit
) -> Seen:
    cut = asyncio.timeout(limit.left() if limit.end < math.inf else None)
    try:
        async with cut:
            return await _aattempt(retrier, function, args, kwargs, limit)
    except TimeoutError as error:
        if not cut.expired():
            raise
        return Seen(Outcome.UNKNOWN, error=error)


# The two hot paths. A call that succeeds pays for a clock, a full budget, a closed circuit and the mark of
# the layer; everything else is behind the first failure.


def _blocking(retrier: _Retrier, function: Callable[..., Any]) -> Callable[..., Any]:
    world, gate, deadline = retrier.world, retrier.gate, retrier.deadline
    budget, breaker, listeners = gate.budget, gate.breaker, retrier.listeners
    mark, unmark = layer.set, layer.reset

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        begun = world.clock()
        if budget is not None:
            budget.earn()
        ticket = None
        if breaker is not None and (ticket := breaker.enter(begun)) is None:
            going = retrier.going(begun)
            return retrier.conclude(going, going.refused(breaker))
        token = mark((True, begun + deadline, 0))
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            unmark(token)
            going, seen = retrier.failed(error, begun, ticket)
        else:
            unmark(token)
            if not listeners:
                if ticket is not None:
                    breaker.leave(ticket, True)  # type: ignore[union-attr]
                return result
            going, seen = retrier.adopt(Seen(Outcome.PROCESSED, answer=result), begun, ticket)
        attempt = functools.partial(_attempt, retrier, function, args, kwargs)
        return retrier.conclude(going, going.run(attempt, seen))

    return wrapper


def _awaiting(
    retrier: _Retrier, function: Callable[..., Awaitable[Any]], interrupt: bool
) -> Callable[..., Awaitable[Any]]:
    world, gate, deadline = retrier.world, retrier.gate, retrier.deadline
    budget, breaker, listeners = gate.budget, gate.breaker, retrier.listeners
    mark, unmark = layer.set, layer.reset

    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        begun = world.clock()
        if interrupt:
            going = retrier.going(begun)
            attempt = functools.partial(_acut, retrier, function, args, kwargs)
            return retrier.conclude(going, await going.arun(attempt))
        if budget is not None:
            budget.earn()
        ticket = None
        if breaker is not None and (ticket := breaker.enter(begun)) is None:
            going = retrier.going(begun)
            return retrier.conclude(going, going.refused(breaker))
        token = mark((True, begun + deadline, 0))
        try:
            result = await function(*args, **kwargs)
        except BaseException as error:
            unmark(token)
            going, seen = retrier.failed(error, begun, ticket)
        else:
            unmark(token)
            if not listeners:
                if ticket is not None:
                    breaker.leave(ticket, True)  # type: ignore[union-attr]
                return result
            going, seen = retrier.adopt(Seen(Outcome.PROCESSED, answer=result), begun, ticket)
        attempt = functools.partial(_aattempt, retrier, function, args, kwargs)
        return retrier.conclude(going, await going.arun(attempt, seen))

    return wrapper
