"""Plans: logic that touches the outside, written once, as generators of commands.

A plan yields *commands* (frozen values) and receives *replies*. It does no I/O, reads no clock and
knows neither thread nor event loop. `run` and `arun` drive it on anything that carries commands out.
An error raised by the executor is thrown into the plan at its ``yield``, so that ``try`` and
``finally`` mean what they always mean.

A plan is called with ``yield from``. A forgotten one is the classic bug: pyright's
``reportUnusedCallResult`` finds it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

Reply = TypeVar("Reply")
Result = TypeVar("Result")

Row: TypeAlias = tuple[Any, ...]
Rows: TypeAlias = tuple[Row, ...]
Value: TypeAlias = str | int | float | bytes | None


class Command(Generic[Reply]):
    """Something to be done outside; `Reply` is the type of what comes back."""

    __slots__ = ()


Plan: TypeAlias = Generator[Command[Any], Any, Result]


def ask(command: Command[Reply]) -> Plan[Reply]:
    """Yield one command and give back its reply, typed."""
    reply: Reply = yield command
    return reply


@dataclass(frozen=True, slots=True)
class Query(Command[Rows]):
    """Run a named statement of `taptwice.sql`; the reply is its rows."""

    statement: str
    parameters: tuple[tuple[str, Value], ...] = ()


@dataclass(frozen=True, slots=True)
class Script(Command[None]):
    """Run one statement that has no name and no parameters: a step of a migration."""

    text: str


@dataclass(frozen=True, slots=True)
class Begin(Command[None]):
    """Take a connection and begin a transaction on it that is ready to write.

    `wait` is how many seconds a database with a single writer may wait for its turn. `in_line` is the same
    for drivers that have those of this process stand in line; the others do not wait for it.
    """

    wait: float = 0.0
    in_line: float = 0.0


@dataclass(frozen=True, slots=True)
class Join(Command[None]):
    """Check that the caller's connection is inside a transaction that a claim can join.

    `wait` as for `Begin`.
    """

    wait: float = 0.0


@dataclass(frozen=True, slots=True)
class Savepoint(Command[None]):
    """Mark the place to which `Undo` goes back."""


@dataclass(frozen=True, slots=True)
class Flush(Command[None]):
    """Send what an ORM still holds back, so that its errors come up where the handler's would."""


@dataclass(frozen=True, slots=True)
class Undo(Command[None]):
    """Undo the work since the savepoint; the transaction goes on.

    Raises `Inseparable` where the handler gave the savepoint up.
    """


@dataclass(frozen=True, slots=True)
class Release(Command[None]):
    """Keep the work since the savepoint. Raises `Torn` where a missing savepoint is how that is noticed."""


@dataclass(frozen=True, slots=True)
class Commit(Command[None]):
    """Commit the transaction that `Begin` began."""


@dataclass(frozen=True, slots=True)
class Rollback(Command[bool]):
    """Roll the transaction back, whatever state it is in. Never fails.

    The reply: whether there was one to roll back, as far as the driver knows. Under a claim that is False
    where the handler has ended the transaction by itself.
    """


@dataclass(frozen=True, slots=True)
class Close(Command[None]):
    """Give the connection back. Never fails; a connection in an unknown state is thrown away."""


@dataclass(frozen=True, slots=True)
class Together(Command[tuple[Any, ...]]):
    """Several commands, in order, which an executor may send in one round trip.

    The reply is theirs, in order. When one fails, those behind it have had no effect.
    """

    commands: tuple[Command[Any], ...]


@dataclass(frozen=True, slots=True)
class Now(Command[float]):
    """A monotonic clock, in seconds."""


@dataclass(frozen=True, slots=True)
class Sleep(Command[None]):
    """Wait for a random time between half of `seconds` and all of it."""

    seconds: float


def run(plan: Plan[Result], execute: Callable[[Command[Any]], Any]) -> Result:
    """Drive a plan to its end, blocking."""
    try:
        command = next(plan)
        while True:
            try:
                reply = execute(command)
            except BaseException as error:
                command = plan.throw(error)
            else:
                command = plan.send(reply)
    except StopIteration as stop:
        result: Result = stop.value
        return result


async def arun(
    plan: Plan[Result],
    execute: Callable[[Command[Any]], Awaitable[Any]],
    thrown: BaseException | None = None,
    cancelled: Callable[[BaseException], Awaitable[Result]] | None = None,
) -> Result:
    """Drive a plan to its end, awaiting.

    `cancelled` takes the plan over when what drives it here is cancelled at a command, and goes on with
    `thrown`: the error that this command ended with.
    """
    try:
        command = next(plan) if thrown is None else plan.throw(thrown)
        while True:
            try:
                reply = await execute(command)
            except BaseException as error:
                if cancelled is not None and not isinstance(error, Exception):
                    return await cancelled(error)
                command = plan.throw(error)
            else:
                command = plan.send(reply)
    except StopIteration as stop:
        result: Result = stop.value
        return result
