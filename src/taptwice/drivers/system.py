"""The only real clock, sleep and chance. Everything else asks for them by a command."""

from __future__ import annotations

import asyncio
import random
import time

now = time.monotonic
wall_clock = time.time


def jittered(seconds: float) -> float:
    """Between half of `seconds` and all of it, so that waiters do not wake in step."""
    return seconds * random.uniform(0.5, 1.0)


def sleep(seconds: float) -> None:
    time.sleep(jittered(seconds))


async def asleep(seconds: float) -> None:
    await asyncio.sleep(jittered(seconds))
