"""A server process: started, told what to do, killed and started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from taptwice.conformance import wire
from taptwice.conformance.serve import VARIABLE

START = 30
"""Seconds that a process may take until it listens."""


class NotStarted(RuntimeError):
    """A server process that ended before it listened."""


class Node:
    """One process. It is made anew by `start` when it is gone, on the same database."""

    def __init__(self, app: str, driver: str, dsn: str, port: int = 0) -> None:
        self._asked = {"app": app, "driver": driver, "dsn": dsn, "port": port}
        self._process: asyncio.subprocess.Process | None = None
        self._settings: Any = None
        self.address = ("127.0.0.1", 0)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def configure(self, given: Mapping[str, Any], deployed: Mapping[str, Any]) -> None:
        """Run with these settings."""
        settings = json.loads(json.dumps([given, deployed]))
        if self.alive and settings == self._settings:
            return
        self._settings = settings
        if self.alive:
            await self.tell("configure", given=given, deployed=deployed)
        else:
            await self.start()

    async def start(self) -> None:
        """Start the process with the settings of before."""
        given, deployed = self._settings
        asked = json.dumps({**self._asked, "given": given, "deployed": deployed})
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "taptwice.conformance.serve",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, VARIABLE: asked},
        )
        assert self._process.stdout is not None  # noqa: S101
        async with asyncio.timeout(START):
            line = await self._process.stdout.readline()
        if not line.startswith(b"ready "):
            raise NotStarted(
                line.decode().strip() or "the server process did not start; its errors are above"
            )
        self.address = ("127.0.0.1", int(line.split()[1]))

    async def tell(self, command: str, **words: Any) -> dict[str, Any]:
        """A command of the control interface, and its reply."""
        return await wire.ask(wire.Call(self.address), {"do": command, **words})

    async def gone(self) -> None:
        """Wait until a process that was killed is gone."""
        if self._process is not None:
            await self._process.wait()

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            # Not Process.kill(): it would reap a process that has just died, and asyncio not find it.
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            await self._process.wait()
