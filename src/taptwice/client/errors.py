"""What the client raises beside its library's own exceptions.

    TaptwiceError
    ├── DeadlineExceeded      the deadline cut the last attempt; also a timeout of the library's
    ├── KeyReused             422: the server knows the key from another request
    └── KeyRejected           400: the server cannot use the key, or demands one

Where an attempt fails by itself the library's exception is raised as it is. All of them, ours and theirs,
carry what `report` gives: `.attempts`, `.stop_reason`, `.outcome`, `.idempotency_key`, `.retry_after`.
`taptwice.errors.CircuitOpen` comes from the circuit breaker; nothing was sent then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from taptwice.errors import TaptwiceError

__all__ = ["DeadlineExceeded", "KeyRejected", "KeyReused"]


class DeadlineExceeded(TaptwiceError):
    """The call's deadline passed while an attempt was under way; `outcome` says what is known of it."""


class _KeyRefused(TaptwiceError):
    def __init__(self, detail: str | None = None, response: Any = None) -> None:
        super().__init__(detail)
        self.response = response
        """The library's response."""


class KeyReused(_KeyRefused):
    """The server knows this idempotency key from a different request; it did nothing now."""


class KeyRejected(_KeyRefused):
    """The server cannot accept the request's idempotency key, or demands one; it did nothing."""


def missing(name: str, extra: str) -> ModuleNotFoundError:
    """What to raise where an optional library is wanted that is not there."""
    line = f"this needs {name}, which is not installed: pip install 'taptwice[{extra}]'"
    return ModuleNotFoundError(line, name=name)


@cache
def kin(ours: type[TaptwiceError], theirs: type[Exception]) -> Callable[..., TaptwiceError]:
    """A class that is caught as `ours` and as `theirs`: a transport raises nothing its library knows not."""

    def __init__(self: Any, *details: Any, **more: Any) -> None:
        ours.__init__(self, *details)
        for name, value in more.items():
            setattr(self, name, value)

    return type(ours.__name__, (ours, theirs), {"__init__": __init__, "__module__": ours.__module__})
