"""How a call went, for whoever made it, and for metrics.

An answer or an exception carries the `Report` of its call: `report(response)`, `report(error)`. Listeners
hear of each attempt and of each end; what they raise is logged and harms nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from taptwice.client.outcome import Outcome, Seen
from taptwice.client.plan import Attempt, Call, StopReason
from taptwice.errors import Misuse

__all__ = ["Attempted", "Ended", "Listener", "Report", "report"]

logger = logging.getLogger("taptwice.client")


class Report(NamedTuple):
    """One call, from its beginning to its end."""

    attempts: tuple[Attempt, ...]
    """As many as the server can have seen."""
    stop_reason: StopReason
    outcome: Outcome
    """Of the last attempt. Where there was none, of what is known of the intent: `unknown` if nothing is."""
    idempotency_key: str | None
    retry_after: float | None
    """Seconds; what the server, or an open circuit, asked for at the end."""


@dataclass(frozen=True, slots=True)
class Attempted:
    """An attempt has ended; the number of the first is 1.

    Where an answer is handed over unread that is when the first piece of its body has come, or when it is
    closed; so it is with `Ended`.
    """

    method: str
    origin: str
    number: int
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Ended:
    """A call has ended, well or not."""

    method: str
    origin: str
    report: Report


Listener: TypeAlias = Callable[[Attempted | Ended], None]


def report(of: Any) -> Report:
    """The report that an answer or an exception of a client, transport, adapter or `retry` carries."""
    found = getattr(of, "taptwice", None)
    if found is None:
        found = getattr(of, "extensions", {}).get("taptwice")
    if not isinstance(found, Report):
        raise Misuse(f"this {type(of).__name__} did not come from a client of taptwice's")
    return found


def reported(call: Call, seen: Seen) -> Report:
    """The report at a call's end."""
    return Report(
        tuple(call.attempts),
        call.stop or StopReason.ANSWERED,
        seen.outcome,
        call.key,
        seen.retry_after,
    )


def attach(error: BaseException, found: Report) -> None:
    """Let an exception carry the report, and its members by their names."""
    for name in ("attempts", "stop_reason", "outcome", "idempotency_key", "retry_after"):
        setattr(error, name, getattr(found, name))
    error.taptwice = found  # type: ignore[attr-defined]


def tell(event: Attempted | Ended, listeners: Iterable[Listener]) -> None:
    """Tell everybody."""
    for listener in listeners:
        try:
            listener(event)
        except Exception:
            logger.exception("a listener failed on %s", type(event).__name__)
