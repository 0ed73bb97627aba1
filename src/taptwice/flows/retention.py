"""Records whose window is over leave: in bounded batches, each in a short transaction of its own.

    async with sweeping(engine_source, every="10m"):        in a service, beside its work
        ...
    with sweeping(pool_source, every="10m"):                the same where nothing awaits
        ...

Any number of processes may sweep one table. A row within its window is never touched. Where the table is
partitioned, the partitions of days that are over are dropped whole, and the rows of DEFAULT leave in batches.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from types import TracebackType

from taptwice.core.plan import Begin, Commit, Plan, arun, ask, run
from taptwice.core.policy import seconds
from taptwice.drivers import Source
from taptwice.drivers.system import jittered
from taptwice.errors import Contention, Misuse, TaptwiceError
from taptwice.flows.transaction import TURN, abandon
from taptwice.stores.sql import Partition, SqlStore

logger = logging.getLogger("taptwice.retention")

BREATH = 0.5
"""Seconds between two batches while there is more to remove, so that the service's own work comes first."""

FIRST = 0.1
"""The first turn comes after this part of the interval: a process that lives for less than one sweeps too."""

GRACE = 10.0
"""Seconds that leaving the block waits for the batch under way."""


def sweep_turn(store: SqlStore, batch: int) -> Plan[int]:
    """Forget at most `batch` records whose window is over, in a transaction; how many there were."""
    try:
        yield from ask(Begin(TURN))
        count = yield from store.sweep(batch)
        yield from ask(Commit())
        return count
    finally:
        yield from abandon()


def partition_turn(store: SqlStore) -> Plan[tuple[Partition, ...]]:
    """Make the partitions of the coming days and drop those that are past; in a table without any, nothing.

    Each claim waits while this is done, and while this waits for the transactions that have claimed: for at
    most 1 s, then it raises `Contention`. Raises `Misuse` when the role does not own the table.
    """
    if store.dialect != "postgresql":
        return ()
    try:
        yield from ask(Begin(TURN))
        changed = yield from store.partitions()
        yield from ask(Commit())
        return changed
    except Contention as error:
        raise Contention(
            "partitions are left as they are: transactions were using taptwice_records; sweep again"
        ) from error
    finally:
        yield from abandon()


def _turn(store: SqlStore, batch: int) -> Plan[tuple[int, tuple[Partition, ...]]]:
    """Rows first: while there are more of them, the claims are not made to wait as well."""
    count = yield from sweep_turn(store, batch)
    return count, () if count == batch else (yield from partition_turn(store))


class Sweeping:
    """A sweeper in the background of this process, from entering the block until leaving it.

    A turn that fails is logged, and the next one comes at its time. Leaving the block lets the batch
    under way end, for at most `GRACE` seconds; then it is cancelled, which rolls it back.
    """

    def __init__(self, source: Source, every: float | str = "10m", batch: int = 1000) -> None:
        self._source = source
        self._store = SqlStore(source.dialect)
        self._every = seconds(every)
        self._batch = batch
        if self._every <= 0 or batch < 1:
            raise Misuse(f"every={every!r}, batch={batch!r}: a sweep needs an interval and a batch above 0")

    def __enter__(self) -> None:
        if not self._source.blocking:
            raise Misuse("this source awaits: use `async with` to sweep it")
        self._leave = threading.Event()
        # A daemon: a program that ends without leaving the block is not held back, and loses at most a batch.
        self._thread = threading.Thread(target=self._work, name="taptwice-sweeping", daemon=True)
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave.set()
        self._thread.join(GRACE)

    async def __aenter__(self) -> None:
        if self._source.blocking:
            self.__enter__()
            return
        self._aleave = asyncio.Event()
        self._task = asyncio.create_task(self._awork(), name="taptwice-sweeping")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._source.blocking:
            await asyncio.to_thread(self.__exit__, kind, error, trace)
            return
        self._aleave.set()
        try:
            _ = await asyncio.wait({self._task}, timeout=GRACE)
        finally:
            # Too slow, or the block itself is cancelled: the plan rolls back and gives its connection back.
            if not self._task.done():
                _ = self._task.cancel()
                _ = await asyncio.wait({self._task}, timeout=GRACE)

    def _work(self) -> None:
        pause = self._every * FIRST
        while not self._leave.wait(jittered(pause)):
            try:
                done = run(_turn(self._store, self._batch), self._source.open().execute)
            except Exception as error:
                pause = self._failed(error)
            else:
                pause = self._swept(*done)

    async def _awork(self) -> None:
        pause = self._every * FIRST
        while not await self._left_within(jittered(pause)):
            try:
                done = await arun(_turn(self._store, self._batch), self._source.open().execute)
            except Exception as error:
                pause = self._failed(error)
            else:
                pause = self._swept(*done)

    async def _left_within(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                return await self._aleave.wait()
        except TimeoutError:
            return False

    def _swept(self, count: int, partitions: tuple[Partition, ...]) -> float:
        """Seconds until the next turn."""
        if count:
            logger.info("sweep: %d expired records removed", count)
        for each in partitions:
            logger.info("sweep: partition %s %s", each.name, each.change)
        return self._every if count < self._batch else min(BREATH, self._every)

    def _failed(self, error: Exception) -> float:
        # Ours says in one line what is the matter (no store, no table); others need their trace.
        trace = None if isinstance(error, TaptwiceError) else error
        logger.warning("sweep: failed, goes on in %g s: %s", self._every, error, exc_info=trace)
        return self._every


def sweeping(source: Source, every: float | str = "10m", batch: int = 1000) -> Sweeping:
    """Remove expired records in the background, every `every`, at most `batch` in a transaction.

    To be entered with ``async with``, or with ``with`` where the source blocks; see `Sweeping`.
    """
    return Sweeping(source, every, batch)
