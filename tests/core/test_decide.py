"""The table of decisions, row by row."""

from __future__ import annotations

import pytest

from taptwice.core import fingerprint
from taptwice.core.decide import Decision, decide
from taptwice.core.model import Answer, Record

ASKED = fingerprint.of_value({"cents": 100})
OTHER = fingerprint.of_value({"cents": 101})


def record(of: fingerprint.Fingerprint, version: int | None = None) -> Record:
    return Record(of.version if version is None else version, of.digest(), Answer(201), 0.0)


@pytest.mark.parametrize(
    ("locked", "found", "decision"),
    [
        (False, None, Decision.HELD),
        (False, record(ASKED), Decision.HELD),
        (False, record(OTHER), Decision.HELD),
        (True, None, Decision.PROCEED),
        (True, record(ASKED), Decision.REPLAY),
        (True, record(OTHER), Decision.MISMATCH),
        (True, record(ASKED, version=99), Decision.UNREADABLE),
        (True, record(OTHER, version=99), Decision.UNREADABLE),
    ],
)
def test_the_table(locked: bool, found: Record | None, decision: Decision) -> None:
    assert decide(locked, found, ASKED) is decision


def test_a_tombstone_is_a_record_like_any_other() -> None:
    tombstone = Record(ASKED.version, ASKED.digest(), Answer(200, (), None), 0.0)
    assert decide(True, tombstone, ASKED) is Decision.REPLAY
