"""What a claim costs in round trips, commits and statements, against the same work in a bare transaction.

The savepoint's two are counted apart. Where psycopg pipelines, all of it travels with BEGIN and COMMIT.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from taptwice.core.model import Answer
from taptwice.flows.transaction import Claimed, Concluded
from tests.drivers.kits import DONE, POSTGRES, Kit, asked, claim, finish
from tests.drivers.wire import Proxy, Seen, proxy

WORK = "INSERT INTO work (n) VALUES (1)"
WARM = 12
"""Runs before anything is counted: psycopg prepares late, SQLAlchemy asks for versions."""

# Round trips beyond the bare transaction's: without the savepoint, and what the savepoint adds.
EXTRA = {
    "psycopg": (0, 0),
    "psycopg-async": (2, 1),
    "asyncpg": (1, 1),
    "sqlalchemy-engine-psycopg": (2, 1),
    "sqlalchemy-async-engine-psycopg": (2, 1),
    "sqlalchemy-async-engine-asyncpg": (2, 1),
    # A session has a savepoint of its own in any case, so that its commit is none.
    "sqlalchemy-session-psycopg": (4, 0),
    "sqlalchemy-async-session-psycopg": (4, 0),
    "sqlalchemy-async-session-asyncpg": (4, 0),
}


@pytest.fixture
async def counted(request: pytest.FixtureRequest, clean_database: str) -> AsyncIterator[tuple[Kit, Proxy]]:
    with proxy(clean_database) as wire:
        kit = POSTGRES[request.param](wire.url)
        await kit.start()
        try:
            yield kit, wire
        finally:
            await kit.stop()


async def cost(wire: Proxy, action: Callable[[], Awaitable[object]]) -> Seen:
    for _ in range(WARM):
        await action()
    before = wire.seen()
    await action()
    return wire.seen() - before


class Keyed:
    """A new key each time."""

    def __init__(self, kit: Kit, savepoint: bool, answer: Answer = DONE, nested: bool = False) -> None:
        self._kit, self._savepoint, self._answer, self._nested = kit, savepoint, answer, nested
        self._number = 0

    async def __call__(self) -> None:
        self._number += 1
        asking = asked(f"{self._savepoint} {self._nested} {self._number}", savepoint=self._savepoint)
        executor, outcome = await claim(self._kit, asking)
        assert isinstance(outcome, Claimed)
        if self._nested:
            async with executor.handle.transaction():
                await self._kit.work(executor.handle, WORK)
        else:
            await self._kit.work(executor.handle, WORK)
        assert await finish(self._kit, asking, executor, outcome, self._answer) == Concluded(self._answer)


@pytest.mark.parametrize("counted", EXTRA, indirect=True)
async def test_round_trips(counted: tuple[Kit, Proxy]) -> None:
    kit, wire = counted
    bare = await cost(wire, lambda: kit.bare(WORK))
    plain = await cost(wire, Keyed(kit, savepoint=False)) - bare
    full = await cost(wire, Keyed(kit, savepoint=True)) - bare
    assert (plain.trips, full.trips - plain.trips) == EXTRA[kit.name]
    assert plain.commits == full.commits == 0, "there is no further commit, ever"
    budget = 0 if kit.name == "psycopg" else 1 if kit.name == "asyncpg" else 2
    assert full.trips <= budget + 2


@pytest.mark.parametrize("counted", ["asyncpg"], indirect=True)
async def test_a_large_answer_costs_asyncpg_one_trip(counted: tuple[Kit, Proxy]) -> None:
    kit, wire = counted
    small = await cost(wire, Keyed(kit, savepoint=False))
    large = await cost(wire, Keyed(kit, True, Answer(200, (), b"x" * 100_000)))
    assert large.trips - small.trips == 2  # one of them the savepoint's


@pytest.mark.parametrize("counted", ["asyncpg"], indirect=True)
async def test_a_nested_transaction_of_the_handlers_costs_asyncpg_no_more(counted: tuple[Kit, Proxy]) -> None:
    kit, wire = counted
    plain = await cost(wire, Keyed(kit, savepoint=True))
    nested = await cost(wire, Keyed(kit, savepoint=True, nested=True))
    assert nested.trips - plain.trips == 2  # SAVEPOINT and RELEASE
    assert kit.count("work") == kit.count("taptwice_records")


@pytest.mark.parametrize("counted", EXTRA, indirect=True)
async def test_a_replay_neither_writes_nor_commits(counted: tuple[Kit, Proxy]) -> None:
    kit, wire = counted
    await Keyed(kit, savepoint=True)()

    async def replay() -> None:
        await claim(kit, asked("True False 1"))

    seen = await cost(wire, replay)
    assert seen.commits == 0
    assert seen.trips <= (await cost(wire, lambda: kit.bare("SELECT 1"))).trips + 1
