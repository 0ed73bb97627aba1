"""Bring a database's tables up to this release: each missing migration in a transaction of its own.

Processes that start together may all do it. One at a time is let in, looks at what is missing only then,
and the last finds nothing to do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from taptwice import sql
from taptwice.core.plan import Begin, Commit, Plan, Query, Script, ask
from taptwice.errors import Misuse
from taptwice.flows.transaction import abandon

TURN = 60.0
"""Seconds to wait for the right to write to a database that has one writer: another may be migrating it."""

BOTH: tuple[sql.Phase, ...] = ("pre", "post")


@dataclass(frozen=True, slots=True)
class Migrated:
    """The names of what was applied now, and of what is still missing because its phase was not asked for."""

    applied: tuple[str, ...]
    waiting: tuple[str, ...]


def migrate(
    dialect: sql.Dialect,
    phases: Collection[sql.Phase] = BOTH,
    known: Sequence[sql.Migration] | None = None,
) -> Plan[Migrated]:
    """Apply, in order, the missing ones of the `known` migrations (by default all) that belong to `phases`.

    Raises `Misuse` when a `post` one would come before a `pre` one that it follows.
    """
    steps = sql.migrations(dialect) if known is None else tuple(known)
    applied: list[str] = []
    while True:
        step, waiting = yield from _turn(dialect, phases, steps)
        if step is None:
            return Migrated(tuple(applied), waiting)
        applied.append(step)


def _turn(
    dialect: sql.Dialect, phases: Collection[sql.Phase], known: Sequence[sql.Migration]
) -> Plan[tuple[str | None, tuple[str, ...]]]:
    """Apply the first that is missing; its name, and the names of those that are left for another phase."""
    try:
        yield from ask(Begin(TURN))
        for text in (*sql.MIGRATIONS_LOCK[dialect], sql.MIGRATIONS_TABLE):
            yield from ask(Script(text))
        rows = yield from ask(Query("applied"))
        missing = [each for each in known if (each.name,) not in rows]
        chosen = next((each for each in missing if each.phase in phases), None)
        if chosen is not None:
            _check_order(chosen, missing)
            for text in chosen.statements:
                yield from ask(Script(text))
            yield from ask(Query("record_migration", (("name", chosen.name),)))
        yield from ask(Commit())
    finally:
        yield from abandon()
    left = tuple(each.name for each in missing if each is not chosen)
    return (None if chosen is None else chosen.name), left


def _check_order(chosen: sql.Migration, missing: Sequence[sql.Migration]) -> None:
    """A `pre` one may overtake a `post` one, which waits for old code to go; never the other way round."""
    first = missing[0]
    if chosen.phase == "post" and first.phase == "pre":
        raise Misuse(
            f"{chosen.name} comes after {first.name}, which is not applied: run `taptwice init --phase pre`"
        )
