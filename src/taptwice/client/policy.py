"""When to try again, and when: the numbers, and the arithmetic of waiting. Pure, and frozen."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from taptwice.core.policy import seconds
from taptwice.errors import Misuse

__all__ = ["RetryPolicy"]

Sign: TypeAlias = tuple[str, str]
"""A member of a JSON document, as a path with dots, and the text that stands there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How a client tries again. All durations are seconds.

        RetryPolicy(deadline=30, per_try=None)
        policy.replace(max_attempts=3)

    The n-th wait is drawn evenly from 0 to min(`cap`, `base`·2^(n-1)), "full jitter"; a Retry-After of the
    server's replaces it, and is a lower bound. No wait and no attempt is begun that the deadline would cut
    before it could bring anything.
    """

    max_attempts: int = 5
    """Attempts of one call, the first included. Answers "in progress" do not count under a deadline."""
    base: float = 0.4
    cap: float = 5.0
    deadline: float | None = 10.0
    """For the whole call: attempts, waits, and the reading of the body. None: no limit."""
    per_try: float | None = 2.0
    """For one attempt, under the deadline."""
    retry_after_limit: float = 60.0
    """A server that asks for more than this gets no retry, instead of an early one."""
    refused: frozenset[int] = frozenset({408, 425, 429})
    """Statuses that prove that nothing was done: repeated on every method, without a key too."""
    unknown: frozenset[int] = frozenset({500, 502, 503, 504})
    """Statuses that prove nothing: repeated if the method is idempotent or the request carries a key."""
    problems: str = "https://taptwice.dev/problems/"
    """What the server's problem types (RFC 9457) begin with; "in-progress" and its kin follow."""
    in_progress: tuple[Sign, ...] = ()
    """Other servers' signs of a 409 that means "still running": ``(("error.code", "key_in_use"),)``."""
    auto_key: bool = True
    """Make a key for each POST and PATCH that comes without one."""
    key_header: str = "Idempotency-Key"
    key_quoting: Literal["bare", "sf-string"] = "bare"
    """"sf-string": in double quotes, as the draft has it; most services want the key bare."""
    timeout_header: str | None = "Request-Timeout-Ms"
    """Names the field that tells the server how many milliseconds are left for an attempt."""
    attempt_header: str | None = "Retry-Attempt"
    """Names the field that a repeat carries, with the number of attempts before it. Who is called by a
    repeat makes one attempt of his own calls (`inherit`): attempts of layers add up then, instead of
    multiplying."""
    obey_should_retry: bool = False
    """Heed ``x-should-retry: true`` too, on any status. (``false`` always counts.)"""

    def __post_init__(self) -> None:
        if type(self.max_attempts) is not int or self.max_attempts < 1:
            raise Misuse(
                f"max_attempts={self.max_attempts!r} must be a whole number, at least 1: it counts the"
                " first one"
            )
        for name in ("base", "cap", "retry_after_limit"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < math.inf:
                raise Misuse(f"{name}={value!r} must be seconds, finite and not negative{_as_seconds(value)}")
        for name in ("deadline", "per_try"):
            value = getattr(self, name)
            if value is not None and (not _is_number(value) or not 0 < value < math.inf):
                raise Misuse(
                    f"{name}={value!r} must be seconds above 0, or None for no limit{_as_seconds(value)}"
                )
        for name in ("refused", "unknown"):
            _check_statuses(name, getattr(self, name))
        for name in ("key_header", "timeout_header", "attempt_header"):
            value = getattr(self, name)
            if value is None and name != "key_header":
                continue
            if not isinstance(value, str) or not _NAME.fullmatch(value):
                off = "" if name == "key_header" else ", or None for none"
                raise Misuse(f"{name}={value!r} must be the name of a header field{off}")
        problems: Any = self.problems
        if not isinstance(problems, str) or not problems:
            raise Misuse(f"problems={problems!r} must be text: what the problem types begin with")
        signs: Any = self.in_progress
        if not isinstance(signs, tuple | list) or not all(map(_is_sign, signs)):
            raise Misuse(
                f"in_progress={signs!r} must be a tuple of pairs of texts, a path and what stands"
                ' there: (("error.code", "key_in_use"),)'
            )
        for name in ("auto_key", "obey_should_retry"):
            if not isinstance(getattr(self, name), bool):
                raise Misuse(f"{name}={getattr(self, name)!r} must be True or False")
        if self.key_quoting not in ("bare", "sf-string"):
            raise Misuse(f"key_quoting={self.key_quoting!r}: choose 'bare' or 'sf-string'")

    def replace(self, **changes: Any) -> RetryPolicy:
        """A copy with some settings changed; a name that is no setting is a `Misuse`."""
        known = {setting.name for setting in dataclasses.fields(self)}
        if unknown := set(changes) - known:
            raise Misuse(f"no setting {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
        return dataclasses.replace(self, **changes)

    def wait(self, failures: int, retry_after: float | None, u: float) -> float:
        """Seconds before the next attempt, after so many that failed; `u` is drawn evenly from (0, 1].

        The bound is capped before the draw, so that the longest waits are spread like all others. A server's
        Retry-After is stretched by up to a tenth: all whom it told the same must not come back together.
        """
        if retry_after:
            return retry_after * (1 + u / 10)
        return u * min(self.cap, math.ldexp(self.base, min(failures - 1, 60)))


_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A token (RFC 9110 section 5.6.2)."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_seconds(value: object) -> str:
    """A hint for who has written "10s"."""
    if not isinstance(value, str):
        return ""
    try:
        return f": write {seconds(value):g}"
    except Misuse:
        return ": write a number"


def _check_statuses(name: str, statuses: Any) -> None:
    if not isinstance(statuses, frozenset | set | tuple | list):
        raise Misuse(f"{name}={statuses!r} must be a set of statuses: {name}={{429}}")
    for status in statuses:
        if type(status) is not int or not 400 <= status <= 599:
            raise Misuse(
                f"{name}={{{status!r}}}: give statuses from 400 to 599 as numbers; below 400 an answer is"
                " final"
            )


def _is_sign(sign: Any) -> bool:
    return isinstance(sign, tuple | list) and len(sign) == 2 and all(isinstance(each, str) for each in sign)


DEFAULT: Final = RetryPolicy()
