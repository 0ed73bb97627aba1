"""What comes of an attempt at an intent, without a database."""

from __future__ import annotations

import itertools

import pytest

from taptwice.client.wish import LARGEST_BODY, Wish, fingerprint_of, judge, kept
from taptwice.core.model import Answer
from taptwice.errors import IntentChanged, IntentTooOld, Misuse
from taptwice.stores.intents import Intent

ONE, OTHER = fingerprint_of("POST", "https://x/a", b"1"), fingerprint_of("POST", "https://x/a", b"2")
DAY = 86_400.0
ANSWERS = {
    "none": None,
    "kept": Answer(201, (), b"paid"),
    "kept, empty": Answer(204, (), b""),
    "not its body": Answer(201, (), None),
}


def remembered(fingerprint: bytes = ONE, answer: Answer | None = None, age: float = 0.0) -> Intent:
    done_at = None if answer is None else 1000.0
    return Intent("order-17", "k", fingerprint, 900.0, 1000.0, done_at, None, answer, 1000.0 + age)


# --- the table ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "answer", "age"),
    [*itertools.product((False, True), ANSWERS, (0.0, DAY - 11, DAY - 9, 9 * DAY))],
)
def test_every_row_of_the_table(changed: bool, answer: str, age: float) -> None:
    wish = Wish("order-17", ONE, lasts=10)
    intent = remembered(OTHER if changed else ONE, ANSWERS[answer], age)
    if changed:
        with pytest.raises(IntentChanged, match="order-17"):
            judge(wish, intent, DAY)
    elif answer.startswith("kept"):
        assert judge(wish, intent, DAY), "however old it is"
    elif age + 10 > DAY:
        said = "find out at the server" if answer == "none" else "is done: its answer was 201"
        with pytest.raises(IntentTooOld, match=said):
            judge(wish, intent, DAY)
    else:
        assert not judge(wish, intent, DAY)


def test_the_last_retry_must_lie_in_the_window_too() -> None:
    """The server forgets after 24 h: who begins a second earlier and retries for ten would be done twice."""
    intent = remembered(age=DAY - 1)
    assert not judge(Wish("order-17", ONE, lasts=0.5), intent, DAY)
    with pytest.raises(IntentTooOld):
        judge(Wish("order-17", ONE, lasts=10), intent, DAY)
    assert not judge(Wish("order-17", ONE, lasts=10), intent, float("inf"))


def test_an_intent_that_waited_to_be_sent_is_as_young_as_its_first_attempt() -> None:
    assert remembered().age == 0
    assert remembered(age=5).age == 5
    unsent = Intent("order-17", "k", None, 0.0, None, None, None, None, 9 * DAY)
    assert (unsent.age, unsent.state) == (0, "made")


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800"])
def test_a_name_that_no_table_can_hold(name: str) -> None:
    with pytest.raises(Misuse, match="give it a name"):
        Wish(name, ONE)


# --- what is kept of an answer ------------------------------------------------------------------------------


def answered(body: bytes | None = b"{}", **headers: str) -> Answer:
    pairs = (("Content-Type", "application/json"), ("Location", "/charges/7"), ("Set-Cookie", "s=1"))
    return Answer(201, (*pairs, *((name.replace("_", "-"), value) for name, value in headers.items())), body)


def test_the_body_its_type_and_its_place_are_kept() -> None:
    assert kept(answered(), "answer") == Answer(
        201, (("Content-Type", "application/json"), ("Location", "/charges/7")), b"{}"
    )


@pytest.mark.parametrize(
    ("body", "there"),
    [(b"", True), (b"x" * LARGEST_BODY, True), (b"x" * (LARGEST_BODY + 1), False), (None, False)],
)
def test_a_body_that_is_large_or_was_not_read(body: bytes | None, there: bool) -> None:
    found = kept(answered(body), "answer")
    assert (found.status, found.body) == (201, body if there else None)


def test_what_must_not_be_stored_leaves_its_status() -> None:
    assert kept(answered(Cache_Control="private, No-Store"), "answer") == Answer(201, (), None)
    assert kept(answered(), "key") == Answer(201, (), None)


# --- keys and fingerprints ----------------------------------------------------------------------------------


def test_two_equal_coffees_are_two_intents() -> None:
    """S-052, S-053: a key from the content would merge them."""
    request = fingerprint_of("POST", "https://x/charges", b'{"user": 7, "eur": 5}')
    first, second = Wish("coffee-1", request), Wish("coffee-2", request)
    assert first.request == second.request
    assert first.key != second.key


def test_a_fingerprint_sees_what_is_asked_and_not_who_asks() -> None:
    one = fingerprint_of("POST", "https://me:secret@x:8443/a?b=1#c", b"1")
    assert one == fingerprint_of("post", "https://x:8443/a?b=1", b"1")
    others = [
        fingerprint_of("PUT", "https://x:8443/a?b=1", b"1"),
        fingerprint_of("POST", "https://x/a?b=1", b"1"),
        fingerprint_of("POST", "http://x:8443/a?b=1", b"1"),
        fingerprint_of("POST", "https://x:8443/a?b=2", b"1"),
        fingerprint_of("POST", "https://x:8443/a?b=1", b"2"),
        fingerprint_of("POST", "https://x:8443/a?b=1", b""),
    ]
    assert len({one, *others}) == 7
    frozen = "c86979d5c3de0587099959b19f9341ca67b732203f51eb40bb082e5844a7dbb5"
    assert one.hex() == frozen, "a release that makes another one refuses what is under way"


def test_a_fingerprint_reads_a_body_by_its_meaning() -> None:
    def of(body: bytes, content_type: str) -> bytes:
        return fingerprint_of("POST", "https://x/a", body, content_type)

    assert of(b'{"a": 1, "b": 2}', "application/json") == of(b'{"b":2,"a":1.0}', "application/json")
    assert of(b'{"a": 1}', "application/json") != of(b'{"a": 2}', "application/json")
    assert of(b'{"a": 1}', "application/json") != of(b'{"a": 1}', "text/plain")

    def form(boundary: bytes) -> bytes:
        lines = [
            b"--" + boundary,
            b'Content-Disposition: form-data; name="a"',
            b"",
            b"1",
            b"--" + boundary + b"--",
        ]
        return of(b"\r\n".join(lines), f"multipart/form-data; boundary={boundary.decode()}")

    assert form(b"one") == form(b"other")
