"""A database for each module, and the kit of each driver on it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.drivers.kits import POSTGRES, SQLITE, Kit, sqlite_database, statements_of, until


@pytest.fixture(scope="module")
def database(postgres_url: str) -> Iterator[str]:
    """A database with all tables, of this module alone."""
    name = f"taptwice_drivers_{secrets.token_hex(6)}"
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name} TEMPLATE template0")
    url = urlsplit(postgres_url)._replace(path=f"/{name}").geturl()
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements_of("postgresql"):
            connection.execute(statement)
    yield url
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def clean_database(database: str) -> str:
    """The same, empty."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("TRUNCATE taptwice_records, work, parents, children, singles")
    return database


@pytest.fixture
async def kit(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Kit]:
    """The driver that the test is run on, its database empty. All connections must be back at the end."""
    name = request.param
    if name in POSTGRES:
        made = POSTGRES[name](request.getfixturevalue("clean_database"))
    else:
        made = SQLITE[name](sqlite_database(tmp_path / "database.sqlite"))
    await made.start()
    try:
        yield made
        await until(lambda: made.taken() == 0, "all connections are given back")
    finally:
        await made.stop()
