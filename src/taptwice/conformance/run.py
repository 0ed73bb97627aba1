"""Cases, run one after another on a target.

async with Reference("fastapi", "sqlite", "aiosqlite") as target:
    result = await Runner(target).run(case)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from taptwice.conformance.clients.words import for_clients
from taptwice.conformance.judge import Observed, judge
from taptwice.conformance.language import Case
from taptwice.conformance.play import Play
from taptwice.conformance.target import Target

if TYPE_CHECKING:  # it needs what is here
    from taptwice.conformance.clients.play import Clients

UNCOUNTED = frozenset({"effects", "keys", "balances"})

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
    seen: Observed | None = field(default=None, repr=False)
    """What was observed, where it was played to its end."""

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
    """Plays cases on a target, which is open; those about clients on `clients`, if there are any."""

    def __init__(self, target: Target, clients: Clients | None = None) -> None:
        self._target = target
        self._clients = clients

    async def run(self, case: Case) -> Result:
        """Run one case. It never raises for what the server does."""
        if self._clients is not None and for_clients(case):
            return await self._clients.run(case)
        if case.strange:
            return Result(case, "failed", f"not in the language: {', '.join(case.strange)}")
        try:
            if reasons := list(self._target.not_offered(case)):
                return Result(case, "skipped", "; ".join(reasons))
            here = self._target.translated(case)
        except Exception as error:  # as in `judged`
            return Result(case, "failed", _unplayable(error))
        return await judged(here, self._play)

    async def _play(self, case: Case) -> Observed:
        await self._target.ready(case)
        play = Play(case, self._target)
        try:
            for step in case.when:
                await play.step(step)
            return await play.observed()
        finally:
            await play.end()


async def judged(case: Case, play: Callable[[Case], Awaitable[Observed]]) -> Result:
    """Play a case, and judge what it leaves behind."""
    started = time.monotonic()
    seen: Observed | None = None
    try:
        async with asyncio.timeout(LIMIT):
            seen = await play(case)
        differences = judge(case.then, seen)
    except TimeoutError:
        differences = [f"not finished within {LIMIT} s"]
    except RuntimeError as error:
        differences = [str(error)]
    except Exception as error:  # a case that is not well-formed ends itself, not the run
        differences = [_unplayable(error)]
    status = "failed" if differences else "passed"
    if not differences and seen is not None and seen.uncounted and UNCOUNTED & case.then.keys():
        differences = ["judged by its answers alone: what the server keeps cannot be counted"]
    return Result(case, status, "; ".join(differences), time.monotonic() - started, seen)


def _unplayable(error: Exception) -> str:
    return f"cannot be played: {type(error).__name__}: {error}"
