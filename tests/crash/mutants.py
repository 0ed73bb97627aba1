"""Flows with one bug each. A check that does not find them proves nothing."""

from __future__ import annotations

from typing import Any

from taptwice.core import fingerprint
from taptwice.core.model import Answer, Keyed
from taptwice.core.plan import Begin, Command, Commit, Plan, Query, Release, Savepoint, Together, Undo, ask
from taptwice.errors import ConstraintViolated, StoreUnavailable
from taptwice.flows.transaction import Asked, Claimed, Concluded, Replayed, abandon, conclude, open_claim
from taptwice.stores.sql import Commands, Entry, Found, SqlStore
from tests.crash.worlds import Flow


class CheckThenInsert(SqlStore):
    """Looks for the record, and takes no lock."""

    def claim(self, keyed: Keyed, wait: float, before: Commands = (), after: Commands = ()) -> Plan[Found]:
        yield from ask(Together(before))
        record = yield from self.look(keyed)
        yield from ask(Together(after))
        return Found(True, 0.0, record)

    def insert(self, entry: Entry, before: Commands = (), after: Commands = ()) -> Plan[bool]:
        yield from ask(Together(before))
        if not (yield from self.insert_late(entry)):
            raise ConstraintViolated
        yield from ask(Together(after))
        return True


class LookThenLock(SqlStore):
    """Takes the lock, but has looked before."""

    def claim(self, keyed: Keyed, wait: float, before: Commands = (), after: Commands = ()) -> Plan[Found]:
        yield from ask(Together(before))
        record = yield from self.look(keyed)
        found = yield from super().claim(keyed, wait, (), after)
        return Found(found.locked, found.begun, record)


class NoLock(Flow):
    store = CheckThenInsert


class LateLock(Flow):
    store = LookThenLock


class RecordAfterCommit(Flow):
    """The work commits; the record comes in a second transaction."""

    def conclude(
        self, store: SqlStore, asked: Asked, claimed: Claimed, answer: Answer, undo: bool
    ) -> Plan[Concluded]:
        entry = Entry(asked.keyed, asked.fingerprint, answer, asked.window, claimed.begun)
        end: tuple[Command[Any], ...] = (Undo() if undo else Release(),) if asked.savepoint else ()
        try:
            yield from ask(Together((*end, Commit())))
            yield from ask(Begin())
            yield from store.insert_late(entry)
            yield from ask(Commit())
        finally:
            yield from abandon()
        return Concluded(answer)


class NotUndone(Flow):
    """An answer that was raised is saved, and its work is kept."""

    def conclude(
        self, store: SqlStore, asked: Asked, claimed: Claimed, answer: Answer, undo: bool
    ) -> Plan[Concluded]:
        return conclude(store, asked, claimed, answer, undo=False)


class RecordFirst(Flow):
    """The record is committed before the work, as if it were done."""

    def claim(self, store: SqlStore, asked: Asked, answer: Answer) -> Plan[Claimed | Replayed]:
        claimed = yield from open_claim(store, asked)
        if isinstance(claimed, Claimed):
            entry = Entry(asked.keyed, asked.fingerprint, answer, asked.window, claimed.begun)
            yield from store.insert(entry, after=(Commit(), Begin(), Savepoint()))
        return claimed

    def conclude(
        self, store: SqlStore, asked: Asked, claimed: Claimed, answer: Answer, undo: bool
    ) -> Plan[Concluded]:
        try:
            yield from ask(Together((Undo() if undo else Release(), Commit())))
        finally:
            yield from abandon()
        return Concluded(answer)


class AnyRequest(Flow):
    """One fingerprint for all requests."""

    def asked(self, account: str, key: str, request: bytes, wait: float, savepoint: bool) -> Asked:
        return Asked(Keyed(account, key), fingerprint.of_bytes(b""), 3600, wait, savepoint)


class NoAccount(Flow):
    """The key alone is the id."""

    def asked(self, account: str, key: str, request: bytes, wait: float, savepoint: bool) -> Asked:
        return Asked(Keyed("everybody", key), fingerprint.of_bytes(request), 3600, wait, savepoint)


class ReleaseOnError(Flow):
    """The key is given free when the end went wrong, though the effect may be there."""

    def conclude(
        self, store: SqlStore, asked: Asked, claimed: Claimed, answer: Answer, undo: bool
    ) -> Plan[Concluded]:
        try:
            return (yield from conclude(store, asked, claimed, answer, undo))
        except StoreUnavailable:
            yield from ask(Begin())
            yield from ask(Query("sweep", (("batch", 1000), ("now", 1e12))))
            yield from ask(Commit())
            yield from abandon()
            raise
