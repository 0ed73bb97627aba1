"""Expectations against what was observed: the first difference of each, in words."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from taptwice.conformance.clients import measured
from taptwice.conformance.tables import RECORDS
from taptwice.conformance.wire import NO_RESPONSE, Response
from taptwice.core.model import key_hash

GUARD = 10
"""Upper bounds of time are hang guards, allowed tenfold."""


@dataclass(slots=True)
class Observed:
    """All that a case leaves behind."""

    marker: str = "Idempotent-Replayed"
    responses: dict[str, Response] = field(default_factory=dict)
    effects: dict[str, int] = field(default_factory=dict)
    balances: dict[str, int] = field(default_factory=dict)
    keys: int | None = None
    logs: list[dict[str, Any]] = field(default_factory=list)
    max_ms: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    unstruck: list[str] = field(default_factory=list)
    """Faults that were asked for and never happened."""
    client: dict[str, Any] | None = None
    """What was measured of a client, where the case is about one; see `taptwice.conformance.clients.play`."""
    uncounted: bool = False
    """Whether the server does not show what it keeps: effects, keys and balances are not judged then."""

    def count(self, rows: Mapping[str, int], wallets: Mapping[str, int]) -> None:
        """Add the rows of a database."""
        for table, number in rows.items():
            if table == RECORDS:
                self.keys = (self.keys or 0) + number
            else:
                self.effects[table] = self.effects.get(table, 0) + number
        self.balances.update(wallets)

    def scrape(self, response: Response) -> None:
        """Add the metrics of a process, as Prometheus reads them."""
        for line in response.body.decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.replace('"', "").rpartition(" ")
                self.metrics[name] = self.metrics.get(name, 0) + float(value)


def judge(then: Mapping[str, Any], seen: Observed) -> list[str]:
    """The differences between what is expected and what was observed; none is a pass."""
    return list(_differences(then, seen))


def _differences(then: Mapping[str, Any], seen: Observed) -> Iterator[str]:
    if seen.client is not None:
        yield from _of_client(measured.flat(then), seen, seen.client)
    for name, expected in then.get("responses", {}).items():
        found = seen.responses.get(name)
        if found is None:
            yield f"{name}: was never sent"
            continue
        yield from (f"{name}: {text}" for text in _response(expected, found, seen))
    for name, limit in seen.max_ms.items():
        if seen.responses[name].elapsed_ms > limit * GUARD:
            yield f"{name}: took {seen.responses[name].elapsed_ms:.0f} ms, allowed {limit} ms"
    for group in [then["group"]] if "group" in then else then.get("groups", []):
        yield from (f"group {group['prefix']}: {text}" for text in _group(group, seen))
    if not seen.uncounted:
        yield from _kept(then, seen)
    for name, wanted in then.get("metrics", {}).items():
        if not _allowed(wanted, seen.metrics.get(name, 0)):
            yield f"metrics.{name}: expected {wanted}, found {seen.metrics.get(name, 0):g}"
    for fault in seen.unstruck:
        yield f"the fault never happened: {fault}"
    if "logs" in then:
        yield from (f"logs: {text}" for text in _logs(then["logs"], seen.logs))


def _of_client(then: Mapping[str, Any], seen: Observed, client: Mapping[str, Any]) -> Iterator[str]:
    if "result" in then:
        found = seen.responses.get("result", Response())
        if found.status == NO_RESPONSE:
            yield f"result: expected {json.dumps(then['result'])}, found the error {client['error']}"
        else:
            yield from (f"result: {text}" for text in _response(then["result"], found, seen))
    for value in client["wire"] or [None] if "wire_header" in then else ():
        sent = Response(headers=[] if value is None else [(_KEY, value)])
        if not _matches(then["wire_header"], _KEY, sent, {}):
            yield f"wire_header: expected {then['wire_header']}, found {value}"
    yield from measured.differences(then, client)


_KEY = "Idempotency-Key"


def _allowed(wanted: Any, found: Any) -> bool:
    """A list of values means any of them."""
    return found in wanted if isinstance(wanted, list) else bool(found == wanted)


def _kept(then: Mapping[str, Any], seen: Observed) -> Iterator[str]:
    for table, wanted in then.get("effects", {}).items():
        if not _allowed(wanted, seen.effects.get(table)):
            yield f"effects.{table}: expected {wanted}, found {seen.effects.get(table)}"
    for wallet, cents in then.get("balances", {}).items():
        if not _allowed(cents, seen.balances.get(wallet)):
            yield f"balances.{wallet}: expected {cents}, found {seen.balances.get(wallet)}"
    for name, wanted in then.get("keys", {}).items():
        if not _allowed(wanted, seen.keys):  # a record is inserted complete: all of them are saved
            yield f"keys.{name}: expected {wanted}, found {seen.keys}"


def _status(response: Response) -> int | str:
    return "no-response" if response.status == NO_RESPONSE else response.status


def _response(expected: Mapping[str, Any], found: Response, seen: Observed) -> Iterator[str]:
    status = _status(found)
    if "status" in expected and status != expected["status"]:
        yield f"status: expected {expected['status']}, found {status}: {_short(found.body)}"
    if "status_in" in expected and status not in expected["status_in"]:
        yield f"status: expected one of {expected['status_in']}, found {status}: {_short(found.body)}"
    if "replayed" in expected:
        marked = found.header(seen.marker) is not None
        if marked != expected["replayed"]:
            yield f"{seen.marker}: expected {_presence(expected['replayed'])}, is {_presence(marked)}"
    if "problem" in expected:
        yield from _problem(expected["problem"], found)
    for name, matcher in expected.get("headers", {}).items():
        if not _matches(matcher, name, found, seen.responses):
            yield f"{name}: expected {matcher}, found {found.lines(name)}"
    if "body" in expected:
        how, _, other = expected["body"].partition(":")
        equal = other in seen.responses and found.body == seen.responses[other].body
        if equal != (how == "equals"):
            yield f"body: expected {expected['body']}, found {_short(found.body)}"
    if "body_is" in expected and found.body != str(expected["body_is"]).encode():
        yield f"body: expected {expected['body_is']!r}, found {_short(found.body)}"
    if "body_len" in expected and len(found.body) != expected["body_len"]:
        yield f"body_len: expected {expected['body_len']}, found {len(found.body)}"
    if "decoded" in expected and found.decoded() != expected["decoded"].encode():
        yield f"decoded: expected {expected['decoded']!r}, found {_short(found.decoded())}"
    if "json" in expected and not _subset(expected["json"], found.json()):
        yield f"json: expected {json.dumps(expected['json'])}, found {_short(found.body)}"
    document = found.json()
    for name in expected.get("json_has", ()):
        if not isinstance(document, dict) or name not in document:
            yield f"json_has: {name} is missing in {_short(found.body)}"
    for text in expected.get("body_not_contains", ()):
        if text.encode() in found.decoded():
            yield f"body_not_contains: {text!r} is in {_short(found.body)}"
    if "redirects" in expected:
        wanted = expected["redirects"]
        if (found.redirects if isinstance(wanted, list) else len(found.redirects)) != wanted:
            yield f"redirects: expected {wanted}, found {found.redirects}"


def _presence(present: bool) -> str:
    return "present" if present else "absent"


def _short(body: bytes) -> str:
    return repr(body if len(body) <= 160 else body[:160] + b"...")


def _problem(wanted: str, found: Response) -> Iterator[str]:
    document = found.json()
    kind = found.header("Content-Type")
    if kind != "application/problem+json" or not isinstance(document, dict):
        yield f"problem: expected {wanted}, found {kind}: {_short(found.body)}"
        return
    if str(document.get("type", "")).rpartition("/")[2] not in wanted.split("|"):
        yield f"problem: expected {wanted}, found {document.get('type')}"
    if document.get("status") != found.status:
        yield f"problem: its status member is {document.get('status')}, the answer's status {found.status}"


def _matches(matcher: str, name: str, found: Response, responses: Mapping[str, Response]) -> bool:
    lines = found.lines(name)
    first = lines[0] if lines else None
    how, _, value = matcher.partition(":")
    other = responses.get(value, Response())
    if matcher.startswith("="):
        return first == matcher[1:]
    if matcher.startswith("~"):
        return first is not None and re.search(matcher[1:], first) is not None
    match how:
        case "present":
            return bool(lines)
        case "absent":
            return not lines
        case "single":
            return len(lines) == 1
        case "contains":
            return first is not None and value in first
        case "int":
            low, high = value.split("..")
            return first is not None and first.isdigit() and int(low) <= int(first) <= int(high)
        case "same":
            return first == other.header(name)
        case "same-lines":
            return lines == other.lines(name)
        case "not-stored":
            return first is not None and first != other.header(name)
        case "differs-or-absent":
            return first is None or first != other.header(name)
    return False


def _subset(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(
            name in found and _subset(value, found[name]) for name, value in wanted.items()
        )
    return bool(wanted == found) and isinstance(wanted, bool) == isinstance(found, bool)


def _group(expected: Mapping[str, Any], seen: Observed) -> Iterator[str]:
    name = re.compile(re.escape(expected["prefix"]) + r"\d+")
    members = [response for each, response in seen.responses.items() if name.fullmatch(each)]
    counted = Counter(str(_status(response)) for response in members)
    marked = [response.header(seen.marker) is not None for response in members]
    if not members:
        yield "nothing was sent"
    if "counts" in expected and counted != expected["counts"]:
        yield f"counts: expected {expected['counts']}, found {dict(counted)}"
    allowed = {str(status) for status in expected.get("only_statuses", counted)}
    if stray := counted.keys() - allowed:
        yield f"only_statuses: expected {sorted(allowed)}, found {sorted(stray)} too"
    if "replayed" in expected and not _allowed(expected["replayed"], sum(marked)):
        yield f"replayed: expected {expected['replayed']}, found {sum(marked)}"
    if "first_executions" in expected:
        first = sum(_final(response) and not mark for response, mark in zip(members, marked, strict=True))
        if not _allowed(expected["first_executions"], first):
            yield f"first_executions: expected {expected['first_executions']}, found {first}"
    if "bodies_equal" in expected:
        bodies = {response.body for response in members if response.status != 409}
        if (len(bodies) <= 1) != expected["bodies_equal"]:
            yield f"bodies_equal: expected {expected['bodies_equal']}, found {len(bodies)} different bodies"


def _final(response: Response) -> bool:
    """Whether it tells the outcome, and not that there is none yet."""
    return response.status != NO_RESPONSE and response.status not in (409, 503)


def _logs(expected: Mapping[str, Any], lines: list[dict[str, Any]]) -> Iterator[str]:
    value = re.sub(r"\{hash:(.*)\}", lambda found: key_hash(found[1]), str(expected.get("value", "")))
    name = expected.get("field")
    if name is not None:
        carrying = [line for line in lines if line.get(name) == value]
        requests = {line["request"] for line in carrying}
        if len(requests) < expected.get("min_requests", 1):
            yield f"{name}={value}: found for {len(requests)} requests"
        if expected.get("all_lines") and len(carrying) != len(lines):
            bare = next(line for line in lines if line.get(name) != value)
            yield f"all_lines: without {name}: {bare['name']}: {bare['message']}"
    unwanted = expected.get("not_contains", [])
    for text in [unwanted] if isinstance(unwanted, str) else unwanted:
        if any(text in str(line) for line in lines):
            yield f"not_contains: {text!r} is in a line"
