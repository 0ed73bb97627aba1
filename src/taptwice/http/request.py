"""What is known of a request, and how a handler says that its answer is not to be saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from taptwice.core.header import has_key
from taptwice.core.policy import Policy

RawHeaders = Sequence[tuple[bytes, bytes]]


class NotSaved(Exception):
    """Raised by a handler: send this answer, save nothing, undo the work, leave the key free.

    `answer` is whatever the handler could have returned.
    """

    def __init__(self, answer: Any) -> None:
        super().__init__("an answer that is not saved")
        self.answer = answer


@dataclass(slots=True)
class Request:
    """What the edge knows of a request. `path` and `query` as they stood on the wire.

    `body` is whole once it has been read.
    """

    method: str
    path: bytes
    route: str
    query: bytes
    headers: RawHeaders = field(repr=False)
    body: bytes = field(repr=False, default=b"")

    def has(self, name: str) -> bool:
        wanted = name.lower().encode("latin-1")
        return any(known.lower() == wanted for known, _ in self.headers)

    def may_be_keyed(self, policy: Policy) -> bool:
        """False: it passes without being read or queued."""
        return policy.key_pointer is not None or has_key(self.headers, policy.key)
