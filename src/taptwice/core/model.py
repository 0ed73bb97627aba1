"""The values everything else speaks about: who asked for what, and what was answered."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

Headers = tuple[tuple[str, str], ...]


def _digest(*parts: bytes) -> bytes:
    """SHA-256 over length-prefixed parts, so that no two lists of parts can be glued into one."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "big"))
        whole.update(part)
    return whole.digest()


def key_hash(key: str) -> str:
    """The form in which a key or an account may stand in logs and metrics: 16 hexadecimal digits."""
    return _digest(b"taptwice/log", key.encode("utf-8", "surrogatepass")).hex()[:16]


def is_account(value: object) -> bool:
    """Whether a value can be an account: text that every database can store, not empty."""
    if not isinstance(value, str) or not value or "\0" in value:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in value)


@dataclass(frozen=True, slots=True)
class Keyed:
    """An idempotency key and the account whose key it is: together they name one intent."""

    account: str
    key: str
    id: bytes = field(init=False, repr=False)
    """16 bytes: the primary key of the record."""

    def __post_init__(self) -> None:
        pair = (self.account.encode("utf-8", "surrogatepass"), self.key.encode("utf-8", "surrogatepass"))
        object.__setattr__(self, "id", _digest(b"taptwice/record", *pair)[:16])

    @property
    def lock(self) -> int:
        """A signed 64-bit number to lock on. Two pairs that share it only wait for each other."""
        return int.from_bytes(self.id[:8], "big", signed=True)


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP-shaped answer. A body of None is a tombstone: the effect is known, the body was not kept."""

    status: int
    headers: Headers = ()
    body: bytes | None = b""

    def json(self) -> Any:
        """The body, parsed. A tombstone gives None."""
        return None if self.body is None else json.loads(self.body)

    def header(self, name: str) -> str | None:
        """The first value of a header; names are compared without case."""
        wanted = name.lower()
        return next((value for known, value in self.headers if known.lower() == wanted), None)


@dataclass(frozen=True, slots=True)
class Record:
    """What the store remembers of a finished request. Times are seconds since 1970."""

    version: int
    digest: bytes = field(repr=False)
    answer: Answer = field(repr=False)
    created_at: float


# RFC 9110 section 5.5: a field that holds one of these is refused, or read with a space in its place.
_NO_FIELD = str.maketrans(dict.fromkeys("\r\n\0", " "))


def pack_headers(headers: Headers) -> bytes:
    """Header lines as bytes, one a line, whatever a value holds. Raises UnicodeEncodeError beyond Latin-1."""
    return "\n".join([f"{name}:{value}".translate(_NO_FIELD) for name, value in headers]).encode("latin-1")


def unpack_headers(packed: bytes) -> Headers:
    """The reverse of `pack_headers`."""
    if not packed:
        return ()
    lines = (line.partition(":") for line in packed.decode("latin-1").split("\n"))
    return tuple((name, value) for name, _, value in lines)
