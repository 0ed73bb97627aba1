"""The words of client cases: those that are not in the language, and those that are not built.

`taptwice.conformance.language` knows which steps and expectations there are. This knows what stands inside
those of clients, each word and each value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from taptwice.client.errors import missing
from taptwice.conformance import language
from taptwice.conformance import words as vocabulary
from taptwice.conformance.clients.doors import Door
from taptwice.conformance.clients.measured import COUNTS, STATISTICS, flat
from taptwice.conformance.clients.script import DEEDS
from taptwice.conformance.clients.setup import settings_of
from taptwice.conformance.language import Case
from taptwice.conformance.words import CLIENT_STEPS, CLIENT_THEN, DURATION, MATCHERS

Known = Callable[[Any], bool]


def for_clients(case: Case) -> bool:
    """Whether a case is about a client and not about a server."""
    return case.sut == "client" or any(word in CLIENT_STEPS for step in case.steps() for word in step)


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _number(value: Any) -> bool:
    return type(value) in (int, float) and value >= 0


def _yes_or_no(value: Any) -> bool:
    return isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _duration(value: Any) -> bool:
    return _number(value) or (_text(value) and re.fullmatch(DURATION, value) is not None)


def _or_none(known: Known) -> Known:
    return lambda value: value is None or known(value)


def _of(*words: str) -> Known:
    return lambda value: value in words


def _all(known: Known) -> Known:
    return lambda value: isinstance(value, list) and all(map(known, value))


def _range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_number, value)) and value[0] <= value[1]


def _counts(value: Any) -> bool:
    return _count(value) or _all(_count)(value)


def _members(known: Mapping[str, Known]) -> Known:
    return lambda value: (
        isinstance(value, Mapping)
        and all(name in known and known[name](each) for name, each in value.items())
    )


SETTINGS: Mapping[str, Known] = {
    "max_attempts": lambda value: _count(value) and value > 0,
    "deadline": _or_none(_duration),
    "per_try": _or_none(_duration),
    "base": _duration,
    "cap": _duration,
    "jitter": _text,
    "retry_statuses": lambda value: (
        _all(_count)(value) or value == language.language()["defaults"]["client"]["retry_statuses"]
    ),
    "budget": _or_none(_members({"ratio": _number, "max": _number})),
    "breaker": _or_none(_members({"failures": _count, "cooldown": _duration, "probes": _count})),
    "auto_key": _yes_or_no,
    "key_quoting": _of("bare", "sf-string"),
}
"""Of ``given.client``."""

SCRIPT: Mapping[str, Known] = {
    "status": _count,
    "do": lambda value: value in DEEDS,
    "headers": _all(lambda line: isinstance(line, list) and len(line) == 2),
    "problem": _text,
    "json": lambda value: True,
    "body": _text,
    "repeat": _count,
}
"""Of a step of ``server_script``."""

CALL: Mapping[str, Known] = {
    "id": _text,
    "method": _text,
    "path": _text,
    "json": lambda value: True,
    "intent": _or_none(_text),
    "kill_after": lambda value: value == "first_send" or (_count(value) and value > 0),
    "virtual_time": _yes_or_no,
}
CALLS: Mapping[str, Known] = {
    "n": _count,
    "sequential": _yes_or_no,
    "parallel": _yes_or_no,
    "over": _duration,
    "virtual_time": _yes_or_no,
}
STATES = ("closed", "open", "half-open")
ERRORS = ("unknown_outcome", "deadline", "budget", "breaker_open", "key_reused")

_RANGES: Known = _members(dict.fromkeys(STATISTICS, lambda value: _number(value) or _range(value)))
THEN: Mapping[str, Known] = {
    **dict.fromkeys(COUNTS, _counts),
    "attempts_max": _count,
    "error": _of(*ERRORS),
    "waits_ms": _all(_range),
    "waits_ms_stats": lambda value: _RANGES(value) or _all(_RANGES)(value),
    "elapsed_ms": _range,
    "methods": _all(_text),
    "wire_header": lambda value: _text(value) and MATCHERS.fullmatch(value) is not None,
    "state": _of(*STATES),
    "after_cooldown": _members({"probes": _count, "state": _of(*STATES)}),
    "deliveries": _counts,
    "event_ids_distinct": _counts,
}
"""Of ``then``, beside `result` and `responses`, which are those of servers."""

STEPS = CLIENT_STEPS | {"advance", "sleep"}


def strange(case: Case) -> tuple[str, ...]:
    """The words and values of a client case that are not in the language."""
    return (*case.strange, *_given(case.given), *_when(case), *_then(case.then))


def _given(given: Mapping[str, Any]) -> Iterator[str]:
    if not isinstance(given.get("client", {}), Mapping):
        yield f"given.client: {json.dumps(given['client'])}"
        return
    yield from _unknown("given.client", settings_of(given), SETTINGS)


def _when(case: Case) -> Iterator[str]:
    for step in case.steps():
        name = next((word for word in step if word in vocabulary.STEPS), None)
        if name is None:
            continue  # the language has said so
        if name not in STEPS:
            yield f"when, in a case for clients: {name}"
        yield from (f"when.{name}, in a case for clients: {word}" for word in step if word != name)
        value = step[name]
        if name == "server_script":
            for each in value:
                yield from _unknown("when.server_script", each, SCRIPT)
                if ("status" in each) + ("do" in each) == 0:
                    yield f"when.server_script: {json.dumps(each)}: neither status nor do"
        elif name in ("client_call", "client_calls"):
            yield from _unknown(f"when.{name}", value, CALL if name == "client_call" else CALLS)


def _then(then: Mapping[str, Any]) -> Iterator[str]:
    words = flat(then)
    yield from (f"then, in a case for clients: {word}" for word in words.keys() - CLIENT_THEN - {"responses"})
    yield from _unknown("then", {name: words[name] for name in words if name in THEN}, THEN)
    result = {"id": "", "then": {"responses": {"result": words.get("result", {})}}}
    [as_answer] = language.parse(json.dumps([result]))
    yield from (word.replace("then.responses", "then.result") for word in as_answer.strange)


def _unknown(where: str, words: Mapping[str, Any], known: Mapping[str, Known]) -> Iterator[str]:
    for name, value in words.items():
        if name not in known:
            yield f"{where}: {name}"
        elif not known[name](value):
            yield f"{where}.{name}: {value if isinstance(value, str) else json.dumps(value)}"


# --- what is not built --------------------------------------------------------------------------------------


def not_offered(case: Case, door: Door) -> Iterator[str]:
    """Why a case cannot be run on a client; nothing when it can."""
    if find_spec(door.library) is None:
        yield str(missing(door.library, door.extra))
    then = flat(case.then)
    if (
        any("webhook_send" in step for step in case.steps())
        or {"deliveries", "event_ids_distinct"} & then.keys()
    ):
        yield "the webhook sender is not built"
    for name in case.given:
        if name.partition(".")[0] not in ("client", "header", "replay_header"):
            yield f"{name} is not a setting of clients"
    if not isinstance(case.given.get("header", ""), str):
        yield "a client sends its key under one name"
    if case.given.get("replay_header", "Idempotent-Replayed") != "Idempotent-Replayed":
        yield "replay_header is not built: the client knows Idempotent-Replayed"
    if (settings_of(case.given).get("breaker") or {}).get("probes", 1) != 1:
        yield "a circuit breaker with several probes is not built"
    if (jitter := settings_of(case.given).get("jitter", "full")) != "full":
        yield f"jitter={jitter} is not built: the client draws evenly from 0 on"
    names = [_intent(step) for step in case.steps()]
    again = any(name is not None and names.count(name) > 1 for name in names)
    if again and not door.intents:
        yield "it does not know intents by their names: only Client and AsyncClient do"


def _intent(step: Mapping[str, Any]) -> Any:
    return step.get("client_resume", step.get("client_call", {}).get("intent"))
