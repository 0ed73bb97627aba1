"""A TCP proxy in front of PostgreSQL that reads the client's half of the protocol.

It counts round trips (each Query or Sync is answered by one ReadyForQuery, for which the client waits) and
statements, and loses the connection at COMMIT when told to: before the server has seen it, or after the
server has answered and before the client hears of it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

Cut = Literal["before", "after"]


@dataclass
class Seen:
    """What came by: round trips, statements, and COMMITs among them."""

    trips: int = 0
    statements: int = 0
    commits: int = 0

    def __sub__(self, other: Seen) -> Seen:
        return Seen(
            self.trips - other.trips, self.statements - other.statements, self.commits - other.commits
        )


class Proxy:
    """`url` is the server's, by way of here."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname or "127.0.0.1", parts.port or 5432)
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.url = parts._replace(netloc=f"{parts.username or 'postgres'}@127.0.0.1:{port}").geturl()
        self.cut: Cut | None = None
        self._seen = Seen()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def seen(self) -> Seen:
        with self._lock:
            return Seen(self._seen.trips, self._seen.statements, self._seen.commits)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for each in self._sockets:
            _end(each)
        for thread in self._threads[1:]:
            thread.join()
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [client, server]
            lost = threading.Event()
            for target in (self._from_client, self._from_server):
                thread = threading.Thread(target=target, args=(client, server, lost), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _from_client(self, client: socket.socket, server: socket.socket, lost: threading.Event) -> None:
        started, pending, committing = False, b"", False
        with contextlib.suppress(OSError):
            while chunk := client.recv(65536):
                pending += chunk
                forward = b""
                while (size := _size(pending, started)) is not None:
                    message, pending = pending[:size], pending[size:]
                    forward += message
                    if not started:
                        started = size > 16  # the ones before it, which ask for encryption, are shorter
                        continue
                    committing |= self._note(message)
                    if committing and self.cut == "before":
                        self.cut, forward = None, b""
                        _end(server)
                        _end(client)
                        return
                    if message[:1] in b"QS":
                        if committing and self.cut == "after":
                            self.cut = None
                            lost.set()
                        committing = False
                if forward:
                    server.sendall(forward)
        _end(server)

    def _from_server(self, client: socket.socket, server: socket.socket, lost: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while chunk := server.recv(65536):
                if lost.is_set():
                    break  # the answer to COMMIT: nobody hears it
                client.sendall(chunk)
        _end(client)

    def _note(self, message: bytes) -> bool:
        """Count a message; whether it is, or prepares, a COMMIT."""
        kind = message[:1]
        commits = kind in b"QP" and b"COMMIT" in message
        with self._lock:
            self._seen.trips += kind in b"QS"
            self._seen.statements += kind in b"QE"
            self._seen.commits += commits
        return commits


def _size(data: bytes, started: bool) -> int | None:
    """How long the first message is; None when it is not whole. Before the startup none has a type."""
    head = 1 if started else 0
    if len(data) < head + 4:
        return None
    size = head + int.from_bytes(data[head : head + 4], "big")
    return size if len(data) >= size else None


def _end(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxy(url: str) -> Iterator[Proxy]:
    made = Proxy(url)
    try:
        yield made
    finally:
        made.close()
