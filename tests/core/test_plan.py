"""The two runners: replies go in, errors are thrown in at their place, and both do the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from taptwice.core.plan import Close, Command, Now, Plan, Query, Rollback, Sleep, arun, ask, run

Runner = Callable[[Plan[Any], Callable[[Command[Any]], Any]], Any]


def awaiting(plan: Plan[Any], execute: Callable[[Command[Any]], Any]) -> Any:
    async def execute_awaiting(command: Command[Any]) -> Any:
        await asyncio.sleep(0)
        return execute(command)

    return asyncio.run(arun(plan, execute_awaiting))


both = pytest.mark.parametrize("drive", [run, awaiting])


@both
def test_replies_reach_their_command_and_the_result_comes_out(drive: Runner) -> None:
    def plan() -> Plan[str]:
        first = yield from ask(Now())
        rows = yield from ask(Query("look", (("id", b"x"),)))
        return f"{first} {rows}"

    replies = {Now: 1.5, Query: ((2,),)}
    assert drive(plan(), lambda command: replies[type(command)]) == "1.5 ((2,),)"


@both
def test_a_plan_without_commands(drive: Runner) -> None:
    def plan() -> Plan[int]:
        return 7
        yield

    assert drive(plan(), lambda command: pytest.fail("no command")) == 7


@both
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, asyncio.CancelledError])
def test_an_error_is_thrown_in_at_its_command_and_cleaned_up_after(
    drive: Runner, error: type[BaseException]
) -> None:
    carried_out: list[str] = []

    def plan() -> Plan[None]:
        try:
            yield from ask(Sleep(1))
        finally:
            yield from ask(Rollback())
            yield from ask(Close())

    def execute(command: Command[Any]) -> None:
        carried_out.append(type(command).__name__)
        if isinstance(command, Sleep):
            raise error

    with pytest.raises(error):
        drive(plan(), execute)
    assert carried_out == ["Sleep", "Rollback", "Close"]


@both
def test_a_plan_may_handle_an_error_and_go_on(drive: Runner) -> None:
    def plan() -> Plan[float]:
        try:
            yield from ask(Sleep(1))
        except ValueError:
            return (yield from ask(Now()))
        return 0.0

    def execute(command: Command[Any]) -> float:
        if isinstance(command, Sleep):
            raise ValueError
        return 3.0

    assert drive(plan(), execute) == 3.0


@both
def test_an_error_of_the_plan_itself_comes_out(drive: Runner) -> None:
    def plan() -> Plan[None]:
        yield from ask(Now())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        drive(plan(), lambda command: 0.0)


def test_commands_are_values() -> None:
    assert Query("look", (("id", b"x"),)) == Query("look", (("id", b"x"),))
    assert {Now(), Now(), Sleep(1.0)} == {Now(), Sleep(1.0)}
