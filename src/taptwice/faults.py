"""Faults at every command: how to prove that a retry is safe, for our plans and for functions of yours.

    crash_at(n, target)    the process dies at the n-th command that is sent through `target`
    every(start)           loops: each kind of fault at each command, once or several times in a row
    interleavings(start)   loops: the commands of several workers, in each order

A *target* is what a claim is given: a connection, a pool, an engine, an executor. All counting is done at
the executor, so that these work on functions as well as on plans:

    def start():
        database = new_database()
        return lambda faulty: pay(faulty(database.pool), key="k-1")     # one attempt

    for trial in every(start, in_a_row=2):
        answer = trial.retry()                                          # no fault this time
        assert charges(...) == 1, trial

A function that awaits is called through ``asyncio.run`` in that lambda. Only commands are seen (the
claim, the savepoint, the answer, the commit), not the statements of your own; a crash between two of
yours leaves the same database as a crash before our next command. Whoever wants finer places yields or
executes commands of his own.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count
from typing import Any, Generic, Protocol, TypeVar

from taptwice import drivers
from taptwice.core.plan import (
    Begin,
    Close,
    Command,
    Commit,
    Join,
    Now,
    Plan,
    Query,
    Result,
    Rollback,
    Sleep,
    Together,
    arun,
    run,
)
from taptwice.errors import Busy, CommitUnknown, Misuse, StoreUnavailable
from taptwice.sql import Dialect

__all__ = [
    "Crash",
    "Fault",
    "Interleaving",
    "Kind",
    "Trial",
    "crash_at",
    "driving",
    "every",
    "interleavings",
    "point",
]


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


# --- named points -----------------------------------------------------------------------------------------


watching: Callable[[str], Awaitable[None]] | None = None
"""Called at every `point` of the process, with its name; None, as in production: nobody watches."""


async def point(name: str) -> None:
    """A named place in a handler, where a test may stop it, make it fail or kill its process.

        await point("between_effects")

    It does nothing unless somebody set `taptwice.faults.watching`. On a blocking driver whoever watches
    blocks, and this never suspends.
    """
    if watching is not None:
        await watching(name)


# --- interleavings ----------------------------------------------------------------------------------------


class Workers(Protocol):
    """A world with workers in it: plans, each with the blocking executor that carries its commands out."""

    @property
    def workers(self) -> Sequence[tuple[Plan[Any], Any]]: ...


World = TypeVar("World", bound=Workers)


@dataclass(frozen=True, slots=True)
class Interleaving(Generic[World]):
    """One order that was run. `order`: whose turn it was at each step; `outcomes`: as in `Trial`."""

    world: World
    order: tuple[int, ...]
    outcomes: tuple[Any, ...]

    def __str__(self) -> str:
        return "".join(map(str, self.order))


def interleavings(start: Callable[[], World], cuts: int | None = 2) -> Iterator[Interleaving[World]]:
    """Run every order of the workers' commands with at most `cuts` interruptions of one that could go on.

    None: every order whatever. A `Together` is taken apart. Nobody really waits: time is virtual, a
    worker that sleeps or waits for a lock lets the others go on, and gives up when nobody can.
    """
    todo: list[tuple[int, ...]] = [()]
    while todo:
        prefix = todo.pop()
        world = start()
        game = _Game(world.workers)
        game.play(prefix)
        yield Interleaving(world, tuple(game.order), tuple(player.outcome for player in game.players))
        for step in range(len(prefix), len(game.order)):
            for other in game.options[step]:
                branch = (*game.order[:step], other)
                if other != game.order[step] and (cuts is None or game.cuts(branch) <= cuts):
                    todo.append(branch)


@dataclass(slots=True)
class _Player:
    plan: Plan[Any]
    execute: Callable[[Command[Any]], Any]
    command: Command[Any] | None = None
    waits: bool = False
    outcome: Any = None


class _Game:
    """A run of several plans, in which one of them is carried on by one command at each step."""

    def __init__(self, workers: Sequence[tuple[Plan[Any], Any]]) -> None:
        self.clock = 0.0
        self.order: list[int] = []
        self.options: list[tuple[int, ...]] = []
        self.players = [_Player(_apart(plan), executor.execute) for plan, executor in workers]

    def play(self, prefix: Sequence[int]) -> None:
        for player in self.players:
            self._resume(player, lambda plan: next(plan))
        while alive := [index for index, player in enumerate(self.players) if player.command is not None]:
            ready = [index for index in alive if not self.players[index].waits]
            options = ready or alive
            step = len(self.order)
            last = self.order[-1] if self.order else 0
            chosen = prefix[step] if step < len(prefix) else last if last in options else options[0]
            self.order.append(chosen)
            self.options.append(tuple(options))
            self._step(self.players[chosen], patient=len(alive) > 1 and bool(ready))

    def cuts(self, order: Sequence[int]) -> int:
        """How often somebody was interrupted who could have gone on."""
        return sum(
            order[step] != order[step - 1] and order[step - 1] in self.options[step]
            for step in range(1, len(order))
        )

    def _step(self, player: _Player, patient: bool) -> None:
        command = player.command
        assert command is not None  # noqa: S101
        at_once = _at_once(command)
        refused = False
        try:
            reply = player.execute(at_once)
            refused = at_once != command and isinstance(command, Query) and not reply[0][0]
        except Busy as error:
            if at_once != command or isinstance(command, Query):
                refused = True
            if not (refused and patient):
                self._throw(player, error)
        except BaseException as error:
            self._throw(player, error)
        else:
            if not (refused and patient):
                self._resume(player, lambda plan: plan.send(reply))
        for other in self.players:
            other.waits = other.waits and other is player
        player.waits = player.waits or (refused and patient)

    def _throw(self, player: _Player, error: BaseException) -> None:
        self._resume(player, lambda plan: plan.throw(error))

    def _resume(self, player: _Player, onward: Callable[[Plan[Any]], Command[Any]]) -> None:
        """On to the next command; those of the clock are answered here."""
        player.waits = False
        try:
            command = onward(player.plan)
            while isinstance(command, Now | Sleep):
                if isinstance(command, Sleep):
                    self.clock += command.seconds
                    player.waits = True
                    command = player.plan.send(None)
                else:
                    command = player.plan.send(self.clock)
            player.command = command
        except StopIteration as stop:
            player.command, player.outcome = None, stop.value
        except (Exception, Crash) as error:
            player.command, player.outcome = None, error


def _at_once(command: Command[Any]) -> Command[Any]:
    """The same command without waiting."""
    if isinstance(command, Begin | Join) and command.wait:
        return replace(command, wait=0.0)
    if isinstance(command, Query) and dict(command.parameters).get("wait_ms"):
        return Query(command.statement, tuple({**dict(command.parameters), "wait_ms": 0}.items()))
    return command


def _apart(plan: Plan[Result]) -> Plan[Result]:
    """The same plan with each `Together` as single commands."""
    onward: Callable[[], Command[Any]] = lambda: next(plan)  # noqa: E731
    try:
        while True:
            command = onward()
            try:
                if isinstance(command, Together):
                    replies = []
                    for each in command.commands:
                        replies.append((yield each))
                    reply: Any = tuple(replies)
                else:
                    reply = yield command
            except BaseException as error:
                onward = _throwing(plan, error)
            else:
                onward = _sending(plan, reply)
    except StopIteration as stop:
        result: Result = stop.value
        return result


def _sending(plan: Plan[Any], reply: Any) -> Callable[[], Command[Any]]:
    return lambda: plan.send(reply)


def _throwing(plan: Plan[Any], error: BaseException) -> Callable[[], Command[Any]]:
    return lambda: plan.throw(error)
