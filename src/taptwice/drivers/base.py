"""What all executors share: from a command to the method that carries it out."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from taptwice.core import plan
from taptwice.core.plan import Command, Together
from taptwice.drivers import system

Reply = TypeVar("Reply")

logger = logging.getLogger("taptwice.drivers")

SAVEPOINT = "taptwice"
"""The name of the savepoint of a claim, on every database."""

USED_OUTSIDE = "the claim's connection is used outside its transaction"
GIVEN_BACK = "the connection of this claim was given back"

METHODS: dict[type, str] = {
    plan.Query: "query",
    plan.Script: "script",
    plan.Together: "together",
    plan.Begin: "begin",
    plan.Join: "join",
    plan.Savepoint: "savepoint",
    plan.Flush: "flush",
    plan.Undo: "undo",
    plan.Release: "release",
    plan.Commit: "commit",
    plan.Rollback: "rollback",
    plan.Close: "close",
    plan.Now: "now",
    plan.Sleep: "sleep",
}


class Blocking:
    """Executor that blocks. A subclass has a method for each command of `METHODS`."""

    holds_back = False
    """Whether work may not have been sent yet, as an ORM's: `Flush` sends it."""

    def execute(self, command: Command[Reply], /) -> Reply:
        reply: Reply = getattr(self, METHODS[type(command)])(command)
        return reply

    def together(self, command: Together) -> tuple[Any, ...]:
        return tuple([getattr(self, METHODS[type(each)])(each) for each in command.commands])

    def give_up(self) -> None:
        """Told from another thread that nobody wants the transaction any more: it need not wait for it."""

    def flush(self, command: plan.Flush) -> None:
        """Only an ORM holds anything back."""

    def now(self, command: plan.Now) -> float:
        return system.now()

    def sleep(self, command: plan.Sleep) -> None:
        system.sleep(command.seconds)


class Awaiting:
    """Executor that awaits. A subclass has a coroutine method for each command of `METHODS`.

    Whoever cancels a command gets his CancelledError, and the executor stays usable: what was under way
    is undone by `Rollback`, and a connection in an unknown state is closed there. `Close` goes on to its
    end even if it is cancelled itself.
    """

    holds_back = False
    """As `Blocking.holds_back`."""

    async def execute(self, command: Command[Reply], /) -> Reply:
        reply: Reply = await getattr(self, METHODS[type(command)])(command)
        return reply

    async def together(self, command: Together) -> tuple[Any, ...]:
        return tuple([await getattr(self, METHODS[type(each)])(each) for each in command.commands])

    async def flush(self, command: plan.Flush) -> None:
        """Only an ORM holds anything back."""

    async def now(self, command: plan.Now) -> float:
        return system.now()

    async def sleep(self, command: plan.Sleep) -> None:
        await system.asleep(command.seconds)
