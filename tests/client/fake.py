"""A server that exists on paper, and a clock that moves when somebody waits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from taptwice.client.outcome import Outcome, Seen, of_answer
from taptwice.client.plan import Again, Attempt, Call, Draw, Enter, Take, Wait, retrying
from taptwice.client.policy import RetryPolicy
from taptwice.core.plan import Command, Now, run

# The cases' own client: figures differ from the defaults on purpose.
C0 = RetryPolicy(max_attempts=4, base=0.1, cap=1.0, deadline=5.0, per_try=None)

PROBLEMS = "https://taptwice.dev/problems/"


def answer(
    status: int,
    headers: Mapping[str, str] | None = None,
    document: Mapping[str, Any] | None = None,
    *,
    policy: RetryPolicy = C0,
) -> Seen:
    """An answer as a door would judge it."""
    fields = {name.lower(): value for name, value in (headers or {}).items()}
    if document is not None:
        fields.setdefault("content-type", "application/problem+json")
    return of_answer(policy, status, status, fields.get, lambda: json.dumps(document).encode())


def problem(status: int, name: str, headers: Mapping[str, str] | None = None) -> Seen:
    """An answer with a problem type of ours."""
    return answer(status, headers, {"type": PROBLEMS + name})


class Play:
    """One call against scripted attempts: step k is what the k-th attempt shows, the last one repeats."""

    def __init__(
        self,
        steps: Sequence[Seen],
        policy: RetryPolicy = C0,
        *,
        method: str = "GET",
        key: str | None = None,
        replayable: bool = True,
        single: bool = False,
        u: Callable[[], float] = lambda: 1.0,
        took: float = 0.0,
        budget: Any = None,
        enter: Callable[[], bool] = lambda: True,
        plan: Callable[[Call, Seen], Any] = retrying,
    ) -> None:
        self.now = 100.0
        self.steps = steps
        self.took = took
        self.u = u
        self.budget = budget
        self.enter = enter
        self.waits: list[float] = []
        self.commands: list[str] = []
        self.begins: list[float] = []
        self.call = Call(policy, self.now, method=method, key=key, replayable=replayable, single=single)
        first = self.attempt()
        self.seen = first if first.final else run(plan(self.call, first), self.execute)

    @property
    def log(self) -> list[int | Outcome]:
        """Statuses, and outcomes where there was no answer."""
        return [each.status or each.outcome for each in self.call.attempts]

    def attempt(self) -> Seen:
        began, self.now = self.now, self.now + self.took
        self.begins.append(began)
        seen = self.steps[min(len(self.call.attempts), len(self.steps) - 1)]
        self.call.attempts.append(
            Attempt(seen.outcome, seen.status, seen.error, self.call.waited, began, self.now)
        )
        return seen

    def execute(self, command: Command[Any]) -> Any:
        self.commands.append(type(command).__name__)
        match command:
            case Now():
                return self.now
            case Draw():
                return self.u()
            case Take():
                return self.budget is None or self.budget.take()
            case Enter():
                return self.enter()
            case Wait(seconds):
                self.waits.append(seconds)
                self.now += seconds
            case Again():
                return self.attempt()
        return None
