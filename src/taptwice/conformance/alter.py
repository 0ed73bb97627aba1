"""Would the judge notice? Each expectation of each case is altered, and judged on a recorded exchange.

An alteration turns one expectation into one that the recorded exchange does not meet: another status, the
marker present instead of absent, one effect more. The judge must find a difference; what it does not notice
it cannot check.
"""

from __future__ import annotations

import base64
import copy
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from taptwice.conformance.clients import altered as of_clients
from taptwice.conformance.judge import Observed, judge
from taptwice.conformance.language import Case
from taptwice.conformance.wire import Response

RECORDED = "recorded.json.gz"
CLIENTS_RECORDED = "clients/recorded.json.gz"

WHY = {"logs.all_lines": " (false asks for nothing: not all lines need the field)"}
"""Why an alteration is not noticed."""


@dataclass(frozen=True, slots=True)
class Alteration:
    """One changed expectation of a case."""

    case: str
    what: str
    noticed: bool


def altered(case: Case, seen: Observed) -> Iterator[Alteration]:
    """Every alteration of a case, judged."""
    for what, then in alterations(case.then, seen):
        yield Alteration(case.id, what, bool(judge(then, seen)))


def alterations(then: Mapping[str, Any], seen: Observed) -> Iterator[tuple[str, dict[str, Any]]]:
    """What was altered, and all expectations with that one altered."""
    for path, value in _others(then, seen):
        changed = copy.deepcopy(dict(then))
        place: Any = changed
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        yield ".".join(map(str, path)), changed


Path = tuple[Any, ...]


def _others(then: Mapping[str, Any], seen: Observed) -> Iterator[tuple[Path, Any]]:
    for name, expected in then.get("responses", {}).items():
        for path, value in _other_response(expected, seen.responses[name]):
            yield ("responses", name, *path), value
    groups: list[tuple[Path, Any]] = [(("group",), then["group"])] if "group" in then else []
    groups += [(("groups", number), each) for number, each in enumerate(then.get("groups", []))]
    for path, group in groups:
        for name in group.keys() - {"prefix"}:
            yield (*path, name), _other(group[name])
    for section in ("effects", "balances", "keys", "metrics"):
        for name, value in then.get(section, {}).items():
            yield (section, name), _other(value)
    for name, value in then.get("logs", {}).items():
        yield ("logs", name), _other(value)
    if seen.client is not None:
        for path, value in _other_response(then.get("result", {}), seen.responses["result"]):
            yield ("result", *path), value
        yield from of_clients.others(then, seen.client)


def _other_response(expected: Mapping[str, Any], found: Response) -> Iterator[tuple[Path, Any]]:
    for word, value in expected.items():
        match word:
            case "headers":
                for name, matcher in value.items():
                    yield ("headers", name), _other_matcher(matcher)
            case "body":
                how, _, other = value.partition(":")
                yield ("body",), f"{'differs' if how == 'equals' else 'equals'}:{other}"
            case "json":
                for name, leaf in value.items():
                    yield ("json", name), _other(leaf)
            case "problem":
                yield ("problem",), "no-such-problem"
            case "json_has":
                yield ("json_has",), [*value, "no such member"]
            case "body_not_contains":
                yield ("body_not_contains",), [*value, found.decoded().decode("utf-8", "replace")[:3]]
            case _:
                yield (word,), _other(value)


def _other_matcher(matcher: str) -> str:
    how, _, value = matcher.partition(":")
    if matcher == "present":
        return "absent"
    if matcher == "absent":
        return "present"
    if how == "not-stored":
        return f"same:{value}"
    return "=something else"


def _other(value: Any) -> Any:
    """A value of the same kind that is not this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return f"other {value}"
    if isinstance(value, Mapping):
        return {name: _other(each) for name, each in value.items()} or {"no such": 1}
    if isinstance(value, list):
        # Of what is allowed nothing is left that was seen.
        return [each + 1000 if isinstance(each, int) else f"other {each}" for each in value]
    return "other"


# --- recordings -----------------------------------------------------------------------------------------


def packed(recorded: Mapping[str, Observed]) -> bytes:
    """Recorded exchanges as the file that the package carries."""
    plain = {name: asdict(seen) for name, seen in recorded.items()}
    text = json.dumps(plain, default=lambda raw: {"b64": base64.b64encode(raw).decode()}, sort_keys=True)
    return gzip.compress(text.encode(), mtime=0)


def recordings() -> dict[str, Observed]:
    """The recorded exchanges of the package."""

    def read(raw: dict[str, Any]) -> Any:
        return base64.b64decode(raw["b64"]) if raw.keys() == {"b64"} else raw

    found: dict[str, Any] = {}
    for name in (RECORDED, CLIENTS_RECORDED):
        text = gzip.decompress((files(__package__) / name).read_bytes())
        found |= json.loads(text, object_hook=read)
    return {name: _observed(raw) for name, raw in found.items()}


def _observed(raw: dict[str, Any]) -> Observed:
    responses = {
        name: Response(**{**each, "headers": [(line[0], line[1]) for line in each["headers"]]})
        for name, each in raw["responses"].items()
    }
    return Observed(**{**raw, "responses": responses})


def noticed(cases: Iterable[Case], recorded: Mapping[str, Observed]) -> list[Alteration]:
    """All alterations of all cases that are recorded."""
    return [each for case in cases if case.id in recorded for each in altered(case, recorded[case.id])]
