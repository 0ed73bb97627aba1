"""Eight workers on a hundred keys, each in its own order, some giving up: one record a key, one work."""

from __future__ import annotations

import asyncio
import random

import pytest

from taptwice.flows.transaction import Replayed, abandon
from tests.drivers.kits import Kit, asked, claim, finish, on_all

WORKERS, KEYS = 8, 100


@pytest.mark.slow
@on_all
async def test_one_record_and_one_work_a_key(kit: Kit) -> None:
    async def worker(number: int) -> int:
        chance = random.Random(number)
        done = 0
        for key in chance.sample(range(KEYS), KEYS):
            while True:
                executor, outcome = await claim(kit, asked(str(key), wait=100))
                if isinstance(outcome, Replayed):
                    break
                await kit.work(executor.handle, f"INSERT INTO work (n) VALUES ({key})")
                if chance.random() < 0.1:
                    await kit.run(abandon(), executor)
                    continue
                done += not (await finish(kit, asked(str(key)), executor, outcome)).replayed
                break
        return done

    done = await asyncio.gather(*(worker(number) for number in range(WORKERS)))
    assert sum(done) == KEYS
    assert kit.ask("SELECT count(*), count(DISTINCT n) FROM work") == [(KEYS, KEYS)]
    assert kit.count("taptwice_records") == KEYS
