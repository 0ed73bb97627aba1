"""The joined guarantee as plans: claim, work and answer in one transaction.

    join ........ the caller's transaction: claim inside it (settle keeps or undoes; the caller commits)
    open_claim .. a transaction of ours: begin and claim, waiting while holding nothing
    conclude .... save the answer and commit
    abandon ..... roll back and give the connection back

Two things are not handled by hoping. When the last statement of ours meets a record that should not be
there (a snapshot older than the lock, a server that ignores advisory locks), everything is rolled back
and that record answers. When somebody ended the transaction under the claim, its work is committed and
the answer is saved at once in a transaction of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from taptwice.core.decide import Decision, decide
from taptwice.core.fingerprint import Fingerprint
from taptwice.core.model import Answer, Keyed, Record
from taptwice.core.plan import (
    Begin,
    Close,
    Command,
    Commit,
    Join,
    Now,
    Plan,
    Release,
    Rollback,
    Savepoint,
    Sleep,
    Undo,
    ask,
)
from taptwice.errors import (
    Busy,
    CommitUnknown,
    ConstraintViolated,
    Contention,
    InFlight,
    Inseparable,
    KeyReused,
    StoreUnavailable,
    Torn,
)
from taptwice.stores.sql import Entry, Found, SqlStore

FIRST_POLL, LONGEST_POLL = 0.02, 0.1
"""Seconds between two looks at a key that somebody else works on; doubled from the first to the longest."""

TURN = 5.0
"""Seconds to wait for the right to write to a database that has one writer, whatever the key."""

BUSY = "The database is busy with another request; this one was not begun."
"""What is told after that: the key itself may be new."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a claim asks for. Durations in seconds."""

    keyed: Keyed
    fingerprint: Fingerprint
    window: float
    wait: float
    savepoint: bool = True


@dataclass(frozen=True, slots=True)
class Claimed:
    """The work is ours to do. `begun` names the transaction: the answer must be saved in the same one."""

    begun: float


@dataclass(frozen=True, slots=True)
class Replayed:
    """It was done before; this is what was answered."""

    record: Record


@dataclass(frozen=True, slots=True)
class Concluded:
    """The answer to send. `replayed`: another attempt's; `torn`: saved outside the claim's transaction."""

    answer: Answer
    replayed: bool = False
    torn: bool = False


def join(store: SqlStore, asked: Asked) -> Plan[Claimed | Replayed]:
    """Claim inside the caller's transaction.

    Raises `InFlight`, `KeyReused`, `StoreUnavailable`; `Contention` when the caller must run his
    transaction again; `Misuse` when he is in none.
    """
    try:
        found = yield from store.claim(asked.keyed, asked.wait, (Join(asked.wait),), (Savepoint(),))
    except Busy as error:
        raise InFlight(error.detail) from error
    decision = _decide(found, asked.fingerprint)
    if decision is Decision.PROCEED:
        return Claimed(found.begun)
    yield from ask(Release())
    return _refuse_or_replay(decision, found)


def settle(store: SqlStore, asked: Asked, claimed: Claimed, answer: Answer) -> Plan[None]:
    """Keep the work and save its answer; the commit is the caller's.

    Raises `Contention` when a record is there that the caller's snapshot could not show: his
    transaction is lost and must run again. Raises `Torn` when it was ended under the claim.
    """
    entry = Entry(asked.keyed, asked.fingerprint, answer, asked.window, claimed.begun)
    try:
        saved = yield from store.insert(entry, before=(Release(),))
    except ConstraintViolated as error:
        raise Contention(
            "this key was finished by a transaction that yours cannot see; roll back and run yours again"
        ) from error
    if not saved:
        raise Torn


def withdraw() -> Plan[None]:
    """Undo the work since the claim, inside the caller's transaction; nothing of ours stays."""
    yield from ask(Undo())


def open_claim(store: SqlStore, asked: Asked) -> Plan[Claimed | Replayed]:
    """Begin a transaction and claim in it. Between two tries no connection is held.

    Raises `InFlight` after `asked.wait`, `KeyReused`, `StoreUnavailable`. Only `Claimed` leaves the
    transaction open.
    """
    started = now = yield from ask(Now())
    pause = FIRST_POLL
    while True:
        patience, refusal = asked.wait, None
        try:
            found = yield from _attempt(store, asked, max(asked.wait, TURN) - (now - started))
        except Contention:
            # Not this key: the one writer of the database, or a serialization failure at the claim.
            patience, refusal = max(asked.wait, TURN), BUSY
        else:
            decision = _decide(found, asked.fingerprint)
            if decision is Decision.PROCEED:
                return Claimed(found.begun)
            yield from abandon()
            if decision is not Decision.HELD:
                return _refuse_or_replay(decision, found)
        now = yield from ask(Now())
        if now + pause > started + patience:
            raise InFlight(refusal)
        yield from ask(Sleep(pause))
        pause = min(2 * pause, LONGEST_POLL)


def conclude(store: SqlStore, asked: Asked, claimed: Claimed, answer: Answer, undo: bool) -> Plan[Concluded]:
    """Save the answer, commit and give the connection back. `undo`: without the work since the claim.

    Raises `Contention` when another transaction came between and left no record, `CommitUnknown` when
    nobody knows whether the commit happened, `StoreUnavailable`; or whatever error of the database the
    commit itself brought up. Nothing is saved then, and the connection is back in every case.
    """
    entry = Entry(asked.keyed, asked.fingerprint, answer, asked.window, claimed.begun)
    try:
        if undo and not asked.savepoint:
            return (yield from _undo_all(store, entry))
        first: tuple[Command[None], ...] = (Undo() if undo else Release(),) if asked.savepoint else ()
        try:
            saved = yield from store.insert(entry, first, (Commit(),))
        except Torn:
            saved = False
        except Inseparable:
            return (yield from _undo_all(store, entry))
        except (ConstraintViolated, Contention) as error:
            yield from ask(Rollback())
            return (yield from _replay_instead(store, asked, error))
        if saved:
            return Concluded(answer)
        yield from end_foreign()
        try:
            return (yield from _save_late(store, entry, torn=True))
        except StoreUnavailable as error:
            raise CommitUnknown("the work is committed, and its answer may not be saved") from error
    finally:
        yield from abandon()


def abandon() -> Plan[bool]:
    """Roll back what is open, if anything is, and give the connection back.

    False where nothing was open, as far as the driver knows.
    """
    try:
        was_open = yield from ask(Rollback())
    finally:
        yield from ask(Close())
    return was_open


def _attempt(store: SqlStore, asked: Asked, in_line: float) -> Plan[Found]:
    after = (Savepoint(),) if asked.savepoint else ()
    try:
        return (yield from store.claim(asked.keyed, 0, (Begin(in_line=in_line),), after))
    except BaseException:
        yield from abandon()
        raise


def _decide(found: Found, fingerprint: Fingerprint) -> Decision:
    return decide(found.locked, found.record, fingerprint)


def _refuse_or_replay(decision: Decision, found: Found) -> Replayed:
    if decision is Decision.REPLAY and found.record is not None:
        return Replayed(found.record)
    if decision is Decision.MISMATCH:
        raise KeyReused
    if decision is Decision.UNREADABLE:
        raise StoreUnavailable("the record of this key was written by a newer release")
    raise InFlight


def end_foreign() -> Plan[None]:
    """The handler ended our transaction. If it began another, that one's work is its own: keep it."""
    try:
        yield from ask(Commit())
    except Torn:
        return


def _undo_all(store: SqlStore, entry: Entry) -> Plan[Concluded]:
    """Undo the work where that undoes the claim too."""
    yield from ask(Rollback())
    return (yield from _save_late(store, entry, torn=False))


def _save_late(store: SqlStore, entry: Entry, torn: bool) -> Plan[Concluded]:
    yield from ask(Begin(TURN))
    if (yield from store.insert_late(entry)):
        yield from ask(Commit())
        return Concluded(entry.answer, torn=torn)
    record = yield from store.look(entry.keyed)
    if record is None:
        raise Contention
    # Another attempt came between while no lock was held: its answer is the one that every retry will get.
    return Concluded(_answer_of(record, entry.fingerprint), replayed=True, torn=torn)


def _replay_instead(store: SqlStore, asked: Asked, error: Exception) -> Plan[Concluded]:
    yield from ask(Begin())
    record = yield from store.look(asked.keyed)
    if record is None:
        raise Contention("another transaction came between; nothing was done") from error
    return Concluded(_answer_of(record, asked.fingerprint), replayed=True)


def _answer_of(record: Record, fingerprint: Fingerprint) -> Answer:
    decision = decide(True, record, fingerprint)
    return _refuse_or_replay(decision, Found(True, 0.0, record)).record.answer
