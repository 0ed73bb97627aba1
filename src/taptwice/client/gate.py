"""What stands between a client and one server: a retry budget and a circuit breaker, one pair an origin."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol, TypeAlias

from taptwice.client.outcome import Outcome, Seen
from taptwice.client.settings import check_maker

__all__ = ["Breaker", "Budget", "Gate", "Gates"]


class Budget(Protocol):
    """`taptwice.core.budget.RetryBudget`, or something like it."""

    def earn(self) -> None:
        """A first attempt is made."""

    def take(self) -> bool:
        """Pay for a retry, before the wait. False: none is left."""


class Breaker(Protocol):
    """`taptwice.core.breaker.CircuitBreaker`, or something like it."""

    def enter(self, now: float | None = None) -> int | None:
        """A ticket for one attempt, or None: it may not be made."""

    def leave(self, ticket: int, outcome: bool | None, now: float | None = None) -> None:
        """The attempt ended: well, badly, or in a way that says nothing about the server."""

    def retry_after(self, now: float | None = None) -> float:
        """Seconds until an attempt may be made."""


MakeBudget: TypeAlias = Callable[[], Budget] | None
MakeBreaker: TypeAlias = Callable[[], Breaker] | None


class Gate:
    """The pair of one origin; each may be missing."""

    __slots__ = ("breaker", "budget")

    def __init__(self, budget: Budget | None, breaker: Breaker | None) -> None:
        self.budget = budget
        self.breaker = breaker


class Gates:
    """A gate for each origin, made when it is first called."""

    __slots__ = ("_breaker", "_budget", "_gates")

    def __init__(self, budget: MakeBudget, breaker: MakeBreaker) -> None:
        check_maker("budget", budget)
        check_maker("breaker", breaker)
        self._budget = budget
        self._breaker = breaker
        self._gates: dict[Hashable, Gate] = {}

    def __getitem__(self, origin: Hashable) -> Gate:
        gate = self._gates.get(origin)
        if gate is None:
            made = Gate(self._budget and self._budget(), self._breaker and self._breaker())
            gate = self._gates.setdefault(origin, made)
        return gate


def verdict(seen: Seen, cut: bool) -> bool | None:
    """What an attempt tells the breaker about the server. `cut`: the call's own deadline ended it.

    A refusal for load (429) or "in progress" comes from a server that works and says nothing more; neither
    does an error of ours, or a deadline that was short.
    """
    if seen.error is not None:
        return None if cut or seen.permanent else False
    if seen.status is not None and seen.status >= 500 and seen.outcome is not Outcome.PROCESSED:
        return False
    return True if seen.outcome is Outcome.PROCESSED else None
