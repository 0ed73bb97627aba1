"""Where intents are remembered: an SQLite file, or a table of one's own database.

    intents = IntentStore("intents.db")                 # or a pool, an engine: whatever a guard takes
    client = Client("https://api.example.com", intents=intents)
    client.post("/charges", json=body, intent="order-17")

    with pool.connection() as connection:               # the intent commits with the order, or not at all
        save(order, connection)
        intents.make("order-17", connection=connection)

What an intent is, and what comes of an attempt at one, stands in `taptwice.client.wish`. Without the client
`fulfil` goes around any function that sends a request under a key.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any, TypeVar

from taptwice import drivers
from taptwice.client.loops import in_thread, on_asyncio
from taptwice.client.wish import (
    Keep,
    Remember,
    Response,
    Send,
    Sent,
    Settle,
    Wish,
    checked,
    fingerprint_of,
    with_intent,
)
from taptwice.core.plan import Begin, Close, Command, Commit, Join, Plan, Rollback, Script, arun, ask, run
from taptwice.core.policy import seconds
from taptwice.errors import Contention, Misuse
from taptwice.flows.migrate import migrate
from taptwice.sql import READ_COMMITTED
from taptwice.stores.intents import Intent, SqlIntents

__all__ = ["AsyncIntentStore", "Intent", "IntentStore", "Sent", "Wish", "fingerprint_of"]

Result = TypeVar("Result")

logger = logging.getLogger("taptwice.client")

TURN = 5.0
"""Seconds to wait for the right to write to a database that has one writer."""

BATCH = 1000
"""Intents that are forgotten in one transaction."""

NOT_ON_TRIO = (
    "connections that await do so on asyncio, and this is trio: give the store a path, or a pool, an engine"
    " or a function whose connections block; a thread waits for them"
)

UNSETTLED = "the answer to intent %r could not be kept: whoever asks again will ask the server"


class _Intents:
    """What both stores are told, and their work as plans.

    `origin`: a path (of SQLite; the file is made; ``sqlite:///`` may stand before it), or a pool, engine,
    session maker or function that opens connections to a database where `taptwice init` has made the tables.
    `window`: how long the server remembers a key: seconds, or text as "24h"; None: for ever. `keep` "key":
    answers are not written down, and whoever asks again asks the server.
    """

    def __init__(self, origin: Any, *, window: float | str | None = "24h", keep: Keep = "answer") -> None:
        if keep not in ("answer", "key"):
            raise Misuse(f"keep={keep!r}: choose 'answer' or 'key'")
        self.window = float("inf") if window is None else seconds(window)
        self.keep = keep
        self._source = _file(origin) if isinstance(origin, str | Path) else drivers.source(origin)
        self._table = SqlIntents(self._source.dialect)

    def _remember(self, wish: Wish) -> Plan[Intent | None]:
        try:
            return (yield from self._alone(remembered(self._table, wish)))
        except Contention as error:
            raise Contention(
                f"nothing was sent: another transaction holds intent {wish.name!r}; if it is your own, commit"
                " it first, and then send"
            ) from error

    def _settle(self, command: Settle) -> Plan[None]:
        return self._alone(self._table.settle(command.name, command.key, command.answer))

    def _make(self, name: str) -> Plan[Intent]:
        found = yield from self._table.make(checked(name), str(uuid.uuid4()))
        if found is None:
            raise Contention("another transaction has made this intent: roll back and run yours again")
        return found

    def _within(self, name: str) -> Plan[Intent]:
        yield from ask(Join(TURN))
        return (yield from self._make(name))

    def _get(self, name: str) -> Plan[Intent | None]:
        return self._alone(self._table.look(name))

    def _list(self, open_only: bool, limit: int) -> Plan[tuple[Intent, ...]]:
        return self._alone(self._table.list(open_only=open_only, limit=limit))

    def _drop(self, name: str) -> Plan[Intent | None]:
        return self._alone(dropped(self._table, name))

    def _renew(self, name: str) -> Plan[Intent | None]:
        return self._alone(renewed(self._table, name))

    def _alone(self, plan: Plan[Result]) -> Plan[Result]:
        return alone(self._table, plan)

    def _purge(self, older_than: float | str) -> Plan[int]:
        total, last, age = 0, BATCH, seconds(older_than)
        while last == BATCH:
            last = yield from self._alone(self._table.purge(age, BATCH))
            total += last
        return total


def alone(table: SqlIntents, plan: Plan[Result]) -> Plan[Result]:
    """In a transaction of its own."""
    try:
        yield from ask(Begin(TURN))
        for setting in READ_COMMITTED[table.dialect]:
            yield from ask(Script(setting))
        result = yield from plan
        yield from ask(Commit())
        return result
    finally:
        try:
            yield from ask(Rollback())
        finally:
            yield from ask(Close())


def remembered(table: SqlIntents, wish: Wish) -> Plan[Intent | None]:
    """Bind an intent to its request, unless it was dropped; what it is now."""
    found = yield from table.remember(wish.name, wish.key, wish.request)
    return found or (yield from table.look(wish.name))


def dropped(table: SqlIntents, name: str) -> Plan[Intent | None]:
    """Give an intent up, unless it has its answer; what it is now."""
    _ = yield from table.drop(name)
    return (yield from table.look(name))


def renewed(table: SqlIntents, name: str) -> Plan[Intent | None]:
    """Give an intent a new key; what it is now. Raises `Misuse` if it has succeeded."""
    done = yield from table.renew(name, str(uuid.uuid4()))
    found = yield from table.look(name)
    if found is not None and not done:
        raise Misuse(f"intent {name!r} has succeeded: who wants the same once more gives it a new name")
    return found


class IntentStore(_Intents):
    """Remembers intents; blocking. Threads and processes may share what is beneath it."""

    def __init__(self, origin: Any, *, window: float | str | None = "24h", keep: Keep = "answer") -> None:
        super().__init__(origin, window=window, keep=keep)
        if not self._source.blocking:
            raise Misuse(f"{type(origin).__qualname__} awaits: use AsyncIntentStore")

    def fulfil(self, wish: Wish, send: Callable[[str], Sent[Response]]) -> Sent[Response] | Intent:
        """Carry a wish out: `send` is given the key. Where an answer is remembered, the intent comes back.

        Raises `IntentChanged`, `IntentTooOld`, `IntentDropped`, `StoreUnavailable` or `Contention` before
        anything is sent. What `send` raises goes through, and the intent stays open.
        """

        def execute(command: Command[Any]) -> Any:
            match command:
                case Remember():
                    return self._drive(self._remember(command.wish))
                case Send():
                    return send(command.key)
                case Settle():
                    try:
                        return self._drive(self._settle(command))
                    except Exception:
                        return logger.warning(UNSETTLED, command.name, exc_info=True)
            raise AssertionError(command)

        return run(with_intent(wish, self.window, self.keep), execute)

    def make(self, name: str, *, connection: Any = None) -> Intent:
        """Write down an intent that is sent later. One that is there stays as it is, and comes back.

        `connection`: the caller's own, in a transaction; the intent is there when that commits. Send after
        the commit, not before.
        """
        if connection is None:
            return self._drive(self._alone(self._make(name)))
        executor = drivers.join(connection)
        if iscoroutinefunction(executor.execute):
            raise Misuse(f"{type(connection).__qualname__} awaits: use AsyncIntentStore")
        return run(self._within(name), executor.execute)

    def get(self, name: str) -> Intent | None:
        """The intent of this name."""
        return self._drive(self._get(name))

    def list(self, *, open: bool = True, limit: int = 100) -> tuple[Intent, ...]:
        """Those not answered and not given up, the oldest first. `open` False: all, the newest first."""
        return self._drive(self._list(open, limit))

    def drop(self, name: str) -> Intent | None:
        """Give an intent up: it is not sent again. One that is done stays done. None: it is not there."""
        return self._drive(self._drop(name))

    def renew(self, name: str) -> Intent | None:
        """Give an intent a new key. What it stands for may then be done a second time: find out before.

        Raises `Misuse` if it has succeeded. None: it is not there.
        """
        return self._drive(self._renew(name))

    def purge(self, older_than: float | str) -> int:
        """Forget those that ended longer ago; how many there were. After that their names are new."""
        return self._drive(self._purge(older_than))

    def _drive(self, plan: Plan[Result]) -> Result:
        return run(plan, self._source.open().execute)


class AsyncIntentStore(_Intents):
    """As `IntentStore`, awaiting. Where the connections block (an SQLite file) a thread waits for them.

    On trio they must: the drivers whose connections await are all asyncio's.
    """

    async def fulfil(
        self, wish: Wish, send: Callable[[str], Awaitable[Sent[Response]]]
    ) -> Sent[Response] | Intent:
        """As `IntentStore.fulfil`."""

        async def execute(command: Command[Any]) -> Any:
            match command:
                case Remember():
                    return await self._drive(self._remember(command.wish))
                case Send():
                    return await send(command.key)
                case Settle():
                    try:
                        return await self._drive(self._settle(command))
                    except Exception:
                        return logger.warning(UNSETTLED, command.name, exc_info=True)
            raise AssertionError(command)

        return await arun(with_intent(wish, self.window, self.keep), execute)

    async def make(self, name: str, *, connection: Any = None) -> Intent:
        """As `IntentStore.make`."""
        if connection is None:
            return await self._drive(self._alone(self._make(name)))
        executor = drivers.join(connection)
        if not iscoroutinefunction(executor.execute):
            raise Misuse(f"{type(connection).__qualname__} blocks: use IntentStore")
        if not on_asyncio():
            raise Misuse(NOT_ON_TRIO)
        return await arun(self._within(name), executor.execute)

    async def get(self, name: str) -> Intent | None:
        """As `IntentStore.get`."""
        return await self._drive(self._get(name))

    async def list(self, *, open: bool = True, limit: int = 100) -> tuple[Intent, ...]:
        """As `IntentStore.list`."""
        return await self._drive(self._list(open, limit))

    async def drop(self, name: str) -> Intent | None:
        """As `IntentStore.drop`."""
        return await self._drive(self._drop(name))

    async def renew(self, name: str) -> Intent | None:
        """As `IntentStore.renew`."""
        return await self._drive(self._renew(name))

    async def purge(self, older_than: float | str) -> int:
        """As `IntentStore.purge`."""
        return await self._drive(self._purge(older_than))

    async def _drive(self, plan: Plan[Result]) -> Result:
        execute = self._source.open().execute
        if self._source.blocking:
            # The whole transaction: one that is half done would be the next caller's to wait for.
            return await in_thread(partial(run, plan, execute))
        if not on_asyncio():
            raise Misuse(NOT_ON_TRIO)
        return await arun(plan, execute)


def _file(origin: str | Path) -> drivers.Source:
    """Connections to an SQLite file, one for each transaction. The file and its tables are made."""
    named = str(origin)
    if match := re.fullmatch(r"sqlite(?:\+\w+)?:///([^?:]+)", named):
        named = match[1]
    if named == ":memory:" or ":/" in named:
        scheme, _, rest = named.partition("://")
        shown = f"{scheme}://…" if "@" in rest else named  # there may be a password
        raise Misuse(f"{shown}: give the path of a file; or a pool, an engine or a function that connects")
    path = Path(named)
    import sqlite3

    from taptwice.drivers import sqlite

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(path, check_same_thread=False)
        connection.execute("PRAGMA synchronous = full")  # a key that a power failure takes is a second effect
        return connection

    source = sqlite.connecting(connect)
    _ = run(migrate("sqlite"), source.open().execute)
    return source
