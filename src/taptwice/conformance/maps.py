"""The map of somebody else's server, read; each mistake in it is named by its place."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from taptwice.conformance.language import Case, own_cases
from taptwice.conformance.routes import ROUTES, Route, Routes, places
from taptwice.conformance.words import SETTINGS
from taptwice.errors import Misuse

_MEMBER = re.compile(r'"(\w+)"\s*:')
_NAMES = tuple(field.name for field in fields(Route))
_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "path": (lambda value: isinstance(value, str) and value.startswith("/"), "a path that begins with /"),
    "method": (lambda value: isinstance(value, str) and value.isalpha(), "a method, such as POST"),
    "status": (lambda value: type(value) is int and 200 <= value <= 599, "a status, 200 to 599"),
    "body": (lambda value: value is None or isinstance(value, dict | str), "an object or a text"),
}


def read(text: str, cases: Iterable[Case] = ()) -> Routes:
    """The routes of a map. `cases`: those whose members a template may name, beside the package's own.

    Raises `Misuse`.
    """
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise Misuse(f"cannot read the map: {error}") from error
    if not isinstance(raw, dict) or not raw:
        raise Misuse('the map is not an object of routes; write {"payment": {"path": …}}')
    settings = raw.pop("settings", {})
    _check_settings(settings)
    if unknown := raw.keys() - ROUTES.keys():
        names = ", ".join(sorted(unknown))
        raise Misuse(f"the map names {names}; there are {', '.join(ROUTES)} and settings")
    every = (*own_cases(), *cases)
    return Routes({name: _route(name, each, every) for name, each in raw.items()}, settings)


def _check_settings(settings: Any) -> None:
    if not isinstance(settings, dict):
        raise Misuse("the map's settings are not an object of settings and their values")
    for name, value in settings.items():
        if name not in SETTINGS:
            raise Misuse(
                f"the map names {name} among its settings: the language has none{_meant(name, SETTINGS)}"
            )
        if not SETTINGS[name](value):
            raise Misuse(f"the map's settings: {name} cannot be {json.dumps(value)}")


def _route(name: str, raw: Any, cases: Iterable[Case]) -> Route:
    if not isinstance(raw, dict):
        raise Misuse(f"the map's {name} is not an object with a path: {json.dumps(raw)}")
    for word, value in raw.items():
        if word not in _VALUES:
            raise Misuse(f"the map's {name} has no {word}; there are {', '.join(_NAMES)}")
        good, wanted = _VALUES[word]
        if not good(value):
            raise Misuse(f"the map's {name}: {word} is {json.dumps(value)}; it must be {wanted}")
    if "path" not in raw:
        raise Misuse(f"the map's {name} has no path")
    known = _members(name, cases)
    for word in ("path", "body"):
        for place in sorted(places(raw.get(word)) - known - ({"id"} if word == "path" else set())):
            there = ", ".join(f"{{{each}}}" for each in sorted(known))
            raise Misuse(f"the map's {name}: the cases have no {{{place}}} for its {word}; there are {there}")
    return Route(**raw)


def _members(name: str, cases: Iterable[Case]) -> set[str]:
    """The members that the cases send to a route, as a template names them."""
    sent = (
        request
        for case in cases
        for request in case.requests()
        if ROUTES[name].fullmatch(str(request.get("path", "/payments")))
    )
    return {member.removesuffix("_cents") for each in sent for member in _members_of(each)}


def _members_of(request: Mapping[str, Any]) -> Iterable[str]:
    """Those of a body that is given as JSON or, to its last byte, as text."""
    given = request.get("json")
    return given if isinstance(given, dict) else _MEMBER.findall(str(request.get("body", "")))


def _meant(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else ""
