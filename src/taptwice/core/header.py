"""The header fields of this package: the key, the markers of a replay, Retry-After.

A key arrives in a field named Idempotency-Key (draft-ietf-httpapi-idempotency-key-header-07). The draft
makes it a structured-field String (RFC 9651 section 3.3.3), so quoted on the wire; nearly every payment
service and client sends it bare. Both spellings are read, and both mean the same key: a client that
changes its spelling between two attempts must not pay twice.

A field that cannot be read is an error and never a request without a key: whoever sent it wanted to be
protected. No message of this module repeats the key, because keys end up in logs through messages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Final, cast

import http_sf

from taptwice.errors import KeyInvalid

__all__ = [
    "OMITTED",
    "REPLAYED",
    "KeySyntax",
    "check_key",
    "format_key",
    "has_key",
    "is_random_uuid",
    "key_age",
    "parse_key",
    "parse_retry_after",
    "retry_after",
]

REPLAYED: Final = "Idempotent-Replayed"
"""Name of the field that marks a replay (its value is ``true``); a first answer does not carry it."""

OMITTED: Final = ("Idempotent-Body", "omitted")
"""The field that marks a replay whose body could not be kept."""

_OWS = b" \t"
# Room for quotes, parameters and padding beside a key of which every character is escaped.
_WIRE_SLACK = 1024
_NO_ESCAPES = re.compile(r'"([^"\\]*)"')
_NEEDS_QUOTES = re.compile(r'[ ",;\\]')

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE | re.ASCII)
_UUID_4_OR_7 = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-(?P<version>[47])[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
    re.IGNORECASE | re.ASCII,
)

# What a forgotten variable looks like once some language has turned it into text. All intents of such a
# client would share one key, and all but the first would be answered with somebody else's payment.
_ACCIDENT = re.compile(
    r"""
    | undefined | \(?null\)? | none | nil | nan | true | false | empty | n/?a | 0 | -
    | \[\] | \{\} | \(\) | <nil> | <null> | \[object\ \w+\] | 00000000-0000-0000-0000-000000000000
    | [^@\s]+ @ [^@\s]+ \. [a-z]{2,}
    """,
    re.IGNORECASE | re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class KeySyntax:
    """Which keys a service accepts, and where it looks for them."""

    names: tuple[str, ...] = ("Idempotency-Key",)
    """Accepted field names, in any case. A request may carry several of them if they agree."""
    strict: bool = False
    """Accept the quoted spelling of the standard only."""
    max_length: int = 255
    """Longest key, in characters, counted without quotes and escapes."""
    uuid: bool = False
    """Refuse whatever is not a UUID in its usual spelling with hyphens (RFC 9562 section 4)."""
    guard: bool = False
    """Refuse what no client means as a key: ``undefined``, ``[object Object]``, an e-mail address, …"""


def parse_key(lines: Sequence[tuple[bytes, bytes]], syntax: KeySyntax = KeySyntax()) -> str | None:
    """The key that a request carries, or None when no line has an accepted name.

    ``lines`` are the request's raw header lines, names in any case, as ASGI hands them over.
    Raises KeyInvalid when a line is there and does not name exactly one acceptable key.
    """
    accepted = _accepted(syntax.names)
    found: dict[str, bytes] = {}
    for raw_name, value in lines:
        name = accepted.get(raw_name.lower())
        if name is None:
            continue
        if name in found:
            raise KeyInvalid(f"The {name} header was sent more than once; send it on one line.")
        found[name] = value
    keys = {_read(name, value, syntax) for name, value in found.items()}
    if len(keys) > 1:
        raise KeyInvalid(f"The headers {' and '.join(found)} carry different keys; send one of them.")
    return keys.pop() if keys else None


def has_key(lines: Sequence[tuple[bytes, bytes]], syntax: KeySyntax) -> bool:
    """Whether any line has a name that `parse_key` reads, well-formed or not."""
    accepted = _accepted(syntax.names)
    return any(name.lower() in accepted for name, _ in lines)


@cache
def _accepted(names: tuple[str, ...]) -> dict[bytes, str]:
    """The accepted names, by what they are in lower case on the wire."""
    return {name.lower().encode("latin-1"): name for name in names}


def check_key(key: object, syntax: KeySyntax = KeySyntax()) -> str:
    """``key`` itself, if it may be a key: for keys that come from code or from a member of a JSON body.

    Raises KeyInvalid for anything but text of 1 to ``max_length`` characters from 0x20 to 0x7E that is
    not blank, and for what ``syntax.uuid`` and ``syntax.guard`` refuse.
    """
    if not isinstance(key, str):
        raise KeyInvalid("The idempotency key is not a string.")
    if len(key) > syntax.max_length:
        raise KeyInvalid(f"The idempotency key is longer than {syntax.max_length} characters.")
    _check_characters(key)
    if syntax.uuid and not _UUID.fullmatch(key):
        raise KeyInvalid("The idempotency key is not a UUID (36 characters, with hyphens).")
    if syntax.guard and _ACCIDENT.fullmatch(key.strip(" '\"")):
        raise KeyInvalid("The idempotency key is what an unset variable looks like, or an e-mail address.")
    return key


def key_age(key: str, now: float) -> float | None:
    """Seconds between the making of a UUIDv7 key and ``now``, None for any other key.

    ``now`` is in seconds since the epoch. The time is the 48-bit millisecond count of RFC 9562 section
    5.7; it is the client's clock, so the age is below zero when that clock is fast.
    """
    match = _UUID_4_OR_7.fullmatch(key)
    if match is None or match["version"] != "7":
        return None
    return now - int(key[:8] + key[9:13], 16) / 1000


def is_random_uuid(key: str) -> bool:
    """Whether ``key`` is a UUID of version 4 or 7, so hard enough to guess for callers without a login."""
    return _UUID_4_OR_7.fullmatch(key) is not None


def format_key(key: str, quoted: bool = False) -> str:
    """The header value by which a client sends ``key``.

    Bare unless ``quoted`` asks for the spelling of the standard, or the key holds a character (space,
    comma, semicolon, quote, backslash) that only a quoted string can carry.
    Raises KeyInvalid when no spelling can carry it.
    """
    _check_characters(key)
    return http_sf.ser(key) if quoted or _NEEDS_QUOTES.search(key) else key


def retry_after(seconds: float) -> str:
    """A Retry-After value (RFC 9110 section 10.2.3): whole seconds, rounded up, at least one.

    A caller told to come back too early meets the same obstacle again, and zero invites a busy loop.
    """
    return str(max(1, math.ceil(seconds)))


def parse_retry_after(value: str, date: str | None, now: float) -> float | None:
    """Seconds to wait by a Retry-After value, None when it follows neither form of RFC 9110 10.2.3.

    ``date`` is the Date field of the same answer, if it had one: a Retry-After that is a point in time
    was reckoned by the clock which wrote that field, so the difference of the two is right even when
    ``now`` (seconds since the epoch, here) is not. A time in the past means no wait at all. Never raises;
    a number too large for a float is infinity.
    """
    value = value.strip(" \t")
    if re.fullmatch("[0-9]+", value):
        return float(value)
    until = _http_date(value, now)
    if until is None:
        return None
    since = _http_date(date.strip(" \t"), now) if date is not None else None
    return max(0.0, until - (now if since is None else since))


def _read(name: str, value: bytes, syntax: KeySyntax) -> str:
    """The key in one header line. Raises KeyInvalid."""
    # Nothing below may cost more than a refusal does, whatever was sent.
    if len(value) > 2 * syntax.max_length + _WIRE_SLACK:
        raise KeyInvalid(f"The {name} header is longer than a key of {syntax.max_length} characters needs.")
    text = value.strip(_OWS).decode("latin-1")
    if not text:
        raise KeyInvalid(f"The {name} header is empty.")
    if not _is_printable(text):
        raise KeyInvalid(f"The {name} header holds a character outside printable ASCII (0x20 to 0x7E).")
    if text.startswith('"'):
        return check_key(_unquote(name, text), syntax)
    if syntax.strict:
        raise KeyInvalid(f"The {name} header is not a quoted string (RFC 9651 section 3.3.3).")
    if _NEEDS_QUOTES.search(text):
        raise KeyInvalid(
            f"The {name} header holds a space, comma, semicolon, double quote or backslash outside quotes."
        )
    return check_key(text, syntax)


def _unquote(name: str, text: str) -> str:
    """The String in ``text``, which starts with a quote. Parameters are valid and mean nothing here."""
    plain = _NO_ESCAPES.fullmatch(text)  # nearly every key, and the parser takes longer
    if plain is not None:
        return plain[1]
    try:
        # What starts with a quote is a String, and an Item comes with its parameters: only types forget that.
        key, _ = cast(tuple[str, object], http_sf.parse(text.encode("ascii"), tltype="item"))
    except http_sf.StructuredFieldError as error:
        # Only the place: the parser's own words quote what it met.
        place = len(text) if error.position is None else min(error.position, len(text))
        where = "its end" if place == len(text) else f"character {place + 1}"
        raise KeyInvalid(
            f"The {name} header is not a well-formed quoted string (RFC 9651): see {where}."
        ) from None
    return key


def _is_printable(text: str) -> bool:
    """Whether every character is one of 0x20 to 0x7E."""
    return text.isascii() and text.isprintable()


def _check_characters(key: str) -> None:
    if not _is_printable(key):
        raise KeyInvalid("The idempotency key holds a character outside printable ASCII (0x20 to 0x7E).")
    if not key.strip(" "):
        raise KeyInvalid("The idempotency key is blank.")


# The three forms of an HTTP-date (RFC 9110 section 5.6.7). Not strptime, which reads the names of days and
# months in the language of the process.
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_TIME = r"(?P<hour>[0-9]{2}):(?P<minute>[0-9]{2}):(?P<second>[0-5][0-9]|60)"
_MONTH = f"(?P<month>{'|'.join(_MONTHS)})"
_DAY = "(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_LONG_DAY = "(?:Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday)"
_HTTP_DATES = tuple(
    re.compile(form)
    for form in (
        rf"{_DAY}, (?P<day>[0-9]{{2}}) {_MONTH} (?P<year>[0-9]{{4}}) {_TIME} GMT",
        rf"{_LONG_DAY}, (?P<day>[0-9]{{2}})-{_MONTH}-(?P<year>[0-9]{{2}}) {_TIME} GMT",
        rf"{_DAY} {_MONTH} (?P<day>[ 0-9][0-9]) {_TIME} (?P<year>[0-9]{{4}})",
    )
)


def _http_date(text: str, now: float) -> float | None:
    """Seconds since the epoch, None when ``text`` is no HTTP-date."""
    match = next(filter(None, (form.fullmatch(text) for form in _HTTP_DATES)), None)
    if match is None:
        return None
    year = int(match["year"])
    if len(match["year"]) == 2:
        # Of all years with these two digits, the one that is at most 50 years ahead.
        earliest = datetime.fromtimestamp(now, UTC).year - 49
        year = earliest + (year - earliest) % 100
    try:
        moment = datetime(
            year,
            _MONTHS.index(match["month"]) + 1,
            int(match["day"]),
            int(match["hour"]),
            int(match["minute"]),
            min(int(match["second"]), 59),  # datetime knows no leap second
            tzinfo=UTC,
        )
    except ValueError:
        return None
    return moment.timestamp()
