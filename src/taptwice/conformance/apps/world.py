"""What the reference applications share, and what the suite changes while one of them runs.

It is no part of the example: callers and their permissions, how often a script has been played, the clock,
and counters of what happened.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from taptwice.events import Event


class Unknown(Exception):
    """Nobody has this token."""


class Withdrawn(Exception):
    """The caller may not do this any more."""


@dataclass(slots=True)
class World:
    """The surroundings of one application."""

    clock: Callable[[], float | None] = lambda: None
    """Seconds since 1970; None is the database's own clock."""
    withdrawn: set[str] = field(default_factory=set)
    executions: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)
    behaviour: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """As at the start."""
        for each in (self.withdrawn, self.executions, self.counted, self.behaviour):
            each.clear()

    def login(self, token: str) -> tuple[str, str]:
        """Account and user of a bearer token. Raises `Unknown` or `Withdrawn`."""
        account, _, user = token.removeprefix("acct_").removesuffix("_token2").partition("/")
        if token.startswith("tenant:"):
            account, user = token.removeprefix("tenant:"), ""
        elif not token.startswith("acct_"):
            raise Unknown
        if token in self.withdrawn:
            raise Withdrawn
        return account, user

    def count(self, event: Event) -> None:
        """The listener."""
        self.counted[event.outcome.value] += 1

    def metrics(self) -> str:
        """The counters as Prometheus reads them."""
        lines = [f'taptwice_claims_total{{outcome="{name}"}} {n}' for name, n in sorted(self.counted.items())]
        return "\n".join(["# TYPE taptwice_claims_total counter", *lines, ""])

    def executed(self, name: str) -> int:
        """How often something was executed, this time included.

        Counted here: an execution that is undone leaves nothing in the database.
        """
        self.executions[name] += 1
        return self.executions[name]

    def script(self, body: bytes, key: str | None) -> Script:
        """What a request to ``/script`` wants to happen, and how it is to be answered."""
        try:
            described = json.loads(body)
        except ValueError:
            described = {}
        wanted = described if isinstance(described, dict) else {}
        if "times" in wanted and self.executed(json.dumps([wanted, key], sort_keys=True)) > wanted["times"]:
            wanted = {**wanted, "raise": None, "raise_http": None, **wanted.get("then", {})}
        return Script({**wanted, **self.behaviour})


@dataclass(frozen=True, slots=True)
class Script:
    """One execution of ``/script``."""

    wanted: dict[str, Any]

    @property
    def effects(self) -> int:
        return int(self.wanted.get("effect", 1))

    @property
    def status(self) -> int:
        return int(self.wanted.get("status", 200))

    @property
    def refuses(self) -> int | None:
        """The status of the framework's HTTP exception that it raises."""
        return self.wanted.get("raise_http")

    @property
    def chunks(self) -> Iterator[bytes] | None:
        """The parts of an answer without a length."""
        return (part.encode() for part in self.wanted["chunks"]) if "chunks" in self.wanted else None

    @property
    def body(self) -> bytes:
        if "body_b64" in self.wanted:
            return base64.b64decode(self.wanted["body_b64"])
        if "body_size" in self.wanted:
            return b"x" * int(self.wanted["body_size"])
        body = self.wanted.get("body", "")
        return (body if isinstance(body, str) else json.dumps(body)).encode()

    @property
    def headers(self) -> list[tuple[str, str]]:
        lines = self.wanted.get("headers", ())
        return [
            (str(name), str(value)) for name, value in (lines.items() if isinstance(lines, dict) else lines)
        ]

    def fails_before(self) -> None:
        """Raise where it raises before it has done anything."""
        if self.wanted.get("raise") == "before_effect":
            raise RuntimeError("the script raises")

    def fails_after(self) -> None:
        """Raise where it raises after its effects."""
        if self.wanted.get("raise"):
            raise RuntimeError("the script raises")
