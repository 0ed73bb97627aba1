"""Results for people and for machines."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable

from taptwice.conformance.language import Case
from taptwice.conformance.run import Result

_SIGNS = {"passed": "ok", "failed": "FAILED", "skipped": "skipped"}


def line_of(result: Result) -> str:
    """One line for a case; for a failure its first difference beneath."""
    line = f"{result.case.id:<7} {_SIGNS[result.status]:<8} {result.case.title}"
    if result.status == "skipped":
        return f"{line} ({result.reason})"
    if result.status == "failed":
        return f"{line}\n{exchange_of(result.case)}\n        first difference: {result.reason}"
    return line


def exchange_of(case: Case) -> str:
    """What the case sends and expects, one step a line."""
    steps = [f"        {json.dumps(step, ensure_ascii=False)[:300]}" for step in case.when]
    return "\n".join([*steps, f"        expected {json.dumps(case.then, ensure_ascii=False)[:600]}"])


def summary(results: Iterable[Result]) -> str:
    """A line for each group, and the whole."""
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    total: Counter[str] = Counter()
    for result in results:
        groups[result.case.group][result.status] += 1
        total[result.status] += 1
    lines = [_counted(name, counts) for name, counts in groups.items()]
    return "\n".join([*lines, _counted("all", total)])


def _counted(name: str, counts: Counter[str]) -> str:
    return f"{name:<14}" + "".join(
        f"{counts[status]:>5} {status}" for status in ("passed", "failed", "skipped")
    )


def as_json(results: Iterable[Result]) -> str:
    """The report: a list of the cases, each with its status and the reason for it."""
    return json.dumps([result.json() for result in results], indent=1, ensure_ascii=False) + "\n"


def explained(case: Case) -> str:
    """The rule, where it comes from, and the exchange that is expected."""
    lines = [
        f"{case.id}  {case.title}",
        f"  group {case.group}, level {case.level}, modes {', '.join(case.modes)}",
        f"  source: {case.source}",
    ]
    lines += [f"  note: {case.note}"] if case.note else []
    lines += [f"  given  {json.dumps(case.given, ensure_ascii=False)}"] if case.given else []
    lines += [f"  when   {json.dumps(step, ensure_ascii=False)}" for step in case.when]
    for name, expected in case.then.get("responses", {}).items():
        lines.append(f"  then   {name}: {json.dumps(expected, ensure_ascii=False)}")
    rest = {name: value for name, value in case.then.items() if name != "responses"}
    lines += [f"  then   {json.dumps(rest, ensure_ascii=False)}"] if rest else []
    return "\n".join(lines)
