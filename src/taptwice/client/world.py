"""Where a client's time and chance come from: one object, so that a test can hand in another."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable

from taptwice.client.loops import asleep


def _draw() -> float:
    return 1.0 - random.random()


class World:
    """A clock (monotonic seconds), two ways to sleep, and chance (evenly from (0, 1])."""

    __slots__ = ("asleep", "clock", "draw", "sleep")

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        asleep: Callable[[float], Awaitable[None]] = asleep,
        draw: Callable[[], float] = _draw,
    ) -> None:
        self.clock = clock
        self.sleep = sleep
        self.asleep = asleep
        self.draw = draw


REAL = World()
"""The world of every client that was given no other."""
