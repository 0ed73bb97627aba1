"""What a claim that met this state of affairs leads to. This table is the whole of it.

    the lock      the record        the fingerprint            so
    ------------  ----------------  -------------------------  ----------------------------------
    not ours      cannot be seen    cannot be compared         HELD      wait, or 409 in-progress
    ours          none              nothing to compare         PROCEED   do the work
    ours          there             equal                      REPLAY    give its answer again
    ours          there             differs                    MISMATCH  422 key-reused
    ours          there             of a version not known     UNREADABLE 503: a newer release wrote it

A joined record is only ever visible finished, so there is no row for "begun". Nor is there one for a
record beyond its window: while it exists it replays, since expiry permits to forget, not to repeat.
A tombstone is a record like any other; its answer has no body.
"""

from __future__ import annotations

from enum import Enum

from taptwice.core.fingerprint import Fingerprint
from taptwice.core.model import Record


class Decision(Enum):
    """One row of the table above."""

    HELD = "held"
    PROCEED = "proceed"
    REPLAY = "replay"
    MISMATCH = "mismatch"
    UNREADABLE = "unreadable"


def decide(locked: bool, record: Record | None, fingerprint: Fingerprint) -> Decision:
    """Look the state of affairs up in the table."""
    if not locked:
        return Decision.HELD
    if record is None:
        return Decision.PROCEED
    digest = fingerprint.digest(record.version)
    if digest is None:
        return Decision.UNREADABLE
    return Decision.REPLAY if digest == record.digest else Decision.MISMATCH
