"""What every client, transport, adapter and `retry` is told, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taptwice.client.policy import RetryPolicy
from taptwice.client.world import World
from taptwice.errors import Misuse

__all__ = ["check", "check_maker"]


def check(policy: Any, listeners: Any, world: Any) -> None:
    """Raises `Misuse` for what is none of these; the types say so too, to whoever has them checked."""
    if not isinstance(policy, RetryPolicy):
        raise Misuse(f"policy={policy!r}: give a RetryPolicy, as RetryPolicy(deadline=30)")
    if not isinstance(listeners, Sequence) or isinstance(listeners, str):
        name = getattr(listeners, "__name__", "function")
        raise Misuse(f"listeners={listeners!r}: give a list of functions, as listeners=[{name}]")
    for each in listeners:
        if not callable(each):
            raise Misuse(f"listeners=[{each!r}]: a listener is called with each event, so give functions")
    if not isinstance(world, World):
        raise Misuse(f"world={world!r}: give a World, as World(clock=…)")


def check_maker(name: str, make: Any) -> None:
    """A budget or a breaker is made for each origin, so what is wanted is what makes one."""
    if make is not None and not callable(make):
        kind = type(make).__name__
        raise Misuse(
            f"{name}={kind}(…): one is made for each origin, so give the class or a function: {name}={kind};"
            f" one for all origins: {name}=lambda: shared; none: {name}=None"
        )
