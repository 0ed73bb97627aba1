"""Real processes on real databases, killed with SIGKILL before each of their commands and after the last."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.crash.worlds import Case, Database, Postgres, Sqlite, World

ROOT = pathlib.Path(__file__).parents[2]
PLACES = range(1, 15)  # more than there are: those past the end are killed when they have answered

pytestmark = pytest.mark.crash


def check_everywhere(
    where: Callable[[int], str], database: Callable[[int], Database], case: str, apart: bool
) -> list[str]:
    """What the children said before they were killed. Everything that must hold is checked."""
    children = [_start(where(place), place, case, apart) for place in PLACES]
    said = []
    for child in children:
        assert child.stdout
        said.append(child.stdout.readline().strip())
        child.kill()
    for child in children:
        child.communicate()
        assert child.returncode == -9
    for place, line in zip(PLACES, said, strict=True):
        after = database(place)
        # A server may need a moment to notice that its client is dead.
        world = World(after, Case(raises=case == "raises", wait=20), key=f"key-{place}")
        answer = world()
        assert world() == answer
        if line.startswith("answered"):
            assert line == f"answered {answer.body!r}", "what the dead process answered"
        assert world.violations([answer]) == [], line
        after.close()
    return said


def _start(where: str, place: int, case: str, apart: bool) -> subprocess.Popen[str]:
    arguments = [where, f"key-{place}", str(place), case, "apart" if apart else "together"]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.crash.child", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def check_places(said: list[str], commands: set[str]) -> None:
    print("killed:", said)
    assert {line.rpartition(" ")[2] for line in said if line.startswith("stopped")} >= commands
    assert said[-1].startswith("answered"), "more places are needed"


@pytest.mark.parametrize("case", ["kept", "raises"])
def test_sqlite(tmp_path: pathlib.Path, case: str) -> None:
    def folder(place: int) -> pathlib.Path:
        return tmp_path / str(place)

    for place in PLACES:
        folder(place).mkdir()
        Sqlite(folder(place)).close()
    said = check_everywhere(
        lambda place: str(folder(place)), lambda place: Sqlite(folder(place), create=False), case, apart=True
    )
    check_places(said, {"Begin", "Query", "Savepoint", "Effect", "Commit", "Rollback", "Close"})


@pytest.mark.parametrize("case", ["kept", "raises"])
@pytest.mark.parametrize("apart", [True, False], ids=["apart", "pipelined"])
def test_postgresql(fresh_postgres: str, case: str, apart: bool) -> None:
    Postgres(fresh_postgres).close()
    said = check_everywhere(
        lambda _: fresh_postgres, lambda _: Postgres(fresh_postgres, create=False), case, apart
    )
    whole = {"Together", "Effect", "Rollback", "Close"}
    parts = {"Begin", "Query", "Savepoint", "Effect", "Commit", "Rollback", "Close"}
    check_places(said, parts if apart else whole)
