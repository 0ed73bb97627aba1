"""The words of the language, for the machine: each setting and step, and which values of it are words too.

`language.json` describes them for people; a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Known = Callable[[Any], bool]


def _of(*words: Any) -> Known:
    return lambda value: value in words and type(value) in {type(word) for word in words}


def _text(pattern: str) -> Known:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value, re.DOTALL) is not None


def _all(known: Known) -> Known:
    return lambda value: isinstance(value, list) and all(map(known, value))


def _members(known: Mapping[str, Known]) -> Known:
    return lambda value: (
        isinstance(value, Mapping)
        and all(name in known and known[name](each) for name, each in value.items())
    )


def _number(value: Any) -> bool:
    return type(value) is int and value >= 0


def _anything(_: Any) -> bool:
    return True


_YES_OR_NO = _of(True, False)
_NAME = _text(r"[!-~]+")
_POINTERS = _all(_text(r"(?:/[^/]*)*"))
DURATION = r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+"
_DURATION = _text(DURATION)
_STORES = "postgres|postgresql|mysql|mariadb|sqlite|redis|nats|dynamodb"

FINGERPRINT: Mapping[str, Known] = {
    "version": _of(1, 2),
    "parts": _all(_of("method", "path", "query", "media_type", "body")),
    "json": _of("canonical", "raw"),
    "form": _of("sorted-stable"),
    "multipart": _of("parts"),
    "exclude": _POINTERS,
    "only": _POINTERS,
    "headers": _all(_NAME),
}
SETTINGS: Mapping[str, Known] = {
    "header": lambda value: _NAME(value) or _all(_NAME)(value),
    "key_source": _text(r"header|json:/.*"),
    "key_required": _YES_OR_NO,
    "key_syntax": _of("lenient", "strict"),
    "key_max_len": _number,
    "key_format": _of("uuid"),
    "key_guard": _YES_OR_NO,
    "methods": _all(_of("POST", "PATCH", "PUT", "DELETE")),
    "announce_ignored": _YES_OR_NO,
    "echo_key": _YES_OR_NO,
    "replay_header": _NAME,
    "replay_allow": _all(_NAME),
    "replay_allow_extra": _all(_NAME),
    "scope": _all(_text(r"account|route|user|header:.+")),
    "anonymous": _of("reject", "shared-uuid"),
    "auth": _of("required", "optional"),
    "fingerprint": _members(FINGERPRINT),
    "window": _DURATION,
    "uuid7_guard": _YES_OR_NO,
    "partition_by": _of("none", "hour", "day"),
    "mode": _of("tx", "lease"),
    "in_flight": _of("wait", "conflict"),
    "wait_max": _DURATION,
    "retry_after": _number,
    "pool_size": _number,
    "lease": _DURATION,
    "lease_renew": _YES_OR_NO,
    "provider_timeout": _DURATION,
    "provider_strategy": _of("key", "lookup", "reference", "escalate"),
    "completer": _YES_OR_NO,
    "save": _of("final", "success", "all-after-start"),
    "save_max_body": _number,
    "request_max_body": _number,
    "request_decompression": _YES_OR_NO,
    "streams": _of("pass", "capture"),
    "replay": _of("stored", "rebuild"),
    "store": _text(rf"(?:{_STORES})(?:\|(?:{_STORES}))*"),
    "store_down": _of("closed", "open"),
    "store_timeout": _DURATION,
    "read_replica": _YES_OR_NO,
    "read_before_claim": _YES_OR_NO,
    "db_isolation": _of("read committed", "repeatable read", "serializable"),
    "gzip_middleware": _of("outside"),
    "cors": _YES_OR_NO,
    "handler_timeout": _DURATION,
    "nodes": _number,
    "node2.fingerprint": _members(FINGERPRINT),
    "regions": _all(_NAME),
    "home": lambda value: isinstance(value, Mapping),
    "status_map": _members(dict.fromkeys(("missing", "invalid", "reused", "in_progress", "store"), _number)),
    "client": _anything,
    "client.breaker": _anything,
    "client.budget": _anything,
    "client.auto_key": _YES_OR_NO,
    "client.key_quoting": _of("bare", "sf-string"),
}
"""Each setting, and whether a value of it is in the language."""

POINTS = {
    "tx": frozenset(
        [
            "before_claim",
            "after_claim",
            "in_handler",
            "between_effects",
            "after_effect",
            "before_commit",
            "commit",
            "after_commit",
            "before_reply",
        ]
    ),
    "lease": frozenset(
        [
            "after_claim",
            "after_lease",
            "before_provider",
            "after_provider",
            "after_charged",
            "before_final_commit",
            "after_final_commit",
            "before_reply",
            "in_handler",
            "after_effect",
        ]
    ),
    "nested": frozenset({"after_inner"}),
    "region": frozenset({"forward_reply"}),
    "relay": frozenset({"after_send"}),
}
_POINT = _of(*frozenset().union(*POINTS.values()))
_FAULT = _members(
    {
        "at": _POINT,
        "do": _text(r"crash|raise|drop_reply|lose_ack|lose_request|sqlstate:[0-9A-Z]{5}"),
        "times": _number,
    }
)
REQUEST: Mapping[str, Known] = {
    "id": _anything,
    "method": _anything,
    "path": _anything,
    "key": _anything,
    "headers": _anything,
    "headers_b64": _anything,
    "as": lambda value: value is None or _text(r"acct_\w+(?:/\w+)?|tenant:.*|invalid_token")(value),
    "json": _anything,
    "body": _anything,
    "body_b64": _anything,
    "body_gen": _members({"size": _number, "seed": _anything}),
    "form": _anything,
    "multipart": _members({"boundary": _anything, "parts": _anything}),
    "content_type": _anything,
    "content_encoding": _of("gzip", "deflate", "identity"),
    "transfer": _of("chunked"),
    "hold_at": _POINT,
    "fault": _FAULT,
    "max_ms": _number,
    "node": _text(r"node\d+"),
    "region": _NAME,
    "via": _text(r"direct|duplicating_proxy|node\d+"),
    "follow": _YES_OR_NO,
    "truncate_body_after": _number,
    "signature": _of("valid", "bad"),
}
CLIENT_STEPS = frozenset(
    ["server_script", "client_call", "client_calls", "client_restart", "client_resume", "webhook_send"]
)
STEPS = CLIENT_STEPS | frozenset(
    [
        "send",
        "start",
        "start_n",
        "parallel",
        "reached",
        "release",
        "await",
        "await_prefix",
        "disconnect",
        "disconnect_prefix",
        "restart",
        "advance",
        "set_clock",
        "clock_skew",
        "sweep",
        "store",
        "deploy",
        "revoke",
        "provider",
        "relay",
        "complete_stuck",
        "duplicate_all",
        "settle",
        "behaviour",
        "seed_keys",
        "migrate",
        "replica_lag",
        "region",
        "sleep",
    ]
)
MODIFIERS: Mapping[str, frozenset[str]] = {
    "advance": frozenset({"clock", "heartbeats"}),
    "set_clock": frozenset({"clock"}),
    "provider": frozenset({"idempotent"}),
    "relay": frozenset({"fault"}),
    "restart": frozenset({"node"}),
}
"""Words that stand beside a step's own."""

PARTS: Mapping[str, frozenset[str]] = {
    "start_n": frozenset(["n", "prefix", "req", "barrier", "spread_over", "list"]),
    "parallel": frozenset(["n", "prefix", "req", "barrier", "spread_over", "list"]),
    "reached": frozenset({"req", "point"}),
    "duplicate_all": frozenset({"mode", "reqs"}),
    "deploy": frozenset(
        ["fingerprint", "window", "key_required", "alias", "payments_response", "unknown_point_for"]
    ),
    "revoke": frozenset({"as", "permission"}),
    "seed_keys": frozenset({"n", "age"}),
    "clock_skew": frozenset({"node", "by"}),
    "client_call": frozenset(["id", "method", "path", "json", "intent", "kill_after", "virtual_time"]),
    "client_calls": frozenset(["n", "sequential", "parallel", "over", "virtual_time"]),
}
"""The words inside a step that is an object."""

VALUES: Mapping[str, Known] = {
    "advance": _DURATION,
    "set_clock": _text(r"\d{4}-\d\d-\d\dT.+|\{now.*\}"),
    "sleep": _DURATION,
    "store": _text(rf"up|down|read_only|slow:{DURATION}"),
    "replica_lag": _DURATION,
    "region": lambda value: (
        isinstance(value, Mapping)
        and all(isinstance(each, Mapping) or each in ("up", "down") for each in value.values())
    ),
    "reached": lambda value: isinstance(value, Mapping) and _POINT(value.get("point")),
    "duplicate_all": lambda value: value.get("mode", "sequential") in ("sequential", "parallel"),
}
"""Steps whose values are words of the language."""

RESPONSE = frozenset(
    [
        "status",
        "status_in",
        "replayed",
        "problem",
        "headers",
        "body",
        "body_is",
        "body_len",
        "decoded",
        "json",
        "json_has",
        "body_not_contains",
        "redirects",
    ]
)
GROUP = frozenset(["prefix", "counts", "only_statuses", "replayed", "first_executions", "bodies_equal"])
CLIENT_THEN = frozenset(
    [
        "result",
        "error",
        "attempts",
        "attempts_max",
        "first_attempts",
        "retries",
        "keys_distinct",
        "bodies_distinct",
        "waits_ms",
        "waits_ms_stats",
        "elapsed_ms",
        "methods",
        "wire_header",
        "server_hits",
        "server_effects",
        "instant_failures",
        "state",
        "after_cooldown",
        "deliveries",
        "event_ids_distinct",
        "client",
    ]
)
THEN = CLIENT_THEN | frozenset(
    [
        "responses",
        "group",
        "groups",
        "effects",
        "keys",
        "provider",
        "emails",
        "emails_sent",
        "balances",
        "product",
        "metrics",
        "logs",
        "admin",
        "review_queue",
        "point",
    ]
)
EFFECTS = frozenset(
    [
        "payments",
        "payments_inserted",
        "transfers",
        "ledger",
        "wallets",
        "effects",
        "uploads",
        "payouts",
        "payouts2",
        "orders",
        "inbox",
        "outbox",
        "unkeyed",
    ]
)
KEYS = frozenset({"total", "saved"})
LOGS = frozenset(["field", "value", "min_requests", "all_lines", "not_contains"])

MATCHERS = re.compile(
    r"present|absent|single|=.*|~.*|contains:.*|int:-?\d+\.\.-?\d+"
    r"|(?:same|same-lines|not-stored|differs-or-absent):\w+",
    re.DOTALL,
)
