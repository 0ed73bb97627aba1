"""A fault at every command that is sent through a target."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Any, Generic, TypeVar

from taptwice import drivers
from taptwice.core.plan import (
    Close,
    Command,
    Commit,
    Now,
    Plan,
    Result,
    Rollback,
    Sleep,
    Together,
    arun,
    run,
)
from taptwice.errors import CommitUnknown, Misuse, StoreUnavailable
from taptwice.sql import Dialect


class Crash(BaseException):
    """The process died here. No ``except Exception`` survives it, and no later command is carried out."""


class Kind(Enum):
    """What goes wrong at a command."""

    BEFORE = "crash before"
    AFTER = "crash after"
    LOST = "reply lost"
    """The command is carried out, then the connection breaks: `StoreUnavailable`, or `CommitUnknown`."""
    REFUSED = "connection broken before"
    """The connection breaks and the command is not carried out: `StoreUnavailable`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault, and the number of the command that meets it, from 1."""

    kind: Kind
    command: int

    def __str__(self) -> str:
        return f"{self.kind.value} command {self.command}"


@dataclass(slots=True)
class Fate:
    """What one attempt is to suffer, and what it has done so far; shared by all of its executors."""

    fault: Fault | None
    apart: bool = True
    commands: list[Command[Any]] = field(default_factory=list)
    """The commands seen so far, the struck one included; not `Now` and `Sleep`, which cannot fail."""
    struck: bool = False
    dead: bool = False
    lent: list[Any] = field(default_factory=list)
    """The executors whose connections are closed when the process dies."""

    def meet(self, command: Command[Any]) -> Kind | None:
        """Count a command; the kind of fault that it meets, if it is its turn."""
        self.commands.append(command)
        if self.fault is None or self.struck or len(self.commands) != self.fault.command:
            return None
        harmless = self.fault.kind in (Kind.LOST, Kind.REFUSED) and isinstance(command, Rollback | Close)
        self.struck = not harmless  # those two never fail, whatever the connection
        return None if harmless else self.fault.kind

    def orphans(self) -> list[Any]:
        orphans, self.lent = self.lent, []
        return orphans


class _Faulty:
    """An executor under a fate. What a command becomes is a plan on the executor beneath."""

    def __init__(self, inner: Any, fate: Fate) -> None:
        self.dialect: Dialect = inner.dialect
        self.fate = fate
        self._inner = inner
        self._broken = False

    @property
    def handle(self) -> Any:
        if self.fate.dead:
            raise Crash
        return self._inner.handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # what SQLAlchemy's sessions join by

    def _suffer(self, command: Command[Any]) -> Plan[Any]:
        if self.fate.dead:
            raise Crash
        if isinstance(command, Together) and self.fate.apart:
            replies = []
            for each in command.commands:
                replies.append((yield from self._suffer(each)))
            return tuple(replies)
        if isinstance(command, Now | Sleep):
            return (yield command)
        if self._broken and not isinstance(command, Rollback | Close):
            raise StoreUnavailable("the connection is lost")
        kind = self.fate.meet(command)
        if kind is Kind.BEFORE:
            self._die()
        if kind is Kind.REFUSED:
            self._broken = True
            raise StoreUnavailable("the connection broke (injected)")
        reply = None
        try:
            reply = yield command
        except Exception:
            if kind is None:
                raise
        if isinstance(command, Close):
            self._broken = False
        if kind is Kind.AFTER:
            self._die()
        if kind is Kind.LOST:
            self._broken = True
            parts = command.commands if isinstance(command, Together) else (command,)
            commits = any(isinstance(part, Commit) for part in parts)
            raise (CommitUnknown if commits else StoreUnavailable)("the connection broke (injected)")
        return reply

    def _die(self) -> None:
        self.fate.dead = True
        raise Crash


class FaultyExecutor(_Faulty):
    """Blocking."""

    def execute(self, command: Command[Any], /) -> Any:
        try:
            return run(self._suffer(command), self._inner.execute)
        except Crash:
            for orphan in self.fate.orphans():
                orphan.execute(Rollback())
                orphan.execute(Close())
            raise


class AsyncFaultyExecutor(_Faulty):
    """Awaiting."""

    async def execute(self, command: Command[Any], /) -> Any:
        try:
            return await arun(self._suffer(command), self._inner.execute)
        except Crash:
            for orphan in self.fate.orphans():
                await orphan.execute(Rollback())
                await orphan.execute(Close())
            raise


class FaultySource:
    """A source all of whose executors share one fate, as those of one process do."""

    def __init__(self, inner: Any, fate: Fate) -> None:
        self.dialect: Dialect = inner.dialect
        self.fate = fate
        self._inner = inner

    @property
    def blocking(self) -> bool:
        return bool(self._inner.blocking)

    def open(self) -> FaultyExecutor | AsyncFaultyExecutor:
        executor = self._inner.open()
        self.fate.lent.append(executor)
        return _executor(executor, self.fate)


def _executor(inner: Any, fate: Fate) -> FaultyExecutor | AsyncFaultyExecutor:
    awaits = inspect.iscoroutinefunction(inner.execute)
    return (AsyncFaultyExecutor if awaits else FaultyExecutor)(inner, fate)


def _faulty(target: Any, fate: Fate) -> Any:
    if isinstance(target, drivers.Source):
        return FaultySource(target, fate)
    try:
        return _executor(drivers.join(target), fate)
    except Misuse:
        return FaultySource(drivers.source(target), fate)


def crash_at(command: int, target: Any, kind: Kind = Kind.BEFORE, *, apart: bool = True) -> Any:
    """`target` with a fault at a command, counted from 1; give it to the claim instead of `target`.

    `target`: a connection, or whatever a source of connections is made of. ``.fate`` of what comes back
    tells what was seen: ``fate.commands``, ``fate.struck``. `apart` False counts a `Together` as one.

    At a crash the connections of a source are closed, as those of a dead process are. A connection of
    your own is left to you: end its transaction as the exception unwinds.
    """
    return _faulty(target, Fate(Fault(kind, command), apart))


Faulty = Callable[[Any], Any]
"""Wraps a target in the faults of an attempt."""

Attempt = TypeVar("Attempt", bound=Callable[[Faulty], Any])


@dataclass(frozen=True, slots=True)
class Trial(Generic[Attempt]):
    """One schedule that was run: an attempt for each fault, on the world that `start` made for it."""

    attempt: Attempt
    faults: tuple[Fault, ...]
    outcomes: tuple[Any, ...]
    """Of each attempt: what it returned, or the `Crash` or other exception that ended it."""

    def retry(self) -> Any:
        """Attempt once more, without a fault."""
        return self.attempt(lambda target: target)

    def __str__(self) -> str:
        return ", then ".join(map(str, self.faults))


def driving(plan: Callable[[], Plan[Result]], target: Any) -> Callable[[Faulty], Result]:
    """The attempt that drives a plan, for `every`. `target` is blocking."""

    def attempt(faulty: Faulty) -> Result:
        return run(plan(), faulty(drivers.source(target)).open().execute)

    return attempt


def every(
    start: Callable[[], Attempt],
    in_a_row: int = 1,
    kinds: Sequence[Kind] = tuple(Kind),
    *,
    apart: bool = True,
) -> Iterator[Trial[Attempt]]:
    """Run every schedule of up to `in_a_row` attempts that each meet one fault, and yield it to be checked.

    `start` makes a new world (a new database, or a new key in the old one) and returns its attempt: a
    callable that is given `faulty`, wraps its target with it, and does what a client's request does.
    """
    return _every(start, (), in_a_row, kinds, apart)


def _every(
    start: Callable[[], Attempt], before: tuple[Fault, ...], in_a_row: int, kinds: Sequence[Kind], apart: bool
) -> Iterator[Trial[Attempt]]:
    for command in count(1):
        reached = False
        for kind in kinds:
            faults = (*before, Fault(kind, command))
            attempt, outcomes, fate = start(), [], Fate(None)
            for fault in faults:
                fate = Fate(fault, apart)
                outcomes.append(_outcome(attempt, fate))
            reached = reached or len(fate.commands) >= command
            if fate.struck:
                yield Trial(attempt, faults, tuple(outcomes))
                if len(faults) < in_a_row:
                    yield from _every(start, faults, in_a_row, kinds, apart)
        if not reached:
            return


def _outcome(attempt: Callable[[Faulty], Any], fate: Fate) -> Any:
    try:
        return attempt(lambda target: _faulty(target, fate))
    except (Exception, Crash) as error:
        return error
