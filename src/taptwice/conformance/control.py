"""What the runner does to a server from outside: hold a request, make it fail, move the clock.

`Control` is the ASGI application that a process of the suite serves: the reference application, rebuilt for
the settings of each case, inside a wrapper. The application itself knows nothing of it. A request is told
apart by the port that its client connects from, so that nothing is added to what is sent.

The control interface, which a foreign server may offer too, is ``POST /_conformance`` with a JSON object:

    {"do": "configure", "given": {…}, "deployed": {…}}     settings; answers {"skip": reason} when not offered
    {"do": "reset"}                                        clock, faults, permissions, logs as at the start
    {"do": "arm", "port": 40112, "id": "r1", "hold_at": point, "fault": {"at", "do", "times"}}
    {"do": "reached", "id": "r1", "point": point}          answers when the request is there
    {"do": "release", "id": "r1"}    {"do": "settle"}      let it go on; wait until no request is under way
    {"do": "clock", "advance": seconds, "set": seconds since 1970, "http": true}
    {"do": "store", "state": "up|down|read_only|slow:2s"}  {"do": "sweep"}
    {"do": "revoke", "as": caller}   {"do": "logs"}        {"do": "migrate"}
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any

from taptwice import faults
from taptwice.conformance.apps import middleware
from taptwice.conformance.settings import Settings
from taptwice.conformance.stack import BLOCKING, Stack
from taptwice.core.plan import Begin, Command, Commit, Plan, Query, Rollback, Together, arun, ask, run
from taptwice.core.policy import seconds
from taptwice.drivers import Source
from taptwice.errors import CommitUnknown, StoreUnavailable
from taptwice.flows.current import KeyHashFilter
from taptwice.flows.migrate import migrate
from taptwice.flows.retention import sweep_turn

BATCH = 1000
"""Records in one transaction of a sweep."""


class Injected(Exception):
    """The failure that a case asks for."""


@dataclass(slots=True)
class Armed:
    """A request under orders. The futures are set and awaited by whatever thread the request is in."""

    id: str
    hold_at: str | None = None
    fault: dict[str, Any] = field(default_factory=dict)
    released: Future[None] = field(default_factory=Future)
    there: dict[str, Future[None]] = field(default_factory=dict)
    left: int = 1
    cut: Callable[[], None] = lambda: None

    def at(self, point: str) -> Future[None]:
        return self.there.setdefault(point, Future())

    def arrive(self, point: str) -> bool:
        """Whether it is to be held here."""
        if not self.at(point).done():
            self.at(point).set_result(None)
        return self.hold_at == point

    def strike(self, point: str, driver: str) -> str | None:
        """Do what is to go wrong here; what the executor must do is returned."""
        if self.fault.get("at") != point or self.left <= 0:
            return None
        self.left -= 1
        deed = str(self.fault["do"])
        if deed == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if deed == "raise":
            raise Injected(f"injected at {point}")
        if deed == "drop_reply":
            self.cut()
        if deed.startswith("sqlstate:"):
            raise _database_error(driver, deed.partition(":")[2])
        return deed


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


under_orders: ContextVar[Armed | None] = ContextVar("taptwice_conformance_armed", default=None)
request_number: ContextVar[int | None] = ContextVar("taptwice_conformance_request", default=None)


class Executor:
    """An executor with the points of a transaction around its commands."""

    def __init__(self, inner: Any, control: Control) -> None:
        self._inner = inner
        self._control = control

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _carry(self, command: Command[Any], meet: Callable[[str], Any]) -> Plan[Any]:
        """The command with its points, as a plan: `meet` gives a command-like thunk to be carried out."""
        parts = command.commands if isinstance(command, Together) else (command,)
        claims = any(isinstance(part, Query) and part.statement == "claim" for part in parts)
        commits = any(isinstance(part, Commit) for part in parts)
        self._control.check_store(parts)
        deed = None
        if claims:
            yield from ask(meet("before_claim"))
        if commits:
            yield from ask(meet("before_commit"))
            deed = yield from ask(meet("commit"))
        if deed == "lose_request":
            yield from ask(Rollback())
            raise CommitUnknown
        reply = yield from ask(command)
        if deed == "lose_ack":
            raise CommitUnknown
        if claims and _claimed(parts, reply if isinstance(command, Together) else (reply,)):
            yield from ask(meet("after_claim"))
        if commits:
            yield from ask(meet("after_commit"))
        return reply


def _claimed(parts: tuple[Command[Any], ...], replies: tuple[Any, ...]) -> bool:
    """Whether the claim among these commands won: the lock is ours, and there is no record."""
    for part, rows in zip(parts, replies, strict=True):
        if isinstance(part, Query) and part.statement == "claim":
            locked, _, _, version, *_ = rows[0]
            return bool(locked) and version is None
    return False


@dataclass(frozen=True, slots=True)
class Meet(Command[Any]):
    """A point as a command, for the plan above."""

    point: str


class BlockingExecutor(Executor):
    def execute(self, command: Command[Any], /) -> Any:
        return run(self._carry(command, Meet), self._do)

    def _do(self, command: Command[Any]) -> Any:
        if isinstance(command, Meet):
            return self._control.meet_blocking(command.point)
        return self._inner.execute(command)


class AwaitingExecutor(Executor):
    async def execute(self, command: Command[Any], /) -> Any:
        return await arun(self._carry(command, Meet), self._do)

    async def _do(self, command: Command[Any]) -> Any:
        if isinstance(command, Meet):
            return await self._control.meet(command.point)
        return await self._inner.execute(command)


class ControlledSource:
    """The application's source, whose executors pass the points."""

    def __init__(self, inner: Source, control: Control) -> None:
        self.dialect = inner.dialect
        self.blocking = inner.blocking
        self._inner = inner
        self._control = control

    def open(self) -> Executor:
        make = BlockingExecutor if self.blocking else AwaitingExecutor
        return make(self._inner.open(), self._control)


class Log(logging.Handler):
    """The log lines of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []
        self.addFilter(KeyHashFilter())

    def emit(self, record: logging.LogRecord) -> None:
        number = request_number.get()
        if number is not None:
            fields = {
                name: value
                for name, value in vars(record).items()
                # Where this machine keeps its files is nobody's affair, least of all a recording's.
                if isinstance(value, str | int | float | None) and name != "pathname"
            }
            self.lines.append({**fields, "message": record.getMessage(), "request": number})


class Control:
    """The application of one process, under control."""

    def __init__(self, create: Callable[[Stack, Settings], Any], driver: str, dsn: str) -> None:
        self._create = create
        self._driver = driver
        self._dsn = dsn
        self._app: Any = None
        self._serve: Any = None
        self._stack: Stack | None = None
        self._armed: dict[str, Armed] = {}
        self._ports: dict[int, Armed] = {}
        self._offset: float | None = None
        self._http_offset = 0.0
        self._store = "up"
        self._numbers = 0
        self._active = 0
        self._idle = asyncio.Event()
        self._log = Log()
        logging.getLogger().addHandler(self._log)
        logging.getLogger().setLevel(logging.INFO)
        faults.watching = self._watch

    # --- points --------------------------------------------------------------------------------

    async def meet(self, point: str) -> str | None:
        armed = under_orders.get()
        if armed is None:
            return None
        if armed.arrive(point):
            await asyncio.wrap_future(armed.released)
        return armed.strike(point, self._driver)

    def meet_blocking(self, point: str) -> str | None:
        armed = under_orders.get()
        if armed is None:
            return None
        if armed.arrive(point):
            armed.released.result()
        return armed.strike(point, self._driver)

    async def _watch(self, point: str) -> None:
        if self._driver in BLOCKING:
            self.meet_blocking(point)
        else:
            await self.meet(point)

    def check_store(self, parts: tuple[Command[Any], ...]) -> None:
        """The faults of SQLite, which has no server to be stopped."""
        if self._store in ("down", "read_only") and any(isinstance(part, Begin) for part in parts):
            raise StoreUnavailable(f"SQLite: {self._store} (injected)")

    def clock(self) -> float | None:
        return None if self._offset is None else time.time() + self._offset

    # --- serving -------------------------------------------------------------------------------

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/_conformance":
            await self._command(receive, send)
            return
        self._numbers += 1
        number = request_number.set(self._numbers)
        armed = self._ports.pop(scope["client"][1], None)
        orders = under_orders.set(armed)
        if armed is not None:
            cycle = getattr(send, "__self__", None)  # uvicorn's; ASGI has no word for hanging up
            armed.cut = lambda: cycle.transport.abort() if cycle is not None else None
        self._active += 1
        self._idle.clear()
        try:
            await self._serve(scope, receive, self._sending(send, armed))
        finally:
            under_orders.reset(orders)
            request_number.reset(number)
            self._active -= 1
            if not self._active:
                self._idle.set()

    def _sending(self, send: Any, armed: Armed | None) -> Callable[[Any], Awaitable[None]]:
        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                if armed is not None:
                    await self.meet("before_reply")
                headers = list(message.get("headers", ()))
                if not any(name.lower() == b"date" for name, _ in headers):
                    moved = time.time() + (self._offset or 0.0) + self._http_offset
                    headers.append((b"date", formatdate(moved, usegmt=True).encode()))
                message = {**message, "headers": headers}
            await send(message)

        return sending

    # --- commands ------------------------------------------------------------------------------

    async def _command(self, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        asked = json.loads(body)
        try:
            reply = await getattr(self, "do_" + asked.pop("do"))(**asked) or {}
            status = 200
        except Exception as error:
            logging.getLogger("taptwice.conformance").exception("a command failed")
            reply, status = {"error": f"{type(error).__name__}: {error}"}, 500
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(reply).encode()})

    async def do_configure(self, given: dict[str, Any], deployed: dict[str, Any]) -> None:
        settings = Settings(given, deployed)
        await self.close()
        self._stack = Stack.named(
            self._driver, self._dsn, settings.pool_size, settings.store_timeout, settings.isolation
        )
        await self._stack.open()
        self._app = self._create(self._stack, settings)
        once = self._app.state.once
        once.clock = self.clock
        once._source = ControlledSource(once.source, self)
        self._serve = middleware.around(self._app, settings)

    async def do_reset(self) -> None:
        self._offset, self._http_offset, self._store = None, 0.0, "up"
        for armed in self._armed.values():
            if not armed.released.done():
                armed.released.set_result(None)
        self._armed.clear()
        self._ports.clear()
        self._log.lines.clear()
        shop = self._app.state.shop
        shop.withdrawn.clear()
        shop.executions.clear()

    async def do_arm(
        self, port: int, id: str, hold_at: str | None = None, fault: dict[str, Any] | None = None
    ) -> None:
        armed = Armed(id, hold_at, fault or {}, left=(fault or {}).get("times", 1))
        self._armed[id] = self._ports[port] = armed

    async def do_reached(self, id: str, point: str) -> None:
        await asyncio.wrap_future(self._armed[id].at(point))

    async def do_release(self, id: str) -> None:
        released = self._armed[id].released
        if not released.done():
            released.set_result(None)

    async def do_settle(self) -> None:
        if self._active:
            await self._idle.wait()

    async def do_clock(
        self, advance: float | None = None, set: float | None = None, http: bool = False
    ) -> None:
        if http:
            self._http_offset += advance or 0.0
            return
        if set is not None:
            self._offset = set - time.time()
        self._offset = (self._offset or 0.0) + (advance or 0.0)

    async def do_store(self, state: str) -> None:
        self._store = state

    async def do_revoke(self, **what: Any) -> None:
        self._app.state.shop.withdrawn.add(what["as"])

    async def do_sweep(self) -> dict[str, Any]:
        once, total = self._app.state.once, 0
        while True:
            count = await self._drive(sweep_turn(once.store(), BATCH))
            total += count
            if count < BATCH:
                return {"swept": total}

    async def do_migrate(self) -> None:
        await self._drive(migrate(self._app.state.once.source.dialect))

    async def _drive(self, plan: Plan[Any]) -> Any:
        source = self._app.state.once.source
        if source.blocking:
            return await asyncio.to_thread(run, plan, source.open().execute)
        return await arun(plan, source.open().execute)

    async def do_logs(self) -> dict[str, Any]:
        return {"lines": self._log.lines}

    async def close(self) -> None:
        if self._stack is not None:
            await self._stack.close()


def interval(duration: str) -> float:
    """Seconds of a duration that may have several parts, such as 23h59m59s."""
    import re

    return sum(seconds(part) for part in re.findall(r"\d+(?:\.\d+)?(?:ms|s|m|h|d)", duration))
