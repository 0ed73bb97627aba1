"""Holding an answer back until its transaction is committed: messages in, instructions out.

The messages are those of ASGI (``http.response.start``, ``http.response.body`` …). Nothing here sends or
awaits. An answer is held when its length is known and small enough to be saved; a stream is committed as
a tombstone before its first byte, and then passes untouched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from taptwice.core.model import Answer, Headers
from taptwice.core.policy import Policy
from taptwice.errors import RequestIncomplete, RequestTooLarge
from taptwice.http.request import RawHeaders

Message = Mapping[str, Any]

BODILESS = frozenset({204, 205, 304})


@dataclass(frozen=True, slots=True)
class Pass:
    """Send these messages now."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Hold:
    """Nothing to send yet."""


@dataclass(frozen=True, slots=True)
class Conclude:
    """The answer is known: save it (no body: a tombstone), commit, then send `messages`."""

    answer: Answer
    messages: tuple[Message, ...] = field(repr=False)


class Holding:
    """One answer on its way out, of a request whose transaction is open."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._start: Message | None = None
        self._body = bytearray()
        self._concluded = False

    def feed(self, message: Message) -> Pass | Hold | Conclude:
        """Take the application's next message."""
        if self._concluded:
            return Pass((message,))
        kind = message["type"]
        if kind == "http.response.start":
            self._start = message
            self._body.clear()  # an answer in place of one that was begun and given up
            if self._can_be_held(message):
                return Hold()
            return self._tombstone(message)
        if self._start is None:
            return Pass((message,))  # informational: early hints, debug
        if kind != "http.response.body":
            # A file sent by path, trailers: what cannot be read here is a stream.
            return self._tombstone(self._start, *self._body_so_far(), message)
        self._body += message.get("body", b"")
        more = bool(message.get("more_body", False))
        if len(self._body) > self._policy.save_max_body and more:
            return self._tombstone(self._start, *self._body_so_far())
        if more:
            return Hold()
        self._concluded = True
        start, body = self._start, bytes(self._body)
        whole = {"type": "http.response.body", "body": body}
        return Conclude(answer_of(start, body), (start, whole))

    def _can_be_held(self, start: Message) -> bool:
        if start["status"] in BODILESS:
            return True
        lengths = [value for name, value in start.get("headers", ()) if name.lower() == b"content-length"]
        if not lengths:
            return self._policy.streams == "capture"
        length = lengths[-1]
        return length.isdigit() and int(length[:19]) <= self._policy.save_max_body

    def _body_so_far(self) -> tuple[Message, ...]:
        if not self._body:
            return ()
        return ({"type": "http.response.body", "body": bytes(self._body), "more_body": True},)

    def _tombstone(self, *messages: Message) -> Conclude:
        self._concluded = True
        return Conclude(answer_of(messages[0], None), messages)


class Reading:
    """One request body on its way in. `length` is what was announced; 0 where nothing was."""

    def __init__(self, headers: RawHeaders, limit: int) -> None:
        sent = {name.lower(): value for name, value in headers}
        announced = sent.get(b"content-length", b"")
        self.length = int(announced[:19]) if announced.isdigit() else 0  # 19 digits are too large for anybody
        # Encoded: somebody may have decoded it for us.
        self._may_be_shorter = b"content-encoding" in sent
        self._limit = limit
        self._body = bytearray()
        self._check(self.length)

    @property
    def missing(self) -> int:
        """How much of the announced length is still to come."""
        return self.length - len(self._body)

    def _check(self, length: int) -> None:
        if length > self._limit:
            raise RequestTooLarge(f"The request body is larger than {self._limit} bytes.")

    def feed(self, chunk: bytes) -> None:
        """Take the next part. Raises `RequestTooLarge`."""
        self._body += chunk
        self._check(len(self._body))

    def end(self) -> bytes:
        """The whole. Raises `RequestIncomplete`."""
        if len(self._body) < self.length and not self._may_be_shorter:
            raise RequestIncomplete
        return bytes(self._body)


def answer_of(start: Message, body: bytes | None) -> Answer:
    """The neutral form of an ASGI answer."""
    headers: Headers = tuple(
        (name.decode("latin-1"), value.decode("latin-1")) for name, value in start.get("headers", ())
    )
    return Answer(start["status"], headers, body)


def messages_of(answer: Answer) -> tuple[Message, Message]:
    """An answer of ours as ASGI messages; Content-Length is made anew, or left out where a body cannot be."""
    body = answer.body or b""
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
    if answer.status not in BODILESS:
        headers.append((b"content-length", str(len(body)).encode()))
    return (
        {"type": "http.response.start", "status": answer.status, "headers": headers},
        {"type": "http.response.body", "body": b"" if answer.status in BODILESS else body},
    )
