"""What the runner does to a server from outside: hold a request, make it fail, move the clock.

`Control` is the ASGI application that a process of the suite serves: the reference application, rebuilt for
the settings of each case, inside a wrapper. The application itself knows nothing of it. A request is told
apart by the port that its client connects from, so that nothing is added to what is sent.

The control interface, which a server of somebody else may offer too, is documented in docs/conformance.md.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from email.utils import formatdate
from typing import Any

from taptwice.conformance import tables
from taptwice.conformance.apps import middleware
from taptwice.conformance.apps.region import Region
from taptwice.conformance.apps.world import Unknown, Withdrawn, World
from taptwice.conformance.orders import Orders, StoreFault
from taptwice.conformance.settings import Settings
from taptwice.conformance.stack import Stack
from taptwice.conformance.wire import CONTROL
from taptwice.core.plan import Plan, arun, run
from taptwice.faults import apoint, watched
from taptwice.faults.points import ordered
from taptwice.flows.current import KeyHashFilter
from taptwice.flows.migrate import migrate
from taptwice.flows.retention import partition_turn, sweep_turn

BATCH = 1000
"""Records in one transaction of a sweep."""


request_number: ContextVar[int | None] = ContextVar("taptwice_conformance_request", default=None)


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

    def __init__(
        self, create: Callable[[Stack, Settings, World], tuple[Any, Any]], driver: str, dsn: str
    ) -> None:
        self._create = create
        self._driver = driver
        self._dsn = dsn
        self._world = World(self.clock)
        self._settings = Settings()
        self._serve: Any = None
        self._front: Region | None = None
        self._once: Any = None
        self._stack: Stack | None = None
        self._orders: dict[str, Orders] = {}
        self._ports: dict[int, Orders] = {}
        self._offset: float | None = None
        self._http_offset = 0.0
        self._store: tuple[StoreFault, ...] = ()
        self._numbers = 0
        self._active = 0
        self._idle = asyncio.Event()
        self._log = Log()
        logging.getLogger().addHandler(self._log)
        logging.getLogger().setLevel(logging.INFO)

    def clock(self) -> float | None:
        """The test clock, shared by application and database."""
        return None if self._offset is None else time.time() + self._offset

    # --- serving -------------------------------------------------------------------------------

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == CONTROL:
            await self._command(receive, send)
            return
        self._numbers += 1
        number = request_number.set(self._numbers)
        orders = self._ports.pop(scope["client"][1], None)
        standing = ordered.set((*self._store, *([] if orders is None else [orders])))
        if orders is not None:
            cycle = getattr(send, "__self__", None)  # uvicorn's; ASGI has no word for hanging up
            orders.cut = lambda: cycle.transport.abort() if cycle is not None else None
        self._active += 1
        self._idle.clear()
        try:
            await (self._front or self._serve)(scope, receive, self._sending(send))
        finally:
            ordered.reset(standing)
            request_number.reset(number)
            self._active -= 1
            if not self._active:
                self._idle.set()

    def _sending(self, send: Any) -> Callable[[Any], Awaitable[None]]:
        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                await apoint("before_reply")
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

    async def do_hello(self) -> dict[str, Any]:
        commands = [name.removeprefix("do_") for name in dir(self) if name.startswith("do_")]
        return {"commands": sorted(commands)}

    async def do_configure(self, given: dict[str, Any], deployed: dict[str, Any]) -> None:
        settings = self._settings = Settings(given, deployed)
        await self.close()
        self._stack = Stack.named(
            self._driver, self._dsn, settings.pool_size, settings.store_timeout, settings.isolation
        )
        await self._stack.open()
        app, self._once = self._create(self._stack, settings, self._world)
        self._once.bound = watched(self._once.bound or self._stack.origin)
        self._serve, self._front = middleware.around(app, settings), None

    async def do_reset(self) -> None:
        self._front = None
        self._offset, self._http_offset, self._store = None, 0.0, ()
        for orders in self._orders.values():
            orders.release()
        self._orders.clear()
        self._ports.clear()
        self._log.lines.clear()
        self._world.reset()

    async def do_arm(
        self, port: int, id: str, hold_at: str | None = None, fault: dict[str, Any] | None = None
    ) -> None:
        self._orders[id] = self._ports[port] = Orders(self._driver, hold_at, fault or {})

    async def do_reached(self, id: str, point: str) -> None:
        await asyncio.wrap_future(self._orders[id].at(point))

    async def do_release(self, id: str) -> None:
        self._orders[id].release()

    async def do_settle(self) -> dict[str, Any]:
        """Wait until nothing is under way; tell which faults never happened."""
        if self._active:
            await self._idle.wait()
        return {"unstruck": [id for id, orders in self._orders.items() if not orders.struck]}

    async def do_clock(
        self, advance: float | None = None, set: float | None = None, http: bool = False
    ) -> None:
        if http:
            self._http_offset = (self._http_offset if set is None else set - time.time()) + (advance or 0.0)
            return
        if set is not None:
            self._offset = set - time.time()
        self._offset = (self._offset or 0.0) + (advance or 0.0)
        if self._settings.by_day:
            _ = await self._drive(partition_turn(self._once.store()))  # as a sweep of that day would have

    async def do_store(self, state: str) -> None:
        self._store = () if state == "up" else (StoreFault(state, self._settings.store_timeout),)

    async def do_revoke(self, **what: Any) -> None:
        self._world.withdrawn.add(what["as"])

    async def do_behaviour(self, behaviour: dict[str, Any]) -> None:
        self._world.behaviour = behaviour

    async def do_empty(self) -> None:
        """Every table as at the beginning of a case."""
        for statement in tables.emptying():
            await self._sql(statement)

    async def do_count(self) -> dict[str, Any]:
        """The rows of each table, and what is in the wallets."""
        *counts, wallets = [await self._sql(statement) for statement in tables.counting()]
        rows = dict(zip(tables.COUNTED, (each[0][0] for each in counts), strict=True))
        return {"keys": rows.pop(tables.RECORDS), "effects": rows, "balances": dict(wallets)}

    async def do_seed(self, number: int, age: float) -> None:
        dialect = "sqlite" if self._once.bound.dialect == "sqlite" else "postgresql"
        await self._sql(tables.SEED[dialect].format(n=number, age=age))

    async def _sql(self, statement: str) -> list[Any]:
        stack = self._stack
        assert stack is not None  # noqa: S101  # configured before it is told anything
        async with stack.lent() as database:
            return await database.execute(statement)

    async def do_region(self, name: str, peers: dict[str, tuple[str, int]], home: dict[str, str]) -> None:
        """Stand in front of the application as one region of several."""
        homes = {self._world.login(caller)[0]: region for caller, region in home.items()}

        def home_of(authorization: bytes) -> str | None:
            try:
                return homes.get(self._world.login(authorization.decode().removeprefix("Bearer "))[0])
            except (Unknown, Withdrawn):
                return None  # the application refuses it

        self._front = Region(self._serve, name, peers, home_of)

    async def do_replica_lag(self, lag: float) -> None:
        for statement in tables.lagging(lag):
            await self._sql(statement)

    async def do_sweep(self) -> dict[str, Any]:
        total = 0
        while True:
            count = await self._drive(sweep_turn(self._once.store(), BATCH))
            total += count
            if count < BATCH:
                _ = await self._drive(partition_turn(self._once.store()))
                return {"swept": total}

    async def do_migrate(self) -> None:
        await self._drive(migrate(self._once.bound.dialect))

    async def _drive(self, plan: Plan[Any]) -> Any:
        source = self._once.bound
        if source.blocking:
            return await asyncio.to_thread(run, plan, source.open().execute)
        return await arun(plan, source.open().execute)

    async def do_logs(self) -> dict[str, Any]:
        return {"lines": self._log.lines}

    async def close(self) -> None:
        if self._stack is not None:
            await self._stack.close()
