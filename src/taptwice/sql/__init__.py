"""The statements, by name, one file a dialect; and the migrations that make their tables.

A statement is written once with ``:name`` parameters and compiled once to what a driver wants.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from taptwice.core.plan import Query, Value
from taptwice.errors import Misuse

Dialect = Literal["postgresql", "sqlite"]
Phase = Literal["pre", "post"]
Period = Literal["day"]

_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]+)")


@dataclass(frozen=True, slots=True)
class Statement:
    """A named statement and its parameters, in the order in which each first appears."""

    name: str
    text: str
    parameters: tuple[str, ...]

    @property
    def occurrences(self) -> tuple[str, ...]:
        """The parameters as they stand in the text, each as often as it does."""
        return tuple(_PARAMETER.findall(self.text))

    def compiled(self, placeholder: Callable[[str, int], str]) -> str:
        """The text with each parameter written by ``placeholder(name, position from 1)``."""
        position = {name: number for number, name in enumerate(self.parameters, 1)}
        return _PARAMETER.sub(lambda found: placeholder(found[1], position[found[1]]), self.text)


@cache
def statements(dialect: Dialect) -> Mapping[str, Statement]:
    """All statements of a dialect."""
    text = (files(__package__) / f"{dialect}.sql").read_text()
    found = {}
    for part in text.split("-- name: ")[1:]:
        name, _, body = part.partition("\n")
        lines = (line for line in body.splitlines() if not line.startswith("--"))
        sql = "\n".join(lines).strip().rstrip(";")
        found[name.strip()] = Statement(name.strip(), sql, tuple(dict.fromkeys(_PARAMETER.findall(sql))))
    return found


@dataclass(frozen=True, slots=True)
class Compiled:
    """A statement as one driver takes it."""

    text: str
    parameters: tuple[str, ...]

    def named(self, query: Query) -> dict[str, Value]:
        """The values by name, and perhaps others that this dialect's statement has no use for."""
        return dict(query.parameters)

    def ordered(self, query: Query) -> list[Value]:
        """The values in the order of ``$1, $2, …``."""
        given = dict(query.parameters)
        return [given[name] for name in self.parameters]


def compile_all(dialect: Dialect, placeholder: Callable[[str, int], str]) -> Mapping[str, Compiled]:
    """Every statement of a dialect for one driver; called once when the driver's module is loaded."""
    return {
        name: Compiled(statement.compiled(placeholder), statement.parameters)
        for name, statement in statements(dialect).items()
    }


@dataclass(frozen=True, slots=True)
class Migration:
    """A numbered step. `pre` runs before the code that needs it is deployed, `post` after the old is gone."""

    name: str
    text: str

    @property
    def phase(self) -> Phase:
        """Which half it is, from its name: ``NNN_{pre,post}_*``."""
        return "pre" if self.name.split("_")[1] == "pre" else "post"

    @property
    def statements(self) -> tuple[str, ...]:
        """The single statements, for drivers that take one at a time. A ``$$`` body is never cut."""
        return tuple(part for part in _split(self.text) if part)


MIGRATIONS_TABLE = "CREATE TABLE IF NOT EXISTS taptwice_migrations (name text NOT NULL PRIMARY KEY)"

READ_COMMITTED: Mapping[Dialect, tuple[str, ...]] = {
    "postgresql": ("SET TRANSACTION ISOLATION LEVEL READ COMMITTED",),
    "sqlite": (),
}
"""Whatever the role's default: what is looked up after a wait is no older than its end."""

MIGRATIONS_LOCK: Mapping[Dialect, tuple[str, ...]] = {
    # The number is "taptwice" in ASCII.
    "postgresql": (
        *READ_COMMITTED["postgresql"],
        f"SELECT pg_advisory_xact_lock({int.from_bytes(b'taptwice', 'big')})",
    ),
    "sqlite": (),  # BEGIN IMMEDIATE is the lock
}
"""What makes a transaction the only one that migrates."""


@cache
def migrations(dialect: Dialect) -> tuple[Migration, ...]:
    """All migrations of a dialect in their order."""
    folder = files(__package__) / "migrations" / dialect
    found = [Migration(entry.name.removesuffix(".sql"), entry.read_text()) for entry in folder.iterdir()]
    return tuple(sorted(found, key=lambda migration: migration.name))


def partitioning(dialect: Dialect, by: Period) -> Migration:
    """The optional step that partitions the records by the `by` in which they expire; PostgreSQL only."""
    if dialect != "postgresql":
        raise Misuse(f"records are partitioned on PostgreSQL only, not on {dialect}")
    name = f"option_pre_partition_by_{by}"
    return Migration(name, (files(__package__) / "migrations" / "optional" / f"{name}.sql").read_text())


def _split(text: str) -> list[str]:
    bare = re.sub(r"^\s*--.*$|(?<=[,;\s])--.*$", "", text, flags=re.MULTILINE)
    parts, current = [], ""
    for index, piece in enumerate(re.split(r"(\$\$)", bare)):
        inside_body = index % 4 == 2
        if inside_body or piece == "$$":
            current += piece
            continue
        *ended, rest = piece.split(";")
        for end in ended:
            parts.append((current + end).strip())
            current = ""
        current += rest
    parts.append(current.strip())
    return parts
