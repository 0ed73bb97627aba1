"""The matrix: every case on every application, store and driver, or through every way into the client, as
the page of the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from taptwice.conformance.run import Result
from taptwice.conformance.stack import APPS, DRIVERS

Cell = tuple[str, str, str]
"""Application, store, driver."""

_SIGNS = {"passed": "✓", "failed": "**✗**", "skipped": "–"}


def cells() -> list[Cell]:
    """All of them."""
    return [
        (app, store, driver)
        for app, able in APPS.items()
        for store, drivers in DRIVERS.items()
        for driver in drivers
        if driver in able
    ]


def as_markdown(found: Mapping[Cell, list[Result]], clients: Mapping[str, list[Result]]) -> str:
    """The page: of servers a column each, and below them the clients, by their names."""
    lines = [
        "# The matrix of the wire suite",
        "",
        "Written by `taptwice conformance matrix --save`; not edited by hand.",
        "",
        "| | application | store | driver | passed | failed | skipped | core passed | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for number, (cell, results) in enumerate(found.items(), 1):
        counts = Counter(result.status for result in results)
        core = sum(result.status == "passed" and result.case.level == "core" for result in results)
        numbers = (*(counts[status] for status in _SIGNS), core, round(sum(r.seconds for r in results)))
        lines.append(f"| {number} | {' | '.join(cell)} | {' | '.join(map(str, numbers))} |")
    columns = range(1, len(found) + 1)
    lines += [
        "",
        "Each case on each of them: ✓ passed, ✗ failed, – skipped. The reasons are below.",
        "",
        f"| case | level | {' | '.join(map(str, columns))} |",
        f"|---|---|{'---|' * len(found)}",
    ]
    rows = list(zip(*found.values(), strict=True))
    lines += [_row(row) for row in rows]
    of_clients = list(zip(*clients.values(), strict=True))
    lines += [
        "",
        "## Cases about clients",
        "",
        f"| case | level | {' | '.join(clients)} |",
        f"|---|---|{'---|' * len(clients)}",
        *map(_row, of_clients),
        "",
        "## Why cases are skipped",
        "",
    ]
    reasons: dict[str, list[str]] = {}
    for row in [*rows, *of_clients]:
        for reason in dict.fromkeys(result.reason for result in row if result.status == "skipped"):
            reasons.setdefault(reason, []).append(row[0].case.id)
    lines += [f"- {reason}: {', '.join(names)}" for reason, names in sorted(reasons.items())]
    return "\n".join([*lines, ""])


def _row(row: Sequence[Result]) -> str:
    signs = " | ".join(_SIGNS[result.status] for result in row)
    return f"| {row[0].case.id} | {row[0].case.level} | {signs} |"
