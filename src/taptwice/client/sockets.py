"""Time limits and proof for http.client, on which requests and urllib3 stand.

http.client asks a socket for a timeout once and then reads as often as it likes. `LimitedSocket` looks at
the clock before each read and write, as `taptwice.client.limits` does for httpcore. `WholeHead` refuses a
head that ends before its blank line, which http.client takes for a complete answer.
"""

from __future__ import annotations

import http.client
import io
import socket
from typing import Any

from taptwice.client.limits import Until, left

__all__ = ["HeadCut", "LimitedSocket", "WholeHead"]


class LimitedSocket:
    """A connected socket that heeds an `Until` at each read and write; for the rest it is the socket."""

    def __init__(self, inner: socket.socket, timeout: float | None) -> None:
        self._inner = inner
        self._timeout = timeout
        self._readers = 0
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def settimeout(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._inner.settimeout(timeout)

    def sendall(self, data: Any) -> None:
        self._arm()
        if isinstance(self._timeout, Until):
            self._timeout.limit.wrote = True
        self._inner.sendall(data)  # its timeout is for all of the data

    def recv_into(self, buffer: Any) -> int:
        self._arm()
        return self._inner.recv_into(buffer)

    def makefile(self, mode: str) -> io.BufferedReader:
        """A reader ("rb" is all that http.client asks for); the socket stays open until it is closed too."""
        self._readers += 1
        return io.BufferedReader(_Reader(self))

    def close(self) -> None:
        self._closed = True
        self._close_if_unused()

    def reader_closed(self) -> None:
        """One of the readers has been closed."""
        self._readers -= 1
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._closed and self._readers <= 0:
            self._inner.close()

    def _arm(self) -> None:
        if isinstance(self._timeout, Until):
            self._inner.settimeout(left(self._timeout, TimeoutError))


class _Reader(io.RawIOBase):
    def __init__(self, socket: LimitedSocket) -> None:
        self._socket = socket

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._socket.recv_into(buffer)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._socket.reader_closed()


class HeadCut(http.client.HTTPException):
    """The connection ended within the head of the answer."""


class WholeHead(http.client.HTTPResponse):
    """An answer whose head must be complete."""

    def begin(self) -> None:
        inner: Any = self.fp
        lines: Any = _Lines(inner)
        self.fp = lines
        try:
            super().begin()
        finally:
            if self.fp is lines:
                self.fp = inner
        if lines.last not in (b"\r\n", b"\n"):
            self.close()
            raise HeadCut("the connection ended within the head of the answer")


class _Lines:
    """A reader that remembers the last line."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.last = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def readline(self, limit: int = -1) -> bytes:
        self.last = self._inner.readline(limit)
        return self.last
