"""Bodies that can be sent again: bytes, a file from where it stands, a function that makes the body anew.

A generator can be read once. To send what is left of it would be a second request with an empty body, and
servers have answered 200 to those.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from taptwice.errors import Misuse

__all__ = ["Body", "in_memory"]

_PIECE = 65536


class Body:
    """Makes a body as often as it is asked to."""

    __slots__ = ("_make", "headers", "replayable")

    def __init__(self, content: Any, *, awaiting: bool) -> None:
        """`awaiting`: the library wants async iterators of what is read piece by piece."""
        self.headers: Mapping[str, str] = {}
        self.replayable = True
        self._make: Callable[[], Any] = lambda: content
        if callable(content):
            self._make = content
        elif hasattr(content, "read") and hasattr(content, "seek"):
            start = content.tell()
            self.headers = {"Content-Length": str(content.seek(0, 2) - start)}
            pieces = _apieces if awaiting else _pieces
            self._make = lambda: pieces(content, start)
        elif hasattr(content, "__next__") or hasattr(content, "__anext__") or hasattr(content, "read"):
            self.replayable = False

    def make(self) -> Any:
        """The body for the next attempt."""
        return self._make()


def _pieces(file: Any, start: int) -> Iterator[bytes]:
    file.seek(start)
    while piece := file.read(_PIECE):
        yield piece


async def _apieces(file: Any, start: int) -> AsyncIterator[bytes]:
    for piece in _pieces(file, start):
        yield piece


def in_memory(content: Any) -> bytes | str | None:
    """The body as a whole, for an intent that is bound to it."""
    if callable(content):
        content = content()
    if hasattr(content, "read"):
        content = content.read()
    if content is None or isinstance(content, bytes | str):
        return content
    raise Misuse(
        f"an intent that is remembered is bound to its body, which is a {type(content).__name__} here: pass"
        " bytes, text or a file, or a function that returns one of them"
    )
