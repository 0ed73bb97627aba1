"""What a route promises, as data: every setting of a keyed route with its default, and named profiles.

Policy(window="7d")                      one setting changed
profile("stripe-v1", required=False)     a profile with a change
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from taptwice.core.fingerprint import Rules
from taptwice.core.header import KeySyntax
from taptwice.core.model import Headers
from taptwice.errors import Misuse

Save = Literal["final", "success", "all-after-start"]

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

NEVER_SAVED = frozenset({401, 407, 408, 421, 425, 426, 429, 431})
"""4xx that say "not now" or "not like this": nothing was decided about the request itself."""

REPLAYED_HEADERS = (
    "Content-Type",
    "Content-Language",
    "Content-Encoding",
    "Content-Disposition",
    "Content-Location",
    "Location",
    "ETag",
    "Last-Modified",
    "Link",
    "Cache-Control",
)


def seconds(duration: float | str) -> float:
    """Seconds from a number of seconds or from text such as ``"250ms"``, ``"5s"``, ``"24h"``, ``"7d"``."""
    if isinstance(duration, str):
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)", duration.strip())
        if match is None:
            raise Misuse(f"not a duration: {duration!r}; write seconds, or '30s', '10m', '24h', '7d'")
        return float(match[1]) * _UNITS[match[2]]
    if not 0 <= duration < float("inf"):
        raise Misuse(f"not a duration: {duration!r}; it must be a finite number of seconds, not negative")
    return float(duration)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The settings of a keyed route. Durations are seconds, or text that `seconds` reads."""

    required: bool = True
    """False: a request without a key runs unprotected. A malformed key is refused all the same."""
    methods: frozenset[str] = frozenset({"POST", "PATCH"})
    """Methods on which a key counts. GET, HEAD and OPTIONS never take one."""
    key: KeySyntax = field(default_factory=KeySyntax)
    key_pointer: str | None = None
    """A JSON pointer: the key stands in the body (Square, Plaid) instead of a header."""
    fingerprint: Rules = field(default_factory=Rules)
    scope: Literal["account", "route"] = "account"
    """"route": the same key on another route is another key."""
    anonymous: Literal["reject", "shared-uuid"] = "reject"
    """"shared-uuid": callers without an account share one space, and must send random UUIDs."""
    window: float | str = "24h"
    """How long a key is remembered, at least, from the claim on."""
    uuid7_guard: bool = False
    """Refuse UUIDv7 keys that are older than the window."""
    wait: float | str = "5s"
    """How long a duplicate waits for the first attempt; 0 answers 409 at once."""
    retry_after: int = 1
    """Seconds that a refused caller is told to wait."""
    save: Save = "final"
    save_max_body: int = 1_048_576
    """Larger answers leave a tombstone. Bytes."""
    request_max_body: int = 10_485_760
    """Larger requests are refused with 413. Bytes."""
    streams: Literal["pass", "capture"] = "pass"
    """"capture": an answer without Content-Length is held and saved whole, up to `save_max_body`."""
    savepoint: bool = True
    """False saves two statements a request; a raised answer then rolls the whole transaction back."""
    replay_header: str = "Idempotent-Replayed"
    replay_allow: tuple[str, ...] = REPLAYED_HEADERS
    """Names of the answer's headers that are kept and replayed."""
    status: Mapping[str, int] = field(default_factory=dict)
    """Other statuses for problems, by problem type: ``{"key-reused": 400}``."""

    def __post_init__(self) -> None:
        for name in ("window", "wait"):
            object.__setattr__(self, name, seconds(getattr(self, name)))
        object.__setattr__(self, "methods", frozenset(method.upper() for method in self.methods))
        if useless := self.methods & {"GET", "HEAD", "OPTIONS", "TRACE"}:
            raise Misuse(f"methods={sorted(useless)}: safe methods take no idempotency key")
        if self.save not in ("final", "success", "all-after-start"):
            raise Misuse(f"save={self.save!r}: choose 'final', 'success' or 'all-after-start'")
        for name in ("save_max_body", "request_max_body", "retry_after"):
            if getattr(self, name) < 0:
                raise Misuse(f"{name} must not be negative")
        if self.window_s <= 0:
            raise Misuse("window must be longer than nothing: a key forgotten at once protects nobody")

    @property
    def window_s(self) -> float:
        """The window in seconds."""
        return float(self.window)  # a number since __post_init__

    @property
    def wait_s(self) -> float:
        """The longest wait in seconds."""
        return float(self.wait)

    def keeps(self, status: int) -> bool:
        """Whether an answer with this status is saved. What is not saved is undone.

        `final`: 2xx, 3xx and every 4xx but `NEVER_SAVED`. `success`: 2xx and 3xx.
        `all-after-start`: everything, 500 included.
        """
        if self.save == "all-after-start":
            return True
        if self.save == "success":
            return 200 <= status < 400
        return 200 <= status < 500 and status not in NEVER_SAVED

    def kept_headers(self, headers: Headers) -> Headers:
        """Those header lines, in their order, that a replay gives again."""
        allowed = _lowered(self.replay_allow)
        return tuple([(low, value) for name, value in headers if (low := name.lower()) in allowed])


@cache
def _lowered(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(map(str.lower, names))


PROFILES: Mapping[str, Mapping[str, Any]] = {
    # draft-ietf-httpapi-idempotency-key-header-07: the key is a structured-field string.
    "draft": {"key": KeySyntax(strict=True)},
    # What Stripe documents for its v1 API: any result once execution began, 500 included; a reused key is
    # a 400.
    "stripe-v1": {
        "save": "all-after-start",
        "methods": frozenset({"POST"}),
        "required": False,
        "wait": 0,
        "status": {"key-reused": 400},
    },
}


def profile(name: str, **changes: Any) -> Policy:
    """A named profile, with changes."""
    try:
        settings = PROFILES[name]
    except KeyError:
        raise Misuse(f"no profile {name!r}; there are {', '.join(sorted(PROFILES))}") from None
    return Policy(**{**settings, **changes})


def changed(policy: Policy, **changes: Any) -> Policy:
    """A copy with some settings changed; a name that is no setting is a `Misuse`."""
    known = {setting.name for setting in dataclasses.fields(policy)}
    if unknown := set(changes) - known:
        raise Misuse(f"no setting {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    return dataclasses.replace(policy, **changes)
