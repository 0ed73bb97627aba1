"""Every word of the language works on the reference applications, or fails its case with that word.

`words.json` has cases with the words that the package's own cases do not use.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from taptwice.conformance import language
from taptwice.conformance import words as known
from taptwice.conformance.offered import not_offered
from taptwice.conformance.reference import Reference
from taptwice.conformance.run import Result, Runner

WORDS = Path(__file__).with_name("words.json")
PAYMENT = {"amount_cents": 5000, "currency": "eur"}


async def results(app: str, driver: str, cases: tuple[language.Case, ...]) -> list[Result]:
    async with Reference(app, "sqlite", driver) as target:
        runner = Runner(target)
        return [await runner.run(case) for case in cases]


def not_passed(found: list[Result]) -> list[str]:
    return [f"{each.case.id}: {each.status}: {each.reason}" for each in found if each.status != "passed"]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_word_works() -> None:
    assert not_passed(asyncio.run(results("fastapi", "aiosqlite", language.cases_of(WORDS)))) == []


# --- and every word is used


NOT_IN_THIS_MODE = {
    # lease, outbox, inbox: these cases are skipped
    *("lease_renew", "provider_timeout", "provider_strategy", "partition_by"),
    *("provider", "relay", "complete_stuck", "signature"),
    *("emails", "emails_sent", "product", "admin", "review_queue", "point"),
    *("payouts", "payouts2", "orders", "inbox", "outbox"),
}


def words(case: language.Case) -> Iterator[str]:
    yield from case.given
    yield from case.given.get("fingerprint", {})
    for step in case.steps():
        yield from step
        for value in step.values():
            yield from value if isinstance(value, Mapping) else ()
    for request in case.requests():
        yield from request
        yield str(request.get("fault", {}).get("do")).partition(":")[0]
    for name, expected in case.then.items():
        yield name
        yield from expected if isinstance(expected, Mapping) else ()
    for response in case.then.get("responses", {}).values():
        yield from response
    for group in [case.then.get("group", {}), *case.then.get("groups", [])]:
        yield from group


def test_every_word_is_used() -> None:
    cases = [*language.own_cases(), *language.cases_of(WORDS)]
    used = {word for case in cases if case.sut == "server" and "tx" in case.modes for word in words(case)}
    wanted = {
        *(name for name in known.SETTINGS if not name.startswith("client")),
        *known.FINGERPRINT.keys() - {"form", "multipart"},  # of one value each, the default
        *known.REQUEST,
        *known.STEPS - known.CLIENT_STEPS,
        *("crash", "raise", "drop_reply", "lose_ack", "lose_request", "sqlstate"),
        *known.RESPONSE,
        *known.GROUP,
        *known.THEN - known.CLIENT_THEN,
        *known.EFFECTS,
        *known.KEYS,
        *known.LOGS,
    }
    assert wanted - used <= NOT_IN_THIS_MODE


# --- each fault at each point of the joined mode


POINTS = ("before_claim", "after_claim", "in_handler", "after_effect")
ENDS = ("before_commit", "commit", "after_commit", "before_reply")
DEEDS = ("crash", "raise", "drop_reply", "lose_ack", "lose_request", "sqlstate:40001")


def faulty(at: str, do: str) -> dict[str, Any]:
    request = {"key": "k-1", "json": PAYMENT}
    return {
        "id": f"{do} {at}",
        "when": [
            {"send": {"id": "r1", **request, "fault": {"at": at, "do": do}}},
            {"restart": True} if do == "crash" else {"settle": True},
            {"send": {"id": "r2", **request}},
        ],
        "then": {
            "responses": {"r2": {"status": 201}},
            "effects": {"payments": 1},
            "keys": {"total": 1},
        },
    }


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_fault_at_every_point() -> None:
    cases = [faulty(at, do) for at in (*POINTS, *ENDS) for do in DEEDS]
    assert not_passed(asyncio.run(results("flask", "sqlite3", language.parse(json.dumps(cases))))) == []


def test_a_fault_that_never_happens_fails_its_case() -> None:
    [case] = language.parse(json.dumps([faulty("between_effects", "raise")]))
    [result] = asyncio.run(results("fastapi", "aiosqlite", (case,)))
    assert (result.status, result.reason) == ("failed", "the fault never happened: raise at between_effects")


def test_a_case_that_is_not_well_formed_ends_itself_alone() -> None:
    broken = {"id": "X-1", "when": [{"send": {"id": "r1", "body_b64": 5}}]}
    good = {"id": "X-2", "when": [{"send": {"id": "r1", "key": "k-1", "json": PAYMENT}}]}
    cases = language.parse(json.dumps([broken, good]))
    assert [each.status for each in asyncio.run(results("fastapi", "aiosqlite", cases))] == [
        "failed",
        "passed",
    ]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"modes": ["lease"]}, "mode lease is not built"),
        ({"given": {"partition_by": "day"}}, "for the store postgres: SQLite has no partitions"),
        ({"given": {"store": "redis|mysql"}}, "for the store redis|mysql"),
        ({"when": [{"send": {"id": "r1", "path": "/webhooks/acme"}}]}, "inbox is not built"),
        ({"when": [{"start": {"id": "r1", "hold_at": "before_provider"}}]}, "lease is not built"),
        ({"then": {"emails": 1}}, "outbox is not built"),
        ({"then": {"effects": {"payouts": 1}}}, "no table payouts in this application"),
    ],
)
def test_what_is_not_built_is_skipped(case: dict[str, Any], reason: str) -> None:
    [parsed] = language.parse(json.dumps([{"id": "X-1", **case}]))
    assert list(not_offered(parsed, "fastapi", "sqlite")) == [reason]
