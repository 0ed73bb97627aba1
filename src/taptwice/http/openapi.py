"""What a keyed route adds to its OpenAPI description: the header, the refusals, the marker, the window."""

from __future__ import annotations

from typing import Any

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
    ("key-reused", 422, "The key was used before with a different request, or the request is invalid."),
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


def responses(policy: Policy) -> dict[int | str, dict[str, Any]]:
    """The refusals, by status."""
    found: dict[int | str, dict[str, Any]] = {}
    for name, status, words in _REFUSALS:
        status = policy.status.get(name, status)
        found[status] = {
            "description": words,
            "content": {"application/problem+json": {"schema": PROBLEM}},
            **({"headers": _RETRY_AFTER} if status in (409, 503) else {}),
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
    """Add all of it to the options of a FastAPI route."""
    own = dict(options.get("responses") or {})
    status = options.get("status_code") or 200
    success = dict(own.pop(status, {}))
    success["headers"] = {**marker(policy), **success.get("headers", {})}
    success.setdefault("description", "Successful Response")
    options["responses"] = {**responses(policy), **own, status: success}
    if policy.key_pointer is None:
        extra = dict(options.get("openapi_extra") or {})
        extra["parameters"] = [*extra.get("parameters", ()), header_parameter(policy)]
        extra["x-idempotency-window-seconds"] = int(policy.window_s)
        options["openapi_extra"] = extra
