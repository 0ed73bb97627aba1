"""The cases in the words of somebody else's server: its routes, its bodies, keys that nobody has used.

A map names a route of the reference application, and what it is called there:

    {"payment":  {"method": "POST", "path": "/charges", "status": 200,
                  "body": {"amount": "{amount}", "currency": "{currency}", "source": "tok_visa"}},
     "transfer": {"path": "/transfers", "body": {"from": "{from}", "to": "{to}", "amount": "{amount}"}},
     "settings": {"in_flight": "conflict"}}

In a body or a path, ``{amount}`` is the amount in cents of the case, ``{from}`` its member of that name. A
body may be text as well. `status` is what stands for the reference application's 201. `settings` are those
that differ from the defaults of the language.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from taptwice.conformance.language import Case

ROUTES: Mapping[str, re.Pattern[str]] = {
    name: re.compile(path.replace("{id}", r"(?P<id>[^/?]+)") + r"(?P<query>\?.*)?")
    for name, path in {
        "payment": "/payments",
        "payment_item": "/payments/{id}",
        "transfer": "/transfers",
        "script": "/script",
        "form": "/form",
        "upload": "/upload",
        "wallet": "/wallets/{id}",
        "unkeyed": "/unkeyed",
    }.items()
}
"""The routes that a map may name, as the reference application has them."""

MEANING = frozenset({"card", "sleep_ms"})
"""Members that make the reference application do something, so that they must be in the template."""

_UUID = re.compile(r"(?<=-[0-9a-fA-F]{4}-[0-9a-fA-F]{4})[0-9a-fA-F]{8}\b")
"""The end of a UUID, which is random in every version."""
_OF_THE_RESOURCE = frozenset({("Location", "present"), ("ETag", "present")})
"""What the reference application tells of a payment, and another service need not."""

_PLACE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Route:
    """One route of the server, as `taptwice.conformance.maps` reads it."""

    path: str
    method: str = "POST"
    body: Any = None
    status: int = 201


@dataclass(frozen=True, slots=True)
class Routes:
    """What a server is called like, and how it is set."""

    named: Mapping[str, Route]
    settings: Mapping[str, Any]

    def missing(self, case: Case, fresh: bool) -> Iterator[str]:
        """Why a case cannot be put in the words of this server. `fresh`: its keys must be new ones."""
        for request in case.requests():
            found = self._route(request)
            if found is None:
                yield f"no route for {request.get('path', '/payments')} in the map"
                continue
            if fresh and len(_bare(str(request.get("key", "")))) == 1:
                yield "its key is too short to be made one that was never used"
            template, path = found[1].body, found[1].path
            if "body" in request and places(path) - {"id"}:
                yield "the case gives the body in bytes, and the path of the map has members of it"
            if template is None:
                continue
            sent = request.get("json")
            left = [
                name for name in (sent if isinstance(sent, dict) else ()) if name not in _used(template, path)
            ]
            put = ", ".join(f"{{{name.removesuffix('_cents')}}}" for name in left)
            if MEANING & set(left):
                yield f"no {put} in the body of the map: put {put} into body"
            elif left and not isinstance(template, dict):
                yield f"put {put} into body"
            elif "body" in request and not isinstance(template, dict):
                yield "the case gives the body in bytes, and the body of the map is text"

    def translated(self, case: Case, salt: str) -> Case:
        """The case for this server. `salt` makes its keys new ones: 8 hexadecimal digits, or none."""
        statuses: dict[str, int] = {}
        when = tuple(self._step(step, salt, statuses) for step in case.when)
        return replace(case, when=when, then=_then(case.then, statuses))

    def _route(self, request: Mapping[str, Any]) -> tuple[re.Match[str], Route] | None:
        for name, route in self.named.items():
            match = ROUTES[name].fullmatch(str(request.get("path", "/payments")))
            if match is not None:
                return match, route
        return None

    def _step(self, step: Mapping[str, Any], salt: str, statuses: dict[str, int]) -> dict[str, Any]:
        return {name: self._value(name, value, salt, statuses) for name, value in step.items()}

    def _value(self, name: str, value: Any, salt: str, statuses: dict[str, int]) -> Any:
        if name in ("send", "start"):
            return self._request(value, salt, statuses, value["id"])
        if name not in ("parallel", "start_n", "duplicate_all"):
            return value
        value = dict(value)
        if "req" in value:
            value["req"] = self._request(value["req"], salt, statuses, value["prefix"])
        if "reqs" in value:
            value["reqs"] = [self._request(each, salt, statuses, each["id"]) for each in value["reqs"]]
        if "list" in value:
            value["list"] = [self._step(each, salt, statuses) for each in value["list"]]
        return value

    def _request(
        self, request: Mapping[str, Any], salt: str, statuses: dict[str, int], name: str
    ) -> dict[str, Any]:
        found = self._route(request)
        if found is None:
            return dict(request)
        match, route = found
        statuses[name] = route.status
        path = _path(route.path, match.groupdict().get("id") or "", match["query"] or "", request.get("json"))
        made = {**request, "path": path, "method": request.get("method", route.method)}
        if request.get("method", "POST") == "POST":
            made["method"] = route.method
        if "key" in request:
            made["key"] = salted(request["key"], salt)
        if "headers" in request:
            made["headers"] = [
                [line, salted(value, salt) if "idempotency-key" in line.lower() else value]
                for line, value in request["headers"]
            ]
        if route.body is not None and (body := _body(route, request)):
            made.pop("json", None)
            made.update(body)
        return made


def places(template: Any) -> set[str]:
    """The names in braces."""
    return set(_PLACE.findall(json.dumps(template)))


def _used(*templates: Any) -> set[str]:
    return {name for place in places(templates) for name in (place, f"{place}_cents")}


def _path(template: str, id_: str, query: str, given: Any) -> str:
    """The path of a request. A parameter of the template's query that the case does not give is left out."""
    members = {**(given if isinstance(given, dict) else {}), "id": id_}

    def filled(text: str) -> str:
        return _PLACE.sub(lambda m: quote(str(_member(members, m[1])), safe=""), text)

    def is_given(part: str) -> bool:
        return all(_member(members, place) is not _LEFT_OUT for place in _PLACE.findall(part))

    path, _, own = template.partition("?")
    parts = [*(filled(part) for part in own.split("&") if part and is_given(part)), query.removeprefix("?")]
    joined = "&".join(filter(None, parts))
    return filled(path) + (f"?{joined}" if joined or query else "")


def _body(route: Route, request: Mapping[str, Any]) -> dict[str, Any]:
    """The words of a request that describe its body."""
    given, template = request.get("json"), route.body
    if isinstance(template, str) and isinstance(given, dict):
        return {"body": _PLACE.sub(lambda m: str(_member(given, m[1])), template)}
    if isinstance(given, dict):
        used = _used(template, route.path)
        extra = {name: value for name, value in given.items() if name not in used}
        return {"json": {**_rendered(template, given), **extra}}
    if "body" in request and isinstance(template, dict):
        return {"body": _renamed(request["body"], template)}
    return {}


_LEFT_OUT = object()


def _member(given: Mapping[str, Any], place: str) -> Any:
    return given.get(f"{place}_cents", given.get(place, _LEFT_OUT))


def _rendered(template: Any, given: Mapping[str, Any]) -> Any:
    if isinstance(template, dict):
        made = {name: _rendered(each, given) for name, each in template.items()}
        return {name: each for name, each in made.items() if each is not _LEFT_OUT}
    if isinstance(template, str) and (whole := _PLACE.fullmatch(template)):
        return _member(given, whole[1])
    if isinstance(template, str):
        return _PLACE.sub(lambda m: str(_member(given, m[1])), template)
    return template


def _renamed(text: str, template: Mapping[str, Any]) -> str:
    """A body that is given in bytes, its members called as here, and the constant ones put in front."""
    constant = {}
    for name, value in template.items():
        place = _PLACE.fullmatch(value) if isinstance(value, str) else None
        if place is None:
            constant[name] = value
        else:
            for member in (f"{place[1]}_cents", place[1]):
                text = text.replace(json.dumps(member), json.dumps(name))
    start = text.find("{")
    if not constant or start < 0 or text[start + 1 :].lstrip().startswith("}"):
        return text
    return f"{text[: start + 1]}{json.dumps(constant)[1:-1]},{text[start + 1 :]}"


def _bare(key: str) -> str:
    return key.strip().strip('"').strip()


def salted(key: str, salt: str) -> str:
    """A key that nobody has used, of the same kind; equal ones stay equal, long ones keep their length."""
    if not salt:
        return key
    if _UUID.search(key):
        return _UUID.sub(lambda m: f"{int(m[0], 16) ^ int(salt, 16):08{'X' if m[0].isupper() else 'x'}}", key)
    bare = _bare(key)
    if len(bare) < 2:
        return key
    at = key.index(bare)
    new = str(int(salt, 16)) if bare.isdigit() else salt
    if len(bare) > 40:
        return key[:at] + new + key[at + len(new) :]
    return key[:at] + new + key[at:]


def _then(then: Mapping[str, Any], statuses: Mapping[str, int]) -> dict[str, Any]:
    """The expectations, with this server's status where the reference application has its 201."""

    def here(name: str, expected: Mapping[str, Any]) -> dict[str, Any]:
        created = next((status for each, status in statuses.items() if each.startswith(name)), 201)

        def changed(status: Any) -> Any:
            return created if status == 201 else status

        made = dict(expected)
        for word in {"status"} & made.keys():
            made[word] = changed(made[word])
        for word in {"status_in", "only_statuses"} & made.keys():
            made[word] = [changed(status) for status in made[word]]
        if "headers" in made:
            made["headers"] = {
                line: matcher
                for line, matcher in made["headers"].items()
                if (line, matcher) not in _OF_THE_RESOURCE
            }
        if "counts" in made:
            counts = made["counts"].items()
            made["counts"] = {str(created) if status == "201" else status: n for status, n in counts}
        return made

    made = {**then, "responses": {name: here(name, each) for name, each in then.get("responses", {}).items()}}
    if "group" in then:
        made["group"] = here(then["group"]["prefix"], then["group"])
    if "groups" in then:
        made["groups"] = [here(each["prefix"], each) for each in then["groups"]]
    return made
