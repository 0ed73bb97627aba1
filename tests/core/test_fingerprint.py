from __future__ import annotations

import json
import random
from collections.abc import Iterator
from decimal import Decimal
from hashlib import sha256
from typing import Any
from urllib.parse import quote_plus, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taptwice.core.fingerprint import (
    MAX_DEPTH,
    MAX_FIELDS,
    MAX_PART_HEADER,
    MAX_VALUES,
    PARTS,
    VERSION,
    VERSIONS,
    Fingerprint,
    Rules,
    of_bytes,
    of_request,
    of_value,
)

JSON = b"application/json"
FORM = b"application/x-www-form-urlencoded"
DEFAULT = Rules()
RAW = Rules(json="raw")


def request(
    body: bytes = b"",
    media: bytes | None = JSON,
    rules: Rules = DEFAULT,
    *,
    method: str = "POST",
    path: bytes | str = b"/payments",
    query: bytes = b"",
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> bytes:
    content_type = () if media is None else ((b"content-type", media),)
    return of_request(method, path, query, (*content_type, *headers), body, rules).digest()


def as_json(text: str) -> bytes:
    return request(text.encode("utf-8", "surrogatepass"))


# --- the value itself


def test_a_digest_is_tagged_with_its_version() -> None:
    fingerprint = of_bytes(b"x")
    assert fingerprint.version == VERSION == 1
    assert {1, 2} == VERSIONS
    assert fingerprint.digest() == fingerprint.digest(1)
    assert fingerprint.digest(2) == of_bytes(b"x", Rules(version=2)).digest()
    assert fingerprint.digest(2) != fingerprint.digest(1)
    assert fingerprint.digest(2) == sha256(b"taptwice/fingerprint/2\0" + fingerprint.canonical).digest()
    assert fingerprint.digest(3) is None
    assert len(fingerprint.digest()) == len(fingerprint.canonical) == 32


def test_a_fingerprint_does_not_show_its_bytes() -> None:
    assert repr(of_bytes(b"x")) == "Fingerprint(version=1)"


def test_version_1_never_changes() -> None:
    """Stored records depend on these bytes."""
    body = b'{"amount_cents":5000,"currency":"eur","rate":0.10,"tags":[true,null,-1e-3]}'
    headers = [(b"Content-Type", b"application/json"), (b"Api-Version", b"2026-01-01")]
    rules = Rules(headers=("Api-Version",))
    digests = {
        "request": of_request("post", "/payments", b"b=2&a=1", headers, body, rules).digest(),
        "value": of_value({"amount": Decimal("50.00"), "currency": "eur"}).digest(),
        "bytes": of_bytes(b"taptwice").digest(),
    }
    assert {name: digest.hex() for name, digest in digests.items()} == {
        "request": "7b0f72493887ad4c2812f8a1a1c75f60a7ff4994d0ddcf562779774dc4773b84",
        "value": "513f7a9eaf39d327bdac2f1707fb4d906507f904c9755b926324eb5727f8317a",
        "bytes": "40422b465fca62a9784c9e3d47ba6462d22087d93336a6a4cd021e8f001d951b",
    }


def test_parts_that_do_not_count() -> None:
    def all_but(part: str) -> Rules:
        return Rules(parts=tuple(each for each in PARTS if each != part))

    other: dict[str, dict[str, Any]] = {
        "method": {"method": "PATCH"},
        "path": {"path": "/refunds"},
        "query": {"query": b"dry_run=1"},
        "media_type": {"media": b"application/vnd.shop+json"},
        "body": {"body": b'{"b":2}'},
    }
    for part, changed in other.items():
        rules = all_but(part)
        same: dict[str, Any] = {"body": b'{"a":1}', "rules": rules}
        assert request(**{**same, **changed}) == request(**same)
        for another in other.keys() - {part}:
            assert request(**{**same, **other[another]}) != request(**same)
    with pytest.raises(ValueError, match="no part of a request: cookies"):
        Rules(parts=("cookies",))


@pytest.mark.parametrize("pointer", ["meta", "meta/sent_at", "/a~", "/a~2b", " /a", "#/a"])
def test_a_malformed_pointer_is_found_at_once(pointer: str) -> None:
    with pytest.raises(ValueError, match="JSON pointer"):
        Rules(only=(pointer,))
    with pytest.raises(ValueError, match="JSON pointer"):
        Rules(exclude=(pointer,))


def test_an_unknown_version_is_found_at_once() -> None:
    with pytest.raises(ValueError, match="unknown fingerprint version 3"):
        Rules(version=3)
    with pytest.raises(ValueError, match="unknown fingerprint version 0"):
        Fingerprint(0, bytes(32))


def test_rules_are_data() -> None:
    assert {Rules(), Rules(json="canonical"), Rules(exclude=("/a",))} == {Rules(), Rules(exclude=("/a",))}


# --- JSON

SAME = [
    ('{"a":1,"b":2}', '{"b":2,"a":1}'),
    ('{"a":{"x":1,"y":[{"p":1,"q":2}]}}', '{"a":{"y":[{"q":2,"p":1}],"x":1}}'),
    ('{"a":1}', ' {\r\n\t"a" : 1 }\n'),
    ("1", "1.0"),
    ("1", "1e0"),
    ("1", "10e-1"),
    ("1", "0.1E+1"),
    ("100", "1e2"),
    ("5000", "5.000e3"),
    ("0.10", "0.1"),
    ("0", "-0"),
    ("0", "0.0e7"),
    ("0", "-0.000"),
    ("0", "0e99999999999999999999999999"),
    ("1e1000000000", "10e999999999"),
    ("-2.50", "-25e-1"),
    ("1e00000000000000005", "100000"),
    ('"caf\\u00e9 \\/ \\ud83d\\ude00"', '"café / 😀"'),
    ('{"\\u0061":1}', '{"a":1}'),
    ('"\\ud800"', '"\\uD800"'),
    ("1" + "0" * 5000, "1e5000"),
    ("0." + "0" * 5000 + "1", "1e-5001"),
    ("\ufeff[1]", "[1]"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_json_of_one_meaning(one: str, other: str) -> None:
    assert as_json(one) == as_json(other)
    assert request(one.encode(), b"application/vnd.shop+json") == request(
        other.encode(), b"application/vnd.shop+json"
    )
    assert request(one.encode(), rules=RAW) != request(other.encode(), rules=RAW)


DIFFERENT = [
    "null true false 0 1 -1 0.1 1e2 1e3 10 12 1e-1000000000 1e1000000000 -1e1000000000",
    '"" "0" "1" "null" "true" "1e0" "a" "A" "e9" "#" "\\u0000"',
    '"\u00e9" "e\u0301" "\\ud800" "\\udc00" "\\ud800\\ud800" "\\ufffd"',
    "[] {} [[]] [{}] [null] [[],[]] [[[]]] [0] [1] [true] [1,2] [2,1] [[1],2] [[1,2]] [1,[2]] [12]",
    '{"a":1} {"a":1.1} {"a":"1"} {"a":true} {"a":null} {"a":[1]} {"a":{}} {"b":1} {"A":1} {"":1}',
    '{"a":{"b":1}} {"a":{},"b":1} {"a":1,"b":2} {"a":2,"b":1} {"a":"b"} ["a","b"] ["a",1] [{"a":1}] ["a:1"]',
    '{"a":1,"b":null} {"b":null}',
    "9007199254740992 9007199254740993 100000000000000000 100000000000000001",
    "0.1000000000000000055511151231257827 0.10000000000000000555",
    '1e99999999999999999999999999 {"a":1,"a":2} {"a":2,"a":1} {"a":2,"\\u0061":1} [{"a":1,"a":1}]',
    'NaN Infinity -Infinity [NaN] [1,] {\'a\':1} 01 +1 .5 1. 0x1 tru [ ] "\t" "a',
]


def test_json_of_different_meaning() -> None:
    texts = [text for row in DIFFERENT for text in row.split(" ")]
    assert len(set(texts)) == len(texts)
    assert len({as_json(text) for text in texts}) == len(texts)


def test_long_numbers_neither_raise_nor_merge() -> None:
    nines = "9" * 10_000
    assert as_json(nines) != as_json(nines[:-1] + "8")
    assert as_json(nines) == as_json(nines + ".0")


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":1,"a":5000}',
        b'{"x":[{"a":1,"\\u0061":1}]}',
        b"[1,]",
        b"NaN",
        b"[-Infinity]",
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b'"a\nb"',
        '{"a":1}'.encode("utf-16"),
        b"",
        b"1e123456789012345678901",
        b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000,
        b"[" + b"1," * MAX_VALUES + b"1]",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_where_json_has_no_one_meaning_bytes_count(body: bytes) -> None:
    assert request(body) == request(body, b"application/json; charset=x")
    assert request(body) != request(body + b" ")
    assert request(body) != request(body, rules=RAW)


def test_depth_is_counted_and_not_felt() -> None:
    body = b'{"b":1,"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"
    other = b'{"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b',"b":1}'
    deeper = (
        body.replace(b"[", b"[[", 1).replace(b"]", b"]]", 1),
        other.replace(b"[", b"[[", 1).replace(b"]", b"]]", 1),
    )

    def far_down(frames: int) -> bytes:
        return request(body) if frames == 0 else far_down(frames - 1)

    assert request(body) == request(other) == far_down(500)
    assert request(deeper[0]) != request(deeper[1])


def test_missing_body_and_empty_object_differ() -> None:
    bodies = [request(b"", None), request(b""), request(b"{}"), request(b"null"), request(b"{}", None)]
    assert len(set(bodies)) == len(bodies)


def test_raw_json() -> None:
    assert request(b'{"a":1,"b":2}', rules=RAW) != request(b'{"b":2,"a":1}', rules=RAW)
    assert request(b'{"a":1}', rules=RAW) == request(b'{"a":1}', b"Application/Json", RAW)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.decimals(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def spelled(value: object, chance: random.Random) -> str:
    """Some JSON text for a value."""

    def space() -> str:
        return chance.choice(["", "", " ", "\n\t"])

    if isinstance(value, dict):
        items = [(name, item) for name, item in value.items()]
        chance.shuffle(items)
        inside = ",".join(f"{space()}{spelled(n, chance)}{space()}:{spelled(v, chance)}" for n, v in items)
        return f"{{{inside}{space()}}}"
    if isinstance(value, list):
        return f"[{','.join(space() + spelled(item, chance) + space() for item in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=chance.random() < 0.5)
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    assert isinstance(value, (int, Decimal))
    sign, digits, exponent = Decimal(value).as_tuple()
    assert isinstance(exponent, int)
    zeros = chance.randrange(3)
    shift = chance.randrange(3)
    text = "".join(map(str, digits)).lstrip("0") or "0"
    if text != "0":
        text += "0" * zeros
    point = "." + "0" * shift if shift else ""
    e = chance.choice("eE") + f"{exponent - (zeros if text != '0' else 0):{chance.choice(['', '+'])}d}"
    return f"{'-' if sign else ''}{text}{point}{e}"


@given(json_values, st.randoms(use_true_random=False))
def test_any_spelling_of_a_value_is_that_value(value: object, chance: random.Random) -> None:
    one, other = spelled(value, chance), spelled(value, chance)
    assert as_json(one) == as_json(other)
    assert json.loads(one, parse_float=Decimal) == json.loads(other, parse_float=Decimal)


def strictly(value: object) -> object:
    """A value that equals another only when JSON would say so; Python says that 1 == True."""
    if isinstance(value, dict):
        return ("object", frozenset((name, strictly(item)) for name, item in value.items()))
    if isinstance(value, list):
        return ("array", tuple(strictly(item) for item in value))
    if isinstance(value, (int, Decimal)) and not isinstance(value, bool):
        return ("number", Decimal(value))
    return (type(value).__name__, value)


@given(json_values, json_values)
def test_equal_digest_means_equal_value(one: object, other: object) -> None:
    assert (of_value(one) == of_value(other)) == (strictly(one) == strictly(other))


@given(st.binary(max_size=200) | st.text(' {}[]":,0123456789.eE+-truefalsn\\u', max_size=40).map(str.encode))
def test_any_body_under_any_type_has_a_fingerprint(body: bytes) -> None:
    for media in (
        JSON,
        FORM,
        b"multipart/form-data; boundary=b",
        b"multipart/form-data",
        b"text/plain",
        b";",
        body,
    ):
        for rules in (
            DEFAULT,
            RAW,
            Rules(only=("/a/0",), exclude=("/0/a", "")),
            Rules(headers=("Ä", "content-type")),
        ):
            assert request(body, media, rules, query=body, path=body) == request(
                body, media, rules, query=body, path=body
            )


# --- pointers


@pytest.mark.parametrize(
    ("exclude", "one", "other"),
    [
        ("/meta/sent_at", '{"a":1,"meta":{"sent_at":1}}', '{"a":1,"meta":{"sent_at":2}}'),
        ("/meta/sent_at", '{"a":1,"meta":{"sent_at":1}}', '{"a":1,"meta":{}}'),
        ("/meta", '{"a":1,"meta":{"sent_at":1}}', '{"a":1}'),
        ("/a~1b/m~0n", '{"a/b":{"m~n":1}}', '{"a/b":{"m~n":2}}'),
        ("/~01", '{"~1":1}', '{"~1":2}'),
        ("/", '{"":1,"x":1}', '{"x":1,"":[]}'),
        ("/items/1/at", '{"items":[1,{"at":1}]}', '{"items":[1,{"at":2}]}'),
        ("/items/0", '{"items":[1,2]}', '{"items":[7,2]}'),
        ("", "[1]", '{"a":2}'),
    ],
)
def test_excluded_members_do_not_count(exclude: str, one: str, other: str) -> None:
    rules = Rules(exclude=(exclude,))
    assert as_json(one) != as_json(other)
    assert request(one.encode(), rules=rules) == request(other.encode(), rules=rules)


@pytest.mark.parametrize(
    ("exclude", "one", "other"),
    [
        ("/meta/sent_at", '{"meta":{"sent_at":1,"x":1}}', '{"meta":{"sent_at":1,"x":2}}'),
        ("/meta/sent_at", '{"meta":1}', '{"meta":2}'),
        ("/items/0", '{"items":[1,2]}', '{"items":[2]}'),
        ("/items/00", '{"items":[1]}', '{"items":[2]}'),
        ("/items/-", '{"items":[1]}', '{"items":[2]}'),
        ("/items/1", '{"items":[1]}', '{"items":[2]}'),
        ("/items/٠", '{"items":[1]}', '{"items":[2]}'),
        ("/a", '{"a":1,"a":1}', '{"a":1,"a":2}'),
    ],
)
def test_excluding_leaves_the_rest(exclude: str, one: str, other: str) -> None:
    rules = Rules(exclude=(exclude,))
    assert request(one.encode(), rules=rules) != request(other.encode(), rules=rules)


def test_only_the_chosen_members_count() -> None:
    def of(body: bytes) -> bytes:
        return request(body, rules=Rules(only=("/amount", "/to/0/id"), exclude=("/amount/note",)))

    base = of(b'{"amount":{"cents":5,"note":1},"to":[{"id":7}],"x":1}')
    assert base == of(b'{"to":[{"id":7,"y":2}],"amount":{"note":2,"cents":5}}')
    others = [
        base,
        of(b'{"amount":{"cents":6},"to":[{"id":7}]}'),
        of(b'{"amount":{"cents":5},"to":[{"id":8}]}'),
        of(b'{"amount":{"cents":5},"to":[{"id":null}]}'),
        of(b'{"amount":{"cents":5}}'),
        of(b'{"to":[{"id":7}]}'),
        of(b"{}"),
    ]
    assert len(set(others)) == len(others)
    assert of(b"{}") == of(b"[]") == of(b'{"to":[],"x":1}')


def test_pointers_touch_nothing_but_json() -> None:
    rules = Rules(exclude=("/a",))
    assert request(b"a=1", FORM, rules) != request(b"a=2", FORM, rules)
    assert request(b'{"a":1}', b"text/plain", rules) != request(b'{"a":2}', b"text/plain", rules)


# --- forms and queries


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"a=1&b=2", b"b=2&a=1"),
        (b"t=a&x=1&t=b", b"x=1&t=a&t=b"),
        (b"a=x+y", b"a=x%20y"),
        (b"a=%41%c3%a9", b"a=A%C3%A9"),
        (b"%61=1", b"a=1"),
        (b"a=&b", b"b=&a"),
        (b"a=1&&b=2&", b"a=1&b=2"),
    ],
)
def test_one_form(one: bytes, other: bytes) -> None:
    assert request(one, FORM) == request(other, FORM + b"; charset=utf-8")
    assert request(query=one) == request(query=other)


def test_different_forms() -> None:
    forms = [
        b"",
        b"a",
        b"b",
        b"a=1",
        b"a=2",
        b"A=1",
        b"a=1&a=1",
        b"a=1&b",
        b"t=a&t=b",
        b"t=b&t=a",
        b"a=1%26b",
    ]
    forms += [
        b"a%3D1",
        b"a=1=",
        b"a==1",
        b"=a",
        b"a=%",
        b"a=%4",
        b"a=%zz",
        b"a=%2B",
        b"a=+",
        b"a=%00",
        b"a=%ff",
    ]
    forms += [b"ab=c", b"a=bc", b"a=1;b=2", b"dry_run=1", b"a=t&b=a", b"a=a&t=b"]
    assert len({request(form, FORM) for form in forms}) == len(forms)
    assert len({request(query=form) for form in forms}) == len(forms)


def test_a_form_of_too_many_fields_counts_by_its_bytes() -> None:
    most = [b"%d=" % number for number in range(MAX_FIELDS)]
    assert request(b"&".join(most), FORM) == request(b"&".join(reversed(most)), FORM)
    more = [*most, b"x="]
    assert request(b"&".join(more), FORM) != request(b"&".join(reversed(more)), FORM)


@given(st.lists(st.tuples(st.text(max_size=3), st.text(max_size=5)), max_size=6))
def test_forms_as_browsers_write_them(pairs: list[tuple[str, str]]) -> None:
    by_name = sorted(pairs, key=lambda pair: pair[0])
    shouting = "&".join(
        f"{quote_plus(name, safe='')}={''.join(f'%{b:02X}' for b in v.encode())}" for name, v in by_name
    )
    assert request(urlencode(pairs).encode(), FORM) == request(shouting.encode(), FORM)


# --- multipart

Part = tuple[bytes, bytes]
NOTE: Part = (b'Content-Disposition: form-data; name="note"', b"hi")
FILE: Part = (
    b'Content-Disposition: form-data; name="file"; filename="a.txt"\r\nContent-Type: text/plain',
    b"data",
)


def multipart(
    *parts: Part, boundary: bytes = b"B", media: bytes | None = None, before: bytes = b"", after: bytes = b""
) -> bytes:
    body = b"".join(b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, head, content) for head, content in parts)
    media = b"multipart/form-data; boundary=" + boundary if media is None else media
    return request(before + body + b"--%b--\r\n" % boundary + after, media)


def test_the_boundary_does_not_count() -> None:
    base = multipart(NOTE, FILE)
    assert base == multipart(NOTE, FILE, boundary=b"zzz-9f1")
    assert base == multipart(NOTE, FILE, media=b'Multipart/Form-Data ; Charset=utf-8; BOUNDARY="B"')
    assert base == multipart(NOTE, FILE, boundary=b"a b'", media=b'multipart/form-data; boundary="a b\'"')
    assert base == multipart(NOTE, FILE, before=b"preamble\r\n", after=b"epilogue --B\r\n--B\r\n")


def test_a_delimiter_stands_at_the_start_of_a_line() -> None:
    content = b" --B\r\n\n--B--\r\n-\r\r--B"
    assert multipart((FILE[0], content)) == multipart((FILE[0], content), boundary=b"C")


def test_spelling_of_a_part_s_header_does_not_count() -> None:
    heads = [
        b'content-DISPOSITION:form-data;filename="a.txt";name=file\r\ncontent-type: Text/Plain',
        b"Content-Type:\ttext/plain \r\nContent-Length: 4\r\n"
        b'Content-Disposition: form-data; name="file"; filename="a.txt"',
    ]
    for head in heads:
        assert multipart(FILE) == multipart((head, b"data"))


def test_what_counts_of_a_part() -> None:
    def head(text: bytes, content: bytes = b"data") -> Part:
        return b"Content-Disposition: form-data; " + text, content

    variants: list[tuple[Part, ...]] = [
        (),
        (NOTE,),
        (FILE,),
        (NOTE, FILE),
        (FILE, NOTE),
        (NOTE, NOTE),
        (head(b'name="file"; filename="b.txt"\r\nContent-Type: text/plain'),),
        (head(b'name="file"; filename=""'),),
        (head(b'name="file"'),),
        (head(b'name="File"'),),
        (head(b'name="file"', b""),),
        (head(b'name="file"', b"data\r\n"),),
        (head(b'name="file"', b"\r\ndata"),),
        (head(b'name="file"', b"data\r\n-B"),),
        (head(b'name="file"', b"data --B--\r\n"),),
        (head(b'name="file"; filename="a.txt"\r\nContent-Type: text/html'),),
        (head(b'name="file"; filename="a.txt"\r\nContent-Type: text/plain; charset=latin-1'),),
        (head(b'name="file"; filename="a.txt"'),),
        (head(b'name="file"; filename="a.txt"; filename*=utf-8\'\'b.txt'),),
        (head(b'name="file"\r\nContent-Transfer-Encoding: base64'),),
        (head(b'name="fi\\"le"'),),
        (head('name="é"'.encode()),),
    ]
    assert len({multipart(*parts) for parts in variants}) == len(variants)


def _broken() -> Iterator[tuple[bytes, bytes]]:
    """Media type (with boundary B unless that is what is broken), and body."""
    good = b'--B\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--B--\r\n'
    usual = b"multipart/form-data; boundary=B"
    for media in (
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b'multipart/form-data; boundary=""',
        b"multipart/form-data; boundary=C",
        b"multipart/form-data; boundary=B; boundary=B",
        b"multipart/form-data; boundary=B, multipart/form-data; boundary=C",
        b"multipart/form-data; boundary=B;",
        b"multipart/form-data; boundary=" + b"B" * 71,
        b'multipart/form-data; boundary="B ',
    ):
        yield media, good
    for old, new in (
        (b"--B--", b"--B"),
        (b"--B--\r\n", b""),
        (b"--B--", b"--B--x"),
        (b"--B\r\n", b"--B x\r\n"),
        (b"--B\r\n", b"--B\n"),
        (b"--B\r\n", b"--B\r\n--B\r\n"),
        (b"\r\n", b"\n"),
        (b"\r\n\r\n1", b"\r\n1"),
        (b"form-data", b"attachment"),
        (b"form-data;", b"form-data"),
        (b' name="a"', b" filename=a"),
        (b'name="a"', b'name="a"; name="b"'),
        (b'name="a"', b'name="a'),
        (b'name="a"', b'name="a";'),
        (b'name="a"', b'name="a" x'),
        (b"Content-Disposition", b"Content-Type"),
        (b"Content-Disposition", b"Content-Disposition "),
        (b"Content-Disposition", b" Content-Disposition"),
        (b'"a"', b'"a"\r\nContent-Disposition: form-data; name="b"'),
        (b'"a"', b'"a";\r\n filename="b"'),
        (b'"a"', b'"a"\r\nContent-Type: text/plain;'),
        (b'"a"', b'"a"\r\nnonsense'),
        (b'"a"', b'"a"\r\nX: ' + b"x" * MAX_PART_HEADER),
    ):
        yield usual, good.replace(old, new)
    part = good.removesuffix(b"--B--\r\n")
    yield usual, part * (MAX_FIELDS + 1) + b"--B--\r\n"
    yield usual, b""
    yield usual, b"--B"


@pytest.mark.parametrize(("media", "body"), list(_broken()), ids=lambda text: repr(text[:90]))
def test_of_broken_multipart_every_byte_counts(media: bytes, body: bytes) -> None:
    assert request(body, media) == request(body, media)
    assert request(body, media) != request(b"x\r\n" + body, media)
    assert request(body, media) != request(body + b"x", media)
    assert request(body, media) != request(body, media + b"; x=y")


class Searched(bytes):
    """Counts how often it is searched."""

    times = 0

    def find(self, *wanted: Any) -> int:
        type(self).times += 1
        return super().find(*wanted)


def test_a_body_full_of_dashes_is_searched_once() -> None:
    body = Searched(b"x" + b"-" * 10_000 + b"--B" * 10_000)
    of_request("POST", "/", b"", [(b"content-type", b"multipart/form-data; boundary=-")], body)
    of_request("POST", "/", b"", [(b"content-type", b"multipart/form-data; boundary=B")], body)
    assert Searched.times == 2


def test_multipart_that_is_not_form_data_counts_by_its_bytes() -> None:
    assert multipart(NOTE, media=b"multipart/mixed; boundary=B") != multipart(
        NOTE, boundary=b"C", media=b"multipart/mixed; boundary=C"
    )


@given(
    st.lists(st.tuples(st.text("ab", max_size=2), st.binary(max_size=20)), max_size=4),
    st.text("xyz", min_size=8, max_size=70),
)
def test_any_content_survives_any_boundary(fields: list[tuple[str, bytes]], boundary: str) -> None:
    parts = [
        (b'Content-Disposition: form-data; name="%b"' % name.encode(), content) for name, content in fields
    ]
    assert multipart(*parts, boundary=boundary.encode()) == multipart(*parts, boundary=b"0123456789012345")
    if parts:
        changed = [*parts[:-1], (parts[-1][0], parts[-1][1] + b"!")]
        assert multipart(*parts, boundary=b"0123456789012345") != multipart(
            *changed, boundary=b"0123456789012345"
        )


# --- the other parts of a request


def test_each_part_of_the_request_counts() -> None:
    base = request(b"{}")
    assert base == request(b"{}", method="post") == request(b"{}", path="/payments")
    others = [
        base,
        request(b"{}", method="PATCH"),
        request(b"{}", path=b"/transfers"),
        request(b"{}", path=b"/payments/"),
        request(b"{}", path=b"/Payments"),
        request(b"{}", path=b"/payment%73"),
        request(b"{}", query=b"dry_run=1"),
        request(b"{}", b"application/vnd.shop+json"),
        request(b"{}", b"text/plain"),
        request(b"{}", None),
        request(b"[]"),
    ]
    assert len(set(others)) == len(others)


@pytest.mark.parametrize(
    "media",
    [b"Application/JSON; charset=utf-8", b" application/json ;charset=UTF-8", b"application/json;", JSON],
)
def test_case_and_parameters_of_the_media_type_do_not_count(media: bytes) -> None:
    assert request(b'{"a":1.0,"b":2}', media) == request(b'{"b":2,"a":1}')


def test_a_repeated_content_type_is_a_type_of_its_own() -> None:
    assert request(b'{"a":1,"b":2}', headers=((b"Content-Type", JSON),)) != request(
        b'{"b":2,"a":1}', headers=((b"Content-Type", JSON),)
    )


def test_no_other_header_counts_unless_it_is_named() -> None:
    agent = ((b"User-Agent", b"b/2"), (b"traceparent", b"00-1"), (b"Api-Version", b"2026-01-01"))
    assert request(b"{}", headers=agent) == request(b"{}")

    def of(*headers: tuple[bytes, bytes], names: tuple[str, ...] = ("Api-Version", "X-Region")) -> bytes:
        return request(b"{}", rules=Rules(headers=names), headers=headers)

    one = of((b"Api-Version", b"1"))
    assert one == of((b"api-VERSION", b" 1\t"), (b"User-Agent", b"x"))
    assert one == of((b"Api-Version", b"1"), names=("x-region", "API-VERSION", "api-version"))
    a, b = (b"x-region", b"a"), (b"x-region", b"b")
    others = [one, of(), of((b"Api-Version", b"2")), of((b"Api-Version", b"")), of((b"x-region", b"1"))]
    others += [of(a, b), of(b, a), of(a), of((b"x-region", b"a, b")), of((b"api-version", b"a"), b)]
    assert len(set(others)) == len(others)


parts = st.tuples(*[st.text("ab=&{}/", max_size=3).map(str.encode)] * 4)


@given(parts, parts)
def test_nothing_can_be_moved_from_one_part_to_another(
    one: tuple[bytes, ...], other: tuple[bytes, ...]
) -> None:
    def of(values: tuple[bytes, ...]) -> Fingerprint:
        path, media, header, body = values
        return of_request(
            "POST", path, b"", [(b"content-type", media), (b"h", header)], body, Rules(headers=("h",))
        )

    assert (of(one) == of(other)) == (one == other)


# --- values and bytes


class Currency(str):
    def __str__(self) -> str:
        return "Currency"


class Price(float):
    def __repr__(self) -> str:
        return f"Price({float(self)})"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": [1, 2]}, {"b": (1, 2), "a": 1}),
        (1, Decimal("1.000")),
        (1, 1.0),
        (0.1, Decimal("0.1")),
        (Price(0.1), 0.1),
        (1e22, 10**22),
        (1e-7, Decimal("0.0000001")),
        ({"n": 10**6000}, {"n": Decimal("1E+6000")}),
        (0, -0.0),
        (0, Decimal("-0E+9")),
        (Currency("eur"), "eur"),
    ],
)
def test_values_of_one_meaning(one: object, other: object) -> None:
    assert of_value(one) == of_value(other)


def test_values_of_different_meaning() -> None:
    values: list[object] = [
        None,
        True,
        False,
        0,
        1,
        "1",
        "",
        [],
        {},
        [1],
        {"1": 1},
        0.1,
        Decimal("0.1000000000000000055511151231257827"),
        2**53,
        2**53 + 1,
    ]
    assert len({of_value(value) for value in values}) == len(values)


@pytest.mark.parametrize("value", [b"x", {1, 2}, object(), 1j, {1: 2}, {"a": 1, None: 2}, [b""], range(3)])
def test_what_is_not_json(value: object) -> None:
    with pytest.raises(TypeError, match=r"JSON"):
        of_value(value)


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        [float("inf")],
        {"a": -float("inf")},
        Decimal("NaN"),
        Decimal("sNaN"),
        Decimal("-Infinity"),
    ],
)
def test_what_is_no_number(value: object) -> None:
    with pytest.raises(ValueError, match="NaN and infinity"):
        of_value(value)


def test_a_value_without_end() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="nested deeper than 100"):
        of_value(endless)


def test_pointers_leave_the_caller_s_value_alone() -> None:
    value = {"a": [1, {"at": 1, "x": 2}], "b": 1}
    before = json.dumps(value)
    rules = Rules(exclude=("/a/1/at", "/b"))
    assert of_value(value, rules) == of_value({"a": [1, {"x": 2}]})
    assert json.dumps(value) == before
    assert of_value(value, Rules(only=("/b",))) == of_value({"b": 1, "c": 2}, Rules(only=("/b",)))


def test_requests_values_and_bytes_are_kinds_apart() -> None:
    assert len({of_bytes(b"{}"), of_value({}), of_value("{}"), of_request("", b"", b"", [], b"{}")}) == 4
    assert of_bytes(b"a") != of_bytes(b"b")
