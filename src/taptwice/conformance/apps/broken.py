"""Servers that are broken on purpose: a suite that passes one of them proves nothing.

Each is the FastAPI application with one thing taken out of the layer beneath it, as people leave it out who
build this by hand. `CONTROLS` names the case that each must fail. For drivers that await.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from taptwice.conformance.apps import fastapi
from taptwice.conformance.apps.world import World
from taptwice.conformance.settings import Settings
from taptwice.conformance.stack import Stack
from taptwice.core import fingerprint
from taptwice.core.plan import Begin, Close, Command, Commit, Query, Rollback, Savepoint, Together
from taptwice.core.policy import Policy

CONTROLS = {
    "check-then-insert": "D-159",
    "no-account": "D-147",
    "no-fingerprint": "D-098",
    "key-outside": "D-184",
    "released-after-effect": "D-320",
    "replays-500": "D-073",
    "streams-again": "D-319",
}
"""What is broken -> the case that must notice."""

RACE = 0.2
"""Seconds between the check and the work, so that all requests of a burst have checked by then."""


class Damaged:
    """An executor that does one thing wrong."""

    def __init__(self, inner: Any, damage: str) -> None:
        self._inner = inner
        self._damage = damage
        self._late: Query | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def execute(self, command: Command[Any], /) -> Any:
        if isinstance(command, Together):
            return tuple([await self.execute(each) for each in command.commands])
        match self._damage, command:
            case "check-then-insert", Savepoint():
                await self._inner.execute(Commit())
                await asyncio.sleep(RACE)
                await self._inner.execute(Begin(5.0))
            case "check-then-insert", Query("insert"):
                await self._inner.execute(replace(command, statement="insert_late"))
                return ((1,),)
            case "key-outside", Query("insert"):
                self._late = replace(command, statement="insert_late")
                return ((1,),)
            case "key-outside", Close():
                await self._save_late()
            case "released-after-effect", Rollback():
                try:
                    return await self._inner.execute(Commit())
                except Exception:  # nothing was open
                    return await self._inner.execute(command)
            case "streams-again", Query("insert", parameters) if dict(parameters)["body"] is None:
                return ((1,),)
        return await self._inner.execute(command)

    async def _save_late(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            for each in (Begin(5.0), late, Commit()):
                await self._inner.execute(each)


class DamagedSource:
    """The source of such executors."""

    def __init__(self, inner: Any, damage: str) -> None:
        self.dialect = inner.dialect
        self.blocking = inner.blocking
        self._inner = inner
        self._damage = damage

    def open(self) -> Damaged:
        return Damaged(self._inner.open(), self._damage)


class NoGate:
    """Lets everybody in at once."""

    @asynccontextmanager
    async def turn(self, key: object, wait: float) -> AsyncIterator[Callable[[], None]]:
        yield lambda: None


def create_app(damage: str, stack: Stack, settings: Settings, world: World) -> tuple[Any, Any]:
    """The application, damaged. What it patches is gone with its process."""
    if damage == "no-account":
        Settings.account_of = lambda *_: "everybody"  # type: ignore[method-assign]
    if damage == "no-fingerprint":
        fingerprint.of_request = lambda *_: fingerprint.of_bytes(b"")
    if damage == "replays-500":
        Policy.keeps = lambda *_: True  # type: ignore[method-assign]
    app, once = fastapi.create_app(stack, settings, world)
    once.bound = DamagedSource(once.source, damage)
    if damage == "check-then-insert":
        once.gate = NoGate()  # type: ignore[assignment]
    return app, once
