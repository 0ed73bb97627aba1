"""The cases about clients: every word works or is named, through every way in; broken clients are caught.

`client_words.json` has cases with the words, and combinations of words, that the package's own do not use.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from taptwice.conformance import alter, language, run
from taptwice.conformance.cli import ORDINARY_CLIENT, conformance
from taptwice.conformance.clients import measured, words
from taptwice.conformance.clients.broken import BROKEN, CONTROLS, door_of
from taptwice.conformance.clients.doors import DOORS
from taptwice.conformance.clients.play import Clients
from taptwice.conformance.clients.script import DEEDS
from taptwice.conformance.judge import judge
from taptwice.conformance.language import Case
from taptwice.conformance.matrix import as_markdown
from taptwice.conformance.report import line_of
from taptwice.conformance.run import Result
from taptwice.errors import Misuse

WORDS = Path(__file__).with_name("client_words.json")
OWN = [case for case in language.own_cases() if words.for_clients(case)]
ASK = {"client_call": {"id": "c1"}}


def results(client: str, cases: Iterable[Case]) -> list[Result]:
    async def all_of_them() -> list[Result]:
        clients = Clients(client)
        return [await clients.run(case) for case in cases]

    return asyncio.run(all_of_them())


def case(**parts: Any) -> Case:
    [parsed] = language.parse(json.dumps([{"id": "X-1", "sut": "client", "modes": ["client"], **parts}]))
    return parsed


def not_passed(found: Iterable[Result]) -> list[str]:
    return [f"{each.case.id}: {each.status}: {each.reason}" for each in found if each.status != "passed"]


INTENTS_ALONE = "it does not know intents by their names: only Client and AsyncClient do"


# --- each case, each word, through each door


def doors(*quick: str) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in DOORS]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("door", doors("httpx2", "requests"))
def test_every_case_through_every_door(door: str) -> None:
    assert len(OWN) == 25
    skipped = [] if DOORS[door].intents else [f"D-310: skipped: {INTENTS_ALONE}"]
    assert not_passed(results(door, OWN)) == skipped


@pytest.fixture(scope="module")
def played() -> list[Result]:
    return results("httpx2", language.cases_of(WORDS))


def test_every_word_works(played: list[Result]) -> None:
    assert not_passed(played) == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("door", doors("aiohttp")[1:])
def test_every_word_works_through_every_door(door: str) -> None:
    missed = [
        each for each in not_passed(results(door, language.cases_of(WORDS))) if INTENTS_ALONE not in each
    ]
    assert missed == []


def used(cases: Iterable[Case]) -> Iterator[str]:
    for each in cases:
        yield from (f"given.{name}" for name in each.given if "." in name)
        yield from (f"client.{name}" for name in each.given.get("client", {}))
        for name, value in measured.flat(each.then).items():
            yield f"then.{name}"
            yield from (f"error.{value}",) if name == "error" else ()
            for inner in value if isinstance(value, list) else [value]:
                yield from (f"{name}.{word}" for word in (inner if isinstance(inner, Mapping) else ()))
        for step in each.steps():
            [(name, value)] = step.items()
            yield name
            for inner in value if isinstance(value, list) else [value]:
                yield from (f"{name}.{word}" for word in (inner if isinstance(inner, Mapping) else ()))
                if name == "server_script":
                    yield f"do.{inner.get('do')}"


def test_every_word_is_used() -> None:
    wanted = {
        *(f"client.{name}" for name in words.SETTINGS),
        *("given.client.budget", "given.client.key_quoting", "given.client.auto_key"),
        *(f"server_script.{name}" for name in words.SCRIPT),
        *(f"do.{name}" for name in DEEDS),
        *(f"client_call.{name}" for name in words.CALL),
        *(f"client_calls.{name}" for name in words.CALLS),
        *(f"then.{name}" for name in {*words.THEN, "result", "responses"}),
        *(f"waits_ms_stats.{name}" for name in measured.STATISTICS),
        *(f"after_cooldown.{name}" for name in ("probes", "state")),
        *(f"error.{name}" for name in words.ERRORS),
        *words.STEPS,
    }
    webhooks = {"webhook_send", "then.deliveries", "then.event_ids_distinct"}
    assert wanted - set(used([*OWN, *language.cases_of(WORDS)])) == webhooks


def test_the_words_are_those_of_the_description() -> None:
    described = language.language()
    assert words.SETTINGS.keys() - {"breaker"} == described["defaults"]["client"].keys()
    steps = described["steps"]
    for name in DEEDS:
        assert name in next(text for names, text in steps.items() if "server_script" in names)
    for name in (*words.THEN, *words.ERRORS, "result"):
        assert name in described["then"]["client"] or name == "key_reused"


# --- what is not in the language, and what is not built


@pytest.mark.parametrize(
    ("parts", "word"),
    [
        ({"given": {"client": {"colour": 1}}}, "given.client: colour"),
        ({"given": {"client": {"deadline": "soon"}}}, "given.client.deadline: soon"),
        ({"given": {"client": {"base": -1}}}, "given.client.base: -1"),
        ({"given": {"client": {"budget": {"tokens": 1}}}}, 'given.client.budget: {"tokens": 1}'),
        ({"given": {"client": 5}}, "given.client: 5"),
        ({"when": [{"server_script": [{"do": "sneeze"}]}]}, "when.server_script.do: sneeze"),
        ({"when": [{"server_script": [{"status": 200, "mood": 1}]}]}, "when.server_script: mood"),
        ({"when": [{"server_script": [{"repeat": 2}]}]}, '{"repeat": 2}: neither status nor do'),
        ({"when": [{"client_call": {"kill_after": "lunch"}}]}, "when.client_call.kill_after: lunch"),
        ({"when": [{"client_calls": {"n": "many"}}]}, "when.client_calls.n: many"),
        ({"when": [{"send": {"id": "r1"}}]}, "when, in a case for clients: send"),
        ({"when": [{"advance": "1s", "clock": "http"}]}, "when.advance, in a case for clients: clock"),
        ({"when": [ASK], "then": {"effects": {"payments": 1}}}, "then, in a case for clients: effects"),
        ({"when": [ASK], "then": {"error": "tired"}}, "then.error: tired"),
        ({"when": [ASK], "then": {"waits_ms": [5]}}, "then.waits_ms: [5]"),
        ({"when": [ASK], "then": {"waits_ms_stats": {"mode": 1}}}, 'then.waits_ms_stats: {"mode": 1}'),
        ({"when": [ASK], "then": {"result": {"colour": 1}}}, "then.result: colour"),
        ({"when": [ASK], "then": {"client": {"attempts": "few"}}}, "then.attempts: few"),
        ({"when": [{"client_call": {"colour": 1}}]}, "when.client_call: colour"),
    ],
)  # fmt: skip
def test_a_strange_word_fails_its_case(parts: dict[str, Any], word: str) -> None:
    [result] = results("httpx2", [case(**parts)])
    assert result.status == "failed"
    assert result.reason.startswith("not in the language: ")
    assert word in result.reason


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"when": [{"webhook_send": {"id": "e1"}}]}, "the webhook sender is not built"),
        ({"when": [ASK], "then": {"deliveries": 2}}, "the webhook sender is not built"),
        ({"when": [ASK], "given": {"client": {"jitter": "none"}}}, "jitter=none is not built"),
        ({"when": [ASK], "given": {"nodes": 2}}, "nodes is not a setting of clients"),
        ({"when": [ASK], "given": {"header": ["A", "B"]}}, "a client sends its key under one name"),
        (
            {"when": [ASK], "given": {"replay_header": "X-Again"}},
            "replay_header is not built: the client knows",
        ),
        (
            {"when": [ASK], "given": {"client": {"breaker": {"probes": 3}}}},
            "a circuit breaker with several probes is not built",
        ),
    ],
)
def test_what_is_not_built_is_skipped(parts: dict[str, Any], reason: str) -> None:
    [result] = results("httpx2", [case(**parts)])
    assert (result.status, result.reason[: len(reason)]) == ("skipped", reason)


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "find_spec", lambda name: None)
    [result] = results("requests", OWN[:1])
    assert (result.status, result.reason) == (
        "skipped",
        "this needs requests, which is not installed: pip install 'taptwice[requests]'",
    )


def test_no_such_client() -> None:
    with pytest.raises(Misuse, match="no client 'curl': choose of httpx2, "):
        Clients("curl")


@pytest.mark.parametrize(
    ("when", "reason"),
    [
        ([{"client_resume": "i-1"}], "nothing was asked under the intent i-1"),
        (
            [{"server_script": [{"status": 400}]}, {"client_call": {"intent": "i-1", "kill_after": 2}}],
            "the client ended before its request 2",
        ),
    ],
)
def test_a_case_that_cannot_be_played_says_so(when: list[Any], reason: str) -> None:
    [result] = results("httpx2", [case(when=when)])
    assert (result.status, result.reason[: len(reason)]) == ("failed", reason)


def test_a_client_that_hangs_is_a_failure_and_not_the_end_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LIMIT", 0.2)
    endless = {"client": {"deadline": None, "per_try": None}}
    first = case(given=endless, when=[{"server_script": [{"do": "hang"}]}, ASK])
    second = case(when=[ASK], then={"result": {"status": 201}})
    assert [(each.status, each.reason) for each in results("httpx2", [first, second])] == [
        ("failed", "not finished within 0.2 s"),
        ("passed", ""),
    ]


# --- would it notice?


def test_alterations_are_noticed(played: list[Result]) -> None:
    found = [each for result in played if result.seen for each in alter.altered(result.case, result.seen)]
    assert len(found) > 120
    assert [each for each in found if not each.noticed] == []


def test_the_clients_cases_are_recorded() -> None:
    recorded = alter.recordings()
    assert [each.id for each in OWN if judge(each.then, recorded[each.id])] == []


def test_what_the_server_saw_is_held_against_the_clients_log() -> None:
    [result] = results("httpx2", [each for each in OWN if each.id == "D-289"])
    assert result.seen is not None
    assert result.seen.client is not None
    assert judge({}, result.seen) == []
    result.seen.client["unlogged"] = 1
    assert judge({}, result.seen) == ["the client's log lacks 1 of what the server saw"]


@pytest.mark.parametrize(("damage", "name"), CONTROLS.items())
def test_every_broken_client_is_caught(damage: str, name: str) -> None:
    cases = [each for each in OWN if each.id in (name, ORDINARY_CLIENT)]
    found = {each.case.id: each.status for each in results(BROKEN + damage, cases)}
    assert found == {ORDINARY_CLIENT: "passed", name: "failed"}


def test_a_failure_shows_what_the_server_saw() -> None:
    [result] = results(f"{BROKEN}retries-422", [each for each in OWN if each.id == "D-295"])
    told = line_of(result)
    assert "first difference: attempts: expected 1, found 5" in told
    assert "<- the server saw 5 requests: POST, POST, POST, POST, POST; keys 1, effects 0" in told


def test_a_broken_door_is_the_real_one_but_for_its_opening() -> None:
    assert door_of(f"{BROKEN}no-budget").call is DOORS["httpx2"].call


def test_the_matrix_has_a_column_for_each_client() -> None:
    server, [about_a_client] = case(when=[]), OWN[:1]
    found = {("fastapi", "sqlite", "aiosqlite"): [Result(server, "passed")]}
    clients = {
        "httpx2": [Result(about_a_client, "passed")],
        "requests": [Result(about_a_client, "skipped", "not today")],
    }
    page = as_markdown(found, clients)
    assert "| X-1 | core | ✓ |" in page
    assert "| case | level | httpx2 | requests |\n|---|---|---|---|\n| D-285 | core | ✓ | – |" in page
    assert "- not today: D-285" in page


# --- the command


def test_the_command_runs_them(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ["run", "--client", "requests", "--cases", str(WORDS), "--json", str(report)]
    result = CliRunner().invoke(conformance, [*arguments, "--only", "W-101", "--only", "W-123"])
    assert result.exit_code == 0, result.output
    assert "client words" in result.output
    assert json.loads(report.read_text("utf-8")) == [
        {"id": "W-101", "level": "mode", "group": "client words", "status": "passed", "reason": ""},
        {
            "id": "W-123",
            "level": "mode",
            "group": "client words",
            "status": "skipped",
            "reason": INTENTS_ALONE,
        },
    ]
    result = CliRunner().invoke(conformance, ["run", "--client", "curl"])
    assert result.exit_code == 2
    assert "no client 'curl'" in result.output
