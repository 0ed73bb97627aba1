"""Behind PgBouncer in transaction mode, without prepared statements: nothing of a claim outlives it."""

from __future__ import annotations

import psycopg
import pytest

from taptwice.errors import InFlight
from taptwice.flows.transaction import Concluded, Replayed
from tests.drivers.kits import DONE, POSTGRES, asked, claim, finish, statements_of


@pytest.mark.parametrize("name", POSTGRES)
async def test_claims_over_many_server_connections(
    name: str, pgbouncer_url: str, fresh_postgres: str
) -> None:
    with psycopg.connect(fresh_postgres, autocommit=True) as connection:
        for statement in statements_of("postgresql"):
            connection.execute(statement)
    kit = POSTGRES[name](pgbouncer_url)
    kit.bouncer = True
    await kit.start()
    try:
        servers = set()
        for number in range(10):
            held, claimed = await claim(kit, asked(f"held {number}"))
            servers.update(await kit.work(held.handle, "SELECT pg_backend_pid()"))
            with pytest.raises(InFlight):
                await claim(kit, asked(f"held {number}"))
            other, also = await claim(kit, asked(f"key {number}"))
            servers.update(await kit.work(other.handle, "SELECT pg_backend_pid()"))
            await kit.work(other.handle, "INSERT INTO work (n) VALUES (1)")
            await finish(kit, asked(f"key {number}"), other, also)
            assert isinstance((await claim(kit, asked(f"key {number}")))[1], Replayed)
            undone = await finish(kit, asked(f"held {number}"), held, claimed, undo=number % 2 == 0)
            assert undone == Concluded(DONE)
        with psycopg.connect(fresh_postgres) as connection:
            [counts] = connection.execute(
                "SELECT (SELECT count(*) FROM work), (SELECT count(*) FROM taptwice_records)"
            ).fetchall()
        assert counts == (10, 20)
        assert len(servers) > 1
    finally:
        await kit.stop()
