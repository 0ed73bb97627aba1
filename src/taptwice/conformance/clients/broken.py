"""Clients that are broken on purpose: a suite that passes one of them proves nothing.

Each is `Client` over httpx2 with one thing done as people do it who build this by hand. `CONTROLS` names the
case that each must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from taptwice.client.keys import new_key
from taptwice.conformance.clients.doors import DOORS, Door, Options
from taptwice.errors import Misuse

CONTROLS = {
    "new-key-each-attempt": "D-285",
    "retries-unkeyed-post": "D-309",
    "ignores-retry-after": "D-285",
    "no-deadline": "D-288",
    "no-per-try": "D-304",
    "retries-422": "D-295",
    "no-budget": "D-313",
    "forgets-its-intents": "D-310",
}
"""What is broken -> the case that must notice."""

BROKEN = "broken:"


def door_of(name: str) -> Door:
    """A door by its name, or a broken one as ``broken:no-budget``. Raises `Misuse`."""
    if name.startswith(BROKEN):
        damage = name.removeprefix(BROKEN)
        return replace(DOORS["httpx2"], open=lambda door, options: _damaged(damage, door, options))
    if name not in DOORS:
        raise Misuse(f"no client {name!r}: choose of {', '.join(DOORS)}")
    return DOORS[name]


def _damaged(damage: str, door: Door, options: Options) -> Any:
    changes: dict[str, dict[str, Any]] = {
        "no-deadline": {"deadline": None, "retry_after_limit": 1e6},
        "no-per-try": {"per_try": None},
        "retries-422": {"refused": frozenset({408, 422, 425, 429})},
    }
    shared = dict(options.shared)
    shared["policy"] = shared["policy"].replace(**changes.get(damage, {}))
    if damage == "no-budget":
        shared["budget"] = None
    client = door_of("httpx2").open(door, replace(options, shared=shared))
    if damage in _WIRE:
        _tapped(client, _WIRE[damage])
    elif damage == "retries-unkeyed-post":
        _keyed(client)
    elif damage == "forgets-its-intents":
        client._intents = None
        client._namespace = new_key()
    return client


def _new_key(request: Any, response: Any) -> None:
    if response is None and "Idempotency-Key" in request.headers:
        request.headers["Idempotency-Key"] = new_key()


def _no_retry_after(_: Any, response: Any) -> None:
    if response is not None:
        response.headers.pop("Retry-After", None)


_WIRE: Mapping[str, Callable[[Any, Any], None]] = {
    "new-key-each-attempt": _new_key,
    "ignores-retry-after": _no_retry_after,
}
"""Each is called with a request before it is sent, and with its response."""


def _tapped(client: Any, tap: Callable[[Any, Any], None]) -> None:
    transport = client._http._transport
    below = transport.handle_request

    def handle(request: Any) -> Any:
        tap(request, None)
        response = below(request)
        tap(request, response)
        return response

    transport.handle_request = handle


def _keyed(client: Any) -> None:
    """Let every call pass for one that has a key."""
    below = client._make

    def make(going: Any) -> Any:
        going.call.keyed = True
        return below(going)

    client._make = make
