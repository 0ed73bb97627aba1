"""What is under way in this context: the key on every log line, and the transaction that sessions join.

One mutable value stands in the context variable, and every use asks for its state: a task that was
started inside a request and outlives it sees a closed one, and joins nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from taptwice.core.model import key_hash


@dataclass(slots=True)
class Current:
    """The keyed request or claim of this context."""

    key: str | None = field(default=None, repr=False)
    executor: Any = field(default=None, repr=False)
    """The executor of the open transaction; None before it is open and after it ended."""
    joinable: bool = False
    """There is a claim to join, or will be: sessions are remembered for it."""
    returned: bool = False
    """The handler came to its end, and its work is to be kept."""
    made: list[Any] = field(default_factory=list, repr=False)
    """Sessions that were made before the claim, to work in its transaction later."""
    earlier: list[Any] = field(default_factory=list, repr=False)
    """Sessions that were used before the claim; their transactions are ended when it begins."""
    strays: list[str] = field(default_factory=list)
    """Work that was seen going to another session."""

    def end(self) -> None:
        """Nothing joins any more; a task that goes on for ever keeps no session alive by this."""
        self.executor, self.joinable = None, False
        self.made.clear()
        self.earlier.clear()

    @property
    def key_hash(self) -> str | None:
        """The key as it may stand in logs. Made when a line is written: most requests write none."""
        return None if self.key is None else key_hash(self.key)


before_claims: list[Callable[[Any], None]] = []
"""Told of joining sessions that are made or used outside any claim: where a login runs outside the edge, the
edge must find its sessions."""

current: ContextVar[Current | None] = ContextVar("taptwice_current", default=None)


class KeyHashFilter(logging.Filter):
    """Gives every log record the attribute ``idempotency_key_hash``: of the request under way, or None.

    Add it to a handler, so that all loggers' lines pass through it:

        handler.addFilter(KeyHashFilter())
    """

    def filter(self, record: logging.LogRecord) -> bool:
        under_way = current.get()
        if getattr(record, "idempotency_key_hash", None) is None:
            record.idempotency_key_hash = None if under_way is None else under_way.key_hash
        return True
