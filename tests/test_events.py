"""Events: who is told, in what order, and that a listener harms nobody."""

from __future__ import annotations

import logging

import pytest

from taptwice.core.model import key_hash
from taptwice.events import Event, Outcome, emit
from taptwice.flows.current import Current, KeyHashFilter, current


def test_everybody_is_told_of_everything_in_order(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "taptwice")
    first: list[Event] = []
    second: list[Event] = []
    events = [Event(Outcome.NEW, "a", "k", "POST /charges"), Event(Outcome.FINISHED, status=201)]
    emit(events, [first.append, second.append])
    assert first == second == events
    assert [record.getMessage() for record in caplog.records] == [
        "idempotency key new: POST /charges",
        "idempotency key finished: (no route) -> 201",
    ]


def test_a_listener_that_raises_is_logged_and_the_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Event] = []

    def broken(event: Event) -> None:
        raise ZeroDivisionError

    emit([Event(Outcome.NEW), Event(Outcome.FINISHED)], [broken, heard.append])
    assert [event.outcome for event in heard] == [Outcome.NEW, Outcome.FINISHED]
    assert caplog.text.count("a listener failed on the event") == 2


@pytest.mark.parametrize("outcome", Outcome)
def test_levels(outcome: Outcome, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "taptwice")
    emit([Event(outcome, key="0123456789abcdef", detail="why")], [])
    [record] = caplog.records
    errors = {Outcome.TORN, Outcome.STORE_UNAVAILABLE}
    warnings = {Outcome.MISMATCH, Outcome.STRAY}
    level = logging.ERROR if outcome in errors else logging.WARNING if outcome in warnings else logging.INFO
    assert record.levelno == level
    assert record.name == "taptwice"
    assert record.getMessage().endswith("(why)")
    assert record.idempotency_key_hash == "0123456789abcdef"  # type: ignore[attr-defined]
    assert record.idempotency_outcome == outcome.value  # type: ignore[attr-defined]


def test_the_filter_gives_every_line_the_key_of_its_request() -> None:
    def filtered() -> object:
        record = logging.LogRecord("app", logging.INFO, __file__, 1, "hello", None, None)
        assert KeyHashFilter().filter(record)
        return record.idempotency_key_hash  # type: ignore[attr-defined]

    assert filtered() is None
    token = current.set(Current("order-4711"))
    try:
        assert filtered() == key_hash("order-4711")
    finally:
        current.reset(token)


def test_the_filter_leaves_a_line_that_has_one() -> None:
    record = logging.LogRecord("app", logging.INFO, __file__, 1, "hello", None, None)
    vars(record)["idempotency_key_hash"] = "theirs"
    KeyHashFilter().filter(record)
    assert vars(record)["idempotency_key_hash"] == "theirs"
