"""docs/client.md: its examples run against a scripted server, and its tables are those of the code."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import re
import sqlite3
from typing import Any

import pytest

from taptwice import cli
from taptwice.client.testing import ScriptedServer, answer, close, no_wait
from tests.client.tables import PAGE, expected, written

README = PAGE.parent.parent / "README.md"
EXAMPLES = re.findall(r"^```python client\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", EXAMPLES, ids=range(1, len(EXAMPLES) + 1))
def test_example(block: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "example"}
    with ScriptedServer([answer(201, body=b"{}")]) as server, no_wait():
        exec(compile(block.replace("https://api.example.com", server.url), str(PAGE), "exec"), names)
        if "main" in names:
            assert asyncio.run(names["main"]()) == 201
        assert server.requests or "ScriptedServer" in names or "channel" in names
        for thing in names.values():
            if hasattr(thing, "close") and type(thing).__name__ in ("Client", "Session"):
                thing.close()


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


def test_the_example_of_giving_up(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (PAGE.parent / "giving-up.md").read_text()
    [example] = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    [table] = re.findall(r"^\$ sqlite3 shop\.db '(.*)'$", page, re.MULTILINE)
    [command] = re.findall(r"^\$ taptwice (init .*?) +#", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(sqlite3.connect("shop.db")) as shop:
        shop.execute(table)
    with pytest.raises(SystemExit) as ended:
        cli.main(command.split())
    assert not ended.value.code
    names: dict[str, Any] = {"__name__": "example"}
    with no_wait():
        exec(compile(example, "giving-up.md", "exec"), names)
    assert names["first"] == names["second"], "one key, whichever of the two attempts"
    names["shop"].close()


def test_the_tables_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    assert written(page, expected()) == page, "run python -m tests.client.tables"


def test_the_readme_shows_what_its_example_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = README.read_text()
    [(example, shown)] = re.findall(
        r"^```python client\n(.*?)^```\n\n```text\n(.*?)^```", page, re.DOTALL | re.M
    )
    saved = answer(201, {"Idempotent-Replayed": "true"}, b"{}")
    names: dict[str, Any] = {}
    with ScriptedServer([503, answer(429, {"Retry-After": "2"}), close, saved]) as server, no_wait():
        exec(compile(example.replace("https://api.example.com", server.url), "README.md", "exec"), names)
        names["client"].close()
    assert capsys.readouterr().out == shown
    assert len({request.header("Idempotency-Key") for request in server.requests}) == 1
