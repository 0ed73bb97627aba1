"""Expectations of the client cases against what was measured: ranges, counts, statistics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

GUARD = 10
"""Upper bounds of real time are hang guards, allowed tenfold. Waits take no time and are exact."""

COUNTS = (
    "attempts",
    "first_attempts",
    "retries",
    "keys_distinct",
    "bodies_distinct",
    "server_hits",
    "server_effects",
    "instant_failures",
)
SAME = ("methods", "error", "state")

STATISTICS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "n": len,
    "count": len,
    "distinct": lambda values: len(set(values)),
    "min": min,
    "max": max,
    "mean": statistics.fmean,
    "median": statistics.median,
    "stdev": lambda values: statistics.stdev(values) if len(values) > 1 else 0.0,
    "stddev": lambda values: statistics.stdev(values) if len(values) > 1 else 0.0,
    "p50": lambda values: _percentile(values, 0.50),
    "p90": lambda values: _percentile(values, 0.90),
    "p95": lambda values: _percentile(values, 0.95),
    "p99": lambda values: _percentile(values, 0.99),
}
"""Over waits, in milliseconds."""


def flat(then: Mapping[str, Any]) -> dict[str, Any]:
    """The expectations of a client case stand beside each other, or in `client`."""
    return {**{name: value for name, value in then.items() if name != "client"}, **then.get("client", {})}


def differences(then: Mapping[str, Any], client: Mapping[str, Any]) -> Iterator[str]:
    """The differences between what is expected (flat) and what was measured."""
    for name in COUNTS:
        if name in then and not _one_of(then[name], client[name]):
            yield f"{name}: expected {then[name]}, found {client[name]}"
    for name in SAME:
        if name in then and client[name] != then[name]:
            yield f"{name}: expected {then[name]}, found {client[name]}"
    if "attempts_max" in then and client["attempts"] > then["attempts_max"]:
        yield f"attempts_max: expected {then['attempts_max']} at most, found {client['attempts']}"
    if "elapsed_ms" in then:
        low, high = then["elapsed_ms"]
        if not low <= client["elapsed_ms"] <= high * GUARD:
            yield f"elapsed_ms: expected {low} to {high}, found {client['elapsed_ms']:.0f}"
    if "waits_ms" in then:
        yield from _waits(then["waits_ms"], client["waits_ms"])
    if "waits_ms_stats" in then:
        yield from _statistics(then["waits_ms_stats"], client["waits_ms"])
    for name, wanted in then.get("after_cooldown", {}).items():
        found = client["after_cooldown"].get(name)
        if found != wanted:
            yield f"after_cooldown.{name}: expected {wanted}, found {found}"
    if client["unlogged"]:
        yield f"the client's log lacks {client['unlogged']} of what the server saw"


def _one_of(wanted: Any, found: Any) -> bool:
    return found in wanted if isinstance(wanted, list) else bool(found == wanted)


def _waits(wanted: Sequence[Sequence[float]], calls: Sequence[Sequence[float]]) -> Iterator[str]:
    waits = [wait for waits in calls for wait in waits]
    if len(waits) != len(wanted):
        yield f"waits_ms: expected {len(wanted)} waits, found {[round(wait) for wait in waits]}"
        return
    for number, ((low, high), found) in enumerate(zip(wanted, waits, strict=True), 1):
        if not low <= found <= high:
            yield f"waits_ms: wait {number}: expected {low} to {high}, found {found:.0f}"


def _statistics(wanted: Any, calls: Sequence[Sequence[float]]) -> Iterator[str]:
    """One object is about all waits; in a list of them the n-th is about the n-th waits of the calls."""
    if isinstance(wanted, Mapping):
        groups = [(wanted, [wait for waits in calls for wait in waits])]
    else:
        groups = [
            (each, [waits[place] for waits in calls if place < len(waits)])
            for place, each in enumerate(wanted)
        ]
    for expected, waits in groups:
        for name, bounds in expected.items():
            found = STATISTICS[name](waits) if waits else math.nan
            low, high = bounds if isinstance(bounds, list) else _bounds(name, bounds)
            if not low <= found <= high:
                yield f"waits_ms_stats.{name}: expected {bounds}, found {found:.1f}"


def _bounds(name: str, value: float) -> tuple[float, float]:
    """What a single number allows: a bound of the extremes, exactly that of counts, else about that."""
    match name:
        case "n" | "count" | "distinct":
            return value, value
        case "min":
            return value, math.inf
        case "max":
            return -math.inf, value
    return value * 0.9, value * 1.1


def _percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[math.ceil(part * len(values)) - 1]
