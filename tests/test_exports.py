"""The public names: each is there once and documented, and importing the package loads nothing else."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import pathlib
import subprocess
import sys

import pytest

import taptwice
from taptwice import errors

HEAVY = (
    "aiosqlite",
    "asyncpg",
    "click",
    "fastapi",
    "flask",
    "http_sf",
    "psycopg",
    "psycopg_pool",
    "pydantic",
    "sqlalchemy",
    "sqlite3",
    "starlette",
    "uvicorn",
    "werkzeug",
)


def loaded_by(program: str) -> set[str]:
    """The modules that are loaded after this program, in a new process."""
    whole = f"{program}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_loads_no_driver_and_no_framework() -> None:
    loaded = loaded_by("import taptwice")
    assert not loaded & {*HEAVY, "asyncio", "json", "logging", "typing"}
    assert {name for name in loaded if name.startswith("taptwice")} == {"taptwice"}


def test_not_even_all_names_together_do() -> None:
    loaded = loaded_by("from taptwice import *")
    assert not loaded & (set(HEAVY) - {"http_sf"})


def test_the_client_loads_no_library_of_its_doors() -> None:
    doors = {"httpx", "httpx2", "requests", "urllib3", "aiohttp", "grpc"}
    assert not loaded_by("from taptwice.client import *") & (doors | set(HEAVY) - {"http_sf"})


def test_every_name_is_there_once_and_in_order() -> None:
    assert taptwice.__all__ == sorted(taptwice.__all__)
    assert len(set(taptwice.__all__)) == len(taptwice.__all__)
    things = {name: getattr(taptwice, name) for name in taptwice.__all__}
    assert len({id(thing) for thing in things.values()}) == len(things)
    assert set(taptwice.__all__) <= set(dir(taptwice))


@pytest.mark.parametrize(
    "name", [name for name in taptwice.__all__ if name not in ("__version__", "Listener")]
)
def test_every_name_is_documented_and_has_its_own_home(name: str) -> None:
    thing = getattr(taptwice, name)
    assert thing.__name__ == name
    assert thing.__module__.startswith("taptwice.")
    assert inspect.getdoc(thing)
    assert getattr(sys.modules[thing.__module__], name) is thing


def test_what_type_checkers_see_is_what_is_there() -> None:
    tree = ast.parse(pathlib.Path(taptwice.__file__).read_text())
    [typed] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: f"taptwice.{statement.module.removeprefix('taptwice.')}"
        for statement in typed.body
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
    }
    assert set(seen) == set(taptwice.__all__) - {"__version__"}
    for name, home in seen.items():
        assert getattr(importlib.import_module(home), name) is getattr(taptwice, name)


def test_the_errors_are_all_in_one_tree_and_the_drawing_shows_them() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, errors.TaptwiceError)
        assert inspect.getdoc(kind)
        assert name in (errors.__doc__ or "")
    named = {name for name in taptwice.__all__ if name in errors.__all__}
    never_raised_at_users = {"ConstraintViolated", "Inseparable"}
    assert not named & never_raised_at_users


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Gaurd'"):
        _ = taptwice.Gaurd


def test_the_version_is_that_of_the_distribution() -> None:
    assert taptwice.__version__ == importlib.metadata.version("taptwice")
