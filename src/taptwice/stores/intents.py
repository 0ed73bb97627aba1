"""Intents in a SQL table: what a client means to have done elsewhere, under which key, and the answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from taptwice import sql
from taptwice.core.model import Answer, pack_headers, unpack_headers
from taptwice.core.plan import Plan, Query, Row, Value, ask

State = Literal["made", "sent", "done", "dropped"]


@dataclass(frozen=True, slots=True)
class Intent:
    """One intent, as it is remembered. Times are seconds since 1970, by the database's clock."""

    name: str
    key: str
    fingerprint: bytes | None = field(repr=False)
    """Of the request that it was first sent as; None before that."""
    made_at: float
    sent_at: float | None
    """Before the first byte: from here on it may have arrived, and the server's window may run."""
    done_at: float | None
    dropped_at: float | None
    answer: Answer | None = field(repr=False)
    """The final answer. Its body is None where only the fact was kept."""
    now: float = field(repr=False, compare=False)

    @property
    def state(self) -> State:
        """made: not sent. sent: it may have been done, or not. done: answered. dropped: given up."""
        if self.done_at is not None:
            return "done"
        if self.dropped_at is not None:
            return "dropped"
        return "made" if self.sent_at is None else "sent"

    @property
    def age(self) -> float:
        """Seconds since it may first have reached the server; 0.0 before that."""
        return 0.0 if self.sent_at is None else self.now - self.sent_at


@dataclass(frozen=True, slots=True)
class SqlIntents:
    """Intents on a SQL dialect. `now` replaces the database's clock (seconds since 1970); for tests."""

    dialect: sql.Dialect
    now: float | None = None

    def make(self, name: str, key: str) -> Plan[Intent | None]:
        """Write an intent down, and read what is there. None: a snapshot hides what another one wrote."""
        _ = yield from self._ask("intent_make", name=name, key=key)
        return (yield from self.look(name))

    def remember(self, name: str, key: str, fingerprint: bytes) -> Plan[Intent | None]:
        """Before the first byte: bind the name to a key and a request, unless it is bound. None: dropped."""
        rows = yield from self._ask("intent_remember", name=name, key=key, fingerprint=fingerprint)
        return _intent(rows[0]) if rows else None

    def settle(self, name: str, key: str, answer: Answer) -> Plan[None]:
        """After the last byte: keep the answer, unless there is one or the key is no longer this one."""
        headers = pack_headers(answer.headers)
        _ = yield from self._ask(
            "intent_settle", name=name, key=key, status=answer.status, headers=headers, body=answer.body
        )

    def drop(self, name: str) -> Plan[bool]:
        """Give it up. False: it is not there, was dropped before, or has its answer."""
        return bool((yield from self._ask("intent_drop", name=name)))

    def renew(self, name: str, key: str) -> Plan[bool]:
        """Give it another key. False: it is not there, or it has succeeded."""
        return bool((yield from self._ask("intent_renew", name=name, key=key)))

    def look(self, name: str) -> Plan[Intent | None]:
        """The intent of this name."""
        rows = yield from self._ask("intent_look", name=name)
        return _intent(rows[0]) if rows else None

    def list(self, *, open_only: bool, limit: int) -> Plan[tuple[Intent, ...]]:
        """Those without an answer, the oldest first; or all, the newest first."""
        rows = yield from self._ask("intents_open" if open_only else "intents_all", batch=limit)
        return tuple(map(_intent, rows))

    def purge(self, older_than: float, batch: int) -> Plan[int]:
        """Forget at most `batch` of those that ended more than so many seconds ago; how many there were."""
        return len((yield from self._ask("intents_purge", window=older_than, batch=batch)))

    def _ask(self, statement: str, **parameters: Value) -> Plan[tuple[Row, ...]]:
        return ask(Query(statement, (*parameters.items(), ("now", self.now))))


def _intent(row: Row) -> Intent:
    name, key, fingerprint, made_at, sent_at, done_at, dropped_at, status, headers, body, now = row
    answer = None
    if status is not None:
        kept = None if body is None else bytes(body)
        answer = Answer(status, unpack_headers(bytes(headers)), kept)
    asked = None if fingerprint is None else bytes(fingerprint)
    return Intent(name, key, asked, made_at, sent_at, done_at, dropped_at, answer, now)
