"""What a keyed route adds to its OpenAPI description: the header, the refusals, the marker, the window."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from taptwice.core.policy import Policy

PROBLEM = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "format": "uri"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
    },
}

_REFUSALS = (
    ("key-missing", 400, "The idempotency key is missing or malformed."),
    ("in-progress", 409, "A request with this key is still in progress."),
    ("key-reused", 422, "The key was used before with a different request; or the request is invalid."),
    ("store-unavailable", 503, "The keys' store cannot be used; nothing was done."),
)
_RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}


def header_parameter(policy: Policy) -> dict[str, Any]:
    """The parameter object of the key's header (OpenAPI 3.1, 4.8.12)."""
    schema: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": policy.key.max_length}
    if policy.key.uuid:
        schema["format"] = "uuid"
    return {
        "name": policy.key.names[0],
        "in": "header",
        "required": policy.required,
        "description": (
            "Names this one intent: send the same key with every attempt, and the effect happens once. "
            f"Remembered for at least {int(policy.window_s)} seconds."
        ),
        "schema": schema,
    }


def refusals(policy: Policy) -> dict[int, dict[str, Any]]:
    """The refusals, by status."""
    found: dict[int, dict[str, Any]] = {}
    for name, usual, words in _REFUSALS:
        status = policy.status.get(name, usual)
        earlier = found.get(status)
        found[status] = {
            "description": words if earlier is None else f"{earlier['description']} Or: {words}",
            "content": {"application/problem+json": {"schema": PROBLEM}},
            **({"headers": _RETRY_AFTER} if name in ("in-progress", "store-unavailable") else {}),
        }
    return found


def marker(policy: Policy) -> dict[str, Any]:
    """The header that tells a replay."""
    return {
        policy.replay_header: {
            "description": "`true` when this is the saved answer of an earlier attempt; absent otherwise.",
            "schema": {"type": "string", "enum": ["true"]},
        }
    }


def describe(options: dict[str, Any], policy: Policy) -> None:
    """Add all of it to the options of a FastAPI route, beside what the route itself says."""
    own = options.get("responses") or {}
    refused = refusals(policy)
    told = {str(status).upper() for status in own}
    words = {status: refusal.pop("description") for status, refusal in refused.items()}
    ours: dict[str, Any] = {
        "x-idempotency-window-seconds": int(policy.window_s),
        "responses": {str(status): refusal for status, refusal in refused.items()},
    }
    if policy.key_pointer is None:
        ours["parameters"] = [header_parameter(policy)]
    # A 422 among `responses` would keep FastAPI from describing its own; as an addition it does not.
    if 422 in words and not told & {"422", "4XX", "DEFAULT"}:
        ours["responses"]["422"]["description"] = words.pop(422)
    success = options.get("status_code") or _usual_status(options.get("response_class"))
    _add(ours, {"responses": {str(int(success)): {"headers": marker(policy)}}})
    options["responses"] = {
        **{status: {"description": text} for status, text in words.items() if str(status) not in told},
        **own,
    }
    _add(ours, options.get("openapi_extra") or {})
    options["openapi_extra"] = ours


def _usual_status(response_class: Any) -> int:
    """That of the response class, where the route names none: 307 of a RedirectResponse."""
    found = inspect.signature(getattr(response_class, "value", response_class) or Response).parameters
    default = found["status_code"].default if "status_code" in found else 200
    return default if isinstance(default, int) else 200


def _add(to: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Merge, at every depth; lists one after the other."""
    for name, value in more.items():
        known = to.get(name)
        if isinstance(known, dict) and isinstance(value, Mapping):
            _add(known, value)
        elif isinstance(known, list) and isinstance(value, list):
            to[name] = [*value, *known]
        else:
            to[name] = value
