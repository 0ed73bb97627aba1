"""What is to happen to one request, or to the store, at the points of `taptwice.faults`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from taptwice.core.policy import seconds
from taptwice.errors import StoreUnavailable
from taptwice.faults import Injected, Lost


class Orders:
    """What is to happen to one request, and where it has been. Met by whatever thread the request is in."""

    def __init__(self, driver: str, hold_at: str | None, fault: dict[str, Any]) -> None:
        self._driver = driver
        self._hold_at = hold_at
        self._fault = fault
        self._left = int(fault.get("times", 1)) if fault else 0
        self._been: dict[str, Future[None]] = {}
        self._released: Future[None] = Future()
        self.cut: Callable[[], None] = lambda: None
        """Hangs up on the client."""
        self.struck = not fault
        """Whether the fault has happened."""

    def at(self, point: str) -> Future[None]:
        """Done when the request is at the point."""
        return self._been.setdefault(point, Future())

    def release(self) -> None:
        if not self._released.done():
            self._released.set_result(None)

    def meet(self, point: str, /) -> Future[None] | None:
        """See `taptwice.faults.points.Order`."""
        if not self.at(point).done():
            self.at(point).set_result(None)
        if self._hold_at == point and not self._released.done():
            held: Future[None] = Future()
            self._released.add_done_callback(lambda _: self._go_on(point, held))
            return held
        self._strike(point)
        return None

    def _go_on(self, point: str, held: Future[None]) -> None:
        try:
            self._strike(point)
        except Exception as error:
            held.set_exception(error)
        else:
            held.set_result(None)

    def _strike(self, point: str) -> None:
        if self._left <= 0 or self._fault["at"] != point:
            return
        self._left -= 1
        self.struck = True
        match str(self._fault["do"]).partition(":"):
            case "crash", _, _:
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise", _, _:
                raise Injected(f"injected at {point}")
            case "drop_reply", _, _ if point == "forward_reply":
                raise Lost(point, carried_out=True)  # the reply of the other region, not ours
            case "drop_reply", _, _:
                self.cut()
            case "sqlstate", _, code:
                raise _database_error(self._driver, code)
            case ("lose_ack" | "lose_request") as deed, _, _:
                raise Lost(point, carried_out=deed == "lose_ack")


class StoreFault:
    """SQLite has no server that could be stopped: it fails where a transaction begins."""

    def __init__(self, state: str, limit: float | None) -> None:
        self._state, _, duration = state.partition(":")
        self._delay = seconds(duration) if duration else 0.0
        self._limit = limit

    def meet(self, point: str, /) -> Future[None] | None:
        """See `taptwice.faults.points.Order`."""
        if point != "begin":
            return None
        error = StoreUnavailable(f"SQLite: {self._state} (injected)")
        if self._state != "slow":
            raise error
        waits: Future[None] = Future()
        late = self._limit is not None and self._delay > self._limit
        end = partial(waits.set_exception, error) if late else partial(waits.set_result, None)
        threading.Timer(min(self._delay, self._limit or self._delay), end).start()
        return waits


def _database_error(driver: str, code: str) -> Exception:
    """The error that the driver raises for an SQLSTATE."""
    if driver in ("sqlite3", "aiosqlite"):
        import sqlite3

        return sqlite3.OperationalError("database is locked")
    if driver in ("asyncpg",):
        import asyncpg

        made: Exception = asyncpg.PostgresError.new({"C": code, "M": "injected"})
        return made
    import psycopg

    original = psycopg.errors.lookup(code)("injected")
    if not driver.startswith("sqlalchemy"):
        return original
    from sqlalchemy.exc import OperationalError

    return OperationalError("injected", {}, original)
