"""Other expectations than those that a measured client meets: see `taptwice.conformance.alter`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from taptwice.conformance.clients.measured import COUNTS, GUARD

Path = tuple[Any, ...]


def others(then: Mapping[str, Any], client: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Where each expectation of a client case stands, and a value that was not measured. Not of `result`."""
    for name in COUNTS:
        if name in then:
            yield (name,), client[name] + 1
    for name in then.keys() & {"error", "state"}:
        yield (name,), f"other {then[name]}"
    for name, value in then.get("after_cooldown", {}).items():
        yield ("after_cooldown", name), f"other {value}"
    if "methods" in then:
        yield ("methods",), [*then["methods"], "GET"]
    if "wire_header" in then:
        yield ("wire_header",), "=something else"
    if "attempts_max" in then:
        yield ("attempts_max",), client["attempts"] - 1
    if "elapsed_ms" in then:
        found = client["elapsed_ms"]
        yield ("elapsed_ms",), [found + 1, found + 2]
        yield ("elapsed_ms",), [0, found / GUARD / 2]
    if "waits_ms" in then:
        waits = [wait for each in client["waits_ms"] for wait in each]
        for number, wait in enumerate(waits):
            yield ("waits_ms", number), [wait + 1, wait + 2]
            yield ("waits_ms", number), [wait - 2, wait - 1]
        yield ("waits_ms",), then["waits_ms"][:-1]
