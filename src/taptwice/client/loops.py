"""On which loop the caller's code runs, asyncio's or trio's, and what differs there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

__all__ = ["asleep", "in_thread", "on_asyncio"]

Result = TypeVar("Result")


def on_asyncio() -> bool:
    """Whether it is asyncio's. Asked where something awaits; what else awaits there is on trio."""
    try:
        _ = asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def asleep(seconds: float) -> None:
    """Sleep for so many seconds."""
    if on_asyncio():
        return await asyncio.sleep(seconds)
    from trio import sleep

    return await sleep(seconds)


async def in_thread(work: Callable[[], Result]) -> Result:
    """Call it in a thread, which brings it to its end, whether the caller is cancelled or not."""
    if on_asyncio():
        return await asyncio.to_thread(work)
    from trio.to_thread import run_sync

    return await run_sync(work)
