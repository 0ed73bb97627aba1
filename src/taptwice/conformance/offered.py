"""Why a case cannot be run on the reference applications: what is not built, or is for another store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from taptwice.conformance import tables
from taptwice.conformance.clients.words import for_clients
from taptwice.conformance.language import Case
from taptwice.conformance.words import POINTS

_LEASED = frozenset({"lease", "lease_renew", "provider_timeout", "provider_strategy", "completer"})
"""Settings without a meaning in the joined mode, in which every case is run that has it."""

_STEPS = {
    "provider": "lease",
    "relay": "outbox",
    "complete_stuck": "lease",
}
_THEN = {
    "provider": "lease",
    "emails": "outbox",
    "emails_sent": "outbox",
    "product": "inbox",
    "admin": "admin page",
    "review_queue": "lease",
    "point": "lease",
}
_PATHS = {
    "/checkout": "nested",
    "/loop": "nested",
    "/webhooks": "inbox",
    "/payouts": "lease",
}
_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "mode": ("tx",),
    "partition_by": ("none", "day"),
}
"""Settings of which only some values are offered."""


def not_offered(case: Case, app: str, store: str) -> Iterator[str]:
    """Each reason; none when the case can be run."""
    if for_clients(case):
        yield "about a client, not about a server"
        return
    if "tx" not in case.modes:
        yield f"mode {'/'.join(case.modes)} is not built"
        return
    yield from dict.fromkeys((*_given(case.given, store), *_when(case, app), *_then(case.then)))


def _given(given: Mapping[str, Any], store: str) -> Iterator[str]:
    for name, value in given.items():
        if name.partition(".")[0] == "client":
            yield f"{name} is not built"
        elif name in _SETTINGS and value not in _SETTINGS[name]:
            yield f"{name}={value} is not built"
    if given.get("partition_by", "none") != "none" and store == "sqlite":
        yield "for the store postgres: SQLite has no partitions"
    wanted = str(given.get("store", store)).replace("postgresql", "postgres").split("|")
    if store.replace("postgresql", "postgres") not in wanted:
        yield f"for the store {'|'.join(wanted)}"
    if given.get("store_down") == "open":
        yield "the records are in the service's own database: when it is down, nothing can run unprotected"


def _when(case: Case, app: str) -> Iterator[str]:
    for step in case.steps():
        for word in step:
            if word in _STEPS:
                yield f"{_STEPS[word]} is not built"
        if "unknown_point_for" in step.get("deploy", {}):
            yield "lease is not built"
    for request in case.requests():
        path = str(request.get("path", ""))
        for start, what in _PATHS.items():
            if path.startswith(start):
                yield f"{what} is not built"
        for point in (request.get("hold_at"), request.get("fault", {}).get("at")):
            kinds = [kind for kind, points in POINTS.items() if point in points]
            if point is not None and not {"tx", "region"} & set(kinds):
                yield f"{kinds[0]} is not built"
        if app == "flask" and _joined_to_one(request):
            yield "WSGI joins the lines of a header: these two are one string when they arrive"


def _joined_to_one(request: Mapping[str, Any]) -> bool:
    """Whether two lines of the key make one well-formed string when they are joined."""
    values = [value for name, value in request.get("headers", ()) if name.lower() == "idempotency-key"]
    return len(values) > 1 and values[0].startswith('"') and not values[0].endswith('"')


def _then(then: Mapping[str, Any]) -> Iterator[str]:
    for word in then:
        if word in _THEN:
            yield f"{_THEN[word]} is not built"
    if missing := then.get("effects", {}).keys() - set(tables.TABLES):
        yield f"no table {', '.join(sorted(missing))} in this application"
    for name in then.get("metrics", {}):
        if not name.startswith("taptwice_claims_total"):
            yield f"the metric {name} is not built"
