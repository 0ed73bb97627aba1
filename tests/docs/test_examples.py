"""Every example of the README and of the pages runs, in a folder with a database as the README made it."""

from __future__ import annotations

import inspect
import pathlib
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from taptwice import sql

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HEADERS = {"Idempotency-Key": "8e03978e-40d5-43e8-bc93-6894a57f9324", "Authorization": "Bearer acct_42"}


def examples(page: pathlib.Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def is_file(block: str) -> re.Match[str] | None:
    """A block that is a file for pytest begins with its name."""
    return re.match(r"# ((?:test_\w+|conftest)\.py)\n", block)


EXAMPLES = [
    pytest.param(page.name, block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(examples(page), 1)
    if not is_file(block)
]
TESTS = [page for page in PAGES if any(map(is_file, examples(page)))]


@pytest.fixture
def shop(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite3.Connection]:
    monkeypatch.chdir(tmp_path)
    connection = sqlite3.connect("shop.db", check_same_thread=False)
    for migration in sql.migrations("sqlite"):
        for statement in migration.statements:
            connection.execute(statement)
    connection.execute("CREATE TABLE charges (id INTEGER PRIMARY KEY, cents INTEGER NOT NULL)")
    connection.commit()
    yield connection
    connection.close()


async def post(app: Any) -> list[httpx2.Response]:
    """The same request twice, over whichever of the two protocols the application speaks."""
    request: dict[str, Any] = {"headers": HEADERS, "params": {"cents": 700}, "json": {"cents": 700}}
    if len(inspect.signature(app).parameters) == 2:  # (environ, start_response)
        with httpx2.Client(transport=httpx2.WSGITransport(app), base_url="http://shop") as client:
            return [client.post("/charges", **request) for _ in range(2)]
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://shop") as client:
        return [await client.post("/charges", **request) for _ in range(2)]


@pytest.mark.parametrize(("page", "block"), EXAMPLES)
async def test_example(page: str, block: str, shop: sqlite3.Connection) -> None:
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(block, page, "exec"), names)
    if "app" in names:
        first, again = await post(names["app"])
        assert (first.status_code, again.status_code) == (201, 201), (first.text, again.text)
        assert first.content == again.content
        assert "idempotent-replayed" not in first.headers
        assert again.headers["idempotent-replayed"] == "true"
    assert shop.execute("SELECT count(*) FROM charges").fetchone() == (1,)
    for name in ("shop", "connection"):
        if isinstance(left_open := names.get(name), sqlite3.Connection):
            left_open.close()


@pytest.mark.parametrize("page", TESTS, ids=lambda page: page.name)
def test_tests_of_the_readmes_service(
    page: pathlib.Path, shop: sqlite3.Connection, tmp_path: pathlib.Path
) -> None:
    """The page's test files, beside the README's service, pass."""
    (tmp_path / "shop.py").write_text(examples(ROOT / "README.md")[0])
    for block in examples(page):
        if (named := is_file(block)) is not None:
            (tmp_path / named[1]).write_text(block)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nfilterwarnings = error\n"
        "asyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
    )
    done = subprocess.run([sys.executable, "-m", "pytest"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_examples() -> None:
    assert len(examples(ROOT / "README.md")) >= 2
    assert "testing.md" in [page.name for page in TESTS]


def test_links_lead_somewhere() -> None:
    links = [
        (page.name, target, (page.parent / target).exists())
        for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    ]
    assert len(links) > 10
    assert [(page, target) for page, target, leads in links if not leads] == []
