"""Make the attempts of a call: the first, and then, if need be, those that the retry plan asks for.

A *door* is a function that makes one attempt through one library and says what it showed: it gets a `Limit`
and returns a `Seen`; what it raises is no failure of the server's and goes straight to the caller. Around
each attempt a shell keeps the log, asks the circuit breaker and marks the context, so that retrying layers
further in see that they are not alone.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

from taptwice.client.gate import Breaker, Gate, verdict
from taptwice.client.limits import Limit
from taptwice.client.outcome import Outcome, Seen
from taptwice.client.plan import Again, Attempt, Call, Draw, Enter, StopReason, Take, Wait, retrying
from taptwice.client.reports import Attempted, Ended, Listener, Report, reported, tell
from taptwice.client.world import REAL, World
from taptwice.core.plan import Command, Now, arun, run
from taptwice.errors import CircuitOpen

__all__ = ["Going", "Layer", "inherit", "layer"]


Layer: TypeAlias = tuple[bool, float, int]
"""What surrounds a call: whether a layer there retries, the end of its attempt (monotonic seconds), and how
many attempts have gone before that one."""

layer: ContextVar[Layer | None] = ContextVar("taptwice_layer", default=None)


@contextmanager
def inherit(headers: Mapping[str, str], *, world: World = REAL) -> Iterator[None]:
    """Inside this block clients know what a request that came in says of its caller.

    If the request is a repeat (``Retry-Attempt``) they make one attempt each, since its caller will make the
    next: retries of several layers multiply otherwise. And they end in time for his limit
    (``Request-Timeout-Ms``). `headers` are a framework's, or a dict.
    """
    found = {name.lower(): value for name, value in headers.items()}
    milliseconds, before = found.get("request-timeout-ms", ""), found.get("retry-attempt", "")
    end = world.clock() + int(milliseconds) / 1000 if milliseconds.isdecimal() else math.inf
    repeats = int(before) if before.isdecimal() else 0
    token = layer.set((repeats > 0, end, repeats))
    try:
        yield
    finally:
        layer.reset(token)


class Going:
    """One call under way."""

    __slots__ = ("_before", "_ticket", "began", "call", "gate", "listeners", "origin", "world")

    def __init__(
        self, call: Call, gate: Gate, world: World, listeners: Sequence[Listener] = (), origin: str = ""
    ) -> None:
        self.call = call
        self.gate = gate
        self.world = world
        self.listeners = listeners
        self.origin = origin
        self.began = call.begun
        self._ticket: int | None = None
        self._before = 0
        around = layer.get()
        if around is not None:
            retries, end, self._before = around
            call.single = call.single or retries
            call.end = min(call.end, end)

    # --- the two shells ---

    def run(self, attempt: Callable[[Limit], Seen], first: Seen | None = None) -> Seen:
        """Make the call, blocking, or go on after a `first` attempt that was adopted.

        The error is a `CircuitOpen` if not even one attempt may be made.
        """
        seen = first or self._refused() or self._attempt(attempt)
        if seen.final or self.call.stop:
            return seen

        def execute(command: Command[Any]) -> Any:
            match command:
                case Wait(seconds):
                    return self.world.sleep(seconds)
                case Again():
                    return self._attempt(attempt)
            return self._instant(command)

        return run(retrying(self.call, seen), execute)

    async def arun(self, attempt: Callable[[Limit], Awaitable[Seen]], first: Seen | None = None) -> Seen:
        """Make the call, awaiting, or go on."""
        seen = first or self._refused() or await self._aattempt(attempt)
        if seen.final or self.call.stop:
            return seen

        async def execute(command: Command[Any]) -> Any:
            match command:
                case Wait(seconds):
                    return await self.world.asleep(seconds)
                case Again():
                    return await self._aattempt(attempt)
            return self._instant(command)

        return await arun(retrying(self.call, seen), execute)

    def _attempt(self, attempt: Callable[[Limit], Seen]) -> Seen:
        limit, token = self._start()
        try:
            seen = attempt(limit)
        except BaseException:
            self._abandon()
            raise
        finally:
            layer.reset(token)
        return self._finish(seen)

    async def _aattempt(self, attempt: Callable[[Limit], Awaitable[Seen]]) -> Seen:
        limit, token = self._start()
        try:
            seen = await attempt(limit)
        except BaseException:
            self._abandon()
            raise
        finally:
            layer.reset(token)
        return self._finish(seen)

    def refused(self, breaker: Breaker) -> Seen:
        """What a call shows that an open circuit does not let begin."""
        seconds = breaker.retry_after(self.call.begun)
        self.call.stop = StopReason.CIRCUIT_OPEN
        return Seen(Outcome.NOT_SENT, error=CircuitOpen(seconds, self.origin), retry_after=seconds)

    def adopt(self, seen: Seen, ticket: int | None) -> None:
        """Take over a first attempt that somebody else has made."""
        self._ticket = ticket
        _ = self._finish(seen)

    def stands(self, seen: Seen) -> None:
        """The body of an answer that was handed over unread has begun to come, or is not wanted."""
        self.settle(seen)
        _ = self.report(seen._replace(open=False))

    def broken(self, seen: Seen) -> Seen:
        """It broke before anything of it came, as `seen` shows: the last attempt has failed."""
        _ = self.call.attempts.pop()
        self.call.stop = None
        return self._finish(seen)

    def stamp(self, limit: Limit, headers: MutableMapping[str, str]) -> None:
        """Tell the server how long this attempt may take, and that it is a repeat if it is one."""
        policy, repeats = self.call.policy, self._before + len(self.call.attempts)
        if policy.timeout_header is not None and limit.end < math.inf:
            headers[policy.timeout_header] = str(max(1, round((limit.end - self.began) * 1000)))
        if repeats and policy.attempt_header is not None:
            headers[policy.attempt_header] = str(repeats)

    def report(self, seen: Seen) -> Report:
        """The report of the whole call; tells the listeners, if it has ended."""
        found = reported(self.call, seen)
        if self.listeners and not seen.open:
            tell(Ended(self.call.method, self.origin, found), self.listeners)
        return found

    @property
    def cut(self) -> bool:
        """Whether the call's own deadline has ended the last attempt."""
        return bool(self.call.attempts) and self.call.attempts[-1].ended >= self.call.end

    def too_late(self, seen: Seen) -> str:
        """What to tell whose deadline has cut the last attempt."""
        count = len(self.call.attempts)
        times = "attempt" if count == 1 else "attempts"
        seconds = self.call.end - self.call.begun
        return f"the deadline of {seconds:g} s passed, after {count} {times}; outcome {seen.outcome}"

    # --- what both do around an attempt ---

    def _instant(self, command: Command[Any]) -> Any:
        match command:
            case Now():
                return self.world.clock()
            case Draw():
                return self.world.draw()
            case Take():
                return self.gate.budget is None or self.gate.budget.take()
            case Enter():
                return self._enter(self.world.clock())
        raise AssertionError(command)

    def _refused(self) -> Seen | None:
        if self.gate.budget is not None:
            self.gate.budget.earn()
        breaker = self.gate.breaker
        return None if breaker is None or self._enter(self.call.begun) else self.refused(breaker)

    def _enter(self, now: float) -> bool:
        if self.gate.breaker is None:
            return True
        self._ticket = self.gate.breaker.enter(now)
        return self._ticket is not None

    def _start(self) -> tuple[Limit, Any]:
        call, clock = self.call, self.world.clock
        self.began = call.begun if not call.attempts else clock()
        per_try = call.policy.per_try
        end = call.end if per_try is None else min(call.end, self.began + per_try)
        return Limit(end, clock), layer.set((True, end, self._before + len(call.attempts)))

    def _finish(self, seen: Seen) -> Seen:
        call, now = self.call, self.world.clock()
        call.attempts.append(Attempt(seen.outcome, seen.status, seen.error, call.waited, self.began, now))
        if not seen.open:
            self.settle(seen)
        return seen

    def settle(self, seen: Seen) -> None:
        """Tell the breaker and the listeners what the last attempt has shown: nothing can change it now."""
        attempts = self.call.attempts
        if self._ticket is not None:
            self._leave(verdict(seen, cut=self.cut), self.world.clock())
        if self.listeners:
            tell(Attempted(self.call.method, self.origin, len(attempts), attempts[-1]), self.listeners)

    def _abandon(self) -> None:
        self._leave(None, self.world.clock())

    def _leave(self, outcome: bool | None, now: float) -> None:
        if self._ticket is not None and self.gate.breaker is not None:
            self.gate.breaker.leave(self._ticket, outcome, now)
            self._ticket = None
