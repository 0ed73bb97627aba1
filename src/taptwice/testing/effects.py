"""What a request has done to the database: readings, and the change from one to the next, in words."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from decimal import Decimal
from numbers import Number
from typing import Any, TypeAlias

from taptwice import drivers
from taptwice.core.plan import Begin, Close, Rollback
from taptwice.errors import Misuse

Reading: TypeAlias = Mapping[str, Any]
"""Of each thing that is counted: a number, or the `Counter` of its rows."""
Change: TypeAlias = Mapping[str, str]
"""What is different, by name, in words; equal words are equal effects."""

WAIT = 5.0
"""Seconds that a reading waits on a database with one writer."""

Counting: TypeAlias = Callable[[], Any | Awaitable[Any]]
"""Counts effects: gives a number, rows, or a mapping of names to either."""


class Effects:
    """Counts the effects in a database: give it to the assertions as ``effects=``.

    Effects(engine, "charges", "SELECT sum(cents) FROM wallets")

    `database` is what `Idempotency` takes: an engine, pool or session maker, or a function that opens a
    connection. `what`: names of tables, whose rows are compared, and SELECTs. List whatever a request may
    change; a table in which each request leaves its time is not for here.

    Raises `Misuse` for anything else.
    """

    def __init__(self, database: Any, *what: str) -> None:
        if not what:
            raise Misuse("Effects needs something to count: names of tables, or SELECT statements")
        self._database = database
        self._selects = {each: _select(each) for each in what}

    def __call__(self) -> Any:
        """A reading; a coroutine where the database awaits."""
        source = drivers.source(self._database)
        return self._read(source.open()) if source.blocking else self._read_awaiting(source.open())

    def _read(self, executor: Any) -> Reading:
        try:
            executor.execute(Begin(WAIT))
            return {
                name: _value(_asked(executor.handle, select).fetchall(), is_table=select != name)
                for name, select in self._selects.items()
            }
        finally:
            executor.execute(Rollback())
            executor.execute(Close())

    async def _read_awaiting(self, executor: Any) -> Reading:
        reading = {}
        try:
            await executor.execute(Begin(WAIT))
            for name, select in self._selects.items():
                found = await _asked(executor.handle, select)
                rows = found if isinstance(found, list) else found.fetchall()
                rows = await rows if inspect.isawaitable(rows) else rows
                reading[name] = _value(rows, is_table=select != name)
            return reading
        finally:
            await executor.execute(Rollback())
            await executor.execute(Close())


def _select(what: str) -> str:
    if re.match(r"(?i)\s*(select|with|values)\s", what):
        return what
    if re.fullmatch(r'[\w."]+', what) is None:
        raise Misuse(f"Effects counts tables and SELECT statements; this is neither: {what!r}")
    return f"SELECT * FROM {what}"  # noqa: S608 - the test's own words


def _asked(handle: Any, select: str) -> Any:
    """The cursor, or the rows at once; to be awaited where the connection awaits."""
    if hasattr(handle, "fetchrow"):  # asyncpg
        return handle.fetch(select)
    if type(handle).__module__.startswith("sqlalchemy"):
        from sqlalchemy import text

        return handle.execute(text(select))
    return handle.execute(select)


def _value(rows: Iterable[Any], is_table: bool) -> Any:
    found = list(rows)
    if not is_table and len(found) == 1 and len(found[0]) == 1:
        [value] = _values(found[0])
        if value is None or _is_number(value):
            return _exact(value or 0)  # the sum of no rows is NULL
    return _counted(found)


def _counted(rows: Iterable[Any]) -> Counter[tuple[Any, ...]]:
    """Rows as they can be compared, whatever the connection makes of them: numbers, and texts of the rest."""
    return Counter(
        tuple(_exact(value) if _is_number(value) else repr(value) for value in _values(row)) for row in rows
    )


def _values(row: Any) -> Iterable[Any]:
    return row.values() if isinstance(row, Mapping) else row


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) and not isinstance(value, bool | complex)


def _exact(number: Any) -> Decimal:
    return Decimal(str(number))


def reading_of(counted: Any) -> Reading:
    """The reading that a callable of the test gives. Raises `Misuse` for what cannot be compared."""
    if isinstance(counted, Mapping):
        return {str(name): _comparable(value) for name, value in counted.items()}
    return {"effects": _comparable(counted)}


def _comparable(value: Any) -> Any:
    if isinstance(value, Counter):
        return value
    if _is_number(value):
        return _exact(value)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        return _counted(
            row if isinstance(row, Iterable) and not isinstance(row, str) else (row,) for row in value
        )
    raise Misuse(
        f"effects must give a number, rows, or a mapping of names to either, not {type(value).__name__}"
    )


def change(before: Reading, after: Reading) -> Change:
    """What is different in the second reading; empty: nothing."""
    found: dict[str, str] = {}
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if isinstance(old, Counter) or isinstance(new, Counter):
            found[name] = _rows(old or Counter(), new or Counter())
        else:
            found[name] = f"{(new or Decimal(0)) - (old or Decimal(0)):+f}"
    return found


def _rows(before: Counter[tuple[Any, ...]], after: Counter[tuple[Any, ...]]) -> str:
    gone, new = before - after, after - before
    changed = min(gone.total(), new.total())
    words = [
        f"{number} {'row' if number == 1 else 'rows'} {what}"
        for number, what in (
            (new.total() - changed, "added"),
            (gone.total() - changed, "removed"),
            (changed, "changed"),
        )
        if number
    ]
    if gone.total() == new.total():  # rows were updated: one of "balance = balance - 5" is not like two
        words += _sums(gone, new)
    return ", ".join(words)


def _sums(gone: Counter[tuple[Any, ...]], new: Counter[tuple[Any, ...]]) -> Iterable[str]:
    width = max(map(len, new))
    for column in range(width):
        difference = _sum(new, column) - _sum(gone, column)
        if difference:
            yield f"column {column + 1} by {difference:+f}"


def _sum(rows: Counter[tuple[Any, ...]], column: int) -> Decimal:
    numbers = ((row[column], times) for row, times in rows.items())
    return sum((value * times for value, times in numbers if isinstance(value, Decimal)), Decimal(0))


def words(found: Change) -> str:
    """A change for a message."""
    return "; ".join(f"{name}: {what}" for name, what in found.items()) or "nothing"
