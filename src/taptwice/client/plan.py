"""The retry plan: it begins with a failure.

The first attempt belongs to the shell, so a call that succeeds at once makes no plan at all. Everything
after it is here, once, for every library, blocking or awaiting: `stop` decides, `retrying` waits and asks
for another attempt. Neither knows what an attempt is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from taptwice.client.outcome import Outcome, Seen
from taptwice.client.policy import RetryPolicy
from taptwice.core.plan import Command, Now, Plan, ask

__all__ = [
    "IDEMPOTENT",
    "Again",
    "Attempt",
    "Call",
    "Draw",
    "Enter",
    "StopReason",
    "Take",
    "Wait",
    "retrying",
]

IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})
"""Methods that may be repeated without a key (RFC 9110 section 9.2.2)."""


class StopReason(StrEnum):
    """Why there was no further attempt."""

    ANSWERED = "answered"
    """An answer that another attempt would not change."""
    UNKNOWN_OUTCOME = "unknown_outcome"
    """It may have been done, the method is not idempotent and there is no key: never sent twice."""
    PERMANENT = "permanent"
    """Every attempt would fail the same way: a certificate, a malformed URL."""
    SERVER_SAYS_NO = "server_says_no"
    """``x-should-retry: false``."""
    SINGLE_ATTEMPT = "single_attempt"
    """A layer around this one retries."""
    BODY_NOT_REPLAYABLE = "body_not_replayable"
    """The body was a stream that can be read once: pass bytes, a file, or a function that makes the body."""
    ATTEMPTS = "attempts"
    DEADLINE = "deadline"
    RETRY_AFTER_EXCEEDS_DEADLINE = "retry_after_exceeds_deadline"
    RETRY_AFTER_TOO_LONG = "retry_after_too_long"
    """Longer than the policy's `retry_after_limit`."""
    BUDGET = "budget"
    """Too many of the last calls have failed: retries are a tenth of them, no more."""
    CIRCUIT_OPEN = "circuit_open"
    ANSWER_CHANGED = "answer_changed"
    """The body of a streamed answer broke before its first piece, and what the repeat brought was another
    answer than the one that had been handed over."""
    REMEMBERED = "remembered"
    """Nothing was sent: the answer to this intent had been kept."""
    INTENT_REFUSED = "intent_refused"
    """Nothing was sent now: `IntentChanged`, `IntentTooOld` or `IntentDropped` says why. The report's outcome
    is that of what was sent before under this intent."""
    NOT_BEGUN = "not_begun"
    """Nothing was sent: the call was made wrongly, or the store of intents could not be asked."""


class Attempt(NamedTuple):
    """One attempt, in the log. Times are seconds of the monotonic clock."""

    outcome: Outcome
    status: int | None
    error: Exception | None
    waited: float
    """Before it."""
    began: float
    ended: float


class Call:
    """One call: what is known before its first attempt, and its log."""

    __slots__ = (
        "attempts",
        "begun",
        "end",
        "key",
        "keyed",
        "method",
        "policy",
        "replayable",
        "single",
        "stop",
        "waited",
    )

    def __init__(
        self,
        policy: RetryPolicy,
        begun: float,
        *,
        method: str = "GET",
        key: str | None = None,
        replayable: bool = True,
        single: bool = False,
    ) -> None:
        self.policy = policy
        self.begun = begun
        self.end = math.inf if policy.deadline is None else begun + policy.deadline
        self.method = method
        self.key = key
        self.keyed = key is not None
        self.replayable = replayable
        self.single = single
        self.attempts: list[Attempt] = []
        self.waited = 0.0
        self.stop: StopReason | None = None

    @property
    def polls(self) -> int:
        """Attempts that met an earlier one still in progress."""
        return sum(attempt.outcome is Outcome.IN_PROGRESS for attempt in self.attempts)


@dataclass(frozen=True, slots=True)
class Draw(Command[float]):
    """A random number, evenly from (0, 1]."""


@dataclass(frozen=True, slots=True)
class Take(Command[bool]):
    """Pay for a retry out of the budget. False: it may not be made."""


@dataclass(frozen=True, slots=True)
class Wait(Command[None]):
    """Wait for exactly so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Enter(Command[bool]):
    """Ask the circuit breaker. False: the attempt may not be made."""


@dataclass(frozen=True, slots=True)
class Again(Command[Seen]):
    """Make another attempt, and put it into the call's log."""


def retrying(call: Call, seen: Seen) -> Plan[Seen]:
    """Go on after a first attempt that showed `seen`; the last one's is the result, `call.stop` says why."""
    while True:
        now = yield from ask(Now())
        call.stop = stop(call, seen, now)
        if call.stop:
            return seen
        polling = seen.outcome is Outcome.IN_PROGRESS
        failures = call.polls if polling else len(call.attempts) - call.polls
        seconds = call.policy.wait(failures, seen.retry_after, (yield from ask(Draw())))
        if now + seconds >= call.end:
            call.stop = StopReason.RETRY_AFTER_EXCEEDS_DEADLINE if seen.retry_after else StopReason.DEADLINE
            return seen
        # Paid before the wait: who waits first holds the caller up only to tell him no.
        if not polling and not (yield from ask(Take())):
            call.stop = StopReason.BUDGET
            return seen
        yield from ask(Wait(seconds))
        if (yield from ask(Now())) >= call.end:
            call.stop = StopReason.DEADLINE
            return seen
        if not polling and not (yield from ask(Enter())):
            call.stop = StopReason.CIRCUIT_OPEN
            return seen
        call.waited = seconds
        seen = yield from ask(Again())


def stop(call: Call, seen: Seen, now: float) -> StopReason | None:
    """Whether it ends here, and why. None: it may be tried again."""
    outcome, safe = seen.outcome, call.keyed or call.method in IDEMPOTENT
    if outcome is Outcome.PROCESSED and seen.error is None and not seen.hint:
        return StopReason.ANSWERED
    if outcome is Outcome.IN_PROGRESS and not call.keyed:
        return StopReason.ANSWERED  # of some other call, then
    if seen.permanent:
        return StopReason.PERMANENT
    if now >= call.end:
        return StopReason.DEADLINE
    if call.single:
        return StopReason.SINGLE_ATTEMPT
    if seen.hint is False:
        return StopReason.SERVER_SAYS_NO
    if outcome in (Outcome.UNKNOWN, Outcome.PROCESSED) and not safe:
        return StopReason.UNKNOWN_OUTCOME
    if not call.replayable:
        return StopReason.BODY_NOT_REPLAYABLE
    # Without a deadline polls count: a server that is stuck must not hold the call for ever.
    counted = len(call.attempts) - (call.polls if call.end < math.inf else 0)
    if counted >= call.policy.max_attempts:
        return StopReason.ATTEMPTS
    if seen.retry_after and seen.retry_after > call.end - now:
        return StopReason.RETRY_AFTER_EXCEEDS_DEADLINE
    if seen.retry_after and seen.retry_after > call.policy.retry_after_limit:
        return StopReason.RETRY_AFTER_TOO_LONG
    return None
