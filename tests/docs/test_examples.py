"""Every example of the README and of the pages runs, in a folder with a database as the README made it."""

from __future__ import annotations

import pathlib
import re
import sqlite3
from typing import Any

import httpx2
import pytest

from taptwice import sql

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [
    pytest.param(page, block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE), 1)
]


@pytest.fixture
def shop(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> sqlite3.Connection:
    monkeypatch.chdir(tmp_path)
    connection = sqlite3.connect("shop.db", check_same_thread=False)
    for migration in sql.migrations("sqlite"):
        for statement in migration.statements:
            connection.execute(statement)
    connection.execute("CREATE TABLE charges (id INTEGER PRIMARY KEY, cents INTEGER NOT NULL)")
    connection.commit()
    return connection


def charges(shop: sqlite3.Connection) -> int:
    count: int = shop.execute("SELECT count(*) FROM charges").fetchone()[0]
    return count


@pytest.mark.parametrize(("page", "block"), EXAMPLES)
async def test_example(page: pathlib.Path, block: str, shop: sqlite3.Connection) -> None:
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(block, f"{page.name}", "exec"), names)  # noqa: S102  (our own page)
    app = names.get("app")
    if app is None:
        return
    if hasattr(app, "test_client"):
        transport: Any = httpx2.WSGITransport(app)
        with httpx2.Client(transport=transport, base_url="http://shop") as client:
            answers = [client.post("/charges?cents=700", headers=HEADERS, json={"cents": 700}) for _ in range(2)]
    else:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://shop") as client:
            answers = [await client.post("/charges?cents=700", headers=HEADERS, json={"cents": 700}) for _ in range(2)]
    first, again = answers
    assert (201, 201) == (first.status_code, again.status_code), (first.text, again.text)
    assert first.content == again.content
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert charges(shop) == 1


HEADERS = {"Idempotency-Key": "8e03978e-40d5-43e8-bc93-6894a57f9324", "Authorization": "Bearer acct_42"}


def test_there_are_examples() -> None:
    assert any(str(example.id).startswith("README") for example in EXAMPLES)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
