"""A task that is cancelled at whatever moment: never half done, never masked, and the connection comes back.

The same cycle is cancelled at each command in turn, that many turns of the event loop after it was sent, so
that some cancellations meet it on its way out, some on its way back, and some what comes after.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taptwice.core.plan import Close, Command, Rollback
from taptwice.flows.transaction import Claimed, Replayed, abandon
from tests.drivers.kits import POSTGRES, SQLITE, Kit, asked, claim, finish, on, until

AWAITING = [name for name in [*SQLITE, *POSTGRES] if name in ("aiosqlite", "asyncpg") or "async" in name]

pytestmark = on(AWAITING)


async def cycle(kit: Kit, key: str, undo: bool) -> None:
    """What an edge does."""
    executor, outcome = await claim(kit, asked(key, wait=20))
    if isinstance(outcome, Replayed):
        return
    try:
        await kit.work(executor.handle, "INSERT INTO work (n) VALUES (1)")
    except BaseException:
        await kit.run(abandon(), executor)
        raise
    await finish(kit, asked(key, wait=20), executor, outcome, undo=undo)


class Canceller:
    """Cancels a task at its nth command, `turns` turns of the loop later; and again with `times` over 1."""

    def __init__(self, at: int, turns: int, times: int) -> None:
        self._at, self._turns, self._times = at, turns, times
        self.task: asyncio.Task[None] | None = None
        self.kinds: list[type] = []

    def __call__(self, command: Command[Any]) -> None:
        self.kinds.append(type(command))
        if len(self.kinds) == self._at:
            self._later(self._turns)

    def _later(self, turns: int) -> None:
        assert self.task is not None
        if turns:
            asyncio.get_running_loop().call_soon(self._later, turns - 1)
            return
        self.task.cancel()
        self._times -= 1
        if self._times:
            self._later(1)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("undo", [False, True])
async def test_cancelled_at_every_command(kit: Kit, undo: bool, times: int) -> None:
    await cycle(kit, "warm", undo=False)
    cancelled, keys = 0, ["warm"]
    for turns in (0, 1, 2, 3, 5, 8, 13):
        at, kinds = 1, 99
        while at <= kinds:
            key = f"{turns} {at}"
            keys.append(key)
            canceller = Canceller(at, turns, times)
            kit.on_command[:] = [canceller]
            canceller.task = asyncio.create_task(cycle(kit, key, undo))
            await asyncio.wait([canceller.task])
            kit.on_command.clear()
            if canceller.task.cancelled():
                cancelled += 1
            else:
                canceller.task.result()  # and nothing else was raised in place of the cancellation
            kinds = len(canceller.kinds)
            await until(lambda: kit.taken() == 0, f"the connection of {key} is given back")
            at += 1
    assert cancelled > 10
    records = kit.count("taptwice_records")
    assert kit.count("work") == (1 if undo else records)

    # Every key that was not done can be done, and those that were are answered: nothing is held.
    for key in keys:
        await cycle(kit, key, undo)
    assert kit.count("taptwice_records") == len(keys)
    assert kit.count("work") == (1 if undo else len(keys))


async def test_cancelled_while_it_waits_for_a_held_key(kit: Kit) -> None:
    executor, claimed = await claim(kit, asked())
    waiting = asyncio.create_task(claim(kit, asked(wait=60)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert isinstance(claimed, Claimed)
    await finish(kit, asked(), executor, claimed)
    assert isinstance((await claim(kit, asked()))[1], Replayed)


async def test_cancelled_in_the_work(kit: Kit) -> None:
    started = asyncio.Event()

    async def handler() -> None:
        executor, _ = await claim(kit, asked())
        try:
            await kit.work(executor.handle, "INSERT INTO work (n) VALUES (1)")
            started.set()
            await asyncio.Event().wait()
        finally:
            await kit.run(abandon(), executor)

    task = asyncio.create_task(handler())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (kit.count("work"), kit.count("taptwice_records")) == (0, 0)
    await cycle(kit, "key", undo=False)


async def test_the_cleaning_up_is_cancelled(kit: Kit) -> None:
    """Once more, and again: each Rollback and Close of it is cancelled as soon as it was sent."""
    for wanted in (Rollback, Close):
        met = 0
        for turns in (0, 1, 2, 5):
            executor, _ = await claim(kit, asked())
            await kit.work(executor.handle, "INSERT INTO work (n) VALUES (1)")
            task = asyncio.create_task(kit.run(abandon(), executor))

            def note(
                command: Command[Any], task: Any = task, wanted: Any = wanted, turns: int = turns
            ) -> None:
                nonlocal met
                if isinstance(command, wanted):
                    met += 1
                    _after(turns, task.cancel)

            kit.on_command[:] = [note]
            await asyncio.wait([task])
            kit.on_command.clear()
            await until(lambda: kit.taken() == 0, "the connection is given back")
            assert (kit.count("work"), kit.count("taptwice_records")) == (0, 0)
        assert met == 4


def _after(turns: int, call: Any) -> None:
    if turns:
        asyncio.get_running_loop().call_soon(_after, turns - 1, call)
    else:
        call()
