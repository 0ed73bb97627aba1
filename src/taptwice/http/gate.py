"""Duplicates in this process queue here, before a thread or a connection is taken.

A gate only delays: it decides nothing about a request, so that it needs to trust nothing about it. A key
that is too coarse costs time, never safety; across processes the claim itself is what counts. Waiters
are bounded in number and time; beyond that a request is told that its first attempt is in progress.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from taptwice.errors import InFlight
from taptwice.http.request import RawHeaders

PER_KEY, PER_PROCESS = 128, 1024
"""How many requests wait on an event loop, where waiting costs a few kilobytes and a body each."""


WHO = frozenset((b"authorization", b"cookie"))
"""Names of the header lines that say who sends a request."""


def gate_key(method: str, path: bytes, headers: RawHeaders, key: str) -> int:
    """What makes two requests likely duplicates: method, path, key, and who sends them."""
    # Only a hash is kept while they wait: a login is nobody's business, and may be long.
    said = [(low, value) for name, value in headers if (low := name.lower()) in WHO]
    return hash((method, path, key, *said))


class AsyncGate:
    """For event loops. Whoever has the turn passes it to whoever has waited longest."""

    def __init__(self, per_key: int = PER_KEY, per_process: int = PER_PROCESS) -> None:
        self._per_key = per_key
        self._per_process = per_process
        self._queues: dict[Hashable, deque[asyncio.Future[None]]] = {}
        self._waiting = 0

    def turn(self, key: Hashable, wait: float) -> AsyncTurn:
        """The key's turn, to be had in `wait` seconds."""
        return AsyncTurn(self, key, wait)

    async def take(self, key: Hashable, wait: float) -> Hashable:
        """Get the turn; what to pass it on by. Raises `InFlight` when it cannot be had in `wait` seconds."""
        # Two event loops do not share a queue: a future may only be set by its own.
        key = asyncio.get_running_loop(), key
        queue = self._queues.get(key)
        if queue is None:
            self._queues[key] = deque()
        else:
            await self._wait(key, queue, wait)
        return key

    async def _wait(self, key: Hashable, queue: deque[asyncio.Future[None]], wait: float) -> None:
        if wait <= 0 or len(queue) >= self._per_key or self._waiting >= self._per_process:
            raise InFlight
        mine = asyncio.get_running_loop().create_future()
        queue.append(mine)
        self._waiting += 1
        try:
            async with asyncio.timeout(wait):
                await mine
        except BaseException as error:
            if mine.done() and not mine.cancelled():
                # The turn came at the same moment: it must not be lost with us.
                self.pass_on(key)
            elif mine in queue:
                queue.remove(mine)
            if isinstance(error, TimeoutError):
                raise InFlight from None
            raise
        finally:
            self._waiting -= 1

    def pass_on(self, key: Hashable) -> None:
        """The turn of a key goes to whoever waits for it."""
        queue = self._queues[key]
        while queue:
            waiter = queue.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        del self._queues[key]


class AsyncTurn:
    """Holds a key's turn for the length of an ``async with`` block, or until `pass_on` is called in it."""

    __slots__ = ("_gate", "_key", "_taken", "_wait")

    def __init__(self, gate: AsyncGate, key: Hashable, wait: float) -> None:
        self._gate = gate
        self._key = key
        self._wait = wait
        self._taken: Hashable | None = None

    async def __aenter__(self) -> Callable[[], None]:
        self._taken = await self._gate.take(self._key, self._wait)
        return self.pass_on

    async def __aexit__(self, *error: object) -> None:
        self.pass_on()

    def pass_on(self) -> None:
        """Let the next one come; called again it does nothing."""
        taken, self._taken = self._taken, None
        if taken is not None:
            self._gate.pass_on(taken)


class ThreadGate:
    """For threads, of which a server has few: at most half of them wait."""

    def __init__(self, threads: int) -> None:
        self._most_waiting = threads // 2
        self._changed = threading.Condition()
        self._taken: set[Hashable] = set()
        self._waiting = 0

    @contextmanager
    def turn(self, key: Hashable, wait: float) -> Iterator[None]:
        """As `AsyncGate.turn`."""
        with self._changed:
            if key in self._taken:
                with self.waiting():
                    if wait <= 0 or not self._changed.wait_for(lambda: key not in self._taken, wait):
                        raise InFlight
            self._taken.add(key)
        try:
            yield
        finally:
            with self._changed:
                self._taken.discard(key)
                self._changed.notify_all()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around whatever makes a thread wait. Raises `InFlight` when half of them do already."""
        with self._changed:
            if self._waiting >= self._most_waiting:
                raise InFlight
            self._waiting += 1
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1
