from __future__ import annotations

import math
from datetime import UTC, datetime
from email.utils import format_datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from taptwice.core.header import (
    OMITTED,
    REPLAYED,
    KeySyntax,
    check_key,
    format_key,
    is_random_uuid,
    key_age,
    parse_key,
    parse_retry_after,
    retry_after,
)
from taptwice.errors import KeyInvalid

UUID4 = "8e03978e-40d5-43e8-bc93-6894a57f9324"
UUID7 = "019c9218-6c00-7000-8000-000000000001"
STRICT = KeySyntax(strict=True)
GUARD = KeySyntax(guard=True)
TWO_NAMES = KeySyntax(names=("Idempotency-Key", "X-Idempotency-Key"))

printable = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=255)
keys = printable.filter(lambda key: key.strip(" ") != "")


def line(value: bytes, name: bytes = b"Idempotency-Key") -> list[tuple[bytes, bytes]]:
    return [(b"Host", b"shop.example"), (name, value)]


@pytest.mark.parametrize(
    ("wire", "key"),
    [
        (UUID4.encode(), UUID4),
        (f'"{UUID4}"'.encode(), UUID4),
        (b"1", "1"),
        (b"12345", "12345"),
        (b'"12345"', "12345"),
        (b'"k-1";v=1', "k-1"),
        (b'"k-1"; v=1;w="x";u', "k-1"),
        (b'"a\\"b\\\\c"', 'a"b\\c'),
        (b"'k-1'", "'k-1'"),
        (b'"order 7 pay"', "order 7 pay"),
        (b'" k"', " k"),
        (b"  k-1\t ", "k-1"),
        (b'\t"k-1" ', "k-1"),
        (b"Order-A", "Order-A"),
        (b"a%20b", "a%20b"),
        (b'"k,1;2"', "k,1;2"),
        (b"x'--DROP:TABLE", "x'--DROP:TABLE"),
        (b":aGk=:", ":aGk=:"),
        (b"?1", "?1"),
        (b"!~", "!~"),
        (b"k" * 255, "k" * 255),
        (b'"' + b"k" * 255 + b'"', "k" * 255),
        (b'"' + b'\\"' * 255 + b'"', '"' * 255),
    ],
)
def test_one_key_in_two_spellings(wire: bytes, key: str) -> None:
    assert parse_key(line(wire)) == key


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        (b"", "is empty"),
        (b"   ", "is empty"),
        (b" \t", "is empty"),
        (b'""', "is blank"),
        (b'"   "', "is blank"),
        (b'"k-1', "see its end"),
        (b'"', "see its end"),
        (b'"foo \\"', "see its end"),
        (b'"foo \\,"', "see character 7"),
        (b'"k-1" x', "see character 7"),
        (b'"k-1", "k-2"', "see character 6"),
        (b'"k-1";', "see its end"),
        (b'"k-1";V=1', "see character 7"),
        (b'"k-1" ;v=1', "see character 7"),
        (b'"a\tb"', "printable ASCII"),
        (b"a\tb", "printable ASCII"),
        (b"a\0b", "printable ASCII"),
        (b"k\x7f", "printable ASCII"),
        (b"k\xa0", "printable ASCII"),
        (b"k\x85", "printable ASCII"),
        ("clé-1".encode(), "printable ASCII"),
        ('"füü"'.encode(), "printable ASCII"),
        (b"k\n", "printable ASCII"),
        (b"k-1,k-2", "outside quotes"),
        (b"k-1;v=1", "outside quotes"),
        (b"k 1", "outside quotes"),
        (b'k"1', "outside quotes"),
        (b"k\\1", "outside quotes"),
        (b"k" * 256, "longer than 255 characters"),
        (b'"' + b"k" * 256 + b'"', "longer than 255 characters"),
        (b"k" * 8192, "longer than a key of 255 characters needs"),
        (b" " * 8192, "longer than a key of 255 characters needs"),
    ],
)
def test_what_cannot_be_read_is_refused(wire: bytes, reason: str) -> None:
    with pytest.raises(KeyInvalid) as caught:
        parse_key(line(wire))
    assert reason in caught.value.detail


@pytest.mark.parametrize(
    "lines", [[], [(b"Host", b"h")], [(b"X-Idempotency-Key", b"k")], [(b"Idempotency-Keys", b"k")]]
)
def test_no_line_no_key(lines: list[tuple[bytes, bytes]]) -> None:
    assert parse_key(lines) is None


@pytest.mark.parametrize("name", [b"idempotency-KEY", b"IDEMPOTENCY-key", b"idempotency-key"])
def test_the_name_has_no_case(name: bytes) -> None:
    assert parse_key(line(b"k-1", name)) == "k-1"


def test_the_configured_name_is_the_only_one_read() -> None:
    syntax = KeySyntax(names=("PayPal-Request-Id",))
    assert parse_key(line(b"k-1"), syntax) is None
    assert parse_key(line(b"k-1", b"paypal-request-id"), syntax) == "k-1"


@pytest.mark.parametrize(
    "values", [(b"k-1", b"k-2"), (b"k-1", b"k-1"), (b'"foo', b'bar"'), (b"", b"k-1"), (b'"k"', b"k")]
)
def test_one_name_on_two_lines_is_refused(values: tuple[bytes, bytes]) -> None:
    with pytest.raises(KeyInvalid, match="more than once"):
        parse_key([(b"Idempotency-Key", values[0]), (b"idempotency-key", values[1])])


def test_two_names_must_agree() -> None:
    agree = [(b"Idempotency-Key", b"k-1"), (b"X-Idempotency-Key", b'"k-1"')]
    assert parse_key(agree, TWO_NAMES) == "k-1"
    with pytest.raises(KeyInvalid, match="Idempotency-Key and X-Idempotency-Key carry different keys"):
        parse_key([(b"Idempotency-Key", b"k-1"), (b"X-Idempotency-Key", b"k-2")], TWO_NAMES)
    with pytest.raises(KeyInvalid, match="is empty"):
        parse_key([(b"Idempotency-Key", b"k-1"), (b"X-Idempotency-Key", b"")], TWO_NAMES)
    assert parse_key([(b"X-Idempotency-Key", b"k-2")], TWO_NAMES) == "k-2"


@pytest.mark.parametrize(
    "wire", [UUID4.encode(), b"tok", b"123", b"1.5", b":aGk=:", b"?1", b"@1659578233", b'%"a"', b"(a)"]
)
def test_strict_takes_a_quoted_string_only(wire: bytes) -> None:
    with pytest.raises(KeyInvalid, match="not a quoted string"):
        parse_key(line(wire), STRICT)
    assert parse_key(line(b'"k-1";v=1'), STRICT) == "k-1"


def test_a_limit_of_its_own() -> None:
    syntax = KeySyntax(max_length=64)
    assert parse_key(line(b"k" * 64), syntax) == "k" * 64
    with pytest.raises(KeyInvalid, match="longer than 64 characters"):
        parse_key(line(b"k" * 65), syntax)


@pytest.mark.parametrize("key", [UUID4, UUID4.upper(), UUID7, "123e4567-e89b-12d3-a456-426655440010"])
def test_uuid_format(key: str) -> None:
    assert check_key(key, KeySyntax(uuid=True)) == key
    for other in (key[:-1], key + "0", key.replace("-", ""), "{" + key + "}", "urn:uuid:" + key, "k-1"):
        with pytest.raises(KeyInvalid, match="not a UUID"):
            check_key(other, KeySyntax(uuid=True))


ACCIDENTS = """
undefined null NULL None NaN nil true False {} [] '' "" 0 - n/a <nil> (null) 'undefined' "null"
ada@example.com Ada.L+x@mail.example.co.uk 00000000-0000-0000-0000-000000000000
"""


@pytest.mark.parametrize("key", [*ACCIDENTS.split(), "[object Object]", "[object Promise]", " null ", "' '"])
def test_the_guard_refuses_what_nobody_meant(key: str) -> None:
    with pytest.raises(KeyInvalid, match="unset variable"):
        check_key(key, GUARD)
    assert check_key(key) == key  # off unless asked for


@pytest.mark.parametrize("key", [UUID4, "1", "nullable", "order@7", "undefined-7", "none.7", "true1", "a@b"])
def test_the_guard_lets_keys_pass(key: str) -> None:
    assert check_key(key, GUARD) == key


@pytest.mark.parametrize(
    "key", ["", " ", "a\tb", "a\nb", "é", "k\n", "k" * 256, None, 12345, True, ["k"], b"k"]
)
def test_keys_from_code_are_checked_too(key: object) -> None:
    with pytest.raises(KeyInvalid):
        check_key(key)


def test_keys_from_code_need_no_spelling() -> None:
    assert check_key('order 7, "pay"; now\\') == 'order 7, "pay"; now\\'
    assert check_key("k", STRICT) == "k"


def test_age_of_a_time_ordered_key() -> None:
    made = datetime(2026, 2, 25, tzinfo=UTC).timestamp()
    assert key_age(UUID7, made) == 0
    assert key_age(UUID7.upper(), made + 13 * 86400.5) == 13 * 86400.5
    assert key_age(UUID7, made - 2) == -2
    assert key_age("00000000-03e8-7000-8000-000000000000", 3.5) == 2.5  # 1,000 ms
    for other in (UUID4, "k-1", "", UUID7 + "\n", UUID7.replace("-8000-", "-c000-"), UUID7.replace("-", "")):
        assert key_age(other, made) is None


def test_strong_enough_for_anonymous_callers() -> None:
    assert all(is_random_uuid(key) for key in (UUID4, UUID4.upper(), UUID7))
    weak = ["1", "", "123e4567-e89b-12d3-a456-426655440010", UUID4.replace("-", ""), UUID4 + "\n"]
    weak += ["00000000-0000-0000-0000-000000000000", UUID4.replace("-bc93-", "-7c93-"), "٨" + UUID4[1:]]
    assert not any(is_random_uuid(key) for key in weak)


@pytest.mark.parametrize(
    ("key", "quoted", "wire"),
    [
        ("k-1", False, "k-1"),
        ("k-1", True, '"k-1"'),
        ("order 7", False, '"order 7"'),
        ('a"b\\c', False, '"a\\"b\\\\c"'),
        ("'k'", False, "'k'"),
    ],
)
def test_how_a_client_spells_a_key(key: str, quoted: bool, wire: str) -> None:
    assert format_key(key, quoted) == wire


@pytest.mark.parametrize("key", ["", "  ", "é", "a\r\nSet-Cookie: x", "a\0"])
def test_a_client_cannot_spell_everything(key: str) -> None:
    for quoted in (False, True):
        with pytest.raises(KeyInvalid):
            format_key(key, quoted)


@given(keys, st.booleans(), st.text(" \t", max_size=5), st.text(" \t", max_size=5))
def test_round_trip(key: str, quoted: bool, before: str, after: str) -> None:
    wire = (before + format_key(key, quoted) + after).encode("ascii")
    assert parse_key(line(wire)) == key == check_key(key)
    assert parse_key(line(format_key(key, True).encode("ascii")), STRICT) == key


@given(
    st.one_of(
        st.binary(max_size=400),
        st.text('"\\;=a1 @%:?.,-*', max_size=40).map(str.encode),
        st.text('"\\;=a1 @%:?.,-*', max_size=40).map(lambda tail: f'"k"{tail}'.encode()),
    ),
    st.sampled_from([KeySyntax(), STRICT, GUARD, KeySyntax(uuid=True), KeySyntax(max_length=3)]),
)
@example(b'"k";d=@999999999999999', KeySyntax())
@example(b'"k";d=@-999999999999999', KeySyntax())
@example(b'"k";d=99999999999999999999', KeySyntax())
@example(b'"k";d=%"%ff"', KeySyntax())
@example(b'"k";d=:a:', KeySyntax())
def test_any_bytes_are_a_key_or_invalid(wire: bytes, syntax: KeySyntax) -> None:
    try:
        key = parse_key(line(wire), syntax)
    except KeyInvalid:
        return
    assert key == check_key(key, syntax)


@given(
    st.text("QXZ", min_size=3, max_size=300), st.sampled_from(["{}", '"{}', '"{}"x', "{},", '"{}\t"', "é{}"])
)
def test_no_message_repeats_the_key(secret: str, form: str) -> None:
    with pytest.raises(KeyInvalid) as caught:
        parse_key(line(form.format(secret).encode()), KeySyntax(max_length=1))
    assert secret not in caught.value.detail


def test_retry_after_is_never_too_early() -> None:
    waits = [0, -3, 0.2, 1, 1.01, 2, 29.5, 3600]
    assert [retry_after(wait) for wait in waits] == ["1", "1", "1", "1", "2", "2", "30", "3600"]


NOW = datetime(1994, 11, 6, 8, 49, 37, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("value", "wait"),
    [
        ("0", 0),
        ("1", 1),
        (" 120\t", 120),
        ("007", 7),
        ("86400", 86400),
        ("9" * 5000, math.inf),
        ("Sun, 06 Nov 1994 08:49:40 GMT", 3),
        ("Sunday, 06-Nov-94 08:49:40 GMT", 3),
        ("Sun Nov  6 08:49:40 1994", 3),
        ("Wed Nov 16 08:49:37 1994", 864000),
        ("Sun, 06 Nov 1994 08:49:00 GMT", 0),
        ("Sun, 06 Nov 1994 08:49:60 GMT", 22),
        ("Monday, 06-Nov-44 08:49:37 GMT", 1577923200),
        ("Monday, 06-Nov-45 08:49:37 GMT", 0),  # more than 50 years ahead is a year gone by
    ],
)
def test_retry_after_of_others(value: str, wait: float) -> None:
    assert parse_retry_after(value, None, NOW) == wait


UNUSABLE = """
soon
-5
+5
NaN
inf
1.5
1e3
1_000
5 s
٣
0x10
1, 2
Sun, 06 Nov 1994 08:49:37
Sun, 6 Nov 1994 08:49:37 GMT
Sun, 06 Nov 1994 08:49:37 +0000
sun, 06 nov 1994 08:49:37 gmt
Sun, 31 Feb 1994 08:49:37 GMT
Sun, 06 Nov 0000 08:49:37 GMT
Sun, 06 Nov 1994 24:00:00 GMT
Sun, 06 Nov 1994 08:60:37 GMT
Sun, 06 Nov 1994 08:49:61 GMT
Sun Nov 6 08:49:37 1994
Sun Nov 06 08:49:37 1994 GMT
1994-11-06T08:49:37Z
"""


@pytest.mark.parametrize("value", UNUSABLE.split("\n"))
def test_unusable_retry_after(value: str) -> None:
    assert parse_retry_after(value, None, NOW) is None


def test_a_date_is_read_by_the_clock_that_wrote_it() -> None:
    value, date = "Sun, 06 Nov 1994 09:00:30 GMT", "Sun, 06 Nov 1994 09:00:00 GMT"
    assert parse_retry_after(value, date, NOW) == 30
    assert parse_retry_after(value, " " + date, NOW + 1e6) == 30
    assert parse_retry_after(value, "yesterday", NOW) == 653
    assert parse_retry_after(date, value, NOW) == 0
    assert parse_retry_after("7", date, NOW) == 7


@given(st.text(max_size=60), st.none() | st.text(max_size=60), st.floats(0, 1e10))
def test_retry_after_never_raises(value: str, date: str | None, now: float) -> None:
    wait = parse_retry_after(value, date, now)
    assert wait is None or wait >= 0


@given(st.datetimes(datetime(1970, 1, 1), datetime(2100, 1, 1)), st.integers(0, 10**6))
def test_any_date_is_understood(moment: datetime, ahead: int) -> None:
    moment = moment.replace(microsecond=0, tzinfo=UTC)
    now = moment.timestamp() - ahead
    imf = format_datetime(moment, usegmt=True)
    day, number, month, year, clock, _ = imf.replace(",", "").split()
    long_day = {"Tue": "Tuesday", "Wed": "Wednesday", "Thu": "Thursday", "Sat": "Saturday"}.get(
        day, day + "day"
    )
    for text in (
        imf,
        f"{long_day}, {number}-{month}-{year[2:]} {clock} GMT",
        f"{day} {month} {int(number):2} {clock} {year}",
    ):
        assert parse_retry_after(text, None, now) == ahead


def test_markers() -> None:
    assert REPLAYED == "Idempotent-Replayed"
    assert OMITTED == ("Idempotent-Body", "omitted")
