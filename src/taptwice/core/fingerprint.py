"""What was asked for, as 32 bytes: two requests under one key are the same request if these are equal.

A retry is often not the same bytes: a library orders members anew, writes 1 as 1.0, draws another multipart
boundary. Answering such an honest retry with "key reused" drives the user to a new key, and so to a second
payment. A body is therefore read by its meaning wherever its media type says how. Where the meaning is open
(duplicate JSON members, broken multipart) the bytes themselves count, under a tag of their own.

Numbers never pass through a float, in which 2**53 and 2**53 + 1 are one number.

Every part is length-prefixed, so that nothing can be moved from one part to the next, and the result is a
SHA-256 under a version. All versions start from the same canonical form: during a deploy, one reading of a
request answers for the records of the old code as well as for those of the new.
"""

from __future__ import annotations

import json
import re
from binascii import unhexlify
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from hashlib import sha256
from typing import Final, Literal, TypeGuard, overload

__all__ = ["VERSION", "VERSIONS", "Fingerprint", "Rules", "of_bytes", "of_request", "of_value"]

VERSION: Final = 1
"""The version that new records carry unless told otherwise."""

VERSIONS: Final = frozenset({1, 2})
"""The versions that this code can make."""

PARTS: Final = ("method", "path", "query", "media_type", "body")
"""What of a request counts, unless told otherwise."""

# Limits on the careful reading of a body; beyond them its bytes count. They are fixed, since a limit that
# followed the free stack or memory would read one body in two ways.
MAX_DEPTH: Final = 100
MAX_FIELDS: Final = 10_000
MAX_PART_HEADER: Final = 16_384  # bytes
MAX_VALUES: Final = 100_000  # of which each may cost 280 bytes for a moment
_MAX_EXPONENT = 20  # characters

_ESCAPES = re.compile(rb"(?:%[0-9A-Fa-f]{2}){1,1000}")


def _check_version(version: int) -> None:
    if version not in VERSIONS:
        raise ValueError(f"unknown fingerprint version {version}; this code knows {sorted(VERSIONS)}")


@dataclass(frozen=True, slots=True)
class Rules:
    """How to read a request.

    ``only`` and ``exclude`` are JSON pointers (RFC 6901) and touch JSON that is read by its meaning; a
    pointer to nothing is no error. Raises ValueError for a malformed pointer or an unknown version.
    """

    json: Literal["canonical", "raw"] = "canonical"
    """Read JSON bodies by meaning, or count their bytes."""
    exclude: tuple[str, ...] = ()
    """What does not count. An excluded element of an array keeps its place there."""
    only: tuple[str, ...] = ()
    """When given, nothing else counts (after ``exclude``)."""
    headers: tuple[str, ...] = ()
    """Names, in any case, of the header fields that count too."""
    version: int = VERSION
    parts: tuple[str, ...] = PARTS
    """What of the request counts, beside the named headers; what is left out is taken as empty."""

    def __post_init__(self) -> None:
        _check_version(self.version)
        if unknown := set(self.parts) - set(PARTS):
            raise ValueError(
                f"no part of a request: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}"
            )
        for pointer in self.exclude + self.only:
            if not re.fullmatch(r"(?:/(?:[^~/]|~[01])*)*", pointer):
                raise ValueError(f"not a JSON pointer (RFC 6901), such as /meta/sent_at: {pointer!r}")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What was asked for: ``canonical`` is the untagged SHA-256 of its canonical form, 32 bytes."""

    version: int
    canonical: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _check_version(self.version)

    @overload
    def digest(self, version: None = None) -> bytes: ...
    @overload
    def digest(self, version: int) -> bytes | None: ...
    def digest(self, version: int | None = None) -> bytes | None:
        """The 32 bytes to store or to compare; None when this code does not know ``version``."""
        version = self.version if version is None else version
        if version not in VERSIONS:
            return None
        return sha256(b"taptwice/fingerprint/%d\0" % version + self.canonical).digest()


def of_request(
    method: str,
    path: bytes | str,
    query: bytes,
    headers: Sequence[tuple[bytes, bytes]],
    body: bytes,
    rules: Rules = Rules(),
) -> Fingerprint:
    """The fingerprint of an HTTP request. Never raises, whatever the caller sent.

    ``path`` is the path as it stood on the wire, percent-encoded; ``query`` comes without its question
    mark; ``headers`` are the raw lines, of which only Content-Type and ``rules.headers`` are read; ``body``
    is the whole body, decompressed if the application reads it decompressed.
    """
    content_type = b", ".join(_lines(headers, b"content-type"))
    media_type = content_type.partition(b";")[0].strip().lower()
    named = sorted({name.lower().encode("latin-1", "replace") for name in rules.headers})
    parts = rules.parts
    return _fingerprint(
        rules,
        b"request",
        _utf8(method.upper()) if "method" in parts else b"",
        (_utf8(path) if isinstance(path, str) else path) if "path" in parts else b"",
        _fields(query) if "query" in parts else b"",
        media_type if "media_type" in parts else b"",
        _pack(_pack((name, *_lines(headers, name))) for name in named),
        *(_body(media_type, content_type, body, rules) if "body" in parts else (b"", b"")),
    )


def of_value(value: object, rules: Rules = Rules()) -> Fingerprint:
    """The fingerprint of a value made of what JSON has: None, bool, int, float, Decimal, str, list,
    tuple, dict.

    Numbers are equal by decimal value, as in a JSON body; a float stands for the decimal that ``repr``
    shows. Raises TypeError for anything else, ValueError for NaN, infinity and nesting deeper than 100.
    """
    return _fingerprint(rules, b"value", _json_digest(_counted(_tree_of(value), rules)))


def of_bytes(data: bytes, rules: Rules = Rules()) -> Fingerprint:
    """The fingerprint of bytes that only their owner can read."""
    return _fingerprint(rules, b"bytes", sha256(data).digest())


def _fingerprint(rules: Rules, *parts: bytes) -> Fingerprint:
    return Fingerprint(rules.version, sha256(_pack(parts)).digest())


def _pack(parts: Iterable[bytes]) -> bytes:
    """The parts as one part. No two lists of parts are packed into the same bytes."""
    parts = tuple(parts)
    pieces = [len(parts).to_bytes(8, "big")]
    for part in parts:
        pieces += (len(part).to_bytes(8, "big"), part)
    return b"".join(pieces)


def _utf8(text: str) -> bytes:
    """UTF-8, with lone surrogates (which JSON escapes can spell) taken as they are."""
    return text.encode("utf-8", "surrogatepass")


def _lines(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value.strip(b" \t") for line_name, value in headers if line_name.lower() == name]


def _body(media_type: bytes, content_type: bytes, body: bytes, rules: Rules) -> tuple[bytes, bytes]:
    """How the body was read, and what was read."""
    if media_type == b"application/json" or media_type.endswith(b"+json"):
        if rules.json == "canonical":
            try:
                return b"json", _json_digest(_counted(_json_tree(body), rules))
            except (ValueError, RecursionError):
                return b"as-sent", sha256(body).digest()
    elif media_type == b"application/x-www-form-urlencoded":
        if body.count(b"&") < MAX_FIELDS:
            return b"form", sha256(_fields(body)).digest()
    elif media_type == b"multipart/form-data":
        try:
            return b"multipart", sha256(_pack(_multipart_parts(content_type, body))).digest()
        except ValueError:
            # Whoever reads this anyway reads it by the boundary, so that counts here.
            return b"as-sent", _pack((content_type, sha256(body).digest()))
    return b"bytes", sha256(body).digest()


def _fields(data: bytes) -> bytes:
    """A query or an urlencoded form: names in order, the values of one name in the order they were sent."""
    pairs = [
        (_percent_decoded(name), _percent_decoded(value))
        for name, _, value in (item.partition(b"=") for item in data.replace(b"+", b" ").split(b"&") if item)
    ]
    pairs.sort(key=lambda pair: pair[0])
    return _pack(text for pair in pairs for text in pair)


def _percent_decoded(text: bytes) -> bytes:
    # A run of escapes at a time: urllib's way takes seconds and gigabytes for a form full of them.
    return _ESCAPES.sub(lambda run: unhexlify(run[0].replace(b"%", b"")), text)


# JSON


_NUMBER: Final = "\0#"
"""The name that marks a number by its value. No member of a body that is read by meaning may have it."""


def has_many_values(body: bytes) -> bool:
    """Whether a JSON text may hold more than `MAX_VALUES` values; told by its punctuation alone."""
    return body.count(b",") + body.count(b"[") + body.count(b"{") > MAX_VALUES


def _json_tree(body: bytes) -> object:
    """The meaning of a JSON text, with numbers by their value.

    A byte order mark is skipped, as RFC 8259 section 8.1 allows. Raises ValueError when the text has no
    single meaning, too many values or too much nesting, RecursionError when the parser cannot take it.
    """
    if has_many_values(body):  # before the parser makes objects of them
        raise ValueError(f"perhaps more than {MAX_VALUES} values")
    tree: object = _DECODER.decode(body.decode("utf-8-sig"))
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_depth(tree)
    return tree


def _members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a member stands twice in one object, and parsers differ on which one counts")
    if _NUMBER in members:
        raise ValueError("a member has the name that marks numbers")
    return members


def _number(literal: str) -> dict[str, str]:
    """A number by its exact decimal value: sign, significant digits, exponent, and no zero to spare.

    Works on text, so that 1e1000000000 costs its twelve characters and not a gigabyte.
    """
    if literal.isdigit():
        digits, power = literal, 0  # JSON has no leading zeros
        significant = digits.rstrip("0")
    else:
        mantissa, _, exponent = literal.lower().partition("e")
        whole, _, fraction = mantissa.removeprefix("-").partition(".")
        digits = (whole + fraction).lstrip("0")
        significant = digits.rstrip("0")
        if significant and len(exponent) > _MAX_EXPONENT:
            raise ValueError(f"an exponent of more than {_MAX_EXPONENT} characters")
        power = int(exponent or "0") - len(fraction) if significant else 0
    if not significant:
        return {_NUMBER: "0"}
    sign = "-" if literal.startswith("-") else ""
    return {_NUMBER: f"{sign}{significant}e{power + len(digits) - len(significant)}"}


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


# Parser and encoder are the standard library's in C; all that is done in Python is to read the numbers.
_DECODER = json.JSONDecoder(
    parse_int=_number, parse_float=_number, parse_constant=_no_number, object_pairs_hook=_members
)
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), check_circular=False)


def _json_digest(tree: object) -> bytes:
    return sha256(_ENCODER.encode(tree).encode("ascii")).digest()


def _is_container(value: object) -> TypeGuard[list[object] | dict[str, object]]:
    return isinstance(value, list) or (isinstance(value, dict) and _NUMBER not in value)


def _check_depth(tree: object) -> None:
    """Raises ValueError beyond `MAX_DEPTH` objects and arrays in each other.

    Level by level, without recursion: what fits is the same however deep the caller stands.
    """
    level: list[object] = [tree]
    for _ in range(MAX_DEPTH + 1):
        containers = [value for value in level if _is_container(value)]
        if not containers:
            return
        level = [
            inner for each in containers for inner in (each.values() if isinstance(each, dict) else each)
        ]
    raise ValueError(f"nested deeper than {MAX_DEPTH}")


def _tree_of(value: object, depth: int = 0) -> object:
    """What `_json_tree` makes of the JSON text of a value."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float, Decimal)):
        return _number(_literal(value))
    if not isinstance(value, (dict, list, tuple)):
        raise TypeError(f"{type(value).__name__} is not JSON")
    if depth >= MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if not isinstance(value, dict):
        return [_tree_of(inner, depth + 1) for inner in value]
    if not all(isinstance(name, str) for name in value):
        raise TypeError("the names of members must be strings, as they are in JSON")
    return _members([(name, _tree_of(inner, depth + 1)) for name, inner in value.items()])


def _literal(number: int | float | Decimal) -> str:
    # By way of Decimal, since str() refuses a long int. A float's own repr, whatever a subclass makes of it.
    exact = Decimal(float.__repr__(number) if isinstance(number, float) else number)
    if not exact.is_finite():
        raise ValueError("NaN and infinity are not JSON")
    return str(exact)


# JSON pointers (RFC 6901)


def _counted(tree: object, rules: Rules) -> object:
    """What of ``tree`` counts. Copies along the pointers only; ``tree`` stays as it is."""
    for pointer in rules.exclude:
        tree = _without(tree, _steps(pointer))
    if not rules.only:
        return tree
    return {pointer: value for pointer in rules.only for value in _at(tree, _steps(pointer))}


def _steps(pointer: str) -> list[str]:
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


def _index(array: Sequence[object], step: str) -> int | None:
    inside = re.fullmatch("0|[1-9][0-9]{0,8}", step) and int(step) < len(array)
    return int(step) if inside else None


def _without(tree: object, steps: list[str]) -> object:
    if not steps:
        return None
    step, *rest = steps
    if isinstance(tree, dict) and step in tree:
        kept = {name: value for name, value in tree.items() if name != step}
        return {**kept, step: _without(tree[step], rest)} if rest else kept
    if isinstance(tree, (list, tuple)) and (index := _index(tree, step)) is not None:
        return [*tree[:index], _without(tree[index], rest), *tree[index + 1 :]]
    return tree


def _at(tree: object, steps: list[str]) -> list[object]:
    """The value at a pointer, alone in a list; an empty list when there is none."""
    for step in steps:
        if isinstance(tree, dict) and step in tree:
            tree = tree[step]
        elif isinstance(tree, (list, tuple)) and (index := _index(tree, step)) is not None:
            tree = tree[index]
        else:
            return []
    return [tree]


# Multipart (RFC 7578, RFC 2046)

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_QUOTED = rb'"((?:[^"\\\r\n]|\\[^\r\n])*+)"'
_PARAMETER = re.compile(rb"[ \t]*;[ \t]*(%b)=(?:%b|(%b))" % (_TOKEN, _QUOTED, _TOKEN))
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_PART_HEADER = re.compile(rb"(" + _TOKEN + rb"):([^\r\n]*)")
_LINE_END = re.compile(rb"(--)?[ \t]*(?:\r\n|\Z)")


def _multipart_parts(content_type: bytes, body: bytes) -> Iterator[bytes]:
    """The parts in order, each with its name, file name, type and the hash of its content.

    Boundary, preamble and epilogue do not count. Raises ValueError for whatever another parser might read
    in another way.
    """
    _, parameters = _parameters(content_type)
    boundary = parameters.get(b"boundary", b"")
    if not _BOUNDARY.fullmatch(boundary):
        raise ValueError("no usable boundary")
    view = memoryview(body)
    for number, (start, end) in enumerate(_between_delimiters(body, b"--" + boundary)):
        if number == MAX_FIELDS:
            raise ValueError(f"more than {MAX_FIELDS} parts")
        head_end = body.find(b"\r\n\r\n", start, min(end, start + MAX_PART_HEADER))
        if head_end < 0:
            raise ValueError("a part whose header is too long or has no end")
        yield _pack((*_part_header(body[start:head_end]), sha256(view[head_end + 4 : end]).digest()))


def _between_delimiters(body: bytes, delimiter: bytes) -> Iterator[tuple[int, int]]:
    """Where each part begins and ends, without the line ends that belong to the delimiters."""
    # With its line end in front: in a body full of dashes every byte may begin a bare delimiter.
    line = b"\r\n" + delimiter
    start: int | None = None
    at = -2 if body.startswith(delimiter) else body.find(line)
    while at != -1:
        line_end = _LINE_END.match(body, at + len(line))
        if line_end is None:
            raise ValueError("a delimiter with something behind it on its line")
        if start is not None:
            yield start, at
        if line_end[1]:
            return
        start = line_end.end()
        at = body.find(line, start - 2)
    raise ValueError("no closing delimiter")


def _part_header(head: bytes) -> tuple[bytes, bytes, bytes]:
    """Disposition, type and transfer encoding, which some frameworks undo. The other fields do not count."""
    fields: dict[bytes, bytes] = {}
    for line in head.split(b"\r\n"):
        match = _PART_HEADER.fullmatch(line)
        if match is None or match[1].lower() in fields:
            raise ValueError("a malformed or repeated line in the header of a part")
        fields[match[1].lower()] = match[2].strip(b" \t")
    disposition, parameters = _parameters(fields.get(b"content-disposition", b""))
    if disposition != b"form-data" or b"name" not in parameters:
        raise ValueError("a part without a name")
    media_type, type_parameters = _parameters(fields.get(b"content-type", b""))
    return (
        _pack(text for item in sorted(parameters.items()) for text in item),
        _pack((media_type, *(text for item in sorted(type_parameters.items()) for text in item))),
        fields.get(b"content-transfer-encoding", b"").lower(),
    )


def _parameters(value: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """A header value such as ``form-data; name="a"``: its first word in lower case, and its parameters.

    Quoted text keeps its escapes: two spellings of one name at worst look different.
    """
    word, semicolon, _ = value.partition(b";")
    parameters: dict[bytes, bytes] = {}
    at = len(word.rstrip(b" \t"))
    while semicolon and at < len(value):
        match = _PARAMETER.match(value, at)
        if match is None or match[1].lower() in parameters:
            raise ValueError("malformed or repeated parameters")
        parameters[match[1].lower()] = match[2] if match[3] is None else match[3]
        at = match.end()
    return word.strip().lower(), parameters
