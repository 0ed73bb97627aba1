"""Results for people and for machines."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from taptwice.conformance.judge import Observed
from taptwice.conformance.language import Case
from taptwice.conformance.run import Result
from taptwice.conformance.wire import NO_RESPONSE, Response

_SIGNS = {"passed": "ok", "failed": "FAILED", "skipped": "skipped"}


def line_of(result: Result) -> str:
    """One line for a case; for a failure the exchange, with the first difference where it is."""
    line = f"{result.case.id:<7} {_SIGNS[result.status]:<8} {result.case.title}"
    if result.status == "failed":
        return "\n".join([line, *(f"        {each}" for each in exchange_of(result))])
    return f"{line} ({result.reason})" if result.reason else line


def exchange_of(result: Result) -> Iterator[str]:
    """What was sent and what came back, a line each, and the first difference."""
    first, _, others = result.reason.partition("; ")
    shown = False
    for step in result.case.when:
        for name, value in step.items():
            if name not in ("send", "start", "parallel", "start_n", "duplicate_all"):
                yield f"   {name} {json.dumps(value, ensure_ascii=False)}"
                continue
            yield f"-> {_asked(name, value)}"
            for each in _names(name, value, result.seen):
                response = Response() if result.seen is None else result.seen.responses.get(each, Response())
                yield f"<- {each}: {_answered(response)}"
                if first.startswith(f"{each}:"):
                    yield f"   first difference: {first}"
                    shown = True
    if result.seen is not None and result.seen.client is not None:
        yield _seen_of(result.seen.client)
    if not shown:
        yield f"   first difference: {first}"
    if others:
        yield f"   and: {others}"


def _seen_of(client: Mapping[str, Any]) -> str:
    """What a client sent; of many requests the first ten."""
    methods = ", ".join(client["methods"][:10])
    return (
        f"<- the server saw {client['server_hits']} requests: {methods}; "
        f"keys {client['keys_distinct']}, effects {client['server_effects']}"
    )


def _asked(step: str, value: Mapping[str, Any]) -> str:
    if step not in ("send", "start"):
        return f"{step} {json.dumps(value, ensure_ascii=False)[:300]}"
    rest = {name: each for name, each in value.items() if name not in ("id", "method", "path")}
    return (
        f"{value.get('id')}: {value.get('method', 'POST')} {value.get('path', '/payments')} "
        f"{json.dumps(rest, ensure_ascii=False)[:300]}"
    )


def _names(step: str, value: Mapping[str, Any], seen: Observed | None) -> list[str]:
    """The requests of a step; of many alike the first five."""
    if step in ("send", "start"):
        return [value["id"]]
    known = list(seen.responses) if seen is not None else []
    wanted = tuple([value["prefix"]] if "prefix" in value else [each["id"] for each in value.get("reqs", ())])
    return [name for name in known if wanted and name.startswith(wanted)][:5]


def _answered(response: Response) -> str:
    if response.status == NO_RESPONSE:
        return "no answer"
    lines = ", ".join(f"{name}: {value}" for name, value in response.headers if name.lower() not in _USUAL)
    return f"{response.status} [{lines}] {response.body[:200]!r}"


_USUAL = frozenset({"date", "server", "connection", "content-length"})


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
