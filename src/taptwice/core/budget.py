"""How much a client may retry: a fixed share of its calls, however badly the server does.

`RetryBudget` is the simple rule: each first attempt earns a part of a retry, each retry costs a whole one.
`GrpcThrottle` is gRPC's (proposal A6, "retryThrottling"): failures cost one, successes earn a part, and
nothing is retried while half of the tokens or more are gone.

Both count in thousandths, since ten times 0.1 is not 1.0 in floating point. Both may be shared by threads;
a full budget is left alone without taking its lock, so that calls that go well pay one comparison.
"""

from __future__ import annotations

import threading

from taptwice.errors import Misuse

_TOKEN = 1000


class RetryBudget:
    """Retries allowed: `start`, and `ratio` for each first attempt, saved up to `cap`.

    Of 1,000 failing calls that want two retries each, the defaults let 109 of 2,000 through. Share one for
    each server that is called. Numbers are in retries, with three decimals.
    """

    __slots__ = ("_cap", "_lock", "_ratio", "_tokens")

    def __init__(self, ratio: float = 0.1, start: float = 10, cap: float = 10) -> None:
        self._ratio = _thousandths("ratio", ratio)
        self._tokens = _thousandths("start", start)
        self._cap = _thousandths("cap", cap)
        self._lock = threading.Lock()
        if self._tokens > self._cap:
            raise Misuse(f"start={start} is more than cap={cap} can hold")
        if 0 < self._cap < _TOKEN:
            raise Misuse(f"cap={cap} never holds one whole retry; give cap=0 to allow none at all")

    @property
    def tokens(self) -> float:
        """The retries that are left now."""
        return self._tokens / _TOKEN

    def earn(self) -> None:
        """A first attempt was made."""
        if self._tokens < self._cap:
            with self._lock:
                self._tokens = min(self._cap, self._tokens + self._ratio)

    def take(self) -> bool:
        """Pay for a retry, before the wait for it. False: there is nothing left, so do not retry."""
        with self._lock:
            if self._tokens < _TOKEN:
                return False
            self._tokens -= _TOKEN
            return True


class GrpcThrottle:
    """gRPC's rule, by its proposal A6: starts full; retries only while more than half of the tokens are left.

    `max_tokens` above 0 and up to 1000; `ratio` (A6: tokenRatio) is what a success earns, with three
    decimals. With the defaults and four attempts a call, six failing calls make 4, 1, 1, 1, 1 and 1 attempts.
    """

    __slots__ = ("_lock", "_max", "_ratio", "_tokens")

    def __init__(self, max_tokens: float = 10, ratio: float = 0.1) -> None:
        self._max = _thousandths("max_tokens", max_tokens)
        self._ratio = _thousandths("ratio", ratio)
        if not 0 < self._max <= 1000 * _TOKEN or not self._ratio:
            raise Misuse("max_tokens lies above 0 and up to 1000, and ratio above 0 (gRPC proposal A6)")
        self._tokens = self._max
        self._lock = threading.Lock()

    @property
    def tokens(self) -> float:
        """What is left now, of `max_tokens`."""
        return self._tokens / _TOKEN

    def succeeded(self) -> None:
        """An attempt went well."""
        if self._tokens < self._max:
            with self._lock:
                self._tokens = min(self._max, self._tokens + self._ratio)

    def failed(self) -> bool:
        """An attempt failed in a way that may be retried. The last attempt of a call counts too.

        True: it may be retried. False: too much has failed, let it be.
        """
        with self._lock:
            self._tokens = max(0, self._tokens - _TOKEN)
            return 2 * self._tokens > self._max


def _thousandths(name: str, value: float) -> int:
    if not 0 <= value < float("inf"):
        raise Misuse(f"{name}={value!r} must be a finite number that is not negative")
    whole = round(value * _TOKEN)
    if value and not whole:
        raise Misuse(f"{name}={value!r} is too small: it is counted in thousandths")
    return whole
