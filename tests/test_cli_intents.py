"""``taptwice intents``, on a real SQLite file and a real PostgreSQL, through psycopg and through asyncpg."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from taptwice import cli_database, cli_intents
from taptwice.client.intents import IntentStore, Sent, Wish, fingerprint_of
from taptwice.core.model import Answer
from tests.test_cli import fail, succeed, without

REQUEST = fingerprint_of("POST", "https://x/a", b"1")
DECLINED = Answer(402, (("content-type", "text/plain"),), b"no money\n\x1b[31m")


class World:
    """A database with one intent of each state, `declined` among those done."""

    def __init__(self, url: str, origin: Any) -> None:
        self.url = url
        self.store = IntentStore(origin)
        self.store.make("made")
        self.sent("sent", None)
        self.sent("paid", Answer(201, (), b"paid"))
        self.sent("declined", DECLINED)
        self.sent("unread", Answer(201, (), None))
        self.sent("dropped", None)
        self.store.drop("dropped")

    def sent(self, name: str, answer: Answer | None) -> None:
        self.store.fulfil(Wish(name, REQUEST), lambda key: Sent(None, answer))

    def key(self, name: str) -> str:
        found = self.store.get(name)
        assert found is not None
        return found.key

    def says(self, *arguments: str) -> str:
        return succeed("intents", *arguments, TAPTWICE_DATABASE_URL=self.url).stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.says(*arguments, "--json"))

    def fails(self, code: int, *arguments: str) -> str:
        return fail(code, "intents", *arguments, "--database", self.url)


@pytest.fixture(params=["sqlite", "psycopg", "asyncpg"])
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    if request.param == "sqlite":
        yield World(f"sqlite:///{tmp_path}/intents.db", tmp_path / "intents.db")
        return
    url: str = request.getfixturevalue("fresh_postgres")
    if request.param == "asyncpg":
        without(monkeypatch, "psycopg")
    succeed("init", "--database", url)
    yield World(url, lambda: psycopg.connect(url))


def test_list_shows_what_is_open_and_all_shows_the_rest(world: World) -> None:
    lines = world.says("list").splitlines()
    assert [line.split()[:2] for line in lines] == [["made", "made"], ["sent", "sent"]]
    assert [line.split()[:2] for line in world.says("list", "--all").splitlines()] == [
        ["dropped", "dropped"],
        ["unread", "done"],
        ["declined", "done"],
        ["paid", "done"],
        ["sent", "sent"],
        ["made", "made"],
    ]
    assert re.fullmatch(r"paid\s+done\s+20\S+\+00:00  201", world.says("list", "--all").splitlines()[3])


def test_list_for_programs(world: World) -> None:
    assert [(each["name"], each["status"]) for each in world.json("list", "--all")][1:4] == [
        ("unread", 201),
        ("declined", 402),
        ("paid", 201),
    ]


def test_list_says_when_there_may_be_more(world: World) -> None:
    said = succeed("intents", "list", "--limit", "2", "--database", world.url).stderr
    assert said == "these are 2; there may be more\n"
    assert succeed("intents", "list", "--limit", "3", "--database", world.url).stderr == ""


def test_show(world: World) -> None:
    shown = dict(
        re.split(r"\s{2,}", line, maxsplit=1) for line in world.says("show", "declined").splitlines()
    )
    assert shown["key"] == world.key("declined")
    assert shown["fingerprint"] == REQUEST.hex()
    assert (shown["state"], shown["status"], shown["body"]) == ("done", "402", "14 bytes")
    assert shown["made"] == shown["sent"] <= shown["done"]
    assert "money" not in world.says("show", "declined")
    assert world.says("show", "declined", "--body").splitlines()[-2:] == ["no money", "\\x1b[31m"]
    assert "not kept" in world.says("show", "unread", "--body")
    assert not {"sent", "status", "body"} & {
        line.split()[0] for line in world.says("show", "made").splitlines()
    }


def test_show_for_programs(world: World) -> None:
    shown = world.json("show", "declined", "--body")
    assert (shown["body"], shown["body_bytes"], shown["dropped_at"]) == ("no money\n\x1b[31m", 14, None)
    assert "body" not in world.json("show", "declined")
    assert world.json("show", "unread", "--body")["body"] is None
    assert world.json("show", "made", "--body")["status"] is None


def test_drop(world: World) -> None:
    assert world.json("drop", "sent")["state"] == "dropped"
    assert world.json("drop", "sent")["state"] == "dropped"
    assert world.json("drop", "paid")["state"] == "done"
    assert [each["name"] for each in world.json("list")] == ["made"]


def test_renew_of_what_was_not_done(world: World) -> None:
    for name in ("made", "declined"):
        before = world.key(name)
        renewed = world.json("renew", name)
        assert (renewed["state"], renewed["key"]) == ("made", world.key(name))
        assert renewed["key"] != before


@pytest.mark.parametrize("name", ["sent", "dropped"])
def test_renew_of_what_may_have_been_done_wants_a_yes(world: World, name: str) -> None:
    before = world.key(name)
    said = world.fails(2, "renew", name)
    assert "may have been done" in said
    assert before in said
    assert world.key(name) == before
    assert world.json("renew", name, "--yes")["key"] != before


def test_renew_of_what_was_done_is_refused(world: World) -> None:
    for name in ("paid", "unread"):
        assert "has succeeded" in world.fails(2, "renew", name, "--yes")


@pytest.mark.parametrize("verb", ["show", "drop", "renew"])
def test_of_what_is_not_there(world: World, verb: str) -> None:
    assert "no intent 'order-99'" in world.fails(1, verb, "order-99")


def test_without_any_it_says_nothing(tmp_path: Path) -> None:
    IntentStore(tmp_path / "intents.db")
    url = f"sqlite:///{tmp_path}/intents.db"
    assert succeed("intents", "list", "--database", url).output == ""


def test_a_database_without_the_table(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE t (n)")
    assert "taptwice init" in fail(2, "intents", "list", "--database", f"sqlite:///{tmp_path}/other.db")


@pytest.mark.parametrize("name", sorted(cli_intents.intents.commands))
def test_every_command_shows_examples_that_parse(name: str) -> None:
    command = cli_intents.intents.commands[name]
    assert command.help is not None
    prefix = f"taptwice intents {name}"
    examples = [line.split("#")[0].split("|")[0] for line in command.help.splitlines() if prefix in line]
    assert len(examples) >= 2
    for example in examples:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TAPTWICE_DATABASE_URL", "sqlite:///x")
            command.make_context(name, example.split(prefix)[1].split())
    assert "Examples:" in succeed("intents", name, "--help").output


def test_a_name_cannot_steer_the_terminal(tmp_path: Path) -> None:
    IntentStore(tmp_path / "intents.db").make("\x1b]0;evil\x07")
    said = succeed("intents", "list", "--database", f"sqlite:///{tmp_path}/intents.db").stdout
    assert said.startswith("\\x1b]0;evil\\x07  made")
    assert cli_database.harmless("é") == "é"
