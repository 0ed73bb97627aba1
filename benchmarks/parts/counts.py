"""What one new key costs the server, counted and not timed.

A proxy between the two reads the messages of PostgreSQL's protocol. Statements are what the server says it
completed; a trip is a time that the client spoke after it had listened. The proxy holds every message back
for a moment, so that two that are sent at once are not taken for two trips. Commits are the server's own
count, `pg_stat_database.xact_commit`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import psycopg

from benchmarks.parts.driver import LIBRARIES
from benchmarks.parts.measure import Result, Variant

HELD_BACK: Final = 0.001
FEW, MANY = 10, 60

FURTHER_TRIPS = {
    "psycopg": 0,
    "asyncpg": 1,
    "SQLAlchemy, Connection on psycopg": 2,
    "SQLAlchemy, AsyncConnection on asyncpg": 2,
}


@dataclass(frozen=True, slots=True)
class Count:
    trips: float
    statements: float
    commits: float


class Proxy:
    """Listens, connects every client on to the server, and counts."""

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self.trips = 0
        self.statements = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        user = self._target.netloc.rpartition("@")[0]
        port = self._listener.getsockname()[1]
        return self._target._replace(netloc=f"{user}@127.0.0.1:{port}").geturl()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(
                (self._target.hostname or "127.0.0.1", self._target.port or 5432)
            )
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            listened = [True]
            for pump in (self._from_client, self._from_server):
                threading.Thread(target=pump, args=(client, server, listened), daemon=True).start()

    def _from_client(self, client: socket.socket, server: socket.socket, listened: list[bool]) -> None:
        for data in _chunks(client, server):
            with self._lock:
                self.trips += listened[0]
                listened[0] = False
            server.sendall(data)

    def _from_server(self, client: socket.socket, server: socket.socket, listened: list[bool]) -> None:
        pending = b""
        for data in _chunks(server, client):
            if data != b"N":  # no to encryption has no length
                pending += data
            with self._lock:
                listened[0] = True
                while len(pending) >= 5:  # a letter, and a length that counts itself
                    length = 1 + int.from_bytes(pending[1:5], "big")
                    if len(pending) < length:
                        break
                    # CommandComplete, or PortalSuspended: asyncpg's fetchval asks for one row and no end.
                    self.statements += pending[:1] in (b"C", b"s")
                    pending = pending[length:]
            client.sendall(data)


def _chunks(source: socket.socket, other: socket.socket) -> Iterator[bytes]:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            time.sleep(HELD_BACK)
            yield data
    for each in (source, other):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def section(url: str) -> list[Result]:
    """One new key on one connection."""
    results = []
    for library, (opened, _) in LIBRARIES.items():
        group = f"counts · {library}"
        counts: dict[str, Count] = {}
        for name in ("bare", "textbook", "by hand", "ours", "ours + savepoint", "guard"):
            proxy = Proxy(url)
            with opened(proxy.url) as variants:
                counts[name] = _count(url, proxy, variants, name)
            proxy.close()
        bare = counts["bare"]
        for name, count in counts.items():
            further = count.trips - bare.trips
            limit = FURTHER_TRIPS[library] if name == "ours" else None
            shown = f"{count.trips:.0f} trips, {count.statements:.0f} statements, {count.commits:.0f} commit"
            goal = "" if limit is None else f"≤ {limit} further trips, 1 commit"
            met = None if limit is None else round(further) <= limit and round(count.commits) == 1
            results.append(Result(group, name, goal, shown, met))
    return results


def _count(url: str, proxy: Proxy, variants: Mapping[str, Variant], name: str) -> Count:
    variant = variants[name]
    variant(FEW)  # statements are prepared, types are looked up
    before, commits = (proxy.trips, proxy.statements), _commits(url, variant)
    once = proxy.trips - before[0], proxy.statements - before[1]
    variant(MANY)
    trips, statements = (
        proxy.trips - before[0] - once[0],
        proxy.statements - before[1] - once[1],
    )
    made = _commits(url, variant) - commits - 2  # the first reading, and the one key of the second
    return Count(trips / MANY, statements / MANY, made / MANY)


def _commits(url: str, variant: Variant) -> int:
    """The database's commits so far. A backend tells of its own at the end of one, once a second."""
    time.sleep(1.2)
    variant(1)
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(
            "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
    assert row is not None
    return int(row[0])
