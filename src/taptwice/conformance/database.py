"""The database of a run: made for it, emptied between two cases, read through a connection of its own.

PostgreSQL is reached by the application through a proxy of ours, which can be cut or slowed down; the
runner itself goes straight to the server. SQLite has no server: its faults are the executor's.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import ssl
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from taptwice import drivers, sql
from taptwice.conformance import tables
from taptwice.core.plan import run
from taptwice.core.policy import seconds
from taptwice.errors import Misuse
from taptwice.flows.migrate import migrate


class SqliteDatabase:
    """A file."""

    store = "sqlite"

    def __init__(self, path: Path) -> None:
        self.dsn = str(path)

    async def start(self) -> None:
        with sqlite3.connect(self.dsn) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            for statement in tables.making("sqlite"):
                connection.execute(statement)
        connection.close()
        run(migrate("sqlite"), drivers.source(lambda: sqlite3.connect(self.dsn)).open().execute)

    async def stop(self) -> None:
        """The folder is the caller's."""

    def _execute(self, statements: list[str]) -> list[list[tuple[Any, ...]]]:
        connection = sqlite3.connect(self.dsn, timeout=10, isolation_level=None)
        try:
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("BEGIN IMMEDIATE")
            rows = [connection.execute(statement).fetchall() for statement in statements]
            connection.execute("COMMIT")
            return rows
        finally:
            connection.close()

    async def execute(self, *statements: str) -> list[list[tuple[Any, ...]]]:
        """Run statements in a transaction; the rows of each."""
        return await asyncio.to_thread(self._execute, list(statements))

    async def set_store(self, state: str) -> None:
        """Nothing to be done here: see `Control.check_store`."""


class PostgresqlDatabase:
    """A database on a server that runs, dropped at the end. `own`: the server was started for us.

    `by_day`: its records are partitioned.
    """

    store = "postgresql"

    def __init__(self, server: str, own: bool = False, by_day: bool = False) -> None:
        self._server = server
        self._own = own
        self._by_day = by_day
        self._read_only = False
        self._name = f"taptwice_conformance_{secrets.token_hex(6)}"
        parts = urlsplit(server)
        self._direct = parts._replace(path=f"/{self._name}").geturl()
        self._proxy = Proxy(parts.hostname or "127.0.0.1", parts.port or 5432)
        self._connection: Any = None

    @property
    def dsn(self) -> str:
        parts = urlsplit(self._direct)
        user, at, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{user}{at}127.0.0.1:{self._proxy.port}").geturl()

    async def start(self) -> None:
        import psycopg

        try:
            admin = psycopg.connect(self._server, autocommit=True)
        except psycopg.Error as error:
            raise Misuse(f"--server: {' '.join(str(error).split())}") from error
        with admin:
            admin.execute(f"CREATE DATABASE {self._name} TEMPLATE template0")
        # What the application meets as a read-only server is not meant for us.
        self._connection = psycopg.connect(
            self._direct, autocommit=True, options="-c default_transaction_read_only=off"
        )
        await self.execute(*tables.making("postgresql"))
        optional = (sql.partitioning("postgresql", "day"),) if self._by_day else ()
        steps = migrate("postgresql", known=(*sql.migrations("postgresql"), *optional))
        run(steps, drivers.source(lambda: psycopg.connect(self._direct)).open().execute)
        await self._proxy.start()

    async def stop(self) -> None:
        import psycopg

        await self._proxy.stop()
        if self._connection is not None:
            self._connection.close()
        with psycopg.connect(self._server, autocommit=True) as admin:
            admin.execute(f"DROP DATABASE IF EXISTS {self._name} WITH (FORCE)")

    def _execute(self, statements: tuple[str, ...]) -> list[list[tuple[Any, ...]]]:
        rows: list[list[tuple[Any, ...]]] = []
        with self._connection.transaction():
            for statement in statements:
                cursor = self._connection.execute(statement)
                rows.append(cursor.fetchall() if cursor.description else [])
        return rows

    async def execute(self, *statements: str) -> list[list[tuple[Any, ...]]]:
        """As on SQLite. In a thread: what it waits for may have to pass our proxy."""
        return await asyncio.to_thread(self._execute, statements)

    async def set_store(self, state: str) -> None:
        """up, down, read_only, slow:T."""
        await asyncio.to_thread(self._set_read_only, state == "read_only")
        await self._proxy.set_state(state)

    def _set_read_only(self, wanted: bool) -> None:
        """By the setting of the server, where that is ours; else by that of our database alone."""
        if wanted == self._read_only:
            return
        self._read_only = wanted
        name = "default_transaction_read_only"
        what = f"SET {name} = on" if wanted else f"RESET {name}"
        if self._own:
            self._connection.execute(
                f"ALTER SYSTEM SET {name} = on" if wanted else f"ALTER SYSTEM RESET {name}"
            )
            self._connection.execute("SELECT pg_reload_conf()")
        else:
            what = f"SET {name} = on" if wanted else f"RESET {name}"
            self._connection.execute(f"ALTER DATABASE {self._name} {what}")
        while self._new_sessions_read_only() != wanted:  # a reload is no more than asked for
            time.sleep(0.01)

    def _new_sessions_read_only(self) -> bool:
        import psycopg

        with psycopg.connect(self._direct) as fresh:
            row = fresh.execute("SHOW default_transaction_read_only").fetchone()
        return row == ("on",)


class Proxy:
    """TCP, passed on byte for byte; or not at all, or late. `tls`: it speaks TLS with the target."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._target = (host, port)
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.StreamWriter] = set()
        self._delay = 0.0
        self._down = False
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._link, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._cut()
        if self._server is not None:
            self._server.close()

    async def set_state(self, state: str) -> None:
        """Change what happens to bytes. Connections of before are cut, but where they are to be slow."""
        self._down = state == "down"
        self._delay = seconds(state.partition(":")[2]) if state.startswith("slow") else 0.0
        if not self._delay:
            self._cut()

    def _cut(self) -> None:
        for link in self._links:
            link.transport.abort()
        self._links.clear()

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._down:
            writer.transport.abort()
            return
        try:
            back, forth = await asyncio.open_connection(*self._target, ssl=self._tls)
        except OSError:
            writer.transport.abort()
            return
        self._links |= {writer, forth}
        # Whoever ends first ends the other: a half of a link is none.
        done = {
            asyncio.ensure_future(self._pass(reader, forth)),
            asyncio.ensure_future(self._pass(back, writer)),
        }
        _, left = await asyncio.wait(done, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        for end in (writer, forth):
            end.close()  # what is still to be written is
            self._links.discard(end)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                if self._delay:
                    await asyncio.sleep(self._delay)
                writer.write(data)
                await writer.drain()


Database = SqliteDatabase | PostgresqlDatabase
