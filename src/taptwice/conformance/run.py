"""Cases, run one after another on real processes and a real database.

async with Runner(app="fastapi", store="sqlite", driver="aiosqlite") as runner:
    result = await runner.run(case)
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import formatdate
from pathlib import Path
from typing import Any

from taptwice.conformance import tables, wire
from taptwice.conformance.control import interval
from taptwice.conformance.database import Database, PostgresqlDatabase, SqliteDatabase
from taptwice.conformance.judge import Observed, judge
from taptwice.conformance.language import CLIENT_STEPS, Case
from taptwice.conformance.node import Node
from taptwice.conformance.settings import Settings
from taptwice.conformance.stack import DRIVERS
from taptwice.errors import Misuse

LIMIT = 90
"""Seconds that a case may take: a hang is a failure, not the end of the run."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a case."""

    case: Case
    status: str
    """passed, failed or skipped"""
    reason: str = ""
    seconds: float = 0.0

    def json(self) -> dict[str, str]:
        """Its entry in the report."""
        return {
            "id": self.case.id,
            "level": self.case.level,
            "group": self.case.group,
            "status": self.status,
            "reason": self.reason,
        }


class Runner:
    """One cell of the matrix: an application on a store through a driver. Entered with ``async with``."""

    def __init__(
        self, app: str = "fastapi", store: str = "sqlite", driver: str = "aiosqlite", server: str = ""
    ) -> None:
        if driver not in DRIVERS.get(store, ()):
            raise Misuse(f"no driver {driver!r} for the store {store!r}: choose of {DRIVERS}")
        if store == "postgresql" and not server:
            raise Misuse("PostgreSQL needs the URL of a server on which a database can be made")
        self.app, self.store, self.driver = app, store, driver
        self._folder = tempfile.TemporaryDirectory(prefix="taptwice-conformance-")
        self._database: Database = (
            SqliteDatabase(Path(self._folder.name)) if store == "sqlite" else PostgresqlDatabase(server)
        )
        self._nodes: dict[str, Node] = {}
        self.recorded: dict[str, Observed] = {}
        """What was observed in each case that was played."""

    async def __aenter__(self) -> Runner:
        await self._database.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self._nodes.values():
            await node.kill()
        await self._database.stop()
        self._folder.cleanup()

    async def run(self, case: Case) -> Result:
        """Run one case. It never raises for what the server does."""
        started = time.monotonic()
        if case.strange:
            return Result(case, "failed", f"not in the language: {', '.join(case.strange)}")
        if reasons := list(_not_built(case, self.store, self.driver)):
            return Result(case, "skipped", "; ".join(reasons))
        try:
            async with asyncio.timeout(LIMIT):
                seen = await self._play(case)
            self.recorded[case.id] = seen
            differences = judge(case.then, seen)
        except TimeoutError:
            differences = [f"not finished within {LIMIT} s"]
        except RuntimeError as error:
            differences = [str(error)]
        status = "failed" if differences else "passed"
        return Result(case, status, "; ".join(differences), time.monotonic() - started)

    async def _play(self, case: Case) -> Observed:
        nodes = await self._ready(case)
        play = Play(case, self._database, nodes)
        try:
            for step in case.when:
                await play.step(step)
            return await play.observed()
        finally:
            await play.end()

    async def _ready(self, case: Case) -> list[Node]:
        """The processes that the case needs, with its settings, idle, on empty tables."""
        names = [f"node{number + 1}" for number in range(int(case.given.get("nodes", 1)))]
        nodes = []
        for name in names:
            node = self._nodes.setdefault(name, Node(self.app, self.driver, self._database.dsn))
            await node.configure(case.given, {})
            await node.tell("reset")
            await node.tell("settle")
            nodes.append(node)
        await self._database.execute(*tables.emptying())
        return nodes


def _not_built(case: Case, store: str, driver: str) -> Iterator[str]:
    """Why a case cannot be run yet; nothing when it can."""
    if case.sut == "client":
        yield "the retrying client is not built"
        return
    if "tx" not in case.modes:
        yield f"mode {'/'.join(case.modes)} is not built"
        return
    yield from Settings(case.given).not_offered(store, driver)
    paths = str(case.when)
    for path, what in (
        ("/checkout", "nested"),
        ("/loop", "nested"),
        ("/webhooks", "inbox"),
        ("/payouts", "lease"),
    ):
        if f"'path': '{path}" in paths:
            yield f"{what} is not built"
    for step in case.when:
        for word in step:
            if word in CLIENT_STEPS | _STEPS_NOT_BUILT:
                yield f"{word} is not built"
    for word in case.then:
        if word in _THEN_NOT_BUILT:
            yield f"{word} is not built"
    missing = case.then.get("effects", {}).keys() - set(tables.TABLES)
    if missing:
        yield f"no table {', '.join(sorted(missing))} in this application"


_STEPS_NOT_BUILT = {"provider", "relay", "complete_stuck", "clock_skew", "behaviour", "replica_lag", "region"}
_THEN_NOT_BUILT = {
    "provider",
    "emails",
    "emails_sent",
    "product",
    "metrics",
    "admin",
    "review_queue",
    "point",
}


class Play:
    """One case under way."""

    def __init__(self, case: Case, database: Database, nodes: list[Node]) -> None:
        self._case = case
        self._database = database
        self._nodes = nodes
        self._deployed: dict[str, Any] = {}
        self._settings = Settings(case.given)
        self._seen = Observed(str(case.given.get("replay_header", "Idempotent-Replayed")))
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._calls: dict[str, wire.Call] = {}
        self._where: dict[str, Node] = {}
        self._clock: list[dict[str, Any]] = []
        self._store = "up"

    async def step(self, step: Mapping[str, Any]) -> None:
        """Do one step."""
        name = next(word for word in step if hasattr(self, f"do_{word}"))
        others = {word: value for word, value in step.items() if word != name}
        await getattr(self, f"do_{name}")(step[name], **others)

    async def observed(self) -> Observed:
        """All that the case leaves behind, once every request has ended."""
        await asyncio.gather(*self._tasks.values())
        for node in self._nodes:
            if node.alive:
                await node.tell("settle")
        counted = [f"SELECT count(*) FROM {table}" for table in (*tables.TABLES, "taptwice_records")]  # noqa: S608
        *counts, wallets = await self._database.execute(*counted, "SELECT id, balance_cents FROM wallets")
        numbers = [rows[0][0] for rows in counts]
        seen = self._seen
        seen.effects = dict(zip(tables.TABLES, numbers[:-1], strict=True))
        seen.keys = numbers[-1]
        seen.balances = dict(wallets)
        if "logs" in self._case.then:
            for node in self._nodes:
                seen.logs += (await node.tell("logs"))["lines"]
        return seen

    async def end(self) -> None:
        """Leave nothing behind that the next case would meet."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._store != "up":
            await self.do_store("up")

    # --- requests ------------------------------------------------------------------------------

    async def do_send(self, spec: Mapping[str, Any]) -> None:
        await self._exchange(spec)

    async def do_start(self, spec: Mapping[str, Any]) -> None:
        self._begin(spec)

    def _begin(self, spec: Mapping[str, Any], barrier: asyncio.Barrier | None = None) -> asyncio.Task[None]:
        task = asyncio.ensure_future(self._exchange(spec, barrier))
        self._tasks[spec["id"]] = task
        return task

    async def _exchange(self, spec: Mapping[str, Any], barrier: asyncio.Barrier | None = None) -> None:
        spec = self._filled(spec)
        name = spec["id"]
        node = self._node(spec)
        self._where[name] = node
        call = self._calls[name] = wire.Call(node.address)
        orders = {word: spec[word] for word in ("hold_at", "fault") if word in spec}

        async def connected(port: int) -> None:
            if orders:
                await node.tell("arm", port=port, id=name, **orders)
            if barrier is not None:
                await barrier.wait()

        request = wire.request_of(spec, self._settings.names[0])
        if "max_ms" in spec:
            self._seen.max_ms[name] = spec["max_ms"]
        if spec.get("via") == "duplicating_proxy":
            await wire.Call(node.address).send(request)
        self._seen.responses[name] = wire.Response()
        response = await call.send(request, connected)
        while spec.get("follow") and (following := wire.redirected(request, response)) is not None:
            redirects = [*response.redirects, response.status]
            response = await wire.Call(node.address).send(following)
            response.redirects = redirects
        self._seen.responses[name] = response
        if response.status == wire.NO_RESPONSE and spec.get("fault", {}).get("do") == "crash":
            await node.gone()

    def _node(self, spec: Mapping[str, Any]) -> Node:
        wanted = spec.get("node")
        if wanted is None:
            return self._nodes[0]
        return self._nodes[int(str(wanted).removeprefix("node")) - 1]

    def _filled(self, value: Any, number: int | None = None) -> Any:
        """The words in braces replaced, in all strings."""
        if isinstance(value, str):
            return re.sub(
                r"\{([a-z0-9_]+\.(?:id|etag)|i|now(?:\+\d+\w+)?|http_date:\+\d+\w+)\}",
                lambda m: self._word(m, number),
                value,
            )
        if isinstance(value, Mapping):
            return {name: self._filled(each, number) for name, each in value.items()}
        if isinstance(value, list):
            return [self._filled(each, number) for each in value]
        return value

    def _word(self, found: re.Match[str], number: int | None) -> str:
        word = found[1]
        if word == "i":
            return found[0] if number is None else str(number)
        if word.startswith("now"):
            return str(int(time.time() + interval(word)))
        if word.startswith("http_date"):
            return formatdate(time.time() + interval(word), usegmt=True)
        name, _, what = word.partition(".")
        response = self._seen.responses.get(name, wire.Response())
        if what == "etag":
            return response.header("ETag") or ""
        document = response.json()
        return str(document.get("id", "")) if isinstance(document, dict) else ""

    async def do_parallel(self, spec: Mapping[str, Any]) -> None:
        await asyncio.gather(*(self._many(spec)))

    async def do_start_n(self, spec: Mapping[str, Any]) -> None:
        for task in self._many(spec):
            self._tasks.setdefault(task.get_name(), task)

    def _many(self, spec: Mapping[str, Any]) -> list[asyncio.Task[None]]:
        if "list" in spec:
            return [asyncio.ensure_future(self.step(inner)) for inner in spec["list"]]
        barrier = asyncio.Barrier(spec["n"]) if spec.get("barrier") else None
        spread = spec.get("spread_over")
        tasks = []
        for number in range(1, spec["n"] + 1):
            request = {**self._filled(spec["req"], number), "id": f"{spec['prefix']}{number}"}
            if spread:
                request["node"] = spread[number % len(spread)]
            tasks.append(self._begin(request, barrier))
        return tasks

    async def do_duplicate_all(self, spec: Mapping[str, Any]) -> None:
        for request in spec["reqs"]:
            again = {**request, "id": f"{request['id']}_again"}
            if spec.get("mode") == "parallel":
                await asyncio.gather(self._exchange(request), self._exchange(again))
            else:
                await self._exchange(request)
                await self._exchange(again)

    async def do_reached(self, spec: Mapping[str, Any]) -> None:
        # Armed when it has connected: until then the server does not know it.
        name = spec["req"]
        while True:
            try:
                await self._where[name].tell("reached", id=name, point=spec["point"])
            except (KeyError, RuntimeError):
                if self._tasks[name].done():
                    raise RuntimeError(f"{name} ended and never was at {spec['point']}") from None
                await asyncio.sleep(0.005)
            else:
                return

    async def do_release(self, name: str) -> None:
        await self._where[name].tell("release", id=name)

    async def do_await(self, name: str) -> None:
        await self._tasks[name]

    async def do_await_prefix(self, prefix: str) -> None:
        await asyncio.gather(*(task for name, task in self._tasks.items() if name.startswith(prefix)))

    async def do_disconnect(self, name: str) -> None:
        self._calls[name].hang_up()
        await self._tasks[name]

    async def do_disconnect_prefix(self, prefix: str) -> None:
        for name in [each for each in self._calls if each.startswith(prefix)]:
            await self.do_disconnect(name)

    # --- the server and its world --------------------------------------------------------------

    async def _tell_all(self, command: str, **words: Any) -> None:
        await asyncio.gather(*(node.tell(command, **words) for node in self._nodes))

    async def do_restart(self, which: Any, node: str | None = None) -> None:
        killed = [each for each in self._nodes if not each.alive]
        for each in killed or self._nodes[:1]:
            await each.kill()
            await each.start()
            for command in self._clock:
                await each.tell("clock", **command)
            if self._store != "up":
                await each.tell("store", state=self._store)

    async def do_advance(self, duration: str, clock: str = "all", heartbeats: bool = False) -> None:
        await self._move({"advance": interval(duration), "http": clock == "http"})

    async def do_set_clock(self, instant: str, clock: str = "all") -> None:
        await self._move({"set": datetime.fromisoformat(instant).timestamp()})

    async def _move(self, command: dict[str, Any]) -> None:
        self._clock.append(command)
        await self._tell_all("clock", **command)

    async def do_sweep(self, _: Any) -> None:
        await self._nodes[0].tell("sweep")

    async def do_migrate(self, _: Any) -> None:
        await self._nodes[0].tell("migrate")

    async def do_settle(self, _: Any) -> None:
        await self._tell_all("settle")

    async def do_store(self, state: str) -> None:
        self._store = state
        await self._database.set_store(state)
        if self._database.store == "sqlite":
            await self._tell_all("store", state=state)

    async def do_deploy(self, changes: Mapping[str, Any]) -> None:
        self._deployed.update(changes)
        for node in self._nodes:
            await node.configure(self._case.given, self._deployed)
            for command in self._clock:
                await node.tell("clock", **command)

    async def do_revoke(self, what: Mapping[str, Any]) -> None:
        await self._tell_all("revoke", **what)

    async def do_seed_keys(self, spec: Mapping[str, Any]) -> None:
        dialect = "sqlite" if self._database.store == "sqlite" else "postgresql"
        await self._database.execute(tables.SEED[dialect].format(n=spec["n"], age=interval(spec["age"])))

    async def do_sleep(self, duration: str) -> None:
        await asyncio.sleep(interval(duration))
