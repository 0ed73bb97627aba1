"""A client under test, opened: it makes calls, and each is told as it went."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from taptwice.client.outcome import Outcome
from taptwice.client.plan import StopReason
from taptwice.client.reports import Listener, Report, report
from taptwice.conformance.clients.doors import Asked, Door, Options, answered
from taptwice.conformance.clients.setup import Breaker, Lived, Setup, Time
from taptwice.conformance.wire import Response
from taptwice.errors import Misuse, TaptwiceError

AT_ONCE = 64
"""Calls that are made at the same time, at most."""

_STOPS = {
    StopReason.UNKNOWN_OUTCOME: "unknown_outcome",
    StopReason.DEADLINE: "deadline",
    StopReason.RETRY_AFTER_EXCEEDS_DEADLINE: "deadline",
    StopReason.BUDGET: "budget",
    StopReason.CIRCUIT_OPEN: "breaker_open",
}


@dataclass(slots=True)
class Called:
    """One call, as it went."""

    response: Response | None = None
    """None: it raised."""
    error: str | None = None
    """A word of the language, or what was raised."""
    attempts: int = 0
    lived: Lived = field(default_factory=Lived)
    seconds: float = 0.0
    """The client's, from its beginning to its end."""


class Subject:
    """A client under test. All that it remembers beyond its own life stands in the folder."""

    def __init__(
        self, door: Door, setup: Setup, time_: Time, url: str, folder: Path, listener: Listener
    ) -> None:
        self.breaker: Breaker | None = setup.breaker(time_)
        breaker = self.breaker
        self._door, self._time, self._url = door, time_, url
        self._runner = asyncio.Runner() if door.awaiting else None
        shared = {
            "policy": setup.policy(time_.pace),
            "world": time_.world,
            "budget": setup.budget(),
            "breaker": None if breaker is None else lambda: breaker,
            "listeners": [listener],
        }
        self._client = self._wait_for(door.open(door, Options(shared=shared, folder=folder)))

    def close(self) -> None:
        """Close its connections."""
        self._wait_for(getattr(self._client, self._door.close)())
        if self._runner is not None:
            self._runner.close()

    def call(self, asked: Asked) -> Called:
        """Make one call."""
        found: Called = self._wait_for(self._acall(asked)) if self._door.awaiting else self._call(asked)
        self._time.over([found.lived])
        return found

    def parallel(self, asked: Sequence[Asked], between: float) -> list[Called]:
        """Make calls at the same time, or each so many of the case's seconds after the one before."""
        leads = [between * number for number in range(len(asked))]
        if self._door.awaiting:
            found: list[Called] = self._wait_for(self._gathered(asked, leads))
        else:
            with ThreadPoolExecutor(min(len(asked), AT_ONCE)) as pool:
                found = list(pool.map(self._call, asked, leads))
        self._time.over(each.lived for each in found)
        return found

    def _wait_for(self, made: Any) -> Any:
        if not inspect.isawaitable(made):
            return made
        assert self._runner is not None  # noqa: S101

        async def wait() -> Any:
            return await made

        return self._runner.run(wait())

    async def _gathered(self, asked: Iterable[Asked], leads: Iterable[float]) -> list[Called]:
        room = asyncio.Semaphore(AT_ONCE)

        async def one(each: Asked, lead: float) -> Called:
            async with room:
                return await self._acall(each, lead)

        return list(await asyncio.gather(*map(one, asked, leads)))

    def _call(self, asked: Asked, lead: float = 0.0) -> Called:
        if lead and self._time.waiting:
            time.sleep(lead / self._time.pace)
        called, began = Called(lived=self._time.begin(lead)), self._time.clock()
        try:
            _answer(called, self._door.call(self._client, self._door, self._url, asked))
        except Exception as error:
            _failure(called, error)
        called.seconds = self._time.clock() - began
        return called

    async def _acall(self, asked: Asked, lead: float = 0.0) -> Called:
        if lead and self._time.waiting:
            await asyncio.sleep(lead / self._time.pace)
        called, began = Called(lived=self._time.begin(lead)), self._time.clock()
        try:
            _answer(called, await self._door.call(self._client, self._door, self._url, asked))
        except Exception as error:
            _failure(called, error)
        called.seconds = self._time.clock() - began
        return called


def _answer(called: Called, response: Any) -> None:
    found = report(response)
    called.response = answered(response)
    called.attempts = len(found.attempts)
    called.error = _STOPS.get(found.stop_reason)
    if called.response.status == 422 and _problem(called.response) == "key-reused":
        called.error = "key_reused"


def _failure(called: Called, error: Exception) -> None:
    """What was raised. Raises what is no outcome of a call: a setting that is wrong, a defect."""
    found: Report | None = getattr(error, "taptwice", None)
    if found is None:
        if not isinstance(error, TaptwiceError) or isinstance(error, Misuse):
            raise error
        called.error = type(error).__name__  # refused before anything was sent
        return
    response = getattr(error, "response", None)
    if response is not None and hasattr(response, "extensions"):  # KeyReused, KeyRejected
        _answer(called, response)
        called.error = called.error or type(error).__name__
        return
    called.attempts = len(found.attempts)
    left = "unknown_outcome" if found.outcome is Outcome.UNKNOWN else str(found.outcome)
    called.error = _STOPS.get(found.stop_reason, left)


def _problem(response: Response) -> str | None:
    document = response.json()
    return str(document.get("type")).rpartition("/")[2] if isinstance(document, dict) else None
