"""Every exception of taptwice, and what to do about it.

    TaptwiceError
    ├── RequestError          the caller's request is wrong: correct it, then send it again
    │   ├── KeyMissing        400 key-missing       an Idempotency-Key is required here
    │   ├── KeyInvalid        400 key-invalid       malformed, too long, sent twice
    │   ├── KeyExpired        400 key-expired       the key is older than the window
    │   ├── KeyReused         422 key-reused        the key belongs to another request
    │   ├── AccountMissing    401 account-missing   nobody is logged in
    │   ├── RequestTooLarge   413 request-too-large
    │   └── RequestIncomplete 400 request-incomplete
    ├── InFlight              409 in-progress       the first attempt is running: same key again, later
    ├── StoreUnavailable      503 store-unavailable nothing was done: same key again, later
    │   └── CommitUnknown     503 commit-unknown    it may have been done: same key again finds out
    ├── Contention            503 contention        rolled back, nothing done: run the transaction again
    │   └── Busy              503 contention        another transaction has the one writer's turn
    ├── CircuitOpen           not called: what is called is down; `retry_after` tells when to try again
    ├── IntentRefused         not sent: the name of an intent stands for something else
    │   ├── IntentChanged     it was sent as another request, which may have been done: find out
    │   ├── IntentTooOld      the server may have forgotten it: find out, then drop or renew it
    │   └── IntentDropped     it was given up
    ├── ConstraintViolated    a statement of ours broke a constraint (never reaches an application)
    ├── Inseparable           the work can be undone only with its claim (never reaches an application)
    └── Misuse                500 misuse            the program is wrong: the message names the remedy
        ├── Unfinished        the block was left without an answer
        └── Torn              somebody ended the transaction under the claim

Each class carries ``status`` (the HTTP status), ``problem`` (the last segment of its problem
type) and ``retry`` (whether the same request may succeed later without being changed).
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AccountMissing",
    "Busy",
    "CircuitOpen",
    "CommitUnknown",
    "ConstraintViolated",
    "Contention",
    "InFlight",
    "Inseparable",
    "IntentChanged",
    "IntentDropped",
    "IntentRefused",
    "IntentTooOld",
    "KeyExpired",
    "KeyInvalid",
    "KeyMissing",
    "KeyReused",
    "Misuse",
    "RequestError",
    "RequestIncomplete",
    "RequestTooLarge",
    "StoreUnavailable",
    "TaptwiceError",
    "Torn",
    "Unfinished",
]


class TaptwiceError(Exception):
    """The root of all exceptions of this package. Its docstring is the default message."""

    status: ClassVar[int] = 500
    problem: ClassVar[str] = "error"
    retry: ClassVar[bool] = False

    def __init__(self, detail: str | None = None) -> None:
        self.detail = detail or (type(self).__doc__ or "").strip().split("\n\n")[0]
        super().__init__(self.detail)


class RequestError(TaptwiceError):
    """The request must be corrected before it is sent again."""

    status = 400
    problem = "bad-request"


class KeyMissing(RequestError):
    """An Idempotency-Key header is required."""

    problem = "key-missing"


class KeyInvalid(RequestError):
    """The Idempotency-Key header is malformed."""

    problem = "key-invalid"


class KeyExpired(RequestError):
    """The idempotency key is older than the window in which keys are remembered."""

    problem = "key-expired"


class KeyReused(RequestError):
    """The idempotency key was used before with a different request."""

    status = 422
    problem = "key-reused"


class AccountMissing(RequestError):
    """An idempotency key needs an account, and nobody is logged in."""

    status = 401
    problem = "account-missing"


class RequestTooLarge(RequestError):
    """The request body is larger than the limit."""

    status = 413
    problem = "request-too-large"


class RequestIncomplete(RequestError):
    """The request body ended before its announced length."""

    problem = "request-incomplete"


class InFlight(TaptwiceError):
    """A request with this idempotency key is still in progress."""

    status = 409
    problem = "in-progress"
    retry = True


class StoreUnavailable(TaptwiceError):
    """The store of idempotency keys cannot be used; nothing was done."""

    status = 503
    problem = "store-unavailable"
    retry = True


class CommitUnknown(StoreUnavailable):
    """The connection was lost during COMMIT; a retry with the same key finds out what happened."""

    problem = "commit-unknown"


class Contention(TaptwiceError):
    """The database refused the transaction because of a concurrent one; run it again."""

    status = 503
    problem = "contention"
    retry = True


class Busy(Contention):
    """The database has one writer, and another transaction is writing."""


class CircuitOpen(TaptwiceError):
    """Not called: the circuit breaker is open, because too many calls in a row have failed."""

    status = 503
    problem = "circuit-open"
    retry = True

    def __init__(self, retry_after: float, origin: str = "") -> None:
        of = f" for {origin}" if origin else ""
        super().__init__(f"the circuit{of} is open, nothing was sent; again in {retry_after:.1f} s")
        self.retry_after = retry_after
        """Seconds until a call may go, at the latest."""
        self.origin = origin
        """What is called, where it is known: scheme, host and port, a function's or a method's name."""


class IntentRefused(TaptwiceError):
    """Not sent: what is remembered of this intent forbids it.

    It carries what every error of a client does: `.attempts` (none), `.stop_reason`, `.idempotency_key`, and
    as `.outcome` what is known of what was sent before under this intent.
    """

    problem = "intent-refused"


class IntentChanged(IntentRefused):
    """Not sent: this intent stands for another request."""

    problem = "intent-changed"


class IntentTooOld(IntentRefused):
    """Not sent: the server may have forgotten this intent's key, and would do it a second time."""

    problem = "intent-too-old"


class IntentDropped(IntentRefused):
    """Not sent: this intent was given up."""

    problem = "intent-dropped"


class ConstraintViolated(TaptwiceError):
    """A statement of taptwice broke a constraint of its own table."""


class Inseparable(TaptwiceError):
    """The handler released its savepoint: its work can be undone only together with the claim."""


class Misuse(TaptwiceError):
    """taptwice is used in a way that cannot be safe."""

    problem = "misuse"


class Unfinished(Misuse):
    """The claim's block ended without finish(); its writes were undone and the key is free."""


class Torn(Misuse):
    """The transaction of the claim was ended by the handler; the claim can no longer commit with it."""
