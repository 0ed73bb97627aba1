"""Named points: a handler or a transaction is stopped there, fails there, or loses its reply there."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, Self

from taptwice import drivers
from taptwice.core.plan import Begin, Command, Commit, Plan, Query, Rollback, Together, arun, ask, run
from taptwice.errors import CommitUnknown, StoreUnavailable
from taptwice.sql import Dialect


class Injected(Exception):
    """The failure that was asked for."""


class Lost(Injected):
    """The connection to the database broke. `carried_out`: after the command had reached it."""

    def __init__(self, point: str, carried_out: bool) -> None:
        super().__init__(f"the connection to the database is lost at {point} (injected)")
        self.carried_out = carried_out


class Order(Protocol):
    """What is to happen at points."""

    def meet(self, point: str, /) -> Future[None] | None:
        """Somebody is there: raise, or give back what he waits for, or None to let him go on."""


_standing: list[Order] = []
ordered: ContextVar[tuple[Order, ...]] = ContextVar("taptwice_orders", default=())
"""Orders for what runs in this context alone; a test server sets it for one request."""


class _Standing:
    """An order that stands for the whole process, for the length of a ``with`` block."""

    def __init__(self, point: str, times: int = 1) -> None:
        self.point = point
        self._left = times
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        _standing.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _standing.remove(self)

    def meet(self, point: str, /) -> Future[None] | None:
        with self._lock:
            if point != self.point or self._left <= 0:
                return None
            self._left -= 1
        return self._do()

    @property
    def met(self) -> bool:
        """Whether it has happened as often as it was to."""
        return self._left <= 0

    def _do(self) -> Future[None] | None:
        raise NotImplementedError


class Stall(_Standing):
    """Who comes to the point stays there until `release`, or the end of the block. `times`: how many."""

    def __init__(self, point: str, times: int = 1) -> None:
        super().__init__(point, times)
        self._arrived: Future[None] = Future()
        self._released: Future[None] = Future()

    def _do(self) -> Future[None]:
        _settle(self._arrived)
        return self._released

    def reached(self, timeout: float | None = None) -> None:
        """Wait until somebody is there. `timeout` in seconds; then it raises TimeoutError."""
        self._arrived.result(timeout)

    async def areached(self) -> None:
        """Wait until somebody is there."""
        await asyncio.wrap_future(self._arrived)

    def release(self) -> None:
        """Let all of them go on."""
        _settle(self._released)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.release()


class Fail(_Standing):
    """Raise `error` at the point: `Injected`, or what your driver raises there. `times`: how often."""

    def __init__(self, point: str, error: Exception | None = None, times: int = 1) -> None:
        super().__init__(point, times)
        self._error = error

    def _do(self) -> None:
        raise self._error or Injected(f"injected at {self.point}")


class Lose(_Standing):
    """Break the connection to the database at a point of the transaction.

    At ``commit`` the outcome is unknown to the service: `carried_out` says whether the commit happened.
    """

    def __init__(self, point: str = "commit", carried_out: bool = True, times: int = 1) -> None:
        super().__init__(point, times)
        self._carried_out = carried_out

    def _do(self) -> None:
        raise Lost(self.point, self._carried_out)


class Kill(_Standing):
    """Kill this process with SIGKILL at the point, as the kernel does when memory runs out."""

    def _do(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _settle(future: Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _waits(name: str) -> Iterator[Future[None]]:
    for order in (*_standing, *ordered.get()):
        wait = order.meet(name)
        if wait is not None:
            yield wait


def point(name: str) -> None:
    """A named place in a handler that blocks, where a test may stop it, make it fail or kill its process.

    It does nothing where no order stands, as in production: see `Stall`, `Fail`, `Lose`, `Kill`.
    """
    for wait in _waits(name):
        wait.result()


async def apoint(name: str) -> None:
    """`point` for a handler that awaits. In a thread without an event loop it blocks and never suspends."""
    for wait in _waits(name):
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            wait.result()
        else:
            await asyncio.wrap_future(wait)


# --- the transaction's own points --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Meet(Command[None]):
    """A point, as a command of the plan below."""

    point: str


def _around(command: Command[Any]) -> Plan[Any]:
    """A command with the points in front of it and behind it."""
    parts = command.commands if isinstance(command, Together) else (command,)
    claims = any(isinstance(part, Query) and part.statement == "claim" for part in parts)
    commits = any(isinstance(part, Commit) for part in parts)
    if any(isinstance(part, Begin) for part in parts):
        yield from _broken_at("begin")
    if claims:
        yield from _broken_at("before_claim")
    if commits:
        yield from _broken_at("before_commit")
        try:
            yield from ask(_Meet("commit"))
        except Lost as lost:
            yield from ask(command if lost.carried_out else Rollback())
            raise CommitUnknown from lost
    reply = yield from ask(command)
    if claims and _won(parts, reply if isinstance(command, Together) else (reply,)):
        yield from _broken_at("after_claim")
    if commits:
        # A connection that is lost now is missed by nobody.
        with suppress(Lost):
            yield from ask(_Meet("after_commit"))
    return reply


def _broken_at(name: str) -> Plan[None]:
    try:
        yield from ask(_Meet(name))
    except Lost as lost:
        raise StoreUnavailable(str(lost)) from lost


def _won(parts: tuple[Command[Any], ...], replies: tuple[Any, ...]) -> bool:
    """Whether the claim among these commands won: the lock is ours, and there is no record."""
    for part, rows in zip(parts, replies, strict=True):
        if isinstance(part, Query) and part.statement == "claim":
            locked, _, _, version, *_ = rows[0]
            return bool(locked) and version is None
    return False


class _Watched:
    """An executor whose transaction has the points."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _BlockingWatched(_Watched):
    def execute(self, command: Command[Any], /) -> Any:
        return run(_around(command), self._carry)

    def _carry(self, command: Command[Any]) -> Any:
        return point(command.point) if isinstance(command, _Meet) else self._inner.execute(command)


class _AwaitingWatched(_Watched):
    async def execute(self, command: Command[Any], /) -> Any:
        return await arun(_around(command), self._carry)

    async def _carry(self, command: Command[Any]) -> Any:
        return await (apoint(command.point) if isinstance(command, _Meet) else self._inner.execute(command))


class WatchedSource:
    """A source whose transactions have the points ``begin``, ``before_claim``, ``after_claim`` (the claim
    is won), ``before_commit``, ``commit`` and ``after_commit``.
    """

    def __init__(self, inner: drivers.Source) -> None:
        self.dialect: Dialect = inner.dialect
        self.blocking: bool = inner.blocking
        self._inner = inner

    def open(self) -> Any:
        return (_BlockingWatched if self.blocking else _AwaitingWatched)(self._inner.open())


def watched(origin: Any) -> WatchedSource:
    """The origin with the transaction's points in it; give it to `Idempotency` instead, in a test."""
    return WatchedSource(drivers.source(origin))
