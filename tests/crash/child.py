"""The process that test_kill.py kills: one attempt, which stops at a command and waits for its end."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

from taptwice.core.plan import Command, Together, run
from tests.crash.worlds import Case, Postgres, Sqlite, World


class Stopping:
    """An executor that stops before its n-th command. `apart`: the parts of a Together count."""

    def __init__(self, inner: Any, place: int, apart: bool) -> None:
        self._inner = inner
        self._left = place
        self._apart = apart

    def execute(self, command: Command[Any], /) -> Any:
        if isinstance(command, Together) and self._apart:
            return tuple(self.execute(each) for each in command.commands)
        self._left -= 1
        if self._left == 0:
            print("stopped before", type(command).__name__, flush=True)
            sys.stdin.read()
        return self._inner.execute(command)


def main(where: str, key: str, place: str, case: str, apart: str) -> None:
    database = (
        Postgres(where, create=False)
        if where.startswith("postgres")
        else Sqlite(pathlib.Path(where), create=False)
    )
    world = World(database, Case(raises=case == "raises"), key=key, first=100)
    executor = Stopping(world.source.open(), int(place), apart == "apart")
    print("answered", run(world.plan(), executor.execute).body, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
