"""One case under way: its steps, one method each, and what they leave behind."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from datetime import datetime
from email.utils import formatdate
from typing import Any

from taptwice.conformance import wire
from taptwice.conformance.judge import Observed
from taptwice.conformance.language import Case
from taptwice.conformance.settings import interval
from taptwice.conformance.target import Server, Target


class Play:
    """One case under way."""

    def __init__(self, case: Case, target: Target) -> None:
        self._case = case
        self._target = target
        self._seen = Observed(str(case.given.get("replay_header", "Idempotent-Replayed")))
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._calls: dict[str, wire.Call] = {}
        self._where: dict[str, Server] = {}
        self._faults: dict[str, str] = {}
        self._awaited = {str(step["reached"]["req"]) for step in case.when if "reached" in step}
        self._store = "up"

    async def step(self, step: Mapping[str, Any]) -> None:
        """Do one step."""
        name = next(word for word in step if hasattr(self, f"do_{word}"))
        others = {word: value for word, value in step.items() if word != name}
        await getattr(self, f"do_{name}")(step[name], **others)

    async def observed(self) -> Observed:
        """All that the case leaves behind, once every request has ended."""
        await asyncio.gather(*self._tasks.values())
        unstruck = await self._target.settle()
        # Copies of one request have each a fault of their own; one of them is enough.
        happened = {fault for name, fault in self._faults.items() if name not in unstruck}
        self._seen.unstruck = sorted(set(self._faults.values()) - happened)
        await self._target.observe(self._seen, self._case.then)
        return self._seen

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
        node = self._target.server(spec)
        self._where[name] = node
        call = self._calls[name] = self._target.call(node)
        orders = {word: spec[word] for word in ("hold_at", "fault") if word in spec}
        if "fault" in spec:
            self._faults[name] = f"{spec['fault']['do']} at {spec['fault']['at']}"

        async def connected(port: int) -> None:
            if orders or name in self._awaited:
                await node.tell("arm", port=port, id=name, **orders)
            if barrier is not None:
                await barrier.wait()

        request = self._target.request(spec)
        if "max_ms" in spec:
            self._seen.max_ms[name] = spec["max_ms"]
        if spec.get("via") == "duplicating_proxy":
            await self._target.call(node).send(request)
        self._seen.responses[name] = wire.Response()
        response = await call.send(request, connected)
        while spec.get("follow") and (following := wire.redirected(request, response)) is not None:
            redirects = [*response.redirects, response.status]
            response = await self._target.call(node).send(following)
            response.redirects = redirects
        self._seen.responses[name] = response
        if response.status == wire.NO_RESPONSE and spec.get("fault", {}).get("do") == "crash":
            await node.gone()

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

    async def do_restart(self, which: Any, node: str | None = None) -> None:
        await self._target.restart(node or (which if isinstance(which, str) else None))

    async def do_advance(self, duration: str, clock: str = "all", heartbeats: bool = False) -> None:
        await self._target.tell_all("clock", advance=interval(duration), http=clock == "http")

    async def do_set_clock(self, instant: str, clock: str = "all") -> None:
        filled = self._filled(instant)
        moment = float(filled) if filled.isdigit() else datetime.fromisoformat(filled).timestamp()
        await self._target.tell_all("clock", set=moment, http=clock == "http")

    async def do_clock_skew(self, skew: Mapping[str, Any]) -> None:
        # A node's own clock shows in the Date header only: records are dated by the database.
        by = str(skew["by"])
        seconds = -interval(by) if by.startswith("-") else interval(by)
        await self._target.server(skew).tell("clock", advance=seconds, http=True)

    async def do_replica_lag(self, lag: str) -> None:
        await self._target.server({}).tell("replica_lag", lag=interval(lag))

    async def do_sweep(self, _: Any) -> None:
        await self._target.server({}).tell("sweep")

    async def do_migrate(self, _: Any) -> None:
        await self._target.server({}).tell("migrate")

    async def do_settle(self, _: Any) -> None:
        await self._target.settle()

    async def do_store(self, state: str) -> None:
        self._store = state
        await self._target.store(state)

    async def do_region(self, changes: Mapping[str, Any]) -> None:
        await self._target.region(changes)

    async def do_deploy(self, changes: Mapping[str, Any]) -> None:
        await self._target.deploy(changes)

    async def do_revoke(self, what: Mapping[str, Any]) -> None:
        await self._target.tell_all("revoke", **what)

    async def do_behaviour(self, behaviour: Mapping[str, Any]) -> None:
        await self._target.tell_all("behaviour", behaviour=behaviour)

    async def do_seed_keys(self, spec: Mapping[str, Any]) -> None:
        await self._target.seed(int(spec["n"]), interval(spec["age"]))

    async def do_sleep(self, duration: str) -> None:
        await asyncio.sleep(interval(duration))
