"""The runner itself: it knows the language, notices altered expectations, and catches broken servers."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from taptwice.conformance import alter, language
from taptwice.conformance import words as known
from taptwice.conformance.cli import conformance
from taptwice.conformance.judge import judge


def test_every_case_is_in_the_language() -> None:
    cases = language.own_cases()
    assert len(cases) == 227
    assert [(case.id, case.strange) for case in cases if case.strange] == []


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ({"given": {"colour": 1}}, "given: colour"),
        ({"when": [{"jump": 1}]}, "when: jump"),
        ({"when": [{"send": {"id": "r1", "colour": 1}}]}, "when.send: colour"),
        ({"when": [{"send": {"id": "r1", "hold_at": "noon"}}]}, "when.send.hold_at: noon"),
        (
            {"when": [{"send": {"id": "r1", "fault": {"at": "commit", "do": "sneeze"}}}]},
            'when.send.fault: {"at": "commit", "do": "sneeze"}',
        ),
        ({"given": {"save": "weird"}}, "given.save: weird"),
        ({"given": {"key_guard": 1}}, "given.key_guard: 1"),
        ({"when": [{"send": {"id": "r1", "via": "pigeon"}}]}, "when.send.via: pigeon"),
        ({"when": [{"send": {"id": "r1", "as": "nobody"}}]}, "when.send.as: nobody"),
        ({"when": [{"send": {"id": "r1", "path": "/payments/{r0.colour}"}}]}, "{r0.colour}"),
        ({"when": [{"store": "tired"}]}, "when.store: tired"),
        ({"when": [{"advance": "soon"}]}, "when.advance: soon"),
        ({"when": [{"parallel": {"list": [{"jump": 1}]}}]}, "when: jump"),
        ({"then": {"colour": 1}}, "then: colour"),
        ({"then": {"responses": {"r1": {"colour": 1}}}}, "then.responses: colour"),
        ({"then": {"responses": {"r1": {"headers": {"ETag": "rhymes:r1"}}}}}, "header matcher: rhymes:r1"),
        ({"then": {"effects": {"unicorns": 1}}}, "then.effects: unicorns"),
        ({"mood": "good"}, "case: mood"),
    ],
)
def test_a_strange_word_is_named(case: dict[str, object], word: str) -> None:
    [parsed] = language.parse(json.dumps([{"id": "X-1", **case}]))
    assert parsed.strange == (word,)


def test_the_words_are_those_of_the_description() -> None:
    described = language.language()
    assert set(described["settings"]) == known.SETTINGS.keys() - {"client"}
    assert {kind: set(points) for kind, points in described["points"].items()} == known.POINTS
    # One entry of the description may name several words: "await/await_prefix".
    assert words_in(described["request"]) == set(known.REQUEST)
    assert words_in(described["steps"]) >= known.STEPS
    assert set(described["callers"]) - {"null"} <= {"tenant:X", *callers_known()}


def words_in(described: dict[str, str]) -> set[str]:
    return {word for name in described for word in re.split("/|, ", name)}


def callers_known() -> set[str]:
    callers = ("acct_a", "acct_a_token2", "acct_a/user1", "acct_b", "acct_rw", "invalid_token")
    return {caller for caller in callers if known.REQUEST["as"](caller)}


def test_alterations_are_noticed() -> None:
    found = alter.noticed(language.own_cases(), alter.recordings())
    missed = {each.what for each in found if not each.noticed}
    assert len(found) > 900
    assert missed <= set(alter.WHY)


def test_the_recordings_themselves_pass() -> None:
    recorded = alter.recordings()
    assert len(recorded) >= 160
    cases = [case for case in language.own_cases() if case.id in recorded]
    assert [case.id for case in cases if judge(case.then, recorded[case.id])] == []


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_broken_server_is_caught() -> None:
    result = CliRunner().invoke(conformance, ["selfcheck"])
    assert result.exit_code == 0, result.output
    assert result.output.count("caught by") == 7 + 8  # servers and clients


def test_explain() -> None:
    result = CliRunner().invoke(conformance, ["explain", "D-098"])
    assert result.exit_code == 0
    assert "different amount" in result.output
