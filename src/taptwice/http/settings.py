"""What every framework's `Idempotency` is told, and where its connections come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from taptwice import drivers
from taptwice.core.model import key_hash
from taptwice.core.policy import Policy
from taptwice.drivers import Source
from taptwice.events import Listener
from taptwice.stores.sql import SqlStore

PROBLEM_BASE = "https://taptwice.dev/problems/"


class Settings:
    """What all frameworks' `Idempotency` are told.

    `origin`: a pool, engine or session maker, or a function that returns one or opens a connection.
    `policy`: the defaults of its routes. `listeners` hear every `Event`. `in_clear` False keeps account
    and key out of the table. `show` puts them in the clear into events. `strict` makes a torn claim and
    stray work raise, after the answer is safe. `problems` is the URI in front of each problem's name.
    """

    bound: Source | None = None
    """What takes the place of `source`, in tests: see `taptwice.testing.bound_to`."""

    def __init__(
        self,
        origin: Any,
        *,
        policy: Policy | None = None,
        listeners: Iterable[Listener] = (),
        in_clear: bool = True,
        show: bool = False,
        strict: bool = False,
        problems: str = PROBLEM_BASE,
        clock: Callable[[], float | None] | None = None,
    ) -> None:
        self.origin = origin
        self._source: Source | None = None
        self.policy = policy or Policy()
        self.listeners = tuple(listeners)
        self.in_clear = in_clear
        self.show = show
        self.strict = strict
        self.problems = problems
        self.clock = clock
        if not callable(origin) or isinstance(origin, type):
            self._source = drivers.source(origin)  # a wrong origin fails where it is written

    @property
    def source(self) -> Source:
        """Where connections come from; a function as origin is called at the first request."""
        if self.bound is not None:
            return self.bound
        if self._source is None:
            self._source = drivers.source(self.origin)
        return self._source

    def store(self) -> SqlStore:
        return SqlStore(self.source.dialect, self.in_clear, None if self.clock is None else self.clock())

    def shown(self, value: str) -> str:
        """An account or a key as it may stand in events: hashed, unless told otherwise."""
        return value if self.show else key_hash(value)
