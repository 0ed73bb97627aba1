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
import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

from taptwice.core.plan import Command
from taptwice.errors import Misuse, StoreUnavailable
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


# The module of a library's type -> our module for it.
_MODULES = {
    "sqlite3": "sqlite",
    "aiosqlite": "aiosqlite",
    "psycopg": "psycopg",
    "psycopg_pool": "psycopg",
    "asyncpg": "asyncpg",
    "sqlalchemy": "sqlalchemy",
    "sqlalchemy.ext.asyncio": "sqlalchemy_async",
}


def _module(thing: Any) -> Any | None:
    for kind in type(thing).__mro__:
        parts = kind.__module__.split(".")
        name = _MODULES.get(".".join(parts[:3])) or _MODULES.get(parts[0])
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
            f"cannot claim on {_kind(connection)}: give a connection of sqlite3, aiosqlite, psycopg or "
            "asyncpg, or a Connection or Session of SQLAlchemy"
        )
    return executor


def source(origin: Any) -> Source:
    """The source for a pool, engine or session maker, or for a function.

    A function is called once, here, to see what it is: it returns one of those, or opens a connection.
    """
    module = _module(origin)
    if module is None and isinstance(origin, Source):
        return origin
    found: Source | None = None if module is None else module.source(origin)
    if module is None and callable(origin):
        found = _source_of_function(origin)
    if found is not None:
        return found
    raise Misuse(
        f"cannot take connections from {_kind(origin)}: give an engine or session maker of SQLAlchemy, a "
        "pool of psycopg or asyncpg, or a function that opens a connection"
    )


def _source_of_function(function: Callable[[], Any]) -> Source:
    try:
        made = function()
    except Exception as error:
        # PEP 249 gives the name; which library it is is not known yet.
        if type(error).__name__ == "OperationalError" or isinstance(error, OSError):
            raise StoreUnavailable(f"no connection to the database: {error}") from error
        raise
    if inspect.iscoroutine(made):
        made.close()
        raise Misuse(
            "an `async def` does not show what it opens: give a pool, or "
            "taptwice.drivers.asyncpg.connecting(function), or that of psycopg or aiosqlite"
        )
    module = _module(made)
    if module is None or module.join(made) is None:
        return source(made)
    if not inspect.isawaitable(made):  # a connection of aiosqlite is not open before it is awaited
        made.close()
    found: Source = module.connecting(function)
    return found


def _kind(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
