"""Every order of the commands of several workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from taptwice.core.plan import Begin, Command, Join, Now, Plan, Query, Result, Sleep, Together
from taptwice.errors import Busy
from taptwice.faults.commands import Crash


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
    if isinstance(command, Begin):
        return Begin()
    if isinstance(command, Join):
        return Join()
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
