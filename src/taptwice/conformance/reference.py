"""The reference application as processes of ours, on databases of ours: one cell of the matrix."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from taptwice.conformance import tables, wire
from taptwice.conformance.database import Database, PostgresqlDatabase, SqliteDatabase
from taptwice.conformance.judge import Observed
from taptwice.conformance.language import Case
from taptwice.conformance.node import Node, NotStarted
from taptwice.conformance.offered import not_offered
from taptwice.conformance.postgresql import OwnServer
from taptwice.conformance.settings import Settings
from taptwice.conformance.stack import APPS, DRIVERS
from taptwice.errors import Misuse

MAIN = ""
"""The region of a service that has none."""


class Reference:
    """An application on a store through a driver. Entered with ``async with``.

    `server`: the URL of a PostgreSQL on which databases may be made; without it one is started.
    """

    def __init__(self, app: str, store: str, driver: str, server: str = "", port: int = 0) -> None:
        able = APPS.get(app.partition(":")[0].replace("broken", "fastapi"))
        if able is None:
            raise Misuse(f"no application {app!r}: choose of {', '.join(APPS)}")
        if driver not in DRIVERS.get(store, ()) or driver not in able:
            fit = [each for each in DRIVERS.get(store, ()) if each in able]
            raise Misuse(f"{app} on {store} has no driver {driver!r}: choose of {', '.join(fit)}")
        self.app, self._store, self._driver, self._server = app, store, driver, server
        self._port = port
        self._folder = Path()
        self._own: OwnServer | None = None
        self._databases: dict[tuple[str, str], Database] = {}
        self._all: dict[tuple[str, str, str], Node] = {}
        self._kept = "none"
        """By what the records of the present case are partitioned: such a database stays so."""
        self._given: Mapping[str, Any] = {}
        self._deployed: dict[str, Any] = {}
        self._nodes: dict[str, Node] = {}
        self._regions: list[str] = []
        self._homes: dict[str, dict[str, str]] = {}
        """The routing table of each region: caller -> region."""
        self._lasting: list[tuple[str, dict[str, Any]]] = []
        """Commands that a process started anew is to hear too."""

    async def __aenter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="taptwice-conformance-"))
        try:
            if self._store == "postgresql" and not self._server:
                own = OwnServer()
                self._server = (await own.__aenter__()).url
                self._own = own
            await self._database(MAIN)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self._all.values():
            await node.kill()
        for database in self._databases.values():
            await database.stop()
        if self._own is not None:
            await self._own.__aexit__()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _database(self, region: str) -> Database:
        place = (region, self._kept)
        if place not in self._databases:
            made: Database = (
                SqliteDatabase(self._folder / f"{region or 'main'}.db")
                if self._store == "sqlite"
                else PostgresqlDatabase(self._server, self._own is not None, self._kept == "day")
            )
            await made.start()
            self._databases[place] = made
        return self._databases[place]

    def not_offered(self, case: Case) -> Iterator[str]:
        """See `Target`."""
        return not_offered(case, self.app, self._store)

    def translated(self, case: Case) -> Case:
        """See `Target`; the cases are written for this application."""
        return case

    async def ready(self, case: Case) -> None:
        """See `Target`."""
        self._given, self._deployed, self._lasting = case.given, {}, []
        self._kept = case.given.get("partition_by", "none")
        self._regions = case.given.get("regions", [MAIN])
        self._homes = {region: dict(case.given.get("home", {})) for region in self._regions}
        self._nodes = {}
        for region in self._regions:
            database = await self._database(region)
            for number in range(int(case.given.get("nodes", 1))):
                name = region or f"node{number + 1}"
                key = (region, name, self._kept)
                if key not in self._all:
                    self._all[key] = Node(self.app, self._driver, database.dsn)
                self._nodes[name] = self._all[key]
        for name, node in self._nodes.items():
            await node.configure(self._given_to(name), {})
            await node.tell("reset")
            await node.tell("settle")
        await self._introduce()
        for region in self._regions:
            await (await self._database(region)).execute(*tables.emptying())

    async def begin(self) -> None:
        """Start the first process. Raises `Misuse` if it does not start: no case could then be played."""
        database = await self._database(MAIN)
        node = self._all[MAIN, "node1", self._kept] = Node(self.app, self._driver, database.dsn, self._port)
        try:
            await node.configure({}, {})
        except NotStarted as error:
            raise Misuse(str(error)) from error

    async def served(self) -> tuple[str, int]:
        """Start one process with the settings of the language, for whoever comes; its address."""
        await self.begin()
        node = self._all[MAIN, "node1", self._kept]
        await node.tell("empty")
        return node.address

    def _given_to(self, name: str) -> Mapping[str, Any]:
        own = f"{name}.fingerprint"
        return {**self._given, "fingerprint": self._given[own]} if own in self._given else self._given

    async def _introduce(self) -> None:
        """Tell each region where the others are."""
        if self._regions == [MAIN]:
            return
        peers = {name: node.address for name, node in self._nodes.items()}
        for name, node in self._nodes.items():
            if node.alive:
                await node.tell("region", name=name, peers=peers, home=self._homes[name])

    def server(self, spec: Mapping[str, Any]) -> Node:
        """See `Target`."""
        via = str(spec.get("via", ""))
        name = spec.get("node") or spec.get("region") or (via if via.startswith("node") else None)
        if name is None:
            return next(iter(self._nodes.values()))
        if name not in self._nodes:
            raise RuntimeError(f"{name} is none of {', '.join(self._nodes)}")
        return self._nodes[name]

    def call(self, server: Any) -> wire.Call:
        """See `Target`."""
        return wire.Call(server.address)

    def request(self, spec: Mapping[str, Any]) -> wire.Request:
        """See `Target`."""
        return wire.request_of(spec, Settings(self._given).names[0])

    async def tell_all(self, command: str, **words: Any) -> None:
        """See `Target`."""
        self._lasting.append((command, words))
        await asyncio.gather(*(node.tell(command, **words) for node in self._nodes.values() if node.alive))

    async def restart(self, name: str | None) -> None:
        """See `Target`."""
        killed = [node for node in self._nodes.values() if not node.alive]
        for node in [self._nodes[name]] if name else killed or list(self._nodes.values())[:1]:
            await node.kill()
            await node.start()
            for command, words in self._lasting:
                await node.tell(command, **words)
        await self._introduce()

    async def store(self, state: str) -> None:
        """See `Target`."""
        for region in self._regions:
            await (await self._database(region)).set_store(state)
        if self._store == "sqlite":
            await self.tell_all("store", state=state)

    async def region(self, changes: Mapping[str, Any]) -> None:
        """See `Target`."""
        for name, change in changes.items():
            if name == "home":
                self._homes = {region: {**known, **change} for region, known in self._homes.items()}
            elif isinstance(change, Mapping):
                self._homes[name] = {**self._homes[name], **change.get("home", change)}
            elif change == "down":
                await self._nodes[name].kill()
            else:
                await self.restart(name)
        await self._introduce()

    async def deploy(self, changes: Mapping[str, Any]) -> None:
        """See `Target`."""
        self._deployed.update(changes)
        for name, node in self._nodes.items():
            await node.configure(self._given_to(name), self._deployed)
        await self._introduce()

    async def seed(self, number: int, age: float) -> None:
        """See `Target`."""
        statement = tables.SEED["sqlite" if self._store == "sqlite" else "postgresql"]
        database = await self._database(self._regions[0])
        await database.execute(statement.format(n=number, age=age))

    async def settle(self) -> set[str]:
        """See `Target`."""
        unstruck: set[str] = set()
        for node in self._nodes.values():
            if node.alive:
                unstruck |= set((await node.tell("settle"))["unstruck"])
        return unstruck

    async def observe(self, seen: Observed, then: Mapping[str, Any]) -> None:
        """See `Target`."""
        for region in self._regions:
            database = await self._database(region)
            *counts, wallets = await database.execute(*tables.counting())
            seen.count(dict(zip(tables.COUNTED, (rows[0][0] for rows in counts), strict=True)), dict(wallets))
        for node in self._nodes.values():
            if "logs" in then:
                seen.logs += (await node.tell("logs"))["lines"]
            if "metrics" in then:
                seen.scrape(await self.call(node).send(wire.Request("GET", "/metrics", (), b"")))
