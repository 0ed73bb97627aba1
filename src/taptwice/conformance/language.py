"""The language of the cases: read them, and find the words that are not in it.

A word that the language does not have fails its case with that word; it is never ignored. `language.json`
describes the words for people, the sets below name them for the machine, and a test compares the two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from taptwice.errors import Misuse

SETTINGS = frozenset(
    [
        "header",
        "key_source",
        "key_required",
        "key_syntax",
        "key_max_len",
        "key_format",
        "key_guard",
        "methods",
        "announce_ignored",
        "echo_key",
        "replay_header",
        "replay_allow",
        "replay_allow_extra",
        "scope",
        "anonymous",
        "auth",
        "fingerprint",
        "window",
        "uuid7_guard",
        "partition_by",
        "mode",
        "in_flight",
        "wait_max",
        "retry_after",
        "pool_size",
        "lease",
        "lease_renew",
        "provider_timeout",
        "provider_strategy",
        "completer",
        "save",
        "save_max_body",
        "request_max_body",
        "request_decompression",
        "streams",
        "replay",
        "store",
        "store_down",
        "store_timeout",
        "read_replica",
        "read_before_claim",
        "db_isolation",
        "gzip_middleware",
        "cors",
        "handler_timeout",
        "nodes",
        "node2.fingerprint",
        "regions",
        "home",
        "status_map",
        "client",
    ]
)
FINGERPRINT = frozenset(["version", "parts", "json", "form", "multipart", "exclude", "only", "headers"])
REQUEST = frozenset(
    [
        "id",
        "method",
        "path",
        "key",
        "headers",
        "headers_b64",
        "as",
        "json",
        "body",
        "body_b64",
        "body_gen",
        "form",
        "multipart",
        "content_type",
        "content_encoding",
        "transfer",
        "hold_at",
        "fault",
        "max_ms",
        "node",
        "region",
        "via",
        "follow",
        "truncate_body_after",
        "signature",
    ]
)
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

FAULTS = re.compile(r"crash|raise|drop_reply|lose_ack|lose_request|sqlstate:[0-9A-Z]{5}")
MATCHERS = re.compile(
    r"present|absent|single|=.*|~.*|contains:.*|int:-?\d+\.\.-?\d+"
    r"|(?:same|same-lines|not-stored|differs-or-absent):\w+",
    re.DOTALL,
)
STORE_STATES = re.compile(r"up|down|read_only|slow:\d+(?:ms|s)")
POINTS = frozenset(
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
        "after_lease",
        "before_provider",
        "after_provider",
        "after_charged",
        "before_final_commit",
        "after_final_commit",
        "after_inner",
        "forward_reply",
        "after_send",
    ]
)


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
    if not isinstance(listed, list) or not all(isinstance(each, dict) and "id" in each for each in listed):
        raise ValueError("not a list of cases, each an object with an id")
    return tuple(map(_case, listed))


_FIELDS = frozenset(
    ["id", "group", "title", "sut", "level", "source", "modes", "given", "when", "then", "note"]
)


def _case(raw: Mapping[str, Any]) -> Case:
    known = {name: raw[name] for name in _FIELDS & raw.keys()}
    for name in ("modes", "when"):
        if name in known:
            known[name] = (known[name],) if isinstance(known[name], str) else tuple(known[name])
    strange = [f"case: {word}" for word in raw.keys() - _FIELDS]
    strange += _strange(raw.get("given", {}), raw.get("when", ()), raw.get("then", {}))
    return Case(**{"group": "", "title": "", **known, "strange": tuple(sorted(strange))})


def _strange(given: Mapping[str, Any], when: Any, then: Mapping[str, Any]) -> Iterator[str]:
    for name in given:
        if name not in SETTINGS and not name.startswith("client."):
            yield f"given: {name}"
    rules = given.get("fingerprint")
    if isinstance(rules, Mapping):
        yield from _beyond("given.fingerprint", rules, FINGERPRINT)
    for step in when:
        yield from _strange_step(step)
    yield from _strange_then(then)


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
    if name == "reached" and value.get("point") not in POINTS:
        yield f"point: {value.get('point')}"
    if name == "store" and not STORE_STATES.fullmatch(str(value)):
        yield f"store: {value}"


def _strange_request(where: str, request: Mapping[str, Any]) -> Iterator[str]:
    yield from _beyond(f"when.{where}", request, REQUEST)
    if request.get("hold_at", "in_handler") not in POINTS:
        yield f"point: {request['hold_at']}"
    fault = request.get("fault")
    if fault is not None:
        yield from _beyond("fault", fault, frozenset({"at", "do", "times"}))
        if fault.get("at") not in POINTS:
            yield f"point: {fault.get('at')}"
        if not FAULTS.fullmatch(str(fault.get("do"))):
            yield f"fault: {fault.get('do')}"


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
