"""How one library executes a command: one module a driver, no decisions.

    executor = await-or-not what carries commands out on one connection
    Source   = where connections come from, for transactions of our own

`join` finds the executor for a connection of the caller; `source` finds it for a pool, an engine, a
session maker or a function that opens a connection. The library is found by the type's module, so
that nothing is imported that the program did not import itself.

Errors of *our* statements are raised as ours (`StoreUnavailable`, `Contention`, `ConstraintViolated`,
`Misuse`), ``from`` the driver's. A commit raises the driver's own error when the user's work is at fault.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

from taptwice.core.plan import Command
from taptwice.errors import Misuse
from taptwice.sql import Dialect

Reply = TypeVar("Reply")


@runtime_checkable
class Executor(Protocol):
    """Carries commands out on one connection, blocking."""

    dialect: Dialect

    def execute(self, command: Command[Reply], /) -> Reply: ...

    @property
    def handle(self) -> Any:
        """What the user's code works on: the connection or session of the claim."""


@runtime_checkable
class AsyncExecutor(Protocol):
    """Carries commands out on one connection, awaiting."""

    dialect: Dialect

    async def execute(self, command: Command[Reply], /) -> Reply: ...

    @property
    def handle(self) -> Any:
        """What the user's code works on: the connection or session of the claim."""


@runtime_checkable
class Source(Protocol):
    """Where connections come from. `open` gives a fresh executor; it takes its connection at `Begin`."""

    dialect: Dialect
    blocking: bool
    """True: its executors block, and belong in a thread when the caller is asynchronous."""

    def open(self) -> Any: ...


# The first part of a type's module -> our module for it.
_MODULES = {
    "sqlite3": "sqlite",
    "aiosqlite": "aiosqlite",
    "psycopg": "psycopg",
    "psycopg_pool": "psycopg",
    "asyncpg": "asyncpg",
    "sqlalchemy": "sqlalchemy",
}


def _module(thing: Any) -> Any | None:
    for kind in type(thing).__mro__:
        name = _MODULES.get(kind.__module__.partition(".")[0])
        if name:
            return importlib.import_module(f"taptwice.drivers.{name}")
    return None


def join(connection: Any) -> Any:
    """The executor (blocking or awaiting) for a connection or session of the caller."""
    module = _module(connection)
    if module is None and isinstance(connection, Executor | AsyncExecutor):
        return connection
    executor = None if module is None else module.join(connection)
    if executor is None:
        raise Misuse(
            f"cannot claim on {type(connection).__module__}.{type(connection).__qualname__}: give a connection of "
            "sqlite3, aiosqlite, psycopg or asyncpg, or a Connection or Session of SQLAlchemy"
        )
    return executor


def source(origin: Any) -> Source:
    """The source for a pool, engine, session maker, or a function that opens a connection."""
    module = _module(origin)
    if module is None and isinstance(origin, Source):
        return origin
    found: Source | None = None if module is None else module.source(origin)
    if found is not None:
        return found
    if callable(origin):
        return _Lazy(origin)
    raise Misuse(
        f"cannot take connections from {type(origin).__module__}.{type(origin).__qualname__}: give an engine or "
        "session maker of SQLAlchemy, a pool of psycopg or asyncpg, or a function that opens a connection"
    )
