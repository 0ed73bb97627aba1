"""Plans on an event loop: what blocks works in threads, and whoever is cancelled leaves nothing open."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

from taptwice.core.plan import Begin, Command, Now, Plan, Sleep, Together, arun, run
from taptwice.drivers import system

Result = TypeVar("Result")

NOTICED = 0.1
"""Seconds of waiting for a thread that are taken off the waiting in line."""


class Threads:
    """Threads of our own for blocking drivers: the handlers may use up all of the framework's.

    To begin may be to wait for a connection, which only somebody who ends gives back: so whatever does not
    begin has threads of its own.
    """

    def __init__(self, number: int) -> None:
        self._beginning = ThreadPoolExecutor(number, thread_name_prefix="taptwice-begin")
        self._others = ThreadPoolExecutor(number, thread_name_prefix="taptwice")

    async def execute(self, executor: Any, command: Command[Result]) -> Result:
        """Carry one command out."""
        parts = command.commands if isinstance(command, Together) else (command,)
        if not any(isinstance(part, Begin) for part in parts):
            return await _in(self._others, executor.execute, command)
        asked = system.now()

        def begin() -> Any:
            late = system.now() - asked
            return executor.execute(command if late < NOTICED else _sooner(command, late))

        begun: Result = await _in(self._beginning, begin)
        return begun

    async def finish(self, executor: Any, plan: Plan[Result]) -> Result:
        """Drive a whole plan that takes no connection."""
        return await _in(self._others, run, plan, executor.execute)


def _sooner(command: Command[Any], seconds: float) -> Command[Any]:
    """The same, waiting in line for so much less: the time that it has waited for a thread."""
    if isinstance(command, Together):
        return Together(tuple(_sooner(each, seconds) for each in command.commands))
    if isinstance(command, Begin):
        return replace(command, in_line=max(0.0, command.in_line - seconds))
    return command


async def _in(pool: ThreadPoolExecutor, call: Callable[..., Result], *arguments: Any) -> Result:
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(pool, lambda: context.run(call, *arguments))


class Driven:
    """An executor on an event loop; one that blocks works in threads.

    A thread cannot be cancelled. What was asked for is carried out, in order, whoever still awaits it:
    two threads on one connection, or one on a connection that was given back, would work in a transaction
    that is not theirs.
    """

    def __init__(self, executor: Any, blocking: bool, threads: Threads) -> None:
        self.executor = executor
        self._blocking = blocking
        self._threads = threads
        self._last: asyncio.Future[Any] | None = None

    async def execute(self, command: Command[Any]) -> Any:
        """Carry one command out."""
        if not self._blocking:
            return await self.executor.execute(command)
        if isinstance(command, Now):
            return system.now()
        if isinstance(command, Sleep):
            return await system.asleep(command.seconds)
        return await self.call(self._threads.execute, self.executor, command)

    async def finish(self, plan: Plan[Result]) -> Result:
        """Drive a plan that takes no connection; whoever cancels this does not interrupt it."""
        if self._blocking:
            return await to_its_end(self.call(self._threads.finish, self.executor, plan))
        return await to_its_end(arun(plan, self.executor.execute))

    async def drive(self, plan: Plan[Result]) -> Result:
        """Drive a plan. Cancelled, it gives back what it took before this returns.

        A command that is cancelled ends there and then. What the plan does about it runs in a task of its
        own: some cancel again and again, and would interrupt that too.
        """
        execute = self.execute if self._blocking else self.executor.execute

        async def cancelled(error: BaseException) -> Result:
            if self._blocking:
                self.executor.give_up()
            return await to_its_end(arun(plan, execute, thrown=error))

        return await arun(plan, execute, cancelled=cancelled)

    async def call(self, work: Callable[..., Awaitable[Result]], *arguments: Any) -> Result:
        """Await what works on the connection, in its turn."""
        mine = self._last = asyncio.ensure_future(_after(self._last, work, *arguments))
        return await asyncio.shield(mine)


async def _after(
    last: asyncio.Future[Any] | None, work: Callable[..., Awaitable[Result]], *arguments: Any
) -> Result:
    if last is not None:
        await asyncio.wait([last])
        _ = last.cancelled() or last.exception()  # seen, if nobody awaits it any more
    return await work(*arguments)


async def to_its_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Await it in a task of its own, and when cancelled, however often, go on only when it has ended.

    Behind a request that is cancelled its dependencies close the session, on which this may be working: the
    work would be rolled back and its answer committed.
    """
    working = asyncio.get_running_loop().create_task(work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        with _shielded():
            while not working.done():
                try:
                    await asyncio.wait([working])
                except asyncio.CancelledError:
                    continue
        _ = working.cancelled() or working.exception()
        raise


def _shielded() -> AbstractContextManager[Any]:
    """Keeps off the scopes of anyio, which cancel anew at each turn of a loop that would never rest."""
    anyio = sys.modules.get("anyio")
    return nullcontext() if anyio is None else anyio.CancelScope(shield=True)
