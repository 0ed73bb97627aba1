"""The tables of docs/client.md: `python -m tests.client.tables` runs all cases and writes them."""

from __future__ import annotations

import pathlib
import re
import sys

from taptwice.client.plan import Call, stop
from taptwice.client.policy import DEFAULT
from tests.client.cases import CASES, GAPS, Case
from tests.client.doors import DOORS, Door
from tests.client.fake import answer, problem

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "client.md"
STATUSES = (
    200,
    303,
    400,
    401,
    402,
    403,
    404,
    405,
    408,
    409,
    410,
    412,
    413,
    415,
    422,
    425,
    429,
    *range(500, 506),
)
COLUMNS = {
    "httpx2 `Client`": ("httpx2 Client", "httpx2 AsyncClient"),
    "httpx in `Client`": ("httpx Client", "httpx AsyncClient"),
    "httpx2 transport": ("httpx2 transport", "httpx2 async transport"),
    "httpx transport": ("httpx transport", "httpx async transport"),
    "requests adapter": ("requests adapter",),
    "aiohttp middleware": ("aiohttp middleware",),
}
"""A column of the table, and its doors: where there are two, blocking and awaiting."""


def cell(case: Case, doors: tuple[str, ...], worked: dict[tuple[str, str], bool]) -> str:
    return " ".join("yes" if worked[case.name, door] else "**no**" for door in doors)


def expected() -> dict[tuple[str, str], bool]:
    """What the tests hold the doors to."""
    return {(case.name, door.name): (case.name, door.name) not in GAPS for case in CASES for door in DOORS}


def seen() -> dict[tuple[str, str], bool]:
    """What comes of running all of them."""
    return {(case.name, door.name): _works(case, door) for case in CASES for door in DOORS}


def _works(case: Case, door: Door) -> bool:
    try:
        case.run(door)
    except Exception:
        return False
    return True


def matrix(worked: dict[tuple[str, str], bool]) -> str:
    lines = [f"| | case | {' | '.join(COLUMNS)} |", "|---|---|" + "---|" * len(COLUMNS)]
    for case in CASES:
        cells = " | ".join(cell(case, doors, worked) for doors in COLUMNS.values())
        lines.append(f"| {case.name} | {case.title} | {cells} |")
    lines.append("")
    reasons: dict[str, list[str]] = {}
    for (name, _), reason in GAPS.items():
        if name not in reasons.setdefault(reason, []):
            reasons[reason].append(name)
    lines += [f"- {', '.join(names)}: {reason}." for reason, names in reasons.items()]
    return "\n".join(lines)


def statuses() -> str:
    """What each answer proves, and whether it is asked for again, from the code that decides."""
    lines = ["| answer | outcome | idempotent, or with a key | POST without a key |", "|---|---|---|---|"]
    rows = [(str(status), answer(status)) for status in STATUSES]
    rows += [
        ("409 `in-progress`", problem(409, "in-progress")),
        ("503 `store-unavailable`, `contention`", problem(503, "contention")),
        ("500 and above, `Idempotent-Replayed`", answer(500, {"Idempotent-Replayed": "true"})),
    ]
    for name, shown in rows:
        cells = []
        for key in ("k", None):
            call = Call(DEFAULT, 0.0, method="POST", key=key)
            cells.append("final" if stop(call, shown, 0.0) else "again")
        lines.append(f"| {name} | {shown.outcome} | {' | '.join(cells)} |")
    return "\n".join(lines)


def replaced(page: str, name: str, table: str) -> str:
    """The page with this table between its two marks."""
    marks = re.compile(rf"(<!-- {name} -->\n)(?:.*?\n)??(<!-- end -->)", re.DOTALL)
    whole, count = marks.subn(lambda match: f"{match[1]}{table}\n{match[2]}", page)
    if count != 1:
        raise SystemExit(f"docs/client.md lacks its marks for {name}")
    return whole


def written(page: str, worked: dict[tuple[str, str], bool]) -> str:
    return replaced(replaced(page, "matrix", matrix(worked)), "statuses", statuses())


assert {door for doors in COLUMNS.values() for door in doors} == {door.name for door in DOORS}

if __name__ == "__main__":
    found = seen()
    PAGE.write_text(written(PAGE.read_text(), found))
    wrong = sorted(place for place, works in found.items() if works != expected()[place])
    print(f"{sum(found.values())} of {len(found)} work; other than expected: {wrong or 'none'}")
    sys.exit(bool(wrong))
