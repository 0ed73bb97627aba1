"""Readings of each kind of database, and changes in words."""

from __future__ import annotations

import inspect
import pathlib
import sqlite3
from collections import Counter
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from taptwice.errors import Misuse
from taptwice.testing import Effects
from taptwice.testing.effects import change, reading_of, words
from tests.http.shop import AWAITING, BLOCKING, open_shop
from tests.testing.shops import database

COUNTED = ("charges", "SELECT count(*) FROM charges", "select sum(cents) from charges")


async def reading(effects: Effects) -> Any:
    found = effects()
    return await found if inspect.isawaitable(found) else found


@pytest.mark.parametrize("kind", [*BLOCKING, *AWAITING])
async def test_each_driver(kind: str, tmp_path: pathlib.Path, request: pytest.FixtureRequest) -> None:
    url = lambda: request.getfixturevalue("fresh_postgres")  # noqa: E731
    async with open_shop(kind, tmp_path, url) as shop:
        effects = Effects(shop.origin, *COUNTED)
        before = await reading(effects)
        insert = "INSERT INTO charges VALUES ('anna', 'k', 7), ('anna', 'k', 7)"
        if "sqlite" in kind:
            with sqlite3.connect(shop.address) as connection:
                connection.execute(insert)
            connection.close()
        else:
            with psycopg.connect(shop.address) as writing:
                writing.execute(insert)
        after = await reading(effects)
    assert before == {COUNTED[0]: Counter(), COUNTED[1]: Decimal(0), COUNTED[2]: Decimal(0)}
    assert after[COUNTED[0]] == {("'anna'", "'k'", Decimal(7)): 2}
    assert change(before, after) == {COUNTED[0]: "2 rows added", COUNTED[1]: "+2", COUNTED[2]: "+14"}


async def test_session_makers(fresh_postgres: str) -> None:
    url = fresh_postgres.replace("postgresql://", "postgresql+psycopg://", 1)
    engine, awaiting = create_engine(url), create_async_engine(url)
    for maker in (sessionmaker(engine), async_sessionmaker(awaiting)):
        assert await reading(Effects(maker, "SELECT 1 AS x UNION ALL SELECT NULL")) == {
            "SELECT 1 AS x UNION ALL SELECT NULL": {(Decimal(1),): 1, ("None",): 1}
        }
    engine.dispose()
    await awaiting.dispose()


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (1, 1, "nothing"),
        (1, 3, "effects: +2"),
        (0.3, 0.1, "effects: -0.2"),
        ({"a": 1}, {"a": 1, "b": 2}, "b: +2"),
        ([], ["x", "x"], "effects: 2 rows added"),
        (["x", "y"], ["y"], "effects: 1 row removed"),
        ([(1, 10), (2, 20)], [(1, 10), (2, 15)], "effects: 1 row changed, column 2 by -5"),
        ([(1, "a")], [(1, "b"), (2, "c")], "effects: 1 row added, 1 row changed"),
        ([{"id": 1, "cents": 5}], [{"id": 1, "cents": 6}], "effects: 1 row changed, column 2 by +1"),
        ([(1, {"unhashable": []})], [], "effects: 1 row removed"),
    ],
)
def test_changes_in_words(before: Any, after: Any, expected: str) -> None:
    assert words(change(reading_of(before), reading_of(after))) == expected


def test_what_cannot_be_counted(tmp_path: pathlib.Path) -> None:
    connect = database(tmp_path)
    for wrong in (None, "text", object()):
        with pytest.raises(Misuse, match="effects must give a number, rows, or a mapping"):
            reading_of(wrong)
    with pytest.raises(Misuse, match="neither: 'DROP TABLE charges'"):
        Effects(connect, "DROP TABLE charges")
    with pytest.raises(Misuse, match="something to count"):
        Effects(connect)
    with pytest.raises(sqlite3.OperationalError, match="no such table: absent"):
        Effects(connect, "absent")()
