"""Records in a SQL table: which statements a claim, an answer and a sweep are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from taptwice import sql
from taptwice.core.fingerprint import Fingerprint
from taptwice.core.model import Answer, Keyed, Record, pack_headers, unpack_headers
from taptwice.core.plan import Command, Plan, Query, Row, Rows, Together, Value, ask
from taptwice.errors import Misuse, StoreUnavailable

Commands = tuple[Command[Any], ...]

LOCK: Commands = (Query("lock"),)


@dataclass(frozen=True, slots=True)
class Found:
    """What a claim met: whether the lock is ours, since when (database clock), and the record."""

    locked: bool
    begun: float
    record: Record | None


@dataclass(frozen=True, slots=True)
class Entry:
    """Everything that is saved about a finished request. `window` is in seconds."""

    keyed: Keyed
    fingerprint: Fingerprint
    answer: Answer = field(repr=False)
    window: float
    begun: float | None


@dataclass(frozen=True, slots=True)
class Inspected:
    """A record as support sees it. Times are seconds since 1970."""

    id: str
    account: str | None
    key: str | None
    record: Record
    expires_at: float


@dataclass(frozen=True, slots=True)
class Partition:
    """A part of the table, by its name in the database, and what has become of it."""

    name: str
    change: Literal["created", "dropped"]


@dataclass(frozen=True, slots=True)
class SqlStore:
    """The joined capability on a SQL dialect.

    `in_clear` False keeps account and key out of the table: only the hash of the two is stored.
    `now` replaces the database's clock (seconds since 1970); tests alone give it.
    """

    dialect: sql.Dialect
    in_clear: bool = True
    now: float | None = None

    def claim(self, keyed: Keyed, wait: float, before: Commands = (), after: Commands = ()) -> Plan[Found]:
        """Lock the key and look for its record. `wait` is in seconds; 0 does not wait."""
        parameters = (("lock", keyed.lock), ("id", keyed.id), ("wait_ms", int(wait * 1000)))
        # On SQLite, where the right to write is the lock, `Begin` and `Join` take it. This first write, of
        # nothing, brings up what would only come up behind the work: that the database cannot be written to.
        lock = LOCK if self.dialect == "sqlite" else ()
        replies = yield from ask(Together((*before, *lock, Query("claim", parameters), *after)))
        rows: Rows = replies[len(before) + len(lock)]
        locked, begun, read_only, *record = rows[0]
        if read_only:
            raise StoreUnavailable("the database is read-only: it may be a standby or in maintenance")
        return Found(bool(locked), begun, None if record[0] is None else _record(record))

    def insert(self, entry: Entry, before: Commands = (), after: Commands = ()) -> Plan[bool]:
        """Save a finished answer in the transaction that claimed its key; False if that was ended.

        On SQLite other commands tell that: `Release` and `Commit` raise `Torn`.
        """
        query = Query("insert", (*self._values(entry), ("begun", entry.begun)))
        replies = yield from ask(Together((*before, query, *after)))
        return self.dialect == "sqlite" or bool(replies[len(before)])

    def insert_late(self, entry: Entry) -> Plan[bool]:
        """Save an answer after the claim's transaction was lost; False when there is a record by now."""
        rows = yield from ask(Query("insert_late", self._values(entry)))
        return bool(rows)

    def look(self, keyed: Keyed) -> Plan[Record | None]:
        """The record of a key, if there is one, without a lock."""
        rows = yield from ask(Query("look", (("id", keyed.id),)))
        return _record(rows[0]) if rows else None

    def inspect(self, key: str, account: str | None = None) -> Plan[tuple[Inspected, ...]]:
        """The record of a key in an account, or its records in all accounts (which reads the whole table)."""
        if account is None:
            rows = yield from ask(Query("search", (("key", key),)))
        else:
            rows = yield from ask(Query("inspect", (("id", Keyed(account, key).id),)))
        return tuple(_inspected(row) for row in rows)

    def sweep(self, batch: int) -> Plan[int]:
        """Forget at most `batch` records whose window is over; how many there were."""
        rows = yield from ask(Query("sweep", (("batch", batch), ("now", self.now))))
        return len(rows)

    def partitions(self) -> Plan[tuple[Partition, ...]]:
        """Make the partitions of the coming days, drop those that are past; PostgreSQL only."""
        rows = yield from ask(Query("partitions", (("now", self.now),)))
        return tuple(Partition(name, change) for change, name in rows)

    def _values(self, entry: Entry) -> tuple[tuple[str, Value], ...]:
        digest = entry.fingerprint.digest()
        if digest is None:
            raise Misuse(f"fingerprint version {entry.fingerprint.version} is not known to this release")
        return (
            ("id", entry.keyed.id),
            ("window", float(entry.window)),
            ("version", entry.fingerprint.version),
            ("status", entry.answer.status),
            ("fingerprint", digest),
            ("account", entry.keyed.account if self.in_clear else ""),
            ("key", entry.keyed.key if self.in_clear else ""),
            ("headers", pack_headers(entry.answer.headers)),
            ("body", entry.answer.body),
            ("now", self.now),
        )


def _record(row: Sequence[Any]) -> Record:
    version, digest, status, headers, body, created_at = row
    answer = Answer(
        status,
        unpack_headers(bytes(headers)),
        None if body is None else bytes(body),
    )
    return Record(version, bytes(digest), answer, float(created_at))


def _inspected(row: Row) -> Inspected:
    identity, account, key, *record, expires_at = row
    if not key:  # a key has a character at least: only the hash of the two is stored
        account = key = None
    return Inspected(identity, account, key, _record(record), float(expires_at))
