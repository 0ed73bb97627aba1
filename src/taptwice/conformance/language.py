"""The language of the cases: read them, and find the words that are not in it.

A word that the language does not have fails its case with that word; it is never ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from taptwice.conformance import shape
from taptwice.conformance.words import (
    EFFECTS,
    GROUP,
    KEYS,
    LOGS,
    MATCHERS,
    MODIFIERS,
    PARTS,
    REQUEST,
    RESPONSE,
    SETTINGS,
    STEPS,
    THEN,
    VALUES,
    Known,
)
from taptwice.errors import Misuse

_BRACES = re.compile(r"\{(\w+\.\w+)\}")
_FROM_ANSWERS = re.compile(r"\w+\.(?:id|etag)")


@dataclass(frozen=True, slots=True)
class Case:
    """One case, as it stands in its file."""

    id: str
    group: str
    title: str
    sut: str = "server"
    level: str = "core"
    source: str = ""
    modes: tuple[str, ...] = ("tx",)
    given: Mapping[str, Any] = field(default_factory=dict)
    when: tuple[Mapping[str, Any], ...] = ()
    then: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    strange: tuple[str, ...] = ()
    """Words that are not in the language."""

    def requests(self) -> Iterator[Mapping[str, Any]]:
        """All requests of its steps; one that is sent n times is one."""
        return (request for step in self.steps() for request in _requests_of(step))

    def steps(self) -> Iterator[Mapping[str, Any]]:
        """All steps, those that are taken together too."""
        return _steps(self.when)


def _steps(steps: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for step in steps:
        yield step
        for value in step.values():
            yield from _steps(value.get("list", ())) if isinstance(value, Mapping) else ()


def _requests_of(step: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for name, value in step.items():
        if name in ("send", "start", "webhook_send"):
            yield value
        elif isinstance(value, Mapping):
            if isinstance(value.get("req"), Mapping):
                yield value["req"]
            yield from value.get("reqs", ())


def own_cases() -> tuple[Case, ...]:
    """The cases of this package."""
    return parse((files(__package__) / "cases.json").read_text("utf-8"))


def language() -> Mapping[str, Any]:
    """The description of the language."""
    described: Mapping[str, Any] = json.loads((files(__package__) / "language.json").read_text("utf-8"))
    return described


def cases_of(path: str | Path) -> tuple[Case, ...]:
    """The cases of a file. Raises `Misuse` when it is not a list of cases."""
    try:
        return parse(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise Misuse(f"cannot read the cases of {path}: {error}") from error


def parse(text: str) -> tuple[Case, ...]:
    """The cases of a JSON text. Raises ValueError."""
    listed = json.loads(text)
    if not isinstance(listed, list) or not all(
        isinstance(each, dict) and isinstance(each.get("id"), str) for each in listed
    ):
        raise ValueError("not a list of cases, each an object with an id, which is a text")
    return tuple(map(_case, listed))


_FIELDS = frozenset(
    ["id", "group", "title", "sut", "level", "source", "modes", "given", "when", "then", "note"]
)


def _case(raw: Mapping[str, Any]) -> Case:
    if ill := tuple(shape.wrong(raw)):
        return Case(raw["id"], "not well-formed", "", strange=ill)  # nothing of it is looked at
    known = {name: raw[name] for name in _FIELDS & raw.keys()}
    for name in ("modes", "when"):
        if name in known:
            known[name] = (known[name],) if isinstance(known[name], str) else tuple(known[name])
    strange = [f"case: {word}" for word in raw.keys() - _FIELDS]
    strange += _strange(raw.get("given", {}), raw.get("when", ()), raw.get("then", {}))
    return Case(**{"group": "", "title": "", **known, "strange": tuple(sorted(strange))})


def _strange(given: Mapping[str, Any], when: Any, then: Mapping[str, Any]) -> Iterator[str]:
    yield from _unknown("given", given, SETTINGS)
    for step in when:
        yield from _strange_step(step)
    yield from _strange_then(then)


def _unknown(where: str, words: Mapping[str, Any], known: Mapping[str, Known]) -> Iterator[str]:
    """The words and the values that are not in a table."""
    for name, value in words.items():
        if name not in known:
            yield f"{where}: {name}"
        elif not known[name](value):
            yield f"{where}.{name}: {value if isinstance(value, str) else json.dumps(value)}"


def _beyond(where: str, words: Mapping[str, Any], known: frozenset[str]) -> Iterator[str]:
    return (f"{where}: {word}" for word in words if word not in known)


def _strange_step(step: Mapping[str, Any]) -> Iterator[str]:
    names = [name for name in step if name in STEPS]
    # `region` is a step and a word of requests, `clock` only a modifier: the first known word is the step.
    name = names[0] if names else None
    if name is None:
        yield from (f"when: {word}" for word in step)
        return
    yield from _beyond(f"when.{name}", step, frozenset({name}) | MODIFIERS.get(name, frozenset()))
    value = step[name]
    if name in VALUES and not VALUES[name](value):
        yield f"when.{name}: {value if isinstance(value, str) else json.dumps(value)}"
        return
    if "clock" in step and step["clock"] != "http":
        yield f"clock: {step['clock']}"
    if name in ("send", "start", "webhook_send"):
        yield from _strange_request(name, value)
    if name in PARTS and isinstance(value, Mapping):
        yield from _beyond(f"when.{name}", value, PARTS[name])
        if "req" in value and name != "reached":
            yield from _strange_request(name, value["req"])
        for request in value.get("reqs", ()):
            yield from _strange_request(name, request)
        for inner in value.get("list", ()):
            yield from _strange_step(inner)


def _strange_request(where: str, request: Mapping[str, Any]) -> Iterator[str]:
    yield from _unknown(f"when.{where}", request, REQUEST)
    for word in _BRACES.findall(json.dumps(request)):
        if not _FROM_ANSWERS.fullmatch(word):
            yield f"{{{word}}}"


def _strange_then(then: Mapping[str, Any]) -> Iterator[str]:
    yield from _beyond("then", then, THEN)
    for expected in then.get("responses", {}).values():
        yield from _beyond("then.responses", expected, RESPONSE)
        for matcher in expected.get("headers", {}).values():
            if not MATCHERS.fullmatch(str(matcher)):
                yield f"header matcher: {matcher}"
        if not re.fullmatch(r"(equals|differs):\w+", expected.get("body", "equals:x")):
            yield f"body: {expected['body']}"
    for group in [then["group"]] if "group" in then else then.get("groups", []):
        yield from _beyond("then.group", group, GROUP)
    yield from _beyond("then.effects", then.get("effects", {}), EFFECTS)
    yield from _beyond("then.keys", then.get("keys", {}), KEYS)
    yield from _beyond("then.logs", then.get("logs", {}), LOGS)
