"""Stop calling what is down, and find out cheaply when it is up again.

    closed    every call may go. So many failures in a row open the circuit.
    open      no call may go, until the cool-down is over. The next one is the probe.
    probing   the probe alone may go, for as long as its lease lasts. It succeeds: closed. It fails: open
              again, for longer. It says nothing (cancelled): open, and the next call is the probe.

One number says whose outcome counts. In `closed` all calls since it closed hold the same ticket, in
`probing` only the probe holds it, in `open` nobody: what comes from a call that began before the last
change is of yesterday and moves nothing. So a slow success cannot close what has opened since, and a probe
whose lease is over may come back or not, it is a stranger by then.

`enter` and `leave` are pure: states in, states out, no clock. `CircuitBreaker` keeps one state for all
threads and tasks. It holds its lock for a transition, never during a call, and takes it on trouble only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal

from taptwice.errors import CircuitOpen, Misuse

State = Literal["closed", "open", "probing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Durations in seconds.

    `failures` in a row open the circuit for `cooldown`, which each failed probe multiplies by `growth`, up
    to `longest`. `lease` is how long a probe may take; make it longer than a call's own time limit.
    """

    failures: int = 5
    cooldown: float = 5.0
    growth: float = 2.0
    longest: float = 60.0
    lease: float = 30.0

    def __post_init__(self) -> None:
        if self.failures < 1:
            raise Misuse(f"failures={self.failures} must be at least 1")
        if not 0 < self.cooldown <= self.longest < float("inf"):
            raise Misuse(
                f"cooldown={self.cooldown} must be above 0 and not above longest={self.longest}, in seconds"
            )
        if not (1 <= self.growth < float("inf") and 0 < self.lease < float("inf")):
            raise Misuse("growth must be at least 1, and lease above 0 seconds")


@dataclass(frozen=True, slots=True)
class Circuit:
    """A state. `failures` is 0 in a closed circuit without trouble, and nowhere else."""

    state: State
    ticket: int
    """Who holds it, his outcome counts."""
    failures: int
    cooldown: float
    """How long it is, or would be, open. Seconds."""
    until: float
    """open: when a probe may begin. probing: when the probe's lease ends."""


def closed(rules: Rules, ticket: int = 1) -> Circuit:
    """The circuit at the beginning, and after a probe that succeeded."""
    return Circuit("closed", ticket, 0, rules.cooldown, 0.0)


def enter(circuit: Circuit, rules: Rules, now: float) -> tuple[Circuit, int | None]:
    """Ask to make a call. The ticket to leave with, or None: it may not be made."""
    if circuit.state == "closed":
        return circuit, circuit.ticket
    if now < circuit.until:
        return circuit, None
    ticket = circuit.ticket + 1
    return replace(circuit, state="probing", ticket=ticket, until=now + rules.lease), ticket


def leave(circuit: Circuit, rules: Rules, ticket: int, outcome: bool | None, now: float) -> Circuit:
    """A call has ended: True it went well, False it failed, None it says nothing about what was called."""
    if ticket != circuit.ticket:
        return circuit
    if circuit.state == "closed":
        if outcome is None:
            return circuit
        failures = 0 if outcome else circuit.failures + 1
        if failures < rules.failures:
            return replace(circuit, failures=failures)
        return _opened(circuit, failures, rules.cooldown, now + rules.cooldown)
    if outcome:
        return closed(rules, circuit.ticket + 1)
    if outcome is None:
        return _opened(circuit, circuit.failures, circuit.cooldown, now)
    cooldown = min(rules.longest, circuit.cooldown * rules.growth)
    return _opened(circuit, circuit.failures, cooldown, now + cooldown)


def _opened(circuit: Circuit, failures: int, cooldown: float, until: float) -> Circuit:
    return Circuit("open", circuit.ticket + 1, failures, cooldown, until)


class CircuitBreaker:
    """A circuit that threads and tasks share; one for each server that is called.

        breaker = CircuitBreaker(failures=5, cooldown=5)

        with breaker.attempt():                   # raises CircuitOpen at once while it is down
            answer = call_the_other_service()

        async with breaker.attempt() as attempt:
            answer = await call_it(timeout=2)     # a timeout around the block would look like a cancellation
            if answer.status >= 500:
                attempt.outcome = False

    The settings are those of `Rules`; `clock` gives monotonic seconds. Each attempt of a retry loop enters
    by itself: when the circuit opens the loop ends too.
    """

    __slots__ = ("_circuit", "_clock", "_lock", "_rules")

    def __init__(
        self,
        *,
        failures: int = 5,
        cooldown: float = 5.0,
        growth: float = 2.0,
        longest: float = 60.0,
        lease: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules = Rules(failures=failures, cooldown=cooldown, growth=growth, longest=longest, lease=lease)
        self._clock = clock
        self._circuit = closed(self._rules)
        self._lock = threading.Lock()

    @property
    def state(self) -> State:
        """The state now. An open circuit whose cool-down is over is open until the next call comes."""
        return self._circuit.state

    def retry_after(self, now: float | None = None) -> float:
        """Seconds until a call may go, at the latest; 0.0: one may go now."""
        circuit = self._circuit
        if circuit.state == "closed":
            return 0.0
        return max(0.0, circuit.until - (self._clock() if now is None else now))

    def enter(self, now: float | None = None) -> int | None:
        """Ask to make a call: a ticket to give to `leave`, or None, and then it must not be made.

        `now` is the time by the breaker's own clock, for callers who have just read it.
        """
        circuit = self._circuit
        if circuit.state == "closed":
            return circuit.ticket
        with self._lock:
            moment = self._clock() if now is None else now
            self._circuit, ticket = enter(self._circuit, self._rules, moment)
        return ticket

    def leave(self, ticket: int, outcome: bool | None, now: float | None = None) -> None:
        """The call has ended: True it went well, False it failed, None it says nothing.

        An answer that refuses the request, but shows the server at work (404, 422), went well. A call
        that was cancelled says nothing.
        """
        if outcome and not self._circuit.failures:
            return
        with self._lock:
            moment = self._clock() if now is None else now
            self._circuit = leave(self._circuit, self._rules, ticket, outcome, moment)

    def attempt(self) -> Attempt:
        """A block around one call, for ``with`` and for ``async with``."""
        return Attempt(self)


class Attempt:
    """One call through a breaker. Entering raises `CircuitOpen` while it may not be made.

    An `Exception` that leaves the block is a failure; a cancellation or Ctrl-C says nothing. The block may
    say otherwise by setting `outcome`, in whose terms `CircuitBreaker.leave` tells.
    """

    __slots__ = ("_breaker", "_ticket", "outcome")

    def __init__(self, breaker: CircuitBreaker) -> None:
        self._breaker = breaker
        self._ticket = 0
        self.outcome: bool | None = True

    def __enter__(self) -> Attempt:
        ticket = self._breaker.enter()
        if ticket is None:
            raise CircuitOpen(self._breaker.retry_after())
        self._ticket = ticket
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.outcome:
            self.outcome = False if isinstance(error, Exception) else None
        self._breaker.leave(self._ticket, self.outcome)

    async def __aenter__(self) -> Attempt:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)
