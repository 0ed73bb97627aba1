"""What happened to a key, as one value, and who is told.

Events are collected while a transaction runs and emitted after it ended, so that a listener never
holds a transaction open and never hears of something that was rolled back. A listener that raises is
logged and harms nobody. Account and key are hashed unless the guard was told to show them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum

logger = logging.getLogger("taptwice")


class Outcome(Enum):
    """One name an outcome: in events, metrics and logs."""

    NEW = "new"
    """Claimed: the work is done by this attempt."""
    REPLAYED = "replayed"
    IN_FLIGHT = "in_flight"
    MISMATCH = "mismatch"
    MISSING = "missing"
    INVALID = "invalid"
    FINISHED = "finished"
    """The answer is saved and committed (or, in the caller's transaction, will be with his commit)."""
    RELEASED = "released"
    """Undone, nothing saved: the key is free again."""
    TORN = "torn"
    """The handler ended the transaction itself; the answer was saved outside it."""
    STRAY = "stray"
    """Work went to another session, outside the claim's transaction."""
    STORE_UNAVAILABLE = "store_unavailable"


@dataclass(frozen=True, slots=True)
class Event:
    """One outcome. `pending` is True when the caller's own commit is still to come."""

    outcome: Outcome
    account: str | None = None
    """16 hexadecimal digits of a hash, unless shown in the clear."""
    key: str | None = None
    route: str | None = None
    """Method and path template, for example ``POST /charges``."""
    status: int | None = None
    pending: bool = False
    detail: str | None = None


Listener = Callable[[Event], None]

_LEVELS = {
    Outcome.TORN: logging.ERROR,
    Outcome.STRAY: logging.WARNING,
    Outcome.STORE_UNAVAILABLE: logging.ERROR,
    Outcome.MISMATCH: logging.WARNING,
}


def is_heard(outcome: Outcome, listeners: Collection[Listener]) -> bool:
    """Whether anybody would be told: an event that nobody hears need not be made."""
    return bool(listeners) or logger.isEnabledFor(_LEVELS.get(outcome, logging.INFO))


def log(event: Event) -> None:
    """The listener that is always there: one line an event on the logger ``taptwice``."""
    logger.log(
        _LEVELS.get(event.outcome, logging.INFO),
        "idempotency key %s: %s%s%s",
        event.outcome.value,
        event.route or "(no route)",
        "" if event.status is None else f" -> {event.status}",
        f" ({event.detail})" if event.detail else "",
        extra={"idempotency_key_hash": event.key, "idempotency_outcome": event.outcome.value},
    )


def emit(events: Iterable[Event], listeners: Iterable[Listener]) -> None:
    """Tell everybody."""
    told = (log, *listeners)
    for event in events:
        for listener in told:
            try:
                listener(event)
            except Exception:
                logger.exception("a listener failed on the event %s", event.outcome.value)
