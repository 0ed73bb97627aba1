"""What a client case gives its client: a policy, a budget, a breaker, and time that passes on demand."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

from taptwice.client.gate import MakeBudget
from taptwice.client.policy import RetryPolicy
from taptwice.client.world import World
from taptwice.conformance.settings import interval
from taptwice.core.breaker import CircuitBreaker
from taptwice.core.budget import RetryBudget


class Lived:
    """The time of one call, in the client's seconds."""

    __slots__ = ("lead", "waits")

    def __init__(self, lead: float = 0.0) -> None:
        self.lead = lead
        """How long after the others of its group it began."""
        self.waits: list[float] = []

    @property
    def past(self) -> float:
        """What has gone by without taking any time."""
        return self.lead + sum(self.waits)


_NOBODY = Lived()
_lived: ContextVar[Lived] = ContextVar("taptwice_conformance_lived", default=_NOBODY)


class Time:
    """The time of a case. Waits take none of it: the clock goes on as if they had.

    Calls at the same time wait at the same time, so each has waits of its own. Durations of the case and of
    what is measured are the case's; the client's seconds are so many times shorter as `pace` says.
    """

    def __init__(self, pace: int, seed: str, waiting: bool = False) -> None:
        """`waiting`: waits are real."""
        self.pace = pace
        self.seed = seed
        self.waiting = waiting
        self._ahead = 0.0
        draw = random.Random(seed)
        self.world = World(
            clock=self.clock, sleep=self._sleep, asleep=self._asleep, draw=lambda: 1.0 - draw.random()
        )

    def clock(self) -> float:
        """The client's seconds."""
        own = 0.0 if self.waiting else _lived.get().past
        return time.monotonic() + self._ahead + own

    def begin(self, lead: float) -> Lived:
        """A call begins, so many of the case's seconds after the first of its group."""
        lived = Lived(lead / self.pace)
        _ = _lived.set(lived)
        return lived

    def over(self, calls: Iterable[Lived]) -> None:
        """Calls that were under way together are over: so is the time of the one that took longest."""
        _ = _lived.set(_NOBODY)
        if not self.waiting:
            self._ahead += max((call.past for call in calls), default=0.0)

    def advance(self, seconds: float) -> None:
        """Let so much of the case's time pass."""
        if self.waiting:
            time.sleep(seconds / self.pace)
        else:
            self._ahead += seconds / self.pace

    def _sleep(self, seconds: float) -> None:
        _lived.get().waits.append(seconds)
        if self.waiting:
            time.sleep(seconds)

    async def _asleep(self, seconds: float) -> None:
        _lived.get().waits.append(seconds)
        await asyncio.sleep(seconds if self.waiting else 0)


class Breaker(CircuitBreaker):
    """A circuit breaker that counts its probes."""

    def __init__(self, **rules: Any) -> None:
        super().__init__(**rules)
        self.probes = 0

    def enter(self, now: float | None = None) -> int | None:
        """See `CircuitBreaker`."""
        ticket = super().enter(now)
        self.probes += ticket is not None and self.state == "probing"
        return ticket


class Setup:
    """The settings of a case's client."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = settings_of(given)
        self._key_header = given.get("header", "Idempotency-Key")

    def policy(self, pace: int) -> RetryPolicy:
        """When to try again."""
        found: dict[str, Any] = {"key_header": self._key_header}
        for name in ("max_attempts", "auto_key", "key_quoting"):
            if name in self._given:
                found[name] = self._given[name]
        for name in ("deadline", "per_try", "base", "cap"):
            if name in self._given:
                found[name] = _seconds(self._given[name], pace)
        default = RetryPolicy()
        for name in ("base", "cap", "deadline", "per_try", "retry_after_limit"):
            found.setdefault(name, getattr(default, name) / pace)
        statuses = self._given.get("retry_statuses")
        if isinstance(statuses, list):
            found["refused"] = default.refused & set(statuses)
            found["unknown"] = frozenset(statuses) - default.refused - {409}
        return RetryPolicy(**found)

    def budget(self) -> MakeBudget:
        """What makes a retry budget; none if there is none."""
        rules = self._given.get("budget", {})
        if rules is None:
            return None
        most = rules.get("max", 10)
        return partial(RetryBudget, rules.get("ratio", 0.1), most, most)

    def breaker(self, time: Time) -> Breaker | None:
        """The circuit breaker, if there is one."""
        rules = self._given.get("breaker")
        if rules is None:
            return None
        found = {name: rules[name] for name in ("failures",) if name in rules}
        if "cooldown" in rules:
            cooldown = _seconds(rules["cooldown"], time.pace)
            found |= {"cooldown": cooldown, "longest": max(60.0, cooldown)}
        return Breaker(**found, clock=time.clock)


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The client's settings, which stand in ``client`` or one by one, as ``client.budget``."""
    dotted = {
        name.removeprefix("client."): value for name, value in given.items() if name.startswith("client.")
    }
    return {**given.get("client", {}), **dotted}


def _seconds(duration: str | float | None, pace: int) -> Any:
    if duration is None:
        return None
    return (interval(duration) if isinstance(duration, str) else duration) / pace
