"""What a run needs beside taptwice itself, looked for before it begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec

from taptwice.conformance.clients.broken import door_of
from taptwice.errors import Misuse

_SERVING = {"starlette": "conformance", "uvicorn": "conformance"}
_OF_APPS = {
    "fastapi": {"fastapi": "conformance", "python_multipart": "conformance"},
    "starlette": {"starlette": "conformance", "python_multipart": "conformance"},
    "flask": {"flask": "flask"},
}
_PSYCOPG = {"psycopg": "postgres"}
_OF_STORES = {"postgresql": _PSYCOPG}
"""Whatever the application's driver: the runner itself reaches PostgreSQL through psycopg."""
_OF_DRIVERS = {
    "aiosqlite": {"aiosqlite": "conformance"},
    "psycopg": {**_PSYCOPG, "psycopg_pool": "postgres"},
    "psycopg-async": {**_PSYCOPG, "psycopg_pool": "postgres"},
    "asyncpg": {"asyncpg": "asyncpg"},
    "sqlalchemy": {"sqlalchemy": "sqlalchemy", **_PSYCOPG},
    "sqlalchemy-async": {"sqlalchemy": "sqlalchemy", **_PSYCOPG},
}
"""Each module that is imported, and the extra of taptwice that brings it."""


def check_server(app: str, store: str, driver: str) -> None:
    """Raises `Misuse`, with what to install, where a reference application could not be started."""
    tables = (_SERVING, _OF_APPS.get(app, {}), _OF_STORES.get(store, {}), _OF_DRIVERS.get(driver, {}))
    _check(f"{app} on {store} through {driver}", (each for table in tables for each in table.items()))


def check_client(name: str) -> None:
    """The same for a way into the client."""
    door = door_of(name)
    _check(f"the client {name}", [(door.library, door.extra)])


def _check(what: str, needed: Iterable[tuple[str, str]]) -> None:
    absent = dict(_absent(needed))
    if absent:
        extras = ",".join(dict.fromkeys(absent.values()))
        raise Misuse(
            f"{what} needs {', '.join(absent)}, which is not installed: pip install 'taptwice[{extras}]'"
        )


def _absent(needed: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    return ((module, extra) for module, extra in needed if find_spec(module) is None)
