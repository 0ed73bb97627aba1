"""Whether a case is well-formed: objects, lists and names where the language has them.

Which words there are is for `taptwice.conformance.language` to say, once the case has its shape.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_TEXTS = ("group", "title", "sut", "level", "note")


def wrong(raw: Mapping[str, Any]) -> Iterator[str]:
    """What has another shape in a case than the language gives it; nothing in one that is well-formed."""
    yield from (f"{name}: not a text" for name in _TEXTS if not isinstance(raw.get(name, ""), str))
    modes = raw.get("modes", ())
    if not isinstance(modes, str) and not all(isinstance(each, str) for each in _listed(modes)):
        yield "modes: not a list of texts"
    yield from _object("given", raw.get("given", {}))
    yield from _list("when", raw.get("when", ()), _step)
    then = raw.get("then", {})
    yield from _object("then", then)
    if isinstance(then, Mapping):
        yield from _then(then)


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value,)


def _object(where: str, value: Any) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"{where}: {_short(value)} is not an object"


def _list(where: str, value: Any, each: Callable[[str, Any], Iterator[str]]) -> Iterator[str]:
    if not isinstance(value, list | tuple):
        yield f"{where}: {_short(value)} is not a list"
        return
    for one in value:
        yield from each(where, one)


def _members(where: str, value: Any, each: Callable[[str, Any], Iterator[str]]) -> Iterator[str]:
    yield from _object(where, value)
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from each(f"{where}.{name}", one)


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:40]


def _step(where: str, step: Any) -> Iterator[str]:
    yield from _object(where, step)
    for name, value in step.items() if isinstance(step, Mapping) else ():
        here = f"{where}.{name}"
        if name in ("send", "start"):
            yield from _request(here, value)
        elif name in ("parallel", "start_n"):
            yield from _many(here, value)
        elif name == "duplicate_all":
            yield from _object(here, value)
            if isinstance(value, Mapping):
                yield from _list(f"{here}.reqs", value.get("reqs"), _request)
        elif name == "server_script":
            yield from _list(here, value, _object)
        elif name in ("reached", "deploy", "revoke", "seed_keys", "clock_skew") or name in _OF_CLIENTS:
            yield from _object(here, value)


_OF_CLIENTS = ("client_call", "client_calls", "webhook_send")


def _request(where: str, request: Any) -> Iterator[str]:
    yield from _object(where, request)
    if isinstance(request, Mapping) and not isinstance(request.get("id"), str):
        yield f"{where}: no id"


def _many(where: str, value: Any) -> Iterator[str]:
    yield from _object(where, value)
    if not isinstance(value, Mapping):
        return
    if "list" in value:
        yield from _list(f"{where}.list", value["list"], _step)
        return
    yield from _object(f"{where}.req", value.get("req"))
    if type(value.get("n")) is not int:
        yield f"{where}: no number n"
    if not isinstance(value.get("prefix"), str):
        yield f"{where}: no prefix"


def _then(then: Mapping[str, Any]) -> Iterator[str]:
    yield from _members("then.responses", then.get("responses", {}), _response)
    for name in {"effects", "keys", "logs", "balances", "client"} & then.keys():
        yield from _object(f"then.{name}", then[name])
    if "result" in then:
        yield from _response("then.result", then["result"])
    if "group" in then:
        yield from _group("then.group", then["group"])
    yield from _list("then.groups", then.get("groups", ()), _group)


def _response(where: str, expected: Any) -> Iterator[str]:
    yield from _object(where, expected)
    if isinstance(expected, Mapping):
        yield from _object(f"{where}.headers", expected.get("headers", {}))
        if not isinstance(expected.get("body", ""), str):
            yield f"{where}.body: not a text"


def _group(where: str, expected: Any) -> Iterator[str]:
    yield from _object(where, expected)
    if isinstance(expected, Mapping) and not isinstance(expected.get("prefix"), str):
        yield f"{where}: no prefix"
